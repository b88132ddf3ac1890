"""The page's static parts as escaped HTML, and how the page is put together.

The problem: a page holds names that a stranger's dump has chosen, and its scripts must be the only ones that run. The
idea: `escaped` is the only way from a value to markup; a function per section returns finished markup; a content
security policy names the hash of each script and allows no request; a template's holes are filled in one pass. Commands
keep their lines and are never shortened. Not here: sentences (facts.py, verdict_parts.py), what the script does (*.js).
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.report import facts, verdict_parts
from vllm_accprobe.report.charts import layer_of
from vllm_accprobe.report.facts import outcomes
from vllm_accprobe.report.text import MISSING, capital, count, more, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.data import TokenTexts


def policy(scripts: Iterable[str]) -> str:
    hashes = " ".join(
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii") + "'"
        for text in scripts
        if text
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def asset(name: str) -> str:
    from importlib.resources import files

    return files("vllm_accprobe.report.html").joinpath(name).read_text(encoding="utf-8")


def fill(template: str, holes: Mapping[str, str]) -> str:
    """Each ``{{name}}`` once, in a single pass: what is filled in is never examined again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda m: holes[m[1]], template)


MAX_LIST = 200
"""Lines of one list on the page; compare.json has them all."""


def escaped(value: object, limit: int = 400) -> str:
    """Any value as text that is safe in markup and in a quoted attribute."""
    return escape(safe(value, limit))


def breakable(name: object) -> str:
    return escaped(name).replace(".", ".<wbr>")


