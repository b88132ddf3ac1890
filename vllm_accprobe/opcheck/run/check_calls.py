"""Every captured call against its reference: a row for each output, and a reason for each that has none.

The problem: an output is wrong because the operator is, or because its inputs were; only the operator run again on the
very inputs tells. The idea: the reference's outputs from mine's inputs against mine's outputs: what differs is what
the operator itself created. Nothing is left out silently: a call without a reference is a row that says why.
`check_backward` judges gradients of this machine's operator: autograd through it in the captured dtype, and through the
exact reference in float64. `check_stored` compares parameters with the checkpoint's, `cache_rows` gives what the dump's
own ledger found. Not here: the operators (references/), where a call comes from (calls/records.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch

from vllm_accprobe.comparison.runner_inputs import NOT_THE_MODEL, is_runners
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import sentence
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.judge.statistic import BUDGET, Budget
from vllm_accprobe.opcheck.calls import grid
from vllm_accprobe.opcheck.calls.case import closed
from vllm_accprobe.opcheck.calls.records import Calls, Captured, wanted
from vllm_accprobe.opcheck.compat import ait
from vllm_accprobe.opcheck.floors.output_rows import OutputRows, alike, matrix, numbers
from vllm_accprobe.opcheck.floors.pooled import EQUAL, Pools, Smallest, of_each
from vllm_accprobe.opcheck.floors.rounding import judge
from vllm_accprobe.opcheck.floors.verdict import EXACT, NONFINITE, Verdict
from vllm_accprobe.opcheck.machine_precision.of_output import due, look
from vllm_accprobe.opcheck.measures import measure, measure_each
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references.gradients import differentiated, exact_gradients, grad, leaves_of
from vllm_accprobe.opcheck.run.judged_row import judged, merged, message_of, on_grid, place_of, without_verdict
from vllm_accprobe.opcheck.run.result_row import (
    ERROR,
    FAIL,
    OURS,
    PASS,
    SKIP,
    STRICT,
    WARNING,
    CheckResult,
    id_of,
    of_no_operator,
    unchecked,
)
from vllm_accprobe.standards import find
from vllm_accprobe.standards.declaration import OUTPUT
from vllm_accprobe.standards.measures import Measures

_ROLE = "grad."


def check_backward(
    captured: Captured, references: References, device: str = "cpu", seed: int = 0
) -> Iterator[CheckResult]:  # fmt: skip
    """A row per gradient, role ``grad.input.x`` or ``grad.param.weight``; one that says why there is none."""
    call = closed(captured.what, references)
    try:
        gradients = list(_gradients(call, references, device, seed))
    except (Declined, RuntimeError, TypeError, ValueError, NotImplementedError) as why:
        text = why.reason if isinstance(why, Declined) else " ".join(str(why).split())[:120]
        c = captured
        yield unchecked(c.tap, call.cls, c.rank, c.step, c.call, 0, f"no gradient: {text}", status=SKIP, role=_ROLE)
        return
    for name, exact, mine, noise in gradients:
        dtype, shape = str(mine.dtype).removeprefix("torch."), tuple(mine.shape)
        reference, actual = matrix(numbers(exact), 0), matrix(numbers(mine), 0)
        spread = matrix(noise.cpu(), 0)
        v = judge(reference, actual, dtype, noise=spread, common=unit(dtype))
        measures = measure(reference.numpy(), actual.numpy(), dtype)
        message = message_of(v, None, None, Expected(exact), len(actual))
        yield judged(captured, (_ROLE + name, dtype, shape, 0), v, measures, (len(actual), len(actual), ""), message)


def _gradients(call: Call, references: References, device: str, seed: int) -> Iterator[tuple[str, Any, Any, Any]]:
    """(input, exact gradient, the device's, noise) for everything that has a gradient."""
    output = call.outputs.get("output.0")
    if output is None or not output.is_floating_point():
        raise Declined("its output is no floating-point tensor")
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)

    exact = exact_gradients(call, lambda wide: differentiated(references, wide), {"output.0": up})
    same, leaves = leaves_of(call, None, device, 0.0)
    mine = references.run(replace(same, views={}))
    if isinstance(mine, Declined):
        raise mine
    theirs = grad([(mine["output.0"], up.to(device))], leaves)
    found = [name for name in exact if name in theirs]
    if not found:
        raise Declined("nothing that goes in has one")
    for name in found:
        yield name, exact[name].value, theirs[name], exact[name].noise


