"""Which logits a row's experts were chosen by, and how clearly.

The problem: whether another expert is a near tie stands in the router's logits, a tensor of another tap. The idea: the
plan gives a unit of chosen experts the groups of its router's logits; where rows differ, the logits of these rows, of
the same step on either side, are read as well, and only what they say is kept (judge/routing.py: three numbers a row).
Logits whose choice is not in both dumps are told how many of them are taken, and speak for themselves.
Not here: what follows from that (judge/routing.py, near_ties.py), the other measures (activations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.schema import Module
from vllm_accprobe.judge import near_ties, routing

Place = tuple[Group, Any, np.ndarray]
"""A group of chosen experts, how it is cut, and its rows."""


def with_routers(units: Sequence[Unit], modules: Iterable[Module] = ()) -> list[Unit]:
    """``units`` in order of the flow; those of chosen experts with the logits that come last before them, and logits
    without a choice with how many of them are taken. modules: of either dump."""
    out = _with_takes(units, modules)
    for i, unit in enumerate(units):
        if routing.is_choice(unit.key[1], unit.cls):
            for other in reversed(units[:i]):
                tap, role, call = other.key
                fits = call == unit.key[2] and routing.is_logits(tap, role, other.cls)
                if fits and routing.in_front_of(tap, unit.key[0]):
                    out[i] = replace(unit, router=(other.golden, other.mine))
                    break
    return out


def _with_takes(units: Sequence[Unit], modules: Iterable[Module]) -> list[Unit]:
    holders = {module.tap: near_ties.taken(module.attrs) for module in modules if "top_k" in module.attrs}
    chosen = [u.key[0] for u in units if routing.is_choice(u.key[1], u.cls)]
    biased = [u.key[0] for u in units if u.key[1].endswith("correction_bias")]
    out = []
    for unit in units:
        tap, role, _ = unit.key
        takes = 0
        if holders and routing.is_logits(tap, role, unit.cls):
            own = [holder for holder in holders if routing.in_front_of(tap, holder)]
            block = tap.rpartition(".")[0] + "."
            told = any(routing.in_front_of(tap, choice) for choice in chosen)
            if own and not told and not any(bias.startswith(block) for bias in biased):
                takes = min(holders[holder] for holder in own)
        out.append(replace(unit, takes=takes) if takes else unit)
    return out


def logits_alone(golden: Any, mine: Any, takes: int) -> np.ndarray:
    """`near_ties.undecided` of rows of logits. golden, mine: (block, rows in it)."""
    g, m = (widen(block.data[at], block.dtype) for block, at in (golden, mine))
    return near_ties.undecided(g.reshape(len(g), -1), m.reshape(len(m), -1), takes)


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