def humps(name: object) -> str:
    """A class's name that may wrap in front of each of its words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "<wbr>", escaped(name, 80))


def as_sentence(text: str) -> str:
    return escape(capital(text) + ".")


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numeric: frozenset[int] | set[int] = frozenset()
) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=num' if i in numeric else ''}>{c}</{tag}>" for i, c in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    many = " class=many" if len(head) > 6 else ""  # on a phone it scrolls in its box
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="scroll"><table{many}>{top}<tbody>{body}</tbody></table></div>'


def more_of(total: int, shown: int, where: str) -> str:
    return "".join(f'<p class="hint">{line}</p>' for line in more(total, shown, f"compare.json, {where}"))


def section(name: str, heading: str, body: str, kind: str = "") -> str:
    """A part of the page. name: of its heading, which links lead to; kind: its class."""
    own = f' class="{kind}"' if kind else ""
    return f'<section{own} aria-labelledby="h-{name}"><h2 id="h-{name}">{heading}</h2>{body}</section>'


def listed(lines: Sequence[str], limit: int = MAX_LIST) -> str:
    """The first lines as items of a list."""
    return "".join(f"<li>{escape(line)}</li>" for line in lines[:limit])


FEW = 4
"""chosen: differences on the first screen."""


def deciding(comparison: Comparison) -> str:
    steps = comparison.would_decide
    if not steps:
        return ""
    items = "".join(
        f"<li>{as_sentence(safe(step['why'], 400))}<pre><code>{command_lines(step['command'])}</code></pre></li>"
        for step in steps[:MAX_LIST]
    )
    return section("decide", "This would decide", f"<ul>{items}</ul>", "notes decide")


def wrong_states(comparison: Comparison) -> str:
    wrong = facts.wrong_states(comparison)[1:]
    if not wrong:
        return ""
    body = f"<ul>{listed(wrong)}</ul>{more_of(len(wrong), MAX_LIST, 'states')}"
    return section("states", escape(facts.FURTHER.capitalize()), body, "notes")


def heat_note(requests: int, left_out: int, tokens: TokenTexts | None = None) -> str:
    """What the heat map leaves out, and that the page holds text where somebody has requested it."""
    total = requests + left_out
    text = [f"The worst {requests:,} of {total:,} requests are shown; compare.csv has all of them."] if left_out else []
    if tokens:
        text.append(as_sentence(tokens.missing or "this page holds the text of prompts and answers, by --tokenizer"))
    return f'<p class="hint">{" ".join(text)}</p>' if text else ""


def command_lines(command: str) -> str:
    """A word wraps as a whole where that has room."""
    return "\n".join(
        " ".join(f"<span>{word}</span>" for word in escaped(line, 1000).split(" ")) for line in command.splitlines()
    )


def differences(comparison: Comparison) -> str:
    """Habits that the machines do not share, above the charts: what is alike can wait below them."""
    found = verdict_parts.differing(comparison.machines)
    if not found:
        return ""
    more = f"{len(found) - FEW:,} more, and what" if len(found) > FEW else "What"
    return (
        '<section class="notes" aria-label="How these machines differ"><h2>These machines compute differently</h2>'
        f'<ul>{listed(found, FEW)}</ul><p class="hint">{more} they do alike: '
        '<a href="#h-machines">How these machines compute</a></p></section>'
    )


def how_they_compute(comparison: Comparison) -> str:
    """Habits of both machines, differences first; each of them with its numbers in a table that opens."""
    found = verdict_parts.machine_lines(comparison.machines)
    if not found:
        return ""
    rows = [tuple(map(escape, row)) for row in verdict_parts.rows(comparison.machines)[:MAX_LIST]]
    table = html_table(("Side", "Operator", "How it computes", "Costs", "Seen in"), rows)
    body = f'<ul class="plain">{listed(found)}</ul>{more_of(len(found), MAX_LIST, "machines")}'
    each = f"<details><summary>Each observation, with its outputs</summary>{table}</details>"
    return section("machines", capital(verdict_parts.MACHINES_TITLE), body + each)


SHOWN = 12
"""chosen: origins on the first screen; the table of origins has the others."""
NAME = 400
"""Letters of a name, as in the table of pairs (data.py), so that a click finds them by it."""


def origin_buttons(comparison: Comparison) -> str:
    """All origins by number, the culprit first, NaN among them; a click opens the pairs of one."""
    if not comparison.origins:
        return ""
    items = "".join(_button(comparison, i, o) for i, o in enumerate(comparison.origins[:SHOWN], 1))
    left = len(comparison.origins) - SHOWN
    more = f'<li class="hint">… {left:,} more: <a href="#h-origins">Origins</a></li>' if left > 0 else ""
    return f'<ol class="origin-list" aria-label="Origins, the culprit first; each opens its pairs">{items}{more}</ol>'


def _button(comparison: Comparison, number: int, origin: OriginEntry) -> str:
    tap, name = safe(facts.tap_of(origin), NAME), safe(facts.origin_name(origin), NAME)
    text = ", ".join(x for x in (_how_far(comparison, origin), safe(origin.get("tier") or "", 60)) if x)
    return (
        f'<li><button type="button" class="origin" data-origin="{number - 1}" data-tap="{escape(tap)}">'
        f'<b class="no">{number}</b> '
        f"<code>{escape(name)}</code> <small>{escape(text)}</small></button></li>"
    )


def _how_far(comparison: Comparison, origin: OriginEntry) -> str:
    """``13×``, or what there is instead of a number."""
    created = origin.get("created")
    if origin.get("nonfinite") or (isinstance(created, float) and not math.isfinite(created)):
        rows = int(origin.get("nonfinite") or 0)
        return f"NaN or Inf in {rows:,} row{'s' * (rows != 1)}" if rows else facts.infinite(comparison, origin)
    what = "constants" if facts.constant(origin) else "values"
    return facts.origin_times(origin).replace("x", "×") or f"{what} differ"


def pair_sum(comparison: Comparison) -> str:
    total = f"<b>{comparison.counts.total:,}</b> pairs = "
    parts = (
        f'<span class="{_KIND.get(what.partition(" ")[0], "") if n else ""}"><b>{n:,}</b> {escape(what)}</span>'
        for what, n in outcomes(comparison)
    )
    return f'<p class="pair-sum" id="pair-sum">{total}{" + ".join(parts)}</p>'


_KIND = {"fail": "bad", "pass": "good"}


def next_commands(comparison: Comparison) -> str:
    steps = comparison.next_steps
    if not steps:
        return ""
    items = "".join(
        f"<li>{as_sentence(safe(step['why'], 400))}<div class=typed><pre><code>{command_lines(step['command'])}</code>"
        f'</pre><button type="button" class="copy">Copy</button></div></li>'
        for step in steps
    )
    return section("next", "Next", f'<ol>{items}</ol><p class="hint" id="copied" role="status"></p>', "next")


def origins(comparison: Comparison) -> str:
    if not comparison.origins:
        return ""
    head: tuple[str, ...] = ("#", "Module", "Tensor", "Where", "Created", "Passed on", "Limit", "× limit", "Evidence")
    rows: list[tuple[str, ...]] = [
        (
            str(i + 1),
            f"<code>{breakable(facts.origin_name(o))}</code> <small>{escaped(o.get('class') or '', 80)}</small>",
            f"<code>{escaped(o.get('role') or '', 80)}</code>",
            _where(o),
            escaped(num(facts.origin_size(o))),
            escaped(num(o.get("propagated"))),
            escaped(num(o.get("floor"))),
            escaped(facts.origin_times(o).replace("x", "×") or MISSING),
            escaped(o.get("evidence") or MISSING, 40),
        )
        for i, o in enumerate(comparison.origins[:MAX_LIST])
    ]
    for name, texts in facts.optional_columns(comparison):
        head = (*head, capital(name))
        rows = [(*r, escaped(text or MISSING)) for r, text in zip(rows, texts, strict=False)]
    body = html_table(head, rows, numeric={4, 5, 6, 7})
    more = more_of(len(comparison.origins), MAX_LIST, "origins")
    lead = "Independent origins in data-flow order; the first is the culprit." if len(rows) > 1 else "One origin."
    if chance := facts.alarms(comparison):
        lead += f" By chance, {chance}."
    wide = "wide" if len(head) > 9 else ""
    return (
        f'<section class="{wide}" aria-labelledby="h-origins"><h2 id="h-origins">Origins</h2>'
        f'<p class="hint">{lead}</p>{body}{more}</section>'
    )


def _where(o: OriginEntry) -> str:
    parts = []
    if o.get("request") is not None:
        parts.append(f"request <q>{escaped(o['request'], 80)}</q>")
    if o.get("position") is not None:
        parts.append(f"position {escaped(o['position'], 40)}")
    if o.get("phase") is not None:
        parts.append(escaped(o["phase"], 20))
    return ", ".join(parts) or MISSING


_e = escaped


def title(comparison: Comparison) -> str:
    if comparison.verdict == "pass":
        return "PASS · accprobe"
    if facts.wrong_states(comparison):
        return f"FAIL {facts.headline(comparison).split(': ')[1]} · accprobe"
    culprit = safe(facts.origin_name(comparison.origins[0]), 80) if comparison.origins else "differences"
    return f"FAIL {culprit} · accprobe"


def verdict(comparison: Comparison) -> str:
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
        over = facts.origin_times(origin)
        limit = None if floor is None else f"limit {num(floor)}"
        cells.append(_fact(capital(facts.created_as(origin)), num(facts.origin_size(origin)), limit, "big"))
        if over:
            cells.append(_fact("Over the limit", over.replace("x", "×"), None, "big"))
    if origin.get("propagated") is not None:
        cells.append(_fact("From its inputs", num(origin["propagated"])))
    name = safe(origin.get("evidence") or MISSING)
    why = as_sentence(rests) if (rests := facts.evidence(origin)) else ""
    if seldom := facts.odds(origin.get("chance")):
        cells.append(_fact("By chance", seldom, "comparisons with rounding alone"))
    where = {"The gap": facts.inside(comparison, origin), "Shape of the error": facts.shape(origin),
             "In compiled and captured graphs": facts.graph(origin)}  # fmt: skip
    cells += [_fact(label, text, None, "shape-fact") for label, text in where.items() if text]
    cause = f'<p class="why"><strong>Cause:</strong> {escaped(text, 1000)}</p>' if (text := facts.cause(origin)) else ""
    facts_list = f'{cause}<dl class="facts">{"".join(cells)}</dl>'
    tier = f" {as_sentence(phrase)}" if (phrase := facts.sentence(origin)) else ""
    return head + facts_list + f'<p class="why">Evidence: {_e(name)}. {why}{tier}{_first(comparison, origin)}</p>'


def _gap(badge: str, origin: OriginEntry) -> str:
    """The heading of an origin that lies between two taps; empty where it does not."""
    gap = facts.gap_of(origin)
    if gap is None:
        return ""
    before = f'<code class="culprit">{breakable(gap["before"])}</code>'
    after = f"between <code>{breakable(gap['after'])}</code> and" if gap.get("after") else "in front of"
    return f'<h1>{badge}<span><span class="does">the error is introduced</span> {after} {before}</span></h1>'


def _layers(origin: OriginEntry) -> str:
    where = facts.layers(origin)
    return f' <span class="cls">{escape(where)}, first here</span>' if where else ""


def _divergence(comparison: Comparison) -> str:
    first = facts.divergence(comparison)
    return f'<p class="why">First divergence: {escape(first)}.</p>' if first else ""


def _first(comparison: Comparison, origin: OriginEntry) -> str:
    """The first divergence next to the culprit, in short where both are the same place."""
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
    return f'<section class="notes" aria-label="Notes"><h2>Notes</h2><ul>{items}</ul>{more}</section>'


def figures(comparison: Comparison) -> str:
    """Six numbers: of a failure what failed, of a pass what was covered."""
    items = _covered_figures(comparison) if comparison.verdict == "pass" else _failed_figures(comparison)
    return "".join(
        f'<div class="{kind}"><dt>{label}</dt><dd>{value:,} <small>{small}</small></dd></div>'
        for label, value, small, kind in items
    )


_Figure = tuple[str, int, str, str]


def _failed_figures(comparison: Comparison) -> list[_Figure]:
    c = comparison.counts
    return [
        ("pairs failed", c.failed, f"of {c.compared:,} compared", "bad" if c.failed else ""),
        ("pairs identical", c.identical, f"{c.bit_identical:,} bit-identical", ""),
        ("pairs skipped", c.skipped, "", ""),
        _rows_figure(comparison),
        _one_sided(comparison),
        _tokens_figure(comparison),
    ]


def _covered_figures(comparison: Comparison) -> list[_Figure]:
    c, classes = comparison.counts, verdict_parts.entries(comparison)
    taps, _ = comparison.table.numbered("tap", np.flatnonzero(~comparison.table.having("status", "skip")))
    layers = {layer_of(tap) for tap in taps} - {None}
    rows, checked, compared = (sum(int(e.get(k) or 0) for e in classes) for k in ("rows", "checked", "compared"))
    left = f"; {rows - checked - compared:,} neither" if rows > checked + compared else ""
    skipped = comparison.counts.skip_reasons
    reason = max(skipped, key=lambda k: skipped[k]) if skipped else ""
    more = f" and {count(len(skipped) - 1, 'other reason')}" if len(skipped) > 1 else ""
    return [
        ("pairs compared", c.compared, f"{c.identical:,} identical", ""),
        _rows_figure(comparison),
        ("modules compared", len(taps), f"{count(len(layers), 'layer')}" if layers else "", ""),
        ("rows of operators checked", checked, f"of {rows:,}; {compared:,} compared only{left}", "")
        if classes else _one_sided(comparison),
        ("pairs skipped", c.skipped, _e(reason, 80) + more, ""),
        _tokens_figure(comparison),
    ]  # fmt: skip


def _rows_figure(comparison: Comparison) -> _Figure:
    return ("rows compared", int(comparison.coverage.get("rows_compared") or 0), "", "")


def _one_sided(comparison: Comparison) -> _Figure:
    golden, mine = (int(comparison.coverage.get(f"rows_only_{side}") or 0) for side in ("golden", "mine"))
    return ("rows on one side only", golden + mine, f"golden {golden:,}, mine {mine:,}", "")


def _tokens_figure(comparison: Comparison) -> _Figure:
    flipped = len(comparison.tokens.get("flipped") or ())
    of = int(comparison.tokens.get("compared") or 0)
    return ("tokens flipped", flipped, f"of {of:,}", "bad" if flipped else "")


def equal_note(comparison: Comparison) -> str:
    return (
        f'<p class="hint equal-note">The outputs of all {count(comparison.counts.compared, "pair")} are equal on both '
        "sides: there is no error to draw.</p>"
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
    hint = '<p class="hint">The margin is the first logit minus the second: a small one is a near tie.</p>'
    body = html_table(head, rows, numeric={1, 2, 3, 4, 5}) + more_of(len(flipped), MAX_LIST, "tokens.flipped")
    return section("tokens", "Flipped tokens", hint + body)


def pairs_note(total: int, shown: int) -> str:
    if shown == total:
        return ""
    return f'<p class="hint">The worst {shown:,} of {total:,} pairs are on this page; compare.csv has all of them.</p>'


def not_checked(comparison: Comparison) -> str:
    """Directly below the verdict: that operators were compared and not checked, and what would check them."""
    text = verdict_parts.head(comparison)
    if not text:
        return ""
    typed = "".join(f"<pre><code>{command_lines(line.strip())}</code></pre>" for line in text[1:])
    return f'<p class="why not-checked">{as_sentence(text[0]).replace(":.", ":")}</p>{typed}'


def covered(comparison: Comparison) -> str:
    total = verdict_parts.totals(comparison)
    if total is None:
        return ""
    rows = [(humps(row[-1]), *map(escape, row[:-1])) for row in verdict_parts.table(comparison, MAX_LIST)]
    head = tuple(map(capital, (verdict_parts.HEAD[-1], *verdict_parts.HEAD[:-1])))
    more = more_of(len(verdict_parts.entries(comparison)), MAX_LIST, "coverage.by_class")
    lead = f"{capital(verdict_parts.COVERS_TITLE)}: relative, of all rows, of one column, of one row. {capital(total)}."
    return f'<p class="hint" id="covers">{escape(lead)}</p>{html_table(head, rows, numeric=set(range(1, 9)))}{more}'


def coverage(comparison: Comparison) -> str:
    rows = [(escape(label), escape(value)) for label, value in facts.coverage_rows(comparison)[1:]]  # the sum is above
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


_STANDARD = {
    "name": "standard",
    "unit": "one rounding of the dtype, relative",
    "limit_created": "limit of the error that one operator adds to a row",
    "limit_first_layer": "limit of a row's total error after the first layer",
    "limit_last_layer": "limit of a row's total error after the last layer",
    "false_alarm_rate": "false alarms that were allowed, share of comparisons",
    "by_chance": "false alarms to expect, share of comparisons",
    "created": "roundings that one operator may add",
    "total": "roundings that may precede the first layer",
    "growth": "exponent of the growth with depth",
    "amplification": "times that an operator may enlarge its inputs' error",
    "wild": "the same, for inputs beyond their limit",
    "garbage": "error of an input that explains any output",
    "ratio_share": "limit of a norm's ratio, least part of the row's limit",
    "ratio_width": "limit of a norm's ratio, standard deviations",
    "truncations": "truncations in one operator",
    "element": "limit of one element, times the row's limit",
    "row_floor": "smallest norm that counts, part of the tap's median",
}
"""The keys of ``Comparison.standard`` in words, results first; other tools' standards name their own."""
_RESULTS = 7
"""How many of them are limits and rates; the others are the constants that these follow from."""


