"""Dumps without row maps: whole tensors meet by step, by file, or by what the tools' own files say.

The problem: other tools do not record which row is which token, name files as they like, and share no names with each
other. The idea: where one side has no row maps neither is used: the tensors of a step are compared whole, steps by
number within one tool and else by order, up to the step whose input ids differ; a step is one row. A file takes the
place of the tensor whose name its path ends with. Between ATB, torch, GE and FX, what each format knows of another's
places becomes rules for names (names.py). Not here: patterns (mapping.py), opening (formats/), which ATB operator is
which module (engines/atb_torch.py).
"""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.derived import View, read
from vllm_accprobe.align.engines import atb_torch
from vllm_accprobe.align.mapping import RoleRule, Rules, Source, TapRule
from vllm_accprobe.align.tokens import Cell, RequestPlan, Rows, SideRows, Space, TokenPlan, make_key
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.record_table import first_of_each_site
from vllm_accprobe.dump.schema import ROOT_TAP, Module, Record
from vllm_accprobe.formats import atb, torchair
from vllm_accprobe.formats.common.foreign import INDEPENDENT, VALUE
from vllm_accprobe.formats.folder import SUFFIXES

WHOLE = "whole"
"""The row space whose one row is all of a step."""
OTHER_INPUTS = "tensors in steps after what goes in differs"
NO_STEP = "tensors in steps that golden does not have"
NO_STEP_MINE = "tensors of golden in steps that mine does not have"
_LOOKS = 3
"""Places of whole numbers that are examined in each step."""


@dataclass(frozen=True)
class StepTokens(TokenPlan):
    """The plan of rows where there are none: one for each step that both sides have. notes: how steps were paired."""

    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return list(self.notes)


@dataclass(frozen=True)
class StepPlan:
    """golden, mine: the dumps without rows; cell: of a record, the number that the two sides' ranks share."""

    golden: Any
    mine: Any
    requests: RequestPlan
    tokens: StepTokens
    cell: Callable[[Record], Cell]
    skipped: Counter[str]
    notes: list[str]
    pairs: tuple[tuple[int, int], ...] = ()


class Rowless(View):
    def __init__(self, dump: Any):
        super().__init__(dump, [r if r.rows is None else replace(r, rows=None) for r in dump.records])
        self.rows: dict[Any, Any] = {}
        self.requests: dict[Any, Any] = {}


def plan_steps(golden: Any, mine: Any) -> StepPlan | None:
    """None where both dumps have row maps, or neither has a tensor of any step."""
    without = [not d.rows for d in (golden, mine)]
    if not any(without) or not all(any(r.step is not None for r in d.records) for d in (golden, mine)):
        return None
    sides = Rowless(golden), Rowless(mine)
    steps = [sorted({r.step for r in s.records if r.step is not None}) for s in sides]
    same_tool = golden.run.get("format") == mine.run.get("format")
    pairs, how = pair_steps(steps[0], steps[1], same_tool)
    names = [
        f"{n} ({d.run.get('format') or 'accprobe'})"
        for n, d, w in zip(("golden", "mine"), (golden, mine), without, strict=True)
        if w
    ]
    lines = [f"rows: no row map in {' or '.join(names)}: tensors are compared as wholes, step by step"]
    shift = f" (golden's {pairs[0][0]} is mine's {pairs[0][1]})" if pairs and pairs[0][0] != pairs[0][1] else ""
    lines.append(f"steps: {len(pairs)} paired by {how}{shift}")
    left = [len(s) - len(pairs) for s in steps]
    lines += [f"steps: {n} only in {side}" for side, n in zip(("golden", "mine"), left, strict=True) if n]
    skipped: Counter[str] = Counter()
    notes: list[str] = []
    cell, ranks = _cells(sides)
    other = 0 if golden.run.get(INDEPENDENT) or mine.run.get(INDEPENDENT) else _other_inputs(sides, pairs)
    if other:
        notes.append(f"what goes in differs from golden's step {pairs[other][0]} on (a token sampled differently?): "
                     f"{len(pairs) - other} of {len(pairs)} steps are not compared")  # fmt: skip
        pairs, after = pairs[:other], pairs[other:]
        skipped[OTHER_INPUTS] = _keep(sides[1], {p[1] for p in after})
        _keep(sides[0], {p[0] for p in after})
    skipped[NO_STEP] = _keep(sides[1], set(steps[1]) - {p[1] for p in pairs})
    skipped[NO_STEP_MINE] = _keep(sides[0], set(steps[0]) - {p[0] for p in pairs})
    rows: list[dict[Space, Rows]] = [{}, {}]

    def put(side: int, step: int, place: int) -> None:
        for rank in ranks:
            key = np.array([make_key(rank, place)])
            rows[side][(rank, step, WHOLE)] = Rows(key, np.ones(1, bool), np.zeros(1, bool))

    for i, own in enumerate(steps):
        for number, pair in enumerate(pairs):
            put(i, pair[i], number)
        for step in set(own) - {p[i] for p in pairs}:  # a step without a partner has a key of its own
            put(i, step, (2 + i) * len(steps[0] + steps[1]) + step)
    of_rank = dict.fromkeys({*golden.ranks, *mine.ranks}, 0)
    names_of: dict[int, tuple[str, int | None]] = dict.fromkeys(ranks, ("", None))
    both = [SideRows(r, of_rank) for r in rows]
    tokens = StepTokens(both[0], both[1], names_of, [], 0, {}, notes=tuple(lines))
    return StepPlan(*sides, RequestPlan([], [], [], []), tokens, cell, +skipped, notes, tuple(pairs))


