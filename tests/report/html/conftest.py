"""A real Chromium for the page's tests: whoever visits a page fails on any console error or network request."""

import pytest
from support.browser_pages import chromium, opened

from vllm_accprobe.report.html import write_html


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser, tmp_path):
    """visit(comparison) → a page that has drawn itself, visit.at(url) → one more of the same file."""

    def open_(result, **viewport):
        write_html(result, tmp_path / "compare.html")
        return at(tmp_path / "compare.html", **viewport)

    with opened(browser) as at:
        open_.at = at
        yield open_
