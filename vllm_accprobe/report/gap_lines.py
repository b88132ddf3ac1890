"""Two servers' log-probabilities as lines and json.

Not here: the measures (gate/measure/).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.text import count, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.gate.measure.gating import Gate

MAX_FLIPS = 10
_HEADER = (
    "", "tokens", "flips", "median", "99%", "worst", "KL", "mean", "golden itself", "mine itself", "distance", "floor"
)  # fmt: skip
NO_FLOOR = (
    "the limit is golden's own batching alone: an honest card that rounds in another way fails, too; --floor (golden's "
    "model in another dtype, or on another card that is known to be right) makes it a limit for rounding"
)


def lines(gate: Gate, floors: Sequence[str] = ()) -> list[str]:
    """The verdict, its condition, the floors, the table of conditions, the flips, and what was not compared. floors:
    their names."""
    out = [headline(gate)]
    if said := shown(gate):
        out.append(said)
    if gate.condition is not None and gate.condition.also:
        out.append("or, explaining it as well: " + "; ".join(c.sentence for c in gate.condition.also))
    if gate.verdict is not None and not gate.floors and (gate.verdict == "fail" or gate.cells[0].worst):
        out.append(NO_FLOOR)
    if gate.differs is not None:
        every = "; or ".join(c.sentence for c in (gate.differs, *gate.differs.also))
        out.append(f"what differs at all, though rounding may explain how far: {every}")
    out += _floors(gate, floors)
    if gate.forced:
        out.append(f"mine's tokens were golden's ({safe(gate.forced)}): a flip is a token that is not mine's own best")
    out += [
        "",
        "how far the log-probabilities of the chosen tokens are apart, in nats (distance and floor: root mean square",
        "over all listed tokens, of mine from the nearest right server, and of the right ones from one another):",
    ]
    rows = [_HEADER, *(tuple(_row(c)) for c in gate.cells)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(_HEADER))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True))]
        out.append("  " + "  ".join(cells).rstrip())
    return [*out, *_flips(gate), *_left_out(gate)]


def headline(gate: Gate) -> str:
    """``FAIL: further away than ..., only decode (24 prompts, p = 0.0001, 6.1 times the floor)``."""
    if gate.verdict is None and gate.p is not None:
        return f"UNDECIDED: no difference is seen (p = {num(gate.p, 2)}), but {gate.why}"
    if gate.verdict is None:
        return f"no verdict: {gate.why}"
    if gate.verdict == "pass" and gate.cells[0].worst == 0:
        return f"PASS: the same numbers in every compared token ({count(gate.prompts, 'prompt')})"
    size = "" if gate.times is None else f", {num(gate.times)} times the floor"
    against = "servers known to be right are from one another" if gate.floors else "golden is from itself in batches"
    if gate.verdict == "fail":
        said = f"FAIL: further away than {against}"
        said += f", {gate.condition.sentence}" if gate.condition else ""
    else:
        said = f"PASS: no further away than {against}"
        if gate.floors and gate.p_batching is not None and gate.p_batching <= gate.rate:
            said += f", though further than golden's own batches (p = {num(gate.p_batching, 2)})"
    return f"{said} ({count(gate.prompts, 'prompt')}, p = {num(gate.p, 2)}{size})"


def shown(gate: Gate) -> str | None:
    """``these 24 prompts would have shown 1.7 times the floor in all tokens, 2.2 in prefill``: what a pass excludes."""
    if gate.verdict != "pass" or gate.power is None:
        return None
    sizes = [f"{num(one.times, 2)} times the floor in {one.condition}" if one.times else
             f"any difference in {one.condition}" for one in gate.power.shown]  # fmt: skip
    return f"these {count(gate.prompts, 'prompt')} would have shown {', '.join(sizes)}"


def _floors(gate: Gate, names: Sequence[str]) -> list[str]:
    near = "golden" if gate.nearest == 0 else f"floor {gate.nearest - 1}"
    said = []
    for i, size in enumerate(gate.floors):
        name = f" ({safe(names[i])})" if i < len(names) else ""
        said.append(f"floor {i}{name}: {num(size)} nats from golden")
    return [*said, f"mine is nearest to {near}"] if said else []


def _row(c: Any) -> list[str]:
    sizes = (c.median, c.p99, c.worst, c.kl, c.mean, c.golden_self, c.mine_self, c.away, c.floor)
    return [c.condition, f"{c.n:,}", f"{c.flips:,}", *map(num, sizes)]


def _flips(gate: Gate) -> list[str]:
    each = [(name, t) for name, tokens in gate.across.by_prompt.items() for t in tokens if t.flipped]
    flips = list({(name, t.position): (name, t) for name, t in each}.values())  # several passes may have it
    flips.sort(key=lambda f: -min(f[1].golden_margin or 0.0, f[1].mine_margin or 0.0))
    said = [
        f"  {safe(name)}, {'position' if t.scored else 'token'} {t.position if t.scored else t.ordinal}: "
        f"margins {num(t.golden_margin)} and {num(t.mine_margin)}"
        for name, t in flips[:MAX_FLIPS]
    ]
    if not flips:
        return []
    head = f"{count(len(flips), 'token')} flipped, those with the largest margins first; a small margin is a coin toss:"
    return [head, *said]


def _left_out(gate: Gate) -> list[str]:
    out = [f"not compared: {count(gate.across.after, 'token')} after a flip"] if gate.across.after else []
    out += [f"not compared: {n:,} {what}" for what, n in gate.across.skipped.items()]
    return out + [f"note: {note}" for note in gate.notes]


def to_json(gate: Gate, floors: Sequence[str] = ()) -> dict[str, Any]:
    """For programs. verdict is null without a floor, and with too few prompts; p and times are null where there is
    none."""
    flips = Counter(name for name, tokens in gate.across.by_prompt.items() for t in tokens if t.flipped)
    names = [*floors, *[""] * len(gate.floors)]
    return {
        "schema": 1, "verdict": gate.verdict, "why": gate.why,
        "condition": None if gate.condition is None else asdict(gate.condition),
        "differs": None if gate.differs is None else asdict(gate.differs), "p": gate.p,
        "p_batching": gate.p_batching, "times": gate.times,
        "power": None if gate.power is None else asdict(gate.power), "false_alarm_rate": gate.rate,
        "prompts": gate.prompts, "forced": gate.forced, "nearest": gate.nearest,
        "floors": [{"name": names[i], "distance": _finite(size)} for i, size in enumerate(gate.floors)],
        "cells": [{k: _finite(v) for k, v in asdict(c).items()} for c in gate.cells],
        "worst": [{k: _finite(v) for k, v in asdict(w).items()} for w in gate.worst],
        "flipped": dict(flips), "after_flips": gate.across.after, "left_out": dict(gate.across.skipped),
        "notes": list(gate.notes),
    }  # fmt: skip


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
