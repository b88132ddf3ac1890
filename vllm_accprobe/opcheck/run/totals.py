"""How many calls were checked, and why the others were not.

Not here: the rows (replay.py), how they are told (table.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, SKIP, WARNING, Checked


@dataclass(frozen=True, slots=True)
class Totals:
    """calls: how many module calls were seen; checked: of them, with a verdict; skipped: reason → calls; outputs by
    status; rows_skipped, outputs_skipped: of checked calls, reason → how many."""

    calls: int
    checked: int
    skipped: dict[str, int]
    statuses: dict[str, int]
    rows_skipped: dict[str, int]
    outputs_skipped: dict[str, int]


def totals(rows: Iterable[Checked]) -> Totals:
    """A call counts as checked when one of its outputs has a verdict; else its first reason counts."""
    seen: dict[tuple[Any, ...], tuple[bool, str]] = {}
    statuses: Counter[str] = Counter()
    left: Counter[str] = Counter()
    alone: list[tuple[tuple[Any, ...], str]] = []
    for r in rows:
        if r.step is None:  # a parameter: it has a verdict, and is no call
            statuses[r.status] += r.status != SKIP
            continue
        key = (r.rank, r.tap, r.step, r.call)
        verdict = r.status in (PASS, FAIL, WARNING)
        before = seen.get(key, (False, r.message))
        seen[key] = (before[0] or verdict, before[1])
        statuses[r.status] += 1
        if not verdict and r.role:
            alone.append((key, r.message))
        if verdict and r.checked < r.rows:
            left[r.unchecked_because] += r.rows - r.checked
    reasons = Counter(why for ok, why in seen.values() if not ok)
    outputs = Counter(why for key, why in alone if seen[key][0])
    checked = sum(ok for ok, _ in seen.values())
    return Totals(len(seen), checked, dict(reasons.most_common()), dict(statuses), dict(left), dict(outputs))
