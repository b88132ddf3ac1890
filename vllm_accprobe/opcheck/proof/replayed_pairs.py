"""The pairs of a comparison whose row a replay has judged, held to the replay's limit.

The problem: a comparison and a replay hold the same row to two limits, and a table that shows the one beside a verdict
that shows the other tells of one fault twice, with two factors. The idea: of each output that a replay blames, the pair
that holds the blamed row is given what was created there and the limit of that. Not here: the blame (decide.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_accprobe.comparison.result import FAIL, Pair


def with_replayed(pairs: list[Pair], origins: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """``pairs`` (the same list where nothing changes). origins: entries with the evidence ``replay``."""
    out = pairs
    for origin in origins:
        created, limit = origin.get("created"), origin.get("floor")
        if not created or not limit or not math.isfinite(created) or not math.isfinite(limit):
            continue
        place = origin["module"], origin["role"]
        row = origin.get("request"), origin.get("position")
        own = [i for i, p in enumerate(out) if (p.tap, p.role) == place and p.status == FAIL and p.allowed]
        # The row that is blamed is mostly its pair's worst; where it is not, the worst pair stands for it.
        at = max(own, key=lambda i: ((out[i].worst_request, out[i].worst_position) == row, _over(out[i])), default=None)
        if at is not None:
            out = list(out) if out is pairs else out
            out[at] = replace(out[at], measure="created", measured=created, allowed=limit)
    return out


def _over(pair: Pair) -> float:
    return (pair.measured or 0.0) / pair.allowed if pair.allowed else 0.0
