"""Notes beside the verdict: what explains a difference better than any operator, or leaves nothing to compare.

The problem: other prompts, another model, a rank that stopped early or a module with another constant explain more than
any tensor. The idea: pure functions from dumps and plan to sentences, which every report puts first. Constants that go
into a formula and differ are origins of their own kind, ``setting``, unless nothing that was compared shows them. Dumps
without a common tensor may still be compared by their ledgers of states and their weights. Another tool's standard
gives pairs its columns and status (`apply`); origins and floors stay ours. Not here: words of pairs and flips
(messages.py), the counting (judge/near_ties.py), the rules (standards/).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

from vllm_accprobe.align.tokens import what_differs
from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.measure.measured import ComparisonContext
from vllm_accprobe.comparison.measure.read import UNREAD
from vllm_accprobe.comparison.pair import FAIL, PASS, Pair, Pairs, counted, was_compared
from vllm_accprobe.comparison.plan.groups import Groups
from vllm_accprobe.comparison.plan.make_plan import Plan
from vllm_accprobe.comparison.result import Comparison, Foreign
from vllm_accprobe.comparison.runner_inputs import cache_notes, findings, watched
from vllm_accprobe.dump.decode import object_at, value_at
from vllm_accprobe.dump.reader import Dump, nearest
from vllm_accprobe.dump.record_table import first_of_each_site
from vllm_accprobe.dump.schema import SamplingParameters
from vllm_accprobe.judge.near_ties import ROWS_BEHIND, Routing
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.judge.rounding_unit import flow_unit, unit as rounding_unit
from vllm_accprobe.judge.weights import wrong_weights
from vllm_accprobe.kernels.definition import ELEMENT_FIELDS
from vllm_accprobe.standards.declaration import NO_VERDICT, OF_PAIRS, SKIPPED, Cell, NamedStandard, Numbers, PairRule
from vllm_accprobe.standards.finding import ERROR, WARNING

ALL_SKIPPED = "all pairs were skipped"


def plan_notes(dumps: tuple[Any, Any], plan: Plan) -> list[str]:
    out: list[str] = []
    names = [str(value_at(d.run, "model", "class") or "") for d in dumps]
    if all(names) and names[0] != names[1]:
        out.append(f"different models: {names[0][:80]} in golden, {names[1][:80]} in mine")
    for g, m in plan.requests.different:
        lengths = f" ({g.prompt_len} and {m.prompt_len})" if g.prompt != m.prompt else ""
        out.append(f"request {g.id!r} has {what_differs(g, m)}{lengths}: not compared")
    for side, left in (("golden", plan.requests.only_golden), ("mine", plan.requests.only_mine)):
        if left:
            has, was = ("has", "was") if len(left) == 1 else ("have", "were")
            who = counted(len(left), "request")
            out.append(f"{who} {has} {messages.NO_PARTNER} {was} not compared: only in {side}")
    out += plan.notes
    out += _parameters(plan)
    out += _dtypes(plan)
    out += cache_notes(dumps)
    if unequal := plan.unequal_copies():
        out.append(f"{unequal} tensors that all ranks should hold alike differ between the ranks of golden")
    for side, dump in zip(("golden", "mine"), dumps, strict=True):
        out += [f"{side}: rank {rank} stopped early: {stop.reason}" for rank, stop in sorted(dump.stops.items())]
        out += [f"{side}: {problem}" for problem in dump.problems]
        for error in dump.errors[:1]:
            first = f"{error.get('where', '?')}: {str(error.get('message', ''))[:200]}"
            out.append(f"{side}: the probe noted {len(dump.errors)} errors of its own, first: {first}")
        out += [f"{side}: {text}" for text in taps_effect(dump.run)]
    return out


def taps_effect(run: dict[str, Any]) -> list[str]:
    """What `accprobe doctor --graphs` has found of the taps of this very run, if it was one of its runs: a sentence.
    run: run.json, perhaps a stranger's."""
    changed = object_at(run, "engine", "graphs", "changed")
    if changed is None:
        return []
    if changed.get("repeats") is not True:
        return ["two runs without taps differed already: whether its taps change the result is not known"]
    wrong = [word for word in ("tokens", "top_logits", "logits", "root") if changed.get(word) is True]
    if not wrong:
        return ["its taps changed no bit of the result (accprobe doctor --graphs)"]
    far, module = changed.get("root_rel_l2"), changed.get("module")
    much = f" by {far:.2g} (relative L2)" if isinstance(far, float) and "root" in wrong else ""
    where = f", first where a tap stands at {_printable(module)}" if isinstance(module, str) else ""
    return [f"ITS TAPS CHANGED THE RESULT{much}: {', '.join(wrong)}{where}; compare without that tap (docs/doctor.md)"]


