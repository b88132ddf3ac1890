"""What the ledgers of states of two runs say: "the cache, not the kernel".

The problem: an operator that computes rightly with a wrong state appears to create an error, or creates none that a
comparison sees. The idea: what a run's own ledger has found (docs/state-checks.md) needs no other run: mine's first
finding is the first origin and fails the comparison; what golden's ledger has found as well is a note. Not here: how
states are watched (capture/states/), the sentence of a finding (dump/journal.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vllm_accprobe.comparison import runner_inputs
from vllm_accprobe.comparison.runner_inputs import NOT_THE_MODEL, RUNNER
from vllm_accprobe.dump.journal import StateFinding, sentence

SIDES = ("golden", "mine")
MOST = 100
"""Findings of a side that the result keeps; the number of all is there."""
NOT_THE_KERNEL = "the cache, not the kernel"


CACHE = "cache"
"""The role of an origin that is a cache, not an operator."""
OWNERS = "owners"
"""The mode of the ledger that a capture has by default."""
_CLASSES = {"kv": "KV cache", "state": "state cache"}
ORIGIN_KEYS = (
    "module", "class", "role", "request", "position", "phase", "created", "propagated", "floor", "evidence", "tier",
    "times", "chance", "layers", "rows", "worst", "nonfinite", "shape", "setting", "cause", "gap",
)  # fmt: skip
"""Of an entry of compare.json's ``origins``, in their order."""


def states_of(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """compare.json's ``states``: by side, empty where a run kept no ledger: {"watched": the ledger's totals by rank,
    "count": findings in all, "findings": [each one's fields, its rank, its sentence, and "both": the other run has
    the same]}."""
    out: dict[str, dict[str, Any]] = {}
    inputs = [found.faults for found in runner_inputs.check_both(dumps)]
    known = [{_key(dump, one) for one in getattr(dump, "states", [])} for dump in dumps]
    for side, dump, others, own, theirs in zip(SIDES, dumps, reversed(known), inputs, reversed(inputs), strict=True):
        totals = getattr(dump, "state_totals", {})
        found = getattr(dump, "states", [])
        if not totals and not found and not own:
            out[side] = {}
            continue
        same = [_key(dump, one) in others for one in found]
        listed = [
            {**asdict(one), "rank": rank, "sentence": sentence(one), "both": both} | _of_runner(dump, rank, one)
            for (rank, one), both in sorted(zip(found, same, strict=True), key=lambda f: f[1])[:MOST]
        ]
        listed = [*(f.finding() | {"both": f in theirs} for f in own), *listed]
        count = max(sum(one.findings for one in totals.values()), len(found))
        watched = {str(rank): asdict(one) for rank, one in totals.items()}
        out[side] = {"watched": watched, "count": count - sum(same) + sum(f not in theirs for f in own),
                     "findings": listed}  # fmt: skip
    return out


def _of_runner(dump: Any, rank: int, found: StateFinding) -> dict[str, Any]:
    """What a finding of the ledger says more where its numbers are the runner's."""
    if not runner_inputs.is_runners(found):
        return {}
    said = runner_inputs.ledger_sentence(dump, rank, found, sentence(found))
    parameter = {"request": found.request, "first": found.low, "last": found.high, "step": found.step}
    cause = {"family": "input", "text": f"the runner: {said}", "parameter": parameter, "residual": 0.0, "chance": None}
    return {"sentence": said, "cause": cause}


def whose(found: Mapping[str, Any]) -> str:
    """``the cache, not the kernel``, or whose fault a finding is."""
    return NOT_THE_MODEL if found.get("cause") else NOT_THE_KERNEL


def _key(dump: Any, found: tuple[int, StateFinding]) -> tuple[Any, ...]:
    """What must be the same for two runs' findings to be one: the kind, who reads, where, and who wrote. Blocks have
    other numbers in each run."""
    rank, one = found
    names = {r.id: (r.prompt, r.adapter or "", r.ordinal) for (on, _), r in dump.requests.items() if on == rank}
    who = [names.get(name, name) for name in (one.request, one.writer)]
    return one.kind, one.cache, one.layer, one.part, one.low, one.high, *who


def watched(states: Mapping[str, Any], side: str) -> dict[str, Any]:
    """The totals, by rank, of a ledger that somebody requested; empty for the one that each capture has, which alone is
    no comparison."""
    found = (states.get(side) or {}).get("watched") or {}
    return {rank: one for rank, one in found.items() if one.get("mode") != OWNERS}


def findings(states: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    return [one for one in _all(states, side) if not one.get("both")]


def _all(states: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    return list((states.get(side) or {}).get("findings") or ())


def cache_origin(states: Mapping[str, Any]) -> dict[str, Any] | None:
    """compare.json's entry of the origin that mine's first finding is: the cache of the first layer that shows it."""
    found = findings(states, "mine")
    if not found:
        return None
    one = found[0]
    low, high = one.get("low"), one.get("high")
    return dict.fromkeys(ORIGIN_KEYS) | {
        "module": one.get("layer") or one.get("first") or f"cache group {one.get('group')}",
        "class": RUNNER if one.get("cause") else _CLASSES.get(str(one.get("cache")), "cache"),
        "role": one.get("role") or CACHE,
        "request": one.get("request") or None,
        "position": low,
        "phase": one.get("phase"),
        "evidence": "values",
        "rows": one.get("rows") or (0 if low is None or high is None else high - low + 1),
        "nonfinite": 0,
        "shape": str(one.get("sentence") or ""),
        "setting": "",
        "cause": one.get("cause"),
    }


def is_cache(origin: Mapping[str, Any]) -> bool:
    """Whether an origin is a finding of a run's own: of its ledger, or of what its runner handed to the model."""
    return origin.get("role") == CACHE or (origin.get("class") == RUNNER and origin.get("created") is None)


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
    """What is said before the verdict: a golden with a wrong cache is none, and what both runs do is no difference."""
    found = findings(states, "golden")
    what = "RUNNER" if found and found[0].get("cause") else "OWN CACHE"
    said = [f"GOLDEN'S {what} WAS WRONG: {found[0]['sentence']}; take another golden"] if found else []
    if both := [one for one in _all(states, "mine") if one.get("both")]:
        more = f" (and {len(both) - 1} more)" if len(both) > 1 else ""
        of = "runner" if both[0].get("cause") else "cache"
        said.append(f"in both runs, and so no difference between them: the {of}: {both[0]['sentence']}{more}")
    return said
