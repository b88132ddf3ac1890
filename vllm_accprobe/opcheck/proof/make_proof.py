"""What the replay of two dumps shows: who is wrong, alone or as golden is, by how much, and what was checked.

The problem: an output that fails its reference may be a fault, or a reference that does not fit; and "1,240 outputs
checked" does not say how good the check was. The idea: golden's run of a module is its control, and what is as far off
there is not blamed (`prove`). With golden's output G, mine's M, and R, the reference's from mine's inputs, a blamed
module created |M - R| / |G| and passed on |R - G| / |G|, Euclidean norms over a row (`split_errors`). Of each module
the calls, the rows and the smallest error that would have been named are kept (`covers`). A constant that golden has
otherwise matters where both values through the reference give outputs further apart than rounding allows (`effects`);
so does any other difference between the two modules (`computed_otherwise`), and what it moves is not acquitted.
Not here: the table of covers (comparison/coverage.py), what follows (apply_proof.py, comparison/notes.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from vllm_accprobe.align.ranks import ONE
from vllm_accprobe.comparison.config_constants import comparable_code, other_code, package
from vllm_accprobe.comparison.coverage import ModuleCover
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.notes import Differs
from vllm_accprobe.comparison.plan.make_plan import Indices, Plan
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.dump.block_code import FORWARD
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import DECODE, PREFILL, Module, Record
from vllm_accprobe.judge.origins import in_all_layers
from vllm_accprobe.judge.profile import Habit
from vllm_accprobe.judge.statistic import BEYOND_CHANCE, SIBLING_OUTLIER
from vllm_accprobe.opcheck.calls.records import Calls, Captured, Chosen
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.floors.pooled import OutlierLayer, Pooled
from vllm_accprobe.opcheck.machine_precision.of_machine import sentence
from vllm_accprobe.opcheck.proof.apply_proof import ConstantEffect, OtherCache, ReplayFinding, ReplayResult
from vllm_accprobe.opcheck.proof.explained import Explained
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, CheckResult, grids

_Output = tuple[int, str]
"""(rank, role)."""


def covers(mine: Iterable[CheckResult], pooled: Iterable[Pooled]) -> dict[str, ModuleCover]:
    """Tap → what was checked of it. mine: check_tap's rows of mine; pooled: of its taps, all calls together."""
    rows: dict[str, list[CheckResult]] = {}
    for c in mine:
        if c.step is not None:  # else a parameter
            rows.setdefault(c.tap, []).append(c)
    pools: dict[str, list[Pooled]] = {}
    for p in pooled:
        pools.setdefault(p.tap, []).append(p)
    return {tap: _cover(found, pools.get(tap, ())) for tap, found in rows.items()}


def _cover(rows: Sequence[CheckResult], pooled: Sequence[Pooled]) -> ModuleCover:
    calls: dict[tuple[int | None, int], dict[int, list[CheckResult]]] = {}
    for c in rows:
        calls.setdefault((c.step, c.call), {}).setdefault(c.rank, []).append(c)
    counts = [_rows(of) for of in calls.values()]
    least = [_of_output(of, [p for p in pooled if (p.rank, p.role) == place]) for place, of in _outputs(rows).items()]
    known = [x for x in least if x is not None]
    sizes = [max(x[i] for x in known) for i in range(3)] if known else [None] * 3
    whole, checked = (sum(n[i] for n in counts) for i in range(2))
    return ModuleCover(rows[0].cls, len(calls), whole, checked, *sizes)


def _rows(ranks: Mapping[int, Sequence[CheckResult]]) -> tuple[int, int]:
    """(rows, rows that were checked) of one call: a row is checked where all that came out of it is, on all ranks that
    share it. Ranks with other numbers of rows computed other requests."""
    whole = [max([c.rows for c in of if "/" not in c.role] or [c.rows for c in of]) for of in ranks.values()]
    checked = [min(_checked(c, n) for c in of) for n, of in zip(whole, ranks.values(), strict=True)]
    if len(set(whole)) == 1:
        return whole[0], min(checked)
    return sum(whole), sum(checked)


