"""The page's static parts as escaped HTML: all that can be read without a script.

The idea: a function for each section, which returns finished markup. Not here: what sections are made of (elements.py),
layout (page.html, page.css), pairs and chart (table.js, chart.js).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report import covers, facts, tiers
from vllm_accprobe.report.html.elements import MAX_LIST, as_sentence, breakable, escaped, html_table, more_of
from vllm_accprobe.report.text import MISSING, capital, count, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

_e = escaped


def title(comparison: Comparison) -> str:
    if comparison.verdict == "pass":
        return "PASS · accprobe"
    if facts.wrong_states(comparison):
        return "FAIL the cache, not the kernel · accprobe"
    culprit = safe(facts.origin_name(comparison.origins[0]), 80) if comparison.origins else "differences"
    return f"FAIL {culprit} · accprobe"


def verdict(comparison: Comparison) -> str:
    """The top of the page: badge, sentence, and the culprit's numbers."""
    passed = comparison.verdict == "pass"
    badge = f'<span class="badge">{"PASS" if passed else "FAIL"}</span>'
    if passed or not comparison.origins or facts.wrong_states(comparison):
        sentence = as_sentence(facts.headline(comparison).split(": ", 1)[1])
        return f'<h1 class="said">{badge}<span>{sentence}</span></h1>' + _divergence(comparison)
    origin = comparison.origins[0]
    kind = f' <span class="cls">{_e(origin["class"], 80)}</span>' if origin.get("class") else ""
    head = _gap(badge, origin) or (
        f'<h1>{badge}<span><code class="culprit">{breakable(origin.get("module", "?"))}</code>{kind} '
        f'<span class="does">{facts.deed(origin)}</span>{_layers(origin)}</span></h1>'
    )
    cells = [
        _fact("Tensor", origin.get("role")),
        _fact("Request", origin.get("request")),
        _fact("Position", origin.get("position"), origin.get("phase")),
    ]
    if other := facts.constant(origin):
        cells.append(_fact("Constant", other, None, "big"))
    created, floor = origin.get("created"), origin.get("floor")
    if created is None:
        cells += [] if other else [_fact("Error", "values differ", None, "big")]
    elif isinstance(created, float) and not math.isfinite(created):
        cells.append(_fact("Error", facts.infinite(comparison, origin), None, "big"))
    else:
        over = tiers.origin_times(origin)
        limit = None if floor is None else f"limit {num(floor)}"
        cells.append(_fact(capital(facts.created_as(origin)), num(tiers.origin_size(origin)), limit, "big"))
        if over:
            cells.append(_fact("Over the limit", over.replace("x", "×"), None, "big"))
    if origin.get("propagated") is not None:
        cells.append(_fact("From its inputs", num(origin["propagated"])))
    name = safe(origin.get("evidence") or MISSING)
    why = as_sentence(rests) if (rests := facts.evidence(origin)) else ""
    if seldom := tiers.odds(origin.get("chance")):
        cells.append(_fact("By chance", seldom, "comparisons of honest machines"))
    if tier := origin.get("tier"):
        cells.append(_fact("Floor it breaks", tier))
    if said := facts.inside(comparison, origin):
        cells.append(_fact("The gap", said, None, "shape-fact"))
    if said := facts.shape(origin):
        cells.append(_fact("Shape of the error", said, None, "shape-fact"))
    if said := facts.graph(origin):
        cells.append(_fact("In compiled and captured graphs", said, None, "shape-fact"))
    facts_list = f'<dl class="facts">{"".join(cells)}</dl>'
    tier = f" {as_sentence(said)}" if (said := tiers.sentence(origin)) else ""
    return head + facts_list + f'<p class="why">Evidence: {_e(name)}. {why}{tier}{_first(comparison, origin)}</p>'


def _gap(badge: str, origin: Mapping[str, Any]) -> str:
    """The heading of an origin that lies between two taps; empty where it does not."""
    gap = facts.gap_of(origin)
    if gap is None:
        return ""
    before = f'<code class="culprit">{breakable(gap["before"])}</code>'
    after = f"between <code>{breakable(gap['after'])}</code> and" if gap.get("after") else "in front of"
    return f'<h1>{badge}<span><span class="does">the error is created</span> {after} {before}</span></h1>'


def _layers(origin: Mapping[str, Any]) -> str:
    where = tiers.layers(origin)
    return f' <span class="cls">{escape(where)}, first here</span>' if where else ""


