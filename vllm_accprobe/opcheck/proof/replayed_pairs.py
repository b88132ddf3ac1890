"""The pairs of a comparison that a replay has judged, measured against the replay's limit.

The problem: a comparison and a replay judge the same output by two limits, and a table that shows the one beside a
verdict that shows the other says two factors of one fault; in a chart, the phase that the replay named stands out of
the other. The idea: the failed pairs of an output that a replay blames are all measured against its limit; the one that
holds the blamed row has what was created there, and no other more. Where none failed, because a comparison's limits are
wider, the worst that is not identical does now: no table calls a culprit clean. Not here: the blame (decide.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_accprobe.comparison.result import FAIL, PASS, Pair


def with_replayed(pairs: list[Pair], origins: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """``pairs`` (the same list where nothing changes). origins: entries with the evidence ``replay``."""
    out = pairs
    for origin in origins:
        created, limit = origin.get("created"), origin.get("floor")
        if not created or not limit or not math.isfinite(created) or not math.isfinite(limit):
            continue
        place = origin["module"], origin["role"]
        row = origin.get("request"), origin.get("position")
        of = [i for i, p in enumerate(out) if (p.tap, p.role) == place and p.allowed and not p.identical]
        own = [i for i in of if out[i].status == FAIL] or sorted(
            (i for i in of if out[i].status == PASS), key=lambda i: _size(out[i])
        )[-1:]
        # The row that is blamed is mostly its pair's worst; where it is not, the worst pair stands for it.
        there = {i: (out[i].worst_request, out[i].worst_position) == row for i in own}
        named = max(own, key=lambda i: (there[i], _size(out[i])), default=None)
        out = list(out) if own and out is pairs else out
        for i in own:
            size = created if i == named else min(_size(out[i]), created)
            said = _said(out[i], size, limit)
            changed = {"status": FAIL, "measure": "created", "measured": size, "allowed": limit, "message": said}
            out[i] = replace(out[i], **changed)
    return out


def _size(pair: Pair) -> float:
    """The relative L2 error of its worst row, or what was created there, where a comparison has judged by that."""
    if pair.measure == "created" and pair.measured is not None:
        return pair.measured
    return pair.worst_row_rel_l2 or pair.rel_l2 or 0.0


def _said(pair: Pair, size: float, limit: float) -> str:
    """Its message, whose first clauses were about other limits."""
    rest = [x for x in pair.message.split("; ") if not x.startswith(_OTHERS)]
    return "; ".join([f"creates an error of {size:.3g} (limit {limit:.2g}, by replay)", *filter(None, rest)])


_OTHERS = ("creates an error of ", "row relative L2 ", "row norm is ", "an element is off by ")
"""How clauses on a comparison's own limits begin (judge/verdict.py, comparison/verdict/blame.py)."""
