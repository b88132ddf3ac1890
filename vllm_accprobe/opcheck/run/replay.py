"""Every captured call against its reference: a row for each output, and a reason for each that has none.

The problem: an output is wrong because the operator is, or because its inputs were; only the operator run again on the
very inputs tells. The idea: the reference's outputs from mine's inputs against mine's outputs: what differs is what
the operator itself created. `check` streams the rows; nothing is decided here about other rows, and nothing is left out
silently: a call without a reference is a row that says why.
Not here: where a call comes from (records.py), how an error becomes a verdict (verdict.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.dump.select import matches, row_space
from vllm_accprobe.opcheck.calls import grid
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.floors.attention_causes import cause
from vllm_accprobe.opcheck.floors.chance import BUDGET, Budget
from vllm_accprobe.opcheck.floors.pools import Pools
from vllm_accprobe.opcheck.floors.rounding import ROUNDING, TOWARD_ZERO, judge
from vllm_accprobe.opcheck.floors.verdict import EXACT, NONFINITE, Verdict
from vllm_accprobe.opcheck.habits.look import due, look
from vllm_accprobe.opcheck.measures import Measures, measure
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, References, combined
from vllm_accprobe.opcheck.run.result_row import (
    COLUMNS,
    ERROR,
    FAIL,
    OURS,
    PASS,
    SKIP,
    STRICT,
    WARNING,
    Checked,
    id_of,
    unchecked,
)
from vllm_accprobe.standards import OUTPUT, find

__all__ = [
    "COLUMNS", "ERROR", "FAIL", "PASS", "SKIP", "WARNING", "Checked", "Options", "check", "check_call", "check_stored",
    "check_tap", "count_taps", "judged", "unchecked", "wanted",
]  # fmt: skip
Evaluate = Callable[[Captured], "Mapping[str, Expected] | Declined"]


@dataclass(frozen=True)
class Options:
    """standard: whose limits decide, OURS, STRICT or one of standards/; kl: measure the KL divergence too; ids: only
    these calls, as ``rank.step.seq`` of one of their records, all if empty; measured: with all of measures.py, which
    other standards need; habits: look at how outputs were computed, which takes references that round nothing; budget:
    how likely an honest output may fail (chance.py)."""

    standard: str = OURS
    kl: bool = False
    ids: frozenset[str] = frozenset()
    measured: bool = True
    habits: bool = True
    budget: Budget = BUDGET

    def wants(self, c: Captured) -> bool:
        return not self.ids or any(id_of(c.rank, c.step, r.seq) in self.ids for r in c.records.values())


def wanted(globs: Iterable[str], tap: str, cls: str) -> bool:
    """Whether a tap is asked for: globs over classes, operators (``.default`` may be left out) and paths; ``!``
    excludes, and the last that matches decides; all if there are none."""
    return matches(tuple(globs), (cls, tap, cls.removesuffix(".default"), tap.removesuffix(".default")))


def check(
    calls: Calls,
    references: References,
    *,
    ops: Iterable[str] = (),
    options: Options = Options(),
    done: Callable[[], object] = lambda: None,
) -> Iterator[Checked]:
    """Rows tap by tap. ops: globs over classes and paths, all if empty; done: called after each tap."""
    globs = tuple(ops)
    for rank, tap, cls in calls.taps():
        if wanted(globs, tap, cls):
            yield from check_tap(calls, rank, tap, lambda c: references.evaluate(c.what), options)
        done()


def check_tap(calls: Calls, rank: int, tap: str, evaluate: Evaluate, options: Options) -> Iterator[Checked]:
    """The rows of one tap, call by call; then those of its outputs that only all calls together show to be wrong."""
    pools = Pools()
    for captured in calls.of(rank, tap):
        if options.wants(captured):
            yield from check_call(calls.dump, captured, evaluate, options, pools)
    if options.standard == OURS:
        yield from pools.rows(options.budget)


def check_stored(calls: Calls, ops: Iterable[str] = ()) -> Iterator[Checked]:
    """Parameters that the dump holds whole against the checkpoint's: a row for each that the checkpoint has, too.

    A parameter that a loader keeps in another form (permuted, folded) is nothing like the checkpoint's; one that is off
    by less than half its size is a wrong weight, and fails."""
    globs = tuple(ops)
    for rank, tap, cls, record, value in calls.parameters.stored():
        if value is None or not wanted(globs, tap, cls):
            continue
        empty = Call(tap, cls)
        captured = Captured(tap, rank, None, record.call, empty, {record.role: record})
        mine = calls.read(record)
        held = grid.narrowed(mine, calls.keeps().get(record.dtype, record.dtype))
        mine = mine if held is None else held
        value, dtype = value.to(mine.dtype), grid.name_of(mine)
        if value.shape != mine.shape:
            yield _unchecked(captured, record.role, record, SKIP, OTHER_FORM)
            continue
        wide, given = numbers(value).reshape(1, -1), numbers(mine).reshape(1, -1)
        v = judge(wide, given, dtype, last=0.0)
        measures = measure(wide.numpy(), given.numpy(), dtype)
        if not v.passed and not (measures.rel_l2 is not None and measures.rel_l2 <= 0.5):
            yield _unchecked(captured, record.role, record, SKIP, OTHER_FORM)
            continue
        message = "" if v.passed else f"{v.value:.0f} of {given.numel()} values are not the checkpoint's"
        yield _on_grid(_row(captured, record, v, measures, 1, 1, "", (None, None), message), record, dtype)


OTHER_FORM = "a parameter that the engine keeps in another form than the checkpoint"


def count_taps(calls: Calls) -> int:
    return len(calls.taps())


def check_call(
    dump: Dump, captured: Captured, evaluate: Evaluate, options: Options, pools: Pools | None = None
) -> Iterator[Checked]:
    """The rows of one call: one per output that was captured; one that says why, where there is no reference. pools:
    what they are added to."""
    if captured.missing:
        yield _unchecked(captured, "", None, ERROR if captured.crashed else SKIP, captured.missing)
        return
    outputs = {role: r for role, r in captured.records.items() if role.startswith(("output.", "inplace."))}
    if not outputs:
        yield _unchecked(captured, "", None, SKIP, "nothing came out of it that was captured")
        return
    expected = evaluate(captured)
    if isinstance(expected, Declined):
        yield _unchecked(captured, "", None, ERROR if expected.failed else SKIP, expected.reason)
        return
    for role in [*outputs, *(r for r in expected if r not in outputs and r in captured.records)]:
        record = captured.records[role]
        if role not in expected:
            yield _unchecked(captured, role, record, SKIP, f"no reference for {role} of {captured.what.cls}")
            continue
        try:
            yield _checked(dump, captured, role, record, expected[role], options, pools)
        except (ValueError, RuntimeError, DumpError) as error:
            yield _unchecked(captured, role, record, ERROR, f"the reference does not fit: {error}")


def _unchecked(c: Captured, role: str, record: Record | None, status: str, why: str) -> Checked:
    return unchecked(c.tap, c.what.cls, c.rank, c.step, c.call, _seq(c, record), why, status=status, role=role,
                     dtype=record.dtype if record is not None else "",
                     shape=record.shape if record is not None else ())  # fmt: skip


def _seq(c: Captured, record: Record | None) -> int:
    """The output's place in the order of execution; the call's last where there is no output."""
    return record.seq if record is not None else max((r.seq for r in c.records.values()), default=c.seq)


def numbers(tensor: Any) -> Any:
    """A tensor's exact values on the CPU: float64, or int64 for integers and bool; complex ones as pairs."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128))
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def matrix(tensor: Any, row_dim: int) -> Any:
    """[rows, everything else]; a tensor without rows is one row."""
    if not tensor.dim():
        return tensor.reshape(1, 1)
    dim = row_dim if row_dim < tensor.dim() else 0
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1) if tensor.numel() else tensor.reshape(0, 1)


