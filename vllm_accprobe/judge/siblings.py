"""Where nothing can be replayed: does this operator show a factor or a column that its sibling layers do not?

The problem: against a float32 golden or another TP size no input is equal to the bit, so that a scale of 1.02 or one
wrong column stays below the fixed limits. The idea: roundings have no direction, so that the slope of mine over golden
averages out and a fault's does not. It is tested over all rows and in each column, as are a column's error and mean
offset, at one false-alarm rate (statistic.py), beyond what inputs and sibling layers show. With inputs that are equal
to the bit no sibling is needed: two roundings of one number bound the difference. Not here: errors beyond fixed limits
(origins.py), the sums (kernels/).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.statistic import BEYOND_CHANCE, RATE, SIBLING_OUTLIER, Chance, tail
from vllm_accprobe.judge.tensor_errors import TINY, Columns, kind_of_place
from vllm_accprobe.spill_buffer import SpillBuffer

GROWTH, GAIN, COLUMNS = "growth", "gain", "columns"
_NONE = np.zeros(0, np.int64)


@dataclass(eq=False)
class TensorStats:
    """One tensor and what stands upstream of it, all float64 [n], by row key.

    err, gain: relative L2 error and slope - 1 of each row. before, gain_before: the largest of the inputs' at the rows
    that influence it. unit: one rounding. columns, columns_before: sums per column, None where not taken. mixing:
    whether the operator mixes positions (attention). unfed: what went in may be uneven, and was not compared: of an
    operator's own inputs none was. untapped: operators that were not tapped lie upstream. inputs_known: what went in
    was compared, so that ``before`` of 0 means equal inputs."""

    tap: str
    role: str
    unit: float
    keys: np.ndarray
    err: np.ndarray
    gain: np.ndarray
    before: np.ndarray
    gain_before: np.ndarray
    width: int = 1
    columns: Columns | None = None
    columns_before: Sequence[Columns] = ()
    mixing: bool = False
    untapped: bool = False
    inputs_known: bool = False
    unfed: bool = False

    @property
    def kind(self) -> str:
        return kind_of_place(self.tap, self.role)

    @cached_property
    def fit(self) -> bool:
        return len(self.keys) >= c.FEW and bool(np.isfinite(np.median(self.err)))

    @cached_property
    def differs(self) -> bool:
        """Identical pairs are left out before anything is tested."""
        return bool(self.err.any())

    @cached_property
    def made(self) -> float:
        """What the typical row gained in error, beyond what came in: relative L2, by independent errors; 0 of a row
        that came in with no finite error."""
        known = np.isfinite(self.before)
        gained = self.err**2 - np.where(known, self.before, 0.0) ** 2
        return float(np.sqrt(max(float(np.median(np.where(known, gained, 0.0))), 0.0)))

    @cached_property
    def typical_gain(self) -> float:
        return float(np.median(self.gain))

    @cached_property
    def gain_error(self) -> float:
        """Standard error of ``typical_gain``, from the rows' own spread and number."""
        _, spread = deviation(self.gain)
        return spread / (c.INDEPENDENT * max(len(self.gain), 1)) ** 0.5


@dataclass(frozen=True)
class Hidden:
    """rows: bool [n], where it shows. how: GROWTH, GAIN or COLUMNS. size: of the error, as a relative L2 error of the
    rows or columns concerned. strength: times what was needed. tier: see statistic.py; chance: the probability that
    correct runs show this anywhere in the comparison. columns: the bad ones."""

    rows: np.ndarray
    how: str
    size: float
    strength: float
    tier: str
    chance: float
    columns: np.ndarray = field(default_factory=lambda: _NONE)


