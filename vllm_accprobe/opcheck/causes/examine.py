"""Which operators are examined for a cause, and on which of their calls.

The problem: a dump has thousands of calls of an operator, a wrong operator stands in every layer, and nobody waits a
minute for a reason. The idea: of a wrong operator two wrong calls and two right ones, of large calls the rows near the
worst one and some at both ends; what explains the first layer is tried first in the others, on fewer calls; all within
SECONDS. What is not examined in that time has no cause, which says nothing about it.

Not here: the proof (search.py), where the cause is shown (opcheck/proof/apply_proof.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import Dump, row_space
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.judge.statistic import CHANCE
from vllm_accprobe.opcheck.calls.case import closed
from vllm_accprobe.opcheck.calls.records import Calls, Captured, Chosen, Place, Runs
from vllm_accprobe.opcheck.causes.api import CauseRow, Outputs, Trial, default_causes
from vllm_accprobe.opcheck.causes.search import SECONDS, Deadline, Explanation, Failures, ProvedCause, search
from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, CheckResult

_CALLS = 2
"""Chosen: wrong calls, and right ones, that are examined; of a layer whose like is explained, one."""
_PIECE = 48
"""Chosen: rows around the worst one, and at each end of a large call."""
_LARGE = 1 << 21
"""Chosen: elements of a call's tensors from which on some of its rows are taken: 16 MiB of float64."""


_TAPS = 8
"""Chosen: wrong taps of `opcheck` that have the whole time each; further ones share what the last one leaves. In a
comparison all have it together."""


class Causes:
    """Causes of one side's operators. golden: by tap, attributes that golden's module has otherwise; seconds: for all
    operators together, or for each of the first ``taps`` taps that `next_tap` announces, None for all."""

    def __init__(
        self, references: References, golden: Mapping[str, Mapping[str, Any]] | None = None, *,
        causes: Iterable[CauseRow] | None = None, seconds: float | None = SECONDS, chance: float = CHANCE,
        taps: int | None = _TAPS,
    ):  # fmt: skip
        self._most = taps
        self._references, self._golden, self._chance = references, golden or {}, chance
        self._causes, self._table = default_causes() if causes is None else (list(causes), [])
        self._failures = Failures()
        self._seconds, self._left, self._taps = seconds, seconds, 0
        self._known: dict[tuple[str, str], tuple[ProvedCause, ...]] = {}

    def next_tap(self) -> None:
        """Begins another tap: it has a time of its own, while all taps together have not had `_TAPS` times as much."""
        self._taps += 1
        if self._most is None or self._taps <= self._most:
            self._left = self._seconds

    def of_calls(self, captured: Sequence[Captured]) -> Explanation | None:
        """The cause of one operator from these calls of it, wrong and right ones. What explained a layer like it is
        tried whatever the time; the others are searched while there is some left, of which only searching takes."""
        like = captured[0].what.cls, _like(captured[0].tap)
        known = self._known.get(like, ())
        if self.over() and not known:
            return None
        trials = [t for c in captured if (t := self._trial(c)) is not None]
        if not trials:
            return None
        fitting = [] if self.over() else [c for c in self._causes if c.fits(captured[0].what)]
        begun = time.process_time()
        found = search(trials, fitting, Deadline(self._left), known, self._failures)
        if self._left is not None:
            self._left -= time.process_time() - begun
        if found is not None and (like not in self._known or len(found.found) < len(known)):
            self._known[like] = found.found
        return found

    def known(self, tap: str, cls: str) -> bool:
        """Whether a layer like this one has been explained."""
        return (cls, _like(tap)) in self._known

    def problems(self, counted: bool = False) -> list[str]:
        """Causes that raised, and packages' that cannot be loaded. counted: with how often; without, a sentence stays
        as it is when it comes again."""
        return [*self._table, *self._failures.lines(counted)]

    def over(self) -> bool:
        """Whether the time is over."""
        return self._left is not None and self._left <= 0

    def _trial(self, captured: Captured) -> Trial | None:
        if captured.missing:
            return None
        plain = self._references.evaluate(captured.what)
        if isinstance(plain, Declined):
            return None
        golden = {**self._golden.get(captured.tap.rpartition(".")[0], {}), **self._golden.get(captured.tap, {})}
        return Trial(captured, self._references, Outputs(plain), golden, self._chance)


def _like(tap: str) -> str:
    """A tap's name with its layers' numbers left out."""
    return re.sub(r"\d+", "#", tap)


