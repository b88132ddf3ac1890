"""The worst failed pairs, one for each cause.

The problem: a fault in one operator fails at every step, rank and request, and the ten worst of all pairs are then ten
rows of one tap, while a second fault, a tenth as large, is on no list. The idea: pairs of one tap are one cause, and so
are those of an origin that is in several layers; each cause is told by its worst pair, and how many more are like it.
Not here: how bad a pair is (facts.severity), the layout (terminal.py, markdown.py, notebook.py). The page's table has
all pairs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report import facts, tiers
from vllm_accprobe.report.text import count

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison, Pair

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A layer's number: a whole part of a module's path."""


@dataclass(frozen=True)
class FailedCause:
    """worst: its worst pair; more: how many other pairs failed for the same reason."""

    worst: Pair
    more: int

    @property
    def like(self) -> str:
        """``and 39 more like it``; empty where it is alone."""
        return f"and {self.more:,} more like it" if self.more else ""


def causes(comparison: Comparison) -> list[FailedCause]:
    """All of them, the worst first; equals in data-flow order."""
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
        if key not in found or rank < found[key][0]:
            found[key] = rank, p
    ordered = sorted(found, key=lambda key: found[key][0])
    return [FailedCause(found[key][1], pairs[key] - 1) for key in ordered]


def title(comparison: Comparison, shown: int, found: int) -> str:
    """``the 10 worst of 53 causes of 1,234 failed pairs``: what stands above a list of so many."""
    failed = comparison.counts.failed
    if found == failed:
        return f"the {shown} worst of {failed:,} failed pairs" if found > shown else "failed pairs, worst first"
    of = f"{count(found, 'cause')} of {failed:,} failed pairs"
    return f"the {shown} worst of {of}" if found > shown else f"{of}, worst first"


def _in_layers(origin: Mapping[str, Any]) -> bool:
    return tiers.layers(origin) is not None and isinstance(origin.get("module"), str)


def _form(tap: str) -> str:
    """``model.layers.*.mlp``: the same place in any layer."""
    return _NUMBER.sub("*", tap)
