"""The references themselves, one file per family of operators; each names its formula's source.

Not here: how a call finds its reference (opcheck/reference.py).
"""

from __future__ import annotations

import importlib
from types import ModuleType

FAMILIES = (
    "norms", "linear", "activations", "rotary", "embedding", "sampling", "attention", "mla", "moe",
    "vision", "composite", "collectives", "hf", "aten", "api",
    "engine_ops",
)  # fmt: skip


def families() -> list[ModuleType]:
    """The modules, imported now: they need torch."""
    return [importlib.import_module(f"{__name__}.{name}") for name in FAMILIES]