def _keep(side: Rowless, without: set[int]) -> int:
    before = len(side.records)
    side.records = [r for r in side.records if r.step not in without]
    return before - len(side.records)


def _other_inputs(sides: tuple[Rowless, Rowless], pairs: list[tuple[int, int]]) -> int:
    """The index of the first pair of steps in which whole numbers go in that differ; 0 for none, and where already the
    first step's do: then that is what there is to compare."""
    found = [_numbers_in(s) for s in sides]
    places = [p for p in found[0] if p in found[1]][:_LOOKS]
    for i, (g, m) in enumerate(pairs):
        for place in places:
            both = found[0][place].get(g), found[1][place].get(m)
            if None not in both and not _same_numbers(sides, both):
                return i
    return 0


def _numbers_in(side: Rowless) -> dict[Any, dict[int, Record]]:
    found: dict[Any, dict[int, Record]] = {}
    for r in sorted(side.records, key=lambda r: (r.seq, r.rank)):
        if r.step is not None and r.role.startswith("input") and DTYPES[r.dtype].kind == "int" and r.call == 0:
            found.setdefault((r.tap, r.role), {}).setdefault(r.step, r)
    return found


def _same_numbers(sides: tuple[Rowless, Rowless], pair: tuple[Any, Any]) -> bool:
    g, m = pair
    if prod(g.shape) != prod(m.shape):
        return False
    if g.hash is not None and g.hash == m.hash and g.dtype == m.dtype:
        return True
    if g.payload is None or m.payload is None:
        return g.stats is None or m.stats is None or (g.stats.min, g.stats.max) == (m.stats.min, m.stats.max)
    a, b = (widen(read(s, r), r.dtype).reshape(-1) for s, r in zip(sides, pair, strict=True))
    return bool(np.array_equal(a, b))


def pair_steps(golden: list[int], mine: list[int], same_tool: bool) -> tuple[list[tuple[int, int]], str]:
    """(pairs, how): by number where the numbers are the same or one tool gave them; by order else."""
    common = [s for s in golden if s in set(mine)]
    if golden == mine or (same_tool and common):
        return [(s, s) for s in common], "number"
    return list(zip(golden, mine, strict=False)), "order"


def _cells(sides: tuple[Rowless, Rowless]) -> tuple[Callable[[Record], Cell], list[Cell]]:
    ranks = [tuple(s.ranks) for s in sides]
    if ranks[0] != ranks[1] or len(ranks[0]) < 2:
        return (lambda r: 0), [0]
    known = {(r.tap, r.role, r.call) for s in sides for r in s.records if r.layout.kind != "unknown"}
    return (lambda r: 0 if (r.tap, r.role, r.call) in known else r.rank), sorted({0, *ranks[0]})


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
                found[i] = _of_step_and_rank(some, parts[:cut])
                taken.add(id(found[i]))
                break
    return found


def _of_step_and_rank(records: list[Record], above: list[str]) -> Record:
    """Of the records of one name, the one whose step and rank the directories ``above`` say, else the first."""
    for word, number in (m.groups() for part in reversed(above) if (m := _NUMBERED.fullmatch(part))):
        field = "rank" if word == "rank" else "step"
        records = [r for r in records if getattr(r, field) == int(number)] or records
    return min(records, key=lambda r: (r.rank, -1 if r.step is None else r.step, r.call))


Place = tuple[str, str]
"""(tap, role)."""
Pairs = dict[Place, tuple[tuple[Place, ...], str]]
"""Place of mine → (places of golden that make it, why)."""


