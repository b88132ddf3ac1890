"""The page in a real Chromium: it draws, filters, sorts, opens what is clicked, follows its address, saves and prints;
hostile names stay text. Whoever visits a page fails on any error of the console and on any request."""

import csv
import importlib.util
import io
import math
import re
import shlex
import sys
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from report_examples import (
    CULPRIT,
    EVIL,
    ORIGIN,
    comparison,
    hostile,
    pair,
    realistic,
    realistic_rows,
    row_table,
    with_rows,
)
from support.browser_pages import chromium, opened

from vllm_accprobe.comparison.pair import Pairs
from vllm_accprobe.comparison.result import COLUMNS
from vllm_accprobe.comparison.row_table import ValueSpread
from vllm_accprobe.comparison.verdict.neighbours import Edge, OriginNeighbours
from vllm_accprobe.dump.reader import matches
from vllm_accprobe.report.html import write_html
from vllm_accprobe.report.html.data import TokenTexts
from vllm_accprobe.report.table import cell, pair_lines

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(comparison) → its page, a file that is made once for all tests that open it."""
    files = {}

    def path(result, tokens=None):
        if id(result) not in files:
            at = tmp_path_factory.mktemp("page") / "compare.html"
            write_html(result, at, tokens=tokens)
            files[id(result)] = at, result  # as long as it lives, nothing else has its id
        return files[id(result)][0]

    return path


@pytest.fixture
def visit(browser, written):
    """visit(comparison) → a page that has drawn itself, visit.at(url) → one more of the same file."""

    def open_(result, tokens=None, drawn="", **viewport):
        page = at(written(result, tokens), **viewport)
        if drawn:
            page.wait_for_selector(f"{drawn}[data-ready]")
        return page

    with opened(browser) as at:
        open_.at = at
        yield open_


def shown(page):
    return page.inner_text("#shown")


def column(page, n):
    return page.eval_on_selector_all("#body tr.row", f"rows => rows.map(r => r.children[{n}].textContent)")


def named(page, name):
    """The texts of a column of the drawn rows, by its id."""
    heads = page.eval_on_selector_all("#head th", "all => all.map(t => t.dataset.id)")
    return column(page, heads.index(name))


def place(page, row, column):
    """The middle of a cell of the heat map, in pixels of the page."""
    return page.evaluate(
        """([r, c]) => {
            const heat = document.getElementById("heat"), box = heat.querySelector(".area").getBoundingClientRect();
            const [rows, columns] = heat.dataset.cells.split(" ").map(Number);
            return [box.x + (c + 0.5) / columns * box.width, box.y + (r + 0.5) / rows * box.height];
        }""",
        [row, column],
    )


def click_cell(page, row, column, name):
    """Clicks a cell once the map has settled under the pointer: the chart says whose it is before it is clicked."""
    page.locator("#heat").scroll_into_view_if_needed()
    for attempt in range(50):
        x, y = place(page, row, column)
        page.mouse.move(x + attempt % 2, y)
        page.wait_for_timeout(100)
        if page.inner_text("#heat-readout").startswith(name) and place(page, row, column) == [x, y]:
            page.mouse.click(x + attempt % 2, y)
            return
    raise AssertionError(f"no cell of {name} there: {page.inner_text('#heat-readout')}")


def press(page, where, *keys):
    page.focus(where)
    for key in keys:
        page.keyboard.press(key)


# --- the first screen and the table ---


NAN = {"created": float("inf"), "module": "model.layers.5.mlp.act_fn", "class": "SiluAndMul", "nonfinite": 3}


@cache
def several():
    """Three origins, one of which makes NaN, and a report with a place."""
    result = realistic_rows()
    broken = [p for p in result.pairs if p.tap == NAN["module"] and p.role == "output.0" and p.step == 5]
    pairs = [replace(p, status="fail", nonfinite_mismatch=7) if p in broken else p for p in result.pairs]
    first = result.origins[0] | {"tier": "beyond chance", "times": 13.1, "chance": 0.0005}
    last = result.origins[1] | {"module": "logits_processor"}
    return replace(result, pairs=pairs, origins=[first, ORIGIN | NAN, last], out="a report")


def test_first_screen_filter_and_sort(visit):
    result = replace(realistic(), created={"model.layers.1.mlp": 0.3})
    failed = sum(p.status == "fail" for p in result.pairs)
    page = visit(result)
    page.wait_for_selector("#chart[data-ready] path.line")
    assert page.inner_text("h1 .culprit") == CULPRIT
    assert page.locator("#chart").bounding_box()["y"] < 500
    legend = page.locator("#chart .keys li").all_text_contents()
    assert legend == ["prefill", "decode", "created", "limit", "origins"]
    assert shown(page) == f"{failed} pairs of {len(result.pairs):,}"
    page.click("#status button[value=all]")
    assert shown(page) == f"{len(result.pairs):,} pairs"
    assert page.locator("#body tr.row").count() < 60
    page.fill("#find", "layers.3.mlp.down_proj output decode")
    page.get_by_text("10 pairs of 2,763", exact=True).wait_for()
    assert (set(column(page, 1)), set(column(page, 2))) == ({CULPRIT}, {"output.0"})
    for order, reverse in (("descending", True), ("ascending", False)):
        page.click("#head th[data-id=value] button")
        assert page.get_attribute("#head th[data-id=value]", "aria-sort") == order
        errors = [float(x) for x in named(page, "value")]
        assert errors == sorted(errors, reverse=reverse)
        assert max(errors) == 0.21


def test_each_origin_has_its_number_and_opens_its_pairs(visit):
    page = visit(several())
    assert "By chance\n1 of 2,000 comparisons with rounding alone" in page.inner_text("header")
    for selector in ("#pair-sum", ".origin-list", ".next"):
        box = page.locator(selector).bounding_box()
        assert box["y"] + box["height"] < 500
    buttons = page.locator(".origin-list button")
    assert [b.split()[0] for b in buttons.all_inner_texts()] == ["1", "2", "3"]
    assert "NaN or Inf in 3 rows" in buttons.nth(1).inner_text()
    buttons.nth(1).click()
    assert NAN["module"] in page.inner_text("#tap-chip")
    assert set(column(page, 1)) == {NAN["module"]}
    assert f"{NAN['module']}/output.0" in page.inner_text("#detail .top")
    assert column(page, 0)[0] == "fail"
    buttons.nth(0).focus()
    page.keyboard.press("Enter")
    assert CULPRIT in page.inner_text("#tap-chip")


def test_a_command_is_copied_as_it_is_typed(visit):
    page = visit(several())
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    commands = [step["command"] for step in several().next_steps]
    buttons = page.locator(".next button.copy")
    assert buttons.count() == len(commands) > 1
    for i, command in enumerate(commands):
        buttons.nth(i).focus()
        page.keyboard.press("Enter")
        page.wait_for_function("i => document.querySelectorAll('.next button.copy')[i].textContent === 'Copied'", arg=i)
        assert page.evaluate("navigator.clipboard.readText()") == command
        assert page.inner_text("#copied") == "Copied."


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768), (390, 844)])
def test_nothing_sticks_out_or_is_cut(visit, width, height):
    """Neither on the first screen nor, in the chart, a mark or a label."""
    page = visit(several(), drawn="#chart", width=width, height=height)
    cut = """() => [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && e.clientWidth
        && getComputedStyle(e).overflowX === "hidden" && e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert width == 1024 or page.evaluate(cut) == []
    for button in page.locator(".next button.copy").all():
        box = button.bounding_box()
        assert box["x"] + box["width"] <= width
    assert page.locator("#chart .origin-mark").count() == 3
    assert page.evaluate("""() => { const frame = document.getElementById("chart").getBoundingClientRect();
        return [...document.querySelectorAll("#chart text, #chart circle")].filter((e) => {
            const box = e.getBoundingClientRect();
            return box.left < frame.left || box.right > frame.right || box.top < frame.top || box.bottom > frame.bottom;
        }).map((e) => e.textContent || e.tagName); }""") == []  # fmt: skip


def test_hostile_names_are_text(visit):
    page = visit(hostile(), drawn="#chart")
    page.wait_for_selector("#heat[data-ready]")
    assert "</script><img" in page.inner_text("#heat-readout") + page.inner_text("#heat-request")
    press(page, "#chart", "ArrowRight")
    page.wait_for_selector("#chart .tip:not([hidden])")
    page.click("#body tr.row")
    page.wait_for_selector(".small-plot[data-ready]")
    assert "</script><img" in page.get_attribute("#body tr.row td:nth-child(2)", "title")
    assert page.inner_text("#body tr.row td:nth-child(2)").startswith("…")  # a long name shows its end
    for part in ("#tree", "h1", "#detail"):
        assert "</script><img" in page.inner_text(part), part
    assert page.locator("img, #heat a, #chart a").count() == 0
    assert page.evaluate("window.pwned") is None


def test_without_rows_the_page_still_stands(visit):
    page = visit(realistic(fail=False))
    assert page.is_visible("#heat-none")
    assert page.is_hidden("#heat")
    assert page.locator("#tree [role=treeitem]").count() >= 1


def test_tree_is_opened_to_the_culprit_and_filters(visit):
    page = visit(realistic_rows())
    culprit = page.locator(f"#tree [data-path='{CULPRIT}']")
    assert "culprit" in culprit.inner_text()
    assert (culprit.get_attribute("aria-selected"), culprit.get_attribute("aria-level")) == ("true", "5")
    culprit.locator(".node").click()
    assert page.inner_text("#tap-chip").startswith(f"under {CULPRIT}")
    assert shown(page).startswith("24 pairs")
    # By keyboard: to the parent, close it, to its parent's next layer, open it.
    active = "document.activeElement."
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(active + "dataset.path") == "model.layers.3.mlp"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(active + "getAttribute('aria-expanded')") == "false"
    assert culprit.count() == 0
    page.keyboard.press("4")
    assert page.evaluate(active + "dataset.path") == "model.layers.4"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(active + "dataset.path").startswith("model.layers.4.")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert page.inner_text("#tap-chip").startswith("under model")
    assert page.locator("#tree [tabindex='0']").count() == 1


# --- the depth chart: origins above the line of all limits; of many layers a mark each, which opens into its taps ---


@cache
def deep(layers):
    """Origins in layer 3 and in layer 5, the second without a number; what every tap created is half its limit."""
    result = realistic(layers, steps=6)
    nan = ORIGIN | {"module": "model.layers.5.mlp.act_fn", "created": float("inf"), "nonfinite": 2}
    created = {p.tap: 0.5 for p in result.pairs if p.status != "skip"}
    made = replace(result, created=created, origins=[result.origins[0], nan])
    return with_rows(made) if layers == 8 else made


@pytest.mark.parametrize(("layers", "marks"), [(8, "taps"), (60, "layers")])
def test_origins_have_their_numbers_and_lie_above_the_limit(visit, layers, marks):
    page = visit(deep(layers), drawn="#chart")
    assert page.get_attribute("#chart", "data-marks") == marks
    found = page.evaluate(
        """() => [...document.querySelectorAll("#chart .origin-mark")].map((g) => {
            const box = g.querySelector("circle").getBoundingClientRect();
            return [g.textContent, box.y + box.height / 2, box.x];
        }).sort((p, q) => p[2] - q[2])"""
    )
    limit = page.evaluate("document.querySelector('#chart line.limit').getBoundingClientRect().y")
    assert [number for number, *_ in found] == ["1", "2"]
    assert all(y < limit for _, y, _ in found)
    dots = page.evaluate(
        """() => {
            const path = document.querySelector("#chart path.created"), all = path.getAttribute("d");
            const top = path.ownerSVGElement.getBoundingClientRect().y;
            return [...all.matchAll(/M[-0-9.]+ ([-0-9.]+)h0/g)].map((m) => top + Number(m[1]));
        }"""
    )  # what the others created
    assert len(dots) == (layers - 2 + 3 if marks == "layers" else layers * 14 + 3 - 2)
    assert all(y > limit for y in dots)


def test_a_layer_opens_into_its_taps_and_back_by_keyboard(visit):
    page = visit(deep(60), drawn="#chart")
    press(page, "#chart", "ArrowLeft", "ArrowRight")
    assert page.inner_text("#chart-readout").startswith("model.layers.3: origin 1, created 13.1×")
    assert f"worst {CULPRIT}" in page.inner_text("#chart-readout")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chart[data-marks=taps]")
    low, high = map(float, page.get_attribute("#chart", "data-range").split())
    assert high - low == 14
    assert page.inner_text("#chart-readout").startswith(f"{CULPRIT} (RowParallelLinear): origin 1")
    page.keyboard.press("Enter")
    assert page.inner_text("#tap-chip").startswith(f"tap {CULPRIT}")
    press(page, "#chart", "Escape")
    page.wait_for_selector("#chart[data-marks=layers]")
    page.keyboard.press("End")
    assert page.inner_text("#chart-readout").startswith("logits_processor (LogitsProcessor)")


@pytest.mark.parametrize(("chart", "shown"), [("chart", "range"), ("heat", "columns")])
def test_keys_and_drags_of_perfetto(visit, chart, shown):
    """Each step: what is done, and how the shown part's width and beginning change (-1, 0, 1)."""
    page = visit(deep(8), drawn=f"#{chart}")
    box = page.locator(f"#{chart} .area").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def part():
        return [float(v) for v in page.get_attribute(f"#{chart}", f"data-{shown}").split()]

    def drag(dx):
        page.keyboard.down("Shift")
        page.mouse.down()
        page.mouse.move(x + dx, y, steps=4)
        page.mouse.up()
        page.keyboard.up("Shift")
        page.mouse.move(x, y)

    def wheel(dy):
        page.keyboard.down("Control")
        page.mouse.wheel(0, dy)
        page.keyboard.up("Control")

    page.mouse.move(x, y)
    whole = part()
    steps = [
        (lambda: page.keyboard.press("w"), -1, 1), (lambda: page.keyboard.press("d"), 0, 1),
        (lambda: page.keyboard.press("a"), 0, -1), (lambda: drag(-100), 0, 1), (lambda: wheel(-100), -1, 1),
        (lambda: page.keyboard.press("s"), 1, -1),
    ]  # fmt: skip
    for i, (act, wider, later) in enumerate(steps):
        before = part()
        act()
        page.wait_for_timeout(150)
        now = part()
        change = (now[1] - now[0]) - (before[1] - before[0])
        assert (abs(change) <= 1 if wider == 0 else change * wider > 0), i
        assert (now[0] - before[0]) * later > 0, i
    page.keyboard.press("0")
    page.wait_for_timeout(150)
    assert part() == whole
    assert page.is_hidden("#tap-chip")  # no drag was a click


# --- clicks: which pairs are shown, which one is open ---


def failures_first(page):
    seen = column(page, 0)
    assert seen == sorted(seen, key=["fail", "pass", "skip"].index)
    over = [math.inf if x == "∞" else -1.0 if x == "–" else float(x) for x in named(page, "over")]
    for status in ("fail", "pass"):
        own = [x for x, s in zip(over, seen, strict=True) if s == status]
        assert own == sorted(own, reverse=True)
    return seen


def open_pair(page):
    """(tap/role, step) of the pair whose detail is open."""
    if page.locator("#detail dl").is_hidden():
        page.click("#detail summary >> nth=-1")
    step = page.evaluate(
        "[...document.querySelectorAll('#detail dt')].find(t => t.textContent === 'step').nextSibling.textContent"
    )
    return page.inner_text("#detail .top code").split(" ")[0], int(step)


def worst_of(result, tap, step=None):
    """(name, step) of the worst failed pair of the tap and what lies in it, by its error over its limit."""
    failed = [p for p in result.pairs if f"{p.tap}.".startswith(f"{tap}.") and p.status == "fail"]
    worst = max((p for p in failed if step in (None, p.step)), key=lambda p: p.worst_row_rel_l2 / p.limit)
    return f"{worst.tap}/{worst.role}", worst.step


def test_the_culprit_shows_its_failures_and_opens_the_worst(visit):
    result = realistic_rows()
    page = visit(result)
    failed = sum(p.tap == CULPRIT and p.status == "fail" for p in result.pairs)
    page.click("h1 .culprit")
    assert shown(page).startswith("24 pairs")
    assert failures_first(page)[:failed] == ["fail"] * failed
    assert page.get_attribute("#head th[data-id=status]", "aria-sort") == "descending"
    assert open_pair(page) == worst_of(result, CULPRIT)
    table, detail = (page.locator(s).bounding_box() for s in ("#grid-box", "#detail"))
    assert table["y"] > 0  # both are seen at once
    assert table["height"] < 360
    assert detail["y"] < 600
    page.click("#detail .top button")
    assert page.is_hidden("#detail")
    assert page.locator("#grid-box").bounding_box()["height"] > 500
    press(page, "#grid", "End", "Home", "ArrowDown", "Enter")
    assert page.get_attribute("#grid", "aria-activedescendant") == "r1"
    assert open_pair(page)[0] == f"{CULPRIT}/output.0"
    assert "worst row rel l2" in page.inner_text("#detail")
    press(page, "#grid", "Escape")
    assert page.is_hidden("#detail")
    page.click("#tap-chip")
    assert shown(page) == "2,763 pairs"


def test_a_point_of_the_chart_and_a_cell_of_the_map(visit):
    result = realistic_rows()
    page = visit(result, drawn="#heat")
    # The map begins with the culprit's request at the first cell beyond its limit: layer 3, first token of step 4.
    assert page.locator("#heat-request option").all_text_contents()[0].startswith("a  (worst 1")
    assert page.inner_text("#heat-readout").startswith("model.layers.3, position 50 (decode): 1")
    press(page, "#chart", "Enter")  # it stands at the culprit
    failures_first(page)
    assert open_pair(page) == worst_of(result, CULPRIT)
    page.locator("#heat").scroll_into_view_if_needed()
    top = page.evaluate("scrollY")
    click_cell(page, 4, 50, "model.layers.3, position 50")  # embed_tokens, layers 0 to 2, then layer 3
    assert page.evaluate("scrollY") == top  # a layer opens where it is; what comes next is a click on a tap of it
    assert page.inner_text("#heat-level") == "model.layers.3"
    assert page.inner_text("#tap-chip").startswith("under model.layers.3, step 4")
    assert set(column(page, 3)) == {"4"}
    assert shown(page).startswith("28 pairs")
    assert failures_first(page)[0] == "fail"
    assert open_pair(page) == worst_of(result, "model.layers.3", 4)
    click_cell(page, 11, 50, f"{CULPRIT}, position 50")  # the twelfth tap of the layer
    assert page.inner_text("#tap-chip").startswith(f"tap {CULPRIT}, step 4")
    assert column(page, 0) == ["fail", "pass"]
    assert open_pair(page) == (f"{CULPRIT}/output.0", 4)
    page.wait_for_selector("#detail .small-plot[data-ready]")
    assert page.locator("#detail .small-plot[data-ready]").count() == 2
    assert page.inner_text("#detail .worst-rows tbody tr:first-child").split()[:4] == ["a", "50", "decode", "0.21"]
    page.click("#heat-back")
    assert page.inner_text("#heat-level") == "all layers"
    page.click("#tree [data-path='model.layers.4'] .node >> nth=0")
    assert page.is_hidden("#detail")
    assert failures_first(page)[0] == "fail"


# --- an open pair ---


def test_a_spread_is_drawn_and_a_pair_without_one_shows_its_command(visit):
    name = "x</script><img src=x onerror=alert(1)>'; rm -rf"
    columns = np.zeros(64)
    columns[17] = 2.0
    counts = np.append(np.arange(48), [3, 0, 1])
    spread = ValueSpread(0, -1.0, 1.0, counts, counts, columns, 64, 0, 1, np.array([0.5, -1.0]), 5, 9)
    pairs = [pair(tap=name, status="fail", order=0), pair(tap=name + "2", status="fail", order=1)]
    page = visit(replace(comparison(pairs=pairs, golden_path=name), spreads=(spread,)))
    page.click("#body tr.row >> nth=0")
    assert page.locator("#detail figure.spread").count() == 4
    tips = page.eval_on_selector_all("#detail svg .error title", "all => all.map(t => t.textContent)")
    assert tips == ["position 0: 0.5", "column 17: 2"]
    assert page.locator("#detail .ends >> nth=0").inner_text().split("\n")[1] == "3 NaN, 1 −Inf"
    page.click("#body tr.row >> nth=1")
    command = page.inner_text("#detail code.again")
    assert command.startswith("accprobe compare 'x</script>")
    assert "--taps 'x</script><img src=x onerror=alert(1)>'\\''; rm -rf2'" in command
    assert page.locator("#detail img").count() == 0


def test_the_command_for_a_pair_names_its_tap_alone_whatever_it_is_called(visit):
    """A list's comma, an exclusion and blanks around are any one character; what the page escapes may be anything."""
    exact = ["a.*.b", "a[0].b", "a?b", "it's", "../../a/b", "e::aten.mm.default"]
    names = [*exact, "a,b", "!a", " a ", "a\x1bb", "a\\nb"]
    near = ["a.x.b", "a0.b", "b", "a", "its", "/a/b", "e::aten.mm.out"]
    pairs = [pair(tap=tap, status="fail", order=i) for i, tap in enumerate([*names, "same", "given"])]
    pairs[-2] = replace(pairs[-2], identical=True, status="pass")
    pairs[-1] = replace(pairs[-1], role="input.0")
    page = visit(comparison(pairs=pairs, golden_path="my golden"))
    for i, name in enumerate(names):
        page.evaluate("i => accprobe.showPair(i)", i)
        words = shlex.split(page.inner_text("#detail code.again"))
        assert words[:4] == ["accprobe", "compare", "my golden", "mine"]
        globs = [g.strip() for g in words[words.index("--taps") + 1].split(",")]
        assert matches(globs, (name,))
        others = [*near, *names] if name in exact else near if name.isprintable() and "\\" not in name else []
        assert [tap for tap in others if tap != name and matches(globs, (tap,))] == []
        assert re.fullmatch("compare-[^/]*", words[words.index("--out") + 1])
    page.evaluate("i => accprobe.showPair(i)", len(names))
    assert "both sides hold the same values" in page.inner_text("#detail")
    assert page.locator("#detail code.again").count() == 0
    page.evaluate("i => accprobe.showPair(i)", len(names) + 1)
    assert "Of an input only the rows beyond its limit are kept" in page.inner_text("#detail")


def test_an_origins_neighbours_are_drawn_and_a_node_opens_its_pair_by_click_and_by_key(visit):
    result = replace(realistic(layers=4, steps=5))
    at = {(p.tap, p.role): i for i, p in enumerate(result.pairs) if p.step == 4}
    act, layer = "model.layers.3.mlp.act_fn", "model.layers.3.mlp"
    hostile_name = "<img src=x onerror=alert(1)>" + "x" * 60
    fed = (
        Edge(act, "output.0", "input.0", 0.0, 0.0, "identical", "both", at[act, "output.0"]),
        Edge(hostile_name, "param.weight", "param.weight", None, None, "skip", "own", None),
    )
    feeds = (Edge(layer, "output.0", "", 0.2, 13.0, "fail", "order", at[layer, "output.0"]),)
    near = OriginNeighbours(result.origins[0]["module"], "output.0", fed, feeds, (2, 0))
    object.__setattr__(result, "neighbours", [near, *[None] * (len(result.origins) - 1)])
    page = visit(result)
    page.click("#body tr.fail >> nth=0")
    figure = page.locator("#detail .around")
    assert figure.locator("figcaption").inner_text() == "What fed it, and what it feeds"
    label = figure.locator("svg").get_attribute("aria-label")
    assert label.startswith(f"{near.tap}/output.0: fed by {act}/output.0 (identical)")
    assert figure.locator("text.said").all_text_contents() == ["identical", "not compared", "13×"]
    nodes = figure.locator("[role=button]")
    assert [n.get_attribute("aria-label") for n in nodes.all()] == [
        f"Fed by {act}/output.0: identical. Opens this pair", f"Feeds {layer}/output.0: 13x its limit. Opens this pair",
    ]  # fmt: skip
    assert figure.locator("img").count() == 0
    assert figure.locator("svg > g.near > text").all_text_contents()[2:4] == ["its own", "param.weight"]
    assert "2 more are left out" in page.inner_text("#detail")
    lines = [figure.locator(f"g.{outcome} path").first for outcome in ("identical", "fail")]
    assert len({line.evaluate("e => getComputedStyle(e).stroke") for line in lines}) == 2

    nodes.nth(1).focus()
    page.keyboard.press("Enter")
    assert page.inner_text("#detail .top code").startswith(f"{layer}/output.0")
    assert page.locator("#detail .around").count() == 0  # no origin
    assert page.inner_text("#tap-chip").startswith(f"tap {layer}")
    page.click("#tap-chip")
    page.evaluate("tap => accprobe.showTap(tap, { open: true })", near.tap)
    page.locator("#detail .around [role=button]").first.click()
    assert page.inner_text("#detail .top code").startswith(f"{act}/output.0")
    assert page.locator("#body tr.at").count() == 1


def test_a_modules_operators_in_order_and_where_its_code_is(visit):
    module, hostile_op = "model.layers.1.mlp.down_proj", "their.<b>op</b>.default"
    calls = [("aten.mm.default", 0, 0.5, True), ("aten.add.Tensor", 0, 2.0, False), ("aten.mm.default", 1, 40.0, False),
             (hostile_op, 0, 0.1, False)]  # fmt: skip
    pairs = [pair(tap=module, order=0, step=3, worst_row_rel_l2=0.1, status="fail")]
    for order, (op, call, over, identical) in enumerate(calls):
        common = {"tap": f"{module}::{op}", "call": call, "step": 3, "order": 1 + 2 * order, "limit": 0.01}
        pairs.append(pair(**common, role="input.0", identical=True, worst_row_rel_l2=0.0))
        common |= {"order": 2 + 2 * order, "worst_row_rel_l2": over * 0.01, "status": "fail" if over > 1 else "pass"}
        pairs.append(pair(**common, role="output.0", identical=identical))
    pairs.append(pair(tap=f"{module}::aten.mm.default", step=4, order=90))
    pairs.append(pair(tap=f"{module}_other::aten.mm.default", step=3, order=91))
    origin = {"module": module, "role": "output.0", "created": 0.1, "floor": 0.01, "evidence": "jump"}
    result = comparison(pairs=pairs, origins=[origin], verdict="fail")
    setting = SimpleNamespace(sources={module: ("a/linear.py:10", "b/<i>linear.py:12")})
    object.__setattr__(result, "measured", SimpleNamespace(setting=setting))
    object.__setattr__(result, "neighbours", [None])
    page = visit(result)
    page.evaluate("accprobe.showPair(0)")
    assert page.inner_text("#detail .code") == "Code: b/<i>linear.py:12 (golden: a/linear.py:10)"
    table = page.locator("#detail .operators")
    assert table.locator("h3").inner_text() == f"Operators of {module} in step 3, in order: 4"
    rows = [row.locator("td").all_text_contents() for row in table.locator("tbody tr").all()]
    assert rows == [
        ["aten.mm.default", "0", "identical", "identical", "pass"],
        ["aten.add.Tensor", "0", "identical", "2×", "fail"],
        ["aten.mm.default", "1", "identical", "40×", "fail"],
        [hostile_op, "0", "identical", "0.1×", "pass"],
    ]
    assert table.locator("tr.bad").count() == 2
    table.locator("button").nth(2).focus()
    page.keyboard.press("Enter")
    assert page.inner_text("#detail .top code").startswith(f"{module}::aten.mm.default/output.0#1")
    # An operator's own view shows those beside it, itself marked.
    assert page.locator("#detail .operators [aria-current]").all_text_contents() == ["aten.mm.default1identical40×fail"]
    assert page.locator("#detail .operators tbody tr").count() == 4


# --- tokens' text in the heat map ---


def test_every_token_is_told_and_few_have_labels_below_them(visit):
    evil = "</script><img src=x onerror=window.pwned=1>"
    texts = {0: "The", 1: " quick", 2: r"\n", 3: evil, 4: " "}
    rows = row_table([(0, "a", i, i > 2, 0.1, 0.5 + i % 3) for i in range(6)])
    result = comparison(pairs=[pair(tap="model.layers.0.mlp", status="fail")], rows=rows, verdict="fail")
    ids = {"a": (np.arange(6), np.array([0, 1, 2, 3, 4, 99]))}
    page = visit(result, tokens=TokenTexts(SimpleNamespace(text=texts.get), ids, "mine"), drawn="#heat", width=1440)
    labels = page.locator("#heat .xtick").all_text_contents()
    assert labels == ["0The", "1quick", r"2\n", "3</script>…", "4␣", "5?"]
    said = []
    for column in range(6):
        press(page, "#heat", "Home", *["ArrowRight"] * column)
        said.append(page.inner_text("#heat-readout").split(" (")[0].split("position ")[1])
    assert said[:3] == ["0 “\u2068The\u2069”", "1 “\u2068 quick\u2069”", "2 “\u2068\\n\u2069”"]
    assert said[3] == f"3 “\u2068{evil}\u2069”"
    assert said[5] == "5 “\u2068[99 is not in the vocabulary]\u2069”"
    assert "this page holds the text of prompts and answers" in page.inner_text(".heat-map").lower()
    page.mouse.move(0, 0)
    click_cell(page, 0, 3, "model.layers.0, position 3")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0


# --- ranks in one row: the worst stands for all, nothing is lost, and each way to see them all shows them ---


PAIRS, RANKS = 1_200, 16


def test_the_worst_rank_stands_for_all_and_each_way_to_see_them_shows_them(visit):
    path = Path(__file__).parents[3] / "benchmarks" / "made_comparison.py"
    spec = importlib.util.spec_from_file_location("made_comparison", path)
    module = sys.modules["made_comparison"] = importlib.util.module_from_spec(spec)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    result = module.made(module.Made(PAIRS, 6, RANKS))
    page = visit(result)

    def rows(of=page):
        return int(of.get_attribute("#grid", "aria-rowcount")) - 1

    tensors = {(p.tap, p.role, p.call, p.step) for p in result.pairs}
    page.click("#status button[value=all]")
    assert rows() == len(tensors) < PAIRS
    assert shown(page) == "1,200 pairs"  # all of them are there, in fewer rows
    page.click("#head th[data-id=over] button")
    worst = max((p for p in result.pairs if p.status == "fail"), key=lambda p: p.measured / p.allowed)
    assert re.fullmatch(rf"{worst.rank} \+\d+", named(page, "rank")[0])
    with page.expect_download() as download:  # what is saved are all ranks
        page.click("#save")
    assert len(list(csv.DictReader(io.StringIO(download.value.path().read_text(encoding="utf-8-sig"))))) == PAIRS
    page.click("#ranks")
    assert page.get_attribute("#ranks", "aria-pressed") == "false"
    assert rows() == PAIRS
    assert "+" not in "".join(named(page, "rank"))
    page.wait_for_function("() => location.href.includes('ranks=all')")  # the address follows a moment later
    assert rows(visit.at(page.url)) == PAIRS
    page.click("#ranks")
    page.click("#body tr.row")
    button = page.locator("#detail button.ranks")
    said = int(re.fullmatch(r"Show all (\d+) ranks of it", button.inner_text())[1])
    button.click()
    assert rows() == said == RANKS
    assert shown(page).startswith(f"{RANKS} pairs of")


# --- the view in the address: a link opens the same view, and a hostile one is nothing but text ---


def address(page):
    page.wait_for_timeout(400)  # after which the address has followed the view
    return page.evaluate("location.href")


def view(page):
    """All that a person sees of the parts whose state is in the address."""
    return {
        "shown": shown(page), "rows": column(page, 1)[:10], "steps": column(page, 3)[:10],
        "chip": page.inner_text("#tap-chip") if page.is_visible("#tap-chip") else None,
        "find": page.input_value("#find"), "status": page.get_attribute("#status button[aria-pressed=true]", "value"),
        "sort": page.eval_on_selector_all(
            "#head th", "all => all.map(t => [t.dataset.id, t.getAttribute('aria-sort')]).filter(x => x[1] !== 'none')"
        ),
        "detail": page.inner_text("#detail") if page.is_visible("#detail") else None,
        "at": page.get_attribute("#grid", "aria-activedescendant"), "request": page.input_value("#heat-request"),
        "level": page.inner_text("#heat-level"), "cell": page.inner_text("#heat-readout"),
    }  # fmt: skip


def again(visit, url):
    """Another page of the same browser at this address, drawn."""
    other = visit.at(url)
    other.wait_for_selector("#heat[data-ready]")
    return other


def test_a_link_opens_the_same_view(visit):
    page = visit(realistic_rows(), drawn="#heat")
    assert "#" not in address(page)  # where nothing was chosen there is nothing to say
    page.select_option("#heat-request", index=2)
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
    page = visit(realistic_rows(), drawn="#heat")
    plain = view(page)
    for hash_ in HOSTILE:
        other = again(visit, page.url + "#" + hash_)
        found = view(other)
        if "cell=9999" in hash_:  # a place beyond the map is its last one
            assert found["cell"].startswith("logits_processor, position 57")
            found["cell"] = plain["cell"]
        assert found == plain, hash_
        assert other.evaluate("window.pwned") is None
        assert other.locator("img").count() == 0


# --- the filtered pairs as a csv file, saved under the page's policy, beside compare.csv ---


def saved(page):
    """(file name, header, lines as lists of texts) of what the button saves."""
    with page.expect_download() as waiting:
        page.click("#save")
    text = waiting.value.path().read_bytes().decode("utf-8")
    assert text.endswith("\n")
    header, *lines = csv.reader(io.StringIO(text))
    return waiting.value.suggested_filename, header, lines


def test_what_is_shown_is_saved_in_its_order_with_all_columns(visit):
    result = realistic()
    page = visit(result)
    page.click("h1 .culprit")
    page.click("#status button[value=fail]")
    name, header, lines = saved(page)
    assert (name, header) == ("compare-filtered.csv", list(COLUMNS))
    failed = [p for p in result.pairs if p.tap == CULPRIT and p.status == "fail"]
    failed.sort(key=lambda p: -p.worst_row_rel_l2 / p.limit)
    expected = list(csv.reader(io.StringIO("".join(pair_lines(Pairs(failed), None)))))  # as in compare.csv
    assert len(lines) == len(expected) == 8
    for ours, theirs in zip(lines, expected, strict=True):
        other = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
        assert all(math.isclose(float(a), float(b), rel_tol=6e-3) for a, b in other), other  # to the page's digits


def test_formulas_quotes_and_what_is_not_finite(visit):
    texts = ["=1+1", "+1", "-1", "@x", "\tx", 'a,"b"', "a\nb", EVIL, "x", "NaN"]
    numbers = [math.nan, math.inf, -math.inf, None, 0.0, 1e-9, 5e20, 0.1, -2.5, 1.0]
    pairs = [
        pair(tap=t, golden=t, mine=t, message=t, order=i, status="fail", mean_abs_err=x, rmse=-math.inf,
             max_abs_index=((), (3, 37), None)[i % 3])
        for i, (t, x) in enumerate(zip(texts, numbers, strict=True))
    ]  # fmt: skip
    _, _, lines = saved(visit(comparison(pairs=pairs)))
    of = {name: [line[COLUMNS.index(name)] for line in lines] for name in COLUMNS}
    # Control characters are escaped on the page, so that nothing runs and nothing hides; the rest is compare.csv's.
    plain = {4: "\\tx", 6: "a\\nb", 7: EVIL.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")}
    expected = [plain.get(i, cell(t)) for i, t in enumerate(texts)]
    for name in ("tap", "golden", "mine", "message"):
        assert of[name] == expected
    assert expected[:4] == ["'=1+1", "'+1", "'-1", "'@x"]
    assert of["mean_abs_err"] == ["nan", "inf", "-inf", "", "0", "1e-9", "500000000000000000000", "0.1", "-2.5", "1"]
    assert of["rmse"] == ["-inf"] * 10  # one value for all
    assert of["max_abs_index"] == ["[]", "[3, 37]", ""] * 3 + ["[]"]
    assert of["shape"] == ["[4, 64]"] * 10
    assert of["identical"] == ["False"] * 10


# --- on paper: emulated, and as a PDF whose colours, pictures and pages are read ---


def drawn(pdf):
    """All content streams of a PDF, unpacked."""
    out = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.S):
        try:
            out.append(zlib.decompress(stream).decode("latin-1"))
        except zlib.error:
            continue
    return "\n".join(out)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_keeps_badge_chart_and_legend(visit, scheme):
    page = visit(realistic_rows(), drawn="#heat")
    page.emulate_media(color_scheme=scheme)
    pdf = page.pdf(format="A4")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf)) <= 8
    text = drawn(pdf)
    fills = re.findall(r"([\d.]+) ([\d.]+) ([\d.]+) rg\b", text)
    coloured = {"#" + "".join(f"{round(float(x) * 255):02x}" for x in rgb) for rgb in fills}
    assert "#b3261e" in coloured  # the badge, light whatever the screen has
    steps = {"#dfe9e2", "#e3ebf5", "#c3d5ec", "#9dbbe0", "#7299cc", "#4674b0", "#f2b35e", "#de6b33", "#a3160f"}
    assert steps <= coloured  # the legend
    strokes = [s.split() for s in re.findall(r"([\d. ]+) RG\b", text)]
    assert any(round(float(s[0]) * 255) == 0x1D and round(float(s[2]) * 255) == 0xBF for s in strokes)
    assert 1 < page.locator("#heat .cells path").count() <= 9
    assert text.count(" re") > 200  # the cells of the heat map, beside the boxes of the page


