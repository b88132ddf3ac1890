"""Whether mine is further away than servers that are known to be right are from one another, and under which condition.

The problem: log-probabilities of two right servers differ by batching and rounding, and a fixed limit is too wide for
one model and too narrow for the next. The idea: the limit is measured, prompt by prompt: golden to itself in other
batches, and golden to a floor. Of three servers with independent errors the squared distances are g2+m2, g2+f2 and
f2+m2 [three-cornered hat: J. Gray, D. Allan, Proc. 28th Freq. Control Symp. (1974) 243]; the smaller of mine's two
exceeds that of golden and floor only if mine's error exceeds both. Sign-flip tests over prompts, of all tokens, the
worst token and each condition at once [P. Westfall, S. Young, Resampling-Based Multiple Testing, 1993, 2.3].
A condition is an axis of the tokens' features and a threshold; the one that separates best, by likelihood, is named.

Not here: columns and features (token_gaps.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_accprobe.gate.measure.token_gaps import Table

RATE = 0.05
"""Chosen: as of evaluations (gate/evaluations.py)."""
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
    """What is compared with what, for each token. mine: float64 [n], to the right server that it is nearest to;
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
    """float64 [n]: what each token is compared with."""
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


AS_GOOD = math.log(20.0)
"""Chosen: two conditions whose likelihoods differ by less than 20 to 1 are both named [R. Royall, Statistical Evidence,
1997, 1.6: 8 is fairly strong, 32 strong evidence]."""
GRAIN = 0.1
"""Chosen: differences of contrasts below this, which is a factor of 1.2, are no reason for a condition."""
PARTS = 17
"""Chosen: thresholds on each axis that the verdict tries beside powers of two."""
ORDER = ("hit", "chunk", "batch", "least", "phase", "position", "length")
"""Most specific first, where conditions hold for the same tokens."""


@dataclass(frozen=True)
class GateCondition:
    """axis: phase, position, chunk, batch, hit or length. at: the threshold: "from" the position, the chunk's number,
    "over" so many requests or prompt tokens (up to so many where the sentence says so); None of phase and hit.
    sentence: for people. also: other conditions that explain it as well."""

    axis: str
    at: int | None
    sentence: str
    also: tuple[GateCondition, ...] = ()


@dataclass(frozen=True)
class Axis:
    """values: float64 [n] of the tokens, NaN unknown. up: the condition is "from a value on", else "up to".
    sentence: what is printed for (the last value without, the first with it, the tokens that have it)."""

    name: str
    values: np.ndarray
    up: bool
    sentence: Callable[[int, int, np.ndarray], tuple[int | None, str]]

    def mask(self, value: float) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return self.values >= value if self.up else self.values <= value


def axes(table: Table) -> list[Axis]:
    """Those on which the tokens differ."""

    def column(of: Callable[[int], float | None]) -> np.ndarray:
        values = [of(i) for i in range(len(table.tokens))]
        return np.array([math.nan if v is None else float(v) for v in values], np.float64)

    tokens, features = table.tokens, table.features
    phase = column(lambda i: tokens[i].phase == "decode")
    position, length = column(lambda i: tokens[i].position), column(lambda i: tokens[i].length)
    chunk, hit = column(lambda i: features[i].chunk), column(lambda i: features[i].hit)
    batch, least = column(lambda i: features[i].batch), column(lambda i: features[i].least)

    def second(u: int, v: int, mask: np.ndarray) -> tuple[int | None, str]:
        starts = sorted({f.start for f, m in zip(features, mask, strict=True) if m and f.chunk == v and f.start})
        where = "" if not starts else f" (from position {starts[0]:,} on)" if len(starts) == 1 else (
            f" (they begin at positions {starts[0]:,} to {starts[-1]:,})"
        )  # fmt: skip
        later = " and later ones" if np.nanmax(chunk) > v else ""
        return v, f"only rows of the {_ordinal(v)} chunk{later}{where}"

    found = [
        Axis("phase", phase, True, lambda u, v, m: (None, "only decode")),
        Axis("phase", phase, False, lambda u, v, m: (None, "only prefill")),
        Axis("position", position, True, lambda u, v, m: (v, f"from position {v:,} on")),
        Axis("chunk", chunk, True, second),
        Axis("batch", batch, True, lambda u, v, m: (u, f"only in batches over {u:,}")),
        Axis("least", least, False, lambda u, v, m: (v, f"only in batches of {'up to ' if v > 1 else ''}{v:,}")),
        Axis("hit", hit, True, lambda u, v, m: (None, "only prompts with a prefix hit")),
        Axis("hit", hit, False, lambda u, v, m: (None, "only prompts without a prefix hit")),
        Axis("length", length, True, lambda u, v, m: (u, f"only prompts over {u:,} tokens")),
        Axis("length", length, False, lambda u, v, m: (v, f"only prompts of up to {v:,} tokens")),
    ]
    return [axis for axis in found if len(np.unique(axis.values[~np.isnan(axis.values)])) > 1]


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third"}.get(n, f"{n}th")


