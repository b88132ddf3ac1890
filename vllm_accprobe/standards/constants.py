"""The numbers of our own standard, with where they come from, in judge/constants.py's three words.

u is one rounding of the tensor's dtype (judge/floor.py). Not here: the judge's other numbers (judge/constants.py),
other tools' limits, which stand in their files.
"""

from __future__ import annotations

import math

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
and the result. Measured, scripts/judge_constants.py created: the typical row of 3,677 honest places adds 0.6 u at the
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
a row's norm scatters by 3.2 to 4.6 u / sqrt(intermediate) between two honest kernels."""
ROW_DEVIATIONS = 5.0
"""derived: standard deviations that one row of a million reaches."""
ELEMENT = 8.0
"""derived: an element's limit over the row's: one of 2**40 elements of normal errors is 7.2 deviations off."""
ROW_FLOOR = 0.1
"""chosen: rows whose norm is below this part of the tap's median norm are measured against that part."""
STRICT_CREATED, STRICT_TOTAL, STRICT_AMPLIFICATION = 1.0, 2.0, 2.0
"""chosen: the standard ``strict``: one rounding, and a product of two inputs."""
