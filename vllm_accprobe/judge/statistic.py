"""One test for all numbers: is this row, gain, column or element further off than rounding allows?

The problem: "five standard deviations" is much for one number and little for a million, and a comparison of 60 layers
asks more often than one of four; the probability that anything is blamed by chance should not depend on that. The idea:
one false-alarm rate for a WHOLE comparison or replay, divided evenly over everything that is tested, and among the rows
or columns of which the worst is taken [Bonferroni: the probability of a union is at most the sum of the probabilities;
no independence is needed]. A limit is the quantile at what is left: the normal distribution's for a weighted sum of
errors of mean zero (uniform roundings are strictly sub-Gaussian, so that their tails are below the normal ones [S.
Arbel, O. Marchal, H. Nguyen, ESAIM P&S 24 (2020) 39]); the chi-square's for a sum of squares, by Wilson's and
Hilferty's cube root [PNAS 17 (1931) 684], which lies above the exact quantile where degrees of freedom are few and the
tail is far. Sums of squares of unequal variances v have (sum v)**2 / sum v**2 degrees of freedom [F. Satterthwaite,
Biometrics 2 (1946) 110]. Where the spread is known from sibling layers alone: Student's t (siblings.py).

What a limit is worth, the strongest first:

- PROVED: a running error bound from the operator's own inputs. No order of summation and no luck of rounding breaks it,
  only a wrong kernel or one that computes in a lower precision [N. Higham, Accuracy and Stability of Numerical
  Algorithms, 2nd ed., sections 3.1 and 3.3].
- BEYOND_CHANCE: a bound that holds with a stated probability, because roundings behave as independent errors of mean
  zero [N. Higham and T. Mary, SIAM J. Sci. Comput. 41 (2019) A2815; I. Ipsen and H. Zhou, arXiv 1906.10465].
- SIBLING_OUTLIER: this operator elsewhere: in the sibling layers, in other calls, in a calibration.
- BEHIND_A_ROUTER: none. A router that was not captured may have sent the rows to other experts at a near tie, behind
  which two runs differ by far more than any limit (near_ties.py).

By Python's own functions, and alone, because this file is copied with the tests that gentest writes. Not here: what is
summed (siblings.py; opcheck/floors/), the other numbers of the judge (constants.py).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

PROVED, BEYOND_CHANCE, SIBLING_OUTLIER = "proved", "beyond chance", "outlier among sibling layers"
BEHIND_A_ROUTER = "behind an unseen router"
TIERS = (PROVED, BEYOND_CHANCE, SIBLING_OUTLIER, BEHIND_A_ROUTER)

RATE = 1e-3
"""chosen: one comparison, or replay, in a thousand has an origin by chance (``--false-alarm-rate``)."""
QUESTIONS = 5
"""derived: the numbers that siblings.py tests of one place (equal inputs, gain, and of columns error, slope and
offset), over which the rate is divided."""
OUTPUTS = 1 << 17
"""chosen: outputs that are supposed to be checked where it is not known how many there are (a single call)."""
_NORMAL = NormalDist()
"""derived: mean 0, standard deviation 1."""


def each(rate: float, outputs: int) -> float:
    """The probability that is left to one of so many outputs."""
    return rate / max(outputs, 1)


CHANCE = each(RATE, OUTPUTS)
"""derived: what is left to one of so many outputs."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A replay's rate in three equal parts: for outputs of single calls, for all calls of a tap together, and for taps
    that are outliers among sibling layers. outputs: of calls; taps: outputs of taps."""

    rate: float = RATE
    outputs: int = OUTPUTS
    taps: int = 1 << 12

    @property
    def output(self) -> float:
        return each(self.rate / 3.0, self.outputs)

    @property
    def tap(self) -> float:
        return each(self.rate / 3.0, self.taps)

    @property
    def siblings(self) -> float:
        return self.rate / 3.0


BUDGET = Budget()


@dataclass(frozen=True, slots=True)
class Chance:
    """rate: probability that a comparison of correct runs has an origin by chance; places: of how many it is tested."""

    rate: float = RATE
    places: int = 1

    @property
    def tests(self) -> int:
        return max(self.places, 1) * QUESTIONS

    def level(self, among: int = 1) -> float:
        """The probability that may be left to one of ``among`` numbers of which the worst is taken at one place."""
        return self.rate / (self.tests * max(among, 1))

    def sigmas(self, among: int = 1) -> float:
        """Standard deviations, to either side, that one number of a normal distribution exceeds with that."""
        return normal(self.rate, self.tests * max(among, 1))

    def of_sigmas(self, sigmas: float, among: int = 1) -> float:
        """The probability that a comparison of correct runs shows ``sigmas`` anywhere, at most 1."""
        return tail(abs(sigmas), self.tests * max(among, 1))

    def anywhere(self, p: float, among: int = 1) -> float:
        """The probability that what one number shows with ``p`` is shown anywhere, at most 1."""
        return min(1.0, p * self.tests * max(among, 1))


@functools.lru_cache(maxsize=1 << 14)
def normal(chance: float, looks: int = 1, sides: int = 2) -> float:
    """Standard deviations that one of ``looks`` normal numbers exceeds with probability ``chance`` at most."""
    return -_NORMAL.inv_cdf(max(chance / (sides * max(looks, 1)), 1e-300))


def chi_square(freedom: Any, deviations: float) -> Any:
    """Sum of squares over its expectation at the normal quantile ``deviations``; freedom: degrees, a float64 array or
    tensor, or a number above 0. Wilson and Hilferty: (1 - 2/9f + z sqrt(2/9f))**3."""
    a = (2.0 / 9.0) / freedom
    return (1.0 - a + deviations * a**0.5) ** 3


def deviations_of(ratio: float, freedom: float) -> float:
    """The inverse of `chi_square`: the normal quantile at which a sum of squares over its expectation is ``ratio``."""
    a = (2.0 / 9.0) / freedom
    return float((ratio ** (1.0 / 3.0) - 1.0 + a) / a**0.5)


def tail(deviations: float, looks: int = 1, sides: int = 2) -> float:
    """The probability that one of ``looks`` normal numbers is so far out, at most 1. By erfc: a distribution function
    near 0 that is made from 1 is exactly 0 beyond 8.3 deviations, and 0 means proved."""
    return min(1.0, sides * looks * 0.5 * math.erfc(max(deviations, 0.0) / math.sqrt(2.0)))
