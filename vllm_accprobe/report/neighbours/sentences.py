"""An origin's neighbours in words, for the terminal and for whoever cannot see the page's drawing.

The problem: the same edge stands in a line, in a drawing and in that drawing's description. The idea: one phrase for an
edge and one for its error. Every string returned is already ``safe``. Not here: which edges there are
(comparison/verdict/neighbours.py), the drawing (report/html/around.js).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_accprobe.comparison.plan.links import GOLDEN
from vllm_accprobe.comparison.verdict.neighbours import IDENTICAL, ORDER, OWN, Around, Edge
from vllm_accprobe.report.text import factor, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.plan.sources import Sources
    from vllm_accprobe.comparison.result import Comparison

SHOWN = 3
"""Edges of a line."""


def error(edge: Edge) -> str:
    """``identical``, ``0.21x its limit``, ``not compared``; of equal statistics ``no error seen``."""
    if edge.status == IDENTICAL:
        return IDENTICAL
    if edge.over is None or edge.over < 0:
        return "not compared"
    if math.isinf(edge.over):
        return "beyond any limit"
    return f"{factor(edge.over)}x its limit" if edge.over else "no error seen"


def name(edge: Edge) -> str:
    """The tensor and, where that is not plain, how it got there."""
    if edge.by == OWN:
        return f"its {safe(edge.role, 80)}"
    text = f"{safe(edge.tap)}/{safe(edge.role, 80)}"
    if edge.by == ORDER and edge.role_in:
        return f"its {safe(edge.role_in, 80)}, made after {text}"
    return f"{text}, which only golden hands on as it is" if edge.by == GOLDEN else text


def lines(comparison: Comparison) -> list[str]:
    """The culprit's neighbours in at most two lines; none where nothing of them was compared."""
    around = next(iter(comparison.neighbours), None)
    if around is None or all(e.over is None for e in (*around.fed_by, *around.feeds)):
        return []
    sides = zip(("fed by", "feeds"), (around.fed_by, around.feeds), around.left_out, strict=True)
    return [f"{what}: {said}" for what, edges, left in sides if (said := _grouped(edges, left))]


def described(around: Around) -> str:
    """All of it as one sentence, which a screen reader says."""
    sides = ("fed by", around.fed_by), ("feeds", around.feeds)
    said = [f"{what} {', '.join(f'{name(e)} ({error(e)})' for e in edges)}" for what, edges in sides if edges]
    return f"{safe(around.tap)}/{safe(around.role, 80)}: {'; '.join(said)}"


def code(sources: Sources, tap: object) -> str | None:
    """Where a module's code is: one place, or both sides' where they differ; None where neither is known."""
    golden, mine = sources.get(str(tap), (None, None))
    if golden is None or mine is None or golden == mine:
        known = mine or golden
        return None if known is None else safe(known, 300) + (" (golden)" if mine is None else "")
    return f"{safe(mine, 300)} (golden: {safe(golden, 300)})"


def _grouped(edges: Sequence[Edge], left_out: int) -> str:
    """The first `SHOWN`; those that stand together and have one error say it once."""
    said: list[tuple[list[str], str]] = []
    for edge in edges[:SHOWN]:
        own = edge.by == OWN or (edge.by == ORDER and edge.role_in)
        what, much = f"its {safe(edge.role_in or edge.role, 80)}" if own else name(edge), error(edge)
        if not said or said[-1][1] != much:
            said.append(([], much))
        said[-1][0].append(what)
    more = max(len(edges) - SHOWN, 0) + left_out
    groups = [f"{', '.join(names)} ({much})" for names, much in said] + (
        [f"{more} more in compare.json"] if more else []
    )
    return "; ".join(groups)
