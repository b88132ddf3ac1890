"""The smallest error that an output's limits would have named: of all rows, of one column, of one row.

The problem: "checked and right" is worth what the check can see, and that depends on widths, dtypes, what a reference
says of its noise, and how many outputs share one false-alarm rate. The idea: of the sums that a verdict is made from,
each limit is turned round: errors add to honest roundings in quadrature, so that a row of variance v whose squares may
come to L is named from L - v on, or, where that is less, from where all of its elements reach their own limits. That is
of the error that hides best: without any order, and as large in each element as rounding is there. A scale, or a lone
element, is named sooner. Sizes are relative L2: of a row to the row, of a column to the column or, where that is
larger, to an average one of this output (a column of nothing but noise has no size).
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
    allowed: Tensor = None
    if bool((squares > (1.0 + _elements_at(s)) * v).any()):
        allowed = _allowed(s, q).square()
    found = left(squares, v, power, s.common)
    if allowed is not None:
        found = torch.minimum(found, (allowed.sum(1) / power.clamp(min=1e-300)).sqrt())
    found = found[power > 0]
    return Smallest(float(found.min()), float(_columns(s, q, rows, width, allowed).max()), float(found.max()))


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


def _columns(s: ErrorSums, q: float, rows: int, width: int, allowed: Tensor | None) -> Tensor:
    v, power = s.by_column[VARIANCE], s.by_column[POWER]
    sizes, found = of_columns(power), None
    if rows >= _MIN_ROWS:
        spread = s.by_column[SPREAD] + (s.by_column[NOISE].square() if s.shared else 0.0)
        squares = MODEL * v * chi_square(_freedom(v, spread), normal(q, width, 1)).clamp(min=CONSTANT)
        found = left(squares, v, power, s.common, sizes)
        if allowed is None and not bool((squares > (1.0 + _elements_at(s)) * v).any()):
            return found
    allowed = _allowed(s, q).square() if allowed is None else allowed
    by_element = (allowed.sum(0) / sizes.clamp(min=1e-300)).sqrt()
    return by_element if found is None else torch.minimum(found, by_element)


def _elements_at(s: ErrorSums) -> float:
    """Squares of elements' limits over their variances are this or more: 2 half steps, of a variance of a third."""
    return 12.0 if s.unit >= _GRID else 4.0


def _allowed(s: ErrorSums, q: float) -> Tensor:
    """[rows, width]: each element's limit, by chance (error_limits.worst_element)."""
    noise = s.planes[NOISE]
    half = ((s.planes[VARIANCE] - noise).clamp(min=0.0) * (3.0 if s.unit >= _GRID else 1.0)).sqrt_()
    return half.mul_(2.0 * (1.0 + _SECOND)).add_(noise.sqrt(), alpha=normal(q, noise.numel()) * math.sqrt(MODEL))
