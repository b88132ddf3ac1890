"""What the first screen adds to the verdict: all origins by number, all pairs in one sum, and what to type next.

The problem: a reader opens the page to decide, and what he needs is where to look, how sure that is, and which command
brings him on. The idea: origins as buttons that open their pairs (and as a table further down), and commands as they
are typed, each beside a button that copies it; every value is escaped, and a command is never shortened. Not here: the
choice of commands (report/next/), what the buttons do (first.js).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report import facts, tiers
from vllm_accprobe.report.html.elements import MAX_LIST, as_sentence, breakable, escaped, html_table, more_of
from vllm_accprobe.report.html.further import command_lines
from vllm_accprobe.report.next.outcomes import outcomes
from vllm_accprobe.report.text import MISSING, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

SHOWN = 12
"""chosen: origins on the first screen; the table of origins has the others."""
NAME = 400
"""Letters of a name, as in the table of pairs (columns.py), so that a click finds them by it."""


def origin_buttons(comparison: Comparison) -> str:
    """All origins by number, the culprit first, NaN among them; a click opens the pairs of one."""
    if not comparison.origins:
        return ""
    items = "".join(_button(comparison, i, o) for i, o in enumerate(comparison.origins[:SHOWN], 1))
    left = len(comparison.origins) - SHOWN
    more = f'<li class="hint">… {left:,} more: <a href="#h-origins">Origins</a></li>' if left > 0 else ""
    return f'<ol class="origin-list" aria-label="Origins, the culprit first; each opens its pairs">{items}{more}</ol>'


def _button(comparison: Comparison, number: int, origin: Mapping[str, Any]) -> str:
    tap, name = safe(facts.tap_of(origin), NAME), safe(facts.origin_name(origin), NAME)
    said = ", ".join(x for x in (_how_far(comparison, origin), safe(origin.get("tier") or "", 60)) if x)
    return (
        f'<li><button type="button" class="origin" data-origin="{number - 1}" data-tap="{escape(tap)}">'
        f'<b class="no">{number}</b> '
        f"<code>{escape(name)}</code> <small>{escape(said)}</small></button></li>"
    )


def _how_far(comparison: Comparison, origin: Mapping[str, Any]) -> str:
    """``13×``, or what there is instead of a number."""
    created = origin.get("created")
    if origin.get("nonfinite") or (isinstance(created, float) and not math.isfinite(created)):
        rows = int(origin.get("nonfinite") or 0)
        return f"NaN or Inf in {rows:,} row{'s' * (rows != 1)}" if rows else facts.infinite(comparison, origin)
    what = "constants" if facts.constant(origin) else "values"
    return tiers.origin_times(origin).replace("x", "×") or f"{what} differ"


def pair_sum(comparison: Comparison) -> str:
    """How many pairs there are of each outcome, in one sum."""
    total = f"<b>{comparison.counts.total:,}</b> pairs = "
    parts = (
        f'<span class="{_KIND.get(what.partition(" ")[0], "")}"><b>{n:,}</b> {escape(what)}</span>'
        for what, n in outcomes(comparison)
    )
    return f'<p class="pair-sum" id="pair-sum">{total}{" + ".join(parts)}</p>'


_KIND = {"fail": "bad", "pass": "good"}


def next_commands(comparison: Comparison) -> str:
    """What to type next, each command with a button that copies it."""
    steps = comparison.next_steps
    if not steps:
        return ""
    items = "".join(
        f"<li>{as_sentence(safe(step['why'], 400))}<div class=typed><pre><code>{command_lines(step['command'])}</code>"
        f'</pre><button type="button" class="copy">Copy</button></div></li>'
        for step in steps
    )
    return (
        f'<section class="next" aria-labelledby="h-next"><h2 id="h-next">Next</h2><ol>{items}</ol>'
        '<p class="hint" id="copied" role="status"></p></section>'
    )


def origins(comparison: Comparison) -> str:
    """The table of all origins."""
    if not comparison.origins:
        return ""
    head: tuple[str, ...] = ("#", "Module", "Tensor", "Where", "Created", "Passed on", "Limit", "× limit", "Evidence")
    rows: list[tuple[str, ...]] = [
        (
            str(i + 1),
            f"<code>{breakable(facts.origin_name(o))}</code> <small>{escaped(o.get('class') or '', 80)}</small>",
            f"<code>{escaped(o.get('role') or '', 80)}</code>",
            _where(o),
            escaped(num(tiers.origin_size(o))),
            escaped(num(o.get("propagated"))),
            escaped(num(o.get("floor"))),
            escaped(tiers.origin_times(o).replace("x", "×") or MISSING),
            escaped(o.get("evidence") or MISSING, 40),
        )
        for i, o in enumerate(comparison.origins[:MAX_LIST])
    ]
    others = [facts.constant(o) for o in comparison.origins]
    if any(others):
        head = (*head, "Constant")
        rows = [(*r, escaped(text or MISSING)) for r, text in zip(rows, others, strict=False)]
    if any(facts.shape(o) for o in comparison.origins):
        head = (*head, "Shape")
        rows = [(*r, escaped(facts.shape(o) or MISSING)) for r, o in zip(rows, comparison.origins, strict=False)]
    graphs = [facts.graph(o) for o in comparison.origins]
    if any(graphs):
        head = (*head, "In graphs")
        rows = [(*r, escaped(text or MISSING)) for r, text in zip(rows, graphs, strict=False)]
    gaps = [facts.inside(comparison, o) for o in comparison.origins]
    if any(gaps):
        head = (*head, "In the gap")
        rows = [(*r, escaped(text or MISSING)) for r, text in zip(rows, gaps, strict=False)]
    said = [tiers.whole(o) for o in comparison.origins]
    if any(said):
        head = (*head, "Floor that it breaks")
        rows = [(*r, escaped(text or MISSING)) for r, text in zip(rows, said, strict=False)]
    body = html_table(head, rows, numeric={4, 5, 6, 7})
    more = more_of(len(comparison.origins), MAX_LIST, "origins")
    lead = "Independent origins in data-flow order; the first is the culprit." if len(rows) > 1 else "One origin."
    if chance := tiers.alarms(comparison):
        lead += f" By chance, {chance}."
    wide = "wide" if len(head) > 9 else ""
    return (
        f'<section class="{wide}" aria-labelledby="h-origins"><h2 id="h-origins">Origins</h2>'
        f'<p class="hint">{lead}</p>{body}{more}</section>'
    )


def _where(o: Mapping[str, Any]) -> str:
    parts = []
    if o.get("request") is not None:
        parts.append(f"request <q>{escaped(o['request'], 80)}</q>")
    if o.get("position") is not None:
        parts.append(f"position {escaped(o['position'], 40)}")
    if o.get("phase") is not None:
        parts.append(escaped(o["phase"], 20))
    return ", ".join(parts) or MISSING
