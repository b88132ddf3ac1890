"""A page of 2,000 pairs on 8 ranks, clicked through in Chromium: nothing is lost, little is drawn, little is stored."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from support.browser_pages import chromium, opened

from vllm_accprobe.report.html import write_html

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[3]
PAIRS, LAYERS, RANKS = 2_000, 20, 8


def made():
    path = ROOT / "benchmarks" / "made_comparison.py"
    spec = importlib.util.spec_from_file_location("made_comparison", path)
    module = sys.modules["made_comparison"] = importlib.util.module_from_spec(spec)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module.made(module.Made(PAIRS, LAYERS, RANKS))


@pytest.fixture(scope="module")
def result():
    return made()


@pytest.fixture(scope="module")
def path(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "compare.html"
    write_html(result, path)
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser, path):
    with opened(browser) as open_:
        yield open_(path)


def shown(page):
    return page.inner_text("#shown")


def test_a_pair_takes_few_bytes(path):
    """20,000 pairs are to fit into 5 MB: 250 bytes for each; 100 of them are the pair's own."""
    blocks = dict(re.findall(r'<script type="application/gzip" id="([^"]+)">([^<]*)<', path.read_text("utf-8")))
    assert len(blocks["pairs-json"]) < 100 * PAIRS
    assert len(blocks["view-json"]) < 500_000  # bounded: the worst rows, samples, and the heat map's bytes
    rest = path.stat().st_size - sum(map(len, blocks.values()))
    assert rest < 300_000


def test_filter_sort_and_the_last_row(page, result):
    failed = sum(p.status == "fail" for p in result.pairs)
    assert 500 < failed < PAIRS
    assert shown(page) == f"{failed:,} pairs of {PAIRS:,}"
    page.click("#status button[value=all]")
    assert shown(page) == f"{PAIRS:,} pairs"
    assert page.locator("#body tr.row").count() < 80
    page.fill("#find", "layers.7 down_proj")
    own = sum(p.tap == "model.layers.7.mlp.down_proj" for p in result.pairs)
    page.get_by_text(f"{own} pairs of {PAIRS:,}", exact=True).wait_for()
    page.fill("#find", "")
    page.get_by_text(f"{PAIRS:,} pairs", exact=True).wait_for()
    page.click("#head th[data-id=over] button")
    page.focus("#grid")
    page.keyboard.press("End")
    page.wait_for_selector(f"#r{PAIRS - 1}")
    assert page.locator("#body tr.row").count() < 80
