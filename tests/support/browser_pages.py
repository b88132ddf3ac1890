"""A Chromium for tests of pages, and pages in it that must stay silent and offline."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _missing(what: str) -> None:
    if os.environ.get("CI") or os.environ.get("ACCPROBE_REQUIRE_BROWSER"):
        pytest.fail(f"{what}: install Chromium and playwright, or unset CI and ACCPROBE_REQUIRE_BROWSER")
    pytest.skip(what)


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser; skips the test, or fails it where a browser must be, where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        _missing("no Chromium was found on PATH")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any) -> Iterator[Any]:
    """``open_(path or url, **viewport)`` → a page that has drawn itself. Fails at the end on any error or warning of
    the console, and on any request that leaves the machine."""
    troubles: list[str] = []
    pages = []

    def open_(place: Path | str, **viewport: int) -> Any:
        page = browser.new_page(viewport={"width": 1440, "height": 900} | viewport)
        pages.append(page)
        page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: troubles.append(str(e)))
        page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto(place if isinstance(place, str) else place.as_uri())
        page.wait_for_selector("body[data-ready]", state="attached")
        return page

    yield open_
    for page in pages:
        page.close()
    assert troubles == []
