"""What a verdict covers, by operator class: checked, compared only, unseen, and the smallest error that shows there.

The problem: a PASS on three operators of thirty is not a PASS on thirty, and a check that would have missed an error of
ten per cent is none. The idea: each module of mine is counted once, under its class: rows that a replay checked, rows
that were only compared with golden's, and modules of which neither is true. Beside it stands the smallest error that
would have been named: by the floors of the replay where it checked (opcheck/proof/prove.py), and else by the limits
that the pairs were compared with, of the module where these are widest.
Not here: how it is shown (report/verdict_parts.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_accprobe.comparison.pair import SKIP, Pair
from vllm_accprobe.standards import constants as c

if TYPE_CHECKING:
    from vllm_accprobe.comparison.measure.measured import ComparisonContext
    from vllm_accprobe.comparison.result import Comparison

KEY = "by_class"
"""In compare.json's coverage."""
_NEVER_CALLED = frozenset(("ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "PPMissingLayer"))
"""Classes of modules that hold others, or nothing, and are not called."""


class ModuleCover(NamedTuple):
    """What a replay checked of a module. calls, rows: captured; checked: rows of which all outputs had a
    reference; row, column, one_row: relative errors, of all rows, of one column, of one row, from which on one of its
    outputs would have been named; None where none was checked."""

    cls: str
    calls: int
    rows: int
    checked: int
    row: float | None
    column: float | None
    one_row: float | None


@dataclass(frozen=True, slots=True)
class _Compared:
    """Of a module: calls and rows that were compared, and the widest limits: of a row and of an element, relative."""

    cls: str
    calls: int
    rows: int
    row: float
    column: float


def by_class(
    pairs: Sequence[Pair], setting: ComparisonContext | None, element: float,
    covers: Mapping[str, ModuleCover] | None = None,
) -> list[dict[str, Any]]:
    """compare.json's ``coverage.by_class``, the classes with most rows first. element: an element's limit over its
    row's (standards/limits.py); covers: of a replay, by tap. ``rows`` = ``checked`` + ``compared`` + those that have
    neither; ``unseen``: modules."""
    compared = _compared(pairs, element)
    covers = covers or {}
    names = {**({} if setting is None else setting.modules), **{t: one.cls for t, one in compared.items()},
             **{t: one.cls for t, one in covers.items()}}  # fmt: skip
    found: dict[str, list[Any]] = {}
    for tap, cls in names.items():
        one, other = covers.get(tap), compared.get(tap)
        unseen = not (one is not None and one.checked) and other is None
        if unseen and (one is None or not one.rows) and (cls in _NEVER_CALLED or not tap or tap == "<root>"):
            continue
        both = [(x.calls, x.rows) for x in (one, other) if x is not None]
        calls, rows = (max((x[i] for x in both), default=0) for i in range(2))
        checked = one.checked if one is not None else 0
        only = max(0, other.rows - checked) if other is not None else 0
        sizes = _sizes(one, other)
        entry = found.setdefault(cls, [0, 0, 0, 0, 0, [], []])
        for i, n in enumerate((calls, rows, checked, only, int(unseen))):
            entry[i] += n
        entry[5 if checked else 6].append(sizes)
    entries = [_entry(cls, *values) for cls, values in found.items()]
    return sorted(entries, key=lambda e: (-e["rows"], -e["unseen"], e["class"]))


def with_covers(result: Comparison, covers: Mapping[str, ModuleCover]) -> Comparison:
    """``result`` with what its replay checked."""
    limits = result.standard.get("origins by", result.standard)
    setting = None if result.measured is None else result.measured.setting
    found = by_class(result.pairs, setting, float(limits.get("element", c.ELEMENT)), covers)
    return replace(result, coverage=result.coverage | {KEY: found})


def _entry(
    cls: str, calls: int, rows: int, checked: int, compared: int, unseen: int, by_replay: list[Any],
    by_limits: list[Any],
) -> dict[str, Any]:  # fmt: skip
    entry: dict[str, Any] = {"class": cls, "calls": calls, "rows": rows, "checked": checked, "compared": compared,
                             "unseen": unseen, "smallest": _largest(by_replay or by_limits)}  # fmt: skip
    if by_replay and any(x for x in by_limits if x is not None):
        entry["smallest_compared"] = _largest(by_limits)
    return entry


def _largest(sizes: Iterable[tuple[float | None, ...] | None]) -> dict[str, float] | None:
    """Of all modules of a class, so that it holds for each of them."""
    known = [s for s in sizes if s is not None and all(x is not None and math.isfinite(x) for x in s)]
    if not known:
        return None
    row, column, one_row = (max(float(s[i] or 0.0) for s in known) for i in range(3))
    return {"row": row, "column": column, "one_row": one_row}


def _sizes(one: ModuleCover | None, other: _Compared | None) -> tuple[float | None, ...] | None:
    if one is not None and one.checked:
        return one.row, one.column, one.one_row
    return None if other is None else (other.row, other.column, other.row)


def _compared(pairs: Iterable[Pair], element: float) -> dict[str, _Compared]:
    """Of what modules gave out: files' tensors, too, but no inputs and no parameters."""
    calls: dict[str, dict[tuple[Any, ...], int]] = {}
    limits: dict[str, tuple[str, float, float]] = {}
    for p in pairs:
        if p.status == SKIP or p.role.startswith(("input", "param.")):
            continue
        of = calls.setdefault(p.tap, {})
        call = p.step, p.rank, p.call
        of[call] = max(of.get(call, 0), 1 if p.rows is None else p.rows)
        cls, row, column = limits.get(p.tap, (p.cls, 0.0, 0.0))
        limit = p.limit or 0.0
        width = math.prod(p.shape[1:]) if len(p.shape) > 1 else 1
        limits[p.tap] = cls, max(row, limit), max(column, min(limit * element, limit * math.sqrt(width)))
    return {tap: _Compared(limits[tap][0], len(of), sum(of.values()), *limits[tap][1:]) for tap, of in calls.items()}


def to_plain(found: Mapping[str, ModuleCover]) -> dict[str, list[Any]]:
    """As JSON keeps it."""
    return {tap: [x if not isinstance(x, float) or math.isfinite(x) else None for x in c] for tap, c in found.items()}


def from_plain(value: Mapping[str, Any]) -> dict[str, ModuleCover]:
    """What `to_plain` wrote. Raises TypeError and ValueError for anything else."""
    found = {}
    for tap, (cls, calls, rows, checked, *sizes) in value.items():
        row, column, one_row = (None if x is None else float(x) for x in sizes)
        found[str(tap)] = ModuleCover(str(cls), int(calls), int(rows), int(checked), row, column, one_row)
    return found