def _parameters(plan: Plan) -> list[str]:
    """One sentence where requests ask the sampler for something else: their tokens may then rightly differ. Grammars
    and the like are in the lines of masks."""
    found = [
        (m, g.sampling, m.sampling)
        for g, m, _ in plan.requests.pairs
        if g.sampling is not None and m.sampling is not None and g.sampling.digest != m.sampling.digest
        and g.sampling.also == m.sampling.also
    ]  # fmt: skip
    if not found:
        return []
    request, golden, mine = found[0]
    fields = [f for f in SamplingParameters.__dataclass_fields__ if f not in ("digest", "prompt")]
    differ = [f for f in fields if getattr(golden, f) != getattr(mine, f)]
    lists = [f for f in differ if isinstance(getattr(golden, f), tuple) or isinstance(getattr(mine, f), tuple)]
    parts = [f"{f} {getattr(golden, f)} in golden, {getattr(mine, f)} in mine" for f in differ if f not in lists]
    parts += lists
    more = f", and {len(found) - 1} more requests" if len(found) > 1 else ""
    what = "; ".join(f.replace("_", " ") for f in parts) or "lists too long to be written down"
    return [f"request {request.id!r}{more}: other sampling parameters ({what}): flipped tokens are not judged"]


def _dtypes(plan: Plan) -> list[str]:
    units = [u for u in plan.units if not u.is_param and u.golden and u.mine]
    mixed: Counter[tuple[str, str]] = Counter()
    for u in units:
        pair = Groups.of(u.golden).dtype, Groups.of(u.mine).dtype
        if pair[0] != pair[1] and rounding_unit(pair[0]) and rounding_unit(pair[1]):
            mixed[pair] += 1
    if not mixed:
        return []
    (g, m), n = mixed.most_common(1)[0]
    coarse = max((g, m), key=lambda d: flow_unit([d]))
    return [f"dtypes differ ({g} in golden, {m} in mine, {n} tensors): compared exactly, with the limits of {coarse}"]


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name[:120])


def unmatched(dumps: tuple[Any, Any], taps: str) -> str:
    """One line for NothingCompared where globs over taps left nothing: what is meant, perhaps."""
    known = [sorted({r.tap for r in first_of_each_site(dump.records)}) for dump in dumps]
    both = sorted(set(known[0]) & set(known[1])) or known[1] or known[0]
    near = [_printable(name) for name in nearest(taps.split(","), both)]
    hint = f"; the nearest: {', '.join(near)}" if near else ""
    return f"nothing could be compared: --taps {_printable(taps)!r} matches no tap that both dumps have{hint}"


def nothing(dumps: tuple[Any, Any], plan: Plan, skipped: Counter[str]) -> str:
    """One line for NothingCompared: the likeliest reason first."""
    golden, mine = dumps
    if not golden.records or not mine.records:
        empty = golden if not golden.records else mine
        why = "; ".join(empty.problems) or "none captured"
        return f"nothing could be compared: {empty.path} holds no tensors ({why})"
    if plan.requests.different and not plan.requests.pairs:
        what = what_differs(*plan.requests.different[0])
        return f"nothing could be compared: the requests have the same ids but {what}"
    if not plan.names.pairs:
        there = [_printable(next((r for r in d.records if r.step is not None), d.records[0]).tap) for d in dumps]
        return (
            "nothing could be compared: no tap of one dump has a partner in the other (or --taps matches none); "
            f"golden has {there[0]}, mine {there[1]}, for example"
        )
    if golden.requests and mine.requests and not plan.requests.pairs:
        return "nothing could be compared: no request of one dump has the same prompt as one of the other"
    reasons = ", ".join(f"{reason} ({n})" for reason, n in skipped.most_common(3))
    why = next((f": {d.unread[0]}" for d in dumps if skipped.get(UNREAD) and d.unread), "")
    return f"nothing could be compared: {reasons or ALL_SKIPPED}{why}"