_MOST_FOUND = 100
"""Findings of a ledger that become rows (chosen: as many as compare.json keeps)."""
OTHER_FORM = "a parameter that the engine keeps in another form than the checkpoint"


def check_stored(calls: Calls, ops: Iterable[str] = ()) -> Iterator[CheckResult]:
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
        stored = grid.narrowed(mine, calls.keeps().get(record.dtype, record.dtype))
        mine = mine if stored is None else stored
        value, dtype = value.to(mine.dtype), grid.name_of(mine)
        if value.shape != mine.shape:
            yield without_verdict(captured, record.role, record, SKIP, OTHER_FORM)
            continue
        wide, actual = numbers(value).reshape(1, -1), numbers(mine).reshape(1, -1)
        v = judge(wide, actual, dtype, last=0.0)
        measures = measure(wide.numpy(), actual.numpy(), dtype)
        if not v.passed and not (measures.rel_l2 is not None and measures.rel_l2 <= 0.5):
            yield without_verdict(captured, record.role, record, SKIP, OTHER_FORM)
            continue
        message = "" if v.passed else f"{v.value:.0f} of {actual.numel()} values are not the checkpoint's"
        what = record.role, record.dtype, record.shape, record.seq
        yield on_grid(judged(captured, what, v, measures, (1, 1, ""), message), record, dtype)


def cache_rows(dump: Dump) -> Iterator[CheckResult]:
    """What the dump's own ledger has found (docs/state-checks.md): operators that read caches may be right, and
    what they computed is not."""
    for rank, found in getattr(dump, "states", [])[:_MOST_FOUND]:
        tap = found.layer or found.first or f"cache group {found.group}"
        runner = is_runners(found)
        text = f"{NOT_THE_MODEL if runner else 'the cache, not the kernel'}: {sentence(found)}"
        yield of_no_operator(
            tap, "runner" if runner else "cache", rank, text, request=found.request or None, position=found.low
        )


Evaluate = Callable[[Captured], "Mapping[str, Expected] | Declined"]


@dataclass(frozen=True)
class Options:
    """standard: whose limits decide, OURS, STRICT or one of standards/; kl: measure the KL divergence too; ids: only
    these calls, as ``rank.step.seq`` of one of their records, all if empty; measured: with all of measures.py, which
    other standards need; habits: examine how outputs were computed, which takes references that round nothing; budget:
    how likely a correct output may fail (statistic.py); within: count what is within ait's absolute tolerance, too."""

    standard: str = OURS
    kl: bool = False
    ids: frozenset[str] = frozenset()
    measured: bool = True
    habits: bool = True
    budget: Budget = BUDGET
    within: bool = False

    def each_of(self, parts: int) -> Options:
        """For each of so many parts of an output: its share of the chance."""
        return self if parts == 1 else replace(self, budget=replace(self.budget, outputs=self.budget.outputs * parts))

    def wants(self, c: Captured) -> bool:
        return not self.ids or any(id_of(c.rank, c.step, r.seq) in self.ids for r in c.records.values())


def check_tap(calls: Calls, rank: int, tap: str, evaluate: Evaluate, options: Options) -> Iterator[CheckResult]:
    """The rows of one tap, call by call; then those of its outputs that only all calls together show to be wrong."""
    pools = Pools()
    found = filter(options.wants, calls.of(rank, tap))
    for _, rows in check_calls(calls.dump, ((c, [ToCheck(c, evaluate, options, pools)]) for c in found)):
        yield from rows
    if options.standard == OURS:
        yield from pools.rows(options.budget)


class ToCheck(NamedTuple):
    """A call, what gives its reference's outputs, and the pools that its rows are added to."""

    captured: Captured
    evaluate: Evaluate
    options: Options
    pools: Pools | None = None


def check_call(
    dump: Dump, captured: Captured, evaluate: Evaluate, options: Options, pools: Pools | None = None
) -> Iterator[CheckResult]:
    """`check_calls` of one."""
    for _, rows in check_calls(dump, [(captured, [ToCheck(captured, evaluate, options, pools)])]):
        yield from rows


