"""Which floor an origin breaks, by how much, and how likely that is by chance, in plain words.

The problem: "13 times the limit" convicts or merely puzzles, depending on where the limit comes from. The idea: each of
the tiers (judge/statistic.py) has one sentence, made here from an origin's fields and from nothing else, for all
reports alike; what an origin does not say is left out. Not here: the floors (judge/, opcheck/), the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_accprobe.judge.statistic import BEHIND_A_ROUTER, BEYOND_CHANCE, PROVED, UNLIKE_KIN
from vllm_accprobe.report.text import factor, ratio, safe, times

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

_RAREST = 1e-12
"""chosen: below, a probability is a figure of speech; the sentence says that it is smaller."""


def sentence(origin: Mapping[str, Any]) -> str | None:
    """``proved: 3.1 times the error bound of its own inputs``; None where an origin does not say its tier."""
    tier, by = origin.get("tier"), f"{n} times" if (n := _number(origin.get("times"))) else ""
    seldom = odds(origin.get("chance"))
    if tier == PROVED and not origin.get("floor"):
        return f"{PROVED}: its values must be equal, and are not"
    if tier == PROVED:
        return f"{PROVED}: {by or 'beyond'} the error bound of its own inputs"
    if tier == BEYOND_CHANCE:
        said = f"{BEYOND_CHANCE}: {by or 'above'} its floor"
        return said + (f"; honest machines show such a thing in {seldom} comparisons" if seldom else "")
    if tier == UNLIKE_KIN:
        elsewhere = "in its other calls" if origin.get("evidence") == "replay" else "in other layers"
        said = f"{UNLIKE_KIN}: {by or 'more than'} what the same operator does {elsewhere}"
        return said + (f" ({seldom})" if seldom else "")
    if tier == BEHIND_A_ROUTER:
        return f"{tier}: {by or 'above'} its floor, as rows are that a near tie sends to other experts"
    return safe(tier, 60) if tier else None


def whole(origin: Mapping[str, Any]) -> str:
    """The tier's sentence and the layers, for a table; empty where neither is known."""
    return ", ".join(x for x in (sentence(origin), layers(origin)) if x)


def short(origin: Mapping[str, Any]) -> str | None:
    """The tier and by how much, for a line that says other things, too: ``beyond chance, 5.2x``."""
    tier = origin.get("tier")
    if not tier:
        return None
    by = _number(origin.get("times"))
    return safe(tier, 60) + (f", {by}x" if by else "")


def layers(origin: Mapping[str, Any]) -> str | None:
    """``in all 4 layers`` or ``in 3 of 4 layers``, of a fault that is in more than one; else None."""
    found = origin.get("layers")
    if not isinstance(found, Mapping):
        return None
    many, of = found.get("in"), found.get("of")
    if not isinstance(many, int) or not isinstance(of, int) or many < 2:
        return None
    return f"in all {of:,} layers" if many >= of else f"in {many:,} of {of:,} layers"


def odds(chance: object) -> str | None:
    """A probability as ``1 of 2,000``, two digits of it; ``30 of 100`` where it is large, None where not known."""
    if isinstance(chance, bool) or not isinstance(chance, (int, float)) or math.isnan(chance):
        return None
    if chance < _RAREST:
        return f"fewer than 1 of {round(1 / _RAREST):,}"
    if chance > 0.1:
        return f"{min(round(100 * chance), 100)} of 100"
    turns = 1 / chance
    digits = max(len(str(int(turns))) - 2, 0)
    return f"1 of {round(turns, -digits):,.0f}"


def alarms(comparison: Comparison) -> str | None:
    """How seldom the limits name an origin where there is none; None where the judge did not work it out. What an
    origin that was named says of its own chance is about its size, and mostly far less."""
    expected = comparison.by_chance
    if expected is None:
        return None
    return f"the limits name an origin, of whatever size, in {odds(expected)} comparisons of honest machines"


def origin_factor(origin: Mapping[str, Any]) -> float | None:
    """How many times its own limit an origin's worst row reaches, the one factor that is said of it; infinite for NaN
    and for what must be equal, None where nobody measured it."""
    created, known = origin.get("created"), origin.get("times")
    if isinstance(created, float) and not math.isfinite(created):
        return math.inf
    if isinstance(known, (int, float)) and not isinstance(known, bool) and math.isfinite(known):
        return float(known)
    return ratio(created, origin.get("floor"))


def origin_size(origin: Mapping[str, Any]) -> float | None:
    """The error of an origin's worst row, in the unit of its limit: so many times that is its factor. None where nobody
    measured it."""
    created, limit, found = origin.get("created"), origin.get("floor"), origin_factor(origin)
    if limit and found is not None and math.isfinite(found):
        return float(limit * found)
    return None if created is None else float(created)


def origin_times(origin: Mapping[str, Any]) -> str:
    """``13x``; empty where that is no number."""
    found = origin_factor(origin)
    return "" if found is None else times(found, 1.0)


def _number(found: object) -> str | None:
    """``3.14``, ``130``, ``5e+07``, as everywhere; None for what is no finite number."""
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        return None
    return factor(found)
