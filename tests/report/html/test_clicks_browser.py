"""Clicks in a real Chromium: what was clicked is filtered to, failures first, the worst one open; what is where."""

from dataclasses import replace

import pytest
from on_the_page import click_cell, column, shown
from report_examples import CULPRIT, ORIGIN, realistic, with_rows

pytestmark = pytest.mark.browser


def statuses(page):
    return column(page, 0)


def ratios(page):
    """× limit of the drawn rows, as numbers."""
    n = page.evaluate("[...document.querySelectorAll('#head th')].findIndex(t => t.dataset.id === 'over')")
    return [float("inf") if x == "∞" else -1.0 if x == "–" else float(x) for x in column(page, n)]


def opened(page):
    """(tap/role, step) of the pair whose detail is open."""
    if page.is_hidden("#detail"):
        return None
    page.click("#detail summary >> nth=-1") if page.locator("#detail dl").is_hidden() else None
    step = page.evaluate(
        "[...document.querySelectorAll('#detail dt')].find(t => t.textContent === 'step').nextSibling.textContent"
    )
    return page.inner_text("#detail .top code").split(" ")[0], int(step)


def worst_of(result, tap, step=None):
    """(name, step) of the worst failed pair of the tap and what lies in it, by its error over its limit."""
    failed = [p for p in result.pairs if f"{p.tap}.".startswith(f"{tap}.") and p.status == "fail"]
    failed = [p for p in failed if step in (None, p.step)]
    worst = max(failed, key=lambda p: p.worst_row_rel_l2 / p.limit)
    return f"{worst.tap}/{worst.role}", worst.step


def failures_first(page):
    seen = statuses(page)
    assert seen == sorted(seen, key=["fail", "pass", "skip"].index)
    for status in ("fail", "pass"):
        own = [x for x, s in zip(ratios(page), seen, strict=True) if s == status]
        assert own == sorted(own, reverse=True)
    return seen


def test_the_culprit_shows_its_failures_and_opens_the_worst(visit):
    result = with_rows(realistic())
    page = visit(result)
    failed = sum(p.tap == CULPRIT and p.status == "fail" for p in result.pairs)
    assert 0 < failed < 24
    page.click("h1 .culprit")
    assert shown(page).startswith("24 pairs")
    seen = failures_first(page)
    assert seen[:failed] == ["fail"] * failed
    assert page.get_attribute("#head th[data-id=status]", "aria-sort") == "descending"
    assert opened(page) == worst_of(result, CULPRIT)
    table, detail = (page.locator(s).bounding_box() for s in ("#grid-box", "#detail"))
    assert table["y"] > 0  # both are seen at once
    assert table["height"] < 360
    assert detail["y"] < 600
    page.click("#detail .top button")
    assert page.is_hidden("#detail")
    assert page.locator("#grid-box").bounding_box()["height"] > 500
    page.click("#tap-chip")
    assert shown(page) == "2,763 pairs"


def test_an_origin_is_clicked_and_reached_by_keyboard(visit):
    other = "model.layers.5.mlp.down_proj"
    result = realistic()
    page = visit(replace(result, origins=[ORIGIN, ORIGIN | {"module": other}, ORIGIN | {"module": "gone"}]))
    lines = page.locator("section[aria-labelledby=h-origins] tbody [data-origin]")
    assert lines.count() == 3
    lines.nth(1).click()
    assert page.inner_text("#tap-chip").startswith(f"tap {other}")
    failures_first(page)
    assert opened(page) == worst_of(result, other)
    lines.nth(0).focus()
    page.keyboard.press("Enter")
    assert page.inner_text("#tap-chip").startswith(f"tap {CULPRIT}")
    assert opened(page) == worst_of(result, CULPRIT)
    lines.nth(2).focus()
    page.keyboard.press(" ")
    assert shown(page).startswith("0 pairs")
    assert page.is_hidden("#detail")


def test_a_point_of_the_chart_and_a_cell_of_the_map(visit):
    result = with_rows(realistic())
    page = visit(result)
    page.wait_for_selector("#heat[data-ready]")
    page.focus("#chart")
    page.keyboard.press("Enter")  # it stands at the culprit
    failures_first(page)
    assert opened(page) == worst_of(result, CULPRIT)
    page.locator("#heat").scroll_into_view_if_needed()
    top = page.evaluate("scrollY")
    click_cell(page, 4, 50, "model.layers.3, position 50")  # embed_tokens, layers 0 to 2, then layer 3
    assert page.evaluate("scrollY") == top  # a layer opens where it is; what comes next is a click on a tap of it
    assert failures_first(page)[0] == "fail"
    assert opened(page) == worst_of(result, "model.layers.3", 4)
    page.locator("#heat").scroll_into_view_if_needed()
    click_cell(page, 11, 51, f"{CULPRIT}, position 51")
    assert page.inner_text("#tap-chip").startswith(f"tap {CULPRIT}, step 5")
    assert statuses(page) == ["fail", "pass"]
    assert opened(page) == (f"{CULPRIT}/output.0", 5)
    page.click("#tree [data-path='model.layers.4'] .node >> nth=0")
    assert page.is_hidden("#detail")
    assert failures_first(page)[0] == "fail"


@pytest.mark.parametrize(
    ("width", "height", "beside"), [(1440, 900, True), (1280, 800, True), (1024, 768, False), (390, 844, False)]
)
def test_the_map_stands_beside_the_chart_or_after_it(visit, width, height, beside):
    page = visit(replace(with_rows(realistic()), notes=[]), width=width, height=height)
    page.wait_for_selector("#heat[data-ready]")
    chart, heat = (page.locator(s).bounding_box() for s in ("#chart", "#heat"))
    if beside:
        assert heat["y"] == chart["y"]
        assert heat["x"] >= chart["x"] + chart["width"]
        assert heat["y"] + heat["height"] <= height
    else:
        assert heat["y"] >= chart["y"] + chart["height"]
        assert heat["x"] == chart["x"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
