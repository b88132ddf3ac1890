"""One definition of each count: what is printed, written and shown about a comparison, held against its compare.csv.

Everything is counted again here from the csv's own cells, in other words than the code's: a pair is a row; it is
identical where its largest error is 0 (or all of it is not finite, on both sides alike), whatever its status."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from support.csv_rows import csv_rows

from vllm_accprobe.report import facts, html, markdown, notebook, table, terminal

LABELS = ("pairs compared", "pairs identical", "pairs skipped")
NAMES = ("compared", "pass", "fail", "identical", "bits", "skip")


def check(result: Any, out: Path) -> dict[str, int]:
    """Asserts that nothing shown of ``result`` contradicts its csv; returns the counts."""
    out.mkdir(parents=True, exist_ok=True)
    table.write_csv(result, out / "counts.csv")
    rows = csv_rows(out / "counts.csv")
    status = Counter(r["status"] for r in rows)
    compared = [r for r in rows if r["status"] != "skip"]
    bits = [r for r in rows if r["bit_identical"] == "True"]
    want = {
        "compared": len(compared), "pass": status["pass"], "fail": status["fail"],
        "identical": sum(_same(r) for r in compared), "bits": len(bits), "skip": status["skip"],
    }  # fmt: skip
    assert len(rows) == want["pass"] + want["fail"] + want["skip"]
    assert all((r["identical"] == "True") == (r["status"] != "skip" and _same(r)) for r in rows)
    assert all(r["identical"] == "True" and r["dtype_golden"] == r["dtype_mine"] for r in bits)

    c = result.to_json()["coverage"]
    keys = ("pairs", "pairs_passed", "pairs_failed", "pairs_identical", "pairs_bit_identical", "pairs_skipped")
    assert dict(zip(NAMES, (c[key] for key in keys), strict=True)) == want
    assert _cells(line.strip().split(": ", 1) for line in terminal.coverage(result) if ": " in line) == want
    told = [line for line in markdown.markdown_lines(result) if line.startswith("| pairs ")]
    assert _cells(line.strip("| ").split(" | ") for line in told) == want
    found = re.findall(r"<td>(pairs \w+)</td><td class=num>([^<]*)</td>", html.sections.coverage(result))
    assert _cells(found) == want
    _strip(html.sections.figures(result), want, result.verdict)

    page = re.sub(r"<[^>]+>", "", html.sections.pair_sum(result)).replace(" pairs", "")
    said = next(line for line in terminal.coverage(result) if line.startswith("  pairs: "))
    for text in (page, said.removeprefix("  pairs: "), facts.one_sum(result)):
        total, parts = text.split(" = ")
        each = [(_number(n), what) for n, what in (part.split(" ", 1) for part in parts.split(" + "))]
        assert _number(total) == len(rows) == sum(n for n, _ in each), text
        assert sum(n for n, what in each if what.startswith(("fail", "propagated"))) == want["fail"]
        assert {what: n for n, what in each}["pass"] == want["pass"]
    # Reasons of skipped pairs add up to them; what never was a pair is said apart.
    skips, others = (
        sum(n for k, n in facts.skip_rows(result) if k.startswith(what)) for what in ("pairs skipped, ", "left out, ")
    )
    assert skips == want["skip"]
    assert others + want["skip"] == sum(result.coverage["skipped"].values())

    sentences = [facts.headline(result), notebook.repr_html(result), *markdown.github_lines(result)]
    for text in sentences:
        for number, word in re.findall(r"([\d,]+) (identical|more skipped|bit-identical)", text):
            assert _number(number) == want[{"identical": "identical", "bit-identical": "bits"}.get(word, "skip")], text
        for number in re.findall(r"PASS: ([\d,]+) pair", text):
            assert _number(number) == want["pass"] == want["compared"], text
    assert f"pairs identical: {want['identical']:,}" in sentences[1]
    zero = {p.tap for p in html.depth(result) if {p.prefill, p.decode, p.other} <= {0.0, None} and not p.nonfinite}
    read = [r for r in compared if r["tap"] in zero and r["max_abs_err"] and r["role"].startswith("output")]
    excused = ("not judged", " flipped: ")  # a flipped token that is nobody's fault is said beside the chart
    seen = [r for r in read if not _same(r) and not any(e in r["message"] for e in excused)]
    assert seen == [], "the chart shows no error where the csv has one"
    return want


def _same(row: dict[str, str]) -> bool:
    if row["nonfinite_mismatch"] == "" or int(row["nonfinite_mismatch"]):
        return False  # nothing was read, or a NaN stands against a number
    return row["max_abs_err"] == "" or float(row["max_abs_err"]) == 0.0


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _cells(lines: Any) -> dict[str, int]:
    cells = dict(lines)
    numbers = (_number(n) for label in LABELS for n in re.findall(r"[\d,]*\d", cells[label]))
    return dict(zip(NAMES, numbers, strict=True))


def _strip(figures: str, want: dict[str, int], verdict: str) -> None:
    """The page's strip of figures."""
    strip = {k: (v, s) for k, v, s in re.findall(r"<dt>([^<]+)</dt><dd>([\d,]+) <small>([^<]*)</small>", figures)}
    shown = {name: f"{n:,}" for name, n in want.items()}
    if verdict == "pass":
        assert strip["pairs compared"] == (shown["compared"], f"{shown['identical']} identical")
    else:
        assert strip["pairs failed"] == (shown["fail"], f"of {shown['compared']} compared")
        assert strip["pairs identical"] == (shown["identical"], f"{shown['bits']} bit-identical")
    assert strip["pairs skipped"][0] == shown["skip"]
