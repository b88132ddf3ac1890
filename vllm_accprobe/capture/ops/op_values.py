"""From what an operator was called with to the VALUES of the dump (dump/opcalls.py).

The problem: arguments are tensors, lists of them, scalars, dtypes, devices, generators and handles of libraries, and
whoever replays the call has only words. The idea: one walk gives the VALUE and, beside it, every tensor with its role
and the dict that describes it, to which its statistics are added later. What cannot be said is named, never guessed.
Not here: which tensors are stored (op_tensors.py), how a VALUE is read (dump/opcalls.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

MOST_ITEMS = 1024
"""A longer list of an argument is not written."""
_DEPTH = 4

Found = list[tuple[str, torch.Tensor, dict[str, Any]]]
"""Role, tensor and the dict in its VALUE, in order."""

_words: dict[Any, str] = {}


def word(thing: Any) -> str:
    """``torch.bfloat16`` → ``bfloat16``; devices as they print. Remembered: printing costs a microsecond."""
    text = _words.get(thing)
    if text is None:
        text = _words[thing] = str(thing).replace("torch.", "")
    return text


def describe(role: str, tensor: torch.Tensor) -> dict[str, Any]:
    """What is said of every tensor, whatever becomes of its values."""
    strided = tensor.layout is torch.strided
    return {
        "role": role,
        "dtype": word(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()) if strided else [],
        "device": word(tensor.device),
    }


def inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Found) -> tuple[list[Any], dict[str, Any]]:
    """The VALUES of a call's arguments; their tensors are appended to ``found``."""
    values = [value(f"input.{i}", arg, found) for i, arg in enumerate(args)]
    named = {name: value(f"input.{name}", arg, found) for name, arg in kwargs.items()}
    return values, named


def outputs(result: Any, found: Found) -> list[Any]:
    """The VALUES of what came out: one for each thing returned."""
    if result is None:
        return []
    if isinstance(result, tuple):
        return [value(f"output.{i}", item, found) for i, item in enumerate(result)]
    return [value("output.0", result, found)]


def value(role: str, arg: Any, found: Found, depth: int = 0) -> Any:
    """The VALUE of one argument."""
    if isinstance(arg, torch.Tensor):
        about = describe(role, arg)
        found.append((role, arg, about))
        return {"tensor": about}
    kind = type(arg)
    if arg is None or kind is bool or kind is str:
        return arg
    if kind is int:
        return arg if abs(arg) < 1 << 53 else {"skipped": f"an integer of {arg.bit_length()} bits"}
    if kind is float:
        return _number(arg)
    if kind is complex:
        return {"complex": [_number(arg.real), _number(arg.imag)]}
    if isinstance(arg, (list, tuple)):
        if len(arg) > MOST_ITEMS or depth >= _DEPTH:
            return {"skipped": f"a list of {len(arg)} items"}
        return {"list": [value(f"{role}.{i}", item, found, depth + 1) for i, item in enumerate(arg)]}
    if kind is torch.dtype:
        return {"dtype": word(arg)}
    if kind is torch.device:
        return {"device": word(arg)}
    if kind is torch.layout:
        return {"layout": word(arg)}
    if kind is torch.memory_format:
        return {"memory_format": word(arg)}
    if kind is torch.SymInt or kind is torch.SymFloat or kind is torch.SymBool:
        return {"skipped": "a symbolic number"}
    if kind.__name__ == "LayerName" and isinstance(name := getattr(arg, "value", None), str):
        return name  # vLLM's wrapper of a module's path
    return {"skipped": f"a {kind.__name__}"}


def _number(number: float) -> Any:
    return number if math.isfinite(number) else {"float": repr(number)}
