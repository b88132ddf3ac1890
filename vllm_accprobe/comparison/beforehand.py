"""What two dumps and the plan say by themselves, whatever the verdict: notes, and why there is nothing to compare.

The problem: other prompts, another model or a rank that stopped early explain a difference better than any operator.
The idea: pure functions from dumps and plan to sentences, said before all numbers.
Not here: the words of what was measured and judged (messages.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm_accprobe.align.requests import what_differs
from vllm_accprobe.comparison.measure.read import UNREAD
from vllm_accprobe.comparison.plan.units import Plan
from vllm_accprobe.comparison.states import cache_notes
from vllm_accprobe.dump.schema import SamplingParameters
from vllm_accprobe.dump.select import nearest
from vllm_accprobe.judge.floor import flow_unit
from vllm_accprobe.judge.floor import unit as rounding_unit

ALL_SKIPPED = "all pairs were skipped"


def notes(dumps: tuple[Any, Any], plan: Plan) -> list[str]:
    """What is true whatever the verdict: different prompts, images, dtypes; what stopped early."""
    out: list[str] = []
    names = [str(d.run["model"].get("class") or "") if isinstance(d.run.get("model"), dict) else "" for d in dumps]
    if all(names) and names[0] != names[1]:
        out.append(f"different models: {names[0][:80]} in golden, {names[1][:80]} in mine")
    for g, m in plan.requests.different:
        lengths = f" ({g.prompt_len} and {m.prompt_len})" if g.prompt != m.prompt else ""
        out.append(f"request {g.id!r} has {what_differs(g, m)}{lengths}: not compared")
    for side, left in (("golden", plan.requests.only_golden), ("mine", plan.requests.only_mine)):
        if left:
            out.append(f"{len(left)} requests have no partner and were not compared: only in {side}")
    out += plan.notes
    out += _parameters(plan)
    out += _dtypes(plan)
    out += cache_notes(dumps)
    if odd := plan.odd_copies():
        out.append(f"{odd} tensors that all ranks should hold alike differ between the ranks of golden")
    for side, dump in zip(("golden", "mine"), dumps, strict=True):
        out += [f"{side}: rank {rank} stopped early: {stop.reason}" for rank, stop in sorted(dump.stops.items())]
        out += [f"{side}: {problem}" for problem in dump.problems]
        if dump.errors:
            out.append(f"{side}: the probe noted {len(dump.errors)} errors of its own, first: {_first_error(dump)}")
        out += [f"{side}: {said}" for said in taps_effect(dump.run)]
    return out


def taps_effect(run: dict[str, Any]) -> list[str]:
    """What `accprobe doctor --graphs` has found of the taps of this very run, if it was one of its runs: a sentence.
    run: run.json, perhaps a stranger's."""
    changed: Any = run
    for key in ("engine", "graphs", "changed"):
        changed = changed.get(key) if isinstance(changed, dict) else None
    if not isinstance(changed, dict):
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


def _first_error(dump: Any) -> str:
    e = dump.errors[0]
    return f"{e.get('where', '?')}: {str(e.get('message', ''))[:200]}"


def _parameters(plan: Plan) -> list[str]:
    """One sentence where requests ask the sampler for something else: their tokens may then rightly differ. Grammars
    and the like are told by the lines of masks."""
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
    said = [f"{f} {getattr(golden, f)} in golden, {getattr(mine, f)} in mine" for f in differ if f not in lists] + lists
    more = f", and {len(found) - 1} more requests" if len(found) > 1 else ""
    what = "; ".join(f.replace("_", " ") for f in said) or "lists too long to be written down"
    return [f"request {request.id!r}{more}: other sampling parameters ({what}): flipped tokens are not judged"]


def _dtypes(plan: Plan) -> list[str]:
    """One sentence where the two runs compute in different precisions."""
    units = [u for u in plan.units if not u.is_param and u.golden and u.mine]
    mixed: Counter[tuple[str, str]] = Counter()
    for u in units:
        pair = (u.golden[0].first.dtype, u.mine[0].first.dtype)
        if pair[0] != pair[1] and rounding_unit(pair[0]) and rounding_unit(pair[1]):
            mixed[pair] += 1
    if not mixed:
        return []
    (g, m), n = mixed.most_common(1)[0]
    coarse = max((g, m), key=lambda d: flow_unit([d]))
    return [f"dtypes differ ({g} in golden, {m} in mine, {n} tensors): compared exactly, with the limits of {coarse}"]


def _examples(dumps: tuple[Any, Any]) -> list[str]:
    """A tap of either dump, one with values of the model where there is one."""
    found = [next((r for r in d.records if r.step is not None), d.records[0]).tap for d in dumps]
    return [_printable(tap) for tap in found]


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name[:120])


def unmatched(dumps: tuple[Any, Any], taps: str) -> str:
    """One line for NothingCompared where globs over taps left nothing: what is meant, perhaps."""
    known = [sorted({r.tap for r in dump.records}) for dump in dumps]
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
        there = _examples(dumps)
        return (
            "nothing could be compared: no tap of one dump has a partner in the other (or --taps matches none); "
            f"golden has {there[0]}, mine {there[1]}, for example"
        )
    if golden.requests and mine.requests and not plan.requests.pairs:
        return "nothing could be compared: no request of one dump has the same prompt as one of the other"
    reasons = ", ".join(f"{reason} ({n})" for reason, n in skipped.most_common(3))
    why = next((f": {d.unread[0]}" for d in dumps if skipped.get(UNREAD) and d.unread), "")
    return f"nothing could be compared: {reasons or ALL_SKIPPED}{why}"
