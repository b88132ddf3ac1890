"""Tokens' text in the heat map, in a real Chromium: where it is told, where it has room, and that it stays text."""

from itertools import pairwise

import numpy as np
import pytest
from on_the_page import click_cell
from report_examples import comparison, pair, row_table

from vllm_accprobe.report.html import write_html
from vllm_accprobe.report.html.data import TokenTexts

pytestmark = pytest.mark.browser

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


def test_many_stand_upright_and_too_many_are_positions(visit_with):
    page = visit_with(*told([1, 5] * 12), width=1440)
    assert labels(page)[:2] == ["quick 0", f"{RIGHT_TO_LEFT} 1"]
    assert len(labels(page)) == 24
    boxes = page.eval_on_selector_all("#heat .xtick", "all => all.map(t => t.getBoundingClientRect().toJSON())")
    assert all(a["right"] <= b["left"] + 2 for a, b in pairwise(boxes))
    frame = page.locator("#heat").bounding_box()
    assert all(b["bottom"] <= frame["y"] + frame["height"] for b in boxes)
    page = visit_with(*told([1, 5] * 200), width=1440)
    assert labels(page)[0] == "0"
    assert all(t.isdigit() for t in labels(page))
    assert "“\u2068 quick\u2069”" in read(page, 2)


def test_a_bin_tells_its_first_tokens_and_a_request_without_ids_its_positions(visit_with):
    page = visit_with(*told([0, 1] * 600), width=1440)  # 1,200 positions in 400 columns of three
    assert "position 0–2 “\u2068The quickThe\u2069” (prefill)" in read(page, 0)
    result, _ = told([0, 1, 2])
    page = visit_with(result, TokenTexts(Words(), {"b": (np.array([0]), np.array([0]))}, "mine"))
    assert labels(page) == ["0", "1", "2"]
    assert "position 0 (prefill)" in read(page, 0)
    page = visit_with(result, TokenTexts(Words(), {}, "mine<b>"))
    assert "No token ids are recorded in mine<b>" in page.inner_text(".heat-map")
