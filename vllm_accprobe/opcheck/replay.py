"""Every captured call against its reference: a row for each output, and a reason for each that has none.

The problem: an output is wrong because the operator is, or because its inputs were; only the operator run again on the
very inputs tells. The idea: the reference's outputs from mine's inputs against mine's outputs: what differs is what
the operator itself created. `check` streams the rows; nothing is decided here about other rows, and nothing is left out
silently: a call without a reference is a row that says why.
Not here: where a call comes from (calls.py), how an error becomes a verdict (verdict.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.dump.select import row_space
from vllm_accprobe.judge.standards import Standard
from vllm_accprobe.opcheck.calls import Calls, Captured, as_numbers
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, References
from vllm_accprobe.opcheck.verdict import OPERATOR, Verdict, judge

PASS, FAIL, SKIP, ERROR = "pass", "fail", "skip", "error"


@dataclass(frozen=True, slots=True)
class Checked:
    """One output of one call; the columns of opcheck.csv. rows: in the tensor; checked: that had a reference;
    unchecked_because: why the others had none.

    created: rel_l2 of the worst row, reference against mine; measure, measured, allowed: of verdict.Verdict, in floors;
    request, position, column: where, None where the measure does not say; message: for people."""

    tap: str
    cls: str
    role: str
    rank: int
    step: int | None
    call: int
    seq: int
    dtype: str
    shape: tuple[int, ...]
    rows: int
    checked: int
    unchecked_because: str
    cosine: float | None
    max_abs_err: float | None
    mean_abs_err: float | None
    rmse: float | None
    rel_l2: float | None
    max_rel_err: float | None
    created: float | None
    nonfinite: int | None
    nonfinite_mismatch: int | None
    measure: str | None
    measured: float | None
    allowed: float | None
    request: str | None
    position: int | None
    column: int | None
    status: str
    message: str

    @property
    def severity(self) -> float:
        """measured / allowed, 0 where nothing was measured."""
        if self.measured is None or self.allowed is None:
            return 0.0
        return self.measured / self.allowed if self.allowed else (math.inf if self.measured else 0.0)


COLUMNS = tuple(f.name for f in fields(Checked))


def check(
    calls: Calls,
    references: References,
    *,
    ops: Iterable[str] = (),
    standard: Standard = OPERATOR,
    done: Callable[[], object] = lambda: None,
) -> Iterator[Checked]:
    """Rows tap by tap. ops: globs over classes and paths, all if empty; done: called after each tap."""
    globs = tuple(ops)
    for rank, tap, cls in calls.taps():
        if not globs or any(fnmatchcase(cls, g) or fnmatchcase(tap, g) for g in globs):
            for captured in calls.of(rank, tap):
                yield from check_call(calls.dump, captured, references, standard)
        done()


def check_stored(calls: Calls, ops: Iterable[str] = ()) -> Iterator[Checked]:
    """Parameters that the dump holds whole against the checkpoint's: a row for each that the checkpoint has, too.

    A parameter that a loader keeps in another form (permuted, folded) is nothing like the checkpoint's; one that is off
    by less than half its size is a wrong weight, and fails."""
    globs = tuple(ops)
    for rank, tap, cls, record, value in calls.stored():
        if value is None or (globs and not any(fnmatchcase(cls, g) or fnmatchcase(tap, g) for g in globs)):
            continue
        empty = Call(tap, cls)
        captured = Captured(tap, rank, None, record.call, empty, {record.role: record})
        mine = calls.read(record)
        value = value.to(mine.dtype)
        if value.shape != mine.shape:
            yield _unchecked(captured, record.role, record, SKIP, OTHER_FORM)
            continue
        wide, held = as_numbers(value).reshape(1, -1), as_numbers(mine).reshape(1, -1)
        v = judge(wide, held, record.dtype, last=0.0)
        if not v.passed and not (v.metrics.rel_l2 is not None and v.metrics.rel_l2 <= 0.5):
            yield _unchecked(captured, record.role, record, SKIP, OTHER_FORM)
            continue
        message = "" if v.passed else f"{v.value:.0f} of {held.size} values are not the checkpoint's"
        yield _row(captured, record, v, 1, 1, "", (None, None), message)


OTHER_FORM = "a parameter that the engine keeps in another form than the checkpoint"


def count_taps(calls: Calls) -> int:
    return len(calls.taps())


def check_call(dump: Dump, captured: Captured, references: References, standard: Standard) -> Iterator[Checked]:
    """The rows of one call: one per output that was captured; one that says why, where there is no reference."""
    if captured.missing:
        yield _unchecked(captured, "", None, SKIP, captured.missing)
        return
    outputs = {role: r for role, r in captured.records.items() if role.startswith(("output.", "inplace."))}
    if not outputs:
        yield _unchecked(captured, "", None, SKIP, "nothing came out of it that was captured")
        return
    expected = references.evaluate(captured.what)
    if isinstance(expected, Declined):
        yield _unchecked(captured, "", None, ERROR if expected.failed else SKIP, expected.reason)
        return
    for role in [*outputs, *(r for r in expected if r not in outputs and r in captured.records)]:
        record = captured.records[role]
        if role not in expected:
            yield _unchecked(captured, role, record, SKIP, f"no reference for {role} of {captured.what.cls}")
            continue
        try:
            yield _checked(dump, captured, role, record, expected[role], standard)
        except (ValueError, DumpError) as error:
            yield _unchecked(captured, role, record, ERROR, f"the reference does not fit: {error}")


def _unchecked(c: Captured, role: str, record: Record | None, status: str, why: str) -> Checked:
    empty: dict[str, Any] = dict.fromkeys(COLUMNS)
    shape = record.shape if record is not None else ()
    empty |= {
        "tap": c.tap, "cls": c.what.cls, "role": role, "rank": c.rank, "step": c.step, "call": c.call, "shape": shape,
        "seq": _seq(c, record),
        "dtype": record.dtype if record is not None else "", "rows": 0, "checked": 0, "unchecked_because": why,
        "status": status, "message": why,
    }  # fmt: skip
    return Checked(**empty)


def _seq(c: Captured, record: Record | None) -> int:
    """The output's place in the order of execution; the call's last where there is no output."""
    return record.seq if record is not None else max(r.seq for r in c.records.values())


def _matrix(array: np.ndarray, row_dim: int) -> np.ndarray:
    """[rows, everything else]; a tensor without rows is one row."""
    if not array.ndim:
        return array.reshape(1, 1)
    return np.moveaxis(array, row_dim if row_dim < array.ndim else 0, 0).reshape(array.shape[row_dim], -1)


def _checked(
    dump: Dump, c: Captured, role: str, record: Record, expected: Expected, standard: Standard
) -> Checked:  # fmt: skip
    captured = c.what.outputs.get(role, c.what.inputs.get(role.removeprefix("input.")))
    if tuple(expected.value.shape) != record.shape:
        raise ValueError(f"shape {list(expected.value.shape)} instead of {list(record.shape)}")
    row_dim = record.row_dim if record.rows is not None else 0
    mine = _matrix(as_numbers(captured), row_dim)
    reference = _matrix(as_numbers(expected.value), row_dim)
    noise = None
    if expected.noise is not None:
        noise = _matrix(as_numbers(expected.noise.expand(record.shape)), row_dim)
    rows = np.arange(len(mine))
    if expected.rows is not None:
        rows = np.flatnonzero(expected.rows.numpy())
        if not len(rows):
            return _unchecked(c, role, record, SKIP, expected.reason or "no row has a reference")
        mine, reference = mine[rows], reference[rows]
        noise = noise[rows] if noise is not None else None
    v = judge(reference, mine, record.dtype, standard, noise=noise, last=expected.unit, common=expected.common)
    at = int(rows[v.row]) if v.row >= 0 else -1
    request, position = _place(dump, record, at)
    left = expected.reason if expected.rows is not None and len(rows) < len(expected.rows) else ""
    count = len(rows) if expected.rows is None else len(expected.rows)
    message = _message(v, request, position, expected, len(rows))
    return _row(c, record, v, count, len(rows), left, (request, position), message)


def _row(
    c: Captured, record: Record, v: Verdict, rows: int, checked: int, left: str,
    place: tuple[str | None, int | None], message: str,
) -> Checked:  # fmt: skip
    m = v.metrics
    return Checked(
        tap=c.tap, cls=c.what.cls, role=record.role, rank=c.rank, step=c.step, call=c.call, seq=record.seq,
        dtype=record.dtype, shape=record.shape, rows=rows, checked=checked, unchecked_because=left, cosine=m.cosine,
        max_abs_err=m.max_abs_err, mean_abs_err=m.mean_abs_err, rmse=m.rmse, rel_l2=m.rel_l2,
        max_rel_err=m.max_rel_err, created=v.worst_row_rel_l2, nonfinite=m.nonfinite,
        nonfinite_mismatch=m.nonfinite_mismatch, measure=v.measure, measured=v.value, allowed=v.limit,
        request=place[0], position=place[1], column=v.column if v.column >= 0 else None,
        status=PASS if v.passed else FAIL, message=message,
    )  # fmt: skip


def _place(dump: Dump, record: Record, row: int) -> tuple[str | None, int | None]:
    space = row_space(dump, record)
    if space is None or row < 0:
        return None, None
    start = 0
    for s in space.segments:
        if row < start + s.n:
            request = dump.requests.get((record.rank, s.req))
            return (request.id if request else str(s.req)), s.pos + row - start
        start += s.n
    return None, None


def _message(
    v: Verdict, request: str | None, position: int | None, expected: Expected, checked: int
) -> str:  # fmt: skip
    said = []
    if not v.passed:
        where = f" at position {position} of request {request}" if position is not None else ""
        where += f", column {v.column}" if v.column >= 0 else ""
        if expected.note:
            where += f" ({expected.note})"
        if v.measure in ("exact", "nonfinite"):
            what = "values that should be equal" if v.measure == "exact" else "non-finite values on one side"
            said.append(f"{v.value:.0f} {what}{where}")
        else:
            said.append(f"{v.measure} error {v.value:.3g} times honest rounding, allowed {v.limit:.3g}{where}")
    if expected.rows is not None and checked < len(expected.rows):
        said.append(f"{len(expected.rows) - checked} rows skipped: {expected.reason}")
    return "; ".join(said)


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
        verdict = r.status in (PASS, FAIL)
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
