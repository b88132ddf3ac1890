"""The depth chart in a real Chromium: origins by number above the line of all limits; of many layers a mark each, which
opens into its taps."""

from dataclasses import replace

import numpy as np
import pytest
from on_the_page import click_cell, column, shown
from report_examples import CULPRIT, ORIGIN, comparison, pair, realistic, row_table, with_rows

from vllm_accprobe.report.html import write_html
from vllm_accprobe.report.html.data import TokenTexts

pytestmark = pytest.mark.browser


def deep(layers):
    """Origins in layer 3 and in layer 5, the second without a number; what every tap created is half its limit."""
    result = realistic(layers, steps=6)
    nan = ORIGIN | {"module": "model.layers.5.mlp.act_fn", "created": float("inf"), "nonfinite": 2}
    created = {p.tap: 0.5 for p in result.pairs if p.status != "skip"}
    return replace(result, created=created, origins=[result.origins[0], nan])


def chart(visit, result):
    page = visit(result)
    page.wait_for_selector("#chart[data-ready]")
    return page


def numbers(page):
    """(number, y of its middle in pixels) of each origin's mark, in the chart's order from left to right."""
    return page.evaluate(
        """() => [...document.querySelectorAll("#chart .origin-mark")].map((g) => {
            const box = g.querySelector("circle").getBoundingClientRect();
            return [g.textContent, box.y + box.height / 2, box.x];
        }).sort((p, q) => p[2] - q[2]).map(([text, y]) => [text, y])"""
    )


def dots(page):
    """y of each dot, in pixels: what taps created."""
    return page.evaluate(
        """() => {
            const path = document.querySelector("#chart path.created"), all = path.getAttribute("d");
            const top = path.ownerSVGElement.getBoundingClientRect().y;
            return [...all.matchAll(/M[-0-9.]+ ([-0-9.]+)h0/g)].map((m) => top + Number(m[1]));
        }"""
    )


def line(page):
    """y of the limit in pixels."""
    return page.evaluate("document.querySelector('#chart line.limit').getBoundingClientRect().y")


def shown_range(page):
    return [float(x) for x in page.get_attribute("#chart", "data-range").split()]


@pytest.mark.parametrize(("layers", "marks"), [(8, "taps"), (60, "layers")])
def test_origins_have_their_numbers_and_lie_above_the_limit(visit, layers, marks):
    page = chart(visit, deep(layers))
    assert page.get_attribute("#chart", "data-marks") == marks
    found = numbers(page)
    assert [number for number, _ in found] == ["1", "2"]
    assert all(y < line(page) for _, y in found)
    points = dots(page)  # what the others created
    assert len(points) == (layers - 2 + 3 if marks == "layers" else layers * 14 + 3 - 2)
    assert all(y > line(page) for y in points)


def test_a_layer_opens_into_its_taps_and_back_by_keyboard(visit):
    page = chart(visit, deep(60))
    page.focus("#chart")
    for key in ("ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text("#chart-readout").startswith("model.layers.3: origin 1, created 13.1×")
    assert "worst model.layers.3.mlp.down_proj" in page.inner_text("#chart-readout")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chart[data-marks=taps]")
    low, high = shown_range(page)
    assert high - low == 14
    assert page.inner_text("#chart-readout").startswith("model.layers.3.mlp.down_proj (RowParallelLinear): origin 1")
    page.keyboard.press("Enter")
    assert page.inner_text("#tap-chip").startswith("tap model.layers.3.mlp.down_proj")
    page.focus("#chart")
    page.keyboard.press("Escape")
    page.wait_for_selector("#chart[data-marks=layers]")
    page.keyboard.press("End")
    assert page.inner_text("#chart-readout").startswith("logits_processor (LogitsProcessor)")


@pytest.mark.parametrize(("chart", "shown"), [("chart", "range"), ("heat", "columns")])
def test_keys_and_drags_of_perfetto(visit, chart, shown):
    """Each step: what is done, and how the shown part's width and beginning change (-1, 0, 1)."""
    page = visit(with_rows(deep(8)))
    page.wait_for_selector(f"#{chart}[data-ready]")
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


@pytest.mark.parametrize("width", [1440, 390])
def test_no_mark_and_no_label_is_cut_off(visit, width):
    result = deep(8)
    page = visit(replace(result, origins=[*result.origins, ORIGIN | {"module": "logits_processor"}]), width=width)
    page.wait_for_selector("#chart[data-ready]")
    cut = """id => { const frame = document.getElementById(id).getBoundingClientRect();
        return [...document.querySelectorAll(`#${id} text, #${id} circle`)].filter((e) => {
            const box = e.getBoundingClientRect();
            return box.left < frame.left || box.right > frame.right || box.top < frame.top || box.bottom > frame.bottom;
        }).map((e) => e.textContent || e.tagName); }"""
    assert page.locator("#chart .origin-mark").count() == 3
    assert page.evaluate(cut, "chart") == []


# --- clicks in a real Chromium ---


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


# --- tokens' text in the heat map, in a real Chromium ---


EVIL = "</script><img src=x onerror=window.pwned=1>"
RIGHT_TO_LEFT = "שלום"
TEXTS = {0: "The", 1: " quick", 2: r"\n", 3: EVIL, 4: " ", 5: RIGHT_TO_LEFT}


class Words:
    """A vocabulary of a few words."""

    def text(self, token):
        return TEXTS.get(token)


def told(ids, at=None):
    """The map of one request whose tokens these are."""
    rows = row_table([(0, "a", i, i > 2, 0.1, 0.5 + i % 3) for i in range(len(ids))])
    result = comparison(pairs=[pair(tap="model.layers.0.mlp", status="fail")], rows=rows, verdict="fail")
    places = np.arange(len(ids)) if at is None else at
    return result, TokenTexts(Words(), {"a": (places, np.array(ids))}, "mine")


@pytest.fixture
def visit_with(visit, tmp_path):
    def open_(result, tokens, **viewport):
        write_html(result, tmp_path / "tokens.html", tokens=tokens)
        page = visit.at((tmp_path / "tokens.html").as_uri(), **viewport)
        page.wait_for_selector("#heat[data-ready]")
        return page

    return open_


def labels(page):
    return page.locator("#heat .xtick").all_text_contents()


def read(page, column):
    page.focus("#heat")
    page.keyboard.press("Home")
    for _ in range(column):
        page.keyboard.press("ArrowRight")
    return page.inner_text("#heat-readout")


def test_every_token_is_told_and_few_have_labels_below_them(visit_with):
    page = visit_with(*told([0, 1, 2, 3, 4, 99]), width=1440)
    assert labels(page) == ["0The", "1quick", r"2\n", "3</script>…", "4␣", "5?"]
    said = [read(page, i).split(" (")[0].split("position ")[1] for i in range(6)]
    assert said[:3] == ["0 “\u2068The\u2069”", "1 “\u2068 quick\u2069”", "2 “\u2068\\n\u2069”"]
    assert said[3] == f"3 “\u2068{EVIL}\u2069”"
    assert said[5] == "5 “\u2068[99 is not in the vocabulary]\u2069”"
    assert "this page holds the text of prompts and answers" in page.inner_text(".heat-map").lower()
    page.mouse.move(0, 0)
    click_cell(page, 0, 3, "model.layers.0, position 3")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0
