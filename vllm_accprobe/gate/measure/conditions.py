"""Under which condition mine is wrong: only decode, from a position on, in a later chunk, in large batches, in hits.

The problem: whoever reads that two servers differ needs to know where to look, and conditions hang together: a second
chunk begins at a position, a prefix hit comes in the second pass, whose batches are larger. The idea: a condition is an
axis of the tokens' features and a threshold, and all thresholds that occur on all axes are tried; the one that parts
"as the floor" from "beyond the floor" best, by likelihood, is named, and every other axis that does so as well. It is
called "only" where the tokens without it are no further away than the floor allows.
Not here: features (features.py), what is beyond (floor.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vllm_accprobe.gate.measure.floor import Sizes, by_prompt, contrast, limits, sign_flips
from vllm_accprobe.gate.measure.token_table import Table

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
    """values: float64 [n] of the tokens, NaN unknown. up: the condition is "from a value on", else "up to". said: the
    sentence for (the last value without, the first with it, the tokens that have it)."""

    name: str
    values: np.ndarray
    up: bool
    said: Callable[[int, int, np.ndarray], tuple[int | None, str]]

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
    around = float(np.square(y[use] - whole / every).sum()) + every * GRAIN**2
    likelihood = share * every / 2 * math.log(around / (around - float(between[i])))
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
    at, sentence = cut.axis.said(int(cut.below), int(cut.value), cut.mask)
    return GateCondition("batch" if cut.axis.name == "least" else cut.axis.name, at, sentence)