def plan(comparison: Comparison) -> str:
    lines = [_e(line, 1000) for line in comparison.plan[:MAX_LIST]]
    paired = "".join(f"<li>{line}</li>" for line in lines) or "<li>No plan is known.</li>"
    more = more_of(len(comparison.plan), MAX_LIST, "").replace(": compare.json, ", ": accprobe compare --plan")
    values = dict(_flat(comparison.standard or {})) | {
        "false_alarm_rate": comparison.false_alarm_rate, "by_chance": comparison.by_chance,
    }  # fmt: skip
    # Files of no known dtype have no unit of their own, and no limits that follow from it.
    shown = {k: v for k, v in values.items() if v is not None and (v or not k.startswith(("unit", "limit_")))}
    results, constants = list(_STANDARD)[:_RESULTS], list(_STANDARD)[_RESULTS:]
    constants += [k for k in shown if k not in _STANDARD]
    tables = [
        html_table((what, "Value"), [(_e(_STANDARD.get(k, k)), _value(shown[k])) for k in keys if k in shown], {1})
        for what, keys in (("Standard", results), ("Constant", constants))
    ]
    hidden = sum(k in shown for k in constants)
    rest = f"<details><summary>{count(hidden, 'constant')} of the standard</summary>{tables[1]}</details>"
    return f'<ul class="plain">{paired}</ul>{more}{tables[0]}{rest if hidden else ""}'


