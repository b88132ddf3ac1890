"""Which calls a pre-check leaves out: by lists of API names, and those that another call stands for.

The problem: msprobe's lists name APIs (``linear``), not places; a model makes the same call in every layer. The idea: a
call is known by the names under which msprobe's documents would know it; and calls of one rank whose operator,
arguments and tensors' shapes and dtypes are equal, whatever their values' range, are checked once, the first of them
standing for the others ("same parameters and structures except the maximum and minimum values"). What is left out is a
row with the reason. Not here: the settings (check_config.py), globs over places (calls/records.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_accprobe.standards.msprobe_apis import api_of

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.records import Calls

Place = tuple[int, str, "int | None", int]
"""Rank, tap, step, ordinal."""
_VALUES = ("count", "min", "max", "mean", "l2", "nan", "inf", "hash", "after")
"""Of a tensor's VALUE (dump/opcalls.py): what its elements tell."""


def names_of(cls: str) -> set[str]:
    """The API names of a class or operator: ``Functional.linear`` is linear, ``aten.mm.default`` mm."""
    rest = cls.removeprefix("torch.ops.").partition(".")[2]
    return {cls, api_of(cls), *([rest, rest.partition(".")[0]] if rest else [])}


def left_out(cls: str, white: Sequence[str], black: Sequence[str]) -> str:
    """Why the lists leave an API out, "" where they do not. One that is in both lists is left out."""
    names = names_of(cls)
    if names & set(black):
        return "in black_list"
    return "" if not white or names & set(white) else "not in white_list"


def duplicates(calls: Calls) -> dict[Place, str]:
    """Each call that an earlier one stands for, and that one's name."""
    first: dict[str, str] = {}
    found: dict[Place, str] = {}
    for _, place, cls, signature in sorted(_signatures(calls), key=lambda s: s[0]):
        key = f"{place[0]}|{cls}|{signature}"
        name = f"{place[1]}, step {place[2]}, call {place[3]}"
        if key in first:
            found[place] = first[key]
        else:
            first[key] = name
    return found


def _signatures(calls: Calls) -> list[tuple[tuple[int, int, int], Place, str, str]]:
    found = []
    for (rank, tap), ops in calls.ops.items():
        for op in ops:
            text = json.dumps([[_plain(a) for a in op.args], {k: _plain(v) for k, v in op.kwargs.items()}], default=str)
            found.append(((rank, op.step or 0, op.seq), (rank, tap, op.step, op.call), op.op, text))
    for (rank, tap), by_call in calls.by_tap.items():
        module = calls.modules.get(rank, {}).get(tap)
        cls = calls.cls_of(rank, tap)
        backward = tap.startswith("backward.")
        for (step, call), records in by_call.items():
            goes_in = sorted((r.role, r.dtype, r.shape) for r in records.values() if backward or r.role[:5] == "input")
            text = json.dumps([backward, goes_in, module.attrs if module else {}], default=str, sort_keys=True)
            seq = min(r.seq for r in records.values())
            found.append(((rank, step or 0, seq), (rank, tap, step, call), cls, text))
    return found


def _plain(value: Any) -> Any:
    """A VALUE without what its tensors' elements tell."""
    if not isinstance(value, Mapping):
        return value
    if "list" in value:
        return {"list": [_plain(v) for v in value["list"]]}
    inner = value.get("tensor", value)
    kept = {k: v for k, v in inner.items() if k not in (*_VALUES, "param", "skipped")}
    return {"tensor": kept} if "tensor" in value or "skipped" in value else kept