CUT_OFF = """() => {
    const width = document.documentElement.clientWidth, out = [];
    for (const e of document.querySelectorAll("main *, header *, footer *")) {
        if (e.closest("option, svg") || getComputedStyle(e).display === "none" || !e.offsetParent) continue;
        const box = e.getBoundingClientRect();
        if (box.right > width + 1) out.push("wide: " + e.tagName + " " + e.className);
        const own = e.closest("#chart, #heat, .small-plot, .node");
        if (own || getComputedStyle(e).overflowX === "visible") continue;
        if (e.scrollWidth > e.clientWidth + 1) out.push("hidden: " + e.tagName + " " + e.className);
    }
    return out;
}"""
"""What lies beyond the paper's right edge or is hidden in its own box."""


def test_nothing_is_cut_off_and_nothing_opens(visit):
    """With the widest numbers and names that have no place to wrap, by class and by pair."""
    wide = [
        pair(tap=f"model.layers.{i}.a_module_with_quite_a_long_name.{'x' * 60}", status="fail", order=i,
             message="m" * 90)
        for i in range(120)
    ]  # fmt: skip
    result = realistic_rows()
    more = {"module": wide[0].tap, "shape": "columns 400–511 of 512", "tier": "replay", "times": 12.0}
    counts = {"calls": 1234, "rows": 1234567, "checked": 1000000, "compared": 234567, "unseen": 12,
              "smallest": {"row": 0.0034, "column": 1.23e-7, "one_row": 0.011}}  # fmt: skip
    classes = [{"class": name} | counts for name in ("MergedColumnParallelLinear", "Attention", "x" * 80)]
    result = replace(result, pairs=[*result.pairs, *wide], origins=[result.origins[0] | more],
                     coverage=result.coverage | {"by_class": classes})  # fmt: skip
    page = visit(result, drawn="#heat", width=703, height=1000)  # between the margins of print.css
    closed = page.locator("details:not([open])").count()
    assert closed
    page.emulate_media(media="print")
    page.wait_for_selector("html.paper")
    assert page.evaluate(CUT_OFF) == []
    names = page.eval_on_selector_all(".scroll th", "all => all.map(e => [e.textContent, e.clientWidth])")
    assert [name for name, width in names if len(name) > 4 and width < 30] == []  # no column of a letter a line
    assert page.locator("#covers + .scroll th:visible").count() == 9
    for part in ("#chart svg", "#heat svg", ".legend", ".badge", "#grid", "#tree"):
        assert page.is_visible(part), part
    for part in (".find", ".status", "#save", "#grid-help", "#detail"):
        assert page.is_hidden(part), part
    assert page.locator("details:not([open])").count() == closed
    assert page.locator("#body tr.row").count() == 50
    total = shown(page).split(" pairs")[0]
    assert page.inner_text("#body tr:last-child") == f"The first 50 of {total} pairs; compare.csv has all of them."
    page.emulate_media(media="screen")
    page.wait_for_selector("html:not(.paper)")
    assert page.is_visible(".find")
    assert page.locator("#body tr.space").count() == 1
