"""A bisection's plan and result as lines and json.

Not here: the search (gate/bisect/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.text import count, num, safe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_accprobe.gate.bisect.axes import ServerSetting
    from vllm_accprobe.gate.bisect.search import Cause, Found
    from vllm_accprobe.gate.bisect.trying import TrialRow

def plan_lines(axes: Sequence[ServerSetting], usual: int, most: int, kept: int) -> list[str]:
    """What is varied, and how many runs that takes."""
    if not axes:
        return ["nothing to vary: every setting of the command is plain already"]
    rows = [("setting", "the command", "plain"), *((a.name, a.value, a.plain) for a in axes)]
    widths = [min(max(len(r[i]) for r in rows), 48) for i in range(3)]
    out = [f"{count(len(axes), 'setting')} of the command can be made plain:"]
    for axis, row in zip([None, *axes], rows, strict=True):
        cells = "  ".join(safe(v).ljust(w) for v, w in zip(row, widths, strict=True)).rstrip()
        parts = f"  ({count(len(axis.parts), 'part')})" if axis and axis.parts else ""
        out.append(f"  {cells}{parts}")
    out.append(
        f"about {usual} runs for one culprit, {most} at the most"
        + f"{', and those of its parts' * any(a.parts for a in axes)}; {2 ** len(axes):,} combinations"
        + (f"; {count(kept, 'run')} of a bisection before {'is' if kept == 1 else 'are'} kept" if kept else "")
    )
    return out


def plan_json(axes: Sequence[ServerSetting], usual: int, most: int, kept: int) -> dict[str, Any]:
    """`plan_lines` for programs; there is no verdict."""
    return {
        "schema": 1, "verdict": None, "axes": [_axis(a) for a in axes], "runs_expected": usual, "runs_most": most,
        "kept": kept, "combinations": 2 ** len(axes),
    }  # fmt: skip


def _axis(a: ServerSetting) -> dict[str, Any]:
    return {"name": a.name, "value": a.value, "plain": a.plain, "parts": len(a.parts)}


def lines(found: Found, rows: Sequence[TrialRow], seconds: float, line: Callable[..., str]) -> list[str]:
    """The verdict, each set with its commands, and what could not be tried. line: the command for (names as in the
    command, axes that are apart), None for those of the command itself."""
    out = [_headline(found)]
    for cause in found.causes:
        out += ["", *_cause(cause, found, line)]
    ran = sum(not row.tried.kept for row in rows)
    before = f", {len(rows) - ran} of them kept from before" if ran < len(rows) else ""
    out += ["", f"{count(len(rows), 'run')}{before}, of {2 ** len(found.axes):,} combinations; {_time(seconds)}"]
    if found.equal:
        out.append(f"left out, because both engines' logs tell the same: {', '.join(found.equal)}")
    if found.held:
        out.append(f"left as in the command, because plain does not start without: {', '.join(found.held)}")
    unresolved = [row for row in rows if row.outcome.kind == "unresolved"]
    if unresolved:
        out.append(f"{count(len(unresolved), 'configuration')} could not be tried:")
        out += [f"  {', '.join(row.bad) or 'everything plain'}: {safe(row.outcome.why, 400)}" for row in unresolved]
    if any(row.outcome.smaller for row in rows):
        out.append("runs that differ, but by much less than the command, count as pass (--share)")
    return out


def _headline(found: Found) -> str:
    if found.verdict is None:
        return f"nothing could be tried: {safe(found.why, 400)}"
    bad = found.bad
    far = f" ({num(bad.size)} nats from golden)" if bad is not None and bad.size else ""
    if found.verdict == "same":
        return "nothing differs: the command gives what golden gives, so nothing among these settings makes it"
    if found.verdict == "elsewhere":
        plain = "" if found.plain is None else f" ({num(found.plain.size)} nats)"
        return f"none of these settings: the plain configuration fails, too{plain}, as the command does{far}"
    sets = " | ".join(" + ".join(cause.names) for cause in found.causes)
    said = f"found: {safe(sets, 400)}{far}"
    return f"inconsistent: {said}; an outcome changed when it was repeated" if found.verdict == "inconsistent" else said


def _cause(cause: Cause, found: Found, line: Callable[..., str]) -> list[str]:
    out = []
    for axis in cause.settings:
        out.append(f"  {safe(axis.name)}: {safe(axis.value)} (plain: {safe(axis.plain)})")
    without = cause.without
    out.append(f"  this set alone, everything else plain: {cause.alone.kind} ({num(cause.alone.size)} nats)")
    it = "it and the sets before" if cause.before else "it"
    out.append(f"  the command without {it}: {without.kind} ({num(without.size)} nats)")
    for name, outcome in cause.each.items():
        out.append(f"  the command without {safe(name)} alone: {outcome.kind}")
    for name, (low, high) in cause.limits.items():
        out.append(f"  {safe(name)}: {low:,} fails, {high:,} passes")
    out += [f"  not the same twice: {said}" for said in cause.flaky]
    bad, plain, passes = line(cause, "fails"), line(cause, "plain"), line(cause, "passes")
    out += ["  fails:", f"    {bad}", "  passes, with everything plain:", f"    {plain}"]
    if without.kind == "pass":
        out += [f"  passes, your command without {it}:", f"    {passes}"]
    return [*out, "  to the operator:", f"    {dig(plain, bad)}"]


def dig(golden: str, mine: str) -> str:
    """What is typed next."""
    import shlex

    return f"accprobe gate {shlex.quote(golden)} {shlex.quote(mine)} --localize"


def _time(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def to_json(found: Found, rows: Sequence[TrialRow], seconds: float, line: Callable[..., str]) -> dict[str, Any]:
    """For programs. verdict: found, same, elsewhere, inconsistent, or null."""

    def outcome(o: Any) -> dict[str, Any] | None:
        if o is None:
            return None
        return {"outcome": o.kind, "size": o.size, "p": o.p, "smaller": o.smaller, "why": o.why or None}

    causes = []
    for cause in found.causes:
        commands = {what: line(cause, what) for what in ("fails", "plain", "passes")}
        causes.append({
            "settings": [{"name": a.name, "value": a.value, "plain": a.plain} for a in cause.settings],
            "alone": outcome(cause.alone), "without": outcome(cause.without),
            "each": {n: outcome(o) for n, o in cause.each.items()}, "limits": cause.limits, "flaky": cause.flaky,
            "commands": commands | {"dig": dig(commands["plain"], commands["fails"])},
        })  # fmt: skip
    return {
        "schema": 1, "verdict": found.verdict, "why": found.why or None,
        "axes": [_axis(a) for a in found.axes],
        "equal": list(found.equal), "held": list(found.held), "command": outcome(found.bad),
        "plain": outcome(found.plain), "causes": causes, "runs": len(rows),
        "ran": sum(not row.tried.kept for row in rows), "combinations": 2 ** len(found.axes),
        "seconds": round(seconds, 1),
        "trials": [
            {"as_in_the_command": list(row.bad), "values": dict(row.values), "folder": row.tried.key,
             "seconds": row.tried.seconds, "kept": row.tried.kept, "command": row.command,
             "log": str(row.tried.log) if row.tried.log else None} | (outcome(row.outcome) or {})
            for row in rows
        ],
    }  # fmt: skip