SETTING = "setting"
"""The role of an origin that is a constant, and the kind of its cause."""
_FORMULA = re.compile(r"(^|[._])(eps|epsilon|scale|scaling|scaling_factor|multiplier|base|theta|soft_?cap|"
                      r"sliding_window|window|alpha|beta|limit|mscale|top_?k|renormalize|has_sink|is_neox_style|"
                      r"approximate|scoring_func|num_expert_group|topk_group|rotary_dim|mrope_section|freq_factor|"
                      r"orig_max_position)($|_)")  # fmt: skip
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
    sentences = {tap: _once(tap, other, found) for tap, other in found.items()}
    return {tap: other for tap, other in sentences.items() if other}


def _once(tap: str, other: list[Differs], found: Mapping[str, list[Differs]]) -> list[Differs]:
    """Without what a module inside ``tap`` has, too, and what ``tap`` records under two names."""
    inner = {one[1:] for t, d in found.items() if t.startswith(tap + ".") for one in d}
    kept: dict[tuple[Any, Any], Differs] = {}
    for one in other:
        if one[1:] not in inner:
            kept.setdefault(one[1:], one)
    return list(kept.values())


def with_constants(
    origins: Iterable[tuple[int, OriginEntry]], settings: Mapping[str, str], classes: Mapping[str, str],
    pairs: Iterable[Pair],
) -> list[tuple[int, OriginEntry]]:  # fmt: skip
    """``origins``, (place in the data flow, compare.json's entry), with an entry for each tap of ``settings`` (as
    `differing`'s) that may matter; a module that is an origin already, or stands for one inside that was not captured,
    is given the cause instead. classes: by tap."""
    places: dict[str, tuple[int, bool]] = {}
    for p in pairs if settings else ():
        if was_compared(p):
            order, same = places.get(p.tap, (p.order, True))
            places[p.tap] = min(order, p.order), same and (p.identical or not p.role.startswith(("output", "inplace")))
    known = {str(o["module"]): o for _, o in origins}
    found = list(origins)
    for tap, text in settings.items():
        near = _nearest(tap, places)
        stands = tap if tap in known else next((t for t in near if t in known and tap.startswith(t + ".")), None)
        if stands is not None:
            text = text if stands == tap else f"{tap}: {text}"
            known[stands] |= {"setting": text, "cause": cause(text)}
            continue
        if all(places[t][1] for t in near):  # nothing was compared there, or it computes the same
            continue
        entry: dict[str, Any] = dict.fromkeys(_NOTHING)
        entry |= {"module": tap, "class": classes.get(tap, ""), "role": SETTING, "evidence": "values", "rows": 0,
                  "nonfinite": 0, "shape": "", "setting": text, "cause": cause(text)}  # fmt: skip
        found.append((min(places[t][0] for t in near), cast("OriginEntry", entry)))
    return found


def cause(text: str) -> dict[str, Any]:
    return {"kind": SETTING, "sentence": text}


def with_effects(result: Comparison, effects: Mapping[str, Mapping[str, Any]]) -> Comparison:
    """``result`` with what a replay with both values has found (opcheck/proof/make_proof.py), by tap: ``matters``,
    None where that is not known, and ``times``, how many times what rounding allows an output moves. A constant that
    does not matter is a note."""
    origins, notes = [], []
    for o in result.origins:
        found, other = effects.get(str(o["module"])), o.get("cause")
        if found is None or found.get("matters") is None or not isinstance(other, Mapping) or other["kind"] != SETTING:
            origins.append(o)
            continue
        text, matters = str(other["sentence"]), bool(found["matters"])
        how = f"with golden's value its outputs move by {found['times']:.2g} times what rounding allows (replay)"
        if not matters and o.get("role") == SETTING:
            notes.append(f"replay: {o['module']}: {text}, which does not matter here: {how}")
            continue
        origins.append({**o, "cause": {**other, "sentence": f"{text}; {how}", "matters": matters}})
    if len(origins) == len(result.origins):
        return replace(result, origins=origins)
    open_ = origins or wrong_weights(result.weights) or any(p.status == FAIL for p in result.pairs)
    shown = notes[:_NOTES] + ([f"replay: {len(notes) - _NOTES} more such constants"] if notes[_NOTES:] else [])
    return replace(result, origins=origins, notes=[*shown, *result.notes], verdict=result.verdict if open_ else PASS)


