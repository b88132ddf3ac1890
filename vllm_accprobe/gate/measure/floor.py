"""Whether mine is further away than servers that are known to be right are from one another.

The problem: log-probabilities differ between two runs of one server, because batches differ, and more between two
honest cards, because they round in other places; a fixed limit is too wide for one model and too narrow for the next.
The idea: the limit is measured, prompt by prompt. Beyond batching: golden to mine against golden to itself in other
batches. Beyond rounding: with a further server that is known to be right (golden's model in another dtype or on another
card), the three distances tell each one's own error [three-cornered hat: J. Gray, D. Allan, Proc. 28th Freq. Control
Symp. (1974) 243]: with independent errors g, m and f of golden, mine and floor, the squares are g2+m2, g2+f2 and f2+m2,
so that the smaller of mine's two exceeds that of golden and floor only if mine's own error exceeds both of theirs.
Which of the three is the exact one need not be known.

Under the null the two sizes of a prompt may change places, so each prompt is a coin: a sign-flip test over prompts, of
all tokens, of the worst token, and of each condition at once, whose largest statistic is what counts [P. Westfall,
S. Young, Resampling-Based Multiple Testing, 1993, 2.3]: conditions that hold for few tokens are looked for without more
false alarms. Where a condition holds for few prompts, signs say nothing; there it is tested whether just these prompts,
of all that there are, would be the ones beyond the limit. Each of the two tests has half of the rate.
Not here: the columns (token_table.py), conditions (conditions.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.gate.measure.token_table import Table

RATE = 0.05
"""Chosen: as of evaluations (samples/contrast.py)."""
LEAST = 6
"""Derived: with fewer prompts no pattern of signs is rarer than half of 0.05 (1 / 2^5 = 0.03)."""
ALLOWED = math.sqrt(2.0)
"""Chosen: times the distance of two right servers that mine may be away from the nearer: twice the variance, as of a
server that rounds each number once more than both."""
EXACT = 14
"""Chosen: so many prompts have 16,384 patterns of signs, which are all tried."""
DRAWS = 19_999
"""Chosen: patterns that are drawn where there are more prompts; the least p is 5e-5."""
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Sizes:
    """What is held against what, for each token. mine: float64 [n], to the right server that it is nearest to;
    nearest: its index, 0 for golden, 1 for the first floor; itself, rounding: golden to itself, golden to the farthest
    floor, NaN where unknown."""

    mine: np.ndarray
    nearest: int
    itself: np.ndarray
    rounding: np.ndarray


def batching(table: Table) -> Sizes:
    """Golden's own batches as the only limit."""
    return Sizes(table.across, 0, table.itself, np.full_like(table.across, np.nan))


def rounding(table: Table) -> Sizes:
    """With the floors: mine to the nearest right one, as it is for most prompts."""
    if not len(table.floors):
        return batching(table)
    known = ~np.isnan(table.floors).all(axis=0)
    far = np.full_like(table.across, np.nan)
    far[known] = np.nanmax(table.floors[:, known], axis=0)
    choices = [
        Sizes(np.where(np.isnan(mine), table.across, mine), i, table.itself, far)
        for i, mine in enumerate([table.across, *table.others])
    ]
    everything = np.ones(len(table.tokens), bool)
    return min(choices, key=lambda sizes: _mean(by_prompt(table, sizes, everything)))


def _mean(x: np.ndarray) -> float:
    return float(np.nanmean(x)) if (~np.isnan(x)).any() else 0.0


