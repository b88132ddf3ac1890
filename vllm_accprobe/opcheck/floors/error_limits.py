"""The furthest row, gain, column and element of an output's errors, and what chance or proof allows each.

The problem: the largest of many numbers is large; its limit depends on how many there are and on what each is made of.
The idea: of the sums that verdict.py takes, each question finds where value over limit is largest, by the cheap limit
first and by the exact one only where that is passed, and answers in standard deviations of an honest error.
In torch alone, because this file is copied beside the tests that gentest writes. Not here: the sums and what a verdict
makes of the four (verdict.py), quantiles (chance.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from vllm_accprobe.opcheck.floors.chance import chi_square, deviations_of, normal

ROW, GAIN, COLUMN, ELEMENT = "row", "gain", "column", "element"
MODEL = 1.25
"""Measured: scripts/opcheck_floors.py; variance of an honest kernel over that of its reference's model, of taps of 74
clean runs with AVX-512, trained weights among them. These runs were looked at while it was chosen."""
BIAS = 0.1
"""Measured: scripts/opcheck_floors.py, 0.10 to 0.11 (SiluAndMul); units of the last rounding: a scale that an honest
kernel leaves."""
CONSTANT = 3.0
"""Derived: (step / 2)**2 over step**2 / 12. A column whose values vary by less than a step (a trained bias, an outlier
channel) has one rounding error in all rows, which may be half a step."""
_MIN_ROWS = 8
"""Chosen: in fewer rows a column says no more than its elements do."""
_WORK = 2.0**-18
"""Chosen: 64 roundings of float32 beside the last one, of an element, and of its row's root mean square where a sum
cancels: far below the last rounding, and a result near the middle of two numbers may go either way for it."""
_SECOND = 2.0**-6
"""Derived: what first-order bounds leave out. Bounds are sums of some ten relative roundings of 2**-8 at most, whose
products are (10 * 2**-8)**2 / 2 < 2**-10 of the value, below 2**-6 of a bound of several roundings."""
_NOTHING = 1e-300
Tensor = Any  # a torch.Tensor

SQUARE, VARIANCE, POWER, PRODUCT, WEIGHTED, SPREAD, ERROR, NOISE = range(8)
"""What verdict.ErrorSums adds up, of each element with error d and variance v: d d, v, y y, y d, y y v, v v, d,
noise**2."""


class WorstFound(NamedTuple):
    """value, limit: in standard deviations of an honest error; deviations, looks: how far out a normal number would be,
    one of how many."""

    measure: str
    value: float
    limit: float
    row: int
    column: int
    deviations: float
    looks: int


def _most(value: Tensor, floor: Tensor) -> tuple[int, float]:
    """Where value / floor, neither below 0, is largest, and what it is there."""
    ratio = value / floor.clamp(min=_NOTHING)
    at = int(ratio.argmax())
    return at, float(ratio[at])


def worst_row(s: Tensor, groups: float | None, common: float, chance: float, width: int) -> WorstFound:
    looks = s.shape[1]
    z = normal(chance, looks, 1)

    def freedom(square: Any, spread: Any, noise: Any) -> Any:
        return square / (spread + noise * noise / groups if groups else spread)

    at, ratio = _most(s[SQUARE], s[VARIANCE])
    if ratio > MODEL * chi_square(float(width), z):  # else no row is above its limit: fewer degrees widen it
        v = s[VARIANCE]
        limits = MODEL * v * chi_square(freedom(v * v, s[SPREAD], s[NOISE]).clamp_(min=1.0), z)
        at, _ = _most(s[SQUARE], (limits.sqrt() + common * s[POWER].sqrt()) ** 2)
    square, v, power, spread, noise = (float(s[k, at]) for k in (SQUARE, VARIANCE, POWER, SPREAD, NOISE))
    own = max(1.0, freedom(v * v, spread, noise)) if spread else 1.0
    extra, error = common * power**0.5, square**0.5
    limit = (MODEL * v * chi_square(own, z)) ** 0.5 + extra
    return _squares(ROW, error, limit, error - extra, v, own, looks, row=at)


def _squares(
    measure: str, value: float, limit: float, far: float, variance: float, freedom: float, looks: int, row: int = -1,
    column: int = -1,
) -> WorstFound:  # fmt: skip
    floor = math.sqrt(variance)
    beyond = deviations_of(far * far / (MODEL * variance), freedom) if far > 0 and variance else 0.0
    return WorstFound(measure, *told(value, limit, floor), row, column, beyond, looks)


def told(value: float, limit: float, floor: float) -> tuple[float, float]:
    """Both in units of ``floor``; 0 of 1 where there is neither error nor floor."""
    if not limit:
        return (math.inf if value else 0.0), 1.0
    return (value / floor, limit / floor) if floor else (value / limit, 1.0)


def worst_gain(s: Tensor, groups: float | None, common: float, u: float, chance: float) -> WorstFound:
    """|sum y d|, the part of a row's error that is a scale."""
    variance = s[WEIGHTED] + s[POWER] * s[NOISE] / groups if groups else s[WEIGHTED]
    looks = s.shape[1]
    z, part = normal(chance, looks), common + BIAS * u
    at, squared = _most(s[PRODUCT].square(), variance)
    if squared > z * z * MODEL:
        at, _ = _most(s[PRODUCT].abs(), z * (MODEL * variance).sqrt() + part * s[POWER])
    value, floor, bias = abs(float(s[PRODUCT, at])), (MODEL * float(variance[at])) ** 0.5, part * float(s[POWER, at])
    beyond = (value - bias) / floor if floor else 0.0
    return WorstFound(GAIN, *told(value, z * floor + bias, floor), at, -1, beyond, looks)


