"""accprobe: finds out why a model served by vLLM gives other numbers on one machine than on another.

The public names are loaded when first used, so that ``import vllm_accprobe`` costs nothing where the probe is off.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "Probe": "vllm_accprobe.capture.probe",
    "register_hook": "vllm_accprobe.capture.probe",
    "DumpConfig": "vllm_accprobe.config",
    "ProbeConfig": "vllm_accprobe.config",
    "PrecisionDebugger": "vllm_accprobe.debugger",
    "gen_id": "vllm_accprobe.labels",
    "set_label": "vllm_accprobe.labels",
    "set_task_id": "vllm_accprobe.labels",
    "open_dump": "vllm_accprobe.formats",
    "begin_dump": "vllm_accprobe.capture.op_dump",
    "compare": "vllm_accprobe.comparison.engine",
    "end_dump": "vllm_accprobe.capture.op_dump",
}

__all__ = [
    "DumpConfig",
    "PrecisionDebugger",
    "Probe",
    "ProbeConfig",
    "__version__",
    "begin_dump",
    "compare",
    "end_dump",
    "gen_id",
    "open_dump",
    "register_hook",
    "set_label",
    "set_task_id",
]


def __getattr__(name: str) -> Any:
    try:
        module = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), name)