def _value(value: object) -> str:
    """A value from a run or a standard as markup: ``–`` for nothing, yes and no, a list's items, six digits."""
    return _e(_words(value), 300)


def _words(value: object) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return num(value, 6)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_words(v)}" for k, v in value.items()) or MISSING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value)) or MISSING
    return str(value)


def runs(comparison: Comparison) -> str:
    """What each side was; what differs comes first."""
    golden, mine = dict(_flat(comparison.golden_run or {})), dict(_flat(comparison.mine_run or {}))
    keys = list(dict.fromkeys([*golden, *mine]))
    differ = [k for k in keys if golden.get(k) != mine.get(k)]
    same = [k for k in keys if k not in set(differ)]
    head = ("Differs", "Golden", "Mine")

    def rows(chosen: Iterable[str]) -> list[tuple[str, ...]]:
        return [(_e(k, 120), *(_value(side.get(k)) for side in (golden, mine))) for k in chosen]

    paths = ("dump", _e(comparison.golden_path), _e(comparison.mine_path))
    out = html_table(head, [paths, *rows(differ[:MAX_LIST])]) + more_of(len(differ), MAX_LIST, "or each run.json")
    if same:
        out += (
            f"<details><summary>{escape(count(len(same), 'entry', 'entries'))} the same on both sides</summary>"
            f"{html_table(('Same', *head[1:]), rows(same[:MAX_LIST]))}</details>"
        )
    return out


