"""What a verdict covers, in words and as a table: checked, compared only, unseen, and the smallest error that shows.

The problem: PASS is read as "all is right", whatever was looked at. The idea: beside the verdict stands whether
operators were checked (computed again from what they read) or only compared, with the command that would check them;
and below it a row for each class of operator, in the same words on terminal, page and markdown. Not here: the figures
(comparison/verdict/covered.py), the command (comparison/verdict/deciding.py). Every string returned is ``safe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.text import MISSING, count, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

HEAD = ("calls", "rows", "checked", "compared only", "unseen", "all rows", "one column", "one row", "class")
TITLE = "what this verdict covers, by class of operator; the smallest error that would have been named"
_SIZES = ("row", "column", "one_row")


def head(comparison: Comparison) -> list[str]:
    """What stands directly below the verdict where not everything was checked: a sentence, and the commands that would
    check the rest, unless the report names them further down anyway."""
    missing = comparison.not_checked
    if missing is None:
        return []
    checked, rows = (sum(int(e.get(k) or 0) for e in entries(comparison)) for k in ("checked", "rows"))
    how = f"checked in part: {checked:,} of {count(rows, 'row')}" if comparison.replayed else "compared, not checked"
    said = f"{how}: {safe(missing['why'], 400)}"
    lines = [line for line in missing["command"].splitlines() if line not in _elsewhere(comparison)]
    return [f"{said}; this would check:", *(f"  {safe(line, 1000)}" for line in lines)] if lines else [said]


def _elsewhere(comparison: Comparison) -> set[str]:
    steps = [*comparison.would_decide, *comparison.next_steps]
    return {line.partition(" --out ")[0] for step in steps for line in step["command"].splitlines()}


def entries(comparison: Comparison) -> list[Mapping[str, Any]]:
    """coverage.by_class; empty where a comparison does not say it."""
    found = comparison.coverage.get("by_class")
    return [e for e in found if isinstance(e, Mapping)] if isinstance(found, list) else []


def totals(comparison: Comparison) -> str | None:
    """All classes in one line."""
    found = entries(comparison)
    if not found:
        return None
    rows, checked, compared, unseen = (
        sum(int(e.get(k) or 0) for e in found) for k in ("rows", "checked", "compared", "unseen")
    )
    said = f"{checked:,} of {count(rows, 'row')} of operators checked, {compared:,} compared only"
    left = rows - checked - compared
    said += f", {left:,} neither" if left > 0 else ""
    return said + (f"; {count(unseen, 'module')} not seen" if unseen else "")


def table(comparison: Comparison, n: int | None = None) -> list[tuple[str, ...]]:
    """A row for each of the first ``n`` classes, in the columns of HEAD."""
    return [_row(e) for e in entries(comparison)[:n]]


def _row(e: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = [f"{int(e.get(k) or 0):,}" for k in ("calls", "rows", "checked", "compared", "unseen")]
    sizes = e.get("smallest")
    least = [size(sizes.get(k)) if isinstance(sizes, Mapping) else MISSING for k in _SIZES]
    return (*numbers, *least, safe(e.get("class") or MISSING, 80))


def size(found: object) -> str:
    """``0.34%``; ``any`` of what must be equal to the bit."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return MISSING
    return f"{num(100.0 * found, 2)}%" if found else "any"
