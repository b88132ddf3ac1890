"""Errors that hide in honest ones: below every fixed limit, and yet out of the ordinary for this operator.

The problem: against a float32 golden or another TP size nothing upstream is equal to the bit; a scale of 1.02, one
column, a sum in bfloat16 add less than four roundings to what has piled up. The idea: what an operator does elsewhere
is the best floor there is. How much it enlarges its inputs' error is known from the same operator in the other layers
and from its other rows; and rounding has no direction: its errors do not follow the values. So three things are asked
of each tensor and what stands in front of it: GROWTH, the output's error over the inputs' (per row, against the other
layers and the other rows); GAIN, the slope of mine over the golden (per row and over all; rounding averages out, a
scale does not); COLUMNS, the same per column. An answer counts only beyond the spread that the honest show.
Each question first asks for what costs nothing: a look that nothing else could raise above 1 is done.
Not here: what is looked at (looks.py), what stands in front of what, and errors beyond fixed limits (origin.py); the
sums (metrics/, columns.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from vllm_accprobe.judge import kin
from vllm_accprobe.judge.columns import Columns
from vllm_accprobe.judge.looks import COLUMNS, FEW, GAIN, GROWTH, NARROW, Hidden, Known, Look, Thresholds
from vllm_accprobe.judge.standards import TRUNCATED


class Peers:
    """What the same operators do elsewhere."""

    def __init__(self, looks: Sequence[Look], rules: Thresholds | None = None):
        self.rules = rules or Thresholds()
        self._known = {id(look): Known(look) for look in looks}
        self._columns: dict[int, Columns] = {}
        self._kind: dict[int, list[Look]] = {}
        self.by_kind: dict[str, list[Look]] = defaultdict(list)
        for look in looks:
            floor = self.rules.floor * look.unit
            if not floor:
                continue
            with np.errstate(all="ignore"):
                look.growth = 0.5 * np.log2((look.err**2 + floor**2) / (look.before**2 + floor**2))
            look.growth[~np.isfinite(look.growth)] = 0.0
            self._kind[id(look)] = kind = self.by_kind[look.kind]
            kind.append(look)

    def judge(self, look: Look) -> Hidden | None:
        """The strongest sign of an error that ``look`` makes itself, or None."""
        if not look.unit or look.width < NARROW or len(look.keys) < FEW or not np.isfinite(look.err).all():
            return None
        if not look.err.any():
            return None
        found = [self._gain(look), self._odd_gain(look), self._odd_columns(look)]
        found += [self._growth(look), self._rows(look), self._row_gain(look)]
        return max((f for f in found if f is not None), key=lambda f: f.strength, default=None)

    # --- over all rows -----------------------------------------------------------------------------------------

    def _others(self, look: Look) -> list[Look]:
        return [o for o in self._kind[id(look)] if o is not look and len(o.keys) >= FEW]

    def _facts(self, looks: Sequence[Look]) -> list[Known]:
        return [self._known[id(o)] for o in looks]

    def _sums(self, sums: np.ndarray) -> Columns:
        found = self._columns.get(id(sums))  # the array is held, so its id stays its own
        if found is None:
            found = self._columns[id(sums)] = Columns(sums)
        return found

    def _growth(self, look: Look) -> Hidden | None:
        """Over all rows, more growth than in any other layer."""
        rules, here = self.rules, self._known[id(look)].growth
        if here <= rules.grow:  # the usual growth counts for 0 at least
            return None
        others = self._others(look)
        if len(others) < 2:
            return None
        usual = max(max(o.growth for o in self._facts(others)), 0.0)
        most = 2.0**usual * look.before
        made = float(np.sqrt(np.median(np.maximum(look.err**2 - most**2, 0.0))))
        strength = min((here - usual) / rules.grow, made / (rules.created * look.unit))
        strength /= rules.mixing if look.mixing else 1.0
        return Hidden(look.err > 0, GROWTH, made, strength) if strength > 1 else None

    def _gain(self, look: Look) -> Hidden | None:
        """All rows larger or smaller by one factor."""
        rules, mean = self.rules, self._known[id(look)].gain
        if abs(mean) <= rules.gain * look.unit:
            return None
        error = self._known[id(look)].gain_error
        before = float(np.median(np.abs(look.gain_before)))
        usual = max((abs(o.gain) for o in self._facts(self._others(look))), default=0.0)
        need = max(rules.gain * look.unit, rules.sure * error, rules.through * before, 1.5 * min(usual, abs(mean)))
        strength = abs(mean) / need
        return Hidden(look.err > 0, GAIN, abs(mean), strength) if strength > 1 else None

    def _odd_gain(self, look: Look) -> Hidden | None:
        """All rows larger or smaller by another factor than in every other layer, see kin.py: a kernel that truncates
        makes all layers' results smaller alike, and hides a factor that only one of them has."""
        others = self._others(look)
        if len(others) < kin.FEWEST:
            return None
        here, known = self._known[id(look)], self._facts(others)
        off = min((here.gain - o.gain for o in known), key=abs)
        if abs(off) <= TRUNCATED * look.unit:
            return None
        passed = max(kin.passed_on(look.passed, o.passed) for o in others)
        noise = max(float(np.median(o.before)) for o in (look, *others)) ** 2
        need = max(
            TRUNCATED * look.unit,
            self.rules.sure * max(float(np.hypot(here.gain_error, o.gain_error)) for o in known),
            self.rules.outlier * kin.spread([o.gain for o in known]),
            self.rules.through * max(passed, noise),
        )
        strength = abs(off) / need
        return Hidden(look.err > 0, GAIN, abs(off), strength) if strength > 1 else None

    # --- some rows ---------------------------------------------------------------------------------------------

    def _rows(self, look: Look) -> Hidden | None:
        """Rows with more growth than the other rows, and than the same rows in other layers."""
        rules, middle = self.rules, self._known[id(look)].growth
        off = look.growth - middle
        if off.max() <= rules.outlier * rules.spread:
            return None
        others = self._others(look)
        spread = max(_spread(look.growth, middle, [o.growth_tail for o in self._facts(others)]), rules.spread)
        outlier = off / (rules.outlier * spread)
        if not (outlier > 1).any():
            return None
        same = [_at(o.keys, o.growth, look.keys) for o in others]
        usual = np.maximum(np.max(same, axis=0) if same else np.zeros(len(look.keys)), middle)
        most = 2.0 ** np.maximum(usual, 0.0) * look.before
        made = np.sqrt(np.maximum(look.err**2 - most**2, 0.0))
        apart = rules.apart if same else 2.0 * rules.apart
        strength = np.minimum.reduce([
            outlier, (look.growth - usual) / apart, made / (2.0 * rules.created * look.unit),
        ])  # fmt: skip
        strength = strength * _rarity(strength) / (rules.mixing if look.mixing else 1.0)
        rows = strength > 1
        return Hidden(rows, GROWTH, float(made[rows].max()), float(strength.max())) if rows.any() else None

    def _row_gain(self, look: Look) -> Hidden | None:
        """Rows that are larger or smaller than the others are."""
        rules, middle = self.rules, self._known[id(look)].gain
        off = np.abs(look.gain - middle)
        if off.max() <= 1.5 * look.unit:
            return None
        others = self._others(look)
        spread = _spread(look.gain, middle, [o.gain_tail for o in self._facts(others)])
        # What noise does to a slope shrinks with the width; each row may be noisier than the typical one.
        noise = np.maximum(spread, look.err / max(look.width, 1) ** 0.5)
        need = np.maximum.reduce([
            np.full(len(off), 1.5 * look.unit), rules.outlier * noise, rules.through * np.abs(look.gain_before),
        ])  # fmt: skip
        if not (off / need > 1).any():
            return None
        same = [np.abs(_at(o.keys, o.gain, look.keys)) for o in others]
        if same:
            need = np.maximum(need, 1.5 * np.minimum(np.median(same, axis=0), off))
        strength = off / need
        strength = strength * _rarity(strength)
        rows = strength > 1
        return Hidden(rows, GAIN, float(off[rows].max()), float(strength.max())) if rows.any() else None

    # --- columns -----------------------------------------------------------------------------------------------

    def _odd_columns(self, look: Look) -> Hidden | None:
        """Columns that err more than the others do, or follow the golden's values by another factor."""
        rules = self.rules
        if look.columns is None or look.columns.shape[1] < NARROW:
            return None
        here = self._sums(look.columns)
        if here.rows < FEW:
            return None
        err, slope, sure = here.signs
        by_size = err / (1.5 * look.unit)
        usual_err, usual_slope = max(here.usual_err, 0.1 * look.unit), float(np.median(np.abs(sure)))
        least = rules.outlier * max(1.4826 * usual_slope, 1.0)
        if not (
            (np.minimum(err / (rules.column * usual_err), by_size) > 1).any()
            or (np.minimum(np.abs(sure) / least, np.abs(slope) / (1.5 * look.unit)) > 1).any()
            or (not look.mixing and (self._offset(here, 2.5 * look.unit) > 1).any())
        ):
            return None
        # Errors in few columns of the input make errors of one direction, which spread unevenly over the output.
        known = [(self._sums(o.columns), o.unit) for o in self._others(look) if o.columns is not None]
        elsewhere = [columns.uneven(unit) for columns, unit in known]
        uneven = [1.6 * most for most, _ in elsewhere]
        uneven += [2.5 * self._sums(before).uneven(look.unit)[0] for before in look.columns_before]
        odd = max([rules.column, *uneven])
        by_err = np.minimum(err / (odd * usual_err), by_size)
        noisy = max([least, *(1.5 * most for _, most in elsewhere)])
        by_slope = np.minimum(np.abs(sure) / noisy, np.abs(slope) / (1.5 * look.unit))
        by_slope = np.where(np.abs(slope) > 3 * abs(float(np.median(slope))), by_slope, 0.0)
        strength = np.maximum(np.maximum(by_err, by_slope), self._offsets(look, [c for c, _ in known]))
        for before in look.columns_before:
            worst = self._sums(before).signs[0]
            if before.shape[1] % len(strength) == 0:  # an operator by element passes a bad column on, from each part
                worst = worst.reshape(-1, len(strength)).max(axis=0)
                strength = np.where(err > rules.by_element * worst, strength, 0.0)
        bad = np.flatnonzero(strength > 1)
        if not len(bad) or len(bad) > len(strength) // 2:
            return None
        return Hidden(look.err > 0, COLUMNS, float(err[bad].max()), float(strength.max()), bad)

    def _offset(self, columns: Columns, need: float) -> np.ndarray:
        offset, sure = columns.offsets
        return np.minimum(np.abs(sure) / self.rules.outlier, np.abs(offset) / need)

    def _offsets(self, look: Look, elsewhere: Sequence[Columns]) -> np.ndarray:
        """How strongly each column is shifted to one side. A column that hardly changes is rounded to the same side in
        each row, by up to one rounding; what other layers and the inputs show of that is not enough here. Attention
        gives many rows the same values, errors included: there it says nothing."""
        assert look.columns is not None
        if look.mixing:
            return np.zeros(look.columns.shape[1])
        known = [*elsewhere, *map(self._sums, look.columns_before)]
        usual = max((c.most_offset for c in known if c.width >= NARROW), default=0.0)
        return self._offset(self._sums(look.columns), max(2.5 * look.unit, 2.0 * min(usual, 4.0 * look.unit)))


def _spread(values: np.ndarray, middle: float, tails: Sequence[float]) -> float:
    """A robust standard deviation: of the bulk around ``middle``, or, in other layers, of the outer tenth (looks.tail),
    whichever is larger. Here the outer tenth may be what is looked for."""
    bulk = 1.4826 * float(np.median(np.abs(values - middle)))
    return max(bulk, float(np.median(tails)) if tails else 0.0)


def _rarity(strength: np.ndarray) -> float:
    """Among many rows one or two are always odd: few must stand out by more."""
    few = int((strength > 1).sum())
    return 0.75 if few < 4 and len(strength) >= 4 * few else 1.0


def _at(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """``values`` at the sorted ``keys`` where they are ``wanted``; 0 elsewhere."""
    if keys is wanted or np.array_equal(keys, wanted):
        return values
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)
