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


_STEPS = {
    "fp8": "2**-4 of each number", "fp8_e4m3": "2**-4 of each number", "fp8_inc": "2**-4 of each number",
    "fp8_per_token_head": "2**-4 of each number", "fp8_e5m2": "2**-3 of each number",
    "int8": "half a scale", "int8_per_token_head": "1/254 of the largest number of a token's head",
}  # fmt: skip
"""By format of a cache: half a step, which is what its rounding costs at most. Derived: 2**-(bits of mantissa + 1);
0.5 of 127 codes."""


def cache_notes(dumps: tuple[Any, Any]) -> list[str]:
    """What is said where the two runs keep keys and values in other formats: attention differs by that alone."""
    kinds = []
    for dump in dumps:
        attrs = [m.attrs for modules in getattr(dump, "modules", {}).values() for m in modules]
        found = {str(a.get("impl.kv_cache_dtype") or a.get("kv_cache_dtype") or "") for a in attrs} - {""}
        kinds.append(sorted(found))
    golden, mine = kinds
    eight = [kind for kind in (*golden, *mine) if kind in _STEPS]
    if golden == mine or not golden or not mine or not eight:
        return []
    cost = "; ".join(f"{kind} rounds by up to {_STEPS[kind]}" for kind in dict.fromkeys(eight))
    return [f"golden's cache is {', '.join(golden)}, mine's {', '.join(mine)}: attention differs by that alone "
            f"({cost}); how much that is, and whether a wrong state is beside it, a replay says"]  # fmt: skip


def notes(states: Mapping[str, Any]) -> list[str]:
    """What is said before the verdict: a golden with a wrong cache is none."""
    found = findings(states, "golden")
    return [f"GOLDEN'S OWN CACHE WAS WRONG: {found[0]['sentence']}; take another golden"] if found else []
