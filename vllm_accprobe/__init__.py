"""accprobe: finds out why a model served by vLLM gives other numbers on one machine than on another.

The public names are loaded when first used, so that ``import vllm_accprobe`` costs nothing where the probe is off.
"""

from __future__ import annotations

import sys

_SAFE = bool(sys.flags.isolated) or bool(getattr(sys.flags, "safe_path", False))
if sys.argv[:1] == ["-m"] and "vllm_accprobe" in "".join(sys.orig_argv[-len(sys.argv) :][:1]) and not _SAFE:
    # `python -m vllm_accprobe.cli`, which Python is about to search for: it has put the current directory first on the
    # path, and that may be a stranger's dump with a numpy.py in it. Where we are is known by now.
    del sys.path[0]

import importlib  # noqa: E402
from typing import Any  # noqa: E402

__version__ = "0.1.0"

_WHERE = {
    "Probe": "vllm_accprobe.capture.torch_model",
    "register_hook": "vllm_accprobe.capture.torch_model",
    "DumpConfig": "vllm_accprobe.config",
    "ProbeConfig": "vllm_accprobe.config",
    "PrecisionDebugger": "vllm_accprobe.debugger",
    "gen_id": "vllm_accprobe.labels",
    "set_label": "vllm_accprobe.labels",
    "set_task_id": "vllm_accprobe.labels",
    "open_dump": "vllm_accprobe.formats",
    "atb_json_to_onnx": "vllm_accprobe.topology.model_graph",
    "begin_dump": "vllm_accprobe.capture.ops.begin_end",
    "compare": "vllm_accprobe.comparison.engine",
    "end_dump": "vllm_accprobe.capture.ops.begin_end",
}

__all__ = [
    "DumpConfig",
    "PrecisionDebugger",
    "Probe",
    "ProbeConfig",
    "__version__",
    "atb_json_to_onnx",
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
