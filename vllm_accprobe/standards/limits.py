"""Limits by rows: how many units of rounding are allowed, and in which measures, with where each number comes from.

The problem: one number cannot serve the first layer and the last, a wrong scale and a single wrong element. The idea: a
`Standard` holds a few plain numbers; `Limits` follow from it, the unit (judge/rounding_unit.py) and the depth. Three
measures of a row have a limit each: the relative L2 error, the norm ratio (a wrong scale moves it, noise hardly does)
and the largest element. Numbers are derived, measured or chosen, as in judge/constants.py; u is one rounding of the
tensor's dtype. Not here: which standards have such limits (ours.py), verdicts (judge/).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

# --- rounding toward zero ---------------------------------------------------------------------------------------------

TRUNCATED = 0.5 / math.log(2.0)
"""derived: what rounding toward zero takes off a value on average, in u: half a step of 2**(1-p), over significands m
in [1, 2) with log-uniform m, of which 1 / m has the mean 1 / (2 ln 2)."""
TRUNCATIONS = 2
"""measured: how often a result is truncated on its way through one operator: vLLM's AVX2 attention truncates its
probabilities and what it gives out (`accprobe compare DUMP --calibrate OUT --profile`)."""

# --- limits of a row (limits.py) --------------------------------------------------------------------------------------

CREATED = 4.0
"""chosen: u that one operator may add to a row: four roundings to the same side, of inputs, weights, an intermediate
and the result. Measured, scripts/judge_constants.py created: the typical row of 3,677 correct places adds 0.6 u at the
90th percentile, 2.1 at the 99th and 3.5 in the worst (weights that were trained, attention)."""
TOTAL = 8.0
"""chosen: u that may have piled up before the first layer. Clean TP=2 against TP=1 has 5.7, 4.1, 6.5 and 6.2 u after
layers 1 to 4, where 8 sqrt(1 + depth) allows 11 to 18."""
GROWTH = 0.5
"""derived: exponent of (1 + depth): independent errors add in quadrature."""
AMPLIFICATION = 4.0
"""chosen: how much of its inputs' relative error an operator may pass on; sums that cancel enlarge it."""
WILD = 16.0
"""chosen: the same for inputs that are beyond the limit themselves: what a fault leaves behind is no random noise."""
GARBAGE = 0.05
"""chosen: inputs further off than this explain any output: softmax and routers turn to other values altogether."""
RATIO_SHARE, RATIO_WIDTH = 0.25, 4.0
"""derived: of the row's limit, what its norm's ratio may be off by: noise of mean zero changes a norm by 1 /
sqrt(width) of itself, four standard deviations of which are allowed; chosen: a quarter, for noise that is not of
mean zero."""
EXPERTS_NARROWER = 4.0
"""chosen: an expert's intermediate is about a quarter as wide as what it gives out in DeepSeek-V3 and Qwen3-Next (2,048
of 7,168, 512 of 2,048), less narrow in others; its noise averages over so few. Measured, scripts/simulate_experts.py:
a row's norm scatters by 3.2 to 4.6 u / sqrt(intermediate) between two correct kernels."""
ROW_DEVIATIONS = 5.0
"""derived: standard deviations that one row of a million reaches."""
ELEMENT = 8.0
"""derived: an element's limit over the row's: one of 2**40 elements of normal errors is 7.2 deviations off."""
ROW_FLOOR = 0.1
"""chosen: rows whose norm is below this part of the tap's median norm are measured against that part."""
STRICT_CREATED, STRICT_TOTAL, STRICT_AMPLIFICATION = 1.0, 2.0, 2.0
"""chosen: the standard ``strict``: one rounding, and a product of two inputs."""


_SCATTER = math.sqrt(3.0 * (TRUNCATED - TRUNCATED**2))
"""derived: of a row's norm ratio after a truncation, in u, times sqrt(width): the variance of one element's loss (steps
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
    experts, which compute their intermediate inside one kernel, where it is not visible."""
    holds = _EXPERTS.search(cls or tap.rpartition(".")[2])
    return width / EXPERTS_NARROWER if holds else float(width)


@dataclass(frozen=True, slots=True)
class Standard:
    """The numbers that limits follow from: the constants above, by name.

    The norm ratio's limit is the row's times min(1, mean + noise), where mean is the larger of ratio_share and of what
    truncations take off a norm, and noise is ratio_width / sqrt(width) and the truncations' own, in quadrature. The two
    are added: a machine that rounds toward zero has roundings of mean zero as well. Narrow rows, where sums cancel more
    often, have 1 / sqrt(width) more of row_floor.
    """

    name: str = "accprobe"
    created: float = CREATED
    total: float = TOTAL
    growth: float = GROWTH
    amplification: float = AMPLIFICATION
    wild: float = WILD
    garbage: float = GARBAGE
    ratio_share: float = RATIO_SHARE
    ratio_width: float = RATIO_WIDTH
    truncations: int = TRUNCATIONS
    element: float = ELEMENT
    row_floor: float = ROW_FLOOR

    def created_limits(self, unit: float, width: float) -> Limits:
        """What one operator may add to a row of ``width`` elements."""
        return self._limits(self.created * unit, width)

    def total_limits(self, unit: float, width: float, depth: int) -> Limits:
        """What may have piled up after ``depth`` layers."""
        return self._limits(self.total * unit * (1.0 + max(depth, 0)) ** self.growth, width)

    def gap_limits(self, unit: float, width: float, layers: int) -> Limits:
        """What operators that were not captured, of ``layers`` layers, may add: as much as may pile up in these."""
        one = self.created_limits(unit, width)
        return one.at_least(self.total_limits(unit, width, layers).row) if layers else one

    def _limits(self, row: float, width: float) -> Limits:
        return Limits(row, row * self.ratio_factor(width), row * self.element)

    def floor_share(self, width: int) -> float:
        return min(1.0, self.row_floor + 1.0 / math.sqrt(max(width, 1)))

    def ratio_factor(self, width: float) -> float:
        """width: the narrowest that a row is on its way through the operator, see `narrowest`."""
        toward_zero = ROW_DEVIATIONS * _SCATTER * math.sqrt(self.truncations) / self.created
        mean = max(self.ratio_share, self.truncations * TRUNCATED / self.created)
        noise = math.hypot(self.ratio_width, toward_zero) / math.sqrt(max(width, 1.0))
        return min(1.0, mean + noise)

    def to_dict(self, unit: float, layers: int) -> dict[str, Any]:
        last = self.total_limits(unit, 1 << 20, layers)
        return asdict(self) | {
            "unit": unit,
            "limit_created": self.created * unit,
            "limit_first_layer": self.total_limits(unit, 1 << 20, 1).row,
            "limit_last_layer": last.row,
        }
