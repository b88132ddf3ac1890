"""What the parts of ``scripts/card.sh`` show together: one conclusion for each way to run a model.

The problem: each part is one engine or one comparison, and what counts lies between them: whether looking changed a
bit, whether what is seen inside is what eager shows, whether the fault is named. The idea: the dump of a part is
boiled down to a few facts when the part has run; conclusions are functions of results, so that the page can be made
again from a folder. Not here: the page (card_page.py), the parts (card_parts.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from card_parts import COSTS, FAULTY, WAYS, chosen_ways

OUTSIDE = ("<root>", "logits", "sampler")
"""Taps that are Python in every way to run; the bits that they recorded can be held against each other."""
Results = Mapping[str, Mapping[str, Any]]
"""By part: {"status", "why", "s", "found"}."""
DONE, FAILED, NOT_RUN, NOT_YET = "done", "failed", "not run", "not yet"
"""A part's status. NOT_RUN: something that it needs has failed. NOT_YET: nobody asked for it, or its turn did not come.
"""


def dump_facts(dump: Path) -> dict[str, Any]:
    """What is kept of a part's dump. Raises DumpError."""
    from vllm_accprobe.dump.reader import open_dump

    opened = open_dump(dump)
    in_steps = [r for r in opened.records if r.step is not None]
    skips: Counter[str] = Counter()
    for skip in opened.skips:
        skips[skip.reason] += skip.count
    steps = {r.step for r in in_steps}
    replayed = Counter(step.graph.mode for step in opened.steps.values() if getattr(step, "graph", None))
    return {
        "graphs": (opened.run.get("engine") or {}).get("graphs"),
        "steps": len(steps),
        "inside": len({r.tap for r in in_steps if not r.tap.startswith(OUTSIDE)}),
        "a_step": round(len(in_steps) / len(steps)) if steps else 0,
        "skips": dict(skips.most_common()),
        "replayed": dict(replayed),
        "errors": [f"{error.get('where')}: {error.get('message')}" for error in opened.errors][:5],
        "outside": {
            f"{r.rank}/{r.step}/{r.tap}/{r.role}/{r.call}": r.hash for r in in_steps if r.tap.startswith(OUTSIDE)
        },
    }


@dataclass
class WayFound:
    """One way to run. why: "" or why it was not run. bits: by variant, whether it left every recorded and served bit as
    it was. repeatable: whether two engines without the probe gave the same bits; None: not asked, since looking changed
    none. verdict: of clean against eager; culprit: what was named first for the fault. problems: what is wrong;
    rest: parts whose turn did not come."""

    way: str
    why: str = ""
    how: Mapping[str, Any] = field(default_factory=dict)
    taps: int | None = None
    replayed: Mapping[str, int] = field(default_factory=dict)
    bits: dict[str, bool] = field(default_factory=dict)
    repeatable: bool | None = None
    verdict: str | None = None
    culprit: str | None = None
    problems: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool | None:
        """None: it was not run, or not all of it."""
        return False if self.problems else None if self.why or self.rest else True


def conclusions(results: Results) -> list[WayFound]:
    machine = results.get("machine", {}).get("found") or {}
    return [_of_way(results, way, why) for way, why in chosen_ways(machine).items()]


def _of_way(results: Results, way: str, why: str) -> WayFound:
    made = WayFound(way, why)
    if why:
        return made
    of = {v: _found(results, f"{way}-{v}") for v in ("bare", "on")}
    made.problems += [
        f"{name}: {one.get('why') or 'not run'}"
        for name, one in results.items()
        if name.startswith((f"{way}-", f"compare-{way}-")) and one.get("status") not in (DONE, NOT_YET)
    ]
    made.rest = [name for name in rest(results) if name.startswith((f"{way}-", f"compare-{way}-"))]
    on = of["on"]
    made.how = (on or of["bare"] or {}).get("how", {})
    if on and "dump" in on:
        made.taps, made.replayed = on["dump"]["inside"], on["dump"]["replayed"]
        made.problems += [f"{way}-on: the probe failed: {error}" for error in on["dump"]["errors"]]
        if not made.taps:
            made.problems.append(f"{way}-on: nothing inside the model was captured")
    changed = _changes_of_way(results, way)
    made.bits = {variant: not lines for variant, lines in changed.items()}
    again = _found(results, f"{way}-again")
    if again and of["bare"]:
        made.repeatable = not changes(of["bare"], again)
    if made.repeatable is not False:  # else what changed bits is the machine
        made.problems += [f"{way}-{variant}: {line}" for variant, lines in changed.items() for line in lines]
    clean, fault = _found(results, f"compare-{way}-on"), _found(results, f"compare-{way}-fault")
    if clean:
        made.verdict = clean.get("verdict")
        if made.verdict != "pass":
            made.problems.append(f"clean against eager: {made.verdict}, first {named(clean) or 'nothing'}")
    if fault:
        made.culprit = named(fault) or "nothing"
        if made.culprit != FAULTY:
            made.problems.append(f"the fault in {FAULTY} was not named first, but {made.culprit}")
    return made