def meet(golden: Any, mine: Any, rules: Rules | None) -> tuple[Rules, bool, list[str]] | None:
    kinds = [str(getattr(d, "family", "")) for d in (golden, mine)]
    if "" in kinds and _alike(golden, mine):
        return None
    types = rules.types if rules is not None else {}
    if rules is not None and not types:
        return None
    if kinds == ["atb", "atb"]:
        return _two_atb(golden, mine)
    for made, of, origin, pair in (
        ("atb", "", "torch modules for ATB operators", partial(_torch_and_atb, types=types)),
        ("ge", "fx", "FX nodes for GE operators", _fx_and_ge),
    ):
        if sorted(kinds) == sorted((made, of)):
            swapped = kinds[0] == made
            pairs, lines = pair(*((mine, golden) if swapped else (golden, mine)))
            return _rules(origin, pairs), swapped, lines
    if kinds == ["ge", "ge"]:
        fused = _fusions(golden, mine)
        lines = [f"mapping: {len(fused)} tensors of fused operators, by the names of what they fuse"]
        return (_rules("fused operators", fused), False, lines) if fused else None
    return None


def _alike(golden: Any, mine: Any) -> bool:
    """Whether the two call most places the same: one was converted from the other's tool."""
    taps = [{r.tap for r in first_of_each_site(d.records)} for d in (golden, mine)]
    return 2 * len(taps[0] & taps[1]) > min(map(len, taps))


def _rules(origin: str, pairs: Pairs) -> Rules:
    exact: dict[str, list[TapRule]] = defaultdict(list)
    for (tap, role), (sources, why) in pairs.items():
        part = RoleRule(role, tuple(Source(t, r) for t, r in sources))
        exact[tap].append(TapRule(tap, (part,), why, alone=True))
    return Rules(origin, exact={tap: tuple(rs) for tap, rs in exact.items()})


def _places(records: Iterable[Record]) -> dict[Place, Record]:
    found: dict[Place, Record] = {}
    for r in records:
        found.setdefault((r.tap, r.role), r)
    return found


# --- torch and ATB ---


def _torch_and_atb(torch: Any, other: Any, types: Mapping[str, tuple[str, ...]]) -> tuple[Pairs, list[str]]:
    have, wanted = _places(torch.records), _places(other.records)
    shapes = {place: r.shape for place, r in wanted.items()}
    pairs: Pairs = {}
    lines = ["mapping: operators of an ATB graph and modules of a torch model, by their types and order"]
    for taps in _graphs(other.records):
        forest = atb.tree(taps, other.topology)
        matches, text = atb_torch.atb_to_torch(forest, _modules_of(torch), shapes, types)
        lines += [s for s in text if s not in lines]
        for m in matches:
            sources = tuple(place for s in m.torch if (place := _recorded(s, have)) is not None)
            if m.atb in wanted and len(sources) == len(m.torch) and _comparable(wanted[m.atb], sources, have):
                pairs.setdefault(m.atb, (sources, m.why))
    named = {tap: sources for (tap, role), (sources, _) in pairs.items() if role == "output.0"}
    lines += [f"names: {tap} is {' with '.join(_called(s) for s in sources)}" for tap, sources in named.items()]
    return pairs, lines


def _called(place: Place) -> str:
    return place[0] if place[1].startswith("output") else f"{place[0]}/{place[1]}"


def _graphs(records: Iterable[Record]) -> list[list[str]]:
    by_step: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for r in records:
        if r.step is not None:
            by_step[(r.rank, r.step)][r.tap] = None
    return [list(taps) for taps in dict.fromkeys(tuple(sorted(t)) for t in by_step.values())]


def _modules_of(dump: Any) -> list[tuple[str, str]]:
    """(tap, class) in the order in which they ran, those that never did behind them."""
    ran = sorted((r for r in dump.records if r.step is not None), key=lambda r: (r.step, r.rank, r.seq))
    classes = {r.tap: r.cls for r in (*ran, *(r for r in dump.records if r.step is None)) if r.tap != ROOT_TAP}
    return list(classes.items())


def _recorded(place: Place, have: Mapping[Place, Record]) -> Place | None:
    """The place as the torch side calls it: its first input is ``input.hidden_states`` in one tool, ``input.0`` in
    another."""
    tap, role = place
    if place in have:
        return place
    if role == "input.0":
        return next(((t, r) for t, r in have if t == tap and r.startswith("input.")), None)
    return None


