"""Errors that hide in honest ones: below every fixed limit, and yet out of the ordinary for this operator.

The problem: against a float32 golden or another TP size nothing upstream is equal to the bit; a scale of 1.02, one
column, a sum in bfloat16 add less than four roundings to what has piled up. The idea: what an operator does elsewhere
is the best floor there is. How much it enlarges its inputs' error is known from the same operator in the other layers
and from its other rows; and rounding has no direction: its errors do not follow the values. So three things are asked
of each tensor and what stands in front of it: GROWTH, the output's error over the inputs' (per row, against the other
layers and the other rows); GAIN, the slope of mine over the golden (per row and over all; rounding averages out, a
scale does not); COLUMNS, the same per column. An answer counts only beyond what chance leaves to honest machines, at
one rate for the whole comparison (chance.py), and where it is more than honest habits explain (constants.py).
Each question first asks for what costs nothing: a look that nothing else could raise above 1 is done.
Not here: what is looked at (peer_evidence.py), how far layers lie apart (kin.py), columns (odd_columns.py), what
stands in front of what (in_front.py), errors beyond fixed limits (origin.py); the sums (kernels/, columns.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.chance import Against, Chance, deviation
from vllm_accprobe.judge.origins.columns import TINY
from vllm_accprobe.judge.origins.influence import spread
from vllm_accprobe.judge.origins.kin import Spreads, doubt_of, passed_on
from vllm_accprobe.judge.origins.odd_columns import odd_columns
from vllm_accprobe.judge.origins.peer_evidence import GAIN, GROWTH, Hidden, Known, Look
from vllm_accprobe.judge.origins.row_errors import IN_MEMORY, Keeper
from vllm_accprobe.judge.tiers import BEYOND_CHANCE, UNLIKE_KIN


class Peers:
    """What the same operators do elsewhere. rate: of false alarms, over all of ``looks``. keeper: of their rows."""

    def __init__(self, looks: Sequence[Look], rate: float = c.FALSE_ALARM_RATE, keeper: Keeper = IN_MEMORY):
        self._known = {look: Known(look) for look in looks}
        self._kind: dict[Look, list[Look]] = {}
        self.by_kind: dict[str, list[Look]] = defaultdict(list)
        for look in looks:
            floor = c.LEAST_HONEST * look.unit
            if not floor:
                continue
            with np.errstate(all="ignore"):
                growth = 0.5 * np.log2((look.err**2 + floor**2) / (look.before**2 + floor**2))
                growth[~np.isfinite(growth)] = 0.0
                look.growth = keeper.keep(growth)
                self._known[look].work_out()
            keeper.rest()
            self._kind[look] = kind = self.by_kind[look.kind]
            kind.append(look)
        self.chance = Chance(rate, len(self._kind))

    def judge(self, look: Look) -> Hidden | None:
        """The strongest sign of an error that ``look`` makes itself, or None."""
        if not look.unit or look.width < c.NARROW or len(look.keys) < c.FEW or not np.isfinite(look.err).all():
            return None
        if not look.err.any():
            return None
        found = [self._equal_inputs(look), self._gain(look), self._odd_gain(look)]
        found.append(odd_columns(look, self._others(look), self.chance))
        found += [self._growth(look), self._rows(look), self._row_gain(look)]
        if look.untapped:  # how far its input is from golden's nobody saw: what it does elsewhere measures nothing
            found = [f for f in found if f is None or f.tier != UNLIKE_KIN]
        return max((f for f in found if f is not None), key=lambda f: f.strength, default=None)

    # --- over all rows -----------------------------------------------------------------------------------------

    def _others(self, look: Look) -> list[Look]:
        return [o for o in self._kind[look] if o is not look and self._known[o].fit]

    def _facts(self, looks: Sequence[Look]) -> list[Known]:
        return [self._known[o] for o in looks]

    @cached_property
    def _spreads(self) -> dict[str, Spreads]:
        """How far layers lie apart: in growth, in what they made (powers of two), and in gain (u)."""
        kinds = {kind: [self._known[o] for o in looks if self._known[o].fit] for kind, looks in self.by_kind.items()}
        return {
            "growth": Spreads({k: [x.growth for x in v] for k, v in kinds.items()}, c.LEAST_SPREAD),
            "made": Spreads({k: [x.log_made for x in v] for k, v in kinds.items()}, c.LEAST_SPREAD),
            "gain": Spreads({k: [x.gain / x.look.unit for x in v] for k, v in kinds.items()}, c.LEAST_SPREAD),
        }

    @cached_property
    def made(self) -> np.ndarray:
        """float64 [places]: what each place adds to the typical row's error, relative L2, or the least honest error."""
        fit = (look for looks in self.by_kind.values() for look in looks if self._known[look].fit)
        return np.array([max(self._known[x].made, c.LEAST_HONEST * x.unit) for x in fit])

    def _against(self, what: str, look: Look) -> Against | None:
        at = next(i for i, o in enumerate(o for o in self._kind[look] if self._known[o].fit) if o is look)
        return self._spreads[what].against(look.kind, at)

    def _equal_inputs(self, look: Look) -> Hidden | None:
        """Rows whose inputs are equal to the bit, and whose results are further apart than two roundings of one number
        can be: no other layer is needed to know that."""
        equal = look.before == 0
        rows = int(equal.sum())
        if rows < c.FEW or not look.inputs_known:
            return None
        made = float(np.sqrt(np.median(look.err[equal] ** 2)))
        strength = made / (c.CREATED_LEAST * look.unit)
        if strength <= 1:
            return None
        # Hoeffding's inequality, for squares of differences within one step, of 2 u.
        beyond = (made / look.unit) ** 2 - c.TWO_ROUNDINGS**2
        chance = self.chance.anywhere(float(np.exp(-2.0 * rows * look.width * (beyond / c.STEP_SQUARE) ** 2)))
        return Hidden(equal & (look.err > 0), GROWTH, made, strength, BEYOND_CHANCE, chance)

    def _growth(self, look: Look) -> Hidden | None:
        """Over all rows, more growth than in the other layers: of error, and of what was made of it here. Neither alone
        will do: where much comes in, growth follows the square of what is made, so that honest layers have a long
        tail; where little is made, what is left after subtracting is noise."""
        here = self._known[look]
        if here.growth <= 0 or here.made <= c.CREATED_LEAST * look.unit:
            return None
        found = [self._against(what, look) for what in ("growth", "made")]
        strength, chance = here.made / (c.CREATED_LEAST * look.unit), 0.0
        for against in found:
            if against is None:
                return None
            strength = min(strength, against.t / (self.chance.student(against.freedom) * doubt_of(against.kin)))
            chance = max(chance, self.chance.of_student(max(against.t, 0.0), against.freedom))
        strength /= c.MIXING if look.mixing else 1.0
        return Hidden(look.err > 0, GROWTH, here.made, strength, UNLIKE_KIN, chance) if strength > 1 else None

    def _gain(self, look: Look) -> Hidden | None:
        """All rows larger or smaller by one factor. What all layers share is the machine's, as far as an honest habit
        goes: a factor that is wrong in every layer is a fault."""
        here = self._known[look]
        mean, error = here.gain, here.gain_error
        if abs(mean) <= c.GAIN_LEAST * look.unit:
            return None
        before = float(np.median(np.abs(look.gain_before)))
        shared = max((abs(o.gain) for o in self._facts(self._others(look))), default=0.0)
        habit = c.GAIN_LEAST + c.TRUNCATIONS * c.TRUNCATED
        need = max(
            c.GAIN_LEAST * look.unit,
            self.chance.sigmas() * error,
            c.THROUGH * before,
            min(shared + c.GAIN_LEAST * look.unit, habit * look.unit),
        )
        strength = abs(mean) / need
        chance = self.chance.of_sigmas(abs(mean) / error) if error else 0.0
        return Hidden(look.err > 0, GAIN, abs(mean), strength, BEYOND_CHANCE, chance) if strength > 1 else None

    def _odd_gain(self, look: Look) -> Hidden | None:
        """All rows larger or smaller by another factor than in the other layers: a kernel that truncates makes all
        layers' results smaller alike, and hides a factor that only one of them has. One truncation a layer may be
        spared: a softmax so sharp that its probabilities are 0 and 1 has nothing to truncate. What is more than all
        truncations and a shared factor's rounding come to needs no spread of the layers: no habit explains it."""
        others = self._others(look)
        against = self._against("gain", look)
        if against is None:
            return None
        here, known = self._known[look], self._facts(others)
        off = min((here.gain - o.gain for o in known), key=abs)
        if abs(off) <= c.TRUNCATED * look.unit:
            return None
        passed = max(passed_on(look.passed, o.passed) for o in others)
        noise = max(o.before for o in (here, *known)) ** 2  # the second order of the inputs' errors
        error = max(float(np.hypot(here.gain_error, o.gain_error)) for o in known)
        sure, brought = self.chance.sigmas() * error, c.THROUGH * max(passed, noise)
        apart = self.chance.student(against.freedom) * doubt_of(against.kin) * against.scale * look.unit
        need, tier = max(c.TRUNCATED * look.unit, sure, apart, brought), UNLIKE_KIN
        chance = self.chance.of_student(against.t, against.freedom)
        bound = (c.TRUNCATIONS * c.TRUNCATED + c.GAIN_LEAST) * look.unit + brought
        if bound + sure < need:
            need, tier = bound + sure, BEYOND_CHANCE
            chance = self.chance.of_sigmas(max(abs(off) - bound, 0.0) / error) if error else 0.0
        strength = abs(off) / need
        return Hidden(look.err > 0, GAIN, abs(off), strength, tier, chance) if strength > 1 else None

    # --- some rows ---------------------------------------------------------------------------------------------

    def _rows(self, look: Look) -> Hidden | None:
        """Rows with more growth than the other rows, and than the same rows in other layers."""
        rows = len(look.keys)
        middle, bulk = deviation(look.growth)
        off = look.growth - middle
        sigmas = c.TAILS * self.chance.sigmas(rows)
        if off.max() <= sigmas * c.LEAST_SPREAD:
            return None
        others = self._others(look)
        scale = max(_spread(bulk, [o.growth_tail for o in self._facts(others)]), c.LEAST_ROW_SPREAD)
        outlier = off / (sigmas * scale)
        if not (outlier > 1).any():
            return None
        usual = np.full(rows, middle if others else max(middle, 0.0))
        for o in others:  # one at a time: all layers' rows at once would be many times this one's
            np.maximum(usual, spread(look.keys, o.keys, o.growth), out=usual)
        most = 2.0 ** np.maximum(usual, 0.0) * look.before
        made = np.sqrt(np.maximum(look.err**2 - most**2, 0.0))
        apart = c.ROW_APART if others else 2.0 * c.ROW_APART
        strength = np.minimum.reduce([
            outlier, (look.growth - usual) / apart, made / (c.ROWS_LEAST * look.unit),
        ])  # fmt: skip
        strength = strength / (c.MIXING if look.mixing else 1.0)
        bad = (strength > 1) & (look.err > 0)
        if not bad.any():
            return None
        chance = self.chance.of_sigmas(float(off[bad].max()) / scale / c.TAILS, rows)
        return Hidden(bad, GROWTH, float(made[bad].max()), float(strength.max()), UNLIKE_KIN, chance)

    def _row_gain(self, look: Look) -> Hidden | None:
        """Rows that are larger or smaller than the others are."""
        rows = len(look.keys)
        middle, bulk = deviation(look.gain)
        off = np.abs(look.gain - middle)
        least = c.GAIN_ROW * look.unit
        if off.max() <= least:
            return None
        others = self._others(look)
        scale = _spread(bulk, [o.gain_tail for o in self._facts(others)])
        # What noise does to a slope shrinks with the width; each row may be noisier than the typical one.
        noise = np.maximum(scale, look.err / max(look.width, 1) ** 0.5)
        sigmas = c.TAILS * self.chance.sigmas(rows)
        need = np.maximum.reduce([np.full(rows, least), sigmas * noise, c.THROUGH * np.abs(look.gain_before)])
        if not (off / need > 1).any():
            return None
        same = [np.abs(spread(look.keys, o.keys, o.gain)) for o in others]
        if same:
            need = np.maximum(need, np.minimum(c.ROW_KIN * np.median(same, axis=0), c.ROW_KIN * off))
        strength = np.where(look.err > 0, off / need, 0.0)  # a row that is equal has no error, whatever the others have
        bad = strength > 1
        if not bad.any():
            return None
        chance = self.chance.of_sigmas(float((off / np.maximum(noise, TINY))[bad].max()) / c.TAILS, rows)
        return Hidden(bad, GAIN, float(off[bad].max()), float(strength.max()), UNLIKE_KIN, chance)


def _spread(bulk: float, tails: Sequence[float]) -> float:
    """A robust standard deviation: of the bulk, or, in other layers, of the outer tenth (chance.tail), whichever is
    larger. Here the outer tenth may be what is looked for."""
    return max(bulk, float(np.median(tails)) if tails else 0.0)