class Siblings:
    """What the same operators do in other layers. rate: of false alarms, over all of ``stats`` that differ. keeper: of
    their rows."""

    def __init__(self, stats: Sequence[TensorStats], rate: float = RATE, keeper: SpillBuffer | None = None):
        self.by_kind: dict[str, list[TensorStats]] = defaultdict(list)
        for one in stats:
            if one.unit:
                if one.fit:  # while its rows are at hand
                    _ = one.made, one.typical_gain, one.gain_error, one.differs
                self.by_kind[one.kind].append(one)
                if keeper is not None:
                    keeper.rest()
        self.chance = Chance(rate, sum(one.differs for kind in self.by_kind.values() for one in kind))

    @cached_property
    def made(self) -> np.ndarray:
        """float64 [places]: what each place adds to the typical row's error, relative L2, or the least that rounding
        leaves."""
        fit = (one for kind in self.by_kind.values() for one in kind if one.fit)
        return np.array([max(one.made, c.LEAST_CREATED * one.unit) for one in fit])

    def judge(self, here: TensorStats) -> Hidden | None:
        enough = here.unit and here.width >= c.NARROW and len(here.keys) >= c.FEW
        if not (enough and here.differs and np.isfinite(here.err).all()):
            return None
        others = [o for o in self.by_kind[here.kind] if o is not here and o.fit]
        found = [self._equal_inputs(here), self._gain(here, others), self._columns(here, others)]
        return max((f for f in found if f is not None), key=lambda f: f.strength, default=None)

    def _equal_inputs(self, here: TensorStats) -> Hidden | None:
        """Rows whose inputs are equal to the bit, and whose results are further apart than two roundings of one number
        can be: no other layer is needed to know that."""
        equal = here.before == 0
        rows = int(equal.sum())
        if rows < c.FEW or not here.inputs_known:
            return None
        made = float(np.median(here.err[equal]))
        if made <= c.CREATED_LEAST * here.unit:
            return None
        # Hoeffding's inequality, for squares of differences within one step, of 2 u.
        beyond = (made / here.unit) ** 2 - c.TWO_ROUNDINGS**2
        chance = self.chance.anywhere(float(np.exp(-2.0 * rows * here.width * (beyond / c.STEP_SQUARE) ** 2)))
        strength = made / (c.CREATED_LEAST * here.unit)
        return Hidden(equal & (here.err > 0), GROWTH, made, strength, BEYOND_CHANCE, chance)

    def _gain(self, here: TensorStats, others: Sequence[TensorStats]) -> Hidden | None:
        """All rows larger or smaller by one factor. What all layers share is the machine's, as far as truncation goes:
        a factor that is wrong in every layer is a fault."""
        size, error = abs(here.typical_gain), here.gain_error
        if size <= c.GAIN_LEAST * here.unit:
            return None
        shared = max((abs(o.typical_gain) for o in others), default=0.0)
        need = max(
            c.GAIN_LEAST * here.unit,
            self.chance.sigmas() * error,
            c.THROUGH * float(np.median(np.abs(here.gain_before))),
            min(shared + c.GAIN_LEAST * here.unit, (c.GAIN_LEAST + c.TRUNCATIONS * c.TRUNCATED) * here.unit),
        )
        chance = self.chance.of_sigmas(size / error) if error else 0.0
        return Hidden(here.err > 0, GAIN, size, size / need, BEYOND_CHANCE, chance) if size > need else None

    def _columns(self, here: TensorStats, others: Sequence[TensorStats]) -> Hidden | None:
        """Columns that err more than the others do, or follow the golden's values by another factor, by more than
        columns do in sibling layers and inputs."""
        own = here.columns
        if own is None or own.width < c.NARROW or own.rows < c.FEW or here.untapped:
            return None
        if here.unfed and not here.columns_before:  # what went in may be uneven, and was not compared
            return None
        err, slope, sure = own.signs
        offset, sure_offset = own.offsets
        width, least = len(err), c.COLUMN_LEAST * here.unit
        sigmas = c.TAILS * self.chance.sigmas(width)
        usual = max(own.usual_err, c.COLUMN_TYPICAL * here.unit)
        bulk = max(c.MAD * float(np.median(np.abs(sure))), 1.0)
        needs = [c.COLUMN * usual, sigmas * bulk, c.OFFSET_LEAST * here.unit]

        def strengths() -> np.ndarray:
            by_err = np.minimum(err / needs[0], err / least)
            by_slope = np.minimum(np.abs(sure) / needs[1], np.abs(slope) / least)
            by_slope[np.abs(slope) <= c.COLUMN_APART * abs(float(np.median(slope)))] = 0.0
            found = np.maximum(by_err, by_slope)
            if here.mixing:  # attention gives many rows the same values, errors included
                return found
            return np.maximum(found, np.minimum(np.abs(sure_offset) / sigmas, np.abs(offset) / needs[2]))

        if not (strengths() > 1).any():
            return None
        # Errors in few columns of the input make errors of one direction, which spread unevenly over the output.
        siblings = [o.columns for o in others if o.columns is not None]
        uneven = [o.uneven(here.unit) for o in siblings]
        needs[0] = usual * max([c.COLUMN, *(c.COLUMN_SIBLINGS * most for most, _ in uneven),
                                *(c.COLUMN_INPUT * b.uneven(here.unit)[0] for b in here.columns_before)])  # fmt: skip
        needs[1] = max([needs[1], *(c.COLUMN_SURE * most for _, most in uneven)])
        shifts = [k.most_offset for k in [*siblings, *here.columns_before] if k.width >= c.NARROW]
        needs[2] = max(needs[2], c.OFFSET_SIBLINGS * min(max(shifts, default=0.0), c.OFFSET_MOST * here.unit))
        strength = strengths()
        for before in here.columns_before:
            if before.width % width == 0:  # an operator by element passes a bad column on, from each part
                worst = before.signs[0].reshape(-1, width).max(axis=0)
                strength[err <= c.BY_ELEMENT * worst] = 0.0
        bad = np.flatnonzero(strength > 1)
        if not len(bad) or len(bad) > width // 2:
            return None
        at = int(bad[strength[bad].argmax()])
        far = max(abs(float(sure[at])) / bulk, _log_deviations(err, at), abs(float(sure_offset[at])))
        chance = self.chance.of_sigmas(far / c.TAILS, width)
        return Hidden(here.err > 0, COLUMNS, float(err[bad].max()), float(strength.max()), SIBLING_OUTLIER, chance, bad)


def _log_deviations(err: np.ndarray, at: int) -> float:
    """How many robust deviations the error of column ``at`` lies above the typical column's, in logarithms."""
    logs = np.log2(np.maximum(err, TINY))
    middle, bulk = deviation(logs)
    return max(float(logs[at]) - middle, 0.0) / max(bulk, c.LEAST_SPREAD)


def deviation(values: np.ndarray) -> tuple[float, float]:
    """(median, robust standard deviation) of float64 [n], n >= 1: the median absolute deviation of a normal
    distribution's bulk."""
    middle = float(np.median(values))
    return middle, c.MAD * float(np.median(np.abs(values - middle)))


def chance_of_size(error: float, usual: np.ndarray, places: int) -> float | None:
    """The probability that a correct place of a comparison, of ``places``, errs by ``error``, where ``usual`` are the
    errors of the places at hand, whose logarithms are taken to be normal. None of fewer than c.FEW."""
    known = np.log(usual[usual > 0])
    if len(known) < c.FEW or not error > 0:
        return None
    middle, spread = deviation(known)
    spread = max(spread, c.LEAST_SPREAD * math.log(2.0))
    if math.isinf(error):
        return 0.0
    return tail((math.log(error) - middle) / spread, max(places, 1), 1)
