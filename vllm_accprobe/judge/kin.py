"""Whether one layer's factor is unlike its kin's: how far the same operator's mean gains may honestly lie apart.

The problem: rounding has no direction and its gain is 0, but a kernel that truncates makes every result smaller, by
standards.TRUNCATED = 0.72 roundings on average, and twice that where it truncates its probabilities, too. A scale of
1.03 in one of them is then a gain of +1.3 roundings among neighbours of -1.4, and none of these numbers is large. The
idea: what is the same in all layers is the machine's. Layers are apart honestly by what their inputs' gains differ by,
times what an operator may pass on; by the means' own standard errors; by the second order of the inputs' noise; by the
spread that the other layers show; and by one truncation, of which a layer may be spared: a softmax so sharp that its
probabilities are 0 and 1 has nothing to truncate. The last does not follow from a sample, so that a small one, whose
layers agree by chance, accuses nobody.
Not here: asking (hidden.py), one layer's numbers (looks.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

FEWEST = 2
"""Layers to hold one against: fewer have nothing in common."""


def passed_on(here: Mapping[str, float], there: Mapping[str, float]) -> float:
    """The most that an input's mean gain differs by between two layers; what only one has is 0 in the other."""
    return max((abs(here.get(k, 0.0) - there.get(k, 0.0)) for k in {*here, *there}), default=0.0)


def spread(values: Sequence[float]) -> float:
    """The standard deviation of a further value about the mean of ``values``, two or more of the same distribution:
    their own, and the mean's."""
    return float(np.std(values, ddof=1)) * math.sqrt(1.0 + 1.0 / len(values))
