"""What each tap created at most, over what one operator may: for a chart of all taps, blamed or not.

The problem: behind a fault every tap is beyond its limit, and a chart of errors shows a step and then a plateau in
which a second fault drowns. The idea: of each row what stood in front of it is taken off, as independent errors add up
in squares; where that is more than an operator may create, by the judge's own rule (origin.py) instead, so that who is
blamed alone is above 1. Not here: blame (origin.py), drawing (report/).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vllm_accprobe.judge.origins.peer_evidence import Look
from vllm_accprobe.judge.origins.row_errors import OUTPUT, Trace
from vllm_accprobe.standards.limits import Standard


def most_created(looks: Iterable[tuple[tuple[str, Trace], Look]], rules: Standard) -> dict[str, float]:
    """What each tap's outputs create at most, by what was looked at of (tap, trace)."""
    told: dict[str, float] = {}
    for (tap, sink), look in looks:
        if sink.kind == OUTPUT and sink.tap == tap:
            told[tap] = max(told.get(tap, 0.0), created_over(look, sink.limit, rules))
    return told


def created_over(look: Look, limit: float, rules: Standard) -> float:
    """The most that a row of ``look`` got there, in units of ``limit``; 0 where nothing did. Rows of which either error
    is NaN or infinite tell nothing."""
    known = np.isfinite(look.err) & np.isfinite(look.before)
    if limit <= 0 or not known.any():
        return 0.0
    err, before = look.err[known], look.before[known]
    made = np.sqrt(np.maximum(err**2 - before**2, 0.0))
    share = np.where(before > limit, rules.wild, rules.amplification)
    made = np.where(made > limit, np.maximum(err - share * before, 0.0), made)
    return float(made.max()) / limit
