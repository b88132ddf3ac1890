"""Two servers' log-probabilities as lines and json.

Not here: the measures (gate/measure/).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.text import count, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.gate.measure.floor import Gate

MAX_FLIPS = 10
_HEADER = ("", "tokens", "flips", "median", "99%", "worst", "KL", "mean", "golden itself", "mine itself")


def lines(gate: Gate) -> list[str]:
    """The verdict, the table of conditions, the flips, and what was not compared."""
    out = [_headline(gate), "", "how far the log-probabilities of the chosen tokens are apart, in nats:"]
    rows = [_HEADER, *(tuple(_row(c)) for c in gate.cells)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(_HEADER))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True))]
        out.append("  " + "  ".join(cells).rstrip())
    return [*out, *_flips(gate), *_left_out(gate)]


def _headline(gate: Gate) -> str:
    if gate.verdict is None:
        return f"no verdict: {gate.why}"
    size = "" if gate.times is None else f", {num(gate.times)} times the floor"
    if gate.verdict == "pass" and gate.cells[0].worst == 0:
        return f"pass: the same numbers in every compared token ({count(gate.prompts, 'prompt')})"
    if gate.verdict == "pass":
        said = "pass: no further apart than each server is from itself in other batches"
    elif gate.times is None:
        said = "fail: they differ, and each is equal to itself in other batches"
    else:
        said = "fail: further apart than each server is from itself in other batches"
    if gate.only:
        said += f", in {gate.only} alone"
    return f"{said} ({count(gate.prompts, 'prompt')}, p = {num(gate.p, 2)}{size})"


def _row(c: Any) -> list[str]:
    sizes = (c.median, c.p99, c.worst, c.kl, c.mean, c.golden_self, c.mine_self)
    return [c.condition, f"{c.n:,}", f"{c.flips:,}", *map(num, sizes)]


def _flips(gate: Gate) -> list[str]:
    each = [(name, t) for name, tokens in gate.across.by_prompt.items() for t in tokens if t.flipped]
    flips = list({(name, t.ordinal): (name, t) for name, t in each}.values())  # both crossings may have it
    flips.sort(key=lambda f: -min(f[1].golden_margin or 0.0, f[1].mine_margin or 0.0))
    said = [
        f"  {safe(name)}, token {t.ordinal}: margins {num(t.golden_margin)} and {num(t.mine_margin)}"
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


def to_json(gate: Gate) -> dict[str, Any]:
    """For programs. verdict is null without a floor; p and times are null where there is none."""
    flips = Counter(name for name, tokens in gate.across.by_prompt.items() for t in tokens if t.flipped)
    cells = [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(c).items()}
        for c in gate.cells
    ]
    return {
        "schema": 1, "verdict": gate.verdict, "why": gate.why, "only": gate.only, "p": gate.p, "times": gate.times,
        "false_alarm_rate": gate.rate, "prompts": gate.prompts, "cells": cells, "flipped": dict(flips),
        "after_flips": gate.across.after, "left_out": dict(gate.across.skipped), "notes": list(gate.notes),
    }  # fmt: skip