def _changes_of_way(results: Results, way: str) -> dict[str, list[str]]:
    """By variant that was run: what it changed."""
    bare, on = (_found(results, f"{way}-{v}") for v in ("bare", "on"))
    variants = {v: _found(results, f"{way}-{v}") for v in ("on", "selected", "off")}
    return {
        variant: changes(bare, other) + (outside_changes(on, other) if on and other is not on else [])
        for variant, other in variants.items()
        if other and bare
    }


def changed_bits(results: Results, way: str) -> bool:
    """Whether anything about looking changed a bit of this way."""
    return any(_changes_of_way(results, way).values())


def _found(results: Results, name: str) -> Mapping[str, Any] | None:
    one = results.get(name)
    return one.get("found") if one and one.get("status") == DONE else None


def named(compared: Mapping[str, Any]) -> str:
    """The culprit of a compare.json; "" where there is none."""
    origins = compared.get("origins") or []
    return str(origins[0].get("module")) if origins else ""


def changes(bare: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What the served answers of two engines differ in: tokens, and the bits of the top log-probabilities."""
    mine, theirs = bare.get("answers", {}), other.get("answers", {})
    lines = []
    for what in ("tokens", "top"):
        differ = [name for name in mine if mine[name][what] != theirs.get(name, {}).get(what)]
        if differ:
            word = {"tokens": "tokens", "top": "bits of the top log-probabilities"}[what]
            lines.append(f"{word} of {len(differ)} of {len(mine)} answers differ from those without the probe")
    return lines


def outside_changes(on: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Records of the root, the logits and the sampler that both engines have and whose hashes differ."""
    a, b = (one.get("dump", {}).get("outside", {}) for one in (on, other))
    both = [key for key in b if key in a]
    differ = [key for key in both if a[key] != b[key]]
    if not both:
        return ["no record of the root or the logits is in both dumps"]
    told = f"{len(differ)} of {len(both)} records outside the graphs differ from those with all taps"
    return [told] if differ else []


@dataclass(frozen=True)
class Cost:
    """A decode step, ms: medians by what the probe does, with quartiles. a_step: tensors captured in a step."""

    way: str
    clock: str
    ms: Mapping[str, tuple[float, float, float]]
    a_step: int

    def ratio(self, kind: str) -> float:
        return self.ms[kind][1] / self.ms["bare"][1]

    def each_us(self, kind: str) -> float:
        """Microseconds a captured tensor."""
        return (self.ms[kind][1] - self.ms["bare"][1]) * 1e3 / self.a_step


def costs(results: Results) -> list[Cost]:
    """By way, where there is a bare engine and another. On a CPU the engine's thread computes, and its CPU time counts;
    on a device wall clock."""
    kind = (results.get("machine", {}).get("found") or {}).get("device_type")
    clock = "own_s" if kind == "cpu" else "wall_s"
    made = []
    for way in WAYS:
        ms: dict[str, tuple[float, float, float]] = {}
        a_step = 0
        for cost in COSTS:
            found = _found(results, f"{way}-cost-{cost}")
            for name, step in (found or {}).get("steps", {}).items():
                if name != "off" or cost == "tensor":
                    low, middle, high = (1e3 * second for second in step[clock])
                    ms[name] = (low, middle, high)
            if cost == "tensor" and found:
                a_step = found.get("dump", {}).get("a_step", 0)
        if "bare" in ms and len(ms) > 1 and a_step:
            made.append(Cost(way, "CPU time" if clock == "own_s" else "wall clock", ms, a_step))
    return made


def errchecks(results: Results) -> list[tuple[str, bool, str]]:
    """(part, whether it is as it should be, what errcheck said)."""
    made = []
    for name in ("errcheck-nan", "errcheck-clean"):
        found = _found(results, name)
        if found:
            said = str(found.get("said", ""))
            good = (found["code"] == 1 and FAULTY in said) if name == "errcheck-nan" else found["code"] == 0
            made.append((name, good, said or f"exit code {found['code']}"))
    return made


def failed(results: Results) -> dict[str, str]:
    """By part that did not run to its end: why."""
    return {name: str(one.get("why")) for name, one in results.items() if one.get("status") not in (DONE, NOT_YET)}


def rest(results: Results) -> list[str]:
    """Parts whose turn did not come."""
    return [name for name, one in results.items() if one.get("status") == NOT_YET]


def all_good(results: Results) -> bool:
    """Whether everything that was run is as it should be."""
    torch = (_found(results, "torch") or {}).get("ways", {})
    return (
        not failed(results)
        and all(one.passed is not False for one in conclusions(results))
        and all(good for _, good, _ in errchecks(results))
        and all(one["passed"] for one in torch.values() if isinstance(one, dict))
    )