@dataclass
class _Output:
    """One output of a call whose reference is known. record, expected, mine: of the output, or of its rows from
    ``first`` on; cut: it is judged some rows at a time. The others: what is found of it."""

    to: ToCheck
    role: str
    record: Record
    expected: Expected
    mine: Any
    first: int = 0
    cut: bool = False
    dtype: str = ""
    rows: tuple[OutputRows, int] | None = None
    verdict: Any = None
    measures: Measures | None = None
    smallest: Smallest | None = None

    @property
    def row_dim(self) -> int:
        return self.record.row_dim if self.record.rows is not None else 0

    def without(self, status: str, why: str) -> CheckResult:
        return without_verdict(self.to.captured, self.record.role, self.record, status, why)


_Rows = list["CheckResult | _Output"]
_TOGETHER = 1 << 17
"""Chosen: elements of outputs that are judged together: 8 MiB of what a verdict keeps, and as much is worked on."""
_WAITING = 1 << 22
"""Chosen: elements of all tensors of the calls that wait: where an output is one token of 10**5 logits, `_TOGETHER`
elements of outputs are 10**5 calls."""
_CALL = 1 << 10
"""Chosen: elements that take as much memory as a call without any."""
_UNFIT = (ValueError, RuntimeError, DumpError)


def check_calls(
    dump: Dump, calls: Iterable[tuple[Captured, Iterable[CheckResult | ToCheck]]],
    begins: Callable[[], object] | None = lambda: None,
) -> Iterator[tuple[Captured, list[CheckResult]]]:  # fmt: skip
    """The rows of each call, in their order: one per output that was captured; one that says why, where there is no
    reference. Outputs of one form are judged together, because what is done once for all of them takes most of the time
    for few rows. calls: each with what is to be checked, and rows that it has besides. begins: called before calls are
    judged when a later one has begun; None: each is judged alone."""
    waiting: list[tuple[Captured, _Rows]] = []
    size = memory = 0
    for captured, parts in calls:
        rows = [row for part in parts for row in (_outputs(part) if isinstance(part, ToCheck) else [part])]
        elements = sum(row.mine.numel() for row in rows if isinstance(row, _Output))
        own = _CALL + sum(prod(r.shape) for r in captured.records.values())
        if waiting and (size + elements > _TOGETHER or memory + own > _WAITING):
            yield from _judged(dump, waiting, begins)
            waiting, size, memory = [], 0, 0
        waiting.append((captured, rows))
        size, memory = size + elements, memory + own
        if begins is None or "cache" in captured.what.extra:  # which the next call changes
            yield from _judged(dump, waiting, begins if len(waiting) > 1 else None)
            waiting, size, memory = [], 0, 0
    yield from _judged(dump, waiting, begins)


def _outputs(to: ToCheck) -> Iterator[CheckResult | _Output]:
    captured = to.captured
    if captured.missing:
        yield without_verdict(captured, "", None, ERROR if captured.crashed else SKIP, captured.missing)
        return
    outputs = {role: r for role, r in captured.records.items() if role.startswith(("output.", "inplace."))}
    if not outputs:
        yield without_verdict(captured, "", None, SKIP, "nothing came out of it that was captured")
        return
    expected = to.evaluate(captured)
    if isinstance(expected, Declined):
        yield without_verdict(captured, "", None, ERROR if expected.failed else SKIP, expected.reason)
        return
    for role in [*outputs, *(r for r in expected if r not in outputs and r in captured.records)]:
        record = captured.records[role]
        if role not in expected:
            yield without_verdict(captured, role, record, SKIP, f"no reference for {role} of {captured.what.cls}")
            continue
        if expected[role].failed:
            yield without_verdict(captured, record.role, record, ERROR, expected[role].reason)
            continue
        mine = captured.what.outputs.get(role, captured.what.inputs.get(role.removeprefix("input.")))
        found = _Output(to, role, record, expected[role], mine)
        try:
            yield _ready(found)
        except _UNFIT as error:
            yield found.without(ERROR, f"{_NO_FIT}: {error}")


_NO_FIT = "the reference does not fit"


def _without_ones(shape: Sequence[int]) -> list[int]:
    """A captured tensor may have lost, or kept, dimensions of one element."""
    return [n for n in shape if n != 1]


