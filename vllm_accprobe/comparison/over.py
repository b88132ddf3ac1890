"""How many times its limit a pair reaches: the one factor that table, page, terminal and neighbours of an origin show.

The problem: a pair is judged by one of several measures, each with a limit of its own. The idea: whatever decided is
divided by what it was held against, and infinite is what no limit allows. Not here: the words (report/facts.py).
"""

from __future__ import annotations

import math

from vllm_accprobe.comparison.pair import FAIL, SKIP, Pair

_MEASURED = ("row_norm_ratio", "row_rel_l2", "element", "created")


def ratio(value: float | None, limit: float | None) -> float | None:
    """How many times ``limit`` fits into ``value``; infinite over a limit of 0, None where either is missing or NaN."""
    if value is None or limit is None or math.isnan(value) or math.isnan(limit):
        return None
    if limit <= 0:
        return math.inf if value > 0 else None
    return value / limit


def value_of(pair: Pair) -> float | None:
    """The number a pair is judged by: its worst row's relative L2 error or, without rows, the whole tensor's."""
    return pair.rel_l2 if pair.worst_row_rel_l2 is None else pair.worst_row_rel_l2


def over_limit(pair: Pair) -> float | None:
    """How many times its limit a pair reaches, in the measure that decided; infinite over a limit of 0, else None."""
    if pair.measure in _MEASURED:
        off = pair.measured
        if off is not None and pair.measure == "row_norm_ratio":
            off = abs(off - 1.0)
        return ratio(off, pair.allowed)
    return ratio(value_of(pair), pair.limit)


def severity(pair: Pair) -> float:
    """How bad a pair is: value over limit, 1 and more is beyond it. Non-finite mismatches are infinite, skips -1."""
    if pair.status == SKIP:
        return -1.0
    if pair.nonfinite_mismatch:
        return math.inf
    r = over_limit(pair)
    if r is not None:
        # A pair that failed on something else than its rows (replicas that differ) is still a failure.
        if pair.status == FAIL:
            return max(r, 1.0)
        # What must be equal and passes all the same (another token in a near tie) is not beyond its limit.
        return r if math.isfinite(r) else 1.0
    return math.inf if pair.status == FAIL else 0.0
