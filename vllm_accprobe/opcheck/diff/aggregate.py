"""Many calls' rows as one: what a module, or an operator, did over a whole run.

The problem: two servers batch the same requests differently, so that no call of one has its like on the other, and yet
both ran the same kernels hundreds of times. The idea: rows of one identity (step and call left out) become one row:
counts are added, maxima are maxima, the smallest cosine stays, means and shares are weighed by elements, root mean
squares through their squares. A share of some elements only (of small values, of normal values) is weighed by all
elements, because a csv does not say how many there were; rel_l2 likewise. A call that failed makes the whole row one
without a result; calls that were skipped are left out and, where there are no others, said.
Not here: how rows meet (verdicts.py).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace

from vllm_accprobe.opcheck.diff.csv_rows import ALL, Row
from vllm_accprobe.standards.finding import ERROR, SKIP, worst
from vllm_accprobe.standards.measures import Measures

SUM, LARGEST, SMALLEST, MEAN, SQUARE = range(5)
_LARGEST = ("max_", "normal_max_", "v1_normal_max_", "ulp_max", "kl")
_COUNTS = ("elements", "nonfinite", "above_")


def rule_of(name: str) -> int:
    """How the measure ``name`` of several calls becomes one."""
    if name.startswith(_COUNTS):
        return SUM
    if name.startswith(_LARGEST):
        return LARGEST
    if name == "cosine":
        return SMALLEST
    return SQUARE if name.endswith("rmse") or name == "rel_l2" else MEAN


_RULES = tuple(rule_of(n) for n in Measures.FIELDS)
_ELEMENTS = Measures.FIELDS.index("elements")


class _Many:
    """Rows of one identity and dtype."""

    def __init__(self, first: Row):
        self.first = first
        self.calls = self.failed = 0
        self.statuses: set[str] = set()
        self.messages: list[str] = []
        self.skipped = ""
        self.severity = 0.0
        self.totals = [0.0] * len(_RULES)
        self.weights = [0.0] * len(_RULES)

    def add(self, row: Row) -> None:
        if row.status == SKIP:
            self.skipped = self.skipped or row.message or "skipped"
            return
        self.calls += 1
        self.statuses.add(row.status)
        self.severity = max(self.severity, row.severity)
        if row.message and len(self.messages) < 1:
            self.messages.append(row.message)
        if not row.measured:
            self.failed += 1
            return
        weight = 1.0 if row.missing >> _ELEMENTS & 1 else row.numbers[_ELEMENTS]
        for i, (rule, value) in enumerate(zip(_RULES, row.numbers, strict=True)):
            if row.missing >> i & 1 or (not weight and rule != SUM):
                continue
            self._one(i, rule, value, weight)

    def _one(self, i: int, rule: int, value: float, weight: float) -> None:
        if rule in (LARGEST, SMALLEST):
            best = max if rule == LARGEST else min
            old = self.totals[i]
            held = value if not self.weights[i] or math.isnan(value) else old if math.isnan(old) else best(old, value)
            self.totals[i] = held
            self.weights[i] = 1.0
            return
        self.totals[i] += value if rule == SUM else weight * (value if rule == MEAN else value * value)
        self.weights[i] += weight if rule != SUM else 1.0

    def row(self) -> Row:
        """The one that stands for all."""
        first = self.first
        if not self.calls:
            return replace(first, shape="", status=SKIP, message=self.skipped)
        if self.failed:
            said = self.messages[0] if self.messages else "no measures"
            text = f"{self.failed} of {self.calls} calls: {said}"
            return replace(first, shape="", status=ERROR, message=text, missing=ALL)
        numbers, missing = array("d", self.totals), 0
        for i, (rule, weight) in enumerate(zip(_RULES, self.weights, strict=True)):
            if not weight:
                missing |= 1 << i
            elif rule in (MEAN, SQUARE):
                value = self.totals[i] / weight
                numbers[i] = value if rule == MEAN else math.sqrt(value)
        status = worst(sorted(self.statuses)) if self.statuses - {""} else ""
        message = self.messages[0] if self.messages else ""
        return replace(first, shape="", status=status, message=message, severity=self.severity, numbers=numbers,
                       missing=missing)  # fmt: skip


def gathered(rows: Iterable[Row]) -> Iterator[Row]:
    """One row for each identity and dtype, in the order of their first calls."""
    found: dict[tuple[str, ...], _Many] = {}
    for row in rows:
        key = (*row.key, row.dtype)
        if key not in found:
            found[key] = _Many(row)
        found[key].add(row)
    for many in found.values():
        yield many.row()
