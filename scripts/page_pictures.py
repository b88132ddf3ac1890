"""Pictures of compare.html's first screen, and how many clicks three tasks take on it.

    bash scripts/demo.sh demo-out
    accprobe compare demo-out/golden demo-out/mine --tokenizer demo-out/model -o demo-out/report
    python scripts/page_pictures.py demo-out/report/compare.html --out docs/img/page [--large LARGE.html]

The problem: whether a page decides on its first screen is seen, not asserted. The idea: headless Chromium takes the
first screen at 1,440 and 390 pixels, light and dark, and printed, of a page and of a second one (a PASS; or a large
one: ``python benchmarks/bench_page.py --keep LARGE.html``); then it does what a person would, and counts the clicks:
from the page's opening to the first wrong value, to the command that makes the kernel team's folder, to the text of a
prompt's token. A task that cannot be done ends the script with 1. How long it takes: benchmarks/bench_page.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from netron_picture import chromium

VIEWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1440, "height": 900}},
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "390": {"viewport": {"width": 390, "height": 844}},
    "390-dark": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
    "printed": {"viewport": {"width": 794, "height": 1123}},
}
"""A4 at 96 dots to an inch is 794 x 1123."""


class Failed(Exception):
    """A task cannot be done on this page."""


def pictures(browser: Any, page: Path, out: Path, prefix: str) -> list[Path]:
    """One file a view."""
    made = []
    for name, how in VIEWS.items():
        tab = _opened(browser, page, **how)
        if name == "printed":
            tab.emulate_media(media="print")
            tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
            tab.wait_for_timeout(800)
        made.append(out / f"{prefix}{name}.png")
        tab.screenshot(path=str(made[-1]))
        tab.close()
    return made


def tasks(browser: Any, page: Path) -> dict[str, int]:
    """What was to be done, and how many clicks it took. Raises Failed."""
    found = {}
    for name, task in TASKS.items():
        tab = _opened(browser, page, **VIEWS["light"])
        found[name] = task(tab)
        tab.close()
    return found


def wrong_value(tab: Any) -> int:
    """The culprit's worst rows, with both sides' numbers."""
    tab.click("h1 .culprit")
    tab.wait_for_selector("#detail:not([hidden]) table")
    text = tab.inner_text("#detail").lower()
    if "golden" not in text or "mine" not in text:
        raise Failed("the culprit's pair opens without golden's and mine's values")
    return 1


def folder(tab: Any) -> int:
    """`gentest` as it is typed; one click copies it."""
    for typed in tab.query_selector_all("section.next li"):
        if "accprobe gentest " in typed.inner_text():
            typed.query_selector("button.copy").click()
            return 1
    raise Failed("no gentest among the next steps: no operator was convicted by a replay")


def token(tab: Any) -> int:
    """A token's text, in the line below the map: pointing at a cell is enough."""
    box = tab.locator("#heat .area").first.bounding_box()
    if box is None:
        raise Failed("there is no map of tokens")
    for x in range(4, 60):
        tab.mouse.move(box["x"] + box["width"] * x / 64, box["y"] + box["height"] / 2)
        tab.wait_for_timeout(60)
        if "“" in tab.inner_text("#heat-readout"):
            return 0
    raise Failed(f"the map tells no token's text: {tab.inner_text('#heat-readout')!r}; was --tokenizer given?")


TASKS: dict[str, Callable[[Any], int]] = {
    "the first wrong value": wrong_value,
    "the command for the kernel team's folder, copied": folder,
    "the text of a prompt's token": token,
}


def _opened(browser: Any, page: Path, **how: Any) -> Any:
    tab = browser.new_page(**how)
    tab.goto(page.resolve().as_uri())
    tab.wait_for_selector("body[data-ready]", state="attached")
    drawn = "() => { const c = document.querySelector('#chart'); return !c || c.dataset.ready || !c.offsetParent; }"
    tab.wait_for_function(drawn, timeout=60_000)  # a PASS may have no chart
    tab.wait_for_timeout(600)
    return tab


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--large", type=Path, help="a second page, of a large model or a PASS: pictures alone")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    absent = [p for p in (arguments.page, arguments.large) if p is not None and not p.is_file()]
    if absent:
        print(f"error: {absent[0]} is no file", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    arguments.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        made = pictures(browser, arguments.page, arguments.out, "")
        if arguments.large is not None:
            made += pictures(browser, arguments.large, arguments.out, "large-")
        for path in made:
            print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")
        try:
            for name, clicks in tasks(browser, arguments.page).items():
                print(f"{name}: {clicks} {'click' if clicks == 1 else 'clicks'}")
        except Failed as why:
            print(f"error: {why}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
