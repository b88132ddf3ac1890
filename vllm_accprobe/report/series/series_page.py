"""series.html: one offline page over time, with a badge per dump and a line per tap that ever failed.

The problem: a culprit's day is found by comparing the days, and each day's own page knows its own only. The idea: a
table of dumps that links their pages, a chart of factors over the limit, and the same numbers as a table of taps by
dumps. All of it is escaped markup and SVG made here; the script only filters and points. The policy is that of
compare.html. Not here: the shapes (series_chart.py), what is kept of a comparison (dump_entry.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from vllm_accprobe.report.between import tap_of
from vllm_accprobe.report.html.assembling import asset, fill, policy
from vllm_accprobe.report.html.elements import escaped
from vllm_accprobe.report.series import series_lines
from vllm_accprobe.report.series.dump_entry import SeriesEntry, failing_taps, over_limit
from vllm_accprobe.report.series.series_chart import MAX_LINES, chart, step
from vllm_accprobe.report.text import MISSING, count
from vllm_accprobe.whole_file import write_text

MAX_TAPS = 1_000
"""Rows of the table of taps; series.json has them all."""


def write_series(golden: str, entries: Sequence[SeriesEntry], path: str | Path) -> None:
    """Write the page to ``path``; the file appears whole or not at all. Raises OSError as the file system gives it."""
    write_text(path, series_page(golden, entries))


def series_page(golden: str, entries: Sequence[SeriesEntry]) -> str:
    """The page's whole text."""
    script, taps = asset("series.js", "series"), worst_taps(entries)
    word, _, said = series_lines.headline(entries).partition(": ")
    holes = {
        "csp": escape(policy([script])),
        "title": f"{word} · accprobe series",
        "state": "pass-page" if word == "PASS" else "fail-page",
        "css": asset("page.css") + asset("series.css", "series"),
        "badge": word,
        "said": escape(said),
        "golden": escaped(golden),
        "dumps": "".join(_dump(i, e) for i, e in enumerate(entries)),
        "chart": chart(entries, taps[:MAX_LINES]),
        "chart_note": _note(len(taps), MAX_LINES, "drawn, origins and the worst first"),
        "taps": _taps(entries, taps[:MAX_TAPS]),
        "taps_note": _note(len(taps), MAX_TAPS, "listed, origins and the worst first"),
        "series_js": script,
    }
    return fill(asset("series_page.html", "series"), holes)


def worst_taps(entries: Sequence[SeriesEntry]) -> list[str]:
    """Taps that ever failed: those that were an origin, then the others by their worst factor; equals in data-flow
    order."""
    origins = {tap_of(o) for e in entries for o in e.origins}
    taps = failing_taps(entries)
    worst = {t: max(e.taps[t].over for e in entries if t in e.taps) for t in taps}
    return sorted(taps, key=lambda t: (t not in origins, 0 if t in origins else -worst[t]))


def _note(total: int, shown: int, how: str) -> str:
    said = f"{shown:,} of {count(total, 'tap')} are {how}; series.json has all."
    return f'<p class="hint">{said}</p>' if total > shown else ""


def _dump(index: int, entry: SeriesEntry) -> str:
    cells = [escape(c) for c in series_lines.cells(entry)]
    name = cells[0]
    if entry.page is not None:  # relative, so that the folder can be moved; never a scheme
        name = f'<a href="./{escape(quote(entry.page))}">{name}</a>'
    badge = f'<span class="badge {entry.status}">{escape(entry.status.upper())}</span>'
    numbers = "".join(f'<td class="num">{c.replace("x", "×")}</td>' for c in cells[2:6])
    return (
        f'<tr id="dump-{index}" class="{entry.status}"><th scope="row">{name}</th><td>{badge}</td>{numbers}'
        f"<td>{cells[6]}</td></tr>"
    )


def _taps(entries: Sequence[SeriesEntry], taps: Sequence[str]) -> str:
    if not taps:
        return '<p class="missing">No tap failed in any dump.</p>'
    origins = [{tap_of(o) for o in e.origins} for e in entries]
    head = "".join(f"<th scope=col class=num>{escaped(e.name, 40)}</th>" for e in entries)
    body = "".join(
        f'<tr id="tap-{i}" data-tap="{i}" tabindex="0"><th scope="row"><code>{escaped(tap)}</code></th>'
        + "".join(_cell(e, tap, tap in own) for e, own in zip(entries, origins, strict=True))
        + "</tr>"
        for i, tap in enumerate(taps)
    )
    return (
        f'<div class="scroll"><table id="taps"><thead><tr><th scope="col">Tap</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(entry: SeriesEntry, tap: str, origin: bool) -> str:
    found = entry.taps.get(tap)
    if found is None:
        return f'<td class="num none">{MISSING}</td>'
    words = ["num", f"step{step(found.over)}", "failed" if found.failed else "", "origin" if origin else ""]
    said = over_limit(found.over).replace("x", "×")
    mark = ' <abbr title="an origin in this dump">●</abbr>' if origin else ""
    return f'<td class="{" ".join(filter(None, words))}">{said}{mark}</td>'
