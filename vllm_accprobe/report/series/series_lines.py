"""A series as lines: one sentence, one line per dump; for a terminal, as Markdown, as commands of GitHub Actions.

The idea: pure functions of the entries; names of dumps and taps go through ``safe`` and, in Markdown, stand in code
spans. Not here: what is kept of a comparison (dump_entry.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_accprobe.report import github
from vllm_accprobe.report.facts import origin_title
from vllm_accprobe.report.markdown import code as span
from vllm_accprobe.report.series.dump_entry import FAILED, PASSED, SeriesEntry, over_limit
from vllm_accprobe.report.text import MISSING, count, safe

HEAD = ("dump", "verdict", "x limit", "passed", "failed", "skipped", "culprit")


def verdict(entries: Sequence[SeriesEntry]) -> str:
    """``fail`` where any dump failed, ``pass`` where all passed, else ``incomplete``."""
    found = {e.status for e in entries}
    return FAILED if FAILED in found else PASSED if found == {PASSED} else "incomplete"


def headline(entries: Sequence[SeriesEntry]) -> str:
    """The series in one sentence."""
    n, wrong = len(entries), [e for e in entries if e.status == FAILED]
    out = [e for e in entries if e.status not in (PASSED, FAILED)]
    left = f"{count(len(out), 'dump')} could not be compared" if out else ""
    if wrong:
        first = wrong[0]
        said = f"FAIL: {len(wrong)} of {count(n, 'dump')} differ from golden, first {safe(first.name, 80)}"
        said += f": {origin_title(first.culprit)}" if first.culprit else ""
        return f"{said}; {left}" if left else said
    if out:
        return f"INCOMPLETE: {left} of {n}" + (", the others agree with golden" if len(out) < n else "")
    return f"PASS: {count(n, 'dump')} {'agrees' if n == 1 else 'agree'} with golden"


def cells(entry: SeriesEntry) -> tuple[str, ...]:
    """The columns of ``HEAD``, all ``safe``."""
    if entry.status not in (PASSED, FAILED):
        return (safe(entry.name, 80), entry.status, "", "", "", "", safe(entry.says, 400))
    who = origin_title(entry.culprit) if entry.culprit else MISSING
    if entry.status == FAILED and not entry.culprit:
        who = safe(entry.says.removeprefix("FAIL: "), 400)
    more = f" (+{len(entry.origins) - 1} other)" if len(entry.origins) > 1 else ""
    numbers = (f"{n:,}" for n in (entry.passed, entry.failed, entry.skipped))
    return (safe(entry.name, 80), entry.status, over_limit(entry.over) or MISSING, *numbers, who + more)


def lines(entries: Sequence[SeriesEntry]) -> list[str]:
    """For a terminal: the sentence, and a table with a line per dump in the order given."""
    table = [HEAD, *map(cells, entries)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD) - 1)]
    out = [headline(entries), ""]
    for row in table:
        left = [row[i].ljust(widths[i]) for i in range(2)]
        right = [row[i].rjust(widths[i]) for i in range(2, len(widths))]
        out.append("  " + "  ".join([*left, *right, row[-1]]).rstrip())
    return out


def markdown_lines(entries: Sequence[SeriesEntry]) -> list[str]:
    """A heading, the sentence and a table."""
    said = headline(entries)
    rows = [[span(c) if i in (0, len(HEAD) - 1) else c for i, c in enumerate(cells(e))] for e in entries]
    table = ["| " + " | ".join(row) + " |" for row in [list(HEAD), ["---"] * len(HEAD), *rows]]
    return [f"## accprobe: {said.partition(':')[0]}", "", span(said, 2000), "", *table]


def github_lines(entries: Sequence[SeriesEntry]) -> list[str]:
    """An error per dump that failed or could not be compared, as far as GitHub shows them; a notice where all pass."""
    wrong = [e for e in entries if e.status != PASSED]
    if not wrong:
        return [github.command("notice", "accprobe", headline(entries))]
    shown = wrong[: github.MAX_ANNOTATIONS]
    out = [github.command("error", f"accprobe: {safe(e.name, 80)}", e.says) for e in shown]
    left = len(wrong) - len(shown)
    return [*out, github.command("notice", "accprobe", f"{count(left, 'dump')} more: series.json")] if left else out
