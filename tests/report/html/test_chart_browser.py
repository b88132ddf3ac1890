"""The depth chart in a real Chromium: origins by number above the line of all limits; of many layers a mark each, which
opens into its taps."""

from dataclasses import replace

import pytest
from report_examples import ORIGIN, realistic

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


def test_dragging_over_layers_shows_their_taps_and_a_double_click_goes_back(visit):
    page = chart(visit, deep(60))
    box = page.locator("#chart .area").first.bounding_box()
    y = box["y"] + box["height"] * 0.85
    page.mouse.move(box["x"] + 20, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 20 + box["width"] / 10, y, steps=8)
    page.mouse.up()
    page.wait_for_selector("#chart[data-marks=taps]")
    low, high = shown_range(page)
    assert 0 < low < high < 200
    page.wait_for_timeout(400)
    page.mouse.dblclick(box["x"] + box["width"] * 0.8, y)
    page.wait_for_selector("#chart[data-marks=layers]")


def test_a_click_on_a_layer_opens_it_and_a_button_goes_back(visit):
    page = chart(visit, deep(60))
    box = page.locator("#chart .origin-mark circle").last.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.wait_for_selector("#chart .tip:not([hidden])")
    assert page.inner_text("#chart .tip").startswith("model.layers.3\norigin 1\ncreated 13.1×")
    page.mouse.click(x, y)
    page.wait_for_selector("#chart[data-marks=taps]")
    assert page.inner_text("#chart-readout").startswith("model.layers.3.mlp.down_proj (RowParallelLinear): origin 1")
    page.click("#chart-back")
    page.wait_for_selector("#chart[data-marks=layers]")
    assert page.is_hidden("#chart-back")


def test_a_press_beside_all_marks_opens_nothing(visit):
    page = chart(visit, deep(60))
    box = page.locator("#chart .area").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + box["height"] - 4)
    page.wait_for_timeout(200)
    assert page.get_attribute("#chart", "data-marks") == "layers"
    assert page.is_hidden("#tap-chip")


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


def test_a_narrower_window_draws_again(visit):
    page = chart(visit, deep(8))
    width = "document.querySelector('#chart svg').getBoundingClientRect().width"
    before = page.evaluate(width)
    page.set_viewport_size({"width": 500, "height": 900})
    for _ in range(100):
        if page.evaluate(width) < 480:
            break
        page.wait_for_timeout(50)
    assert page.evaluate(width) < 480 < 600 < before
    assert page.evaluate("document.documentElement.scrollWidth") <= 500