def explained_by(
    calls: Calls, references: References, blamed: Iterable[CheckResult], checked: Iterable[CheckResult],
    golden: Mapping[str, Mapping[str, Any]] | None = None, *, seconds: float | None = SECONDS,
    chance: float = CHANCE, problems: list[str] | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """tap → compare.json's ``cause``, of the operators ``blamed`` (their worst rows) that have one. checked: all rows
    of this side; seconds: of this process, for reading, searching and confirming in further layers together; problems:
    gets a sentence for each cause that failed."""
    by_tap: dict[tuple[int, str], list[CheckResult]] = {}
    worst_of = {(c.rank, c.tap): c for c in blamed if c.step is not None}
    for row in checked if worst_of else ():
        if (row.rank, row.tap) in worst_of and row.step is not None and row.status in (PASS, FAIL):
            by_tap.setdefault((row.rank, row.tap), []).append(row)
    found: dict[str, dict[str, Any]] = {}
    causes, begun = Causes(references, golden, seconds=seconds, chance=chance), time.process_time()
    for place, worst in worst_of.items():
        spent = seconds is not None and time.process_time() - begun > seconds  # so that a busy machine finds the same
        if spent or (causes.over() and not causes.known(worst.tap, worst.cls)):
            continue
        most = 1 if causes.known(worst.tap, worst.cls) else _CALLS
        explanation = causes.of_calls(examined(calls, references, worst, by_tap.get(place, ()), most))
        if explanation is not None:
            found[worst.tap] = explanation.plain()
    if problems is not None:
        problems += causes.problems(counted=True)
    return found


def examined(
    calls: Calls, references: References, worst: CheckResult, rows: Sequence[CheckResult], most: int = _CALLS
) -> list[Captured]:
    """The calls of a tap that are examined, its worst one first; of large ones some rows, where the operator works row
    by row. rows: the tap's."""
    place = worst.rank, worst.tap
    bad: dict[Place, CheckResult] = {(worst.step, worst.call): worst}
    failed = {(r.step, r.call) for r in rows if r.status == FAIL}
    good = [r for r in rows if r.status == PASS and (r.step, r.call) not in failed]
    others = sorted((r for r in rows if r.status == FAIL), key=lambda r: (r.shape == worst.shape, -r.severity))
    for row in others:
        if len(bad) < most:
            bad.setdefault((row.step, row.call), row)
    right = {(r.step, r.call): r for r in sorted(good, key=lambda r: (r.shape != worst.shape, -r.rows))[:most]}
    places: dict[Place, Runs] = {}
    for at, row in {**right, **bad}.items():
        records = calls.held(*place, at)
        size = sum(_numel(r) for r in records.values())
        places[at] = _runs(calls.dump, records, row) if size > _LARGE else row.replayed
    chosen = Chosen(places, references.by_rows, 1 << 62)
    try:
        # closed: what an earlier call looked back at is let go of when a later one is read
        found = [replace(c, what=closed(c.what, references)) for c in calls.of(*place, chosen=chosen)] if places else []
    except DumpError:
        return []
    order = list(bad)
    found = [_with_before(calls, place, c) if (c.step, c.call) in bad else c for c in found]
    return sorted(found, key=lambda c: order.index(p) if (p := (c.step, c.call)) in order else len(order))


def _with_before(calls: Calls, place: tuple[int, str], captured: Captured) -> Captured:
    """A whole call with the output of the tap's call before it, where captured, as ``extra["before"]`` by role."""
    places = sorted(calls.by_tap.get(place, ()))
    at = (captured.step, captured.call)
    k = places.index(at) if at in places else 0
    record = calls.held(*place, places[k - 1]).get("output.0") if k else None
    if record is None or record.payload is None or captured.whole is not None:
        return captured
    extra = {**captured.what.extra, "before": {record.role: calls.read(record)}}
    return replace(captured, what=replace(captured.what, extra=extra))


def _numel(record: Record) -> int:
    n = 1
    for size in record.shape:
        n *= size
    return n


def _runs(dump: Dump, records: Mapping[str, Record], row: CheckResult) -> Runs:
    """Rows of a large call: at both ends and around the worst one; all where it has no rows."""
    record = records.get(row.role)
    space = row_space(dump, record) if record is not None else None
    if record is None or space is None or not record.shape:
        return row.replayed
    n, worst = record.shape[0], 0
    for s, at in space.stretches():
        request = dump.requests.get((record.rank, s.req))
        named = request.id if request else str(s.req)
        if row.position is not None and named == row.request and s.pos <= row.position < s.pos + s.n:
            worst = at.start + row.position - s.pos
    pieces = (range(first, first + _PIECE) for first in (0, worst - _PIECE // 2, n - _PIECE))
    taken = sorted({k for piece in pieces for k in piece if 0 <= k < n})
    runs: list[list[int]] = []
    for k in taken:
        if any(a <= k < b for a, b in row.replayed) or not row.replayed:
            if runs and runs[-1][1] == k:
                runs[-1][1] += 1
            else:
                runs.append([k, k + 1])
    return tuple((a, b) for a, b in runs)


_KEPT = 1 << 20
"""Chosen: elements of a right call that is kept for the wrong ones of its tap."""


class CausesOfTap:
    """Causes of the wrong calls of one tap, one after another. shared: of all taps of a process, empty at first:
    nothing is made before a call is wrong; chance: that a correct output fails."""

    def __init__(self, shared: list[Causes], references: References, chance: float):
        self._shared, self._references, self._chance = shared, references, chance
        self._right: Captured | None = None
        self._begun = False

    def with_cause(self, captured: Captured, rows: Sequence[CheckResult]) -> Iterator[CheckResult]:
        """``rows`` of a call, the wrong ones with their cause. Never raises."""
        wrong = [r for r in rows if r.status == FAIL and r.role]
        if not wrong:
            if self._right is None and rows and all(r.status == PASS for r in rows) and _size(captured) <= _KEPT:
                self._right = captured if "cache" not in captured.what.extra else None
            yield from rows
            return
        if not self._shared:
            self._shared.append(Causes(self._references, chance=self._chance))
        if not self._begun:
            self._shared[0].next_tap()
            self._begun = True
        found = self._shared[0].of_calls([captured, *([] if self._right is None else [self._right])])
        text = "" if found is None else found.text
        yield from (replace(r, cause=text) if text and r.status == FAIL else r for r in rows)


def _size(captured: Captured) -> int:
    return sum(_numel(r) for r in captured.records.values())


def golden_constants(others: Mapping[str, Iterable[tuple[str, Any, Any]]]) -> dict[str, dict[str, Any]]:
    """tap → attribute → golden's value, of comparison/notes.py's `other_values`."""
    return {tap: {name: theirs for name, _, theirs in differs} for tap, differs in others.items()}
