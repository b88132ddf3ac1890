"""A picture of an ONNX file as Netron shows it: proof that Netron opens what ``accprobe convert --to onnx`` writes.

    accprobe convert demo-out/golden model.onnx
    python scripts/netron_picture.py model.onnx docs/img/netron.png --find model.layers.0.input_layernorm

The problem: onnx's checker may pass what a viewer does not open. The idea: Netron's own page, served by its Python
package, in a headless Chromium; what it has drawn is counted in the page, and a picture taken around one node.
Needs the packages netron and playwright, and a Chromium (``CHROMIUM``, or on the PATH).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Drawn:
    """What the page shows: nodes and edges, and the titles of the nodes."""

    nodes: int
    edges: int
    titles: tuple[str, ...]


def chromium() -> str | None:
    """The browser's path; None: playwright's own."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    return found


def draw(model: Path, picture: Path | None = None, find: str = "", size: tuple[int, int] = (1000, 760)) -> Drawn:
    """Opens ``model`` in Netron and counts. picture: where a .png goes, around the node called ``find``. Raises
    RuntimeError with what Netron says where it does not open the file."""
    import netron
    from playwright.sync_api import TimeoutError as PlaywrightTimeout, sync_playwright

    address = netron.serve(model.name, model.read_bytes(), address=("127.0.0.1", 0))
    host, port = address
    try:
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": size[0], "height": size[1]})
            page.add_init_script(_PAGE)
            page.context.add_cookies([{"name": "consent", "value": "1", "url": f"http://{host}:{port}"}])
            page.route(lambda url: f"{host}:{port}" not in url, lambda route: route.abort())  # nobody is told anything
            page.goto(f"http://{host}:{port}")
            try:
                page.wait_for_selector("g.node", timeout=60_000)
            except PlaywrightTimeout:
                raise RuntimeError(" ".join(page.inner_text("body").split())[:300]) from None
            page.wait_for_timeout(1000)
            found = page.evaluate(_COUNT)
            if picture is not None:
                if find:
                    page.evaluate(_CENTRE, find)
                    page.wait_for_timeout(500)
                page.screenshot(path=str(picture))
            browser.close()
    finally:
        netron.stop(address)
    return Drawn(found["nodes"], found["edges"], tuple(found["titles"]))


_PAGE = """(() => {
  const own = window.eval;  // Netron takes it away, and playwright asks through it
  Object.defineProperty(window, 'eval', {get: () => own, set: () => undefined});
})()"""
_COUNT = """() => {
  const nodes = [...document.querySelectorAll('g.node')];
  const edges = document.querySelectorAll('path.edge-path, g.edge-paths path');
  return {nodes: nodes.length, edges: edges.length, titles: nodes.map(n => n.textContent.trim())};
}"""
_CENTRE = """(name) => {
  const node = [...document.querySelectorAll('g.node')].find(n => n.id.includes(name) || n.textContent.includes(name));
  if (node) node.scrollIntoView({block: 'start', inline: 'center'});
}"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--find", default="", help="the node that the picture begins at")
    given = parser.parse_args(arguments)
    found = draw(given.model, given.picture, given.find)
    print(f"Netron draws {found.nodes} nodes and {found.edges} edges: {given.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
