"""How an operator rounded its results to their grid: to nearest, or toward zero.

The problem: a kernel that cuts float32 off to bfloat16 instead of rounding is right (vLLM's for AVX2, and for AVX-512
without bfloat16, do), but its errors are up to 2u and all of one sign, and limits for errors of at most u in either
direction call that a gain. The idea: truncation gives floor(q) and rounding round(q) of q = |y| / step; they differ in
half of all numbers, which decide by McNemar's test (`direction`). A truncated m stands for [m, m + step), so y - step /
2 is what to expect of it: against that its errors are those of rounding to nearest, under the same limits. A kernel may
truncate an intermediate result, too, which is a gain: -E[m step / 2] / E[m m] = -2/3 u for significands m that are
distributed as 1 / m [R. Hamming, Bell Syst. Tech. J. 49 (1970) 1609]; it is allowed where the reference knows of
earlier roundings. With torch alone: copied with the tests that gentest writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.kernels.float_formats import LOW, half_step
from vllm_accprobe.opcheck.floors.verdict import Verdict, judge as judge_nearest, judge_each as nearest_of_each, of_one

TOWARD_ZERO, EARLIER = "toward zero", "toward zero before the last rounding"
ROUNDING = "rounding"
"""A measure of its own: the share of the numbers that tell which are truncated. Half of them is a kernel's chance."""

_SAMPLE, _GLANCE = 8192, 1024
"""Numbers that are examined, evenly spread: where they decide, and where it is only reported how an operator rounds
that is right either way (chosen: half of them tell, and at three standard deviations a hundred would do)."""
_SIGMAS = 3.0
_EARLIER = 2.0**-6
"""Steps: noise above this is a rounding to the grid before the last one; that of float32 sums lies below."""
_FACTORS = torch.arange(-16, 17).double() / 8.0
"""In u: scales that are tried."""
Tensor = Any


@dataclass(frozen=True, slots=True)
class Direction:
    """What an output's numbers say. toward_zero: truncation explains them, and nothing better; decided: how many tell
    truncation from rounding; truncated: how many of these are; proved: no scale explains them as well, which takes some
    hundred numbers, and thousands where much was rounded before."""

    toward_zero: bool
    decided: int
    truncated: int
    proved: bool = False

    @property
    def share(self) -> float:
        return self.truncated / self.decided if self.decided else 0.0

    @property
    def nearest(self) -> bool:
        """They were rounded to nearest."""
        return _more(self.decided - self.truncated, self.truncated)


UNKNOWN = Direction(False, 0, 0)


def steps(y: Tensor, dtype: str) -> Tensor:
    """The distance of neighbours on ``dtype``'s grid at each of the float64 ``y``, subnormal ones included."""
    bits, least = LOW[dtype]
    return torch.ldexp(torch.ones_like(y), torch.frexp(y).exponent.clamp(min=least + 1) - bits)


def direction(exact: Tensor, mine: Tensor, dtype: str, most: int = _SAMPLE) -> Direction:
    """exact: float64; mine: the captured numbers, float64, same shape; dtype: whose grid they lie on, torch's name;
    most: how many numbers are tested.

    With f the scale within 1 -+ 2u, in steps of u / 8, for which floor(f q) is right most often, mine truncates where
    floor alone is right t times and round(q) alone r times, with t - r > 3 sqrt(t + r): McNemar's test of paired
    predictions [Psychometrika 12 (1947) 153] at three standard deviations; unless the same test prefers some round(g q)
    to floor(f q): a scale that is 0.7u too small resembles truncation (92 % of its numbers), and explains its own
    better. An error before the last rounding takes numbers from both counts alike, and needs no estimate."""
    if dtype not in LOW:
        return UNKNOWN
    y, m = exact.reshape(-1), mine.reshape(-1)
    if len(y) > most:
        at = torch.linspace(0, len(y) - 1, most).long()
        y, m = y[at], m[at]
    seen = torch.isfinite(y) & torch.isfinite(m)
    y, m = y[seen], m[seen]
    step = steps(y, dtype)
    q, captured = y / step, m / step
    rounded = q.round() == captured
    t, r = _either(q.trunc() == captured, rounded)
    if _more(r, t):
        return Direction(False, t + r, t)
    scaled = q * (1.0 + half_step(dtype) * _FACTORS[:, None])
    cuts = scaled.trunc() == captured
    best = cuts[int(cuts.sum(1).argmax())]
    if not _more(*_either(best, rounded)):
        return Direction(False, t + r, t)
    rounds = scaled.round() == captured
    against = list(zip((best & ~rounds).sum(1).tolist(), (rounds & ~best).sum(1).tolist(), strict=True))
    likely = not any(_more(b, a) for a, b in against)
    return Direction(likely, t + r, t, likely and all(_more(a, b) for a, b in against))


def _either(a: Tensor, b: Tensor) -> tuple[int, int]:
    """How often a alone, and b alone, is right."""
    return int((a & ~b).sum()), int((b & ~a).sum())


def _more(a: int, b: int) -> bool:
    return bool(a - b > _SIGMAS * (a + b) ** 0.5)


def judge(
    reference: Tensor, mine: Tensor, dtype: str, *, noise: Tensor | None = None, bound: Tensor | None = None,
    exact: Tensor | None = None, **more: Any,
) -> Verdict:  # fmt: skip
    """`judge_each` of one call. reference, mine, exact: [rows, width]; noise, bound: broadcastable."""
    noise, bound, exact = (of_one(x, reference) for x in (noise, bound, exact))
    return judge_each(reference[None], mine[None], dtype, noise=noise, bound=bound, exact=exact, **more)[0]