def _comparable(record: Record, sources: tuple[Place, ...], have: Mapping[Place, Record]) -> bool:
    """A weight only as it stands: packed or turned over it is another tensor. Integers of a quantised operator are not
    the numbers that they stand for."""
    if record.role.startswith("param."):
        return len(sources) == 1 and have[sources[0]].shape == record.shape
    kinds = {DTYPES[have[s].dtype].kind for s in sources} | {DTYPES[record.dtype].kind}
    return len(kinds) == 1


# --- ATB and ATB ---


def _two_atb(golden: Any, mine: Any) -> tuple[Rules, bool, list[str]] | None:
    """Two graphs whose operators have other numbers or types, one quantised perhaps. None where all names agree."""
    sides = _places(golden.records), _places(mine.records)
    if {tap for tap, _ in sides[0]} == {tap for tap, _ in sides[1]}:
        return None
    same = atb.atb_to_atb(*(_forest(d) for d in (golden, mine)))
    pairs: Pairs = {}
    left = 0
    for (tap, role), record in sides[1].items():
        source = (same.get(tap, ""), role)
        if source not in sides[0]:
            continue
        if _comparable(record, (source,), sides[0]):
            pairs[(tap, role)] = ((source,), "the same operator of the other graph")
        else:
            left += 1
    lines = [f"mapping: two ATB graphs: {len(same)} operators of mine are the same as one of golden's"]
    if left:
        lines.append(f"mapping: {left} tensors that are integers on one side and numbers on the other: not compared")
    return _rules("operators of two ATB graphs", pairs), False, lines


def _forest(dump: Any) -> list[atb.Node]:
    taps = dict.fromkeys(t for graph in _graphs(dump.records) for t in graph)
    counting = {r.tap for r in dump.records if r.role == "output.0" and r.dtype in ("int8", "uint8")}
    return atb.tree(taps, dump.topology, counting)


# --- torchair ---


def _fx_and_ge(fx: Any, ge: Any) -> tuple[Pairs, list[str]]:
    have, wanted = _places(fx.records), _places(ge.records)
    nodes = {op: node for (op, _), (node, _) in ge.fx.items()}
    pairs: Pairs = {}
    for tap, role in wanted:
        kind, _, index = role.partition(".")
        parts = [tap] if tap in ge.known or tap in nodes else torchair.split_fused(tap, ge.known)
        if not parts or not index.isdecimal():
            continue
        if kind == "output":
            node, k = ge.fx.get((parts[-1], int(index)), ("", 0))
            source = (node, f"output.{k}")
        else:
            op, k = _taken(parts, int(index), ge.inputs, sum(t == tap and r.startswith("input") for t, r in wanted))
            source = (nodes.get(op, ""), f"input.{k}")
        if source in have:
            pairs[(tap, role)] = ((source,), "_fx_tensor_name" + (f", {_FUSED}" if len(parts) > 1 else ""))
    lines = ["mapping: a GE dump and an FX dump, by _fx_tensor_name of the graph beside the GE dump"]
    if not ge.fx:
        lines.append("mapping: no dynamo_original_graph_*.txt beside the GE dump: nothing tells which FX node is which")
    return pairs, lines


_FUSED = "fused: first inputs, last outputs"


def _taken(parts: list[str], index: int, inputs: Mapping[str, list[str]], count: int) -> tuple[str, int]:
    """Which input of which of the ``parts`` input ``index`` of an operator with ``count`` inputs is: by the graph where
    it agrees about their number, else the first one's."""
    outside = torchair.fused_inputs(parts, inputs) if len(parts) > 1 else []
    return outside[index] if len(outside) == count and index < count else (parts[0], index)


def _fusions(golden: Any, mine: Any) -> Pairs:
    """Fused operators of either side: first inputs and last outputs are those of what the other side did not fuse."""
    sides = _places(golden.records), _places(mine.records)
    taps = [{tap for tap, _ in side} for side in sides]
    inputs = {**golden.inputs, **mine.inputs}
    pairs: Pairs = {}
    for fused, plain in ((1, 0), (0, 1)):
        for tap in taps[fused] - taps[plain]:
            parts = torchair.split_fused(tap, taps[plain] | golden.known | mine.known)
            roles = [r for t, r in sides[fused] if t == tap and parts]
            for role in roles:
                kind, _, index = role.partition(".")
                op, k = parts[-1], index
                if kind == "input" and index.isdecimal():
                    op, at = _taken(parts, int(index), inputs, sum(r.startswith("input") for r in roles))
                    k = str(at)
                here, there = (tap, role), (op, f"{kind}.{k}")
                if there in sides[plain] and there not in sides[fused]:
                    pairs[here if fused else there] = (((there if fused else here),), _FUSED)
    return pairs
