"""compare.html: one self-contained page that answers "what is wrong, where, how much" on its first screen.

The problem: the page is opened offline, from a mail or a ticket. The idea: a template with few holes: escaped HTML
(sections.py), and JSON in a data block for the page's own scripts, which draw SVG; a chart library is two megabytes.
Data are gzip as base64. Not here: what is reported (facts.py), the compact form (data.py), charts' data (charts.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_accprobe.comparison.pair import Pairs
from vllm_accprobe.report.charts import Heat, depth, factors, heat
from vllm_accprobe.report.html import sections
from vllm_accprobe.report.html.data import columns_json, heat_json, packed, script_json, tensor_details, tree_json
from vllm_accprobe.report.html.sections import asset, fill, policy
from vllm_accprobe.report.text import safe
from vllm_accprobe.whole_file import write_text

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.data import TokenTexts

MAX_PAIRS = 300_000
"""More pairs than this make a page that opens slowly; the worst ones are kept, the page says what is left out."""

MAX_POINTS = 20_000
"""Taps in the depth chart, for the same reason; the first ones in data-flow order are kept, and the page says so."""


SCRIPTS = (
    "base", "link", "print", "draw", "zoom", "columns", "export", "fold", "table", "tree", "spread", "around",
    "operators", "pair", "first", "chart", "heat", "clicks", "boot",
)  # fmt: skip
"""The page's own scripts, in their order on the page."""
STYLES = ("page.css", "draw.css", "heat.css", "pair.css", "around.css", "first.css", "print.css")


def write_html(
    comparison: Comparison, path: str | Path, *, max_pairs: int = MAX_PAIRS, tokens: TokenTexts | None = None
) -> None:
    """Write the page to ``path``; the file appears whole or not at all. Raises OSError as the file system gives it."""
    write_text(path, page(comparison, max_pairs=max_pairs, tokens=tokens))


def page(comparison: Comparison, *, max_pairs: int = MAX_PAIRS, tokens: TokenTexts | None = None) -> str:
    """The page's whole text. tokens: what they say, which the page then holds."""
    with ThreadPoolExecutor(1, "accprobe-page") as packer:  # what is packed gives up the interpreter's lock
        return _page(comparison, max_pairs, packer, tokens)


def _page(comparison: Comparison, max_pairs: int, packer: ThreadPoolExecutor, tokens: TokenTexts | None) -> str:
    table = comparison.table
    shown = _shown_pairs(table, max_pairs)
    some = table if len(shown) == len(table) else Pairs(table[i] for i in shown)
    pairs = packer.submit(packed, columns_json(some))
    passed = comparison.verdict == "pass"
    equal = passed and 0 < comparison.counts.compared == comparison.counts.identical
    points = [] if equal else depth(comparison)
    over = factors(comparison) if comparison.rows is not None else None
    scripts = {f"{name}_js": asset(f"{name}.js") for name in SCRIPTS}
    view = {
        # Names are made safe as in data.py, with the same length, so that a click finds the tap's pairs by its name.
        "depth": {
            "points": [
                vars(p) | {"tap": safe(p.tap, 400), "cls": safe(p.cls, 400), "layer": p.layer and safe(p.layer, 400)}
                for p in points[:MAX_POINTS]
            ]
        },
        "heat": heat_json(Heat((), (), (), 0) if equal else heat(comparison, over=over), tokens),
        "tree": tree_json(comparison),
        "looks": tensor_details(comparison, dict(zip(shown, range(len(shown)), strict=True)), over),
    }
    # Of a pass the reader asks what it covers, of a failure where it is; what is equal is not drawn.
    two = sections.section("coverage", "Coverage", sections.coverage(comparison))
    two += sections.section("plan", "How it was paired and judged", sections.plan(comparison))
    covered = f'<div class="two">{two}</div>'
    figures = f'<dl class="figures">{sections.figures(comparison)}</dl>'
    holes = {
        "csp": escape(policy(scripts.values())),
        "title": escape(sections.title(comparison)),
        "state": ("pass-page" if passed else "fail-page") + " equal-page" * equal,
        "css": "".join(map(asset, STYLES)),
        "verdict": "".join(
            part(comparison)
            for part in (
                sections.verdict,
                sections.not_checked,
                sections.identity,
                sections.origin_buttons,
                sections.pair_sum,
            )
        ),
        "next": sections.next_commands(comparison),
        "notes": "".join(
            part(comparison)
            for part in (sections.notes, sections.differences, sections.wrong_states, sections.deciding)
        ),
        "first": figures + covered + (sections.equal_note(comparison) if equal else "") if passed else "",
        "figures": "" if passed else figures,
        "machines": sections.how_they_compute(comparison),
        "chart_note": sections.chart_note(comparison, len(points), MAX_POINTS),
        "heat_note": sections.heat_note(len(view["heat"]["requests"]), view["heat"]["leftOut"], tokens),
        "legend": sections.legend(),
        "origins": sections.origins(comparison),
        "tokens": sections.tokens(comparison),
        "pairs_note": sections.pairs_note(len(comparison.pairs), len(shown)),
        "covered": "" if passed else covered,
        "runs": sections.runs(comparison),
        "pairs_json": pairs.result(),
        "view_json": packed(script_json(view)),
        **scripts,
    }
    return fill(asset("page.html"), holes)


def _shown_pairs(pairs: Pairs, limit: int) -> list[int]:
    order = np.lexsort((-pairs.severities, ~pairs.failed)) if len(pairs) > limit else np.arange(len(pairs))
    return sorted(order[:limit].tolist())
