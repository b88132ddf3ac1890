"""A folder of files beside a tool's dump: a file is the tensor whose name it bears.

The problem: somebody saves tensors under another tool's names (a torch_xray dataset's as .npy, msprobe's .pt in one
folder, an archive with a module's path for a key), or a single file is one dataset of an .h5; a file has no step and no
role, so no place of the two would pair. The idea: a file whose path without its ending is a tensor's name in the other
dump, or ends with it, takes that tensor's place; of one name in many steps and ranks, the directories above say which.
Names are the tool's own spelling, ``<tap>.<role>``, and a tap with one output. What bears no such name stays as it is.
Not here: opening (formats/folder.py, single.py), the pairing of what has places (names.py).
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm_accprobe.dump.schema import Module, Record
from vllm_accprobe.formats.common.foreign import INDEPENDENT, VALUE
from vllm_accprobe.formats.folder import SUFFIXES

_NUMBERED = re.compile(r"(step|rank)?[=_-]?(\d{1,9})", re.ASCII)
_APART = re.compile(r"[/:]")
Names = Mapping[str, list[Record]]


def take_names(golden: Any, mine: Any) -> tuple[Any, Any]:
    """Two open dumps; where just one of them is files, it comes back with the places of the other that it names."""
    files = [bool(d.run.get(INDEPENDENT)) for d in (golden, mine)]
    if files == [True, False]:
        return _named(golden, mine), mine
    if files == [False, True]:
        return golden, _named(mine, golden)
    return golden, mine


def _named(files: Any, other: Any) -> Any:
    if len(files.records) == len(other.records) == 1:
        found = {0: other.records[0]}
    else:
        taps = [r.tap for r in files.records]
        found = _match(taps, _names(other.records)) or _match(taps, _ends(other.records))
    if not found:
        return files
    named = copy.copy(files)
    named.records = [_at(r, found[i]) if i in found else r for i, r in enumerate(files.records)]
    named.run = {k: v for k, v in files.run.items() if k != INDEPENDENT}
    named.problems = [*files.problems, f"{len(found)} of its {len(taps) if len(files.records) > 1 else 1} tensors bear "
                                       "names of the other dump's, whose places they take"]  # fmt: skip
    named.ranks = tuple(sorted({r.rank for r in named.records}))
    named.steps = {key: step for key, step in (files.steps | other.steps).items() if key[0] in named.ranks}
    named.modules = _modules(named.records)
    return named


def _at(file: Record, place: Record) -> Record:
    return replace(file, rank=place.rank, step=place.step, tap=place.tap, cls=place.cls, role=place.role,
                   call=place.call, seq=place.seq, layout=place.layout)  # fmt: skip


def _modules(records: Iterable[Record]) -> dict[int, list[Module]]:
    of_rank: dict[int, dict[str, str]] = defaultdict(dict)
    for r in sorted(records, key=lambda r: r.seq):
        of_rank[r.rank].setdefault(r.tap, r.cls)
    return {rank: [Module(tap, cls, i) for i, (tap, cls) in enumerate(taps.items())] for rank, taps in of_rank.items()}


def _spelled(name: str) -> str:
    """A name as a folder spells it: without its ending, dots between its parts."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return _APART.sub(".", name)


def _names(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Names → records. The tool's own spelling goes before a place, a place before a module with one output."""
    found: dict[str, list[Record]] = {}
    outputs: dict[str, list[Record]] = defaultdict(list)
    places: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        found.setdefault(_spelled(r.name), []).append(r)
        places[_spelled(f"{r.tap}.{r.role}")].append(r)
        if r.role == VALUE or r.role.startswith("output"):
            outputs[_spelled(r.tap)].append(r)
    for name, some in places.items():
        found.setdefault(name, some)
    for name, some in outputs.items():
        if len({r.role for r in some}) == 1:
            found.setdefault(name, some)
    return found


def _ends(records: Iterable[Record]) -> dict[str, list[Record]]:
    """What names end with, where no two names end so."""
    whole: dict[str, set[str]] = defaultdict(set)
    named = _names(records)
    for name in named:
        for cut in (i for i, c in enumerate(name) if c == "."):
            whole[name[cut + 1 :]].add(name)
    return {end: named[next(iter(names))] for end, names in whole.items() if len(names) == 1 and "." in end}


def _match(taps: list[str], names: Names) -> dict[int, Record]:
    """Index of a file → the record whose name it bears, each once. The longest name that fits is it."""
    found: dict[int, Record] = {}
    taken: set[int] = set()
    for i, tap in enumerate(taps):
        parts = tap.split(".")
        for cut in range(len(parts)):
            some = [r for r in names.get(".".join(parts[cut:]), ()) if id(r) not in taken]
            if some:
                found[i] = _said(some, parts[:cut])
                taken.add(id(found[i]))
                break
    return found


def _said(records: list[Record], above: list[str]) -> Record:
    """Of the records of one name, the one whose step and rank the directories ``above`` say, else the first."""
    for word, number in (m.groups() for part in reversed(above) if (m := _NUMBERED.fullmatch(part))):
        field = "rank" if word == "rank" else "step"
        records = [r for r in records if getattr(r, field) == int(number)] or records
    return min(records, key=lambda r: (r.rank, -1 if r.step is None else r.step, r.call))
