"""A dump in msprobe's layout, so that its comparison, its graphs and its other tools open it.

The problem: msprobe knows records of modules and of API calls, ours are one record for a tensor with a name. The idea:
all tensors of a module's call become one record ``Module.<path>.<Class>.forward.<call>``, an operator's call one of an
API with its arguments, ``Aten.mm.default.0.forward`` (what is in them: msprobe_record.py); a parameter stands
with its module's first call, and one that is listed again, by a later step or another caller, in a later step.
Layout: ``step<S>/rank<R>/{dump,stack,construct}.json`` and ``dump_tensor_data/<data_name>.pt``, as msprobe 26.2 writes.
What its names cannot say is noted under ``accprobe`` in dump.json (notes.py). What its layout has no place for is
returned to be counted: weights beyond the last step.
Not here: the .pt files (torchzip.py), reading such dumps (formats/msprobe.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ROOT_TAP, OpCall, Record
from vllm_accprobe.formats.common.msprobe_words import BACKWARD, CONSTRUCT, DATA, DUMP, STACK, api_name
from vllm_accprobe.formats.write import names, notes
from vllm_accprobe.formats.write.msprobe_record import Sections
from vllm_accprobe.formats.write.torchzip import save_pt

LISTED = "weights listed more often than there are steps, which msprobe has no place for"
_UNSAFE = re.compile(r"[^\w.\-]", re.ASCII)
_LONGEST = 180
"""Of a file's name; longer ones are numbered."""


@dataclass
class _ApiCall:
    """One record of dump.json: the tensors of one call. number: its ordinal; op: of an operator, its journal line."""

    name: str
    tap: str
    number: int
    cls: str = ""
    op: OpCall | None = None
    records: list[Record] = field(default_factory=list)


def write_msprobe(
    dump: Dump,
    records: Iterable[Record],
    root: Path,
    tick: Callable[[], None] = lambda: None,
    later: Path | None = None,
) -> Counter[str]:
    """Writes ``records`` of all steps and ranks, and the operators' calls that they are of, under ``root``, which must
    not exist. later: what ``root`` will be called when it is read. Returns what was left out, by reason. Raises
    OSError, DumpError."""
    skipped: Counter[str] = Counter()
    by_rank: dict[int, list[Record]] = {}
    for r in records:
        by_rank.setdefault(r.rank, []).append(r)
    root.mkdir(parents=True)
    for rank, found in sorted(by_rank.items()):
        steps = sorted({r.step for r in found if r.step is not None}) or [0]
        skipped += Counter(LISTED for r in found if r.step is None and r.call >= len(steps))
        for number, step in enumerate(steps):
            own = [r for r in found if r.step == step or (r.step is None and r.call == number)]
            place = Path(f"step{step}", f"rank{rank}")
            _write_step(dump, rank, own, root / place, (later or root).absolute() / place, tick)
    return skipped


def _write_step(
    dump: Dump, rank: int, records: list[Record], directory: Path, later: Path, tick: Callable[[], None]
) -> None:
    calls = _calls(dump, rank, records)
    data_dir = directory / DATA
    stored = any(r.payload is not None for r in records)
    (data_dir if stored else directory).mkdir(parents=True)
    taken: set[str] = set()
    params = {f"{r.tap}/{r.role}": r for r in dump.records if r.step is None and r.rank == rank}
    data, noted = {}, {}
    for c in calls:
        found = Sections(c.op, c.records, params)
        for word, r, info in found.tensors:
            if r.payload is not None:
                info["data_name"] = _file_name(f"{c.name}.{word}", taken) + ".pt"
                save_pt(data_dir / info["data_name"], dump.read(r), r.dtype)
        for _ in c.records:
            tick()
        data[c.name] = found.out
        noted[c.name] = {"tap": c.tap, "class": c.cls, "call": c.number, **found.note()}
    head = {
        "task": "tensor" if stored else "statistics",
        "level": "mix" if any(c.op is not None for c in calls) else "L0",
        "framework": str(dump.run.get("framework", "pytorch")),
        "dump_data_dir": str(later / data_dir.name) if stored else None,
        "data": data,
        notes.NAME: {"records": noted, "modules": [notes.of_module(m) for m in dump.modules.get(rank, ()) if m.attrs]},
    }
    for name, content, indent in ((DUMP, head, None), (STACK, {}, None), (CONSTRUCT, _parents(calls), 1)):
        with open(directory / name, "x", encoding="utf-8") as f:
            json.dump(content, f, indent=indent)


def _calls(dump: Dump, rank: int, records: list[Record]) -> list[_ApiCall]:
    """In the order in which they ended, as msprobe lists them. A parameter belongs to its module's first call."""
    moments = {r.step for r in records if r.step is not None}
    ops = {(op.tap, op.call): op for op in dump.ops if op.rank == rank and op.step in moments}
    taps = {op.tap for op in dump.ops if op.rank == rank}
    framework = str(dump.run.get("framework", ""))
    calls: dict[tuple[str, int], _ApiCall] = {}
    last: dict[tuple[str, int], int] = {}
    numbers: Counter[str] = Counter()
    for r in sorted(records, key=lambda r: (r.step is None, r.seq)):
        key = (r.tap, 0 if r.step is None else r.call)
        if key not in calls:
            op = ops.get(key)
            api = api_name(op.op, framework) if op is not None else r.cls if _gradient(r, taps) else ""
            if api:
                way = "forward" if op is not None else "backward"
                name = f"{plain(api)}.{numbers[api, way]}.{way}"  # type: ignore[index]
                numbers[api, way] += 1  # type: ignore[index]
            else:
                path = "" if r.tap == ROOT_TAP else f"{plain(r.tap)}."
                name = f"Module.{path}{plain(r.cls).replace('.', '_') or 'Module'}.forward.{key[1]}"
            calls[key] = _ApiCall(name, r.tap, key[1], r.cls, op)
            last[key] = len(records) + len(calls)
        calls[key].records.append(r)
        if r.step is not None:
            last[key] = r.seq
    return [calls[key] for key in sorted(calls, key=lambda key: last[key])]


def _gradient(r: Record, operators: set[str]) -> bool:
    """Whether it is of the backward run of an API."""
    return r.tap.startswith(BACKWARD) and r.tap.removeprefix(BACKWARD) in operators


def plain(name: str) -> str:
    """A name that is a file's name on any system."""
    return _UNSAFE.sub("_", name).strip(".") or "_"


def _file_name(name: str, taken: set[str]) -> str:
    """Each once, on systems that know no capitals too, none too long."""
    short = plain(name) if len(name) <= _LONGEST else f"{plain(name[:_LONGEST])}~{len(taken)}"
    return short + names.unused(short.lower(), taken)[len(short) :]


def _parents(calls: Sequence[_ApiCall]) -> dict[str, str | None]:
    """Record → the record of the module around it; of an operator, of the module's call that called it."""
    modules = [c for c in calls if c.op is None]
    by_call = {(c.tap, c.number): c.name for c in modules}
    first: dict[str, str] = {}
    for c in modules:
        first.setdefault(c.tap, c.name)
    return {c.name: _parent(c, by_call, first) for c in calls}


def _parent(c: _ApiCall, by_call: Mapping[tuple[str, int], str], first: Mapping[str, str]) -> str | None:
    up = c.tap
    if c.op is not None:
        up = c.op.module or ""
        found = by_call.get((up, c.op.module_call)) or first.get(up)
        if found is not None or not up:
            return found
    while "." in up:
        up = up.rpartition(".")[0]
        if up in first:
            return first[up]
    root = first.get(ROOT_TAP)
    return root if root != c.name else None