def _without_ones(shape: Sequence[int]) -> list[int]:
    """A captured tensor may have lost, or kept, dimensions of one element."""
    return [n for n in shape if n != 1]


def _checked(
    dump: Dump, c: Captured, role: str, record: Record, expected: Expected, options: Options, pools: Pools | None
) -> Checked:
    captured = c.what.outputs.get(role, c.what.inputs.get(role.removeprefix("input.")))
    shape = record.shape
    if tuple(expected.value.shape) != shape and _without_ones(expected.value.shape) == _without_ones(shape):
        noise, bound = (None if e is None else e.expand(expected.value.shape).reshape(shape)
                        for e in (expected.noise, expected.bound))  # fmt: skip
        expected = replace(expected, value=expected.value.reshape(shape), noise=noise, bound=bound)
    if tuple(expected.value.shape) != shape:
        raise ValueError(f"shape {list(expected.value.shape)} instead of {list(shape)}")
    row_dim = record.row_dim if record.rows is not None else 0
    mine, reference = matrix(numbers(captured), row_dim), matrix(numbers(expected.value), row_dim)
    noise, bound = (None if e is None or captured.is_complex() else matrix(numbers(e).expand(shape), row_dim)
                    for e in (expected.noise, expected.bound))  # fmt: skip
    rows = torch.arange(len(mine))
    if expected.rows is not None:
        rows = expected.rows.nonzero().flatten()
        if not len(rows):
            return _unchecked(c, role, record, SKIP, expected.reason or "no row has a reference")
        mine, reference = mine[rows], reference[rows]
        noise = noise[rows] if noise is not None else None
        bound = bound[rows] if bound is not None else None
    dtype = grid.name_of(captured)  # the record's, or the coarser one whose numbers it holds
    exact = None
    if expected.exact is not None:
        exact = matrix(numbers(expected.exact).reshape(shape), row_dim)[rows]
    v = judge(reference, mine, dtype, chance=options.budget.output, noise=noise, bound=bound, last=expected.unit,
              common=expected.common, groups=expected.groups, shared=expected.shared, exact=exact,
              strict=options.standard == STRICT)  # fmt: skip
    evidence = ""
    if options.habits and v.measure not in (EXACT, NONFINITE) and due(c.step, role, c.what, v.passed):

        def again(y: Any, more: Any) -> Verdict:
            return judge(y, mine, dtype, noise=combined(noise, more), last=expected.unit, common=expected.common)

        evidence = look(
            c.what, role, reference if exact is None else exact, mine, dtype, noise=noise, rows=rows, passed=v.passed,
            judge=again,
        ).to_text()  # fmt: skip
    measures = None
    if options.measured or options.standard not in (OURS, STRICT):
        measures = measure(reference.numpy(), mine.numpy(), dtype, kl=options.kl)
    at = int(rows[v.row]) if v.row >= 0 else -1
    request, position = _place(dump, record, at)
    left = expected.reason if expected.rows is not None and len(rows) < len(expected.rows) else ""
    count = len(rows) if expected.rows is None else len(expected.rows)
    message = message_of(v, request, position, expected, len(rows))
    row = _row(c, record, v, measures, count, len(rows), left, (request, position), message)
    row = _on_grid(row, record, dtype)
    if evidence:
        row = replace(row, evidence=evidence)
    if not v.passed:
        row = replace(row, chance=min(1.0, v.chance * options.budget.outputs))
    if expected.only_measured:
        return replace(row, status=SKIP, checked=0, unchecked_because=expected.only_measured,
                       message=expected.only_measured)  # fmt: skip
    if row.status == FAIL and c.what.cls == "Attention":
        why = cause(c.what, expected)
        row = replace(row, message=f"{row.message}; {why}" if why else row.message)
    if pools is not None:
        pools.add(row, v)
    return row if options.standard in (OURS, STRICT) else by_standard(row, options.standard)