_AT_ONCE = 1 << 19
"""Chosen: elements of an output that are judged at a time where nothing else is measured. A verdict keeps eight float64
of each and works on as many again: 64 MiB."""


def _ready(o: _Output) -> CheckResult | _Output:
    """``o`` with its rows; the row where none has a reference."""
    options, shape, expected = o.to.options, o.record.shape, o.expected
    plain = not options.measured and options.standard in (OURS, STRICT) and tuple(expected.value.shape) == shape
    o.cut = plain and not o.record.row_dim and o.mine.numel() > _AT_ONCE and o.mine.dim() > 1
    return o if o.cut else _with_rows(o)


def _with_rows(o: _Output) -> CheckResult | _Output:
    shape, expected = o.record.shape, o.expected
    if tuple(expected.value.shape) != shape and _without_ones(expected.value.shape) == _without_ones(shape):
        noise, bound = (None if e is None else e.expand(expected.value.shape).reshape(shape)
                        for e in (expected.noise, expected.bound))  # fmt: skip
        expected = o.expected = replace(expected, value=expected.value.reshape(shape), noise=noise, bound=bound)
    if tuple(expected.value.shape) != shape:
        raise ValueError(f"shape {list(expected.value.shape)} instead of {list(shape)}")
    if expected.rows is not None and not bool(expected.rows.any()):
        return o.without(SKIP, expected.reason or "no row has a reference")
    o.dtype = grid.name_of(o.mine)  # the record's, or the coarser one whose numbers it holds
    return o


def _judged(
    dump: Dump, calls: list[tuple[Captured, _Rows]], begins: Callable[[], object] | None
) -> Iterator[tuple[Captured, list[CheckResult]]]:
    if begins is not None and calls:
        begins()
    groups: dict[Any, list[_Output]] = {}
    for o in (o for _, rows in calls for o in rows if isinstance(o, _Output) and not o.cut):
        key = o.dtype, o.row_dim, o.to.options, o.to.pools is None, alike(o.expected, o.mine)
        groups.setdefault(key, []).append(o)
    for group in groups.values():
        try:
            _judge(group)
        except _UNFIT:  # one of them does not fit: each says whether it is that one
            for o in group:
                o.verdict = None
    pooled: Pooled = []
    done = [(captured, [r if isinstance(r, CheckResult) else _row(dump, r, pooled) for r in rows])
            for captured, rows in calls]  # fmt: skip
    _pool(pooled)
    yield from done


Pooled = list[tuple[Pools, CheckResult, Verdict]]
"""What is to be added to pools, in order: together, because each addition looks up the errors that were met."""


def _pool(pooled: Pooled) -> None:
    for pools, some in groupby(pooled, lambda p: p[0]):
        pools.add((row, v) for _, row, v in some)
    pooled.clear()


def _judge(group: Sequence[_Output]) -> None:
    """Gives each its verdict, its measures and its smallest error. All have one form."""
    options, dtype = group[0].to.options, group[0].dtype
    found = OutputRows.of_each([o.expected for o in group], [o.mine for o in group], group[0].row_dim)
    verdicts = found.judge_each(dtype, chance=options.budget.output, strict=options.standard == STRICT)
    if options.measured or options.standard not in (OURS, STRICT):
        each = measure_each(found.reference.numpy(), found.mine.numpy(), dtype, kl=options.kl)
        for o, measures in zip(group, each, strict=True):
            o.measures = measures
    for k, (o, v) in enumerate(zip(group, verdicts, strict=True)):
        o.rows, o.verdict, o.smallest = (found, k), v, EQUAL if v.measure == EXACT else None
    if group[0].to.pools is not None and (some := [o for o in group if o.verdict.sums is not None]):
        sizes = of_each([o.verdict.sums for o in some], options.budget.output)
        for o, smallest in zip(some, sizes, strict=True):
            o.smallest = smallest


def _row(dump: Dump, o: _Output, pooled: Pooled) -> CheckResult:
    try:
        if o.cut:
            return merged(list(_pieces(dump, o, pooled)), o.record.shape)
        if o.verdict is None:
            _judge([o])
        return _settled(dump, o, pooled)
    except _UNFIT as error:
        return o.without(ERROR, f"{_NO_FIT}: {error}")


