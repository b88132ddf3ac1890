"""Modules that were built with other numbers: an epsilon, a softmax scale, a window.

The problem: a constant that is wrong in mine's module is right for mine's own replay, which reads it there; and where
its effect is small, no limit of a comparison shows it. The idea: what both dumps recorded of the same module is laid
side by side, and a number of a formula that differs is an origin of its own kind, ``setting``: the module computes what
it was built to compute, and who built it is wrong. Sizes differ between machines that are right (ranks, packing, block
sizes), so only numbers that go into a formula count, by their names. A number that is recorded at several places (an
attention and its backend) is one finding, at the innermost.
Where it cannot matter, it is a note: no tensor of the module, nor of what contains it, was compared, or its outputs are
equal. Whether it matters where they are not, a replay with both values tells (opcheck/proof/other_constants.py).
Not here: what was recorded (capture/).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_accprobe.comparison.pair import FAIL, PASS, SKIP, Pair
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.judge.weights.faults import wrong_weights

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

SETTING = "setting"
"""The role of an origin that is a constant, and the kind of its cause."""
_FORMULA = re.compile(r"(^|[._])(eps|epsilon|scale|scaling|scaling_factor|base|theta|soft_?cap|sliding_window|window|"
                      r"alpha|beta|limit|mscale|top_?k|renormalize|has_sink|is_neox_style)($|_)")  # fmt: skip
_OF_CACHES = ("_k_scale_float", "_v_scale_float", "_q_scale_float", "_prob_scale_float")
"""Scales of an 8-bit cache: numbers of a formula only beside another cache of that format."""
_DIGITS = 1e-6
"""Chosen: relative; a float32 and a float64 of the same constant are nearer."""
_NOTHING = ("request", "position", "phase", "created", "propagated", "floor", "tier", "times", "chance", "layers",
            "worst")  # fmt: skip
_NOTES = 3
Differs = tuple[str, Any, Any]
"""(attribute, mine's value, golden's)."""


def differing(golden: Dump, mine: Dump) -> dict[str, str]:
    """Tap → ``variance_epsilon is 0.02, golden has 1e-06``, of the modules that both dumps know."""
    return {
        tap: "; ".join(f"{name} is {value}, golden has {theirs}" for name, value, theirs in other)
        for tap, other in other_values(golden, mine).items()
    }


def other_values(golden: Dump, mine: Dump) -> dict[str, list[Differs]]:
    """Tap → its constants that are not golden's."""
    theirs, own = _attributes(golden), _attributes(mine)
    found: dict[str, list[Differs]] = {}
    for tap, attrs in own.items():
        other = [
            (name, value, theirs[tap][name])
            for name, value in attrs.items()
            if _FORMULA.search(name)
            and name in theirs.get(tap, {})
            and _differ(theirs[tap][name], value)
            and not (name in _OF_CACHES and theirs[tap].get("kv_cache_dtype") != attrs.get("kv_cache_dtype"))
        ]
        if other:
            found[tap] = other
    said = {tap: _once(tap, other, found) for tap, other in found.items()}
    return {tap: other for tap, other in said.items() if other}


def _once(tap: str, other: list[Differs], found: Mapping[str, list[Differs]]) -> list[Differs]:
    """Without what a module inside ``tap`` has, too, and what ``tap`` records under two names."""
    inner = {one[1:] for t, d in found.items() if t.startswith(tap + ".") for one in d}
    kept: dict[tuple[Any, Any], Differs] = {}
    for one in other:
        if one[1:] not in inner:
            kept.setdefault(one[1:], one)
    return list(kept.values())


