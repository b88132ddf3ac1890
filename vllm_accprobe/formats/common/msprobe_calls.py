"""msprobe's API records as operator calls, so that they can be run again.

The problem: a record of an API (``Functional.linear.0.forward``, ``Mint.add.3.forward``) holds its arguments as a list
and a dictionary of descriptions, tensors and plain values mixed. The idea: the same VALUES that our own dumps use for
operators (dump/opcalls.py), with the roles that the record's tensors have. What cannot be said in them is an argument
that was not kept. In a dump of MindSpore, methods and ``ops`` bear PyTorch's names and are other functions; they get
names of their own. Not here: the records (msprobe.py), which function a name means (opcheck/references/api.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_accprobe.formats.common.foreign import torch_dtype
from vllm_accprobe.formats.common.msprobe_words import INPUTS, KEYWORDS, STATS

_PLAIN = ("int", "bool", "str", "NoneType", "None")
_INDEX = (int, type(None))
_DEEPEST = 6


def arguments(record: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, by keyword) VALUES of a record's arguments; a tensor's role is its record's, ``input.<place>``."""
    given = record.get(INPUTS, record.get("input"))
    args = tuple(_value(v, f"input.{i}", 0) for i, v in enumerate(_listed(given)))
    kwargs = record.get(KEYWORDS)
    named = kwargs.items() if isinstance(kwargs, dict) else ()
    return args, {str(k): _value(v, f"input.{k}", 0) for k, v in named}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else () if value is None else (value,)


def _value(value: Any, role: str, depth: int) -> Any:
    if depth > _DEEPEST:
        return {"skipped": "nested too deeply", "role": role}
    if isinstance(value, list):
        return {"list": [_value(v, f"{role}.{i}", depth + 1) for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return _float(value)
    if not isinstance(value, dict):
        return {"skipped": "of an unknown kind", "role": role}
    if "dtype" in value and "shape" in value:
        return _tensor(value, role)
    if "type" in value and "value" in value:
        return _described(str(value["type"]), value["value"], role)
    return {"skipped": "a dictionary", "role": role}


def _tensor(info: Mapping[str, Any], role: str) -> Any:
    shape = info["shape"]
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        return {"skipped": "a tensor without a shape", "role": role}
    dtype = torch_dtype(str(info["dtype"]))
    found: dict[str, Any] = {"role": role, "dtype": dtype, "shape": shape, "count": math.prod(shape)}
    for ours in ("min", "max", "mean", "l2"):
        number = info.get(STATS[ours])
        if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number):
            found[ours] = number
    return {"tensor": found}


def _described(kind: str, value: Any, role: str) -> Any:
    """``{"type": kind, "value": value}``."""
    if kind in _PLAIN and (value is None or isinstance(value, (bool, int, str))):
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _float(float(value))
    if kind.endswith(".dtype") and isinstance(value, str):
        return {"dtype": torch_dtype(value)}
    if kind == "torch.device" and isinstance(value, str):
        return {"device": value}
    if kind in ("torch.memory_format", "torch.layout") and isinstance(value, str):
        return {kind.removeprefix("torch."): value.removeprefix("torch.")}
    if kind == "complex" and isinstance(value, list) and [type(v) in (int, float) for v in value] == [True, True]:
        return {"complex": [_float(float(v)) for v in value]}
    if kind == "torch.Size" and isinstance(value, list) and all(type(n) is int for n in value):
        return {"list": list(value)}
    if kind == "slice" and isinstance(value, list) and len(value) == 3 and all(type(n) in _INDEX for n in value):
        return {"slice": list(value)}
    if kind == "ellipsis":
        return {"ellipsis": True}
    return {"skipped": f"a {kind[:40]}", "role": role}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}
