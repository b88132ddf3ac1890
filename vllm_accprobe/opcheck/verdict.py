"""Whether a captured output is what an honest kernel gives, when its inputs are known exactly.

The problem: a replay knows the inputs to the bit, so that nothing has piled up and limits can be tight; yet a kernel
may round intermediates. The idea: each element has a floor, sqrt((unit * |y|)**2 + noise**2): the largest last
rounding, and the reference's own estimate of the roundings before it. A row's, a column's and an element's error are
told in floors, and an honest last rounding alone comes to about 0.4 of them (uniform between 0 and 1 half step, over a
binade's mantissas). Four measures, one limit each: row, gain (a wrong scale, which rounding does not follow), column
(over at least eight rows), element. Narrow rows are noisier: limits grow by 1 + 4 / sqrt(width), four standard
deviations of a mean square. Units of rounding are judge/floor.py's, ratios of limits judge/standards.py's. Not here:
where y comes from (reference.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.judge.floor import unit
from vllm_accprobe.judge.standards import Standard
from vllm_accprobe.metrics import oracle

ROW, GAIN, COLUMN, ELEMENT, EXACT, NONFINITE = "row", "gain", "column", "element", "exact", "nonfinite"
_MIN_ROWS = 8
_TINY = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}
"""Smallest subnormal numbers: below, nothing can be relatively exact."""

OPERATOR = Standard("operator", created=1.0, element=4.0)
"""One floor for a row, and four for an element: clean engines stay below 0.7 and 1.6 (docs/opcheck.md)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """measure: that is furthest beyond, or nearest to, its limit; value, limit: in floors (counts for exact and
    nonfinite); row, column: where, in the [rows, width] view, -1 where it is nowhere; table: oracle's row table."""

    passed: bool
    measure: str
    value: float
    limit: float
    row: int
    column: int
    metrics: oracle.Metrics
    worst_row_rel_l2: float

    @property
    def severity(self) -> float:
        """value / limit; inf where the limit is 0 and the value is not."""
        return self.value / self.limit if self.limit else (math.inf if self.value else 0.0)


def judge(
    reference: np.ndarray, mine: np.ndarray, dtype: str, standard: Standard = OPERATOR, *,
    noise: np.ndarray | None = None, last: float | None = None, common: float = 0.0,
) -> Verdict:  # fmt: skip
    """reference: float64 or integers [rows, width]; mine: the captured numbers, same shape; dtype: mine's, torch's
    name; noise: float64 [rows, width], standard errors before the last rounding; last: the last rounding's relative
    error if it is not dtype's; common: relative error that a row may share."""
    table = oracle.row_table(reference, mine)
    metrics = oracle.tensor_metrics(table)
    u = unit(dtype) if last is None else last
    rel = oracle.row_rel_l2(table)
    worst_rel = float(rel.max()) if len(rel) else 0.0

    def verdict(measure: str, value: float, limit: float, row: int, column: int) -> Verdict:
        return Verdict(not value > limit, measure, value, limit, row, column, metrics, worst_rel)

    if metrics.nonfinite_mismatch:
        row = int(table[:, oracle.MISMATCH].argmax())
        return verdict(NONFINITE, float(metrics.nonfinite_mismatch), 0.0, row, -1)
    finite = np.isfinite(reference) & np.isfinite(mine)
    y = np.where(finite, reference, 0).astype(np.float64)
    d = np.where(finite, mine, 0).astype(np.float64) - y
    if not u:
        at = int((d != 0).sum(1).argmax()) if len(d) else -1
        return verdict(EXACT, float((d != 0).sum()), 0.0, at, int((d[at] != 0).argmax()) if at >= 0 else -1)
    square = (u * y) ** 2 + _TINY.get(dtype, 0.0) ** 2
    if noise is not None:
        square = square + np.where(finite, noise, 0.0) ** 2
    gains = _gains(d, y, square, common)
    if common:
        square = square + (common * y) ** 2
    found = [_rows(d, square), gains, _columns(d, square), _elements(d, y, square, u)]
    limits = {
        ROW: standard.created * _spread(y.shape[1]),
        GAIN: standard.created,
        COLUMN: standard.created * _spread(y.shape[0]),
        ELEMENT: standard.created * standard.element,
    }
    measure, value, row, column = max(found, key=lambda f: f[1] / limits[f[0]])
    return verdict(measure, value, limits[measure], row, column)


def _spread(n: int) -> float:
    return 1.0 + 4.0 / math.sqrt(max(n, 1))


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a == 0, 0.0, a / b)


def _rows(d: np.ndarray, square: np.ndarray) -> tuple[str, float, int, int]:
    ratio = np.sqrt(_ratio((d * d).sum(1), square.sum(1)))
    at = int(ratio.argmax()) if ratio.size else -1
    return ROW, float(ratio[at]) if at >= 0 else 0.0, at, -1


def _gains(d: np.ndarray, y: np.ndarray, square: np.ndarray, common: float) -> tuple[str, float, int, int]:
    """|sum y d| / sum y y, the part of the error that is a scale, in units of what is allowed: the shared error, and
    the larger of five standard deviations of independent roundings and a fifth of the row's floor."""
    power = (y * y).sum(1)
    chance = 5.0 * np.sqrt((y * y * square).sum(1))
    allowed = common * power + np.maximum(chance, 0.2 * np.sqrt(power * square.sum(1)))
    ratio = _ratio(np.abs((y * d).sum(1)), allowed)
    at = int(ratio.argmax()) if ratio.size else -1
    return GAIN, float(ratio[at]) if at >= 0 else 0.0, at, -1


def _columns(d: np.ndarray, square: np.ndarray) -> tuple[str, float, int, int]:
    if len(d) < _MIN_ROWS or not d.shape[1]:
        return COLUMN, 0.0, -1, -1
    ratio = np.sqrt(_ratio((d * d).sum(0), square.sum(0)))
    at = int(ratio.argmax())
    return COLUMN, float(ratio[at]), -1, at


def _elements(d: np.ndarray, y: np.ndarray, square: np.ndarray, u: float) -> tuple[str, float, int, int]:
    """Elements far below the row's root mean square are measured against that: sums cancel there."""
    if not d.size:
        return ELEMENT, 0.0, -1, -1
    mean = (u * u) * (y * y).mean(1, keepdims=True)
    ratio = np.sqrt(_ratio(d * d, np.maximum(square, mean)))
    at = int(ratio.argmax())
    return ELEMENT, float(ratio.flat[at]), at // d.shape[1], at % d.shape[1]
