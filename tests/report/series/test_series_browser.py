"""series.html in a real Chromium: rows and lines belong together, the filter hides both, hostile names stay text."""

import pytest
from report_examples import EVIL
from series_examples import four_days, hostile_days
from support.browser_pages import chromium, opened

from vllm_accprobe.report.series.series_page import write_series

pytestmark = pytest.mark.browser
CULPRIT = "model.layers.3.mlp.down_proj"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser, tmp_path):
    """visit(entries) → the page; the test fails on any console error or network request."""
    with opened(browser) as open_:

        def visit(entries, **viewport):
            write_series("golden", entries, tmp_path / "series.html")
            return open_(tmp_path / "series.html", **viewport)

        yield visit


def test_a_dump_s_page_is_a_click_away(visit, tmp_path):
    page = visit(four_days())
    (tmp_path / "day2").mkdir()
    (tmp_path / "day2" / "compare.html").write_text("<title>day2's own</title>")
    assert page.locator("h1").inner_text().startswith("FAIL")
    assert page.locator("#dumps tbody .badge").all_inner_texts() == ["PASS", "FAIL", "UNREADABLE", "FAIL"]
    page.get_by_role("link", name="day2").click()
    page.wait_for_url("**/day2/compare.html")
    assert page.title() == "day2's own"


def test_row_and_line_point_at_each_other(visit):
    page = visit(four_days())
    lines = page.locator("#series-chart g.line").count()
    assert page.inner_text("#shown") == f"{page.locator('#taps tbody tr').count()} taps"
    assert lines == 5
    page.hover("#tap-0")
    assert "on" in page.get_attribute("#line-0", "class").split()
    assert page.inner_text("#series-readout").startswith(CULPRIT)
    page.focus("#tap-1")
    assert "on" not in page.get_attribute("#line-0", "class").split()
    assert "on" in page.get_attribute("#line-1", "class").split()
    page.dispatch_event("#line-0", "click")  # points of two lines may lie on each other
    assert page.evaluate("document.activeElement.id") == "tap-0"
    assert page.locator("#tap-0 td").nth(1).get_attribute("class").split()[2:] == ["failed", "origin"]


def test_the_filter_hides_rows_and_lines(visit):
    page = visit(four_days())
    every = page.locator("#taps tbody tr").count()
    page.fill("#find", "layers.3 DOWN")
    assert page.inner_text("#shown") == f"1 tap of {every}"
    assert page.locator("#taps tbody tr:visible").count() == 1
    assert page.locator("#line-0").is_visible()
    assert page.locator("#line-1").is_hidden()
    page.fill("#find", "")
    assert page.locator("#line-1").is_visible()


def test_hostile_names_are_text(visit):
    page = visit(hostile_days())
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, b").count() == 0
    assert EVIL.split("\x1b")[0] in page.inner_text("#dumps")
    page.hover("#tap-0")
    assert "onerror" in page.inner_text("#series-readout")


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_sticks_out(visit, width):
    page = visit(four_days(), width=width, height=844)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