def _divergence(comparison: Comparison) -> str:
    first = facts.divergence(comparison)
    return f'<p class="why">First divergence: {escape(first)}.</p>' if first else ""


def _first(comparison: Comparison, origin: Mapping[str, Any]) -> str:
    """The first divergence beside the culprit, in short where both are the same place."""
    first = comparison.first_divergence
    here = facts.place_of(origin) == ((first or {}).get("module"), (first or {}).get("role"))
    if not first or not here or any(first.get(k) != origin.get(k) for k in ("request", "position")):
        return f"</p>{d[:-4]}" if (d := _divergence(comparison)) else ""
    where = ", ".join(f"{k} {_e(first[k], 20)}" for k in ("rank", "step") if first.get(k) is not None)
    return f" The first divergence is here too{f' ({where})' if where else ''}."


def _fact(label: str, value: object, small: object = None, kind: str = "") -> str:
    if value is None:
        return ""
    extra = f" <small>{_e(small, 80)}</small>" if small is not None else ""
    return f'<div class="{kind}"><dt>{escape(label)}</dt><dd>{_e(value, 120)}{extra}</dd></div>'


def notes(comparison: Comparison) -> str:
    if not comparison.notes:
        return ""
    items = "".join(f"<li>{_e(n, 1000)}</li>" for n in comparison.notes[:MAX_LIST])
    more = more_of(len(comparison.notes), MAX_LIST, "notes")
    return f'<section class="notes" aria-label="Notes"><h2>Read this first</h2><ul>{items}</ul>{more}</section>'


def figures(comparison: Comparison) -> str:
    """The strip of numbers under the verdict."""
    c, cov = comparison.counts, comparison.coverage
    flipped = len(comparison.tokens.get("flipped") or ())
    only = [int(cov.get(f"rows_only_{side}") or 0) for side in ("golden", "mine")]
    items = [
        ("pairs failed", c.failed, f"of {c.compared:,} compared", "bad" if c.failed else ""),
        ("pairs identical", c.identical, f"{c.bit_identical:,} bit-identical", ""),
        ("pairs skipped", c.skipped, "", ""),
        ("rows compared", int(cov.get("rows_compared") or 0), "", ""),
        ("rows on one side only", sum(only), f"golden {only[0]:,}, mine {only[1]:,}", ""),
        ("tokens flipped", flipped, f"of {int(comparison.tokens.get('compared') or 0):,}", "bad" if flipped else ""),
    ]
    return "".join(
        f'<div class="{kind}"><dt>{label}</dt><dd>{value:,} <small>{small}</small></dd></div>'
        for label, value, small, kind in items
    )


def chart_note(comparison: Comparison, points: int, limit: int) -> str:
    if not points:
        return '<p class="missing">No output tensor with an error to draw was compared.</p>'
    if points > limit:
        return f'<p class="hint">The first {limit:,} of {points:,} taps in data-flow order; compare.csv has all.</p>'
    return ""


def legend() -> str:
    """The colours of heat map and tree, in words: their steps are those of base.js."""
    words = ("0", "≤ 0.003", "0.03", "0.1", "0.3", "1", "3", "30", "more")
    steps = "".join(f'<li><span class="dot step{i}"></span>{w}</li>' for i, w in enumerate(words))
    return f'<ul class="legend" aria-label="Colours: error over limit">{steps}<li class="what">× limit</li></ul>'


def tokens(comparison: Comparison) -> str:
    flipped: Sequence[Mapping[str, Any]] = comparison.tokens.get("flipped") or ()
    if not flipped:
        return ""
    head = ("Request", "Token", "Golden", "Margin", "Mine", "Margin")
    rows = [
        (
            _e(t.get("request"), 80),
            _e(t.get("ordinal"), 20),
            _e(t.get("golden"), 20),
            _e(num(t.get("golden_margin"))),
            _e(t.get("mine"), 20),
            _e(num(t.get("mine_margin"))),
        )
        for t in flipped[:MAX_LIST]
    ]
    body = html_table(head, rows, numeric={1, 2, 3, 4, 5})
    return (
        '<section aria-labelledby="h-tokens"><h2 id="h-tokens">Flipped tokens</h2>'
        '<p class="hint">The margin is the first logit minus the second: a small one is a near tie.</p>'
        f"{body}{more_of(len(flipped), MAX_LIST, 'tokens.flipped')}</section>"
    )


