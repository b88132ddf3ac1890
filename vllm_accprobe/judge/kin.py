"""Whether one layer's factor is unlike its kin's: how far the same operator's mean gains may honestly lie apart.

The problem: rounding has no direction and its gain is 0, but a kernel that truncates makes every result smaller: by
log2(e) / 2 = 0.72 roundings on average (a dropped tail is half a step of 2**(1-p) on average, and the mean of 1 / m
over significands m in [1, 2) with m's logarithm uniform is 1 / (2 ln 2)), and twice that where it truncates its
probabilities, too. A scale of 1.03 in one of them is then a gain of +1.3 roundings among neighbours of -1.4, and none
of these numbers is large. The idea: what is the same in all layers is the machine's. Layers are apart honestly by what
their inputs' gains differ by, times what an operator may pass on; by the means' own standard errors; by the second
order of the inputs' noise; and by a spread of which the other layers are a sample, and a small one.
Not here: asking (hidden.py), one layer's numbers (looks.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

FEWEST = 3
"""Layers to hold one against. Two have one difference: it may be small by chance."""
_NORMAL = 1.6449
"""One normal value in twenty lies further below its mean, in standard deviations."""


def passed_on(here: Mapping[str, float], there: Mapping[str, float]) -> float:
    """The most that an input's mean gain differs by between two layers; what only one has is 0 in the other."""
    return max((abs(here.get(k, 0.0) - there.get(k, 0.0)) for k in {*here, *there}), default=0.0)


def spread_at_most(values: Sequence[float]) -> float:
    """The standard deviation of one further value about those seen, so large that only one sample in twenty would have
    come out as close together: the upper end of the sample's confidence interval (chi-squared, n - 1 degrees of
    freedom), with the mean's own uncertainty. Infinite for fewer than `FEWEST`."""
    n = len(values)
    if n < FEWEST:
        return math.inf
    free = n - 1
    return float(np.std(values, ddof=1)) * math.sqrt(free / _chi_squared(free) * (1 + 1 / n))


def _chi_squared(free: int) -> float:
    """The 5 % quantile: exact for 2 degrees of freedom, from there on E. Wilson and M. Hilferty's cube (PNAS 17, 1931),
    which is 7 % too low at 3 and better above."""
    if free == 2:
        return -2.0 * math.log(0.95)
    part = 2.0 / (9.0 * free)
    return float(free * (1.0 - part - _NORMAL * math.sqrt(part)) ** 3)
