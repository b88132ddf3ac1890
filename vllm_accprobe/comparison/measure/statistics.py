"""Two tensors of which at least one was not stored: what their statistics and checksums say.

The problem: statistics are all that many dumps have, tools take them in different precision and leave some out, and
equal statistics do not prove equal tensors. The idea: only what both sides have is compared, as lower bounds of the
error; a side that has the values but no statistics gets them computed; the four figures of both sides are said beside
the verdict, which is marked as theirs.
Not here: what follows from the bounds (judging.py).
"""

from __future__ import annotations

from vllm_accprobe.align.derived import join_stats
from vllm_accprobe.align.shards import CAT, ONE
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.dump.schema import Record, Stats
from vllm_accprobe.dump.stats import tensor_stats

Figures = tuple["float | None", ...]
"""max, min, mean, norm; None what a tool did not take."""
NAMES = ("max", "min", "mean", "norm")
_INFINITE = float("inf"), 0.0


def statistics_of(group: Group, loader: Loader) -> Stats | None:
    """Of the whole tensor: as recorded, of disjoint pieces together, or computed from the values."""
    if group.merge is None:
        return None
    found = [group.records[i].stats for i in group.merge.use]
    if group.merge.kind == ONE and found[0] is not None:
        return found[0]
    whole = [(k, 0, group.records[group.merge.use[k]].shape[group.merge.dim or 0]) for k in range(len(found))]
    if group.merge.kind == CAT and sorted(group.merge.pieces) == whole and all(found):
        return join_stats([s for s in found if s is not None])
    if not group.readable:
        return None
    block = loader.load(group)
    return tensor_stats(block.data, block.dtype)


def checksums(golden: Group, mine: Group) -> bool | None:
    """Whether the checksums of one kind that both sides have are equal; None where they have none."""
    g, m = golden.fingerprint, mine.fingerprint
    if g is None or m is None:
        return None
    kinds = [{str(h).partition(":")[0] for h in f[-1]} for f in (g, m)]
    named = all(":" in str(h) for f in (g, m) for h in f[-1])
    return g[-1] == m[-1] if named and kinds[0] == kinds[1] else None


def common(golden: Stats, mine: Stats) -> bool:
    """Whether both sides have one of the four figures, or a non-finite value."""
    both = zip(figures(golden), figures(mine), strict=True)
    return any(g is not None and m is not None for g, m in both) or any((golden.nan, golden.inf, mine.nan, mine.inf))


def figures(stats: Stats) -> Figures:
    return stats.max, stats.min, stats.mean, stats.l2


def said(pair: tuple[Figures, ...]) -> str:
    """``golden | mine: max 1 | 2, ...``"""
    both = [(n, g, m) for n, g, m in zip(NAMES, *pair, strict=True) if g is not None or m is not None]
    return "golden | mine: " + ", ".join(f"{n} {_text(g)} | {_text(m)}" for n, g, m in both) if both else ""


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def same_weights(golden: Record, mine: Record, allowed: float) -> bool | None:
    """Whether two weights of one dtype can be the same by their statistics: extremes to the bit, which no order of
    summation changes, norm and mean within ``allowed`` roundings of the norm. None where they do not say."""
    g, m = golden.stats, mine.stats
    if golden.dtype != mine.dtype or g is None or m is None or None in (g.min, g.max, m.min, m.max):
        return None
    if (g.min, g.max) != (m.min, m.max):
        return False
    error = statistics_error(g, m)
    return error[0] <= 2 * allowed


def statistics_error(g: Stats, m: Stats) -> tuple[float, float]:
    """How far two tensors must be apart, from statistics alone: lower bounds of (relative L2 error, lone element's).

    |norm(m) - norm(g)| / norm(g) and |mean(m) - mean(g)| / rms(g) are at most the relative L2 error; the extremes'
    differences, in units of max(|extreme|, rms), at most the worst element's. Infinite where NaN or infinity differ.
    A figure that one side does not have says nothing; without golden's norm its extremes are the scale.
    """
    if g.count != m.count or _other_count(g.nan, m.nan) or _other_count(g.inf, m.inf):
        return _INFINITE
    ends = [(a, b) for a, b in ((g.min, m.min), (g.max, m.max)) if a is not None and b is not None]
    n = max(g.count - g.nan - g.inf, 1)
    scale = max((abs(a) for a, _ in ends), default=0.0)
    rms = g.l2 / n**0.5 if g.l2 is not None else scale
    pairs = [*ends, *((a, b) for a, b in ((g.mean, m.mean), (g.l2, m.l2)) if a is not None and b is not None)]
    if not rms:
        return (0.0, 0.0) if all(a == b for a, b in pairs) else _INFINITE
    parts = [0.0]
    if g.l2 is not None and m.l2 is not None and g.l2:
        parts.append(abs(m.l2 - g.l2) / g.l2)
    if g.mean is not None and m.mean is not None:
        parts.append(abs(m.mean - g.mean) / rms)
    peaks = [0.0, *(abs(b - a) / max(abs(a), rms) for a, b in ends)]
    return float(max(parts)), float(max(peaks))


def _other_count(g: int, m: int) -> bool:
    """Some tools say only whether there is any, which is a count of 1."""
    return bool(g) != bool(m) or (g != m and min(g, m) > 1)
