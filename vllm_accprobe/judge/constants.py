"""Every number of the judge, with where it comes from.

The problem: it cannot be determined which tuned number condemned an operator on another machine. The idea: each is
*derived* (a formula), *measured* (a script remakes it) or *chosen* (a reason) and stands here with that word; a test
fails for a number without a source or elsewhere. ``scripts/judge_constants.py`` remakes the measured ones from clean
pairs. u is one rounding of the tensor's dtype (rounding_unit.py). Most limits are quantiles at one false-alarm rate
(statistic.py). Not here: the limits of a row and other tools' (standards/), bounds of memory and of hostile input.
"""

from __future__ import annotations

import math

from vllm_accprobe.standards.limits import TRUNCATED as TRUNCATED, TRUNCATIONS as TRUNCATIONS

# --- one rate of false alarms ----------------------------------------------------------------------------------------

INDEPENDENT = 0.5
"""chosen: the part of the rows that count as independent. Tokens repeat, and equal rows make equal errors: standard
errors are sqrt(1 / 0.5) = 1.4 times those of independent rows."""
TAILS = 1.3
"""chosen: how much further than a normal distribution's quantile a column must lie. Measured,
scripts/judge_constants.py tails, the outermost row of 6,796 numbers of places of clean pairs lies at 1.09 times it in
the middle place, 1.7 at the 90th percentile and 4.8 at the 99th; for columns, what lies between is left to what columns
of the inputs and of sibling layers show."""

# --- robust statistics ------------------------------------------------------------------------------------------------

MAD = 1.482602218505602
"""derived: 1 / Phi^-1(3/4), a normal distribution's standard deviation over its median absolute deviation."""
FEW = 8
"""chosen: rows below which nothing is learned: a median absolute deviation of fewer is off by a third and more."""
NARROW = 16
"""chosen: elements of a row up to which it is one factor or a few (a gate, the weights of chosen experts): its error
has nothing to average over."""
FEWEST_STEPS = 2
"""derived: steps of either kind, before "in both alike" is reported."""
LEAST_SPREAD = 0.05
"""chosen: powers of two; errors of places that agree to 3 % agree by chance. Below that a spread is not believed."""

# --- what an operator creates, in u -----------------------------------------------------------------------------------

LEAST_CREATED = 0.5
"""derived: rounding to nearest leaves errors uniform in half a step: rms 0.58 of it, 0.3 to 0.6 u. Errors below are no
measure of anything, and are counted as this."""
TWO_ROUNDINGS = math.sqrt(2.0 / 3.0)
"""derived: u rms; the difference of two independent roundings, each uniform within 1 u."""
STEP_SQUARE = 4.0
"""derived: u^2; two roundings of nearly the same number differ by one step, 2 u, at most."""
CREATED_LEAST = 1.25
"""derived: u rms; what two operators make of equal numbers that round twice, independently: sqrt(2) TWO_ROUNDINGS =
1.15, and a little for what lies beside the grid. So much must have been created before an operator is blamed."""
GAIN_LEAST = 0.5
"""derived: the gain that rounding one shared factor to nearest leaves: half a step of 2 u at most, 0 on average, and
0.5 u rms over significands of equal logarithm."""
THROUGH = 3.0
"""chosen: how much of its inputs' gain an operator may pass on: a product of two inputs passes on both, an activation
between them some more."""

# --- columns ---------------------------------------------------------------------------------------------------------

COLUMN = 5.0
"""chosen: times the typical column's error. In correct tensors columns differ by how large their values are."""
COLUMN_LEAST = 1.5
"""derived: u; a column whose one weight was rounded otherwise is off by 1 u, and its own rounding adds 0.58."""
COLUMN_SIBLINGS = 1.6
"""chosen: times the most uneven column of the same operator in other layers."""
COLUMN_INPUT = 2.5
"""chosen: times the most uneven column of the input: few bad columns of an input spread unevenly over the output."""
COLUMN_SURE = 1.5
"""chosen: times the surest slope of a column in other layers."""
COLUMN_APART = 3.0
"""chosen: times the slope that all columns share: a factor of all columns is no matter of one."""
BY_ELEMENT = 5.0
"""chosen: of a column's error, what an operator by element may add to what its input has there."""
OFFSET_LEAST = 2.5
"""derived: u; a column that hardly changes is rounded to the same side in each row, by 1 u at most, and so is its
input, which an operator passes on; 0.5 u for what rounds twice."""
OFFSET_SIBLINGS = 2.0
"""chosen: times the offset that other layers and inputs show, of which no more than OFFSET_MOST u count."""
OFFSET_MOST = 4.0
"""chosen: u; more is no habit but a fault that lies before."""
UNEVEN_MOST, SURE_MOST = 8.0, 12.0
"""chosen: what an input's or siblings' most uneven column may excuse: more is a fault that lies before."""
COLUMN_TYPICAL = 0.1
"""chosen: u; the typical column's error counts as no less."""
COLUMN_SMALL = 0.25
"""chosen: of the typical column's power; a smaller column is measured against that."""

