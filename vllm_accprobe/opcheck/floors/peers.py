"""Whether one layer's rounding is like the others': the same operator in other layers as its measure.

The problem: a reference's model of rounding may be twice too large for a kernel, and a fault of that size hides in what
the model leaves. The idea: layers of one class run the same kernel, so that whatever the model is wrong by, it is wrong
by in all of them. For each output of a tap, the variance of all its errors over the model's (pooled.py); its logarithm
is compared with those of its kin, the same class, role and dtype in the other layers, of golden and of mine. Layers
honestly differ, so the spread is estimated from the kin as well, moderated toward what is known of such spreads, as a
comparison's is (judge/chance.py, `against_kin`): but for tensors that have been compared it is fitted to other kinds,
and here it is a constant. With few kin the tail is wide, and with fewer than three nothing is said.
Not here: the sums (pooled.py), floors that need no kin (verdict.py). Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_accprobe.judge.chance import against_kin

LEAST = 3
"""Chosen: of two peers, either may be the odd one."""
PRIOR_SPREAD, PRIOR_FREEDOM = 0.25, 4.0
"""Chosen: standard deviation of the logarithm of such a ratio over honest layers, and how many layers that is worth."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """All rows of one output of a tap. ratio: variance of the errors over the model's; freedom: of that ratio; scale,
    error: sum y d / sum y y and its standard error; rows: different ones; seq: of its first call, its place in the
    order of execution; created: relative L2 error; smallest: what would have been found at least (smallest.py), row
    and column."""

    tap: str
    cls: str
    role: str
    rank: int
    dtype: str
    ratio: float
    freedom: float
    scale: float
    error: float
    rows: int
    seq: int
    created: float
    smallest: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Odd:
    """One that is unlike its kin. times: its errors over theirs (root of the ratios' quotient); chance: that of the
    layers of an honest model any is so far out; peers: how many it was compared with."""

    pooled: Pooled
    times: float
    chance: float
    peers: int


def unlike(golden: Iterable[Pooled], mine: Iterable[Pooled], rate: float) -> list[Odd]:
    """Those of mine that stand out above their kin at ``rate`` for all of them together, by Bonferroni."""
    mine = [p for p in mine if p.ratio > 0]
    groups: dict[tuple[str, str, str], list[Pooled]] = {}
    for p in mine:
        groups.setdefault((p.cls, p.role, p.dtype), []).append(p)
    theirs: dict[tuple[str, str, str], list[Pooled]] = {}
    for p in golden:
        if p.ratio > 0:
            theirs.setdefault((p.cls, p.role, p.dtype), []).append(p)
    looks = sum(len(g) for g in groups.values() if len(g) > LEAST)
    found = []
    for key, group in groups.items():
        if len(group) <= LEAST:
            continue
        own = {p.tap: p.ratio for p in theirs.get(key, ())}
        for p in group:
            # where golden has the same tap, what honest layers differ by is taken off: its own ratio there
            paired = all(q.tap in own for q in group)
            x = {id(q): math.log(q.ratio) - (math.log(own[q.tap]) if paired else 0.0) for q in group}
            others = [x[id(q)] for q in group if q is not p]
            times, chance = _stands_out(x[id(p)], others, p.freedom)
            chance = min(1.0, chance * max(looks, 1))
            if chance < rate and times > 1:
                found.append(Odd(p, times, chance, len(others)))
    return found


def _stands_out(x: float, others: list[float], freedom: float) -> tuple[float, float]:
    """(root of the ratio over the kin's mean, probability of as much above it)."""
    n = len(others)
    mean = sum(others) / n
    squares = sum((o - mean) ** 2 for o in others)
    own = 2.0 / max(freedom, 1.0)  # variance of the logarithm of a chi-square over its degrees, to first order
    found = against_kin(x - mean, n, squares, PRIOR_SPREAD**2, PRIOR_FREEDOM, own)
    return math.exp((x - mean) / 2.0), found.above