def pairs_note(total: int, shown: int) -> str:
    if shown == total:
        return ""
    return f'<p class="hint">The worst {shown:,} of {total:,} pairs are on this page; compare.csv has all of them.</p>'


def not_checked(comparison: Comparison) -> str:
    """Directly below the verdict: that operators were compared and not checked, and what would check them."""
    said = covers.head(comparison)
    if not said:
        return ""
    typed = "".join(f"<pre><code>{escape(line.strip())}</code></pre>" for line in said[1:])
    return f'<p class="why not-checked">{as_sentence(said[0]).replace(":.", ":")}</p>{typed}'


def covered(comparison: Comparison) -> str:
    """The verdict's reach by class of operator."""
    total = covers.totals(comparison)
    if total is None:
        return ""
    rows = [tuple(map(escape, (row[-1], *row[:-1]))) for row in covers.table(comparison, MAX_LIST)]
    head = tuple(map(capital, (covers.HEAD[-1], *covers.HEAD[:-1])))
    more = more_of(len(covers.entries(comparison)), MAX_LIST, "coverage.by_class")
    lead = f"{capital(covers.TITLE)}: relative, of all rows, of one column, of one row. {capital(total)}."
    return f'<p class="hint" id="covers">{escape(lead)}</p>{html_table(head, rows, numeric=set(range(1, 9)))}{more}'


def coverage(comparison: Comparison) -> str:
    rows = [(escape(label), escape(value)) for label, value in facts.coverage_rows(comparison)]
    rows += [(escape(what), f"{n:,}") for what, n in facts.skip_rows(comparison)[:MAX_LIST]]
    out = covered(comparison) + html_table(("What", "How many"), rows, numeric={1})
    for side in ("golden", "mine"):
        taps: Sequence[str] = comparison.coverage.get(f"taps_only_{side}") or ()
        if taps:
            items = "".join(f"<li><code>{_e(t)}</code></li>" for t in taps[:MAX_LIST])
            out += (
                f"<details><summary>{escape(count(len(taps), 'tap'))} only in {side}</summary><ul>{items}</ul>"
                f"{more_of(len(taps), MAX_LIST, f'coverage.taps_only_{side}')}</details>"
            )
    return out


def plan(comparison: Comparison) -> str:
    lines = [_e(line, 1000) for line in comparison.plan[:MAX_LIST]]
    paired = "".join(f"<li>{line}</li>" for line in lines) or "<li>not given</li>"
    more = more_of(len(comparison.plan), MAX_LIST, "").replace(": compare.json, ", ": accprobe compare --plan")
    said = dict(comparison.standard or {}) | {"false_alarm_rate": comparison.false_alarm_rate}
    if comparison.by_chance is not None:
        said["by_chance"] = num(comparison.by_chance)
    standard = html_table(("Standard", "Value"), [(_e(k), _e(v, 300)) for k, v in _flat(said)])
    return f'<ul class="plain">{paired}</ul>{more}{standard}'


def runs(comparison: Comparison) -> str:
    """What each side was; what differs comes first and is marked."""
    golden, mine = dict(_flat(comparison.golden_run or {})), dict(_flat(comparison.mine_run or {}))
    keys = list(dict.fromkeys([*golden, *mine]))
    differ = [k for k in keys if golden.get(k) != mine.get(k)]
    same = [k for k in keys if k not in set(differ)]
    head = ("", "Golden", "Mine")

    def rows(chosen: Iterable[str]) -> list[tuple[str, ...]]:
        return [(_e(k, 120), *(_e(side.get(k, MISSING), 300) for side in (golden, mine))) for k in chosen]

    paths = ("dump", _e(comparison.golden_path), _e(comparison.mine_path))
    out = html_table(head, [paths, *rows(differ[:MAX_LIST])])
    if same:
        out += (
            f"<details><summary>{escape(count(len(same), 'entry', 'entries'))} the same on both sides</summary>"
            f"{html_table(head, rows(same[:MAX_LIST]))}</details>"
        )
    return out


def _flat(value: Mapping[str, Any], prefix: str = "", depth: int = 3) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and depth > 1:
            out += _flat(item, f"{name}.", depth - 1)
        else:
            out.append((name, item))
    return out[:2000]