def worst_column(s: Tensor, shared: bool, common: float, chance: float, rows: int) -> WorstFound:
    if rows < _MIN_ROWS:
        return WorstFound(COLUMN, 0.0, 1.0, -1, -1, 0.0, 1)
    v, looks = s[VARIANCE], s.shape[1]
    z = normal(chance, looks, 1)
    squares = s[SPREAD] + s[NOISE] ** 2 if shared else s[SPREAD]
    at, ratio = _most(s[SQUARE], v)
    if ratio > MODEL * CONSTANT:
        limits = MODEL * v * chi_square((v * v / squares.clamp(min=_NOTHING)).clamp_(min=1.0), z).clamp(min=CONSTANT)
        at, _ = _most(s[SQUARE], (limits.sqrt() + common * s[POWER].sqrt()) ** 2)
    error, variance, square = float(s[SQUARE, at]) ** 0.5, float(v[at]), float(squares[at])
    own, extra = max(1.0, variance * variance / square) if square else 1.0, common * float(s[POWER, at]) ** 0.5
    limit = (MODEL * variance * max(CONSTANT, chi_square(own, z))) ** 0.5 + extra
    return _squares(COLUMN, error, limit, error - extra, variance, own, looks, column=at)


def worst_element(
    y: Tensor, d: Tensor, half: Tensor, noise: Tensor | None, bound: Tensor | None, common: float, planes: Tensor,
    chance: float,
) -> WorstFound:  # fmt: skip
    """Each against what chance allows, or against what is proved where that is less."""
    size, looks, width = d.abs(), d.numel(), d.shape[1]
    z = normal(chance, looks) * MODEL**0.5
    at, steps = _most(size.flatten(), half.flatten())
    row, column = at // width, at % width
    value, limit = float(size[row, column]), 2.0 * (1.0 + _SECOND) * float(half[row, column])
    if steps > 2.0:  # else all are within a whole step, which is never too much
        power = planes[POWER].sum(1)
        allowed = 2.0 * (1.0 + _SECOND) * half + _work(y, power)
        if common:
            allowed += common * y.abs()
        if noise is not None:
            allowed += z * noise.abs()
        if bound is not None:
            allowed = torch.minimum(allowed, proved(y, half, bound, power))
        at, _ = _most(size.flatten(), allowed.flatten())
        row, column = at // width, at % width
        value, limit = float(size[row, column]), float(allowed[row, column])
    one = MODEL**0.5 * float(planes[NOISE, row, column]) ** 0.5
    beyond = (value - limit) / one + normal(chance, looks) if one else math.inf
    said = told(value, limit, float(planes[VARIANCE, row, column]) ** 0.5)
    return WorstFound(ELEMENT, *said, row, column, beyond, looks)


def proved(y: Tensor, half: Tensor, bound: Tensor, power: Tensor) -> Tensor:
    """What is proved of each element's error: it holds for any direction of rounding."""
    return 2.0 * (1.0 + _SECOND) * (half + bound) + _work(y, power)


def _work(y: Tensor, power: Tensor) -> Tensor:
    return _WORK * (y.abs() + (power / y.shape[1]).sqrt().unsqueeze(1))
