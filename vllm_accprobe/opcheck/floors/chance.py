"""How far chance alone takes a sum of independent roundings: quantiles, and one rate divided over many looks.

The problem: "five standard deviations" is much for one number and little for a million. The idea: one false-alarm rate
for a whole replay, divided evenly over everything that is looked at [Bonferroni: the probability of a union is at most
the sum of the probabilities], and for each look the quantile of what it looks at: the normal distribution's for a
weighted sum of errors of mean zero (uniform roundings are strictly sub-Gaussian, so that their tails are below the
normal ones [S. Arbel, O. Marchal, H. Nguyen, ESAIM P&S 24 (2020) 39]), the chi-square's for a sum of squares, by
Wilson's and Hilferty's cube root [PNAS 17 (1931) 684], which lies above the exact quantile where degrees of freedom
are few and the tail is far. Sums of squares of unequal variances v have (sum v)**2 / sum v**2 degrees of freedom
[F. Satterthwaite, Biometrics 2 (1946) 110].
By Python's own functions, because this file is copied beside the tests that gentest writes, where there is no scipy;
those of a comparison (judge/chance.py) are scipy's, whose last digits are others, and stand in its figures.
Not here: what is summed (verdict.py, pooled.py). Needs no torch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

RATE = 1e-3
"""Chosen: the probability that a replay of an honest machine blames anybody, 1 in 1,000, as in a comparison."""
OUTPUTS = 1 << 17
"""Chosen: outputs that are supposed to be looked at where it is not known how many there are (a single call)."""
_NORMAL = NormalDist()
_LEAST = 1e-300


def each(rate: float, outputs: int) -> float:
    """The probability that is left to one of so many outputs."""
    return rate / max(outputs, 1)


CHANCE = each(RATE, OUTPUTS)


@dataclass(frozen=True, slots=True)
class Budget:
    """A replay's rate in three equal parts: for outputs of single calls, for all calls of a tap together, and for taps
    that are unlike their kin. outputs: of calls; taps: outputs of taps."""

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
    def kin(self) -> float:
        return self.rate / 3.0


BUDGET = Budget()


@functools.lru_cache(maxsize=1 << 14)
def normal(chance: float, looks: int = 1, sides: int = 2) -> float:
    """Standard deviations that one of ``looks`` normal numbers exceeds with probability ``chance`` at most."""
    return -_NORMAL.inv_cdf(max(chance / (sides * max(looks, 1)), _LEAST))


def chi_square(freedom: Any, deviations: float) -> Any:
    """Sum of squares over its expectation at the normal quantile ``deviations``; freedom: degrees, a float64 tensor or
    a number above 0. Wilson and Hilferty: (1 - 2/9f + z sqrt(2/9f))**3."""
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
