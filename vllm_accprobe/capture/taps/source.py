"""Where a module's forward is written: ``vllm/model_executor/layers/linear.py:1391``.

The problem: a verdict names a module, and a person looks for the code. The idea: the code that Python runs knows its
file and first line, and its module's dotted name is the end of the file's path, so that no path of this machine is
written down. An operator that chooses one of several implementations when it is built (vLLM's CustomOp) has the one
that it chose. It is asked once for each module, when taps are put on, and reads no file.
Not here: the line that it is written in (taps/hooks.py, dump/schema.py).
"""

from __future__ import annotations

import inspect
from pathlib import PurePath
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LONGEST = 300


def source_of(module: torch.nn.Module) -> str | None:
    """``package/file.py:line`` of the forward of ``module``, or None for one that is not written in Python."""
    for forward in (module.__dict__.get("_forward_method"), getattr(type(module), "forward", None)):
        found = _place(forward)
        if found is not None:
            return found
    return None


def _place(forward: Any) -> str | None:
    try:
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        code = getattr(function, "__code__", None)
    except ValueError:  # wrapped in itself
        return None
    if not isinstance(code, CodeType):
        return None
    path = PurePath(code.co_filename)
    parts = str(getattr(function, "__module__", "")).split(".")
    own = path.with_suffix("").parts
    whole = next((p for p in (parts, [*parts, "__init__"]) if own[-len(p) :] == tuple(p)), None)
    name = "/".join(whole) + path.suffix if whole is not None else path.name
    return f"{name}:{code.co_firstlineno}"[-_LONGEST:]