_ABOUT = (
    ("model", ("model.path", "model.class", "model")),
    ("quantization", ("model.quantization",)),
    ("device", ("device.name", "device.type", "device", "platform.vllm", "platform")),
    ("dtype", ("model.dtype", "dtype")),
    *((size, (f"parallel.{size}", size)) for size in ("tp", "pp", "dp", "ep")),
    ("torch", ("versions.torch", "torch")),
    ("vLLM", ("versions.vllm", "vllm")),
    ("accprobe", ("versions.accprobe",)),
)
"""(label, where a run may say it, first come first shown): what a reader asks of a run before anything else."""
_DATE = "start_time"
_EVERY_RUN = frozenset({_DATE, "probe.dir", "packed"})
"""What differs in any two runs, or what a note says, and explains nothing."""


def identity(comparison: Comparison) -> str:
    """Which two runs these are: what both have, then what differs, marked, with each one's date and dump; then the
    names of other entries that differ."""
    sides = [dict(_flat(run or {})) for run in (comparison.golden_run, comparison.mine_run)]
    own = [{label: _about(label, run, keys) for label, keys in _ABOUT} for run in sides]
    both = [f"<span>{_e(text, 120)}</span>" for label, text in own[0].items() if text and text == own[1][label]]
    known = any(text for texts in own for text in texts.values())
    lines = [("Both", both or ([] if known else ["model, device, dtype and versions are not recorded"]))]
    differ = [label for label in own[0] if own[0][label] != own[1][label]]
    for name, run, texts, path in zip(
        ("Golden", "Mine"), sides, own, (comparison.golden_path, comparison.mine_path), strict=True
    ):
        marks = [f"<mark>{_e(texts[label] or _absent(label), 120)}</mark>" for label in differ]
        date = [f"<time>{_e(_date(str(run[_DATE])), 40)}</time>"] if run.get(_DATE) else []
        lines.append((name, [*marks, *date, f"<code>{breakable(_tail(path))}</code>"]))
    rows = "".join(f"<div><dt>{name}</dt><dd>{' · '.join(parts)}</dd></div>" for name, parts in lines if parts)
    shown = {key for _, keys in _ABOUT for key in keys} | _EVERY_RUN
    groups = [{k.partition(".")[0] for k in run} for run in sides]  # a pack records nothing of its probe
    others = [k for k in dict.fromkeys([*sides[0], *sides[1]])
              if k not in shown and _recorded(sides[0].get(k)) != _recorded(sides[1].get(k))
              and ("." not in k or all(k.partition(".")[0] in group for group in groups))]  # fmt: skip
    named = [f"{_e(k, 60)} {' / '.join(_e(_words(run.get(k)), 24) for run in sides)}" for k in others[:FEW]]
    more = f" and {len(others) - FEW:,} more" if len(others) > FEW else ""
    sentence = f"{'Also different' if differ else 'Different'}: {'; '.join(named)}{more}. " if named else ""
    sentence += '<a href="#h-runs">All entries of both runs</a>' if any(sides) else ""
    return f'<dl class="identity">{rows}</dl><p class="hint">{sentence}</p>'


