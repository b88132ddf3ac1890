"""What the ways and roundings of decided.py are called, what kind of habit each is, and what it costs.

Prices are what a habit can do to one result, in roundings of its dtype (a whole step, 2**-8 for bfloat16): truncating,
rounding away or by chance: one; rounding once more on the way: half of one; a sum of n terms that is rounded after
every b: at most n / b halves of the terms' sizes [N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
section 4.2]; parts that are rounded: half of one each; a function: what was measured. Needs no torch.
"""

from __future__ import annotations

import re

from vllm_accprobe.judge.profile import ACCUMULATOR, ROUNDING, SPLIT, TWICE
from vllm_accprobe.kernels.float_formats import FORMATS
from vllm_accprobe.opcheck.habits.evidence import AWAY, NEAREST, ZERO

STOCHASTIC, ONCE = "stochastic", "once"
ROUNDED = {NEAREST: "to nearest", ZERO: "toward zero", AWAY: "away from zero", STOCHASTIC: "at random (stochastic)"}
PRICES = {NEAREST: 0.0, ZERO: 1.0, AWAY: 1.0, STOCHASTIC: 1.0}
_LOW = re.compile(r"low (\d+)( bias first)?")
_SPLIT = re.compile(r"split (\d+)")


def kind_of(way: str) -> str:
    """A habit's kind; ACCUMULATOR also for a product that is rounded once alone."""
    if _LOW.fullmatch(way):
        return ACCUMULATOR
    return SPLIT if _SPLIT.fullmatch(way) else ROUNDING if way == ONCE else TWICE


def words_of(way: str, dtype: str) -> str:
    """ "" for ONCE."""
    if m := _LOW.fullmatch(way):
        after = "every term" if m[1] == "1" else f"every {m[1]} terms"
        return f"adds up in {dtype}, rounded after {after}" + (", beginning with the bias" if m[2] else "")
    if m := _SPLIT.fullmatch(way):
        return f"splits its sums into {m[1]} parts, each rounded to {dtype}"
    if way == ONCE:
        return ""
    return f"rounds the {way.replace(' and ', ' and the ')} to {dtype} before the result"


def price_of(way: str, terms: int) -> float:
    if m := _LOW.fullmatch(way):
        return 0.5 * max(terms / int(m[1]), 1.0)
    if m := _SPLIT.fullmatch(way):
        return 0.5 * int(m[1])
    return 0.0 if way == ONCE else 0.5 * (1 + way.count(" and "))


def allowed_as(way: str) -> str:
    """Under which name `Evidence.would` has it."""
    m = _LOW.fullmatch(way)
    return f"low {m[1]}" if m else way


def rounds(direction: str) -> str:
    return f"rounds {ROUNDED[direction]}"


def plural(said: str) -> str:
    """What one module does, as what several do."""
    verb, _, rest = said.partition(" ")
    return f"{verb.removesuffix('s')} {rest}"


def flushed(dtype: str) -> str:
    return f"gives 0 for results below 2^{FORMATS[dtype][1]}, the smallest normal number"


def kept(dtype: str) -> str:
    return f"keeps results below 2^{FORMATS[dtype][1]}"
