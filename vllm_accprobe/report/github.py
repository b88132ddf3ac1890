"""The comparison for GitHub Actions: annotations on the log, a summary on the run's page.

The problem: a workflow command is a line of the log, ``::error title=T::message``, so a name from a dump with a newline
or ``::`` in it could issue commands of its own. The idea: everything that is printed is ``safe`` (one line, printable)
and then escaped as the runner unescapes it: %, CR, LF everywhere, and ``:`` and ``,`` in properties [actions/toolkit,
packages/core/src/command.ts]. Not here: the summary's text (markdown.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_accprobe.comparison.states import is_cache
from vllm_accprobe.report import facts, markdown, tiers
from vllm_accprobe.report.text import count, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

MAX_ANNOTATIONS = 10
"""GitHub shows ten errors and ten warnings of a step; a notice more says what is left out."""

SUMMARY = "GITHUB_STEP_SUMMARY"


def escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def command(kind: str, title: str, message: str) -> str:
    """One workflow command. kind: error, warning or notice."""
    return f"::{kind} title={escape_property(safe(title))}::{escape_data(safe(message, 2000))}"


def lines(comparison: Comparison) -> list[str]:
    """An error per origin, culprit first (or one for the verdict), a warning per note, a notice on a pass and for what
    would decide."""
    out: list[str] = []
    if comparison.verdict == "pass":
        out.append(command("notice", "accprobe", facts.headline(comparison)))
    elif not comparison.origins or facts.wrong_states(comparison):
        out.append(command("error", "accprobe", facts.headline(comparison)))
    for i, origin in enumerate(comparison.origins[:MAX_ANNOTATIONS]):
        if is_cache(origin):  # it is the headline
            continue
        said = f"{facts.accused(origin)}: {facts.origin_detail(comparison, origin)}"
        said += f"; gap: {gap}" if (gap := facts.inside(comparison, origin)) else ""
        said += f"; {tier}" if (tier := tiers.sentence(origin)) else ""
        said += f"; shape: {shape}" if (shape := facts.shape(origin)) else ""
        out.append(command("error", "accprobe: culprit" if i == 0 else f"accprobe: origin {i + 1}", said))
    for step in comparison.would_decide[:MAX_ANNOTATIONS]:
        typed = "; then ".join(step["command"].splitlines())
        out.append(command("notice", "accprobe: this would decide", f"{step['why']}: {typed}"))
    out += [command("warning", "accprobe", note) for note in comparison.notes[:MAX_ANNOTATIONS]]
    for what, items in (("origin", comparison.origins), ("note", comparison.notes)):
        if len(items) > MAX_ANNOTATIONS:
            left = count(len(items) - MAX_ANNOTATIONS, what)
            out.append(command("notice", "accprobe", f"{left} more: compare.json"))
    return out


def write_summary(comparison: Comparison) -> str | None:
    """Appends the Markdown summary to the file that GitHub names in GITHUB_STEP_SUMMARY; returns its path, or None
    outside of GitHub. Raises OSError as the file system gives it."""
    return append_summary(markdown.lines(comparison))


def append_summary(summary: Iterable[str]) -> str | None:
    """As `write_summary`, of any lines of Markdown."""
    path = os.environ.get(SUMMARY)
    if not path:
        return None
    with open(path, "a", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
        f.write("\n".join(summary) + "\n")
    return path