def _recorded(value: Any) -> Any:
    return None if value in ("", [], {}) else value


def _about(label: str, run: Mapping[str, Any], keys: Sequence[str]) -> str:
    """What a run says under one label; empty where it says nothing, and for a parallel size of 1."""
    known = [run[k] for k in keys if run.get(k) not in (None, "", [], {})]
    if not known:
        return ""
    value = known[0]
    if label in ("tp", "pp", "dp", "ep"):
        size = value[-1] if isinstance(value, list) else value
        return "" if size == 1 else f"{label} {_words(size)}"
    first = _tail(str(value), 1) if label == "model" else _words(value)
    if label in ("model", "device") and len(known) > 1 and str(known[1]) != str(value):
        return f"{first} ({_words(known[1])})"
    return f"{label} {first}" if keys[0].startswith("versions.") else first


def _absent(label: str) -> str:
    """What stands for a run that says nothing where the other does; a parallel size that is not shown is 1."""
    return {"tp": "tp 1", "pp": "pp 1", "dp": "dp 1", "ep": "ep 1", "quantization": "no quantization"}.get(
        label, f"{label} not recorded"
    )


def _date(text: str) -> str:
    """``2026-11-27T01:49:28+00:00`` as ``2026-11-27 01:49 UTC``; another spelling as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):[\d.]+(?:\+00:00|Z)", text)
    return f"{found[1]} {found[2]} UTC" if found else text


def _tail(path: str, parts: int = 2) -> str:
    return "/".join(path.replace("\\", "/").rstrip("/").split("/")[-parts:]) or path


def _flat(value: Mapping[str, Any], prefix: str = "", depth: int = 3) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and depth > 1:
            out += _flat(item, f"{name}.", depth - 1)
        else:
            out.append((name, item))
    return out[:2000]
