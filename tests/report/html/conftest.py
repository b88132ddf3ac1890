"""A real Chromium for the page's tests: whoever visits a page fails on any console error or network request."""

import pytest
from support.browser_pages import chromium

from vllm_accprobe.report.html import write_html


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser, tmp_path):
    """visit(comparison) → a page that has drawn itself, visit.at(url) → one more of the same file; the test fails on
    any console error or network request."""
    troubles = []
    opened = []

    def at(url, **viewport):
        page = browser.new_page(viewport={"width": 1440, "height": 900} | viewport)
        opened.append(page)
        page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: troubles.append(str(e)))
        page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto(url)
        page.wait_for_selector("body[data-ready]", state="attached")
        return page

    def open_(result, **viewport):
        write_html(result, tmp_path / "compare.html")
        return at((tmp_path / "compare.html").as_uri(), **viewport)

    open_.at = at
    yield open_
    for page in opened:
        page.close()
    assert troubles == []
