"""The smallest distance that these prompts could have shown, per condition; and how many would show enough.

The problem: two servers that "do not differ" to eight prompts may differ by six times the floor in every decoded token.
The idea: the same test (floor.judge) judges a mine that is further away: the distances that were measured, of the
tokens under one condition, are enlarged alike, until the test fails. How the distances scatter over tokens and prompts,
what the limits are, and how many conditions share the false-alarm rate, all of that is then as it was. The figure is in
units of the floor, the distance of servers that are right, as the verdict's own. Too few prompts are those that would
not have shown ENOUGH times the floor, in all tokens, in prefill or in decode: that is no pass.
Not here: the test (floor.py), the verdict (gating.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_accprobe.gate.measure import floor
from vllm_accprobe.gate.measure.floor import Sizes
from vllm_accprobe.gate.measure.token_table import Table

ENOUGH = 4.0
"""Chosen: times the floor that a pass excludes. A decode-only fault of 6.4 times passed eight prompts in one of two
runs; the faults of the gate's laboratory lie above 6."""
ALL = "all tokens"
_MOST = 64.0
_STEPS = 3
"""Halvings of the logarithm between 1 and ENOUGH, or from there to _MOST: the figure is right to a factor of 4^(1/8),
1.19, where it is enough."""
_TIMES = (2, 4, 8, 16)


@dataclass(frozen=True)
class ShownDistance:
    """condition: of a cell (gating.py), all tokens or a phase; times: the smallest distance, in units of the floor,
    that would have failed; None where none up to _MOST would have; 0 where any difference fails."""

    condition: str
    times: float | None

    @property
    def enough(self) -> bool:
        return self.times is not None and self.times <= ENOUGH


@dataclass(frozen=True)
class Power:
    """shown: of each condition; needed: prompts with which ENOUGH would be shown, None where these do or where not even
    sixteen times as many would."""

    shown: tuple[ShownDistance, ...]
    needed: int | None

    @property
    def enough(self) -> bool:
        return all(one.enough for one in self.shown)


def of(table: Table, sizes: Sizes, masks: Sequence[np.ndarray], rate: float) -> Power:
    """masks: as given to floor.judge, with which the verdict was made."""
    wheres = _conditions(table, sizes)
    shown = tuple(ShownDistance(name, _smallest(table, sizes, masks, where, rate)) for name, where in wheres.items())
    found = Power(shown, None)
    if found.enough:
        return found
    short = [wheres[one.condition] for one in shown if not one.enough]
    prompts = int((~np.isnan(floor.by_prompt(table, sizes, np.ones(len(table.tokens), bool)))).sum())
    for k in _TIMES:
        more = _repeated(table, sizes, masks, short, k)
        if all(_fails(more[0], more[1], more[2], where, ENOUGH, rate) for where in more[3]):
            return Power(shown, k * prompts)
    return found


def _conditions(table: Table, sizes: Sizes) -> dict[str, np.ndarray]:
    limited = ~np.isnan(floor.limits(sizes))
    phases = np.array([t.phase for t in table.tokens])
    found = {ALL: limited}
    if len(set(phases[limited].tolist())) > 1:
        found |= {name: limited & (phases == name) for name in dict.fromkeys(phases[limited].tolist())}
    return found


def _smallest(
    table: Table, sizes: Sizes, masks: Sequence[np.ndarray], where: np.ndarray, rate: float
) -> float | None:  # fmt: skip
    """By halving: the test's p falls as the distance grows."""
    right = _rms(_right(sizes)[where])
    if not right:
        return 0.0
    low, high = 0.0, math.log(ENOUGH)
    if not _fails(table, sizes, masks, where, ENOUGH, rate):
        low, high = high, math.log(_MOST)
        if not _fails(table, sizes, masks, where, _MOST, rate):
            return None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _fails(table, sizes, masks, where, math.exp(middle), rate):
            high = middle
        else:
            low = middle
    return math.exp(high)


def _fails(
    table: Table, sizes: Sizes, masks: Sequence[np.ndarray], where: np.ndarray, times: float, rate: float
) -> bool:  # fmt: skip
    """Whether the verdict would be a fail with the distances in ``where`` enlarged to ``times`` that of right ones."""
    mine = sizes.mine.copy()
    base = mine[where]
    if not _rms(base):  # equal servers: the right ones' distances, of other tokens
        base = np.roll(_right(sizes)[where], int(where.sum()) // 2)
    size = _rms(base)
    if not size:
        return False
    mine[where] = base * (times * _rms(_right(sizes)[where]) / size)
    tested = floor.judge(table, replace(sizes, mine=mine), masks)
    return tested is not None and tested.p <= rate


def _right(sizes: Sizes) -> np.ndarray:
    return np.fmax(sizes.itself, sizes.rounding)


def _rms(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.sqrt(np.square(known).mean())) if len(known) else 0.0


def _repeated(
    table: Table, sizes: Sizes, masks: Sequence[np.ndarray], wheres: Sequence[np.ndarray], k: int
) -> tuple[Table, Sizes, list[np.ndarray], list[np.ndarray]]:
    """As if each prompt had been sent ``k`` times under other names, with the same distances."""
    n = len(table.names)
    prompt = np.concatenate([table.prompt + i * n for i in range(k)])
    wide = replace(
        table, names=tuple(f"{name}#{i}" for i in range(k) for name in table.names), prompt=prompt,
        pass_index=np.tile(table.pass_index, k), tokens=table.tokens * k, features=table.features * k,
        across=np.tile(table.across, k), itself=np.tile(table.itself, k), floors=np.tile(table.floors, k),
        others=np.tile(table.others, k),
    )  # fmt: skip
    mine, itself, rounding = (np.tile(x, k) for x in (sizes.mine, sizes.itself, sizes.rounding))
    more = Sizes(mine, sizes.nearest, itself, rounding)
    return wide, more, [np.tile(m, k) for m in masks], [np.tile(w, k) for w in wheres]
