"""Errors that hide in honest ones: below every fixed limit, and yet out of the ordinary for this operator.

The problem: against a float32 golden or another TP size nothing upstream is equal to the bit; a scale of 1.02, one
column, a sum in bfloat16 add less than four roundings to what has piled up. The idea: what an operator does elsewhere
is the best floor there is. How much it enlarges its inputs' error is known from the same operator in the other layers
and from its other rows; and rounding has no direction: its errors do not follow the values. So three things are asked
of each tensor and what stands in front of it: GROWTH, the output's error over the inputs' (per row, against the other
layers and the other rows); GAIN, the slope of mine over the golden (per row and over all; rounding averages out, a
scale does not); COLUMNS, the same per column. An answer counts only beyond the spread that the honest show.
Not here: what stands in front of what, and errors beyond fixed limits (origin.py); the sums (metrics/).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    that influence it. unit: one rounding. columns, columns_before: metrics.structure's sums, None where not taken.
    mixing: whether the operator mixes positions (attention).
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
    growth: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def kind(self) -> str:
        """What it has in common with the same operator in other layers."""
        return f"{_NUMBER.sub('*', self.tap)}|{self.role}"


@dataclass(frozen=True)
class Hidden:
    """rows: bool [n], where it shows. how: GROWTH, GAIN or COLUMNS. columns: the bad ones. size: of the error, as a
    relative L2 error of the rows or columns concerned. strength: times what was needed."""

    rows: np.ndarray
    how: str
    size: float
    strength: float
    columns: np.ndarray = field(default_factory=lambda: _NONE)


class Peers:
    """What the same operators do elsewhere."""

    def __init__(self, looks: Sequence[Look], rules: Thresholds | None = None):
        self.rules = rules or Thresholds()
        self.by_kind: dict[str, list[Look]] = defaultdict(list)
        for look in looks:
            floor = self.rules.floor * look.unit
            if not floor:
                continue
            with np.errstate(all="ignore"):
                look.growth = 0.5 * np.log2((look.err**2 + floor**2) / (look.before**2 + floor**2))
            look.growth[~np.isfinite(look.growth)] = 0.0
            self.by_kind[look.kind].append(look)

    def judge(self, look: Look) -> Hidden | None:
        """The strongest sign of an error that ``look`` makes itself, or None."""
        if not look.unit or look.width < NARROW or len(look.keys) < FEW or not np.isfinite(look.err).all():
            return None
        if not look.err.any():
            return None
        found = [self._gain(look), self._columns(look), self._growth(look), self._rows(look), self._row_gain(look)]
        return max((f for f in found if f is not None), key=lambda f: f.strength, default=None)

    # --- over all rows -----------------------------------------------------------------------------------------

    def _others(self, look: Look) -> list[Look]:
        return [o for o in self.by_kind[look.kind] if o is not look and len(o.keys) >= FEW]

    def _growth(self, look: Look) -> Hidden | None:
        """Over all rows, more growth than in any other layer."""
        rules, others = self.rules, self._others(look)
        if len(others) < 2:
            return None
        here = float(np.median(look.growth))
        usual = max(max(float(np.median(o.growth)) for o in others), 0.0)
        most = 2.0**usual * look.before
        made = float(np.sqrt(np.median(np.maximum(look.err**2 - most**2, 0.0))))
        strength = min((here - usual) / rules.grow, made / (rules.created * look.unit))
        strength /= rules.mixing if look.mixing else 1.0
        return Hidden(look.err > 0, GROWTH, made, strength) if strength > 1 else None

    def _gain(self, look: Look) -> Hidden | None:
        """All rows larger or smaller by one factor."""
        rules = self.rules
        mean = float(np.median(look.gain))
        error = 1.4826 * float(np.median(np.abs(look.gain - mean))) / len(look.gain) ** 0.5
        before = float(np.median(np.abs(look.gain_before)))
        usual = max((abs(float(np.median(o.gain))) for o in self._others(look)), default=0.0)
        need = max(rules.gain * look.unit, rules.sure * error, rules.through * before, 1.5 * min(usual, abs(mean)))
        strength = abs(mean) / need
        return Hidden(look.err > 0, GAIN, abs(mean), strength) if strength > 1 else None

    # --- some rows ---------------------------------------------------------------------------------------------

    def _rows(self, look: Look) -> Hidden | None:
        """Rows with more growth than the other rows, and than the same rows in other layers."""
        rules = self.rules
        middle = float(np.median(look.growth))
        spread = max(_spread(look.growth, [o.growth for o in self._others(look)]), rules.spread)
        same = [_at(o.keys, o.growth, look.keys) for o in self._others(look)]
        usual = np.maximum(np.max(same, axis=0) if same else np.zeros(len(look.keys)), middle)
        most = 2.0 ** np.maximum(usual, 0.0) * look.before
        made = np.sqrt(np.maximum(look.err**2 - most**2, 0.0))
        apart = rules.apart if same else 2.0 * rules.apart
        strength = np.minimum.reduce([
            (look.growth - middle) / (rules.outlier * spread),
            (look.growth - usual) / apart,
            made / (2.0 * rules.created * look.unit),
        ])  # fmt: skip
        strength = strength * _rarity(strength) / (rules.mixing if look.mixing else 1.0)
        rows = strength > 1
        return Hidden(rows, GROWTH, float(made[rows].max()), float(strength.max())) if rows.any() else None

    def _row_gain(self, look: Look) -> Hidden | None:
        """Rows that are larger or smaller than the others are."""
        rules = self.rules
        middle = float(np.median(look.gain))
        spread = _spread(look.gain, [o.gain for o in self._others(look)])
        # What noise does to a slope shrinks with the width; each row may be noisier than the typical one.
        noise = np.maximum(spread, look.err / max(look.width, 1) ** 0.5)
        off = np.abs(look.gain - middle)
        need = np.maximum.reduce([
            np.full(len(off), 1.5 * look.unit), rules.outlier * noise, rules.through * np.abs(look.gain_before),
        ])  # fmt: skip
        same = [np.abs(_at(o.keys, o.gain, look.keys)) for o in self._others(look)]
        if same:
            need = np.maximum(need, 1.5 * np.minimum(np.median(same, axis=0), off))
        strength = off / need
        strength = strength * _rarity(strength)
        rows = strength > 1
        return Hidden(rows, GAIN, float(off[rows].max()), float(strength.max())) if rows.any() else None

    # --- columns -----------------------------------------------------------------------------------------------

    def _columns(self, look: Look) -> Hidden | None:
        """Columns that err more than the others do, or follow the golden's values by another factor."""
        rules = self.rules
        if look.columns is None or look.columns.shape[1] < 16 or look.columns[4].max() < FEW:
            return None
        err, slope, sure = column_signs(look.columns)
        usual_err, usual_slope = float(np.median(err)), float(np.median(np.abs(sure)))
        # Errors in few columns of the input make errors of one direction, which spread unevenly over the output.
        uneven = [1.6 * _uneven(o.columns, o.unit)[0] for o in self._others(look) if o.columns is not None]
        uneven += [2.5 * _uneven(before, look.unit)[0] for before in look.columns_before]
        odd = max([rules.column, *uneven])
        by_err = np.minimum(err / (odd * max(usual_err, 0.1 * look.unit)), err / (1.5 * look.unit))
        sure_elsewhere = [1.5 * _uneven(o.columns, o.unit)[1] for o in self._others(look) if o.columns is not None]
        noisy = max([rules.outlier * max(1.4826 * usual_slope, 1.0), *sure_elsewhere])
        by_slope = np.minimum(np.abs(sure) / noisy, np.abs(slope) / (1.5 * look.unit))
        by_slope = np.where(np.abs(slope) > 3 * abs(float(np.median(slope))), by_slope, 0.0)
        strength = np.maximum(np.maximum(by_err, by_slope), self._offsets(look))
        for before in look.columns_before:
            worst = column_signs(before)[0]
            if before.shape[1] % len(strength) == 0:  # an operator by element passes a bad column on, from each part
                worst = worst.reshape(-1, len(strength)).max(axis=0)
                strength = np.where(err > rules.by_element * worst, strength, 0.0)
        bad = np.flatnonzero(strength > 1)
        if not len(bad) or len(bad) > len(strength) // 2:
            return None
        return Hidden(look.err > 0, COLUMNS, float(err[bad].max()), float(strength.max()), bad)

    def _offsets(self, look: Look) -> np.ndarray:
        """How strongly each column is shifted to one side. A column that hardly changes is rounded to the same side in
        each row, by up to one rounding; what other layers and the inputs show of that is not enough here. Attention
        gives many rows the same values, errors included: there it says nothing."""
        assert look.columns is not None
        if look.mixing:
            return np.zeros(look.columns.shape[1])
        offset, sure = column_offsets(look.columns)
        known = [o.columns for o in self._others(look) if o.columns is not None] + list(look.columns_before)
        usual = max((float(np.abs(column_offsets(c)[0]).max()) for c in known if c.shape[1] >= NARROW), default=0.0)
        need = max(2.5 * look.unit, 2.0 * min(usual, 4.0 * look.unit))
        return np.minimum(np.abs(sure) / self.rules.outlier, np.abs(offset) / need)


