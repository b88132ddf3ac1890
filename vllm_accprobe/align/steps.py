"""Dumps without row maps: whole tensors meet, step by step and rank by rank.

The problem: other tools do not write down which row is which token. The idea: where one side has no row maps, neither
is used: the tensors of a step are compared as they are, flattened. Steps pair by their numbers where one tool wrote
both dumps, by order where two tools did, which count from 0 or from 1. To all that comes after, a step is one row: of
one subject per rank, at the step's place, so that what went wrong in one step may explain the next through attention.
Ranks whose layout nobody wrote down meet rank by rank where both sides have the same ranks; else their pieces are
joined as align/shards.py can. From the step on whose token ids (or other whole numbers that go in first) differ, the
runs are about different texts: those steps are left out, and said.
Not here: names (names.py), shapes that differ (comparison/measure/activations.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.derived import View, read
from vllm_accprobe.align.requests import RequestPlan
from vllm_accprobe.align.tokens import Cell, Rows, SideRows, Space, TokenPlan, make_key
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.formats.common.foreign import INDEPENDENT

WHOLE = "whole"
"""The row space whose one row is all of a step."""
OTHER_INPUTS = "tensors in steps after what goes in differs"
NO_STEP = "tensors in steps that golden does not have"
NO_STEP_MINE = "tensors of golden in steps that mine does not have"
_LOOKS = 3
"""Places of whole numbers that are looked at in each step."""


@dataclass(frozen=True)
class StepTokens(TokenPlan):
    """The plan of rows where there are none: one for each step that both sides have. said: how steps were paired."""

    said: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The plan in sentences."""
        return list(self.said)


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
    """A dump whose rows are not used."""

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
    names = [f"{n} ({_tool(d)})" for n, d, w in zip(("golden", "mine"), (golden, mine), without, strict=True) if w]
    said = [f"rows: no row map in {' or '.join(names)}: tensors are compared as wholes, step by step"]
    said.append(f"steps: {len(pairs)} paired by {how}" + _shift(pairs))
    left = [len(s) - len(pairs) for s in steps]
    said += [f"steps: {n} only in {side}" for side, n in zip(("golden", "mine"), left, strict=True) if n]
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
    tokens = StepTokens(both[0], both[1], names_of, [], 0, {}, said=tuple(said))
    return StepPlan(*sides, RequestPlan([], [], [], []), tokens, cell, +skipped, notes, tuple(pairs))


def _keep(side: Rowless, without: set[int]) -> int:
    """Takes the tensors of some steps out of ``side``; how many there were."""
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
    """Inputs that are whole numbers, those that go in first in front: place → step → record of the first rank."""
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


def _shift(pairs: list[tuple[int, int]]) -> str:
    return f" (golden's {pairs[0][0]} is mine's {pairs[0][1]})" if pairs and pairs[0][0] != pairs[0][1] else ""


def _cells(sides: tuple[Rowless, Rowless]) -> tuple[Callable[[Record], Cell], list[Cell]]:
    """Rank by rank where both sides have the same ranks and nobody knows a tensor's layout on either side."""
    ranks = [tuple(s.ranks) for s in sides]
    if ranks[0] != ranks[1] or len(ranks[0]) < 2:
        return (lambda r: 0), [0]
    known = {(r.tap, r.role, r.call) for s in sides for r in s.records if r.layout.kind != "unknown"}
    return (lambda r: 0 if (r.tap, r.role, r.call) in known else r.rank), sorted({0, *ranks[0]})


def _tool(dump: Any) -> str:
    return str(dump.run.get("format") or "accprobe")
