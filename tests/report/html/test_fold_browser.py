"""Ranks in one row, in Chromium: the worst stands for all, nothing is lost, and each way to see them all shows them."""

import csv
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from on_the_page import column, shown

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[3]
PAIRS, RANKS = 1_200, 16


def made(ranks=RANKS):
    path = ROOT / "benchmarks" / "made_comparison.py"
    spec = importlib.util.spec_from_file_location("made_comparison", path)
    module = sys.modules["made_comparison"] = importlib.util.module_from_spec(spec)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module.made(module.Made(PAIRS, 6, ranks))


def rows(page):
    return int(page.get_attribute("#grid", "aria-rowcount")) - 1


def all_pairs(page):
    page.click("#status button[value=all]")
    return rows(page)


def test_the_worst_rank_stands_for_all_and_the_chip_shows_the_others(visit):
    result = made()
    page = visit(result)
    tensors = {(p.tap, p.role, p.call, p.step) for p in result.pairs}
    assert all_pairs(page) == len(tensors) < PAIRS
    assert shown(page) == "1,200 pairs"  # all of them are there, in fewer rows
    page.click("#head th[data-id=over] button")
    worst = max((p for p in result.pairs if p.status == "fail"), key=lambda p: p.measured / p.allowed)
    cell = page.eval_on_selector_all("#head th", "e => e.map(t => t.dataset.id)").index("rank")
    assert re.fullmatch(rf"{worst.rank} \+\d+", column(page, cell)[0])
    page.click("#ranks")
    assert page.get_attribute("#ranks", "aria-pressed") == "false"
    assert rows(page) == PAIRS
    assert "+" not in "".join(column(page, cell))
    for _ in range(50):  # the address follows a moment later
        if "ranks=all" in page.url:
            break
        page.wait_for_timeout(100)
    again = visit.at(page.url)
    assert rows(again) == PAIRS


def test_an_open_pair_shows_its_ranks(visit):
    page = visit(made())
    all_pairs(page)
    page.click("#body tr.row")
    button = page.locator("#detail button.ranks")
    said = int(re.fullmatch(r"Show all (\d+) ranks of it", button.inner_text())[1])
    button.click()
    assert rows(page) == said == RANKS
    assert shown(page).startswith(f"{RANKS} pairs of")


def test_what_is_saved_are_all_ranks(visit, tmp_path):
    page = visit(made())
    all_pairs(page)
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "saved.csv")
    with (tmp_path / "saved.csv").open(newline="", encoding="utf-8-sig") as f:
        assert len(list(csv.DictReader(f))) == PAIRS
