"""Dumps without row maps: whole tensors meet, step by step and rank by rank.

The problem: other tools do not write down which row is which token. The idea: where one side has no row maps, neither
is used: the tensors of a step are compared as they are, flattened. Steps pair by their numbers where one tool wrote
both dumps, by order where two tools did, which count from 0 or from 1. To all that comes after, a step is one row: of
one subject per rank, at the step's place, so that what went wrong in one step may explain the next through attention.
Ranks whose layout nobody wrote down meet rank by rank where both sides have the same ranks; else their
pieces are joined as align/shards.py can.
Not here: names (names.py), shapes that differ (compare/measure.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_accprobe.align.derived import View
from vllm_accprobe.align.requests import RequestPlan
from vllm_accprobe.align.tokens import Cell, Rows, Side, Space, TokenPlan, make_key
from vllm_accprobe.dump.schema import Record

WHOLE = "whole"
"""The row space whose one row is all of a step."""


@dataclass(frozen=True)
class StepTokens(TokenPlan):
    """The plan of rows where there are none: one for each step that both sides have. said: how steps were paired."""

    said: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return list(self.said)


@dataclass(frozen=True)
class StepPlan:
    """golden, mine: the dumps without rows; cell: of a record, the number that the two sides' ranks share."""

    golden: Any
    mine: Any
    requests: RequestPlan
    tokens: StepTokens
    cell: Callable[[Record], Cell]


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
    cell, ranks = _cells(sides)
    rows: list[dict[Space, Rows]] = [{}, {}]
    for number, pair in enumerate(pairs):
        for rank in ranks:
            key = np.array([make_key(rank, number)])
            for side, step in zip(rows, pair, strict=True):
                side[(rank, step, WHOLE)] = Rows(key, np.ones(1, bool), np.zeros(1, bool))
    for i, (side, own) in enumerate(zip(rows, steps, strict=True)):  # a step without a partner has a key of its own
        for step in set(own) - {p[i] for p in pairs}:
            for rank in ranks:
                key = np.array([make_key(rank, (2 + i) * len(steps[0] + steps[1]) + step)])
                side[(rank, step, WHOLE)] = Rows(key, np.ones(1, bool), np.zeros(1, bool))
    of_rank = dict.fromkeys({*golden.ranks, *mine.ranks}, 0)
    names_of: dict[int, tuple[str, int | None]] = dict.fromkeys(ranks, ("", None))
    both = [Side(r, of_rank, 0) for r in rows]
    tokens = StepTokens(both[0], both[1], names_of, [], 0, {}, said=tuple(said))
    return StepPlan(*sides, RequestPlan([], [], [], []), tokens, cell)


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