def contrast(mine: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """(mine - limit) / (mine + limit), in -1 .. 1: changes its sign where the two change places, and no prompt weighs
    more than another. 0 where both are 0 or both infinite, 1 where mine alone is no number."""
    with np.errstate(invalid="ignore", divide="ignore"):
        value = (mine - limit) / (mine + limit)
    value = np.where((mine == limit) & ~np.isnan(limit), 0.0, value)
    value = np.where(np.isinf(mine) & np.isfinite(limit), 1.0, value)
    return np.where(np.isinf(limit) & np.isfinite(mine), -1.0, value)


def limits(sizes: Sizes) -> np.ndarray:
    """float64 [n]: what each token is held to."""
    return np.fmax(sizes.itself, ALLOWED * sizes.rounding)


def by_prompt(table: Table, sizes: Sizes, mask: np.ndarray, worst: bool = False) -> np.ndarray:
    """float64 [prompts]: the contrast of the tokens in ``mask``, of root mean squares or of the worst, in the mean over
    passes; NaN where a prompt has none with a limit."""
    of = np.flatnonzero(mask & ~(np.isnan(sizes.itself) & np.isnan(sizes.rounding)))
    passes = int(table.pass_index.max(initial=0)) + 1
    group = table.prompt[of] * passes + table.pass_index[of]
    n = len(table.names) * passes
    gather = _worst if worst else _mean_square
    limit = np.fmax(gather(sizes.itself[of], group, n), ALLOWED * gather(sizes.rounding[of], group, n))
    x = contrast(gather(sizes.mine[of], group, n), limit).reshape(-1, passes)
    known = ~np.isnan(x)
    total, count = np.where(known, x, 0.0).sum(axis=1), known.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def no_numbers(sizes: Sizes) -> np.ndarray:
    """bool [n]: tokens for which mine alone has no number."""
    limit = limits(sizes)
    return np.isinf(sizes.mine) & ~np.isinf(limit)


def _mean_square(values: np.ndarray, group: np.ndarray, n: int) -> np.ndarray:
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        counts = np.bincount(group[known], minlength=n)
        total = np.bincount(group[known], weights=np.square(values[known]), minlength=n)
        return np.where(counts > 0, np.sqrt(total / np.maximum(counts, 1)), np.nan)


def _worst(values: np.ndarray, group: np.ndarray, n: int) -> np.ndarray:
    found = np.full(n, -np.inf)
    known = ~np.isnan(values)
    np.maximum.at(found, group[known], values[known])
    return np.where(np.isneginf(found), np.nan, found)


@dataclass(frozen=True)
class Tested:
    """p: of the whole; cells: of each mask, so that any false one of them is as rare as p says. prompts: how many."""

    p: float
    cells: tuple[float, ...]
    prompts: int


def judge(table: Table, sizes: Sizes, masks: Sequence[np.ndarray], seed: int = 0) -> Tested | None:
    """Of all tokens, and of each mask. None with fewer than LEAST prompts that have a limit."""
    everything = np.ones(len(table.tokens), bool)
    whole = by_prompt(table, sizes, everything)
    n = int((~np.isnan(whole)).sum())
    if n < LEAST:
        return None
    columns = [whole, by_prompt(table, sizes, everything, worst=True)]
    columns += [by_prompt(table, sizes, mask) for mask in masks]
    x = np.stack(columns, axis=1)
    signs = sign_flips(np.nan_to_num(x), seed)
    few = few_prompts(whole, x[:, 2:], seed)
    both = np.minimum(2.0 * np.minimum(signs, np.concatenate([[1.0, 1.0], few])), 1.0)
    if no_numbers(sizes).any():  # that is no rounding, however few
        both[0] = 0.0
    return Tested(float(both.min()), tuple(float(p) for p in both[2:]), n)


def sign_flips(x: np.ndarray, seed: int) -> np.ndarray:
    """One-sided p of each column's sum, float64 [prompts, columns], 0 where a prompt has no part in it: under all signs
    of the prompts (DRAWS of them where there are more than EXACT), how often the largest of the studentized sums of all
    columns reaches it."""
    size = np.sqrt(np.square(x).sum(axis=0))
    scaled = np.divide(x, size, out=np.zeros_like(x), where=size > 0)
    seen = scaled.sum(axis=0)
    n = len(x)
    hits, total = np.zeros(x.shape[1]), 0
    if n <= EXACT:
        patterns = np.arange(1 << n)[:, None] >> np.arange(n) & 1
        largest = ((1.0 - 2.0 * patterns) @ scaled).max(axis=1)
        hits += (largest[:, None] >= seen - 1e-9).sum(axis=0)
        return hits / (1 << n)
    random = np.random.default_rng(seed)
    while total < DRAWS:
        rows = min(DRAWS - total, max(_CHUNK // n, 1))
        signs = 1.0 - 2.0 * random.integers(0, 2, (rows, n))
        largest = (signs @ scaled).max(axis=1)
        hits += (largest[:, None] >= seen - 1e-9).sum(axis=0)
        total += rows
    return (hits + 1) / (DRAWS + 1)


def few_prompts(whole: np.ndarray, cells: np.ndarray, seed: int) -> np.ndarray:
    """p of each column: the prompts that it holds for are beyond the limit in the mean, and so many others of all
    prompts would seldom be as far up. float64 [prompts], [prompts, columns], NaN where a prompt has no part. 1 where it
    holds for more than half of the prompts: there signs are for."""
    known = ~np.isnan(whole)
    values, member = whole[known], ~np.isnan(cells[known])
    n, k = len(values), member.sum(axis=0)
    fits = (k > 0) & (2 * k <= n)
    p = np.ones(cells.shape[1])
    deviation = float(values.std())
    if not fits.any() or not deviation:
        return p
    weights = np.where(member[:, fits], 1.0 / k[fits], 0.0)
    scale = deviation * np.sqrt(1.0 / k[fits] - 1.0 / n)
    beyond = np.array([_mean(cells[known][:, c]) > 0 for c in np.flatnonzero(fits)])
    seen = (values @ weights - values.mean()) / scale
    random, hits = np.random.default_rng(seed), np.zeros(int(fits.sum()))
    for _ in range(DRAWS // 10):
        largest = ((random.permutation(values) @ weights - values.mean()) / scale).max()
        hits += largest >= seen - 1e-9
    p[fits] = np.where(beyond, (hits + 1) / (DRAWS // 10 + 1), 1.0)
    return p