def _checked(c: CheckResult, rows: int) -> int:
    """Of so many rows; what a part received (``path/input.x``) may have others: each head's."""
    found = c.checked if c.status in (PASS, FAIL) else 0
    return found * rows // c.rows if "/" in c.role and c.rows else found


def _outputs(rows: Iterable[CheckResult]) -> dict[_Output, list[CheckResult]]:
    found: dict[_Output, list[CheckResult]] = {}
    for c in rows:
        if c.smallest is not None and c.status in (PASS, FAIL):
            found.setdefault((c.rank, c.role), []).append(c)
    return found


def _of_output(calls: Sequence[CheckResult], pooled: Sequence[Pooled]) -> tuple[float, float, float] | None:
    """An error that is in all calls is named where one of them, or all together, show it; of one row, where that is."""
    sizes = [c.smallest for c in calls if c.smallest is not None]
    together = [p.smallest for p in pooled if p.smallest is not None]
    row = min([s[0] for s in sizes] + [p[0] for p in together])
    column = min([s[1] for s in sizes] + [p[1] for p in together])
    return row, column, max(s[2] for s in sizes)


MOST = 16
"""Origins whose errors are split; the first in data-flow order matter, and each costs a replay."""
LARGEST = 1 << 25
"""Chosen: elements of an output whose error is split: a dozen float64 of each are held at a time."""


_SPOILT = 0.5
"""Chosen: of the largest error, what another row of the same call must have to be named in that row's place: a fault
that spoils both leaves about as much in each, and a correct row has hundreds of times less."""


@dataclass(frozen=True, slots=True)
class Split:
    """created, propagated: relative to golden's row (float64); request, position, phase: the row of mine where what
    was created is largest; phase is None where it is not known."""

    created: float
    propagated: float
    request: str
    position: int
    phase: str | None = None


def split_errors(
    golden: Dump, mine: Calls, references: References, blamed: Iterable[CheckResult], planned: Callable[[], Plan]
) -> dict[str, Split]:
    """tap → its split, for the first MOST of ``blamed`` (wrong outputs of mine, one for each tap) that have one.
    planned: makes the plan of the two dumps, where one is needed."""
    by_key = {(c.tap, c.role, c.call): c for c in list(blamed)[:MOST]}
    if not by_key:
        return {}
    plan = planned()
    indices = Indices((plan.tokens.golden, plan.tokens.mine))
    loader = Loader(golden)
    found: dict[str, Split] = {}
    for unit in plan.units:
        c = by_key.get(unit.key)
        if c is None:
            continue
        chosen = Chosen({(c.step, c.call): ()}, lambda cls: False, most=1 << 62)
        large = math.prod(c.shape) > LARGEST
        captured = None if large else next(mine.of(c.rank, c.tap, chosen=chosen), None)
        split = _split(captured, unit, plan, indices, loader, references, c) if captured is not None else None
        if split is not None:
            found[c.tap] = split
        loader.forget()
    return found