def _on_grid(row: Checked, record: Record, dtype: str) -> Checked:
    """``row`` of numbers of ``dtype``, which may be coarser than the tensor's."""
    return row if dtype == record.dtype else replace(row, dtype=dtype, stored=record.dtype)


def by_standard(row: Checked, standard: str) -> Checked:
    """``row`` judged by another tool's limits. NaN on one side alone fails by any."""
    rule = find(standard, OUTPUT).output
    assert row.measures is not None
    assert rule is not None
    found = rule(row.measures, row.cls, row.dtype)
    status = {"pass": PASS, "warning": WARNING, "error": FAIL, "skip": SKIP}[found.status]
    return replace(row, status=status, message=found.message, algorithm=found.algorithm, tier="", chance=None)


def _row(
    c: Captured, record: Record, v: Verdict, measures: Measures | None, rows: int, checked: int, left: str,
    place: tuple[str | None, int | None], message: str,
) -> Checked:  # fmt: skip
    what = record.role, record.dtype, record.shape, record.seq
    return judged(c, what, v, measures, (rows, checked, left), message, place)


def judged(
    c: Captured, what: tuple[str, str, tuple[int, ...], int], v: Verdict, measures: Measures | None,
    counts: tuple[int, int, str], message: str, place: tuple[str | None, int | None] = (None, None),
) -> Checked:  # fmt: skip
    """A row with a verdict. what: role, dtype, shape, seq; counts: rows, those that were checked, why the others were
    not."""
    role, dtype, shape, seq = what
    return Checked(
        tap=c.tap, cls=c.what.cls, role=role, rank=c.rank, step=c.step, call=c.call, seq=seq, dtype=dtype, shape=shape,
        rows=counts[0], checked=counts[1], unchecked_because=counts[2], created=v.worst_row_rel_l2, measure=v.measure,
        measured=v.value, allowed=v.limit, request=place[0], position=place[1],
        column=v.column if v.column >= 0 else None, status=PASS if v.passed else FAIL, message=message,
        measures=measures, rounding=v.rounding, tier=v.tier, chance=None if v.passed else v.chance,
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


def message_of(
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
        elif v.measure == ROUNDING:
            said.append(f"rounds {TOWARD_ZERO}: {v.value:.0%} of the numbers that tell it from rounding to nearest")
        else:
            said.append(f"{v.measure} error {v.value:.3g} times honest rounding, allowed {v.limit:.3g}{where}")
    if expected.rows is not None and checked < len(expected.rows):
        said.append(f"{len(expected.rows) - checked} rows skipped: {expected.reason}")
    return "; ".join(said)