def _nearest(tap: str, places: Mapping[str, Any]) -> list[str]:
    """The taps whose tensors show what ``tap`` computes: itself, else those inside, else the innermost around it."""
    if tap in places:
        return [tap]
    if inside := [t for t in places if t.startswith(tap + ".")]:
        return inside
    enclosing = [t for t in places if tap.startswith(t + ".")]
    return [max(enclosing, key=len)] if enclosing else []


def _attributes(dump: Dump) -> dict[str, Mapping[str, Any]]:
    return {m.tap: m.attrs for modules in dump.modules.values() for m in modules}


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return type(a) is type(b) and isinstance(a, (bool, str)) and a != b
    if not (math.isfinite(a) and math.isfinite(b)):
        return a != b and not (a != a and b != b)
    return abs(a - b) > _DIGITS * max(abs(a), abs(b))


_NAMED = 3


def nonfinite_steps(origins: Sequence[OriginEntry]) -> list[str]:
    found = [(o["module"], o["nonfinite"]) for o in origins if o.get("nonfinite")]
    if not found:
        return []
    rows = sum(n for _, n in found)
    which = ", ".join(f"{tap} ({n})" for tap, n in found[:_NAMED])
    which += f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    steps = "1 operator turns" if len(found) == 1 else f"{len(found)} operators turn"
    return [f"{steps} finite inputs into NaN or infinity, in {counted(rows, 'row')}: {which}"]


def choices(routing: Routing) -> list[str]:
    out = []
    if routing.wrong:
        why = "mine leaves an expert to which its own router gives a clearly higher logit"
        out.append(f"wrong experts are chosen in {counted(routing.wrong, 'row')}: {why}")
    if routing.unruled:
        why = "golden itself does not take its highest logits (groups, a bias), so no margin shows a near tie"
        out.append(f"{counted(routing.unruled, 'row')} went to other experts and are not judged from there on: {why}")
    if routing.unknown:
        why = "without the router's logits in both dumps nothing shows a near tie; capture the router (gate), too"
        out.append(f"{counted(routing.unknown, 'row')} went to other experts, which counts as an error: {why}")
    if rows := len(routing.left[ROWS_BEHIND]):
        out.append(
            f"{counted(rows, 'row')} of modules that read earlier rows behind a router (attention) not judged: "
            "earlier rows' experts were not compared; a replay of mine judges them"
        )
    return out


def unseen_routing(routers: Sequence[str], origins: int) -> list[str]:
    """What must be known of mixtures of experts whose routing is not in both dumps. origins: those it may explain."""
    if not routers or not origins:
        return []
    what = "an origin is" if origins == 1 else f"{origins} origins are"
    which = routers[0] + (f" and {len(routers) - 1} more" if len(routers) > 1 else "")
    return [
        f"{what} no proof: which experts rows went to is not known ({which}), and one that a near tie sends elsewhere "
        "differs as much; capture the router's logits (gate) in both, for compiled graphs without "
        "VLLM_ACCPROBE_GRAPH_MB=0"
    ]


def other_settings(settings: Mapping[str, str], origins: Collection[str]) -> list[str]:
    """Modules that were built with other constants, which nothing that was compared can show. settings:
    notes.differing's; origins: the taps whose constants are origins."""
    left = {tap: text for tap, text in settings.items() if tap not in origins}
    if not left:
        return []
    first, text = next(iter(left.items()))
    which = "1 module was" if len(left) == 1 else f"{len(left)} modules were, each,"
    return [f"{which} built with another constant, and what it computes is equal or was not compared: {first}: {text}"]


