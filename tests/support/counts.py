"""One definition of each count: what is printed, written and shown about a comparison, held against its compare.csv.

Everything is counted again here from the csv's own cells, in other words than the code's: a pair is a row; it is
identical where its largest error is 0 (or all of it is not finite, on both sides alike), whatever its status."""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_accprobe.report import facts, html, markdown, notebook, table, terminal

LABELS = ("pairs compared", "pairs identical", "pairs skipped")


def check(result: Any, out: Path) -> dict[str, int]:
    """Asserts that nothing shown of ``result`` contradicts its csv; returns the counts."""
    out.mkdir(parents=True, exist_ok=True)
    table.write_csv(result, out / "counts.csv")
    with open(out / "counts.csv", newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    status = Counter(r["status"] for r in rows)
    compared = [r for r in rows if r["status"] != "skip"]
    want = {
        "compared": len(compared), "pass": status["pass"], "fail": status["fail"], "skip": status["skip"],
        "identical": sum(_same(r) for r in compared),
        "bits": sum(r["bit_identical"] == "True" for r in compared),
    }  # fmt: skip
    assert len(rows) == want["pass"] + want["fail"] + want["skip"]
    assert want["compared"] == want["pass"] + want["fail"]
    assert all((r["identical"] == "True") == (r["status"] != "skip" and _same(r)) for r in rows)
    bits = [r for r in rows if r["bit_identical"] == "True"]
    assert all(r["identical"] == "True" and r["dtype_golden"] == r["dtype_mine"] for r in bits)

    for shown in (_terminal(result), _markdown(result), _page(result), _json(result)):
        assert shown == want
    page = re.sub(r"<[^>]+>", "", html.sections.pair_sum(result)).replace(" pairs", "")
    said = next(line for line in terminal.coverage(result) if line.startswith("  pairs: "))
    for text in (page, said.removeprefix("  pairs: "), facts.one_sum(result)):
        total, parts = text.split(" = ")
        each = [(_number(n), what) for n, what in (part.split(" ", 1) for part in parts.split(" + "))]
        assert _number(total) == len(rows) == sum(n for n, _ in each), text
        assert sum(n for n, what in each if what.startswith(("fail", "propagated"))) == want["fail"]
        assert {what: n for n, what in each}["pass"] == want["pass"]
    # Reasons of skipped pairs add up to them; what never was a pair is said apart.
    reasons = Counter(r["message"] for r in rows if r["status"] == "skip")
    said = [(k, n) for k, n in facts.skip_rows(result) if k.startswith("pairs skipped, ")]
    assert sum(n for _, n in said) == want["skip"] == sum(reasons.values())
    others = sum(n for k, n in facts.skip_rows(result) if k.startswith("left out, "))
    assert others + want["skip"] == sum(result.coverage["skipped"].values())

    sentences = [facts.headline(result), notebook.repr_html(result), *markdown.github_lines(result)]
    for text in sentences:
        for number, word in re.findall(r"([\d,]+) (identical|more skipped|bit-identical)", text):
            assert _number(number) == want[{"identical": "identical", "bit-identical": "bits"}.get(word, "skip")], text
        for number in re.findall(r"PASS: ([\d,]+) pair", text):
            assert _number(number) == want["pass"] == want["compared"], text
    assert f"pairs identical: {want['identical']:,}" in sentences[1]
    points = html.depth(result)
    zero = {p.tap for p in points if {p.prefill, p.decode, p.other} <= {0.0, None} and not p.nonfinite}
    read = [r for r in compared if r["tap"] in zero and r["max_abs_err"] and r["role"].startswith("output")]
    excused = ("not judged", " flipped: ")  # a flipped token that is nobody's fault is said beside the chart
    assert all(_same(r) or any(e in r["message"] for e in excused) for r in read), (
        "the chart shows no error where the csv has one"
    )
    return want


def _same(row: dict[str, str]) -> bool:
    if row["nonfinite_mismatch"] == "" or int(row["nonfinite_mismatch"]):
        return False  # nothing was read, or a NaN stands against a number
    return row["max_abs_err"] == "" or float(row["max_abs_err"]) == 0.0


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _table(pairs: dict[str, str]) -> dict[str, int]:
    compared, identical, skipped = (list(map(_number, re.findall(r"[\d,]*\d", pairs[k]))) for k in LABELS)
    names = ("compared", "pass", "fail", "identical", "bits", "skip")
    return dict(zip(names, [*compared, *identical, *skipped], strict=True))


def _ordered(found: dict[str, int]) -> dict[str, int]:
    return {k: found[k] for k in ("compared", "pass", "fail", "skip", "identical", "bits")}


def _terminal(result: Any) -> dict[str, int]:
    cells = dict(line.strip().split(": ", 1) for line in terminal.coverage(result) if ": " in line)
    return _ordered(_table(cells))


def _markdown(result: Any) -> dict[str, int]:
    found = [line.strip("| ").split(" | ") for line in markdown.markdown_lines(result) if line.startswith("| pairs ")]
    return _ordered(_table(dict(found)))


def _page(result: Any) -> dict[str, int]:
    """Its strip of figures and its table, which must agree."""
    page = html.sections.coverage(result)
    found = dict(re.findall(r"<td>(pairs \w+)</td><td class=num>([^<]*)</td>", page))
    strip = {k: (v, s) for k, v, s in re.findall(r"<dt>([^<]+)</dt><dd>([\d,]+) <small>([^<]*)</small>",
                                                 html.sections.figures(result))}  # fmt: skip
    shown = _ordered(_table(found))
    if result.verdict == "pass":
        assert strip["pairs compared"] == (f"{shown['compared']:,}", f"{shown['identical']:,} identical")
    else:
        assert strip["pairs failed"] == (f"{shown['fail']:,}", f"of {shown['compared']:,} compared")
        assert strip["pairs identical"] == (f"{shown['identical']:,}", f"{shown['bits']:,} bit-identical")
    assert _number(strip["pairs skipped"][0]) == shown["skip"]
    return shown


def _json(result: Any) -> dict[str, int]:
    c = result.to_json()["coverage"]
    return {"compared": c["pairs"], "pass": c["pairs_passed"], "fail": c["pairs_failed"], "skip": c["pairs_skipped"],
            "identical": c["pairs_identical"], "bits": c["pairs_bit_identical"]}  # fmt: skip