def with_constants(
    origins: Iterable[tuple[int, dict[str, Any]]], settings: Mapping[str, str], classes: Mapping[str, str],
    pairs: Iterable[Pair],
) -> list[tuple[int, dict[str, Any]]]:  # fmt: skip
    """``origins``, (place in the data flow, compare.json's entry), with an entry for each tap of ``settings`` (as
    `differing`'s) that may matter; a module that is an origin already, or stands for one inside that was not captured,
    is given the cause instead. classes: by tap."""
    places: dict[str, tuple[int, bool]] = {}
    for p in pairs:
        if p.status != SKIP:
            order, same = places.get(p.tap, (p.order, True))
            places[p.tap] = min(order, p.order), same and (p.identical or not _result(p))
    known = {str(o["module"]): o for _, o in origins}
    found = list(origins)
    for tap, said in settings.items():
        near = _nearest(tap, places)
        stands = tap if tap in known else next((t for t in near if t in known and tap.startswith(t + ".")), None)
        if stands is not None:
            said = said if stands == tap else f"{tap}: {said}"
            known[stands] |= {"setting": said, "cause": cause(said)}
            continue
        if all(places[t][1] for t in near):  # nothing was compared there, or it computes the same
            continue
        entry: dict[str, Any] = dict.fromkeys(_NOTHING)
        entry |= {"module": tap, "class": classes.get(tap, ""), "role": SETTING, "evidence": "values", "rows": 0,
                  "nonfinite": 0, "shape": "", "setting": said, "cause": cause(said)}  # fmt: skip
        found.append((min(places[t][0] for t in near), entry))
    return found


def cause(said: str) -> dict[str, Any]:
    """An origin's ``cause``, of a module with other constants."""
    return {"kind": SETTING, "sentence": said}


def with_effects(result: Comparison, effects: Mapping[str, Mapping[str, Any]]) -> Comparison:
    """``result`` with what a replay with both values has found (opcheck/proof/other_constants.py), by tap: ``matters``,
    None where that is not known, and ``times``, how many times what rounding allows an output moves. A constant that
    does not matter is a note."""
    origins, notes = [], []
    for o in result.origins:
        found, other = effects.get(str(o["module"])), o.get("cause")
        if found is None or found.get("matters") is None or not isinstance(other, Mapping) or other["kind"] != SETTING:
            origins.append(o)
            continue
        said, matters = str(other["sentence"]), bool(found["matters"])
        how = f"with golden's value its outputs move by {found['times']:.2g} times what rounding allows (replay)"
        if not matters and o.get("role") == SETTING:
            notes.append(f"replay: {o['module']}: {said}, which does not matter here: {how}")
            continue
        origins.append({**o, "cause": {**other, "sentence": f"{said}; {how}", "matters": matters}})
    if len(origins) == len(result.origins):
        return replace(result, origins=origins)
    open_ = origins or wrong_weights(result.weights) or any(p.status == FAIL for p in result.pairs)
    shown = notes[:_NOTES] + ([f"replay: {len(notes) - _NOTES} more such constants"] if notes[_NOTES:] else [])
    return replace(result, origins=origins, notes=[*shown, *result.notes], verdict=result.verdict if open_ else PASS)


def effects_of(value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What JSON kept of a replay's effects. Raises TypeError and ValueError for anything else."""
    found = {}
    for tap, one in value.items():
        matters = one["matters"]
        if not (matters is None or isinstance(matters, bool)):
            raise TypeError("whether a constant matters is no word")
        found[str(tap)] = {"matters": matters, "times": float(one["times"])}
    return found


def _result(pair: Pair) -> bool:
    return pair.role.startswith(("output", "inplace"))


def _nearest(tap: str, places: Mapping[str, Any]) -> list[str]:
    """The taps whose tensors show what ``tap`` computes: itself, else those inside, else the innermost around it."""
    if tap in places:
        return [tap]
    if inside := [t for t in places if t.startswith(tap + ".")]:
        return inside
    around = [t for t in places if tap.startswith(t + ".")]
    return [max(around, key=len)] if around else []


def _attributes(dump: Dump) -> dict[str, Mapping[str, Any]]:
    return {m.tap: m.attrs for modules in dump.modules.values() for m in modules}


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return type(a) is type(b) and isinstance(a, (bool, str)) and a != b
    if not (math.isfinite(a) and math.isfinite(b)):
        return a != b and not (a != a and b != b)
    return abs(a - b) > _DIGITS * max(abs(a), abs(b))
