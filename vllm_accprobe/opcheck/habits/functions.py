"""By how much a machine's functions (rsqrt, the exponential inside an activation) are off, beyond float32's rounding.

The problem: hardware gives a reciprocal square root of 12 bits and libraries an exponential of 17, and nothing that
holds for +, x, / and sqrt holds for these: their unit must be measured. The idea: in a norm all of a row is multiplied
with one number, so that each rounded result bounds that number from both sides: y (1 + g) was rounded to m for all of
the row, and what all these intervals have in common is narrow (2**-8 over the width) and holds 0 unless g is off. In
float32 it is the projection of the error onto y. An activation's function is off by its element's relative error.
An approximation errs to both sides and without a plan; a wrong epsilon or a wrong constant errs to one side or
smoothly, and is none of this. Not here: what follows (decided.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.opcheck.floors.rounding import steps
from vllm_accprobe.opcheck.habits import ways
from vllm_accprobe.opcheck.habits.ways import SampledRows
from vllm_accprobe.opcheck.reference import Call, Declined

RSQRT, ACTIVATION, SUMS = "rsqrt", "activation", "sums"
MOST = 2.0**-10
"""Chosen: an approximation that hardware has is better (rsqrt of 11.9 bits: 2**-11.4 [Intel's manual on RSQRTPS: a
relative error of 1.5 * 2**-12]); what is further off is a wrong function."""
FLOAT32 = 2.0**-20
"""Chosen: what is off by less is float32's own rounding, some units of 2**-24 in a mean, a root and two products."""
_SMOOTH, _DEGREE = 0.5, 5
"""Chosen: of the error's variance, what a polynomial of the argument explains if it is a wrong constant's; its degree:
an approximation by octaves turns more often than that."""
_FITS = 0.9
"""Chosen: as in look.py."""
_LOST = 2
"""Chosen: of 64 numbers, one that an intermediate rounding has moved across; no more than these of a row."""
Tensor = Any
Measured = tuple[float, ...]


def of_grid(
    call: Call, role: str, way: str, v: Tensor, given: Tensor, s: SampledRows, share: float
) -> dict[str, Measured]:  # fmt: skip
    """From results that were rounded to a coarse grid; way: the one that fits best; v: what was rounded by it, float64
    [rows, width]; share: of the numbers that it predicts. Nothing where it does not fit."""
    if role != "output.0":
        return {}
    if ways.is_norm(call.cls) and share > _FITS / 2:
        low, high = _common(v, given, s, 1 if way == ways.ONCE else 1 + min(_LOST, v.shape[1] // 64))
        wide = high - low
        good = torch.isfinite(wide) & (wide > 0)
        if not bool(good.any()):
            return {}
        low, high = low[good], high[good]
        g = torch.where((low > 0) | (high < 0), (low + high) / 2.0, 0.0)
        return {RSQRT: _measured(g, float((high - low).median()))}
    if ways.is_gated(call.cls) and share > _FITS:
        told = torch.isfinite(v) & (v != 0)
        coarse = float((steps(s.y, s.dtype)[told] / v[told].abs()).mean()) if bool(told.any()) else 0.0
        # a number rounds otherwise with the probability of its error in steps, whatever that error's distribution
        n, size = float(told.sum()), (1.0 - share) * coarse
        return {ACTIVATION: (n, (1.0 - share) * n, n * size * size, 0.5 * (1.0 - share) * n, coarse / max(n, 1.0))}
    return {}


def _common(v: Tensor, given: Tensor, s: SampledRows, lost: int) -> tuple[Tensor, Tensor]:
    """For each row the interval of g in which v (1 + g) rounds to what is given: [rows] each. lost: which number's
    bound counts: numbers that an intermediate rounding has moved across are left out at either end."""
    half = 0.5 * steps(given, s.dtype)
    clear = torch.isfinite(v) & (v.abs() > 0)
    a, b = (given - half) / v - 1.0, (given + half) / v - 1.0
    low = torch.where(clear, torch.minimum(a, b), -1.0)
    high = torch.where(clear, torch.maximum(a, b), 1.0)
    return low.topk(lost, 1).values[:, -1], -((-high).topk(lost, 1).values[:, -1])


def _measured(g: Tensor, resolution: float) -> Measured:
    off = g.abs() > FLOAT32
    return float(len(g)), float(off.sum()), float((g * g).sum()), float((off & (g > 0)).sum()), resolution


def of_float32(call: Call, role: str, s: SampledRows, given: Tensor, noise: Tensor | None) -> dict[str, Measured]:
    if role != "output.0":
        return {}
    if ways.is_norm(call.cls):
        return {RSQRT: _measured(_projected(s.y, given), 2.0**-23)}
    if ways.is_gated(call.cls):
        e = _relative(s.y, given)
        return {ACTIVATION: _measured(e, 2.0**-23)} if len(e) else {}
    if ways.is_product(call.cls) and noise is not None:
        floor = noise.expand(s.y.shape)
        e = torch.where(floor > 0, (given - s.y) / floor, 0.0).flatten()
        return {SUMS: (float(len(e)), float((e.abs() > 8).sum()), float((e * e).sum()), float((e > 8).sum()), 0.0)}
    return {}


def _projected(y: Tensor, mine: Tensor) -> Tensor:
    power = (y * y).sum(1)
    return torch.where(power > 0, (y * (mine - y)).sum(1) / power, 0.0)


def _relative(y: Tensor, mine: Tensor) -> Tensor:
    clear = (y.abs() > 2.0**-100) & torch.isfinite(mine)
    return ((mine - y) / y)[clear]


def would_float32(
    call: Call, role: str, y: Tensor, mine: Tensor, rows: Tensor, judge: Callable[..., Any]
) -> dict[str, float]:  # fmt: skip
    """measured / allowed where a function of this size is the machine's; nothing where that is too far off, or has a
    plan."""
    if role != "output.0":
        return {}
    if ways.is_norm(call.cls):
        g = _projected(y, mine)
        if bool((g.abs() <= MOST).all()):
            return {RSQRT: judge(y * (1.0 + g[:, None]), None).severity}
    if ways.is_gated(call.cls):
        e = _relative(y, mine)
        if len(e) and bool((e.abs() <= MOST).all()) and not _smooth(call, y, mine, rows):
            return {ACTIVATION: judge(y, e.square().mean().sqrt() * y.abs()).severity}
    return {}


def _smooth(call: Call, y: Tensor, mine: Tensor, rows: Tensor) -> bool:
    """Whether a polynomial of the activation's argument explains the error."""
    try:
        x = ways.gate_of(call)[0][rows].double()
    except (Declined, RuntimeError, ValueError, IndexError):
        return True
    clear = (y.abs() > 2.0**-100) & torch.isfinite(mine)
    x, e = x[clear], ((mine - y) / y)[clear]
    if len(e) < 8 * _DEGREE:
        return True
    x = x / x.abs().amax().clamp(min=1e-30)
    powers = torch.stack([x**k for k in range(_DEGREE + 1)], 1)
    fit = powers @ torch.linalg.lstsq(powers, e[:, None]).solution
    left = float((e - fit[:, 0]).square().sum())
    return left < (1.0 - _SMOOTH) * float(e.square().sum())
