"""One rate of false alarms for a whole comparison, and what it asks of a single number.

The problem: a threshold of seven deviations is right for a thousand questions and wrong for a million; a comparison of
60 layers asks more than one of four, and the odds that somebody is blamed by chance should not depend on that. The
idea: the rate is that of a false alarm in the WHOLE comparison. It is divided by the places looked at, by the questions
asked of each, and by the rows or columns among which the worst is taken [C. Bonferroni 1936; no independence is
needed], and a threshold is the quantile at what is left: of a normal distribution where the spread is known from many
rows, of Student's where it is known from few layers.
Not here: the spread among layers (kin.py), the questions (outliers.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy

from vllm_accprobe.judge import constants as c


@dataclass(frozen=True)
class Chance:
    """rate: probability that a comparison of honest machines has an origin by chance; places: of how many it asks."""

    rate: float = c.FALSE_ALARM_RATE
    places: int = 1

    def level(self, among: int = 1) -> float:
        """The probability that may be left to one of ``among`` numbers of which the worst is taken at one place."""
        return self.rate / (max(self.places, 1) * c.QUESTIONS * max(among, 1))

    def sigmas(self, among: int = 1) -> float:
        """Standard deviations, to either side, that one number of a normal distribution exceeds with that."""
        return _normal(self.level(among))

    def student(self, freedom: float, among: int = 1) -> float:
        """The same where the standard deviation is known with ``freedom`` degrees of freedom, 1 or more."""
        return _student(self.level(among), freedom)

    def of_sigmas(self, sigmas: float, among: int = 1) -> float:
        """The probability that a comparison of honest machines shows ``sigmas`` anywhere, at most 1."""
        return self.anywhere(2.0 * float(scipy.special.ndtr(-abs(sigmas))), among)

    def of_student(self, t: float, freedom: float, among: int = 1) -> float:
        """The same of a Student's t."""
        return self.anywhere(2.0 * float(scipy.special.stdtr(freedom, -abs(t))), among)

    def anywhere(self, p: float, among: int = 1) -> float:
        """The probability that what one number shows with ``p`` is shown anywhere, at most 1."""
        return min(1.0, p * max(self.places, 1) * c.QUESTIONS * max(among, 1))


@lru_cache(4096)
def _normal(level: float) -> float:
    return float(-scipy.special.ndtri(0.5 * level))


@lru_cache(4096)
def _student(level: float, freedom: float) -> float:
    return float(-scipy.special.stdtrit(freedom, 0.5 * level))


@dataclass(frozen=True, slots=True)
class Against:
    """How a value compares with its kin. off: from their mean; scale: what t is told in; freedom: of t; kin: how many
    they are."""

    off: float
    scale: float
    freedom: float
    kin: int = 2

    @property
    def t(self) -> float:
        return self.off / self.scale if self.scale else 0.0

    @property
    def above(self) -> float:
        """The probability that a Student's t is as far above."""
        return float(scipy.special.stdtr(self.freedom, -self.t))


def against_kin(
    off: float, kin: int, squares: float, known: float, known_freedom: float, own: float = 0.0
) -> Against:  # fmt: skip
    """A value that is ``off`` from the mean of so many kin, 2 or more, whose squares about that mean have this sum,
    where a variance is ``known`` as if from ``known_freedom`` degrees: s^2 = (d0 s0^2 + d s^2) / (d0 + d) with d = kin
    - 1 [G. Smyth, Stat. Appl. Genet. Mol. Biol. 3 (2004) 3, eq. 3.2], and the difference has the variance
    s^2 (1 + 1 / kin). own: a further variance of each, from the counting noise of what was measured."""
    freedom = known_freedom + (kin - 1)
    variance = (known_freedom * known + squares) / freedom
    return Against(off, math.sqrt((variance + own) * (1.0 + 1.0 / kin)), freedom, kin)


def deviation(values: np.ndarray) -> tuple[float, float]:
    """(median, robust standard deviation) of float64 [n], n >= 1: the median absolute deviation of a normal
    distribution's bulk."""
    middle = float(np.median(values))
    return middle, c.MAD * float(np.median(np.abs(values - middle)))


def tail(values: np.ndarray, middle: float) -> float:
    """How far the outer tenth lies, as the standard deviation of a normal distribution that reaches so far."""
    return float(np.quantile(np.abs(values - middle), c.OUTER)) / c.OUTER_DEVIATIONS


def chance_of_size(error: float, honest: np.ndarray, places: int) -> float | None:
    """The probability that an honest place of a comparison, of ``places``, errs by ``error``, where ``honest`` are the
    errors of the places at hand: their logarithms are normal as far as anybody knows. None of fewer than c.FEW."""
    known = np.log(honest[honest > 0])
    if len(known) < c.FEW or not error > 0:
        return None
    middle, spread = deviation(known)
    spread = max(spread, c.LEAST_SPREAD * math.log(2.0))
    if math.isinf(error):
        return 0.0
    return min(1.0, float(scipy.special.ndtr(-(math.log(error) - middle) / spread)) * max(places, 1))
