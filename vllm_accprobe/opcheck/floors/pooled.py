"""All calls of a tap together: what is too small to be seen in any row is seen in all of them.

The problem: a scale that is a third of a rounding off, a column that is a little too large, or errors that are a little
too many hide in each row, and are a fault none the less. The idea: the errors of some hundred rows average out as
independent roundings do, and a fault does not. While outputs are checked, what `verdict.ErrorSums` holds of their rows
is added up for each output of a tap, column by column; at the tap's end five statistics are held against what chance
allows, each with a fifth of the chance, divided by the columns where it looks at columns:

- together: sum of squares over its expectation, against the chi-square's quantile;
- together, a scale: sum y d / sum y y against the standard error sqrt(sum y y v) / sum y y;
- a column: its sum of squares, its scale, and its mean error, likewise.

The references are those that rounding.py settled on, so that truncation is no scale. Rows that were met before (the
same token twice) have the same errors, so they count once; so do errors of outputs with few different numbers. Errors
that rows or channels share are not averaged away: a ``common`` error of a row is independent between rows only; noise
in ``groups`` has as many independent errors in a row; ``shared`` noise is one for all rows; and a column of nearly
equal values has one rounding error, not many. Where kernels differ from their reference's model: MODEL and BIAS of
verdict.py, which are measured on the same sums (scripts/opcheck_floors.py).
Not here: the rows' own limits (verdict.py), how one layer compares with the next (peers.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from vllm_accprobe.opcheck.floors.chance import chi_square, deviations_of, normal, tail
from vllm_accprobe.opcheck.floors.error_limits import (
    BIAS,
    CONSTANT,
    ERROR,
    MODEL,
    NOISE,
    POWER,
    PRODUCT,
    SPREAD,
    SQUARE,
    VARIANCE,
    WEIGHTED,
    told,
)
from vllm_accprobe.opcheck.floors.smallest import Smallest, of_pool
from vllm_accprobe.opcheck.floors.verdict import ErrorSums, first_of, keys_of

TOGETHER, SCALE, COLUMN, COLUMN_SCALE, COLUMN_MEAN = (
    "all rows", "scale of all rows", "column of all rows", "scale of a column", "mean of a column",
)  # fmt: skip
MEASURES = (TOGETHER, SCALE, COLUMN, COLUMN_SCALE, COLUMN_MEAN)
TRUNCATED = 0.75
"""Units: a scale that is left where a machine truncates what it computes on the way. Derived: 2/3 in the mean where
significands are distributed as 1 / m, which rounding.py takes off only where a row shows it; measured:
scripts/opcheck_floors.py, 0.63 (attention of Llama with kernels for AVX2)."""
_COLUMN = 1.0
"""Derived: units of a column's scale that rounding alone may leave: half a step is at most a unit, and a column whose
values vary by less than a step has the same rounding error in all rows."""
MOST_WIDTH = 1 << 16
"""Chosen: columns that are kept apart, 4 MiB of sums; of wider outputs (logits of large vocabularies) only the
total."""


_KEPT = 1 << 20
"""Chosen: errors that are remembered, 8 MiB; more of them are independent enough."""


@dataclass(frozen=True, slots=True)
class Breach:
    """What all rows show. measure: one of MEASURES; value, limit: in standard errors, or of the expected; column: -1
    where it is of all; chance: that honest rows show as much; words: for people."""

    measure: str
    value: float
    limit: float
    column: int
    chance: float
    words: str

    @property
    def severity(self) -> float:
        return self.value / self.limit


class Pool:
    """The sums of one output of a tap."""

    def __init__(self) -> None:
        self.rows = self.seen = 0
        self._met: set[float] = set()
        self._errors: torch.Tensor | None = None
        self._columns: torch.Tensor | None = None
        self._grouped = self._grouped_squares = self._common = 0.0
        self._first: ErrorSums | None = None
        self.usable, self._truncated = True, False

    def add(self, s: ErrorSums, truncated: bool = False) -> None:
        """The rows of one call; truncated: it does not round to nearest. Calls of other widths, units or models of
        noise cannot be added up: then nothing is said."""
        first = self._first
        self._truncated |= truncated
        if first is None:
            nothing = torch.empty(0)
            self._first = first = replace(s, planes=nothing, by_row=nothing, by_column=nothing)
            width = s.planes.shape[2] if s.planes.shape[2] <= MOST_WIDTH else 1
            self._columns = torch.zeros(8, width, dtype=torch.float64)
        assert self._columns is not None
        wide = s.planes.shape[2] > MOST_WIDTH
        self.usable &= (s.unit, s.common, s.groups, s.shared) == (first.unit, first.common, first.groups, first.shared)
        self.usable &= self._columns.shape[1] == (1 if wide else s.planes.shape[2])
        if not self.usable:
            return
        powers = s.by_row[POWER].tolist()
        self.seen += len(powers)
        new = []
        for k, power in enumerate(powers):
            if power and power not in self._met:
                self._met.add(power)
                new.append(k)
        if not new:
            return
        by_row, by_column = s.by_row, s.by_column
        if s.few or self._errors is not None:
            planes = self._new_errors(s.planes[:, new])
            by_row, by_column = planes.sum(2), planes.sum(1)
        elif len(new) < len(powers):
            by_row, by_column = by_row[:, new], s.planes[:, new].sum(1)
        self.rows += len(new)
        self._columns += by_column.sum(1, keepdim=True) if wide else by_column
        if s.groups:
            self._grouped += float((by_row[POWER] * by_row[NOISE]).sum()) / s.groups
            self._grouped_squares += float(by_row[NOISE].square().sum()) / s.groups
        if s.common:
            self._common += float(by_row[POWER].square().sum()) * s.common**2 / 3.0

    def _new_errors(self, planes: torch.Tensor) -> torch.Tensor:
        """``planes`` without errors that were met before (verdict.repeated), in these rows or in earlier ones."""
        keys = keys_of(planes)
        new = first_of(keys)
        if self._errors is not None:
            new &= ~torch.isin(keys, self._errors)
        known = keys[new] if self._errors is None else torch.cat((self._errors, keys[new]))
        self._errors = known[:_KEPT]
        return planes * new

    def pooled(self) -> tuple[float, float, float, float] | None:
        """(variance over expected, degrees of freedom, scale, its standard error); None where nothing is known."""
        if not self.usable or self._first is None or not self.rows or self._columns is None:
            return None
        t = self._columns.sum(1).tolist()
        first = self._first
        variance = t[VARIANCE] + (first.common**2 + self._left()) * t[POWER]
        if not (variance > 0 and t[POWER] > 0 and math.isfinite(variance) and math.isfinite(t[SQUARE])):
            return None
        squares, noise = t[SPREAD] + self._grouped_squares, t[WEIGHTED] + self._grouped + self._common
        if first.shared:
            squares += t[NOISE] ** 2 / (first.groups or 1.0)
            noise += t[POWER] * t[NOISE] / (first.groups or 1.0)
        freedom = max(1.0, t[VARIANCE] ** 2 / squares) if squares else 1.0
        return t[SQUARE] / variance, freedom, t[PRODUCT] / t[POWER], math.sqrt(MODEL * noise) / t[POWER]

    def smallest(self, chance: float) -> Smallest | None:
        """What `measures` would find at least. chance: as theirs."""
        found = self.pooled()
        if found is None or self._first is None or self._columns is None:
            return None
        freedom = found[1]
        total = self._columns.sum(1).tolist()
        variance = total[VARIANCE] + (self._first.common**2 + self._left()) * total[POWER]
        return of_pool(self._columns, variance, freedom, self._first, chance / len(MEASURES))

    @property
    def unit(self) -> float:
        """Of the last rounding."""
        return self._first.unit if self._first is not None else 0.0

    def created(self) -> float:
        """The relative L2 error of all rows."""
        if self._columns is None:
            return 0.0
        t = self._columns.sum(1).tolist()
        return math.sqrt(t[SQUARE] / t[POWER]) if t[POWER] > 0 else 0.0

    def breach(self, chance: float) -> Breach | None:
        """The worst of what is above its limit."""
        beyond = [b for b in self.measures(chance) if b.value > b.limit]
        return max(beyond, key=lambda b: b.severity, default=None)

    def measures(self, chance: float) -> list[Breach]:
        """All five, the worst column of each. chance: that honest rows give a breach."""
        found = self.pooled()
        if found is None or self._first is None or self._columns is None:
            return []
        q = chance / len(MEASURES)
        ratio, freedom, scale, error = found
        return [self._together(ratio, freedom, q), self._scale(scale, error, q), *self._by_column(self._columns, q)]

    def _bias(self) -> float:
        return TRUNCATED if self._truncated else BIAS

    def _left(self) -> float:
        """Of the square of y, what the scale that truncation leaves adds to the errors' squares."""
        return (TRUNCATED * self.unit) ** 2 if self._truncated else 0.0

    def _all(self) -> str:
        return f"all {self.rows} {'' if self.rows == self.seen else 'different '}rows together"

    def _together(self, ratio: float, freedom: float, q: float) -> Breach:
        limit = MODEL * chi_square(freedom, normal(q, 1, 1))
        chance = len(MEASURES) * tail(deviations_of(ratio / MODEL, freedom), 1, 1)
        words = f"{self._all()}: errors {ratio**0.5:.3g} times honest rounding, allowed {limit**0.5:.3g}"
        return Breach(TOGETHER, ratio**0.5, limit**0.5, -1, min(1.0, chance), words)

    def _scale(self, scale: float, error: float, q: float) -> Breach:
        assert self._first is not None
        bias = self._bias() * self._first.unit
        value, limit = told(abs(scale), normal(q) * error + bias, error)
        far = (abs(scale) - bias) / error if error else math.inf
        words = f"{self._all()}: a scale of {1.0 + scale:.5g}, {value:.3g} standard errors, allowed {limit:.3g}"
        return Breach(SCALE, value, limit, -1, min(1.0, len(MEASURES) * tail(far)), words)

    def _by_column(self, s: torch.Tensor, q: float) -> list[Breach]:
        first = self._first
        looks = s.shape[1]
        if first is None or looks < 2 or self.rows < 2:
            return []
        # a common error moves y by c y: sum y**4 c**2 / 3 <= 4 (c / u)**2 sum y y v, because v >= (u y)**2 / 12
        share = 4.0 * (first.common / first.unit) ** 2
        variance = s[VARIANCE] * (1.0 + share) + self._left() * s[POWER]
        squares, weighted, means = s[SPREAD], s[WEIGHTED] * (1.0 + share), variance
        if first.shared:  # (sum a b)**2 <= sum a a sum b b
            squares, weighted = squares + s[NOISE] ** 2, weighted + s[POWER] * s[NOISE]
            means = means + self.rows * s[NOISE]
        bias = _COLUMN * first.unit
        freedom = torch.where(squares > 0, variance**2 / squares, 1.0).clamp_(min=1.0)
        sizes, deviations = s[POWER].sqrt(), normal(q, looks)
        found = []
        for measure, value, one, extra in (
            (COLUMN_SCALE, s[PRODUCT].abs(), (MODEL * weighted).sqrt(), bias * s[POWER]),
            (COLUMN_MEAN, s[ERROR].abs(), (MODEL * means).sqrt(), bias * self.rows**0.5 * sizes),
        ):
            limit = deviations * one + extra
            at = int(torch.where(limit > 0, value / limit, 0.0).argmax())
            floor, size, most = float(one[at]), float(value[at]), float(limit[at])
            far = (size - float(extra[at])) / floor if floor else 0.0
            shown = told(size, most, floor)
            what = "a mean error"
            if measure == COLUMN_SCALE:
                what = f"a scale of {1.0 + float(s[PRODUCT, at]) / max(float(s[POWER, at]), 1e-300):.5g}"
            words = f"{self._all()}: {what} in column {at}, {shown[0]:.3g} standard errors, allowed {shown[1]:.3g}"
            found.append(Breach(measure, *shown, at, min(1.0, len(MEASURES) * tail(far, looks)), words))
        limit = (MODEL * variance * chi_square(freedom, normal(q, looks, 1)).clamp(min=CONSTANT)).sqrt()
        error = s[SQUARE].sqrt()
        at = int(torch.where(limit > 0, error / limit, 0.0).argmax())
        floor = math.sqrt(float(variance[at]))
        shown = told(float(error[at]), float(limit[at]), floor)
        far = deviations_of(shown[0] ** 2 / MODEL, float(freedom[at])) if floor else 0.0
        words = f"{self._all()}: errors in column {at} {shown[0]:.3g} times honest rounding, allowed {shown[1]:.3g}"
        found.append(Breach(COLUMN, *shown, at, min(1.0, len(MEASURES) * tail(far, looks, 1)), words))
        return found
