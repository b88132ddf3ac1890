"""What was compared, what was not, and why: the coverage of compare.json.

The problem: a comparison that silently compares half of the rows looks like a pass. The idea: rows are counted once
each, not once per tensor: as sets of keys, text rows together and each vision space for itself; every skip is counted
under its reason, those of the captures too.
Not here: why a pair was skipped (activations.py), how many pairs there are (result.py: Counts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import RowSet, SideRows
from vllm_accprobe.comparison.plan.units import Plan
from vllm_accprobe.dump.schema import DEALT
from vllm_accprobe.judge.routing import Rerouted

TEXT = "text"
NEAR_TIE = "rows after a router's near tie"
UNRULED = "choices of experts left out: golden does not take its highest logits, which tell no margin then"
UNKNOWN = "choices of experts that differ without the router's logits in both dumps: no near tie is shown"
NOBODYS = "tensors of a captured graph's rows of padding, which are nobody's"
_NONE = np.zeros(0, np.int64)


def family(space: str) -> str:
    """Rows of tokens and of logits are the same rows; a vision space's are its own, whatever rank computed them."""
    return space.partition(DEALT)[0] if space.startswith("vision") else TEXT


def coverage(
    plan: Plan, dumps: Sequence[Any], compared: Mapping[str, Collection[RowSet]], skipped: Counter[str]
) -> dict[str, Any]:
    """compare.json's coverage, but for what judging adds (see `finished`).

    compared: family → the rows that some pair compared, each set once."""
    sides = [_rows(plan.tokens.golden), _rows(plan.tokens.mine)]
    both, golden, mine = 0, 0, 0
    # A vision space that only one side has is another way to cut the same images; its tensors are skipped by name.
    shared = (sides[0].keys() & sides[1].keys()) | {TEXT}
    for name in sorted(shared):
        g, m = (s.get(name, _NONE) for s in sides)
        both += len(np.unique(np.concatenate([_NONE, *(rows.keys for rows in compared.get(name, ()))])))
        golden += len(np.setdiff1d(g, m, assume_unique=True))
        mine += len(np.setdiff1d(m, g, assume_unique=True))
    reasons: Counter[str] = Counter({k: n for k, n in plan.tokens.skipped.items() if n})
    reasons.update(plan.skipped)
    reasons.update(skipped)
    for side, dump in zip(("golden", "mine"), dumps, strict=True):
        for skip in dump.skips:
            reasons[f"{side}: {skip.reason}"] += skip.count
        if dump.padding:
            reasons[f"{side}: {NOBODYS}"] += len(dump.padding)
    return {
        "rows_compared": both,
        "rows_only_golden": golden,
        "rows_only_mine": mine,
        "taps_only_golden": plan.names.only_golden,
        "taps_only_mine": plan.names.only_mine,
        "skipped": dict(reasons),
    }


def finished(measured: Mapping[str, Any], rerouted: Rerouted) -> dict[str, Any]:
    """``coverage`` with what judging adds: rows after a router's near tie, and choices without a margin."""
    counts = {NEAR_TIE: rerouted.rows, UNRULED: rerouted.unruled, UNKNOWN: rerouted.unknown}
    skipped = dict(measured["skipped"]) | {why: n for why, n in counts.items() if n}
    return dict(measured) | {"skipped": skipped}


def _rows(side: SideRows) -> dict[str, np.ndarray]:
    found: dict[str, list[np.ndarray]] = {}
    for (_, _, name), rows in side.rows.items():
        found.setdefault(family(name), []).append(rows.keys[rows.keep])
    return {name: np.unique(np.concatenate(keys)) for name, keys in found.items()}
