"""The worst failed pairs, one for each cause.

The problem: a fault in one operator fails at every step, rank and request and in all that is computed from it, and the
ten worst of all pairs are then ten rows of one fault, while a second one, a tenth as large, is on no list. The idea:
pairs of one tap are one cause, and so are those of an origin that is in several layers; each is told by its worst pair,
and how many more are like it. Origins go first: another tap that fails only shows what reached it. Not here: how bad a
pair is (facts.severity), the layout (terminal.py, markdown.py, notebook.py). The page's table has all pairs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report import facts, tiers
from vllm_accprobe.report.next.outcomes import of_origins
from vllm_accprobe.report.text import count

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison, Pair

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A layer's number: a whole part of a module's path."""


@dataclass(frozen=True)
class FailedCause:
    """worst: its worst pair; more: how many other pairs failed for the same reason; own: it is an origin's."""

    worst: Pair
    more: int
    own: bool = False

    @property
    def like(self) -> str:
        """``and 39 more like it``; empty where it is alone."""
        return f"and {self.more:,} more like it" if self.more else ""


def causes(comparison: Comparison) -> list[FailedCause]:
    """All of them, origins first, and then the worst first; equals in data-flow order."""
    is_own, own = of_origins(comparison), set()
    spread = {_form(o["module"]) for o in comparison.origins if _in_layers(o)}
    found: dict[str, tuple[tuple[float, int, int], Pair]] = {}
    pairs: dict[str, int] = {}
    for p in comparison.pairs:
        if p.status != "fail":
            continue
        form = _form(p.tap) if spread else ""
        key = form if form in spread else p.tap
        rank = (-facts.severity(p), p.order, p.step if p.step is not None else -1)
        pairs[key] = pairs.get(key, 0) + 1
        if is_own(p):
            own.add(key)
        if key not in found or rank < found[key][0]:
            found[key] = rank, p
    ordered = sorted(found, key=lambda key: (key not in own, found[key][0]))
    return [FailedCause(found[key][1], pairs[key] - 1, key in own) for key in ordered]


def title(comparison: Comparison, shown: int, found: Sequence[FailedCause]) -> str:
    """``2 causes and 51 places that they reach, of 1,234 failed pairs, the 10 worst``: what stands above a list of so
    many. Where no origin is known, what is a cause and what it reaches cannot be told."""
    own, failed = sum(cause.own for cause in found), comparison.counts.failed
    if not own and len(found) == failed:
        return f"the {shown} worst of {failed:,} failed pairs" if failed > shown else "failed pairs, worst first"
    behind = len(found) - own
    reached = count(behind, "place") + (f" that {'it reaches' if own == 1 else 'they reach'}" if own else "")
    what = " and ".join(words for n, words in ((own, count(own, "cause")), (behind, reached)) if n)
    some = f"the {shown} worst" if len(found) > shown else "worst first"
    return f"{what}, of {count(failed, 'failed pair')}, {some}"


def _in_layers(origin: Mapping[str, Any]) -> bool:
    return tiers.layers(origin) is not None and isinstance(origin.get("module"), str)


def _form(tap: str) -> str:
    """``model.layers.*.mlp``: the same place in any layer."""
    return _NUMBER.sub("*", tap)
