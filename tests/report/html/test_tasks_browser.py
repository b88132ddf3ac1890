"""Three tasks of whoever opens the page, done as he would in a real Chromium, and how many clicks each takes: the first
wrong value, the command that makes the kernel team's folder, the text of a prompt's token."""

import re
from dataclasses import replace

import numpy as np
import pytest
from on_the_page import cell
from report_examples import CULPRIT, realistic, with_rows

from vllm_accprobe.report.html import write_html
from vllm_accprobe.report.html.data import TokenTexts

pytestmark = pytest.mark.browser


class Words:
    def text(self, token):
        return f"word{token}"


@pytest.fixture
def page(visit, tmp_path):
    """A page of a replayed comparison with tokens' text, which counts the clicks that reach it."""
    result = with_rows(realistic())
    values = {"max_abs_index": (4, 37), "max_abs_golden": -1.25, "max_abs_mine": -1.5}
    pairs = [replace(p, **values) if p.tap == CULPRIT and p.status == "fail" else p for p in result.pairs]
    origin = result.origins[0] | {"evidence": "replay", "tier": "proved", "times": 13.1}
    result = replace(result, pairs=pairs, origins=[origin, *result.origins[1:]])
    tokens = TokenTexts(Words(), {"a": (np.arange(60), np.arange(60))}, "mine")
    write_html(result, tmp_path / "tasks.html", tokens=tokens)
    page = visit.at((tmp_path / "tasks.html").as_uri())
    page.evaluate("window.clicks = 0; addEventListener('click', () => { window.clicks++; }, true)")
    return page


def clicks(page):
    return page.evaluate("window.clicks")


def test_the_first_wrong_value_takes_one_click(page):
    page.click("h1 .culprit")
    said = page.inner_text("#detail .apart")
    assert said == "Farthest apart at [4, 37]: golden -1.25, mine -1.5"
    assert page.locator("#detail .apart").bounding_box()["y"] < 900
    assert clicks(page) == 1


def test_the_command_for_the_kernel_team_s_folder_takes_one_click(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".next li", has_text="accprobe gentest").locator("button.copy").click()
    page.get_by_text("Copied.", exact=True).wait_for()
    assert re.fullmatch(rf"accprobe gentest \S+ --failed --ops {re.escape(CULPRIT)}( --out \S+)?",
                        page.evaluate("navigator.clipboard.readText()"))  # fmt: skip
    assert clicks(page) == 1


def test_the_text_of_a_prompt_s_token_takes_none(page):
    page.mouse.move(*cell(page, 4, 7))
    assert page.inner_text("#heat-readout").startswith("model.layers.3, position 7 “\u2068word7\u2069” (prefill)")
    assert page.inner_text("#heat .tip") == page.inner_text("#heat-readout")
    assert clicks(page) == 0
