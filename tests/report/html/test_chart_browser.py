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
    """(number, y of its middle in pixels) of each origin's mark."""
    return page.evaluate(
        """() => [...document.querySelectorAll("#chart .scatterlayer .trace:last-child .textpoint text")].map((t) => {
            const box = t.getBoundingClientRect();
            return [t.textContent, box.y + box.height / 2];
        })"""
    )


def line(page):
    """y of the limit in pixels."""
    return page.evaluate(
        """() => { const c = document.getElementById("chart"), l = c._fullLayout;
                  return c.getBoundingClientRect().y + l.yaxis._offset + l.yaxis.l2p(0); }"""
    )


@pytest.mark.parametrize(("layers", "marks"), [(8, "taps"), (60, "layers")])
def test_origins_have_their_numbers_and_lie_above_the_limit(visit, layers, marks):
    page = chart(visit, deep(layers))
    assert page.get_attribute("#chart", "data-marks") == marks
    found = numbers(page)
    assert [number for number, _ in found] == ["1", "2"]
    assert all(y < line(page) for _, y in found)
    points = page.locator("#chart .scatterlayer .trace").nth(2).locator(".point")  # created, behind two phases
    assert points.count() == (layers - 2 + 3 if marks == "layers" else layers * 14 + 3 - 2)
    assert all(points.nth(i).bounding_box()["y"] > line(page) for i in range(points.count()))


def test_a_layer_opens_into_its_taps_and_back_by_keyboard(visit):
    page = chart(visit, deep(60))
    page.focus("#chart")
    for key in ("ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text("#chart-readout").startswith("model.layers.3: origin 1, created 13.1×")
    assert "worst model.layers.3.mlp.down_proj" in page.inner_text("#chart-readout")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chart[data-marks=taps]")
    low, high = page.evaluate("document.getElementById('chart')._fullLayout.xaxis.range")
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
    box = page.locator("#chart .nsewdrag").first.bounding_box()
    y = box["y"] + box["height"] * 0.85
    page.mouse.move(box["x"] + 20, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 20 + box["width"] / 10, y, steps=8)
    page.mouse.up()
    page.wait_for_selector("#chart[data-marks=taps]")
    low, high = page.evaluate("document.getElementById('chart')._fullLayout.xaxis.range")
    assert 0 < low < high < 200
    page.wait_for_timeout(400)
    page.mouse.dblclick(box["x"] + box["width"] * 0.8, y)
    page.wait_for_selector("#chart[data-marks=layers]")


def test_a_click_on_a_layer_opens_it(visit):
    page = chart(visit, deep(60))
    box = page.locator("#chart .scatterlayer .trace").last.locator(".point").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#chart .hovertext")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#chart[data-marks=taps]")
