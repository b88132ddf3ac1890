"""Arguments of a call that FlashInfer's flight recorder saved, as the VALUES of an operator call.

The problem: tensors have keys (``arg_1``, ``arg_1__0`` in a list, ``kwarg_scale``, ``result_0``), everything else is
JSON of the recorder's own kind, ``{"type": "torch.dtype", "value": "torch.bfloat16"}``, and which argument is a buffer
for the result stands only in the function's signature. The idea: a key is turned into a role, a value into one of ours
or into ``skipped`` with the reason, and the signature is cut at its outer commas, never evaluated.
Source: flashinfer/api_logging.py of 0.7.2, _extract_value_for_dump and _serialize_value.
Not here: folders and files (formats/flashinfer.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from vllm_accprobe.formats.common.foreign import torch_dtype
from vllm_accprobe.formats.io.plain_file import FileTensor

_KEY = re.compile(
    r"(?:arg_([0-9]{1,4})|kwarg_([A-Za-z][A-Za-z0-9_]{0,79}?)|(result)(?:_([0-9]{1,4}))?)((?:__[0-9]{1,6})*)"
)
_OUT = "out"
_DEEPEST = 6
_LONGEST = 1 << 14


def role_of(key: str) -> str | None:
    """``input.1``, ``input.1.0``, ``input.scale``, ``output.0``; None for what is no key of the recorder."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    inner = found[5].replace("__", ".")
    if found[3]:
        return f"output.{int(found[4])}{inner}" if found[4] else f"output{inner or '.0'}"
    return f"input.{int(found[1]) if found[1] else found[2]}{inner}"


def buffers(told: Mapping[str, Any]) -> set[str]:
    """Keys under which the argument ``out`` may lie: what it holds before the call means nothing."""
    names = parameters(str(told.get("function_signature", "")))
    return {f"kwarg_{_OUT}", *(f"arg_{i}" for i, name in enumerate(names) if name == _OUT)}


def parameters(signature: str) -> list[str]:
    """Names of the positional parameters of ``(a: torch.Tensor, b: Union[int, str] = 1, *, c) -> torch.Tensor``."""
    names, depth, begin = [], 0, 1
    for at, letter in enumerate(signature[:_LONGEST]):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if depth == 0 or (depth == 1 and letter == ","):
            names.append(re.split(r"[:=]", signature[begin:at], maxsplit=1)[0].strip())
            begin = at + 1
        if depth == 0:
            break
    return names[: next((i for i, n in enumerate(names) if n.startswith("*")), len(names))]


def arguments(
    told: Mapping[str, Any], held: Mapping[str, FileTensor], unwritten: Collection[str], why: str = ""
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, by keyword) VALUES. held: tensors of the files by role; why: the reason why no tensor is what the
    call was given, "" where they are."""
    plain = told.get("input_metadata")
    plain = plain if isinstance(plain, dict) else {}
    maker = _RecordedValues(held, {role_of(k) for k in unwritten}, why)
    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    roles = {**{r: None for r in held if r.startswith("input.") and r.count(".") == 1},
             **{r: v for k, v in plain.items() if (r := role_of(k)) and r.startswith("input.")}}  # fmt: skip
    for role, value in roles.items():
        made = maker.tensor(role) if role in held else maker.value(value, role, 0)
        name = role.removeprefix("input.")
        if name.isdecimal():
            args[int(name)] = made
        elif "." not in name:
            kwargs[name] = made
    missing = {"skipped": "neither a tensor nor a value was saved"}
    return tuple(args.get(i, missing) for i in range(max(args, default=-1) + 1)), kwargs


class _RecordedValues:
    def __init__(self, held: Mapping[str, FileTensor], unwritten: Collection[str | None], why: str):
        self.held, self.unwritten, self.why = held, unwritten, why

    def tensor(self, role: str) -> Any:
        item = self.held[role]
        if self.why and role not in self.unwritten:
            return {"skipped": self.why, "role": role}
        fresh = {"fresh": True} if role in self.unwritten else {}
        return {"tensor": {"role": role, "dtype": item.dtype, "shape": list(item.shape), **fresh}}

    def value(self, value: Any, role: str, depth: int) -> Any:
        if depth > _DEEPEST:
            return {"skipped": "nested too deeply", "role": role}
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "torch.dtype":
            return {"dtype": torch_dtype(str(value.get("value")))}
        if kind == "enum" and isinstance(value.get("value"), (int, str)):
            return value["value"]
        items = value.get("items") if kind in ("list", "tuple") else None
        if isinstance(items, list) and not value.get("truncated"):
            return {"list": [self.value(v, f"{role}.{i}", depth + 1) for i, v in enumerate(items)]}
        if kind == "torch.Tensor" and (found := role_of(str(value.get("tensor_key")))) in self.held and found:
            return self.tensor(found)
        return {"skipped": f"a {str(kind)[:40]}", "role": role}
