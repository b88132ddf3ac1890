"""A dump in msprobe's layout, so that its comparison, its graphs and its other tools open it.

The problem: msprobe knows module records with numbered inputs and outputs, ours are one record for a tensor with a
name. The idea: all tensors of a module's call become one record ``Module.<path>.<Class>.forward.<call>``; inputs with a
number go to input_args, those with a name to input_kwargs; a parameter stands with its module's first call.
Layout: ``step<S>/rank<R>/{dump,stack,construct}.json`` and ``dump_tensor_data/<data_name>.pt``, as msprobe 26.2 writes.
A weight that is listed again, by a later step or another caller, stands in a later step. What its layout has no place
for is returned to be counted: values before an in-place change, gradients of a tensor, weights beyond the last step.
Not here: the .pt files (torchzip.py), reading such dumps (formats/msprobe.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .dtypes import DTYPES
from .reader import Dump
from .schema import ROOT_TAP, Record
from .torchzip import save_pt

IN_PLACE = "values before an in-place change, which msprobe has no place for"
GRADIENTS = "gradients that are no run's own outputs, which msprobe has no place for"
LISTED = "weights listed more often than there are steps, which msprobe has no place for"
_UNSAFE = re.compile(r"[^\w.\-]", re.ASCII)
_LONGEST = 180
"""Of a file's name; longer ones are numbered."""


@dataclass
class _Call:
    """One record of dump.json: the tensors of one call of one module."""

    name: str
    tap: str
    records: list[Record] = field(default_factory=list)


def write_msprobe(
    dump: Dump, records: Iterable[Record], root: Path, tick: Callable[[], None] = lambda: None
) -> Counter[str]:
    """Writes ``records`` of all steps and ranks under ``root``, which must not exist. Returns what was left out, by
    reason. Raises OSError, DumpError."""
    skipped: Counter[str] = Counter()
    by_rank: dict[int, list[Record]] = {}
    for r in records:
        if r.role.startswith("inplace."):
            skipped[IN_PLACE] += 1
        elif r.role.startswith("grad"):
            skipped[GRADIENTS] += 1
        else:
            by_rank.setdefault(r.rank, []).append(r)
    root.mkdir(parents=True)
    for rank, found in sorted(by_rank.items()):
        steps = sorted({r.step for r in found if r.step is not None}) or [0]
        skipped += Counter(LISTED for r in found if r.step is None and r.call >= len(steps))
        for number, step in enumerate(steps):
            own = [r for r in found if r.step == step or (r.step is None and r.call == number)]
            _write_step(dump, own, root / f"step{step}" / f"rank{rank}", tick)
    return skipped


def _write_step(dump: Dump, records: list[Record], directory: Path, tick: Callable[[], None]) -> None:
    calls = _calls(records)
    data_dir = directory / "dump_tensor_data"
    stored = any(r.payload is not None for r in records)
    (data_dir if stored else directory).mkdir(parents=True)
    names = _Names()
    data = {c.name: _record(dump, c, data_dir, names, tick) for c in calls}
    head = {
        "task": "tensor" if stored else "statistics",
        "level": "L0",
        "framework": "pytorch",
        "dump_data_dir": str(data_dir.absolute()) if stored else None,
        "data": data,
    }
    with open(directory / "dump.json", "x", encoding="utf-8") as f:
        json.dump(head, f)
    with open(directory / "stack.json", "x", encoding="utf-8") as f:
        json.dump({}, f)
    with open(directory / "construct.json", "x", encoding="utf-8") as f:
        json.dump(_parents(calls), f, indent=1)


def _calls(records: list[Record]) -> list[_Call]:
    """In the order in which they ended, as msprobe lists them. A parameter belongs to its module's first call."""
    calls: dict[tuple[str, int], _Call] = {}
    last: dict[tuple[str, int], int] = {}
    for r in sorted(records, key=lambda r: (r.step is None, r.seq)):
        call = 0 if r.step is None else r.call
        key = (r.tap, call)
        if key not in calls:
            path = "" if r.tap == ROOT_TAP else f"{plain(r.tap)}."
            calls[key] = _Call(f"Module.{path}{plain(r.cls).replace('.', '_') or 'Module'}.forward.{call}", r.tap)
            last[key] = len(records) + len(calls)
        calls[key].records.append(r)
        if r.step is not None:
            last[key] = r.seq
    return [calls[key] for key in sorted(calls, key=lambda key: last[key])]


def plain(name: str) -> str:
    """A name that is a file's name on any system."""
    return _UNSAFE.sub("_", name).strip(".") or "_"


class _Names:
    """File names, each once, none too long."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, name: str) -> str:
        short = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}~{len(self._taken)}"
        unique, n = short, 2
        while unique.lower() in self._taken:
            unique, n = f"{short}~{n}", n + 1
        self._taken.add(unique.lower())
        return unique


def _record(dump: Dump, call: _Call, data_dir: Path, names: _Names, tick: Callable[[], None]) -> dict[str, Any]:
    out: dict[str, Any] = {"input_args": [], "input_kwargs": {}, "output": []}
    for r in sorted(call.records, key=lambda r: (not r.role.rpartition(".")[2].isdecimal(), r.seq)):  # names last
        kind, _, rest = r.role.partition(".")
        info: dict[str, Any] = _info(r)
        if kind == "param":
            word = f"parameters.{plain(rest)}"
            out.setdefault("parameters", {})[rest] = info
        elif kind == "input" and not rest.isdecimal():
            word = f"kwargs.{plain(rest)}"
            out["input_kwargs"][rest] = info
        else:
            section = out["input_args" if kind == "input" else "output"]
            place = int(rest) if rest.isdecimal() and len(rest) < 4 else len(section)
            section.extend([None] * (place + 1 - len(section)))
            place = place if section[place] is None else len(section)
            section.extend([None] * (place + 1 - len(section)))
            word = f"{'input' if kind == 'input' else 'output'}.{place}"
            section[place] = info
        if r.payload is not None:
            info["data_name"] = names.of(f"{call.name}.{word}") + ".pt"
            save_pt(data_dir / info["data_name"], dump.read(r), r.dtype)
        tick()
    return out


def _info(r: Record) -> dict[str, Any]:
    s = r.stats
    values: dict[str, float | None] = dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    if s is not None and s.nan:
        values = dict.fromkeys(values, float("nan"))
    elif s is not None:
        values |= {"Max": s.max, "Min": s.min}
        if DTYPES[r.dtype].kind == "float":  # msprobe takes neither of integers
            values |= {"Mean": s.mean, "Norm": s.l2}
    about = {"type": "torch.Tensor", "dtype": f"torch.{r.dtype}", "shape": list(r.shape)}
    return {**about, **values, "requires_grad": False}


def _parents(calls: list[_Call]) -> dict[str, str | None]:
    """Record → the record of the module around it."""
    first: dict[str, str] = {}
    for c in calls:
        first.setdefault(c.tap, c.name)
    out: dict[str, str | None] = {}
    for c in calls:
        up = c.tap
        found: str | None = None
        while found is None and "." in up:
            up = up.rpartition(".")[0]
            found = first.get(up)
        root = first.get(ROOT_TAP)
        out[c.name] = found or (root if root != c.name else None)
    return out
