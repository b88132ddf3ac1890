"""Whether a captured output is what an honest kernel gives, when its inputs are known exactly.

The problem: a replay knows the inputs to the bit, so that nothing has piled up and limits can be tight; yet a kernel
may round intermediates. The idea: each element has a floor, sqrt((unit * |y|)**2 + noise**2): the largest last
rounding, and the reference's own estimate of the roundings before it. A row's, a column's and an element's error are
told in floors, and an honest last rounding alone comes to about 0.4 of them (uniform between 0 and 1 half step, over a
binade's mantissas). Four measures, one limit each: row, gain (a wrong scale, which rounding does not follow), column
(over at least eight rows), element. Narrow rows are noisier: limits grow by 1 + 4 / sqrt(width), four standard
deviations of a mean square. Units of rounding are judge/floor.py's. In torch alone, because this file is copied beside
the tests that gentest writes. Not here: where y comes from (reference.py), what else can be measured (measures.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.judge.floor import unit

ROW, GAIN, COLUMN, ELEMENT, EXACT, NONFINITE = "row", "gain", "column", "element", "exact", "nonfinite"
_MIN_ROWS = 8
_TINY = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}
"""Smallest subnormal numbers: below, nothing can be relatively exact."""
Tensor = Any  # a torch.Tensor


@dataclass(frozen=True)
class Limits:
    """In floors: of a row (and a column and a gain), and of an element relative to that."""

    created: float = 1.0
    element: float = 4.0


OPERATOR = Limits()
"""One floor for a row, and four for an element: clean engines stay below 0.7 and 1.6 (docs/opcheck.md)."""


@dataclass(frozen=True)
class Verdict:
    """measure: that is furthest beyond, or nearest to, its limit; value, limit: in floors (counts for exact and
    nonfinite); row, column: where, in the [rows, width] view, -1 where it is nowhere; nonfinite, nonfinite_mismatch:
    positions that are not finite, and of them those that differ; worst_row_rel_l2: largest relative error of a row;
    rounding: how mine was rounded where that is not to nearest (rounding.py), else ""."""

    passed: bool
    measure: str
    value: float
    limit: float
    row: int
    column: int
    nonfinite: int
    nonfinite_mismatch: int
    worst_row_rel_l2: float
    rounding: str = ""

    @property
    def severity(self) -> float:
        """value / limit; inf where the limit is 0 and the value is not."""
        return self.value / self.limit if self.limit else (math.inf if self.value else 0.0)


def judge(
    reference: Tensor, mine: Tensor, dtype: str, limits: Limits = OPERATOR, *,
    noise: Tensor | None = None, last: float | None = None, common: float = 0.0,
) -> Verdict:  # fmt: skip
    """reference: float64 or integers [rows, width]; mine: the captured numbers, float64 or int64, same shape; dtype:
    mine's, torch's name; noise: float64, broadcastable, standard errors before the last rounding; last: the last
    rounding's relative error if it is not dtype's; common: relative error that a row may share."""
    u = unit(dtype) if last is None else last
    finite = torch.isfinite(reference) & torch.isfinite(mine)
    count = differ = 0
    if bool(finite.all()):
        y, d = reference.double(), (mine - reference).double()
    else:
        same = (reference == mine) | (torch.isnan(reference) & torch.isnan(mine))
        wrong = ~finite & ~same
        count, differ = int((~finite).sum()), int(wrong.sum())
        y = torch.where(finite, reference, 0).double()
        d = torch.where(finite, mine - reference, 0).double()
    power, error = (y * y).sum(1), (d * d).sum(1)
    rel = _ratio(error, power).sqrt()
    worst = float(rel.max()) if len(rel) else 0.0

    def verdict(measure: str, value: float, limit: float, row: int, column: int) -> Verdict:
        return Verdict(value <= limit, measure, value, limit, row, column, count, differ, worst)

    if differ:
        return verdict(NONFINITE, float(differ), 0.0, int(wrong.sum(1).argmax()), -1)
    if not u:
        wrong = d != 0
        at = int(wrong.sum(1).argmax()) if wrong.numel() else -1
        return verdict(EXACT, float(wrong.sum()), 0.0, at, int(wrong[at].int().argmax()) if at >= 0 else -1)
    square = (u * y) ** 2 + _TINY.get(dtype, 0.0) ** 2
    if noise is not None:
        square = square + (torch.where(finite, noise, 0.0) if count else noise) ** 2
    gains = _gains(d, y, square, common)
    if common:
        square = square + (common * y) ** 2
    found = [_rows(error, square), gains, _columns(d, square), _elements(d, y, square, u)]
    allowed = {
        ROW: limits.created * _spread(y.shape[1]),
        GAIN: limits.created,
        COLUMN: limits.created * _spread(y.shape[0]),
        ELEMENT: limits.created * limits.element,
    }
    measure, value, row, column = max(found, key=lambda f: f[1] / allowed[f[0]])
    return verdict(measure, value, allowed[measure], row, column)


def _spread(n: int) -> float:
    return 1.0 + 4.0 / math.sqrt(max(n, 1))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, 0 where a is 0."""
    return torch.where(a == 0, 0.0, a / b)


def _rows(error: Tensor, square: Tensor) -> tuple[str, float, int, int]:
    ratio = _ratio(error, square.sum(1)).sqrt()
    at = int(ratio.argmax()) if ratio.numel() else -1
    return ROW, float(ratio[at]) if at >= 0 else 0.0, at, -1


def _gains(d: Tensor, y: Tensor, square: Tensor, common: float) -> tuple[str, float, int, int]:
    """|sum y d| / sum y y, the part of the error that is a scale, in units of what is allowed: the shared error, and
    the larger of five standard deviations of independent roundings and a fifth of the row's floor."""
    power = (y * y).sum(1)
    chance = 5.0 * (y * y * square).sum(1).sqrt()
    allowed = common * power + torch.maximum(chance, 0.2 * (power * square.sum(1)).sqrt())
    ratio = _ratio((y * d).sum(1).abs(), allowed)
    at = int(ratio.argmax()) if ratio.numel() else -1
    return GAIN, float(ratio[at]) if at >= 0 else 0.0, at, -1


def _columns(d: Tensor, square: Tensor) -> tuple[str, float, int, int]:
    if len(d) < _MIN_ROWS or not d.shape[1]:
        return COLUMN, 0.0, -1, -1
    ratio = _ratio((d * d).sum(0), square.sum(0)).sqrt()
    at = int(ratio.argmax())
    return COLUMN, float(ratio[at]), -1, at


def _elements(d: Tensor, y: Tensor, square: Tensor, u: float) -> tuple[str, float, int, int]:
    """Elements far below the row's root mean square are measured against that: sums cancel there."""
    if not d.numel():
        return ELEMENT, 0.0, -1, -1
    mean = (u * u) * (y * y).mean(1, keepdim=True)
    ratio = _ratio(d * d, torch.maximum(square, mean)).sqrt().flatten()
    at = int(ratio.argmax())
    return ELEMENT, float(ratio[at]), at // d.shape[1], at % d.shape[1]