def _split(
    captured: Captured, unit: Unit, plan: Plan, indices: Indices, loader: Loader, references: References, c: CheckResult
) -> Split | None:
    record = captured.records.get(c.role)
    group = next((g for g in unit.mine if record is not None and record in g.records), None)
    expected = references.evaluate(captured.what)
    if record is None or group is None or isinstance(expected, Declined) or c.role not in expected:
        return None
    if group.where is None or group.merge is None or group.merge.kind != ONE:
        return None
    place = {g.where: g for g in unit.golden if g.where is not None and g.readable}
    wheres = tuple(place)
    met = indices.meet(group.where, wheres) if wheres else None
    if met is None:
        return None
    reference, output = _propagated_rows(captured, c.role, record, expected[c.role], group)
    keep = np.ones(len(met.row), bool)
    rows = expected[c.role].rows
    if rows is not None:
        keep = np.asarray(rows.numpy(), bool)[met.row]
    best: tuple[float, int, Split] | None = None
    blamed = False
    for number in met.used:
        at = np.flatnonzero(keep & (met.number == number))
        g = _golden(loader, place[wheres[number]])
        if not len(at) or g.shape[1] != reference.shape[1]:
            continue
        blamed |= any(plan.tokens.name(int(key)) == (c.request, c.position) for key in met.rows.keys[at])
        theirs, ours, exact = g[met.other[at]], output[met.row[at]], reference[met.row[at]]
        size = np.linalg.norm(theirs, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            created = np.linalg.norm(ours - exact, axis=1) / size
            passed = np.linalg.norm(exact - theirs, axis=1) / size
        finite = np.isfinite(created) & np.isfinite(passed)
        if not finite.any():
            continue
        worst = int(np.where(finite, created, -1.0).argmax())
        if best is None or created[worst] > best[0]:
            row = int(at[worst])
            request, position = plan.tokens.name(int(met.rows.keys[row]))
            phase = (DECODE if met.rows.decode[row] else PREFILL) if len(met.rows.decode) else None
            best = created[worst], number, Split(float(created[worst]), float(passed[worst]), request, position, phase)
    if best is not None and not blamed and c.created is not None and best[0] < _SPOILT * c.created:
        return None  # the row in question has no partner (a rejected draft), and those that have are none of it
    return best[2] if best is not None else None


def _propagated_rows(
    captured: Captured, role: str, record: Record, expected: Expected, group: Group
) -> tuple[np.ndarray, np.ndarray]:
    """(reference, mine's output), float64 [rows, width]. A reference may know one of the inputs, too: which experts a
    router should have named."""
    outputs: Mapping[str, Any] = captured.what.outputs
    value = outputs[role] if role in outputs else captured.what.inputs[role.removeprefix("input.")]
    wide = [np.moveaxis(t.double().numpy(), group.row_dim, 0) for t in (expected.value.expand(record.shape), value)]
    first, second = (a.reshape(a.shape[0], -1) for a in wide)
    return first, second


def _golden(loader: Loader, group: Group) -> np.ndarray:
    block = loader.load(group)
    return np.asarray(widen(block.data, block.dtype, as_float=True), np.float64)


MOST_TAPS, MOST_CALLS = 64, 64
"""Chosen: what is computed twice; beyond, the question stays open."""


class _Read(dict[str, Any]):
    """Attributes that know which of them were read."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def effects(mine: Calls, references: References, others: Mapping[str, list[Differs]]) -> dict[str, ConstantEffect]:
    """Tap → ``matters`` (True, False, or None for not known) and ``times``, how many times what rounding allows an
    output moves at most. others: constants_differ.other_values'."""
    ran: dict[str, list[int]] = {}
    for rank, tap, _ in mine.taps(()):
        ran.setdefault(tap, []).append(rank)
    return {tap: _effect(mine, references, tap, values, ran) for tap, values in list(others.items())[:MOST_TAPS]}


def _effect(
    mine: Calls, references: References, tap: str, values: list[Differs], ran: Mapping[str, list[int]]
) -> ConstantEffect:  # fmt: skip
    golden = {name: theirs for name, _, theirs in values}
    open_, worst, left = False, 0.0, MOST_CALLS
    seen: set[str] = set()
    for where in (t for t in ran if t == tap or t.rpartition(".")[0] == tap):
        for rank in ran[where]:
            for captured in mine.of(rank, where):
                left -= 1
                if left < 0:
                    open_ = True
                    break
                moved = _moved(references, captured, golden, tap == where)
                if moved is None:
                    open_ = open_ or where == tap
                    continue
                times, read = moved
                worst, seen = max(worst, times), seen | read
    if worst > 1.0:
        return {"matters": True, "times": worst}
    # A reference may read a value and compute with another (config.json's), which moves nothing.
    return {"matters": None if open_ or seen != set(golden) or not worst else False, "times": worst}


def _moved(
    references: References, captured: Captured, golden: Mapping[str, Any], own: bool
) -> tuple[float, set[str]] | None:
    """(how many times what rounding allows an output moves at most, the constants that were read); None where that is
    not known. own: the call's own attributes differ, and not those of the module that holds it."""
    if captured.missing:
        return None
    call = captured.what
    reads = _Read({**(call.attrs if own else call.parent), **golden})
    most = _apart(references, captured, **{"attrs" if own else "parent": reads})
    return None if most is None else (most, reads.read & set(golden))


def _apart(references: References, captured: Captured, **changed: Any) -> float | None:
    """How many times what rounding allows an output moves at most where these fields of the call are changed; None
    where one of the two has no reference."""
    call = captured.what
    first, second = references.evaluate(call), references.evaluate(replace(call, **changed))
    if isinstance(first, Declined) or isinstance(second, Declined):
        return None
    return max(_effect_by_output(captured, first, second), default=0.0)


_OF_THE_RUN = re.compile(r"(^|[._])(tp|ep|pp|dp|pcp|dcp|sp|rank|ranks|local|shard|shards|start|end)($|_)|partition|"
                        r"num_(q_|kv_)?heads|^(q_size|kv_size|reduce_results|prefix|layer_name)$|"
                        r"cache_dtype|_(k|v|q|prob)_scale")  # fmt: skip
"""Constants that say which part of the operator a rank has, who adds the parts up, and how a cache is kept, which is
reported by itself (rounded_caches)."""
_FEW = 2


def computed_otherwise(
    sides: tuple[Calls, Calls], references: References, taps: Iterable[str], known: Collection[str]
) -> dict[str, str]:
    """Tap → why golden's module is another operator than mine's: a class or a constant of golden's, with which the
    reference makes of mine's own reads what rounding does not explain. known: taps whose other constants are a finding
    already."""
    golden, mine = ({m.tap: m for named in s.modules.values() for m in named.values()} for s in sides)
    found: dict[str, str] = {}
    for tap in taps:
        if tap not in golden or tap not in mine or tap in known or len(found) >= MOST_TAPS:
            continue
        own, theirs = mine[tap], golden[tap]
        other = [(n, v) for n, v in theirs.attrs.items() if n in own.attrs and not _OF_THE_RUN.search(n)
                 and own.attrs[n] != v and n != FORWARD]  # fmt: skip
        if other or own.cls != theirs.cls or own.attrs.get(FORWARD) != theirs.attrs.get(FORWARD):
            calls = [c for c in _first_calls(sides[1], tap) if not c.missing]
            for n, v in other:
                if any((_moved(references, c, {n: v}, True) or (0.0,))[0] > 1.0 for c in calls):
                    found[tap] = f"its {n} is {own.attrs[n]}, golden's is {v}"
            if own.cls == theirs.cls and tap not in found and (says := _coded(sides, references, own, theirs, calls)):
                found[tap] = says
            if own.cls != theirs.cls:  # with its constants where mine has none
                moved = (_apart(references, c, cls=theirs.cls, attrs={**theirs.attrs, **c.what.attrs}) for c in calls)
                if any((m or 0.0) > 1.0 for m in moved):
                    found[tap] = f"it is a {own.cls}, golden's is a {theirs.cls}"
    return found


_NOT_ITS_CLASS_S = "its own code computes something else than golden's class, whose code was not recorded"


def _coded(
    sides: tuple[Calls, Calls], references: References, own: Module, golden: Module, calls: Sequence[Captured]
) -> str:  # fmt: skip
    """How mine's formula is another than golden's, "" where it is not. Of a golden without formulas, whose calls are
    right by its class, the class's formula takes its place."""
    code, due = own.attrs.get(FORWARD), golden.attrs.get(FORWARD)
    if not code:
        return ""
    if due is None:
        plain = [{n: v for n, v in c.what.attrs.items() if n != FORWARD} for c in calls]
        moved = package(golden) in ("", package(own)) and any(
            (_apart(references, c, attrs=attrs) or 0.0) > 1.0 for c, attrs in zip(calls, plain, strict=True)
        )
        return _NOT_ITS_CLASS_S if moved and _right_by_class(sides[0], references, own.tap) else ""
    taps = {m.tap for named in sides[1].modules.values() for m in named.values()}
    if not comparable_code(own, golden, taps):
        return ""
    # None: golden's formula has a child that mine did not call
    moves = [_moved(references, c, {FORWARD: due}, True) for c in calls]
    return other_code(code, due) if any(m is None or m[0] > 1.0 for m in moves) else ""


def _right_by_class(golden: Calls, references: References, tap: str) -> bool:
    """Whether golden's first calls are what its class gives."""
    for c in _first_calls(golden, tap):
        expected = None if c.missing else references.evaluate(c.what)
        if not isinstance(expected, Mapping):
            return False
        outputs = {role: Expected(t.double()) for role, t in c.what.outputs.items()}
        if max(_effect_by_output(c, outputs, expected), default=0.0) > 1.0:
            return False
    return True


def _first_calls(calls: Calls, tap: str) -> list[Captured]:
    ranks = [rank for rank, named, _ in calls.taps(()) if named == tap][:1]
    return list(islice((c for rank in ranks for c in calls.of(rank, tap)), _FEW))


def _effect_by_output(
    captured: Captured, first: Mapping[str, Expected], second: Mapping[str, Expected]
) -> Iterator[float]:  # fmt: skip
    for role, output in captured.what.outputs.items():
        record = captured.records.get(role)
        if record is None or role not in first or role not in second:
            continue
        shape = tuple(first[role].value.shape)
        if shape != tuple(second[role].value.shape) or shape != tuple(output.shape):
            continue
        row_dim = record.row_dim if record.rows is not None else 0
        rows = OutputRows.of(second[role], first[role].value, row_dim)
        if len(rows.at):
            yield rows.judge(record.dtype).severity


ALIKE = 3.0
"""Golden is as wrong as mine where mine's error is at most so many times golden's, both in what is allowed."""


def wrong(rows: Iterable[CheckResult]) -> dict[str, CheckResult]:
    """tap → its worst output among those that fail."""
    worst: dict[str, CheckResult] = {}
    for row in rows:
        if row.status == FAIL and (row.tap not in worst or row.severity > worst[row.tap].severity):
            worst[row.tap] = row
    return worst


def shared(golden: Mapping[str, CheckResult], mine: Mapping[str, CheckResult]) -> frozenset[str]:
    """The taps that golden does as wrong as mine."""
    return frozenset(t for t, c in mine.items() if t in golden and c.severity <= ALIKE * golden[t].severity)


def prove(
    golden: Sequence[CheckResult], mine: Sequence[CheckResult], splits: Mapping[str, Split] | None = None,
    partly: bool = False, *, outliers: Iterable[OutlierLayer] = (),
    machines: Mapping[str, tuple[Habit, ...]] | None = None,
    explained: Explained | None = None, causes: Mapping[str, Any] | None = None,
) -> ReplayResult:  # fmt: skip
    """golden, mine: check_tap's rows of the two, settled (of_machine.py); splits: by tap; outliers: outputs of mine
    unlike their siblings; machines: how each computes, which is then not said again in a note; explained: explained.py;
    causes: by tap (opcheck/causes/examine.py)."""
    known = {side: {h.operator for h in habits} for side, habits in (machines or {}).items()}
    found, theirs = wrong(mine), wrong(golden)
    alike = shared(theirs, found)
    blamed = [replace(_blame(c, (splits or {}).get(t)), cause=(causes or {}).get(t))
              for t, c in found.items() if t not in alike]  # fmt: skip
    if not blamed:
        blamed = [_unlike(o) for o in outliers if o.pooled.tap not in found]
    wrong_taps = set(found) | {b.tap for b in blamed}
    right = {c.tap for c in mine if c.status == PASS and c.checked == c.rows} - wrong_taps - _open(mine)
    # what a comparison sees of mine holds golden's own rounding, too: at most their sum (the triangle inequality)
    own, allowed = _created(golden), {c.tap: c.habit for c in mine if c.habit and c.tap in right}
    return ReplayResult(
        blamed=tuple(_in_all_layers(blamed, mine)),
        shared=tuple(sorted(alike)),
        only_golden=tuple(sorted(t for t in theirs if t not in found)),
        right=frozenset(right),
        checked=sum(c.status in (FAIL, PASS) for c in mine),
        partly=partly,
        truncating={
            t: x + (own.get(t, 0.0) if t in allowed else 0.0) for t, x in _truncated(mine).items() if t in right
        },
        notes=tuple(filter(None, (*grids(mine), *(
            sentence((c for c in rows if c.cls not in known.get(side, ())), f" in {side}")
            for side, rows in (("golden", golden), ("mine", mine))))),
        ),
        machines=machines or {},
        allowed=allowed,
        caches=_caches(golden, mine),
        explained=explained or Explained(),
    )


def _caches(golden: Sequence[CheckResult], mine: Sequence[CheckResult]) -> dict[str, OtherCache]:
    """tap → Proof.caches, of attentions whose two caches are not of one format."""
    sides = {"golden": _formats(golden), "mine": _formats(mine)}
    found = {}
    for which, other in (("golden", "mine"), ("mine", "golden")):
        for tap, finding in sides[which].items():
            if tap not in sides[other] or sides[other][tap][0] != finding[0]:
                found[tap] = (which, *finding)
    return found


def _formats(rows: Sequence[CheckResult]) -> dict[str, tuple[str, float, float, float]]:
    """tap → `CheckResult.cache` of the call in which the format moves a row most."""
    found: dict[str, tuple[str, float, float, float]] = {}
    for c in rows:
        if c.cache is not None and (c.tap not in found or c.cache[1] > found[c.tap][1]):
            found[c.tap] = c.cache
    return found


def _truncated(rows: Sequence[CheckResult]) -> dict[str, float]:
    """tap → the largest error of a row that it created, of those that round toward zero in an output at least, or do
    another thing that their machine does everywhere (of_machine.py)."""
    seen = {c.tap for c in rows if c.rounding or c.habit}
    return {t: x for t, x in _created(rows).items() if t in seen}


def _created(rows: Sequence[CheckResult]) -> dict[str, float]:
    """tap → the largest error of a row that it created, of outputs that are right."""
    most: dict[str, float] = {}
    for c in rows:
        if c.status == PASS and c.created is not None and c.role.startswith("output"):
            most[c.tap] = max(c.created, most.get(c.tap, 0.0))
    return most


def _open(rows: Iterable[CheckResult]) -> frozenset[str]:
    """The taps some of whose outputs or calls have no verdict: what is right elsewhere may be wrong there."""
    return frozenset(c.tap for c in rows if c.status not in (PASS, FAIL))


def _blame(c: CheckResult, split: Split | None) -> ReplayFinding:
    created, propagated = c.created if c.created is not None else 0.0, None
    request, position, phase = c.request, c.position, None
    if split is not None:
        created, propagated = split.created, split.propagated
        request, position, phase = split.request, split.position, split.phase
    return ReplayFinding(
        c.tap, c.cls, c.role, c.seq, request, position, created, propagated, c.severity, c.rows, c.message,
        c.tier or BEYOND_CHANCE, c.severity, c.chance, phase=phase, measure=c.measure or "",
    )  # fmt: skip


def _unlike(o: OutlierLayer) -> ReplayFinding:
    p = o.pooled
    text = f"all {p.rows} rows together: errors {o.times:.3g} times those of {o.peers} other layers' {p.cls}"
    return ReplayFinding(
        p.tap, p.cls, p.role, p.seq, None, None, p.created, None, o.times, p.rows, text, SIBLING_OUTLIER, o.times,
        o.chance,
    )  # fmt: skip


def _in_all_layers(blamed: Sequence[ReplayFinding], mine: Iterable[CheckResult]) -> list[ReplayFinding]:
    """``blamed``, those that are in every layer of at least two saying so."""
    every = in_all_layers([b.tap for b in blamed], [c.tap for c in mine if c.status in (FAIL, PASS)])
    return [replace(b, layers=every[b.tap]) if b.tap in every else b for b in blamed]
