"""Whether a fault is in every layer: the commonest one of a new port.

The problem: a wrong scale, table or mask that all layers share is named as many times as there are layers, or once and
taken for one layer's. The idea: modules whose paths differ by a number alone are one operator in several layers; where
all that ran are named, each says so, and the first place stays the first.
Not here: who is named (origin.py; opcheck/).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_accprobe.judge.origins.peer_evidence import operator_of


def in_all_layers(named: Sequence[str], taps: Iterable[str]) -> dict[str, dict[str, int]]:
    """Module → {"in": layers that are named, "of": layers that ran}, for those of ``named`` that are named in every
    layer, of two or more. taps: of all modules that were compared, or replayed."""
    ran: dict[str, set[str]] = {}
    for tap in {*taps, *named}:
        ran.setdefault(operator_of(tap), set()).add(tap)
    found: dict[str, set[str]] = {}
    for tap in named:
        found.setdefault(operator_of(tap), set()).add(tap)
    every = {name: len(taps) for name, taps in found.items() if len(taps) == len(ran[name]) > 1}
    return {tap: {"in": n, "of": n} for tap in named if (n := every.get(operator_of(tap))) is not None}