def without_tensors(setting: ComparisonContext, why: str, units: bool) -> str:
    """The sentence that is reported of a comparison without pairs; "" where there is nothing to compare at all. units:
    whether any tensor of one side has one of the other, by name."""
    seen = setting.coverage
    captured = units or bool(seen.get("taps_only_golden") or seen.get("taps_only_mine"))
    mine = watched(setting.states, "mine")
    weights = setting.weights.get("compared", 0) or setting.weights.get("told", 0)
    wrong = findings(setting.states, "mine")
    steps = max((int(one.get("steps", 0)) for one in mine.values()), default=0)
    lines = [f"mine's ledger of states ({steps:,} steps)"] if mine else ["mine's ledger of states"] if wrong else []
    lines += [f"{weights:,} weights"] if weights else []
    found = wrong or wrong_weights(setting.weights)
    if not lines or (captured and not found):
        return ""
    because = why.removeprefix("nothing could be compared: ")
    return f"no tensors were compared ({because}): this is about " + " and ".join(lines)


def apply(result: Comparison, standard: NamedStandard) -> Comparison:
    """``result`` with pairs, verdict and further columns by ``standard``'s rule for pairs."""
    name, rule = standard.name, standard.pairs
    if rule is None:
        raise ValueError(f"{name} has no rule for pairs")
    cells, pairs = [], []
    tally: Counter[str] = Counter()
    for pair in result.pairs:
        row, changed, word = _judged(pair, name, rule)
        tally[word] += 1
        cells.append(row)
        pairs.append(changed)
    verdicts = any(p.status == FAIL for p in pairs)
    own = result.verdict.upper()
    if tally[NO_VERDICT] and not tally[ERROR] and not tally[PASS]:
        note = f"standard '{name}' has no verdict of its own: the status is accprobe's"
        verdict = result.verdict
    else:
        counts = ", ".join(f"{tally[w]} {w}" for w in (ERROR, WARNING, PASS) if tally[w])
        note = f"status and verdict by the rules of '{name}' ({counts}); accprobe's own verdict is {own}"
        verdict = FAIL if verdicts else PASS
    if rule.needs_kl:
        note += _about_kl(pairs)
    divergence = messages.first_divergence(Pairs(pairs), None) if verdict == FAIL else None
    if divergence is not None:  # ours are other measures than the one that decided
        place = tuple(divergence[k] for k in ("module", "role", "step"))
        found = next(p for p in pairs if (p.tap, p.role, p.step) == place)
        divergence |= {"metric": found.message, "value": None, "limit": None}
    return replace(
        result,
        pairs=pairs,
        verdict=verdict,
        notes=[note, *result.notes],
        first_divergence=result.first_divergence if verdict == result.verdict else divergence,
        standard={"name": name, "origins by": result.standard},
        foreign=Foreign(name, rule.columns, cells),
    )


def _about_kl(pairs: list[Pair]) -> str:
    """Of which pairs there is no KL divergence: of none, where they were measured for another standard; else of
    parameters, which are no distribution and are not measured for it."""
    compared = [p for p in pairs if p.elements is not None or p.identical]
    known = [p for p in compared if p.kl is not None or p.identical]
    left = len(compared) - len(known)
    if not left:
        return ""
    if not any(p.kl is not None for p in known):
        return "; the KL divergence was not measured: compare the dumps again with this standard"
    return f"; {len(known)} of {len(compared)} pairs have a KL divergence, parameters that differ have none"


def _judged(pair: Pair, name: str, rule: PairRule) -> tuple[tuple[Cell, ...], Pair, str]:
    if pair.max_abs_err is None and not pair.nonfinite:
        return (None,) * len(rule.columns), pair, SKIPPED
    cells, word, why = rule.rule(_numbers(pair))
    if word in (NO_VERDICT, SKIPPED):
        return cells, pair, word
    message = f"{name}: {word}" + (f", {why}" if why else "")
    status = FAIL if word == ERROR else PASS
    return cells, replace(pair, status=status, message=message if word != PASS else ""), word


def _numbers(pair: Pair) -> Numbers:
    elements = None if pair.elements is None else dict(zip(ELEMENT_FIELDS, pair.elements, strict=True))
    values = {name: getattr(pair, name) for name in OF_PAIRS}
    size = max(prod(pair.shape), pair.nonfinite or 0)
    return Numbers.of(pair.dtype_mine or "", size, values, elements, pair.identical)
