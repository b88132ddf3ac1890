"""What judging hidden errors looks at: one tensor with what stands in front of it, and the sign that one may show.

The problem: each layer is held against every other one, so that what follows from one of them alone would be worked
out as often as there are layers. The idea: a `Look` is plain arrays; `Known` is what it is to the others, worked out
when it is first asked for.
Not here: asking (hidden.py), what stands in front of what (origin.py), sums per column (columns.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

GROWTH, GAIN, COLUMNS = "growth", "gain", "columns"
FEW = 8
"""Rows below which nothing is learned."""
NARROW = 16
"""Elements of a row up to which it is one factor or a few: its error has nothing to average over."""
_NONE = np.zeros(0, np.int64)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Thresholds:
    """floor: part of a rounding that stands for the least honest error. grow: how much more than every other layer (in
    powers of two); created: roundings that must have been added at least; outlier: robust deviations of a row; apart:
    how much more than that row in other layers. gain: roundings; sure: standard errors; through: how much of its
    inputs' gain an operator may pass on; by_element: of a column's error. column: times the median column. mixing:
    growth of attention counts for so much less, because it depends on how sharp each layer's softmax is."""

    floor: float = 0.5
    grow: float = 0.6
    created: float = 1.25
    outlier: float = 7.0
    apart: float = 0.7
    spread: float = 0.12
    gain: float = 0.5
    sure: float = 7.0
    through: float = 3.0
    by_element: float = 5.0
    mixing: float = 1.2
    column: float = 5.0


@dataclass
class Look:
    """One tensor and what stands in front of it, all float64 [n], by row key.

    err, gain: relative L2 error and slope - 1 of each row. before, gain_before: the largest of the inputs' at the rows
    that influence it. passed: mean gain of each input over all rows, with its sign, by the input's kind: to first order
    the outputs' mean follows the inputs' means, and single rows' noise averages out of both. unit: one rounding.
    columns, columns_before: metrics.structure's sums, None where not taken. mixing: whether the operator mixes
    positions (attention).
    """

    tap: str
    role: str
    cls: str
    unit: float
    keys: np.ndarray
    err: np.ndarray
    gain: np.ndarray
    before: np.ndarray
    gain_before: np.ndarray
    width: int = 1
    columns: np.ndarray | None = None
    columns_before: Sequence[np.ndarray] = ()
    mixing: bool = False
    passed: Mapping[str, float] = field(default_factory=dict)
    growth: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def kind(self) -> str:
        """What it has in common with the same operator in other layers."""
        return kind_of_place(self.tap, self.role)


@dataclass(frozen=True)
class Hidden:
    """rows: bool [n], where it shows. how: GROWTH, GAIN or COLUMNS. columns: the bad ones. size: of the error, as a
    relative L2 error of the rows or columns concerned. strength: times what was needed."""

    rows: np.ndarray
    how: str
    size: float
    strength: float
    columns: np.ndarray = field(default_factory=lambda: _NONE)


def kind_of_place(tap: str, role: str) -> str:
    """`Look.kind` of a tap and role."""
    return f"{_NUMBER.sub('*', tap)}|{role}"


class Known:
    """What a look is to the other layers: worked out once, asked for by each of them."""

    def __init__(self, look: Look):
        self.look = look

    @cached_property
    def growth(self) -> float:
        return float(np.median(self.look.growth))

    @cached_property
    def gain(self) -> float:
        return float(np.median(self.look.gain))

    @cached_property
    def gain_error(self) -> float:
        """Standard error of ``gain``, from the rows' own spread and number."""
        return 1.4826 * float(np.median(np.abs(self.look.gain - self.gain))) / max(len(self.look.gain), 1) ** 0.5

    @cached_property
    def growth_tail(self) -> float:
        return tail(self.look.growth, self.growth)

    @cached_property
    def gain_tail(self) -> float:
        return tail(self.look.gain, self.gain)


def tail(values: np.ndarray, middle: float) -> float:
    """How far the outer tenth lies, as the standard deviation of a normal distribution that reaches so far."""
    return float(np.quantile(np.abs(values - middle), 0.9)) / 1.645