def judge_each(
    references: Tensor, mine: Tensor, dtype: str, *,
    noise: Tensor | None = None, bound: Tensor | None = None, last: float | None = None,
    exact: Tensor | None = None, strict: bool = False, **more: Any,
) -> list[Verdict]:  # fmt: skip
    """verdict.judge_each, which knows rounding to nearest, with truncation allowed for: its arguments, and its verdicts
    with ``rounding`` TOWARD_ZERO where that is how mine was rounded, or EARLIER where nothing but a truncated
    intermediate result explains it.

    more: its other arguments; exact: what was to be rounded, where ``references`` has been rounded itself; strict:
    truncation fails, with the measure ROUNDING where it is proved, and by the limits of rounding to nearest where these
    are passed."""
    verdicts = nearest_of_each(references, mine, dtype, noise=noise, bound=bound, last=last, **more)
    if last == 0.0 or dtype not in LOW or not references.is_floating_point():
        return verdicts
    sources = references if exact is None else exact
    for k, smaller in enumerate(_smaller(sources, mine)):
        if smaller and not verdicts[k].nonfinite_mismatch:
            own, proved = (None if x is None else x[k] for x in (noise, bound))
            verdicts[k] = _truncated(verdicts[k], references[k], sources[k], mine[k], dtype, own, proved, strict,
                                     {"last": last, **more})  # fmt: skip
    return verdicts


def _truncated(
    nearest: Verdict, reference: Tensor, source: Tensor, mine: Tensor, dtype: str, noise: Tensor | None,
    bound: Tensor | None, strict: bool, more: Mapping[str, Any],
) -> Verdict:  # fmt: skip
    """The verdict of a call that passed, or not, as rounded to the ``nearest``."""
    found = direction(source, mine, dtype, _GLANCE if nearest.passed and not strict else _SAMPLE)
    if strict and nearest.passed and found.proved:
        return replace(nearest, passed=False, measure=ROUNDING, value=found.share, limit=0.5, row=-1, column=-1,
                       rounding=TOWARD_ZERO)  # fmt: skip
    how = TOWARD_ZERO if found.toward_zero else ""
    if strict or (nearest.passed and not found.toward_zero):
        return replace(nearest, rounding=how) if how else nearest
    # what was truncated on the way is off by up to 2 units instead of 1, about a mean that is known to first order only
    wider = None if noise is None else 2.0 * noise
    mean = _nearest_of([reference, *_expected(reference, noise, dtype, found.toward_zero)], mine)
    if bound is not None:  # of which twice is proved, and of the distance from ``reference``, not from this mean
        bound = bound + 0.5 * (mean - reference).abs()
    best = judge_nearest(mean, mine, dtype, noise=wider, bound=bound, **more)
    if nearest.passed and nearest.severity <= best.severity:
        return replace(nearest, rounding=how) if how else nearest
    if not found.toward_zero and not best.passed:
        return nearest
    if best.passed and (wrong := nearest.beyond_proof) is not None:  # which is so for any direction of rounding
        measure, value, limit, row, column, *_ = wrong  # the rows' gains are those of the direction
        return replace(nearest, rounding=how, measure=measure, value=value, limit=limit, row=row, column=column)
    return replace(best, rounding=how or EARLIER, worst_row_rel_l2=nearest.worst_row_rel_l2)


def _smaller(y: Tensor, mine: Tensor) -> list[bool]:
    """Of each call, whether significantly more numbers are nearer to 0 than further from it: not so in nearly all right
    outputs, which need no closer look then."""
    change = (mine.abs() - y.abs()).flatten(1)
    return [_more(*counts) for counts in zip((change < 0).sum(1).tolist(), (change > 0).sum(1).tolist(), strict=True)]


def _nearest_of(ways: Sequence[Tensor], mine: Tensor) -> Tensor:
    """Row by row the one that leaves the smallest gain: the rows of a step may come from two kernels, those of prompts
    and those of single tokens."""
    y = torch.where(torch.isfinite(ways[0]) & torch.isfinite(mine), ways[0], 0.0)
    gains = torch.stack([(y * torch.where(y == 0, 0.0, mine - way)).sum(1).abs() for way in ways])
    return torch.stack(list(ways))[gains.argmin(0), torch.arange(len(mine))]


def middles(mine: Tensor, dtype: str) -> Tensor:
    """The middles of what truncated numbers stand for: float64, half a step further from 0; unchanged where ``dtype``
    has no grid, and zeros."""
    return mine + 0.5 * steps(mine, dtype) * torch.sign(mine) if dtype in LOW else mine


def _expected(y: Tensor, noise: Tensor | None, dtype: str, cut: bool) -> Iterator[Tensor]:
    """What truncation makes of ``y`` in the mean. cut: half a step less, but nothing less where it is on the grid
    already and nothing was rounded before (attention over a single key hands on that key's value). Then, where the
    reference knows of a rounding before, with that one truncated."""
    finite = torch.isfinite(y)
    safe = torch.where(finite, y, 0.0)
    step = steps(safe, dtype)
    early = torch.zeros_like(finite) if noise is None else finite & (noise > step * _EARLIER)
    half = 0.0
    if cut:
        loose = finite & (((safe / step).frac() != 0) | early)
        half = torch.where(loose, 0.5 * step * torch.sign(y), 0.0)
        yield y - half
    if bool(early.any()):
        yield torch.where(early, y * (1.0 - 2.0 / 3.0 * half_step(dtype)), y) - half
