"""One server against itself, as lines and json. Not here: what is concluded (gate/self/odd_one.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.text import count, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.gate.self.odd_one import PathFinding, SelfGate

MAX_ODD = 5
_HEADER = ("", "must be", "prompts", "tokens", "flips", "unequal", "mean", "worst", "allowed", "p", "")


def lines(gate: SelfGate) -> list[str]:
    """The verdict with the odd one's name, a row for each way, the prompts, and what was not compared."""
    out = [_headline(gate), "", "the same answers in another way, how far the log-probabilities are apart, in nats:"]
    rows = [_HEADER, *(_row(f) for f in gate.findings if f.ok is not None)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(_HEADER))]
    for row in rows:
        left = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        middle = [v.rjust(w) for v, w in zip(row[2:-1], widths[2:-1], strict=True)]
        out.append("  " + "  ".join([*left, *middle, row[-1]]).rstrip())
    for f in gate.findings:
        if f.odd:
            named = ", ".join(safe(name) for name in f.odd[:MAX_ODD])
            more = f" and {len(f.odd) - MAX_ODD:,} more" if len(f.odd) > MAX_ODD else ""
            out.append(f"{f.way.name} ({f.way.says}): {named}{more}")
    for f in gate.findings:
        if f.ok is None:
            out.append(f"not compared: {f.way.name}: {f.why}")
        out += [f"not compared: {f.way.name}: {n:,} {why}" for why, n in f.left_out.items()]
    return out + [f"note: {note}" for note in gate.notes]


def _headline(gate: SelfGate) -> str:
    known = [f for f in gate.findings if f.ok is not None]
    if not known:
        return "no verdict: nothing could be compared"
    if gate.verdict == "pass":
        equal = all(f.unequal == 0 for f in known if f.way.rule == "the same bits")
        said = "what must be the same to the bit is" if equal else "nothing differs by more than rounding"
        and_ = ", and nothing else differs by more than rounding" if equal else ""
        return f"PASS: {said}{and_} ({count(len(known), 'way')} of asking one server)"
    odd = [f for f in known if f.way.name in gate.odd]
    if len(odd) == 1:
        return f"FAIL: only {odd[0].way.name} differs: {odd[0].way.says}: {odd[0].why} (p = {num(odd[0].p, 2)})"
    named = _listed(gate.odd)
    rounding = [f for f in known if f.way.rule != "the same bits"]
    if gate.agree and len(odd) == len(rounding):
        return f"FAIL: {named} all differ from alone and agree with one another: one request at a time is the odd one"
    return f"FAIL: {named} differ" + (" from alone in the same way" if gate.agree else "")


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _row(f: PathFinding) -> tuple[str, ...]:
    sizes = [num(v) for v in (f.mean, f.worst, f.allowance)]
    verdict = ("PASS: " if f.ok else "FAIL: ") + f.why
    counts = [f"{n:,}" for n in (f.prompts, f.tokens, f.flips, f.unequal)]
    return (f.way.name, f.way.rule, *counts, *sizes, num(f.p, 2), verdict)


def to_json(gate: SelfGate) -> dict[str, Any]:
    """For programs. verdict is null where nothing was compared."""
    return {
        "schema": 1, "verdict": gate.verdict, "odd": list(gate.odd), "agree": gate.agree,
        "false_alarm_rate": gate.rate, "ways": [_finding(f) for f in gate.findings], "notes": list(gate.notes),
    }  # fmt: skip


def _finding(f: PathFinding) -> dict[str, Any]:
    value = asdict(f)
    way = value.pop("way")
    return {"name": way["name"], "says": way["says"], "must_be": way["rule"], "against": way["against"], **value}
