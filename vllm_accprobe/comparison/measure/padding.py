"""Steps that a captured graph computed, and what stood in their rows of padding.

The problem: padding rows have no partner, and half of the faults of graphs come from what stands in them. The idea: in
mine alone, statistics show NaN, infinity and sizes that no real row has; at the first padded steps the bytes show
whether a row is what an earlier step left. Not here: whether an error goes with padding (judge/error_pattern.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.record_table import of_sites
from vllm_accprobe.dump.schema import Record, Stats

NONFINITE, LEFT = "NaN or infinity", "what an earlier step left of somebody's"
_HUGE = 100.0
"""chosen: values so many times the largest of any real row are reported."""
_LOOKED_AT = 16
"""chosen: padded tensors of a tap, and steps before each, whose bytes are read: what is left stands there soon."""


def graphs_of(dump: Any) -> dict[int, tuple[int, int]]:
    """``graphs`` of a ComparisonContext: step → (size, rows of padding); empty for a dump of which no step was computed
    by a graph."""
    found: dict[int, tuple[int, int]] = {}
    for (_, number), step in dump.steps.items():
        size = step.graph.size if step.graph is not None else 0
        tokens = int(step.batch.get("tokens", 0))
        found[number] = (size, max(size - tokens, 0) if size else 0)
    return found if any(size for size, _ in found.values()) else {}


def padding_of(dump: Any) -> dict[str, str]:
    """``padding`` of a ComparisonContext: tap → what stood in its rows of padding, "" for nothing of note; in the order
    of execution."""
    padded: dict[str, list[Record]] = defaultdict(list)
    for r in sorted(getattr(dump, "padding", ()), key=lambda r: (_step(r), r.seq)):
        padded[r.tap].append(r)
    real: dict[str, list[Record]] = defaultdict(list)
    for r in of_sites(dump.records, lambda site: site.tap in padded):
        if r.step is not None:
            real[r.tap].append(r)
    return {tap: _kind_of_padding(dump, found, real[tap]) for tap, found in padded.items()}


def stood_in_padding(padding: Mapping[str, str], tap: str) -> str:
    """A clause about ``tap``, else about the nearest tap in front of it that has something to tell."""
    taps = list(padding)
    front = taps[: taps.index(tap) + 1] if tap in padding else taps
    named = next((one for one in reversed(front) if padding[one]), None)
    return f"rows of padding hold {padding[named]} at {named}" if named is not None else ""


def _kind_of_padding(dump: Any, padded: list[Record], real: list[Record]) -> str:
    if any(r.stats is not None and r.stats.nan + r.stats.inf for r in padded):
        return NONFINITE
    most, usual = (max((_largest(r.stats) for r in records), default=0.0) for records in (padded, real))
    if usual and most > _HUGE * usual:
        return f"values up to {most:.3g}, where real rows have up to {usual:.3g},"
    return LEFT if _left(dump, padded, real) else ""


def _largest(stats: Stats | None) -> float:
    if stats is None or stats.min is None or stats.max is None:
        return 0.0
    return max(-stats.min, stats.max)


def _left(dump: Any, padded: list[Record], real: list[Record]) -> bool:
    known: dict[Record, list[bytes]] = {}

    def rows_of(record: Record) -> list[bytes]:
        if record not in known:
            known[record] = _rows(dump, record)
        return known[record]

    rows = same = 0
    for r in padded[:_LOOKED_AT]:
        before = [x for x in real if (x.rank, x.role, x.call) == (r.rank, r.role, r.call) and _step(x) < _step(r)]
        earlier = {row for x in before[-_LOOKED_AT:] for row in rows_of(x)}
        own = _rows(dump, r)
        rows += len(own)
        same += sum(row in earlier for row in own)
    return 2 * same > rows


def _step(record: Record) -> int:
    return -1 if record.step is None else record.step


def _rows(dump: Any, record: Record) -> list[bytes]:
    if record.payload is None:
        return []
    try:
        values = dump.read(record)
    except DumpError:  # reported where the tensor itself is compared
        return []
    return [row.tobytes() for row in np.ascontiguousarray(values)]
