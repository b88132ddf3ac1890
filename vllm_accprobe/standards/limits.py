"""Limits by rows: how many units of rounding are allowed, and in which measures.

The problem: one number cannot serve the first layer and the last, a wrong scale and a single wrong element. The idea:
a `Standard` holds a few plain numbers; `Limits` follow from it, the unit (floor.py) and the depth. Three measures of a
row are held against one limit each, so that none hides the others' finds: the relative L2 error, the norm ratio (noise
hardly moves it, a wrong scale does) and the largest element (one wrong element in a wide row hardly moves the norm).
Not here: the numbers and where they come from (constants.py), which standards have such limits (ours.py), the verdict
on a pair (judge/verdict.py) and on an origin (judge/origins.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from vllm_accprobe.standards import constants as c

_SCATTER = math.sqrt(3.0 * (c.TRUNCATED - c.TRUNCATED**2))
"""Of a row's norm ratio after one truncation, in units, times sqrt(width): the variance of one element's loss (steps
uniform in [0, 2) units: 4/3 of the mean of 1 / m**2, which is 3 / (8 ln 2)), times 3, as squares of normal values weigh
the elements."""

_EXPERTS = re.compile(r"moe|expert", re.I)


@dataclass(frozen=True, slots=True)
class Limits:
    """row: of a row's relative L2 error; ratio: of |norm ratio - 1|; element: of |d| / max(|g|, rms of the row)."""

    row: float
    ratio: float
    element: float

    @property
    def exact(self) -> bool:
        return self.row == 0.0

    def at_least(self, row: float) -> Limits:
        """These limits, all raised alike where ``row`` is above the row's."""
        if self.exact or row <= self.row:
            return self
        more = row / self.row
        return Limits(row, self.ratio * more, self.element * more)


EXACT = Limits(0.0, 0.0, 0.0)


def narrowest(tap: str, cls: str, width: int) -> float:
    """How narrow a row of ``width`` elements may have been inside the module that gave it out: less than it is now in
    experts, which compute their intermediate inside one kernel, where nobody sees it."""
    holds = _EXPERTS.search(cls or tap.rpartition(".")[2])
    return width / c.EXPERTS_NARROWER if holds else float(width)


@dataclass(frozen=True, slots=True)
class Standard:
    """The numbers that limits are made of.

    created: units that one operator may add to a row. total: units that may have piled up before the first layer;
    growth: exponent of (1 + depth) by which that grows; depth counts layers.
    amplification: how much of its inputs' relative error an operator may pass on; wild: the same for inputs that are
    beyond the limit themselves, because what a fault leaves behind is no random noise; garbage: inputs further off than
    this explain any output.
    ratio_share, ratio_width: the norm ratio's limit is the row's times min(1, mean + noise), where mean is the larger
    of ratio_share and of what truncations take off a norm, and noise is ratio_width / sqrt(width) and the truncations'
    own, in quadrature. The two are added: a machine that rounds toward zero has roundings of mean zero as well, and so
    has the one that it is compared with.
    truncations: how often a result may have been rounded toward zero on its way through one operator. 2 is measured:
    vLLM's AVX2 attention truncates its probabilities and what it gives out, its experts their activation and that.
    element: the element's limit is the row's times this.
    row_floor: rows whose norm is below this part of the tap's median norm are measured against that part; narrow rows,
    where sums cancel more often, against 1 / sqrt(width) more of it.
    """

    name: str = "accprobe"
    created: float = c.CREATED
    total: float = c.TOTAL
    growth: float = c.GROWTH
    amplification: float = c.AMPLIFICATION
    wild: float = c.WILD
    garbage: float = c.GARBAGE
    ratio_share: float = c.RATIO_SHARE
    ratio_width: float = c.RATIO_WIDTH
    truncations: int = c.TRUNCATIONS
    element: float = c.ELEMENT
    row_floor: float = c.ROW_FLOOR

    def created_limits(self, unit: float, width: float) -> Limits:
        """What one operator may add to a row of ``width`` elements."""
        return self._limits(self.created * unit, width)

    def total_limits(self, unit: float, width: float, depth: int) -> Limits:
        """What may have piled up after ``depth`` layers."""
        return self._limits(self.total * unit * (1.0 + max(depth, 0)) ** self.growth, width)

    def gap_limits(self, unit: float, width: float, layers: int) -> Limits:
        """What operators that nobody saw, of ``layers`` layers, may add: as much as may pile up in these."""
        one = self.created_limits(unit, width)
        return one.at_least(self.total_limits(unit, width, layers).row) if layers else one

    def _limits(self, row: float, width: float) -> Limits:
        return Limits(row, row * self.ratio_factor(width), row * self.element)

    def floor_share(self, width: int) -> float:
        return min(1.0, self.row_floor + 1.0 / math.sqrt(max(width, 1)))

    def ratio_factor(self, width: float) -> float:
        """width: the narrowest that a row is on its way through the operator, see `narrowest`."""
        toward_zero = c.ROW_DEVIATIONS * _SCATTER * math.sqrt(self.truncations) / self.created
        mean = max(self.ratio_share, self.truncations * c.TRUNCATED / self.created)
        noise = math.hypot(self.ratio_width, toward_zero) / math.sqrt(max(width, 1.0))
        return min(1.0, mean + noise)

    def to_dict(self, unit: float, layers: int) -> dict[str, Any]:
        """For compare.json: the numbers, and the limits they come to in this comparison."""
        last = self.total_limits(unit, 1 << 20, layers)
        return asdict(self) | {
            "unit": unit,
            "limit_created": self.created * unit,
            "limit_first_layer": self.total_limits(unit, 1 << 20, 1).row,
            "limit_last_layer": last.row,
        }
