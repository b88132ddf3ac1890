"""What would decide, how the machines compute, and what the heat map leaves out, as parts of the page.

The problem: both are lists of whatever length, and commands must be copied as they are. The idea: as in sections.py,
finished markup in which every value is escaped; a command keeps its lines and is never wrapped. Not here: the sentences
(report/machines.py, comparison/verdict/deciding.py).
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from vllm_accprobe.report import facts, machines
from vllm_accprobe.report.html.elements import MAX_LIST, as_sentence, escaped, html_table, more_of
from vllm_accprobe.report.text import capital, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.token_text import TokenTexts

FEW = 4
"""chosen: differences on the first screen."""


def deciding(comparison: Comparison) -> str:
    """What would decide, where the answer is open: a sentence and its commands each."""
    steps = comparison.would_decide
    if not steps:
        return ""
    items = "".join(
        f"<li>{as_sentence(safe(step['why'], 400))}<pre><code>{command_lines(step['command'])}</code></pre></li>"
        for step in steps[:MAX_LIST]
    )
    return (
        '<section class="notes decide" aria-labelledby="h-decide"><h2 id="h-decide">This would decide</h2>'
        f"<ul>{items}</ul></section>"
    )


def wrong_states(comparison: Comparison) -> str:
    """What mine's ledger of states has found, after the first, which is the headline."""
    wrong = facts.wrong_states(comparison)[1:]
    if not wrong:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in wrong[:MAX_LIST])
    return (
        '<section class="notes" aria-labelledby="h-states"><h2 id="h-states">Further findings of the ledger of states'
        f'</h2><ul>{items}</ul>{more_of(len(wrong), MAX_LIST, "states")}</section>'
    )


def heat_note(requests: int, left_out: int, tokens: TokenTexts | None = None) -> str:
    """What the heat map leaves out, and that the page holds text where somebody has asked for it."""
    total = requests + left_out
    said = [f"The worst {requests:,} of {total:,} requests are shown; compare.csv has all of them."] if left_out else []
    if tokens:
        said.append(as_sentence(tokens.missing or "this page holds the text of prompts and answers, by --tokenizer"))
    return f'<p class="hint">{" ".join(said)}</p>' if said else ""


def command_lines(command: str) -> str:
    """Commands as escaped text, a line each."""
    return "\n".join(escaped(line, 1000) for line in command.splitlines())


def differences(comparison: Comparison) -> str:
    """Habits that the machines do not share, above the charts: what is alike can wait below them."""
    found = machines.differing(comparison.machines)
    if not found:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in found[:FEW])
    more = f"{len(found) - FEW:,} more, and what" if len(found) > FEW else "What"
    return (
        '<section class="notes" aria-label="How these machines differ"><h2>These machines compute differently</h2>'
        f'<ul>{items}</ul><p class="hint">{more} they do alike: '
        '<a href="#h-machines">How these machines compute</a></p></section>'
    )


def how_they_compute(comparison: Comparison) -> str:
    """Habits of both machines, differences first; each of them with its numbers in a table that opens."""
    found = machines.lines(comparison.machines)
    if not found:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in found[:MAX_LIST])
    rows = [tuple(map(escape, row)) for row in machines.rows(comparison.machines)[:MAX_LIST]]
    table = html_table(("Side", "Operator", "Habit", "Price", "Seen in"), rows)
    title = capital(machines.TITLE)
    return (
        f'<section aria-labelledby="h-machines"><h2 id="h-machines">{title}</h2><ul class="plain">{items}</ul>'
        f"{more_of(len(found), MAX_LIST, 'machines')}<details><summary>Each habit, with what it was seen in</summary>"
        f"{table}</details></section>"
    )
