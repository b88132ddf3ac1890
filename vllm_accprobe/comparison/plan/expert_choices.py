"""Which logits a row's experts were chosen by, and how clearly.

The problem: whether another expert is a near tie stands in the router's logits, a tensor of another tap. The idea: the
plan gives a unit of chosen experts the groups of its router's logits; where rows differ, the logits of these rows, of
the same step on either side, are read as well, and only what they say is kept (judge/routing.py: three numbers a row).
Not here: what follows from that (judge/routing.py), the other measures (activations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.judge import routing

Place = tuple[Group, Any, np.ndarray]
"""A group of chosen experts, how it is cut, and its rows."""


def with_routers(units: Sequence[Unit]) -> list[Unit]:
    """``units`` in order of the flow; those of chosen experts with the logits that come last before them."""
    out = list(units)
    for i, unit in enumerate(units):
        if routing.is_choice(unit.key[1], unit.cls):
            for other in reversed(units[:i]):
                tap, role, call = other.key
                fits = call == unit.key[2] and routing.is_logits(tap, role, other.cls)
                if fits and routing.in_front_of(tap, unit.key[0]):
                    out[i] = replace(unit, router=(other.golden, other.mine))
                    break
    return out


def margins(
    readers: Sequence[Any],
    router: tuple[list[Group], list[Group]],
    places: tuple[Place, Place],
    fits: Callable[[int, Group], bool],
) -> np.ndarray | None:
    """`routing.margins` of some rows: float64 [rows, 3]. places: golden's and mine's. None where one side has no logits
    of that step, or another number of experts."""
    read: list[np.ndarray] = []
    for side, (group, cut, rows) in enumerate(places):
        logits = next((g for g in router[side] if g.where == group.where and g.readable and fits(side, g)), None)
        if logits is None:
            return None
        for what, how in ((group, cut), (logits, None)):
            block, at = readers[side].load(what, how, rows)
            read.append(widen(block.data[at], block.dtype))
    golden, golden_logits, mine, mine_logits = read
    if golden_logits.shape != mine_logits.shape:
        return None
    return routing.margins(golden.astype(np.int64), mine.astype(np.int64), golden_logits, mine_logits)
