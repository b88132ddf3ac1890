"""Two runs of an evaluation as lines and as a table.

The problem: two accuracies side by side ask to be read as a drop. The idea: one sentence for each metric that says both
counts, whether the difference is more than chance, how large it may be, and how many questions would show it.
Not here: the statistics (gate/samples/).
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_accprobe.gate.samples.contrast import NO_NUMBER, label
from vllm_accprobe.gate.samples.paired import LEVEL, POWER
from vllm_accprobe.report.table import cell
from vllm_accprobe.report.text import count, more, num, safe
from vllm_accprobe.whole_file import write_csv_lines

if TYPE_CHECKING:
    from vllm_accprobe.gate.samples.answers import Side
    from vllm_accprobe.gate.samples.contrast import Contrast, Evaluation

MAX_CONTRASTS = 20
MAX_FLIPS = 10
COLUMNS = (
    "task", "filter", "metric", "kind", "pairs", "golden", "mine", "difference", "low", "high", "p", "beyond_chance",
    "lost", "won", "questions_needed", "smallest_seen", "left_out",
)  # fmt: skip


def lines(e: Evaluation, shown: int = MAX_CONTRASTS) -> list[str]:
    """The verdict, what it rests on, each metric, what flipped, and what was not compared."""
    beyond = sum(c.beyond for c in e.contrasts)
    n, total = len(e.matched.pairs), count(len(e.contrasts), "comparison")
    head = "no difference beyond chance" if not beyond else f"{beyond} beyond chance"
    out = [f"{e.verdict.upper()}: {head} in {total}, {count(n, 'pair')} (rate of false alarms {num(e.rate)} in all)"]
    ordered = sorted(e.contrasts, key=lambda c: (not c.beyond, not c.together, c.p))
    out += [f"  {sentence(c, len(e.contrasts), e.rate)}" for c in ordered[:shown]]
    out += [f"  {line}" for line in more(len(ordered), shown, "--verbose, --csv")]
    return out + _flipped(e) + _not_compared(e)


def sentence(c: Contrast, among: int, rate: float) -> str:
    """``gsm8k exact_match: golden 26 of 50, mine 24: nothing to be seen (p = 0.69; ...); 587 questions would ...``"""
    name = safe(label(c.task, c.way, c.metric))
    if c.binary:
        sides = f"golden {round(c.golden * c.n):,} of {c.n:,}, mine {round(c.mine * c.n):,}"
    else:
        sides = f"golden {num(c.golden, 4)}, mine {num(c.mine, 4)} ({count(c.n, 'question')})"
    what = "a drop" if c.difference < 0 else "a rise"
    said = f"{what} beyond chance" if c.beyond else "nothing to be seen"
    if not c.beyond and c.p <= rate:
        said += f", among {among:,} comparisons"
    spread = (
        f"mine - golden {_signed(c, c.difference)}, {LEVEL:.0%} between {_signed(c, c.low)} and {_signed(c, c.high)}"
    )
    return f"{name}: {sides}: {said} (p = {num(c.p, 2)}; {spread}){_questions(c, what)}"


def _signed(c: Contrast, value: float) -> str:
    if not math.isfinite(value):
        return "any number"
    return f"{100 * value:+.1f} points" if c.binary else f"{value:+.3g}"


def _questions(c: Contrast, what: str) -> str:
    if c.beyond:
        return ""
    if c.needed is not None:
        # By the formula fewer may do than there are: the exact test, and Holm's rule, ask for a little more.
        enough = max(c.needed, c.n + 1)
        return f"; {enough:,} questions would be needed to see {what} of this size ({POWER:.0%} of the time)"
    if c.smallest is not None:
        return f"; with {c.n:,} questions less than {100 * c.smallest:.1f} points would not be seen"
    return ""


def _flipped(e: Evaluation) -> list[str]:
    out = []
    if e.flips:
        lost, won = (sum(bool(getattr(f, way)) for f in e.flips) for way in ("lost", "won"))
        out.append(f"{count(len(e.flips), 'question')} flipped: {lost:,} lost, {won:,} won")
        for f in e.flips[:MAX_FLIPS]:
            ways = [f"{word} {', '.join(names)}" for word, names in (("lost", f.lost), ("won", f.won)) if names]
            out.append(f"  {safe(' '.join(filter(None, (f.golden.task, f.golden.name))))}: {safe('; '.join(ways))}")
        out += [f"  {line}" for line in more(len(e.flips), MAX_FLIPS, "--json; --prompts-out writes their prompts")]
    if n := e.matched.other_responses:
        out.append(f"the text of {count(n, 'response')} is not the same on both sides")
    return out


def _not_compared(e: Evaluation) -> list[str]:
    m, out = e.matched, []
    if m.other_prompts:
        out.append(f"note: {count(m.other_prompts, 'question')} had another prompt in mine (template, examples before "
                   "it): the evaluations differ before any server does")  # fmt: skip
    for side, only in (("golden", m.only_golden), ("mine", m.only_mine)):
        out += [f"only in {side}: {line}" for line in _by_task(only)]
    out += [f"left out: {n:,} {safe(what)}" for what, n in m.left_out.items()]
    out += [
        f"left out: {n:,} {NO_NUMBER}, {safe(name)} (a metric of all questions together)" for name, n in e.no_numbers
    ]
    out += [
        f"left out: {c.left_out:,} {NO_NUMBER}, {safe(label(c.task, c.way, c.metric))}"
        for c in e.contrasts
        if c.left_out
    ]
    return out + [f"note: {safe(note, 400)}" for note in m.notes]


def _by_task(only: Counter[tuple[str, str]]) -> list[str]:
    named = [
        f"{count(n, 'answer')} of {safe(label(task, way, '')) or 'the file'}" for (task, way), n in only.most_common()
    ]
    return [*named[:MAX_FLIPS], *more(len(named), MAX_FLIPS, "--json")]


def write_csv(e: Evaluation, path: Path) -> None:
    """A row for each metric. Raises OSError."""
    write_csv_lines(path, COLUMNS, map(_row, e.contrasts))


def _row(c: Contrast) -> tuple[object, ...]:
    kind = "right or wrong" if c.binary else "score"
    names, sides = (cell(c.task), cell(c.way), cell(c.metric), kind), (c.n, c.golden, c.mine)
    return (*names, *sides, c.difference, c.low, c.high, c.p, c.beyond, c.lost, c.won, c.needed, c.smallest, c.left_out)


def read_lines(golden: Side, mine: Side) -> list[str]:
    """What was in the files and is no answer."""
    return [
        f"left out of {safe(side.path)}: {n:,} {what}" for side in (golden, mine) for what, n in side.left_out.items()
    ]


def read_json(golden: Side, mine: Side) -> dict[str, object]:
    """Of each side: the path, the tool, and what is no answer."""
    sides = (("golden", golden), ("mine", mine))
    return {name: {"path": str(s.path), "tool": s.tool, "left_out": dict(s.left_out)} for name, s in sides}


def nothing(e: Evaluation, golden: Side, mine: Side) -> str:
    """Why nothing could be paired, in one line."""
    m = e.matched
    if not golden.answers or not mine.answers:
        return "nothing is left of one side: --tasks, --filters and --metrics choose nothing there"
    if e.no_numbers:
        return f"no metric has a number for each question ({', '.join(name for name, _ in e.no_numbers)})"
    if m.pairs:
        return "the two sides have no metric in common"
    if m.left_out:
        return "; ".join(f"{n:,} {what}" for what, n in m.left_out.items())
    tasks = [", ".join(sorted({a.task or "?" for a in s.answers})[:5]) for s in (golden, mine)]
    had = [f"{s.path} has {len(s.answers):,} answers ({t})" for s, t in zip((golden, mine), tasks, strict=True)]
    return f"no question is on both sides: {'; '.join(had)}; another task, version or order of choices?"
