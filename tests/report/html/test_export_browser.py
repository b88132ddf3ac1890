"""The filtered pairs as a csv file, saved by a real Chromium under the page's policy, beside compare.csv."""

import csv
import io
import math

import pytest
from report_examples import CULPRIT, EVIL, comparison, pair, realistic

from vllm_accprobe.comparison.result import COLUMNS
from vllm_accprobe.report.table import cell, rows

pytestmark = pytest.mark.browser


def saved(page):
    """(file name, header, lines as lists of texts) of what the button saves."""
    with page.expect_download() as waiting:
        page.click("#save")
    text = waiting.value.path().read_bytes().decode("utf-8")
    assert text.endswith("\n")
    header, *lines = csv.reader(io.StringIO(text))
    return waiting.value.suggested_filename, header, lines


def written(pairs):
    """What compare.csv has of them, as texts."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows(pairs))
    return list(csv.reader(io.StringIO(out.getvalue())))


def same(ours, theirs):
    """The same cell: alike, or a number to the page's digits."""
    if ours == theirs:
        return True
    a, b = float(ours), float(theirs)
    return math.isclose(a, b, rel_tol=6e-3)


def test_what_is_shown_is_saved_in_its_order_with_all_columns(visit):
    result = realistic()
    page = visit(result)
    page.click("h1 .culprit")
    page.click("#status button[value=fail]")
    name, header, lines = saved(page)
    assert (name, header) == ("compare-filtered.csv", list(COLUMNS))
    failed = [p for p in result.pairs if p.tap == CULPRIT and p.status == "fail"]
    failed.sort(key=lambda p: -p.worst_row_rel_l2 / p.limit)
    expected = written(failed)
    assert len(lines) == len(expected) == 8
    for ours, theirs in zip(lines, expected, strict=True):
        assert all(map(same, ours, theirs)), (ours, theirs)


def test_every_pair_of_many_and_none_of_none(visit):
    page = visit(comparison(pairs=[pair(tap=f"t{i}", order=i) for i in range(9_000)]))
    _, _, lines = saved(page)
    at = COLUMNS.index("tap")
    assert [line[at] for line in lines] == [f"t{i}" for i in range(9_000)]
    page.fill("#find", "nothing has this")
    page.wait_for_selector("#save:disabled")


def test_formulas_quotes_and_what_is_not_finite(visit):
    texts = ["=1+1", "+1", "-1", "@x", "\tx", 'a,"b"', "a\nb", EVIL, "x", "NaN"]
    numbers = [math.nan, math.inf, -math.inf, None, 0.0, 1e-9, 5e20, 0.1, -2.5, 1.0]
    pairs = [
        pair(
            tap=t,
            golden=t,
            mine=t,
            message=t,
            order=i,
            status="fail",
            mean_abs_err=x,
            max_abs_index=((), (3, 37), None)[i % 3],
        )
        for i, (t, x) in enumerate(zip(texts, numbers, strict=True))
    ]
    page = visit(comparison(pairs=pairs))
    _, _, lines = saved(page)
    of = {name: [line[COLUMNS.index(name)] for line in lines] for name in COLUMNS}
    # Control characters are escaped on the page, so that nothing runs and nothing hides; the rest is compare.csv's.
    plain = {4: "\\tx", 6: "a\\nb", 7: EVIL.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")}
    expected = [plain.get(i, cell(t)) for i, t in enumerate(texts)]
    for name in ("tap", "golden", "mine", "message"):
        assert of[name] == expected
    assert expected[:4] == ["'=1+1", "'+1", "'-1", "'@x"]
    assert of["mean_abs_err"] == ["nan", "inf", "-inf", "", "0", "1e-9", "500000000000000000000", "0.1", "-2.5", "1"]
    assert of["max_abs_index"] == ["[]", "[3, 37]", ""] * 3 + ["[]"]
    assert of["shape"] == ["[4, 64]"] * 10
    assert of["identical"] == ["False"] * 10
    page = visit(comparison(pairs=[pair(tap=f"t{i}", rmse=-math.inf) for i in range(3)]))  # one value for all
    _, _, lines = saved(page)
    assert [line[COLUMNS.index("rmse")] for line in lines] == ["-inf"] * 3
