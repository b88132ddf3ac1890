"""The smallest error that an output's limits would have named: of all rows, of one column, of one row.

The problem: "checked and right" is worth what the check can see, and that depends on widths, dtypes, what a reference
says of its noise, and how many outputs share one false-alarm rate. The idea: of the sums that a verdict is made from,
each limit is turned round: errors add to honest roundings in quadrature, so that a row of variance v whose squares may
come to L is named from L - v on. That is of an error without any order (another sign in each element): a scale, or a
lone element, is named sooner, by the gain or the element. Sizes are relative L2: of a row to the row, of a column to
the column or, where that is larger, to an average one of this output (a column of nothing but noise has no size).
Not here: the limits themselves (error_limits.py, pooled.py), what is made of it (opcheck/proof/coverage.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from vllm_accprobe.opcheck.floors.chance import chi_square, normal
from vllm_accprobe.opcheck.floors.error_limits import (
    _MIN_ROWS,
    _SECOND,
    CONSTANT,
    MODEL,
    NOISE,
    POWER,
    SPREAD,
    VARIANCE,
)
from vllm_accprobe.opcheck.floors.verdict import _GRID, ErrorSums

Tensor = Any  # a torch.Tensor


class Smallest(NamedTuple):
    """Relative errors. row: of each row; column: of one column, in all rows; one_row: of one row alone."""

    row: float
    column: float
    one_row: float


EQUAL = Smallest(0.0, 0.0, 0.0)
"""Of what must be equal to the bit."""


def of_call(s: ErrorSums, chance: float) -> Smallest | None:
    """Of one call. chance: that an honest output fails, as verdict.judge's. None where no row has a size."""
    v, power = s.by_row[VARIANCE], s.by_row[POWER]
    if not bool((power > 0).any()):
        return None
    q, (rows, width) = chance / 4.0, s.planes.shape[1:]
    spread = s.by_row[SPREAD] + (s.by_row[NOISE].square() / s.groups if s.groups else 0.0)
    squares = MODEL * v * chi_square(_freedom(v, spread), normal(q, rows, 1))
    found = left(squares, v, power, s.common)[power > 0]
    return Smallest(float(found.min()), float(_columns(s, q, rows, width).max()), float(found.max()))


def of_pool(columns: Tensor, variance: float, freedom: float, s: ErrorSums, chance: float) -> Smallest | None:
    """Of all calls of a tap together, which look at no single row. columns: float64 [8, width], pooled.Pool's sums;
    variance, freedom: of all errors together; s: what unit, common and shared are; chance: that honest rows give a
    breach, of one of the pool's statistics. None where nothing has a size."""
    power = columns[POWER]
    total = float(power.sum())
    if not total > 0:
        return None
    squares = MODEL * variance * float(chi_square(freedom, normal(chance, 1, 1)))
    row, column = math.sqrt(max(squares - variance, 0.0) / total), math.inf
    if len(power) > 1:
        v = columns[VARIANCE] * (1.0 + 4.0 * (s.common / s.unit) ** 2)
        spread = columns[SPREAD] + (columns[NOISE].square() if s.shared else 0.0)
        most = MODEL * v * chi_square(_freedom(v, spread), normal(chance, len(power), 1)).clamp(min=CONSTANT)
        column = float(left(most, v, power, 0.0, of_columns(power)).max())
    return Smallest(row, column, math.inf)


def left(squares: Tensor, variance: Tensor, power: Tensor, common: float, sizes: Tensor | None = None) -> Tensor:
    """What an error must be, relative to ``sizes`` (squares; ``power`` where there are none), for its squares and
    ``variance`` to reach the limit: ``squares``, and ``common`` of the size beside it."""
    limit = (squares.sqrt() + common * power.sqrt()).square()
    return ((limit - variance).clamp(min=0.0) / (power if sizes is None else sizes).clamp(min=1e-300)).sqrt()


def of_columns(power: Tensor) -> Tensor:
    """The squares that a column's error is measured by."""
    return power.clamp(min=float(power.mean()))


def _freedom(v: Tensor, spread: Tensor) -> Tensor:
    return torch.where(spread > 0, v * v / spread.clamp(min=1e-300), 1.0).clamp_(min=1.0)


def _columns(s: ErrorSums, q: float, rows: int, width: int) -> Tensor:
    v, power = s.by_column[VARIANCE], s.by_column[POWER]
    if rows < _MIN_ROWS:
        return _elements(s, q)
    spread = s.by_column[SPREAD] + (s.by_column[NOISE].square() if s.shared else 0.0)
    squares = MODEL * v * chi_square(_freedom(v, spread), normal(q, width, 1)).clamp(min=CONSTANT)
    return left(squares, v, power, s.common, of_columns(power))


def _elements(s: ErrorSums, q: float) -> Tensor:
    """Of columns that are too short for a sum: one of their elements is beyond its limit from here on."""
    noise = s.planes[NOISE].sqrt()
    half = ((s.planes[VARIANCE] - s.planes[NOISE]).clamp(min=0.0) * (3.0 if s.unit >= _GRID else 1.0)).sqrt()
    allowed = 2.0 * (1.0 + _SECOND) * half + normal(q, noise.numel()) * math.sqrt(MODEL) * noise
    power = s.by_column[POWER]
    return (allowed.square().sum(0) / of_columns(power).clamp(min=1e-300)).sqrt()
