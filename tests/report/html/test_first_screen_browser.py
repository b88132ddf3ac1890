"""The first screen in a real Chromium: origins open their pairs; commands are copied, or selected where they cannot."""

from dataclasses import replace

import pytest
from on_the_page import column
from report_examples import DIVERGENCE, EVIL, ORIGIN, comparison, pair, realistic, with_rows

pytestmark = pytest.mark.browser

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


@pytest.mark.parametrize("how", ["refused", "missing"])
def test_where_the_clipboard_is_closed_the_command_is_selected(visit, how):
    page = visit(several())
    refused = "{ writeText: () => Promise.reject(new Error('no')) }" if how == "refused" else "undefined"
    page.evaluate(f"Object.defineProperty(navigator, 'clipboard', {{ value: {refused} }})")
    page.click(".next button.copy >> nth=0")
    page.wait_for_function("document.querySelector('.next button.copy').textContent === 'Selected'")
    assert page.evaluate("String(getSelection())") == several().next_steps[0]["command"]
    assert "press Ctrl or ⌘ and C" in page.inner_text("#copied")


def test_a_pass_has_no_commands_and_no_origins(visit):
    page = visit(realistic(fail=False))
    assert page.locator(".next, .origin-list").count() == 0
    assert page.inner_text("#pair-sum") == "2,763 pairs = 2,760 pass + 0 fail + 3 skipped"


def test_hostile_names_are_text_here_too(visit):
    evil = EVIL.replace("\x1b", "").replace("\u202e", "")
    found = {"module": evil, "class": evil, "tier": evil, "role": "output.0"}
    page = visit(
        comparison(
            pairs=[pair(tap=evil, status="fail", golden=f"{evil}/output.0", mine=f"{evil}/output.0")],
            verdict="fail", origins=[ORIGIN | found], first_divergence=DIVERGENCE, mine_path=evil, out=evil,
        )
    )  # fmt: skip
    assert page.locator("img").count() == 0
    assert page.evaluate("window.pwned") is None
    assert "</script><img" in page.inner_text(".origin-list")
    page.click(".origin-list button")
    assert page.locator("#body tr.row").count() == 1


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768), (390, 844)])
def test_nothing_of_it_sticks_out(visit, width, height):
    page = visit(several(), width=width, height=height)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for i in range(page.locator(".next button.copy").count()):
        box = page.locator(".next button.copy").nth(i).bounding_box()
        assert box["x"] + box["width"] <= width
