"""The page in a real Chromium: it draws, filters, sorts, and hostile names stay text."""

import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from on_the_page import click_cell, column, shown
from report_examples import ORIGIN, comparison, hostile, pair, realistic, with_rows

from vllm_accprobe.comparison.row_table import ValueSpread
from vllm_accprobe.comparison.verdict.neighbours import Edge, OriginNeighbours
from vllm_accprobe.dump.reader import matches

pytestmark = pytest.mark.browser


def test_first_screen_filter_and_sort(visit):
    result = replace(realistic(), created={"model.layers.1.mlp": 0.3})
    failed = sum(p.status == "fail" for p in result.pairs)
    page = visit(result)
    page.wait_for_selector("#chart[data-ready] path.line")
    assert page.inner_text("h1 .culprit") == "model.layers.3.mlp.down_proj"
    assert page.locator("#chart").bounding_box()["y"] < 500
    legend = page.locator("#chart .keys li").all_text_contents()
    assert legend == ["prefill", "decode", "created", "limit", "origins"]

    assert shown(page) == f"{failed} pairs of {len(result.pairs):,}"
    page.click("#status button[value=all]")
    assert shown(page) == f"{len(result.pairs):,} pairs"
    assert page.locator("#body tr.row").count() < 60

    page.fill("#find", "layers.3.mlp.down_proj output decode")
    page.get_by_text("10 pairs of 2,763", exact=True).wait_for()
    assert set(column(page, 1)) == {"model.layers.3.mlp.down_proj"}
    assert set(column(page, 2)) == {"output.0"}

    page.click("#head th[data-id=value] button")
    assert page.get_attribute("#head th[data-id=value]", "aria-sort") == "descending"
    index = page.evaluate("[...document.querySelectorAll('#head th')].findIndex(t => t.dataset.id === 'value')")
    errors = [float(x) for x in column(page, index)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == 0.21
    page.click("#head th[data-id=value] button")
    errors = [float(x) for x in column(page, index)]
    assert errors == sorted(errors)


def test_keyboard_alone(visit):
    page = visit(realistic())
    page.wait_for_selector("#chart[data-ready]")
    page.focus("#chart")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "model.layers.3.mlp" in page.inner_text("#tap-chip")
    page.focus("#grid")
    for key in ("End", "Home", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    active = page.get_attribute("#grid", "aria-activedescendant")
    assert active == "r1"
    assert page.is_visible("#detail")
    assert "worst row rel l2" in page.inner_text("#detail")
    page.keyboard.press("Escape")
    assert page.is_hidden("#detail")


def test_hostile_names_are_text(visit):
    page = visit(hostile())
    page.wait_for_selector("#chart[data-ready]")
    page.wait_for_selector("#heat[data-ready]")
    assert "</script><img" in page.inner_text("#heat-readout") + page.inner_text("#heat-request")
    assert "</script><img" in page.inner_text("#tree")
    page.focus("#chart")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#chart .tip:not([hidden])")
    page.click("#body tr.row")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0
    assert "</script><img" in page.get_attribute("#body tr.row td:nth-child(2)", "title")
    assert page.inner_text("#body tr.row td:nth-child(2)").startswith("…")  # a long name shows its end
    assert "</script><img" in page.inner_text("h1")
    page.wait_for_selector(".small-plot[data-ready]")
    assert "</script><img" in page.inner_text("#detail")
    assert page.locator(".shape img, #heat a, #tree img").count() == 0
    assert page.locator("#chart a").count() == 0


def test_heat_map_opens_a_layer_and_a_cell_shows_its_pairs(visit):
    page = visit(with_rows(realistic()))
    page.wait_for_selector("#heat[data-ready]")
    page.locator("#heat").scroll_into_view_if_needed()
    # It begins with the culprit's request at the first cell beyond its limit: layer 3 at the first token of step 4.
    assert page.locator("#heat-request option").all_text_contents()[0].startswith("a  (worst 1")
    assert page.inner_text("#heat-readout").startswith("model.layers.3, position 50 (decode): 1")
    click_cell(page, 4, 50, "model.layers.3, position 50")  # embed_tokens, layers 0 to 2, then layer 3
    assert page.inner_text("#heat-level") == "model.layers.3"
    assert page.inner_text("#tap-chip").startswith("under model.layers.3, step 4")
    assert set(column(page, 3)) == {"4"}
    assert shown(page).startswith("28 pairs")
    click_cell(page, 11, 50, "model.layers.3.mlp.down_proj, position 50")  # the twelfth tap of the layer
    assert page.inner_text("#tap-chip").startswith("tap model.layers.3.mlp.down_proj, step 4")
    assert shown(page).startswith("2 pairs")
    assert page.is_visible("#detail")
    assert "down_proj/output.0" in page.inner_text("#detail .top")
    page.wait_for_selector("#detail .small-plot[data-ready]")
    assert page.locator("#detail .small-plot[data-ready]").count() == 2
    assert page.inner_text("#detail .worst-rows tbody tr:first-child").split()[:4] == ["a", "50", "decode", "0.21"]
    page.click("#heat-back")
    assert page.inner_text("#heat-level") == "all layers"


def test_tree_is_opened_to_the_culprit_and_filters(visit):
    page = visit(with_rows(realistic()))
    culprit = page.locator("#tree [data-path='model.layers.3.mlp.down_proj']")
    assert "culprit" in culprit.inner_text()
    assert culprit.get_attribute("aria-selected") == "true"
    assert culprit.get_attribute("aria-level") == "5"
    culprit.locator(".node").click()
    assert page.inner_text("#tap-chip").startswith("under model.layers.3.mlp.down_proj")
    assert shown(page).startswith("24 pairs")
    # By keyboard: to the parent, close it, to its parent's next layer, open it.
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.path") == "model.layers.3.mlp"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    assert culprit.count() == 0
    page.keyboard.press("4")
    assert page.evaluate("document.activeElement.dataset.path") == "model.layers.4"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.path").startswith("model.layers.4.")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert page.inner_text("#tap-chip").startswith("under model")
    assert page.locator("#tree [tabindex='0']").count() == 1


def test_without_rows_the_page_still_stands(visit):
    page = visit(realistic(fail=False))
    assert page.is_visible("#heat-none")
    assert page.is_hidden("#heat")
    assert page.locator("#tree [role=treeitem]").count() >= 1


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
        folder = words[words.index("--out") + 1]
        assert folder.startswith("compare-")
        assert "/" not in folder
    page.evaluate("i => accprobe.showPair(i)", len(names))
    assert "both sides hold the same values" in page.inner_text("#detail")
    assert page.locator("#detail code.again").count() == 0
    page.evaluate("i => accprobe.showPair(i)", len(names) + 1)
    assert "Of an input only the rows beyond its limit are kept" in page.inner_text("#detail")


def test_an_origins_neighbours_are_drawn_and_a_node_opens_its_pair_by_click_and_by_key(visit):
    result = realistic(layers=4, steps=5)
    at = {(p.tap, p.role): i for i, p in enumerate(result.pairs) if p.step == 4}
    act, layer = "model.layers.3.mlp.act_fn", "model.layers.3.mlp"
    hostile_name = "<img src=x onerror=alert(1)>" + "x" * 60
    fed = (
        Edge(act, "output.0", "input.0", 0.0, 0.0, "identical", "both", at[act, "output.0"]),
        Edge(hostile_name, "param.weight", "param.weight", None, None, "skip", "own", None),
    )
    feeds = (Edge(layer, "output.0", "", 0.2, 13.0, "fail", "order", at[layer, "output.0"]),)
    around = OriginNeighbours(result.origins[0]["module"], "output.0", fed, feeds, (2, 0))
    object.__setattr__(result, "neighbours", [around, *[None] * (len(result.origins) - 1)])
    page = visit(result)
    page.click("#body tr.fail >> nth=0")
    figure = page.locator("#detail .around")
    assert figure.locator("figcaption").inner_text() == "What fed it, and what it feeds"
    drawing = figure.locator("svg")
    assert drawing.get_attribute("aria-label").startswith(f"{around.tap}/output.0: fed by {act}/output.0 (identical)")
    assert figure.locator("text.said").all_text_contents() == ["identical", "not compared", "13×"]
    nodes = figure.locator("[role=button]")
    assert [n.get_attribute("aria-label") for n in nodes.all()] == [
        f"Fed by {act}/output.0: identical. Opens this pair",
        f"Feeds {layer}/output.0: 13x its limit. Opens this pair",
    ]
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
    page.evaluate("tap => accprobe.showTap(tap, { open: true })", around.tap)
    page.locator("#detail .around [role=button]").first.click()
    assert page.inner_text("#detail .top code").startswith(f"{act}/output.0")
    assert page.locator("#body tr.at").count() == 1


def test_a_modules_operators_in_order_and_where_its_code_is(visit):
    module = "model.layers.1.mlp.down_proj"
    hostile_op = "their.<b>op</b>.default"
    calls = [("aten.mm.default", 0, 0.5, True), ("aten.add.Tensor", 0, 2.0, False), ("aten.mm.default", 1, 40.0, False),
             (hostile_op, 0, 0.1, False)]  # fmt: skip
    pairs = [pair(tap=module, order=0, step=3, worst_row_rel_l2=0.1, status="fail")]
    for order, (op, call, over, identical) in enumerate(calls):
        status = "fail" if over > 1 else "pass"
        common = {"tap": f"{module}::{op}", "call": call, "step": 3, "order": 1 + 2 * order, "limit": 0.01}
        pairs.append(pair(**common, role="input.0", identical=True, worst_row_rel_l2=0.0))
        common |= {"order": 2 + 2 * order, "worst_row_rel_l2": over * 0.01}
        pairs.append(pair(**common, role="output.0", status=status, identical=identical))
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


# --- the first screen in a real Chromium ---


NAN = {"created": float("inf"), "module": "model.layers.5.mlp.act_fn", "class": "SiluAndMul", "nonfinite": 3}


def several():
    """Three origins, one of which makes NaN, and a report with a place."""
    result = with_rows(realistic())
    broken = [p for p in result.pairs if p.tap == NAN["module"] and p.role == "output.0" and p.step == 5]
    pairs = [replace(p, status="fail", nonfinite_mismatch=7) if p in broken else p for p in result.pairs]
    first = result.origins[0] | {"tier": "beyond chance", "times": 13.1, "chance": 0.0005}
    return replace(result, pairs=pairs, origins=[first, ORIGIN | NAN, result.origins[1]], out="a report")


def test_the_culprit_how_sure_and_all_pairs_in_one_sum(visit):
    page = visit(several())
    header = page.inner_text("header")
    assert "By chance\n1 of 2,000 comparisons with rounding alone" in header
    assert "beyond chance" in header
    total, parts = page.inner_text("#pair-sum").replace(",", "").split(" pairs = ")
    numbers = [int(part.split()[0]) for part in parts.split(" + ")]
    assert int(total) == sum(numbers) == len(several().pairs)
    assert min(numbers) > 0
    for selector in ("#pair-sum", ".origin-list", ".next"):
        box = page.locator(selector).bounding_box()
        assert box["y"] + box["height"] < 500


def test_each_origin_has_its_number_and_opens_its_pairs(visit):
    page = visit(several())
    buttons = page.locator(".origin-list button")
    assert [b.split()[0] for b in buttons.all_inner_texts()] == ["1", "2", "3"]
    assert "NaN or Inf in 3 rows" in buttons.nth(1).inner_text()
    buttons.nth(1).click()
    assert NAN["module"] in page.inner_text("#tap-chip")
    assert set(column(page, 1)) == {NAN["module"]}
    assert page.is_visible("#detail")
    assert f"{NAN['module']}/output.0" in page.inner_text("#detail .top")
    assert column(page, 0)[0] == "fail"
    # By keyboard alone: the culprit's button, then the first command's.
    buttons.nth(0).focus()
    page.keyboard.press("Enter")
    assert "model.layers.3.mlp.down_proj" in page.inner_text("#tap-chip")


def test_a_command_is_copied_as_it_is_typed(visit, browser):
    page = visit(several())
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    commands = [line for step in several().next_steps for line in [step["command"]]]
    buttons = page.locator(".next button.copy")
    assert buttons.count() == len(commands) > 1
    for i, command in enumerate(commands):
        buttons.nth(i).focus()
        page.keyboard.press("Enter")
        page.wait_for_function("i => document.querySelectorAll('.next button.copy')[i].textContent === 'Copied'", arg=i)
        assert page.evaluate("navigator.clipboard.readText()") == command
        assert page.inner_text("#copied") == "Copied."


CUT = """() => [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && e.clientWidth
    && getComputedStyle(e).overflowX === "hidden" && e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768), (390, 844)])
def test_nothing_of_it_sticks_out_or_is_cut(visit, width, height):
    page = visit(several(), width=width, height=height)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert width == 1024 or page.evaluate(CUT) == []
    for i in range(page.locator(".next button.copy").count()):
        box = page.locator(".next button.copy").nth(i).bounding_box()
        assert box["x"] + box["width"] <= width
