"""A row of the table from a verdict, and one that says why there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_accprobe.dump.reader import Dump, row_space
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.floors.rounding import ROUNDING, TOWARD_ZERO
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Expected
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, PASS, CheckResult, unchecked
from vllm_accprobe.standards.measures import Measures


def without_verdict(c: Captured, role: str, record: Record | None, status: str, why: str) -> CheckResult:
    return unchecked(c.tap, c.what.cls, c.rank, c.step, c.call, _seq(c, record), why, status=status, role=role,
                     dtype=record.dtype if record is not None else "",
                     shape=record.shape if record is not None else ())  # fmt: skip


def _seq(c: Captured, record: Record | None) -> int:
    """The output's place in the order of execution; the call's last where there is no output."""
    return record.seq if record is not None else max((r.seq for r in c.records.values()), default=c.seq)


def on_grid(row: CheckResult, record: Record, dtype: str) -> CheckResult:
    """``row`` of numbers of ``dtype``, which may be coarser than the tensor's."""
    return row if dtype == record.dtype else replace(row, dtype=dtype, stored=record.dtype)


def judged(
    c: Captured, what: tuple[str, str, tuple[int, ...], int], v: Verdict, measures: Measures | None,
    counts: tuple[int, int, str], message: str, place: tuple[str | None, int | None] = (None, None), **more: Any,
) -> CheckResult:  # fmt: skip
    """A row with a verdict. what: role, dtype, shape, seq; counts: rows, those that were checked, why the others were
    not; more: fields that are otherwise."""
    role, dtype, shape, seq = what
    fields: dict[str, Any] = {
        "rows": counts[0], "checked": counts[1], "unchecked_because": counts[2], "status": PASS if v.passed else FAIL,
        "message": message, "chance": None if v.passed else v.chance, "dtype": dtype,
    }  # fmt: skip
    return CheckResult(
        tap=c.tap, cls=c.what.cls, role=role, rank=c.rank, step=c.step, call=c.call, seq=seq, shape=shape,
        created=v.worst_row_rel_l2, measure=v.measure, measured=v.value, allowed=v.limit, request=place[0],
        position=place[1], column=v.column if v.column >= 0 else None, measures=measures, rounding=v.rounding,
        tier=v.tier, **(fields | more),
    )  # fmt: skip


def merged(parts: Sequence[CheckResult], shape: tuple[int, ...]) -> CheckResult:
    """The row of an output that was judged in ``parts``, some rows in each: what its worst part shows, with the rows of
    all. Each part had its share of the output's chance. shape: of the output."""
    known = [p for p in parts if p.status in (PASS, FAIL)]
    errors = [p for p in parts if p.status == ERROR]
    if len(parts) == 1 or not known:
        return replace(parts[0], shape=shape)
    worst = max(known, key=lambda p: (p.status == FAIL, p.severity))
    if errors and worst.status == PASS:
        worst = errors[0]

    def first(name: str) -> str:
        return getattr(worst, name) or next((x for p in known if (x := getattr(p, name))), "")

    created = [p.created for p in known if p.created is not None]
    caches = [p.cache for p in known if p.cache is not None]
    return replace(
        worst, shape=shape, rows=shape[0], checked=sum(p.checked for p in known), created=max(created, default=None),
        unchecked_because=next((p.unchecked_because for p in parts if p.unchecked_because), ""),
        evidence=first("evidence"), rounding=first("rounding"), cache=max(caches, key=lambda c: c[1], default=None),
        replayed=tuple(run for p in parts for run in p.replayed), left=tuple(sorted(n for p in parts for n in p.left)),
        smallest=_smallest([p.smallest for p in known]),
    )  # fmt: skip


def _smallest(parts: Sequence[tuple[float, float, float] | None]) -> tuple[float, float, float] | None:
    """An error in all rows is named where one part shows it; of one row, in the part that has it."""
    sizes = [s for s in parts if s is not None]
    if len(sizes) < len(parts) or not sizes:
        return None
    return min(s[0] for s in sizes), min(s[1] for s in sizes), max(s[2] for s in sizes)


def place_of(dump: Dump, record: Record, row: int) -> tuple[str | None, int | None]:
    space = row_space(dump, record)
    if space is None or row < 0:
        return None, None
    for s, rows in space.stretches():
        if row < rows.stop:
            request = dump.requests.get((record.rank, s.req))
            return (request.id if request else str(s.req)), s.pos + row - rows.start
    return None, None


def message_of(
    v: Verdict, request: str | None, position: int | None, expected: Expected, checked: int
) -> str:  # fmt: skip
    parts = []
    if not v.passed:
        where = f" at position {position} of request {request}" if position is not None else ""
        where += f", column {v.column}" if v.column >= 0 else ""
        if expected.note:
            where += f" ({expected.note})"
        if v.measure in ("exact", "nonfinite"):
            what = "values that should be equal" if v.measure == "exact" else "non-finite values on one side"
            parts.append(f"{v.value:.0f} {what}{where}")
        elif v.measure == ROUNDING:
            parts.append(f"rounds {TOWARD_ZERO}: {v.value:.0%} of the numbers that tell it from rounding to nearest")
        else:
            beyond = f"{v.severity:.3g}x its limit, {v.value:.3g} times rounding alone, allowed {v.limit:.3g}"
            parts.append(f"{v.measure} error {beyond}{where}")
    if expected.rows is not None and checked < len(expected.rows):
        parts.append(f"{len(expected.rows) - checked} rows skipped: {expected.reason}")
    if expected.source:
        parts.append(expected.source)
    return "; ".join(parts)