def _pieces(dump: Dump, o: _Output, pooled: Pooled) -> Iterator[CheckResult]:
    """The rows of a large output that is judged some rows at a time, each with its share of the chance."""
    expected, mine, n = o.expected, o.mine, len(o.mine)
    size = max(1, _AT_ONCE * n // mine.numel())
    each = o.to.options.each_of(-(-n // size))
    for a in range(0, n, size):
        rows = slice(a, a + size)
        noise, bound = (None if x is None else x.expand(mine.shape)[rows] for x in (expected.noise, expected.bound))
        exact = None if expected.exact is None else expected.exact.reshape(mine.shape)[rows]
        known = None if expected.rows is None else expected.rows[rows]
        here = replace(expected, value=expected.value[rows], rows=known, noise=noise, bound=bound, exact=exact)
        piece = replace(o.record, shape=(len(here.value), *o.record.shape[1:]))
        part = _Output(o.to._replace(options=each), o.role, piece, here, mine[rows], a)
        found = _with_rows(part)
        if not isinstance(found, CheckResult):
            _judge([part])
            found = _settled(dump, part, pooled, examined=not a or not (part.verdict.passed or here.only_measured))
        _pool(pooled)  # what is kept of so large ones until then is large
        yield found


def _settled(dump: Dump, o: _Output, pooled: Pooled, examined: bool = True) -> CheckResult:
    """examined: whether how it was computed may be."""
    c, record, expected, (_, _, options, pools), v = o.to.captured, o.record, o.expected, o.to, o.verdict
    assert o.rows is not None
    (together, number), rows = o.rows, o.rows[0].at
    more: dict[str, Any] = {"by_name": expected.by_name}
    if examined and options.habits and v.measure not in (EXACT, NONFINITE) and due(c.step, o.role, c.what, v.passed):
        own = together.one(number)

        def again(y: Any, extra: Any) -> Verdict:
            noise = combined(own.noise, extra)
            return judge(y, own.mine, o.dtype, noise=noise, last=expected.unit, common=expected.common)

        more["evidence"] = look(
            c.what, o.role, own.reference if own.exact is None else own.exact, own.mine, o.dtype, noise=own.noise,
            rows=rows + o.first, passed=v.passed, judge=again,
        ).to_text()  # fmt: skip
    at = int(rows[v.row]) if v.row >= 0 else -1
    request, position = place_of(dump, record, at + o.first + c.first if at >= 0 else at)
    n = rows.shape[0]
    count = n if expected.rows is None else len(expected.rows)
    left = expected.reason if n < count else ""
    if expected.rows is not None and n < count:
        more["left"] = tuple(((~expected.rows).nonzero().flatten() + (o.first + c.first)).tolist())
    if (moved := expected.cache) is not None:
        more["cache"] = (moved.kind, moved.share, moved.expected, moved.most)
    if not v.passed:
        more["chance"] = min(1.0, v.chance * options.budget.outputs)
    if unchecked := expected.only_measured or (expected.unseen if v.passed else ""):
        more |= {"status": SKIP, "checked": 0, "unchecked_because": unchecked}
    elif pools is not None:
        more["smallest"] = o.smallest
    if o.dtype != record.dtype:
        more["stored"] = record.dtype
    message = unchecked or message_of(v, request, position, expected, n)
    what = record.role, o.dtype, record.shape, record.seq
    row = judged(c, what, v, o.measures, (count, n, left), message, (request, position), **more)
    if unchecked:
        return row
    if pools is not None:
        pooled.append((pools, row, v))
    row = row if options.standard in (OURS, STRICT) else by_standard(row, options.standard)
    share = ait.abs_share(together.reference[number], together.mine[number], o.dtype) if options.within else None
    return row if share is None else replace(row, algorithm=f"{row.algorithm} {ait.WITHIN}{share:.12g}".strip())


def by_standard(row: CheckResult, standard: str) -> CheckResult:
    """``row`` judged by another tool's limits. NaN on one side alone fails by any."""
    rule = find(standard, OUTPUT).output
    assert row.measures is not None
    assert rule is not None
    found = rule(row.measures, row.cls, row.dtype)
    status = {"pass": PASS, "warning": WARNING, "error": FAIL, "skip": SKIP}[found.status]
    return replace(row, status=status, message=found.message, algorithm=found.algorithm, tier="", chance=None)