def column_offsets(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From metrics.structure's sums: (mean error of each column relative to its size, as in `column_signs`; the same in
    standard errors of a mean of random signs)."""
    dd, gg, n, off = sums[0], sums[1], np.maximum(sums[4], 1.0), sums[5]
    size = np.sqrt(np.maximum(gg, max(0.25 * float(np.median(gg)), 1e-300)) / n)
    return off / n / size, np.where(dd > 0, off / np.sqrt(np.maximum(dd, 1e-300)), 0.0)


def column_signs(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From metrics.structure's sums: (error of each column relative to its size, or to half the typical column's where
    it is smaller; slope - 1; slope in standard errors)."""
    dd, gg, gd, square = sums[:4]
    floor = 0.25 * float(np.median(gg))
    with np.errstate(divide="ignore", invalid="ignore"):
        err = np.sqrt(dd / np.maximum(gg, max(floor, 1e-300)))
        slope = gd / np.maximum(gg, max(floor, 1e-300))
        sure = gd / np.sqrt(np.maximum(square, 1e-300))
    return err, slope, np.where(gd == 0, 0.0, sure)


def _uneven(sums: np.ndarray, unit: float) -> tuple[float, float]:
    """(worst column's error over the typical one's, largest slope in standard errors); not more than a fault would give
    that lies before."""
    err, _, sure = column_signs(sums)
    return min(float(err.max()) / max(float(np.median(err)), 0.1 * unit), 8.0), min(float(np.abs(sure).max()), 12.0)


def _spread(values: np.ndarray, elsewhere: Sequence[np.ndarray]) -> float:
    """A robust standard deviation: of the bulk, or, in other layers, of the outer tenth, whichever is larger. Here the
    outer tenth may be what is looked for."""
    bulk = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    tails = [float(np.quantile(np.abs(v - np.median(v)), 0.9)) / 1.645 for v in elsewhere]
    return max(bulk, float(np.median(tails)) if tails else 0.0)


def _rarity(strength: np.ndarray) -> float:
    """Among many rows one or two are always odd: few must stand out by more."""
    few = int((strength > 1).sum())
    return 0.75 if few < 4 and len(strength) >= 4 * few else 1.0


def _at(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """``values`` at the sorted ``keys`` where they are ``wanted``; 0 elsewhere."""
    if np.array_equal(keys, wanted):
        return values
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)