# --- blame ------------------------------------------------------------------------------------------------------------

AFTER_ANOTHER = 3.0
"""chosen: how strong a hidden sign must be behind another origin: a fault's traces are no correct noise."""
COLUMNS_AFTER_ANOTHER = 2.0
"""chosen: the same for columns, which a fault upstream spreads over all of."""
REMOVED = 16.0
"""chosen: times the error behind its readers that an error must be, to count as removed by them: what passes on a part
of it, or hides it within its own rounding, does not."""
FLOOR_MARGIN = 3.0
"""chosen: how much further than two correct runs of one machine an correct run of another may be."""

# --- flipped tokens ---------------------------------------------------------------------------------------------------

LOGIT_ROUNDING = 2.0**-8
"""derived: half a unit in the last place of bfloat16, relative: logits are seldom known better."""
LOGITS_APART = 2.0
"""derived: two tokens change places when both logits are off, each in its own direction."""
TIE = 1e-6
"""chosen: logits this near to the best (relative) count as best: a lower precision makes exact ties, broken by any
order."""

# --- words: when a sentence is said of rows and columns ---------------------------------------------------------------

AGREE = 0.95
"""chosen: a condition is reported where it holds for so many bad rows, and so many within it are bad."""
AGREE_MOSTLY, MOST_ROWS, NEARLY_ALL = 0.85, 0.8, 0.9
"""chosen: "mostly" from there; "most rows" from there; what holds for more of all rows than this separates none."""
SIMPLER = 0.02
"""chosen: of conditions that agree as well, but for this, the simplest is reported."""
BAD_PART, BAD_PART_NARROW, HIGH_PART = 3.0, 20.0, 3.0
"""chosen: a row is bad with a third of what the typical of the worst rows has, a twentieth where few columns are bad;
the worst are those with a third of the largest or more."""
FACTOR_ALIKE, FACTOR_SHARE, FACTOR_LEAST, ZERO = 0.2, 0.85, 1e-3, 0.01
"""chosen: a scale is reported where rows agree within a fifth, it is 85 % of the error, and more than a thousandth; a
scale below a hundredth is "zero"."""
EXPERT_CHANCE, EXPERT_OTHER, EXPERT_RARE = 1e-6, 0.6, 1.3
"""chosen: one expert is reported where chance gives it all bad rows once in a million, and no other has 60 % as many
that are more than its share."""
EXPERT_SHARE, EXPERT_ONLY = 0.75, 0.97
"""chosen: of the bad rows, for "mostly" and for "only" that expert's."""
COLUMNS_MOST, COLUMNS_CLEAR = 0.6, 5.0
"""chosen: columns are reported where no more than this part is bad, and the others are five times better."""
COLUMN_ALIKE, COLUMN_SHARE = 0.25, 0.7
"""chosen: a scale of columns is reported where they agree within a quarter and it is 70 % of their error."""
HEAD_BAD, HEAD_GOOD = 0.7, 0.2
"""chosen: a head is bad with so many bad columns, and good with no more than so many."""
HALF_OF_STEPS = 0.5
"""chosen: a captured size is taken for wrong where at least half of its steps are; steps are wrong as a whole."""
GRAPH_KINDS = 5
"""derived: the kinds of steps that error_pattern.py tries, over which the chance is divided as Bonferroni's inequality
asks: replayed, not replayed, sizes, padding, a size with padding."""
GRAPH_CHANCE = 0.01
"""chosen: a kind of step is reported where wrong steps dealt out at random would all be of it less than once in a
hundred. It words an origin that was found beyond chance already, so that it is no matter of RATE."""
RANGE_FULL = 0.8
"""chosen: a range of columns is reported where so many of it are bad."""
FEW_LISTED, BOUNDS_TRIED, TAIL_PART, HEAD_LEAST = 4, 512, 64, 4
"""chosen: numbers that a sentence lists; bounds of positions that are tried; the last 1/64 of columns is the tail;
heads narrower than four columns are none."""
WEIGHTS_WHOLE = 0.5
"""chosen: a sync that writes at least this part of the parameters that loading wrote means to write all. One of an
adapter's or of one part's parameters is well below, one that forgets a few is well above."""
SAMPLER_ROUND = 2.0**-24
"""derived: unit of float32, in which engines process logits."""
SAMPLER_STEPS = 8.0
"""derived: a logit goes through at most eight roundings: a product with the reciprocal of the repetition penalty and
that itself, a bias, a product and a difference for frequency and for presence each, and its storage."""
SAMPLER_BORDER = 2.0**-14
"""chosen: how near to its limit a float32 sum of probabilities, or a probability, may fall on either side."""
SAMPLER_DRAW = 2.0**-18
"""chosen: how far apart the two best sums of logit and noise must be, in units of their size, for a float32 kernel to
order them as float64 does: 64 units."""
