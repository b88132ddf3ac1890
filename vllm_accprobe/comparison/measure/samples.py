"""A few values of the pairs that failed, so that a person can see what the numbers look like.

The problem: "relative L2 0.08" does not say whether a row is scaled, shifted, shuffled or garbage; a scatter of mine
over golden does, at a glance. The idea: for the worst failed pair of each tensor, first in data-flow order first, and
then for other failed pairs, read the worst row again and a few others, at most `VALUES` spread values of each kind.
After the comparison, so that measuring stays as it is; where something cannot be read there is no sample, and nothing
else changes. Not here: what is wrong with the values (judge/), drawing (report/).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_accprobe.align.tokens import SideRows
from vllm_accprobe.comparison.measure.read import Loader, Unread, find_cut
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.plan.units import Plan
from vllm_accprobe.comparison.result import FAIL, Pair
from vllm_accprobe.comparison.row_table import RowLog, ValueSample
from vllm_accprobe.dump.dtypes import widen

VALUES = 256
OTHER_ROWS = 15
MAX_PAIRS = 64


def take_samples(
    plan: Plan, loaders: tuple[Loader, Loader], pairs: Sequence[Pair], log: RowLog, limit: int = MAX_PAIRS
) -> tuple[ValueSample, ...]:
    """Samples of up to ``limit`` failed pairs, in the order of ``pairs``."""
    units = {u.key: u for u in plan.units}
    out = []
    for i in _chosen(pairs, limit):
        unit = units.get((pairs[i].tap, pairs[i].role, pairs[i].call))
        try:
            sample = None if unit is None else _sample(i, pairs[i], unit, plan, loaders, log)
        except Unread:
            sample = None
        if sample is not None:
            out.append(sample)
    for loader in loaders:
        loader.forget()
    return tuple(out)


def _chosen(pairs: Sequence[Pair], limit: int) -> list[int]:
    """The worst failed pair of each tensor's name, in data-flow order; then other failed pairs, in that order too."""
    best: dict[tuple[str, str, int], int] = {}
    for i, p in enumerate(pairs):
        if p.status == FAIL and p.rows:
            key = (p.tap, p.role, p.call)
            if key not in best or (p.worst_row_rel_l2 or 0.0) > (pairs[best[key]].worst_row_rel_l2 or 0.0):
                best[key] = i
    first = set(best.values())
    failed = [i for i, p in enumerate(pairs) if p.status == FAIL and p.rows]
    return sorted(sorted(failed, key=lambda i: (i not in first, pairs[i].order))[:limit])


def _sample(
    index: int, pair: Pair, unit: Unit, plan: Plan, loaders: tuple[Loader, Loader], log: RowLog
) -> ValueSample | None:
    found = log.worst_key(pair)
    group = next((g for g in unit.mine if g.merge and (g.first.step, g.first.name) == (pair.step, pair.mine)), None)
    if found is None or group is None or not group.readable:
        return None
    worst, keys = found
    others = keys[keys != worst]
    others = others[np.unique(np.linspace(0, len(others) - 1, OTHER_ROWS).astype(int))] if len(others) else others
    first = [_row(plan, unit, group, loaders, worst)]
    rest = [_row(plan, unit, group, loaders, int(k)) for k in others]
    if first[0] is None:
        return None
    share = max(1, VALUES // max(len(rest), 1))
    parts = [_spread(r, VALUES if r is first[0] else share) for r in (*first, *rest) if r is not None]
    golden, mine = (np.concatenate([p[side] for p in parts]) for side in (0, 1))
    request, position = plan.tokens.name(worst)
    return ValueSample(index, golden, mine, len(parts[0][0]), request, position)


def _row(
    plan: Plan, unit: Unit, mine: Group, loaders: tuple[Loader, Loader], key: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """One row of both sides as float32 [width], the last computed where a side has it more than once."""
    golden = [(g, row) for g in unit.golden if g.readable and (row := _find(plan.tokens.golden, g, key)) is not None]
    own = _find(plan.tokens.mine, mine, key)
    if not golden or own is None:
        return None
    partner, other = golden[-1]
    out = []
    places = ((partner, other), (mine, own))
    for loader, (group, row), cut in zip(loaders, places, find_cut(partner, mine), strict=True):
        block = loader.load(group, cut)
        if row >= len(block.data):
            return None
        out.append(widen(block.data[row], block.dtype, as_float=True).astype(np.float32))
    return (out[0], out[1]) if len(out[0]) == len(out[1]) else None


def _find(side: SideRows, group: Group, key: int) -> int | None:
    rows = None if group.where is None else side.rows.get(group.where)
    if rows is None:
        return None
    at = np.flatnonzero((rows.keys == key) & rows.keep)
    return int(at[-1]) if len(at) else None


def _spread(row: tuple[np.ndarray, np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray]:
    width = len(row[0])
    chosen = np.arange(width) if width <= n else np.linspace(0, width - 1, n).astype(int)
    return row[0][chosen], row[1][chosen]
