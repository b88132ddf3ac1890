"""How far each tap is over its own limit, against depth: one point per tap, in data-flow order.

The problem: an error is created in one place and carried on from there; a list of a hundred thousand pairs does not
show where, and errors against limits of other measures show a fault below its limit. The idea: everything is drawn as
the factor that decided (facts.severity), so that 1 is the limit of every tap and who failed is not below it: what a tap
created over what one operator may (an origin: the factor that is said of it), and behind that what its outputs are off
by in all, the worst row over all steps, ranks and calls. Not here: drawing (html/chart.js); inputs, parameters and
integer tensors, which have no place on an error axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.facts import severity, tap_of, value_of
from vllm_accprobe.report.tiers import origin_factor

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison, Pair

PHASES = ("prefill", "decode", "other")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|layer|block|h)\.(\d{1,6})(?:\.|$)")


@dataclass(frozen=True)
class Point:
    """One tap, in factors over its own limit: ``created`` by it, and ``prefill``, ``decode`` and ``other``, by how much
    the worst row of each phase is off in all; None where nothing was compared or is known, 0.0 where nothing differs.
    An error without a number (NaN, a golden of 0) is none of these and is counted in ``nonfinite``, as ``failed`` and
    ``pairs`` count. ``origin``: its number, the culprit being 1, or None. ``layer`` is the name's layer, such as
    ``model.layers.3``, or None outside of layers."""

    tap: str
    cls: str
    order: int
    layer: str | None
    created: float | None
    prefill: float | None
    decode: float | None
    other: float | None
    origin: int | None
    pairs: int
    failed: int
    nonfinite: int


def layer_of(tap: str) -> str | None:
    """``model.layers.3.mlp.down_proj`` → ``model.layers.3``; None for a tap outside of layers."""
    match = _LAYER.search(tap)
    return tap[: match.end(1)] if match else None


def depth(comparison: Comparison) -> list[Point]:
    """Points in data-flow order; an origin has one, whatever it was blamed for."""
    taps: dict[str, list[Pair]] = {}
    origins: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for number, origin in enumerate(comparison.origins, 1):
        origins.setdefault(tap_of(origin), (number, origin))
    for pair in comparison.pairs:
        if on_axis(pair) or (pair.tap in origins and pair.status == "fail"):
            taps.setdefault(pair.tap, []).append(pair)
    points = [_point(tap, pairs, comparison.created.get(tap), origins.get(tap)) for tap, pairs in taps.items()]
    return sorted(points, key=lambda p: (p.order, p.tap))


def on_axis(pair: Pair) -> bool:
    """Whether a pair has a place on an error axis: a compared output of a floating-point dtype."""
    if pair.status == "skip" or not pair.role.startswith(("output", "inplace")):
        return False
    return not str(pair.dtype_golden).startswith(("int", "uint", "bool"))


def _point(
    tap: str, pairs: list[Pair], created: float | None, blamed: tuple[int, Mapping[str, Any]] | None
) -> Point:  # fmt: skip
    worst: dict[str, float] = {}
    for pair in pairs:
        for phase, value in _values(pair):
            if math.isfinite(value):
                worst[phase] = max(worst.get(phase, 0.0), value)
    endless = sum(severity(p) == math.inf for p in pairs)
    if blamed is not None:
        said = origin_factor(blamed[1])
        created = said if said is not None and math.isfinite(said) else None
        endless = max(endless, said == math.inf)
    first = min(pairs, key=lambda p: p.order)
    return Point(
        tap=tap,
        cls=first.cls or "",
        order=first.order,
        layer=layer_of(tap),
        created=created,
        prefill=worst.get("prefill"),
        decode=worst.get("decode"),
        other=worst.get("other"),
        origin=None if blamed is None else blamed[0],
        pairs=len(pairs),
        failed=sum(p.status == "fail" for p in pairs),
        nonfinite=endless,
    )


def _values(pair: Pair) -> list[tuple[str, float]]:
    """(phase, factor): of a pair with rows of both phases, the worse one has what decided, the other its own rows'."""
    split = {phase: x for phase in PHASES[:2] if (x := getattr(pair, f"{phase}_rel_l2")) is not None}
    if pair.identical and (split or pair.phase == "mixed"):
        return [(phase, 0.0) for phase in split or PHASES[:2]]
    if value_of(pair) is None and pair.measured is None and pair.status != "fail":
        return [("other", 0.0)] if pair.identical else []
    over = 0.0 if pair.identical else severity(pair)
    limit = pair.allowed if pair.measure == "created" else pair.limit
    if len(split) == 2 and limit and all(map(math.isfinite, split.values())):
        most = max(split, key=lambda phase: split[phase])
        return [(phase, over if phase == most else min(x / limit, over)) for phase, x in split.items()]
    phase = next(iter(split), pair.phase)
    return [(phase if phase in PHASES[:2] else "other", over)]
