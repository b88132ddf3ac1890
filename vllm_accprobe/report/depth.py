"""Error against depth: one point per tap, in data-flow order, for prefill and decode apart.

The problem: an error is created in one place and carried on from there; a list of a hundred thousand pairs does not
show where it rises. The idea: per tap the worst row over all steps, ranks and calls of its outputs, so that the step
in the line is the culprit. Not here: drawing (html/chart.js); inputs, parameters and integer tensors, which have no
place on an error axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.facts import value_of

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison, Pair

PHASES = ("prefill", "decode", "other")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|layer|block|h)\.(\d{1,6})(?:\.|$)")


@dataclass(frozen=True)
class Point:
    """One tap. ``prefill``, ``decode`` and ``other`` are the worst row's relative L2 of each phase, None where nothing
    was compared and 0.0 where nothing differs; ``limit`` is the tightest one, ``floor`` what honest rounding alone
    would give (see ``floor_of``); ``failed`` and ``nonfinite`` count pairs. ``layer`` is the name's layer, such as
    ``model.layers.3``, or None outside of layers."""

    tap: str
    cls: str
    order: int
    layer: str | None
    prefill: float | None
    decode: float | None
    other: float | None
    limit: float | None
    floor: float | None
    pairs: int
    failed: int
    nonfinite: int


def layer_of(tap: str) -> str | None:
    """``model.layers.3.mlp.down_proj`` → ``model.layers.3``; None for a tap outside of layers."""
    match = _LAYER.search(tap)
    return tap[: match.end(1)] if match else None


def depth(comparison: Comparison) -> list[Point]:
    """Points in data-flow order."""
    taps: dict[str, list[Pair]] = {}
    for pair in comparison.pairs:
        if on_axis(pair):
            taps.setdefault(pair.tap, []).append(pair)
    points = [_point(tap, pairs, comparison.standard) for tap, pairs in taps.items()]
    return sorted(points, key=lambda p: (p.order, p.tap))


def on_axis(pair: Pair) -> bool:
    """Whether a pair has a place on an error axis: a compared output of a floating-point dtype."""
    if pair.status == "skip" or not pair.role.startswith(("output", "inplace")):
        return False
    return not str(pair.dtype_golden).startswith(("int", "uint", "bool"))


def floor_of(pair: Pair, standard: Mapping[str, Any]) -> float | None:
    """The floor at a pair: its error over ``x_floor`` where the comparison measured floors, else the rounding model:
    the limit is ``total`` floors in our own standard. None where neither is known."""
    x_floor, value = getattr(pair, "x_floor", None), value_of(pair)
    if x_floor and value and math.isfinite(x_floor) and math.isfinite(value):
        return value / x_floor
    total = standard.get("total")
    if pair.limit and isinstance(total, (int, float)) and total > 0 and pair.measure != "created":
        return pair.limit / total
    return None


def _point(tap: str, pairs: list[Pair], standard: Mapping[str, Any]) -> Point:
    worst: dict[str, float] = {}
    for pair in pairs:
        for phase, value in _values(pair):
            if math.isfinite(value):
                worst[phase] = max(worst.get(phase, 0.0), value)
    # A pair that failed by what it created carries the limit of one operator, not of what may have piled up.
    limits = [p.limit for p in pairs if p.limit is not None and p.measure != "created"]
    floors = [f for p in pairs if (f := floor_of(p, standard)) is not None]
    first = min(pairs, key=lambda p: p.order)
    return Point(
        tap=tap,
        cls=first.cls or "",
        order=first.order,
        layer=layer_of(tap),
        prefill=worst.get("prefill"),
        decode=worst.get("decode"),
        other=worst.get("other"),
        limit=min(limits) if limits else None,
        floor=min(floors) if floors else None,
        pairs=len(pairs),
        failed=sum(p.status == "fail" for p in pairs),
        nonfinite=sum(bool(p.nonfinite_mismatch) for p in pairs),
    )


def _values(pair: Pair) -> list[tuple[str, float]]:
    split = [(phase, getattr(pair, f"{phase}_rel_l2")) for phase in PHASES[:2]]
    found = [(phase, value) for phase, value in split if value is not None]
    if found:
        return found
    value = 0.0 if pair.identical else value_of(pair)
    if value is None:
        return []
    if pair.phase == "mixed" and pair.identical:
        return [("prefill", 0.0), ("decode", 0.0)]
    return [(pair.phase if pair.phase in PHASES[:2] else "other", value)]
