"""The comparison as Markdown and for GitHub Actions.

The problem: names come from dumps; Markdown has many ways to turn one into markup, and a workflow command is a line of
the log. The idea: names stand in code spans with a fence longer than any run of backticks in them, pipes escaped; what
is printed as a command is one `safe` line, escaped as the runner unescapes it: %, CR, LF, and ``:`` and ``,`` in
properties [actions/toolkit, packages/core/src/command.ts]. Not here: what is reported (facts.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_accprobe.comparison.runner_inputs import is_cache
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.report import facts, verdict_parts
from vllm_accprobe.report.text import MISSING, capital, count, more, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison


MAX_LIST = 10


def code(value: object, limit: int = 200) -> str:
    text = safe(value, limit).strip()
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|")


def markdown_lines(comparison: Comparison) -> list[str]:
    failed = comparison.verdict != "pass"
    out = [f"## accprobe: {'FAIL' if failed else 'PASS'}", "", code(facts.headline(comparison), 2000)]
    if comparison.notes:
        out += ["", "**Read this first**", "", *(f"- {code(note, 1000)}" for note in comparison.notes[:MAX_LIST])]
        out += _more(len(comparison.notes), "notes")
    if how := verdict_parts.head(comparison):
        out += ["", code(how[0], 1000), *(["", *(f"    {line.strip()}" for line in how[1:])] if how[1:] else [])]
    out += _origins(comparison)
    if text := facts.alarms(comparison):
        out += ["", f"By chance: {text}."]
    out += _commands("This would decide", comparison.would_decide, "would_decide")
    out += _machines(comparison)
    if first := facts.divergence(comparison):
        out += ["", f"First divergence: {code(first, 1000)}"]
    out += _worst(comparison)
    out += _flipped(comparison)
    rows = [(label, value) for label, value in facts.coverage_rows(comparison)]
    rows += [(code(what), f"{n:,}") for what, n in facts.skip_rows(comparison)]
    table = _table(("what", "how many"), rows)
    if total := verdict_parts.totals(comparison):
        by_class = [(*row[:-1], code(row[-1])) for row in verdict_parts.table(comparison)]
        head = f"{capital(verdict_parts.COVERS_TITLE)} ({total}):"
        table = [head, "", *_table(verdict_parts.HEAD, by_class), "", *table]
    out += _commands("Next", comparison.next_steps, "next")
    return [*out, "", "<details><summary>Coverage</summary>", "", *table, "", "</details>"]


def _origins(comparison: Comparison) -> list[str]:
    if not comparison.origins:
        return []
    rows: list[tuple[str, ...]] = [
        (
            str(i + 1),
            code(facts.origin_name(o)),
            code(o.get("class") or ""),
            code(", ".join(x for x in (str(o.get("role") or ""), facts.where(o)) if x)),
            _size(o),
            code(o.get("evidence") or MISSING),
            code(facts.shape(o) or ""),
        )
        for i, o in enumerate(comparison.origins[:MAX_LIST])
    ]
    head: tuple[str, ...] = ("#", "origin", "class", "where", "created / limit", "evidence", "shape of the error")
    more = dict(facts.optional_columns(comparison))
    for name in ("constant", "cause", "floor that it breaks", "in the gap", "in graphs"):
        if name in more:
            head = (*head, name)
            rows = [(*row, code(text, 800)) for row, text in zip(rows, more[name], strict=False)]
    return ["", "### Origins", "", *_table(head, rows), *_more(len(comparison.origins), "origins")]


def _size(origin: OriginEntry) -> str:
    factor = facts.origin_times(origin)
    return f"{num(facts.origin_size(origin))} / {num(origin.get('floor'))}" + (f" ({factor})" if factor else "")


def _commands(title: str, steps: Sequence[Mapping[str, str]], where: str) -> list[str]:
    """For each step a sentence and its commands as indented code, which nothing ends."""
    if not steps:
        return []
    out = ["", f"### {title}"]
    for step in steps[:MAX_LIST]:
        out += ["", f"{code(step['why'], 400)}:", ""]
        out += [f"    {safe(line, 1000)}" for line in step["command"].splitlines()]
    return out + _more(len(steps), where)


def _machines(comparison: Comparison) -> list[str]:
    found = verdict_parts.machine_lines(comparison.machines)
    if not found:
        return []
    lines = [f"- {code(line, 400)}" for line in found[:MAX_LIST]]
    return ["", f"### {capital(verdict_parts.MACHINES_TITLE)}", "", *lines, *_more(len(found), "machines")]


def _worst(comparison: Comparison) -> list[str]:
    if not comparison.counts.failed:
        return []
    rows = []
    found = facts.causes(comparison)
    for cause in found[:MAX_LIST]:
        p = cause.worst
        measure, value, limit = facts.decided(p)
        name = " ".join(x for x in (code(p.mine or p.golden), cause.like) if x)
        rows.append((facts.over(p), measure, num(value, 4), num(limit), facts.step_of(p), name))
    title = capital(facts.title(comparison, MAX_LIST, found))
    return ["", f"### {title}", "", *_table(("× limit", "measure", "value", "limit", "step", "pair"), rows)]


def _flipped(comparison: Comparison) -> list[str]:
    flipped = comparison.tokens.get("flipped") or []
    if not flipped:
        return []
    compared = count(int(comparison.tokens.get("compared") or 0), "sampled token")
    rows = [
        (
            code(t.get("request")),
            code(t.get("ordinal")),
            f"{code(t.get('golden'))} ({num(t.get('golden_margin'))})",
            f"{code(t.get('mine'))} ({num(t.get('mine_margin'))})",
        )
        for t in flipped[:MAX_LIST]
    ]
    head = ("request", "generated token", "golden (margin)", "mine (margin)")
    return ["", f"### {len(flipped):,} of {compared} flipped", "", *_table(head, rows), *_more(len(flipped), "tokens")]


def _more(total: int, where: str) -> list[str]:
    text = more(total, MAX_LIST, f"compare.json, {where}")
    return ["", *text] if text else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    out = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return out + ["| " + " | ".join(cell or " " for cell in row) + " |" for row in rows]


MAX_ANNOTATIONS = 10
"""GitHub shows ten errors and ten warnings of a step; a notice more says what is left out."""

SUMMARY = "GITHUB_STEP_SUMMARY"


def escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def command(kind: str, title: str, message: str) -> str:
    """One workflow command. kind: error, warning or notice."""
    named = escape_data(safe(title)).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={named}::{escape_data(safe(message, 2000))}"


def github_lines(comparison: Comparison) -> list[str]:
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
        text = f"{facts.introduced_by(origin)}: {facts.origin_detail(comparison, origin)}"
        text += f"; gap: {gap}" if (gap := facts.inside(comparison, origin)) else ""
        text += f"; {tier}" if (tier := facts.sentence(origin)) else ""
        text += f"; shape: {shape}" if (shape := facts.shape(origin)) else ""
        out.append(command("error", "accprobe: culprit" if i == 0 else f"accprobe: origin {i + 1}", text))
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
    path = os.environ.get(SUMMARY)
    if not path:
        return None
    with open(path, "a", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
        f.write("\n".join(markdown_lines(comparison)) + "\n")
    return path
