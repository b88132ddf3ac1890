"""One fault, one factor: what terminal, page, csv and json say of an origin, and sentences that contradict each other.

The problem: a reader who finds 28x in the head, 3.2x in the table and 4.4x in a chart believes none of them. The idea:
of every comparison of the freeze, the factor of each origin in compare.json (``times``) must be that of its worst pair
in compare.csv, that of the verdict, of its button and of the page's head, and that of its mark in the page's chart,
above which no line of the chart lies; and no report may hold two sentences of which one denies the other. This module
imports nothing of the package.
"""

import base64
import csv
import gzip
import json
import math
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

_DENIED = (
    ("compared, not checked", r"replay: [\d,]+ outputs of mine checked, "),
    ("compared, not checked", "replaying the operator on mine's own inputs"),
    (r"proved: [^\n]* the error bound of its own inputs", "right for its own inputs; what is said of it is inferred"),
    ("no operator is wrong", "wrong for its own inputs\n\nFAIL"),
    (r"\nPASS: ", r"\nFAIL: "),
)
"""Sentences of which a report may hold one at most, as patterns."""


def problems(folder: Path, said: str) -> list[str]:
    """Of all that a case wrote below ``folder``; said: what it printed."""
    reports = re.split(r"(?m)^\$ accprobe ", said)
    found = [f"contradiction: {a!r} and {b!r}" for report in reports for a, b in _DENIED
             if re.search(a, report) and re.search(b, report)]  # fmt: skip
    for path in sorted(folder.rglob("compare.json")):
        # the report that was written there last, by its command line
        own = [r for r in reports if re.search(rf"\A[^\n]* -o \S*/{re.escape(path.parent.name)}( |\n)", r)]
        found += [f"{path.parent.name}: {p}" for p in _of_one(path.parent, own[-1] if own else "")]
    return found


def _of_one(folder: Path, said: str) -> Iterator[str]:
    result = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    page = (folder / "compare.html").read_text(encoding="utf-8") if (folder / "compare.html").exists() else ""
    with (folder / "compare.csv").open(encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    for number, origin in enumerate(result["origins"], 1):
        own = [r for r in rows if (r["tap"], r["role"]) == (origin["module"], origin["role"])]
        if own and all(r["identical"] == "True" for r in own):
            yield f"origin {number}: all of its pairs are identical"
        times = origin.get("times")
        if not isinstance(times, (int, float)) or not isinstance(origin["created"], (int, float)):
            continue
        expected = shown(float(times))
        worst = [x for r in own if r["status"] == "fail" and (x := _severity(r)) is not None]
        if worst and shown(max(worst)) != expected:
            yield f"origin {number}: json {expected}, csv {shown(max(worst))}"
        for heading in re.findall(rf"(?m)^FAIL: {re.escape(origin['module'])} .*$", said):
            factor = re.search(rf"\({re.escape(expected)}x[,)]", heading)
            if number == 1 and "has another constant" not in heading and not factor:
                yield f"origin 1: json {expected}, terminal {heading}"
        if page:
            yield from _on_the_page(page, number, origin, expected)


def _on_the_page(page: str, number: int, origin: dict[str, Any], expected: str) -> Iterator[str]:
    button = re.search(rf'data-origin="{number - 1}".*?<small>(.*?)</small>', page, re.S)
    if button and f"{expected}×" not in unescape(button[1]) and "NaN" not in button[1]:
        yield f"origin {number}: json {expected}, its button {button[1]}"
    cell = re.search(r"<dt>Over the limit</dt><dd>(.*?)</dd>", page)
    if number == 1 and cell and cell[1].strip() != f"{expected}×":
        yield f"origin 1: json {expected}, the page's head {cell[1]}"
    points = [p for p in _block(page, "view")["depth"]["points"] if p["origin"] == number]
    for p in points:
        phases = [x for k in ("created", "prefill", "decode", "other") if (x := p[k]) is not None]
        if p["created"] is not None and shown(p["created"]) != expected:
            yield f"origin {number}: json {expected}, the chart {shown(p['created'])}"
        if phases and p["created"] is not None and max(phases) > p["created"] * (1 + 1e-6):
            yield f"origin {number}: the chart shows {shown(max(phases))} above its {expected}"


def _block(page: str, name: str) -> dict[str, Any]:
    """A data block of the page."""
    text = re.search(rf'<script[^>]*id="{name}-json"[^>]*>(.*?)</script>', page, re.S)
    assert text is not None, name
    return json.loads(gzip.decompress(base64.b64decode(text[1])))


def _severity(row: dict[str, str]) -> float | None:
    """As comparison/pair.py says."""
    if row["measure"] in ("created", "row_rel_l2", "element", "row_norm_ratio") and row["allowed"] and row["measured"]:
        measured, allowed = float(row["measured"]), float(row["allowed"])
        measured = abs(measured - 1.0) if row["measure"] == "row_norm_ratio" else measured
        return max(measured / allowed, 1.0) if allowed and math.isfinite(measured) else None
    return None


def shown(x: float) -> str:
    """As report/text.py's factor."""
    if x < 10:
        return f"{x:.3g}"
    return f"{x:,.0f}" if x < 1e6 else f"{x:.0e}"
