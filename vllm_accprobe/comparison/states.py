"""What the ledgers of states of two runs say: "the cache, not the kernel".

The problem: an operator that computes rightly with a wrong state looks as if it created an error, or creates none that
a comparison sees. The idea: what a run's own ledger has found of its caches (docs/states.md) needs no other run; it
goes into the result as plain values, and a finding of mine's decides the verdict whatever the tensors say. Not here:
how states are watched (capture/states/), the sentence of one finding (dump/journal/state_lines.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vllm_accprobe.dump.journal.state_lines import sentence

SIDES = ("golden", "mine")
MOST = 100
"""Findings of a side that the result keeps; the number of all is there."""
NOT_THE_KERNEL = "the cache, not the kernel"


def states_of(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """compare.json's ``states``: by side, empty where a run kept no ledger: {"watched": the ledger's totals by rank,
    "count": findings in all, "findings": [each one's fields, its rank and its sentence]}."""
    out: dict[str, dict[str, Any]] = {}
    for side, dump in zip(SIDES, dumps, strict=True):
        totals = getattr(dump, "state_totals", {})
        found = getattr(dump, "states", [])
        if not totals and not found:
            out[side] = {}
            continue
        listed = [{**asdict(one), "rank": rank, "sentence": sentence(one)} for rank, one in found[:MOST]]
        count = max(sum(one.findings for one in totals.values()), len(found))
        watched = {str(rank): asdict(one) for rank, one in totals.items()}
        out[side] = {"watched": watched, "count": count, "findings": listed}
    return out


def findings(states: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    """The findings of a side; none where ``states`` says nothing of it."""
    found = states.get(side) or {}
    return list(found.get("findings") or ())


def notes(states: Mapping[str, Any]) -> list[str]:
    """What is said before the verdict: a golden with a wrong cache is none."""
    found = findings(states, "golden")
    return [f"GOLDEN'S OWN CACHE WAS WRONG: {found[0]['sentence']}; take another golden"] if found else []