def cells(table: Table) -> list[np.ndarray]:
    """Masks that the verdict looks at beside all tokens: of each axis, at powers of two and at PARTS quantiles of the
    values that occur."""
    found: dict[bytes, np.ndarray] = {}
    for axis in axes(table):
        known = axis.values[~np.isnan(axis.values)]
        low, high = float(known.min()), float(known.max())
        powers = [] if high <= 1 else [2.0**k for k in range(int(math.log2(high)) + 1)]
        over = axis.up and axis.name in ("batch", "length")  # "over 8" is 9 and more
        steps = [p + 1 if over else p for p in powers]
        occur = np.unique(axis.values[~np.isnan(axis.values)])
        steps += occur[np.unique(np.linspace(0, len(occur) - 1, PARTS).astype(int))].tolist()
        for value in steps:
            if low < value <= high if axis.up else low <= value < high:
                mask = axis.mask(value)
                found.setdefault(mask.tobytes(), mask)
    return list(found.values())


@dataclass(frozen=True)
class _Cut:
    axis: Axis
    below: float
    value: float
    mask: np.ndarray
    likelihood: float


def explain(table: Table, sizes: Sizes, rate: float) -> tuple[GateCondition, np.ndarray] | None:
    """The condition of a difference that is beyond the floor, and bool [n], which tokens have it; None where none parts
    the tokens, or where all else is beyond the floor, too."""
    y = contrast(sizes.mine, limits(sizes))
    known = ~np.isnan(y)
    share = _distinct(table)
    cuts = [cut for axis in axes(table) if (cut := _best(axis, y, known, share)) is not None]
    cuts = [cut for cut in cuts if cut.likelihood > AS_GOOD and _only(table, sizes, cut.mask & known, rate)]
    if not cuts:
        return None
    best = max(cut.likelihood for cut in cuts)
    good = [cut for cut in cuts if best - cut.likelihood < AS_GOOD]
    good.sort(key=lambda cut: (int((cut.mask & known).sum()), ORDER.index(cut.axis.name)))
    first, *others = [_named(cut) for cut in good]
    return replace(first, also=tuple(others)), good[0].mask


def _distinct(table: Table) -> float:
    """The share of tokens that are not the same prompt and place in another pass, which says the same again."""
    places = {(p, t.ordinal, t.scored) for p, t in zip(table.prompt.tolist(), table.tokens, strict=True)}
    return len(places) / max(len(table.tokens), 1)


def _best(axis: Axis, y: np.ndarray, known: np.ndarray, share: float) -> _Cut | None:
    """The threshold that leaves the least sum of squares around two means, of which the one with the condition is the
    higher, and beyond the floor."""
    use = known & ~np.isnan(axis.values)
    values, at = np.unique(axis.values[use], return_inverse=True)
    if len(values) < 2:
        return None
    count, total = np.bincount(at), np.bincount(at, weights=y[use])
    n, s = np.cumsum(count)[:-1], np.cumsum(total)[:-1]
    every, whole = int(count.sum()), float(total.sum())
    low, high = s / n, (whole - s) / (every - n)
    inside, outside = (high, low) if axis.up else (low, high)
    between = n * (every - n) / every * np.square(high - low)
    between[(inside <= outside) | (inside <= 0)] = 0.0
    i = int(between.argmax())
    if not between[i]:
        return None
    residue = float(np.square(y[use] - whole / every).sum()) + every * GRAIN**2
    likelihood = share * every / 2 * math.log(residue / (residue - float(between[i])))
    below, value = (values[i], values[i + 1]) if axis.up else (values[i + 1], values[i])
    return _Cut(axis, float(below), float(value), axis.mask(value), likelihood)


def _only(table: Table, sizes: Sizes, mask: np.ndarray, rate: float) -> bool:
    """Whether the tokens without the condition are no further away than the floor allows, and those with it are. Of a
    few prompts signs say nothing: the rest has to be nearer to the floor than to what has the condition, too."""
    rest, inside = (by_prompt(table, sizes, m) for m in (~mask, mask))
    rest, inside = rest[~np.isnan(rest)], inside[~np.isnan(inside)]
    if not len(rest) or not len(inside) or inside.mean() <= 0 or rest.mean() > inside.mean() / 2:
        return False
    return float(sign_flips(rest[:, None], 0)[0]) > rate


def _named(cut: _Cut) -> GateCondition:
    at, sentence = cut.axis.sentence(int(cut.below), int(cut.value), cut.mask)
    return GateCondition("batch" if cut.axis.name == "least" else cut.axis.name, at, sentence)
