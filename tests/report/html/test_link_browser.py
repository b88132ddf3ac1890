"""The view in the address, in a real Chromium: a link opens the same view, and a hostile one is nothing but text."""

import csv
import io
import math

import pytest
from on_the_page import click_cell, column, shown
from report_examples import CULPRIT, EVIL, comparison, pair, realistic, with_rows

from vllm_accprobe.comparison.pair import Pairs
from vllm_accprobe.comparison.result import COLUMNS
from vllm_accprobe.report.table import cell, pair_lines

pytestmark = pytest.mark.browser


SETTLED = 400
"""Milliseconds after which the address has followed the view."""


def address(page):
    page.wait_for_timeout(SETTLED)
    return page.evaluate("location.href")


def view(page):
    """All that a person sees of the parts whose state is in the address."""
    return {
        "shown": shown(page),
        "rows": column(page, 1)[:10],
        "steps": column(page, 3)[:10],
        "chip": page.inner_text("#tap-chip") if page.is_visible("#tap-chip") else None,
        "find": page.input_value("#find"),
        "status": page.get_attribute("#status button[aria-pressed=true]", "value"),
        "sort": page.eval_on_selector_all(
            "#head th", "all => all.map(t => [t.dataset.id, t.getAttribute('aria-sort')]).filter(x => x[1] !== 'none')"
        ),
        "detail": page.inner_text("#detail") if page.is_visible("#detail") else None,
        "at": page.get_attribute("#grid", "aria-activedescendant"),
        "request": page.input_value("#heat-request"),
        "level": page.inner_text("#heat-level"),
        "cell": page.inner_text("#heat-readout"),
    }


def again(visit, url):
    """Another page of the same browser at this address, drawn."""
    other = visit.at(url)
    other.wait_for_selector("#heat[data-ready]")
    return other


def test_a_link_opens_the_same_view(visit):
    page = visit(with_rows(realistic()))
    page.wait_for_selector("#heat[data-ready]")
    assert "#" not in address(page)  # where nothing was chosen there is nothing to say
    page.select_option("#heat-request", index=2)
    page.locator("#heat").scroll_into_view_if_needed()
    click_cell(page, 4, 2, "model.layers.3, position 50")  # c has ten tokens: 48 to 57
    click_cell(page, 11, 4, f"{CULPRIT}, position 52")
    page.click("#status button[value=fail]")
    page.click("#head th[data-id=value] button")
    url = address(page)
    assert url.startswith("file:///")
    seen = view(page)
    assert seen["chip"].startswith(f"tap {CULPRIT}, step 6")
    assert (seen["request"], seen["level"], seen["status"]) == ("2", "model.layers.3", "fail")
    assert f"{CULPRIT}/output.0" in seen["detail"]
    other = again(visit, url)
    found = view(other)
    assert found.pop("at") == "r0"  # the open pair's row
    assert found == {k: v for k, v in seen.items() if k != "at"}
    assert other.evaluate("Math.round(document.getElementById('pairs').getBoundingClientRect().y)") == 0
    assert other.evaluate("history.length") == 2  # the blank page and this one


HOSTILE = (
    "pairs",
    "%E0%A4%A&&&==&tap",
    "tap=<img src=x onerror=window.pwned=1>&status=<b>&sort=__proto__&pair=99999999&steps=1..x&cell=9.9.9",
    "__proto__=1&constructor=2&request=-1&layer=__proto__&pair=1e3&sort=-constructor",
    "tap=model.norm&find=" + "x" * 5000,
    "request=999999999&cell=999999999.999999999&layer=toString&pair=NaN&steps=0..1",
)


def test_a_hostile_link_is_ignored(visit):
    page = visit(with_rows(realistic()))
    page.wait_for_selector("#heat[data-ready]")
    for hash_ in HOSTILE:
        plain, other = view(page), again(visit, page.url + "#" + hash_)
        found = view(other)
        if "cell=9999" in hash_:  # a place beyond the map is its last one
            assert found.pop("cell").startswith("logits_processor, position 57")
            plain.pop("cell")
        assert found == plain, hash_
        assert other.evaluate("window.pwned") is None
        assert other.locator("img").count() == 0


# --- the filtered pairs as a csv file, saved by a real Chromium under the page's policy, beside compare.csv ---


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
    out.writelines(pair_lines(Pairs(pairs), None))
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
