"""What repeated runs and batches found: lines for a terminal, JSON, and a page.

The problem: thousands of outputs are equal and a few are not; a person wants those few, the worst first, and how many
were checked. The idea: pure functions of opcheck's rows: wrong ones, then remarks, each operator once with its worst
output, a line for each class, what was not run and why.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_accprobe.opcheck.plain_csv import safe
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, PASS, WARNING, CheckResult
from vllm_accprobe.opcheck.run.table import Totals, by_class

REPEAT_FILES, ROWS_FILES = ("repeat.json", "repeat.html"), ("rows.json", "rows.html")
SCHEMA = 1


def mode_of(repeat: int, sizes: Sequence[str]) -> str:
    """``20 runs``, or ``rows alone and in batches of 1, N``."""
    return f"{repeat} runs" if repeat else f"rows in batches of {', '.join(sizes)}"


def lines(rows: Sequence[CheckResult], totals: Totals, mode: str, most: int | None = 10) -> list[str]:
    """The whole report. most: how many operators of each kind are shown; None: all."""
    bad, remarks = by_tap(rows, FAIL), by_tap(rows, WARNING)
    runs = "runs" in mode
    n = totals.statuses.get(PASS, 0) + totals.statuses.get(FAIL, 0) + totals.statuses.get(WARNING, 0)
    what = f"{totals.checked:,} of {totals.calls:,} calls run here, {mode}: "
    remark = "differ within rounding" if runs else "are not batch-invariant within rounding"
    fault = "race or return memory that was never written" if runs else "depend on their batch beyond rounding"
    equal = totals.statuses.get(PASS, 0)
    counts = f"{equal:,} of {n:,} outputs are equal to the bit"
    out = [f"{'FAIL' if bad else 'PASS'}: {what}{counts}"]
    for word, groups in ((fault, bad), (remark, remarks)):
        if groups:
            out.append(f"{len(groups)} {'operator' if len(groups) == 1 else 'operators'} that {_one(word, groups)}:")
        for group in groups[:most]:
            worst = max(group, key=lambda r: r.severity)
            calls = len({(r.step, r.call) for r in group})
            more = f" (and {calls - 1} more of its calls)" if calls > 1 else ""
            out.append(f"  {safe(worst.tap)}  {safe(worst.cls)}  {safe(worst.role)}: {safe(worst.message, 1000)}{more}")
        if most is not None and len(groups) > most:
            out.append(f"  ... {len(groups) - most} more: opcheck.csv has all, --verbose shows them")
    out += ["", "class                                calls' outputs  equal  remark   fail"]
    for cls, mine in by_class(rows):
        count = [sum(r.status == s for r in mine) for s in (PASS, WARNING, FAIL)]
        out.append(f"{safe(cls, 36):<36} {sum(count):>14} {count[0]:>6} {count[1]:>7} {count[2]:>6}")
    crashed = by_tap(rows, ERROR)
    left = [f"  {n:>7}  calls: {safe(why, 200)}" for why, n in totals.skipped.items()]
    left += [f"  {n:>7}  rows: {safe(why)}" for why, n in totals.rows_skipped.items()]
    if crashed:
        out += ["", "could not be run:"]
        out += [f"  {safe(g[0].tap)}  {safe(g[0].cls)}: {safe(g[0].message, 400)}" for g in crashed[:most]]
    return out + (["", "not run:", *left] if left else [])


def _one(words: str, groups: Sequence[Any]) -> str:
    if len(groups) > 1:
        return words
    for many, one in (("differ ", "differs "), ("are not", "is not"), ("race or hand", "races or hands"),
                      ("depend on their", "depends on its")):  # fmt: skip
        words = words.replace(many, one)
    return words


def by_tap(rows: Iterable[CheckResult], status: str) -> list[list[CheckResult]]:
    """Rows of this status by operator, those first whose worst is furthest beyond what is allowed."""
    groups: dict[tuple[int, str], list[CheckResult]] = {}
    for r in rows:
        if r.status == status:
            groups.setdefault((r.rank, r.tap), []).append(r)
    return sorted(groups.values(), key=lambda g: -max(r.severity for r in g))


def to_json(rows: Sequence[CheckResult], totals: Totals, mode: str) -> dict[str, Any]:
    """outputs: those that are not equal, each with what was found (kind, runs, sizes, places)."""

    def entry(r: CheckResult) -> dict[str, Any]:
        found = json.loads(r.evidence) if r.evidence.startswith("{") else {}
        return {
            "tap": r.tap, "class": r.cls, "role": r.role, "rank": r.rank, "step": r.step, "call": r.call, "id": r.id,
            "dtype": r.dtype, "shape": list(r.shape), "status": r.status, "message": r.message, **found,
        }  # fmt: skip

    bad = any(r.status in (FAIL, ERROR) for r in rows)
    found: dict[str, Any] = _plain({
        "schema": SCHEMA, "verdict": "fail" if bad else "pass", "mode": mode,
        "calls": totals.calls, "run": totals.checked,
        "outputs": {"equal": totals.statuses.get(PASS, 0), "remark": totals.statuses.get(WARNING, 0),
                    "fail": totals.statuses.get(FAIL, 0)},
        "skipped": dict(totals.skipped),
        "found": [entry(r) for status in (FAIL, ERROR, WARNING) for g in by_tap(rows, status) for r in g],
    })  # fmt: skip
    return found


def _plain(value: Any) -> Any:
    """The same with infinities and NaN as text: JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse}"
    "td,th{padding:.3em .7em;border-bottom:1px solid #ccc;text-align:left;vertical-align:top}"
    ".fail{color:#b00020}.warning{color:#8a6100}pre{background:#f4f4f4;padding:1em;overflow:auto}"
)


def page(rows: Sequence[CheckResult], report: Sequence[str], title: str) -> str:
    """A page of its own, without scripts: the lines of the terminal, and a table of what is not equal."""
    cells = ("status", "tap", "cls", "role", "dtype", "shape", "message")
    body = []
    for status in (FAIL, ERROR, WARNING):
        for group in by_tap(rows, status):
            for r in group:
                values = "".join(f"<td>{html.escape(safe(str(getattr(r, c)), 1000))}</td>" for c in cells)
                body.append(f'<tr class="{status}">{values}</tr>')
    head = "".join(f"<th>{html.escape({'cls': 'class'}.get(c, c))}</th>" for c in cells)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>" if body else ""
    text = html.escape("\n".join(report))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1><pre>{text}</pre>{table}</body></html>\n"
    )
