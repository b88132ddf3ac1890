"""What a replay found, as opcheck.csv and as lines for a terminal; how many calls were checked, and why not all.

The problem: hundreds of thousands of rows, of which a person wants the wrong operator, how sure one may be of it, and
what was not examined. The idea: failures grouped by module, the first in the order of execution first; then a line for
each class; then every reason for which something was skipped, counted. Pure functions that return lines.

Not here: checking (check_calls.py), the row itself (result_row.py), a row from a verdict (judged_row.py).
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from vllm_accprobe.judge import profile
from vllm_accprobe.opcheck.machine_precision.of_machine import MachineHabits, sentence
from vllm_accprobe.opcheck.plain_csv import FORMULA, escaped, inert, safe
from vllm_accprobe.opcheck.run.result_row import CACHE, ERROR, FAIL, PASS, SKIP, WARNING, CheckResult, grids
from vllm_accprobe.standards.measures import Measures
from vllm_accprobe.whole_file import write_csv_lines


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


def totals(rows: Iterable[CheckResult]) -> Totals:
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


_MOST = 10
_ID = ("cls", "cls", "tap", "call", "role", "step", "rank", "dtype", "shape")
_MORE = (
    "status", "message", "algorithm", "measure", "measured", "allowed", "created", "request", "position", "column",
    "rows", "checked", "unchecked_because", "seq", "id", "stored", "rounding", "tier", "chance", "evidence", "habit",
    "cause",
)  # fmt: skip
COLUMNS = ("op", "class", *_ID[2:], *Measures.FIELDS, *_MORE)
"""Of opcheck.csv: what identifies an output, how far it is off, and what that means. op: the operator or the class;
stored: the tensor's dtype where its numbers are of the coarser one in ``dtype``."""
RESULT = ("op", "class", "tap", "rank", "calls", "pass", "warning", "fail", "skip", "error", "worst", "message")
"""Of result.csv: outputs by status; worst: the largest share of what is allowed."""
_WHOLE = ("rank", "step", "call", "seq", "rows", "checked", "position", "column")
_REAL, _MAY_LACK = ("created", "measured", "allowed", "chance"), ("measure", "request")
_identify, _conclude = attrgetter(*_ID), attrgetter(*_MORE)
_measured = attrgetter(*Measures.FIELDS)


_SETTLED = ("status", "message", "measure", "measured", "allowed", "tier", "chance", "habit", "cause")


def resettle(path: Path, rows: Sequence[CheckResult]) -> None:
    """Writes what was decided over all rows into the csv that `cells` of the single ones made: status, message and the
    figure behind it. rows: all of the csv's, in its order. Raises OSError, ValueError."""
    at = {n: COLUMNS.index(n) for n in _SETTLED}
    with path.open(encoding="utf-8", newline="") as f:
        lines_ = list(csv.reader(f))[1:]
    for line, row in zip(lines_, rows, strict=True):
        was = line[at["status"]], line[at["message"]], line[at["habit"]]
        if was != (row.status, cell(row.message), cell(row.habit)):
            for name, k in at.items():
                line[k] = str(cell("" if getattr(row, name) is None else getattr(row, name)))
    write_csv_lines(path, COLUMNS, lines_)


def write_result(rows: Iterable[CheckResult], path: Path) -> None:
    """result.csv: a line for each operator or module that was called; whole or not at all. Raises OSError."""
    groups: dict[tuple[int, str, str], list[CheckResult]] = {}
    for row in rows:
        groups.setdefault((row.rank, row.tap, row.cls), []).append(row)
    write_csv_lines(path, RESULT, (_result(*key, group) for key, group in groups.items()))


def _result(rank: int, tap: str, cls: str, group: list[CheckResult]) -> list[object]:
    counts = [sum(r.status == s for r in group) for s in (PASS, WARNING, FAIL, SKIP, ERROR)]
    bad = [r for r in group if r.status in (FAIL, ERROR, WARNING)] or [r for r in group if r.status == SKIP]
    worst = max((r.severity for r in group), default=0.0)
    message = max(bad, key=lambda r: r.severity).message if bad else ""
    calls = len({(r.step, r.call) for r in group})
    return [cell(x) for x in (cls, cls, tap, rank, calls, *counts, worst, message)]


def cells(row: CheckResult) -> list[object]:
    """A row of opcheck.csv, in the order of COLUMNS."""
    empty = ("",) * len(Measures.FIELDS)
    measured = _measured(row.measures) if row.measures is not None else empty
    return [cell(v) for v in (*_identify(row), *measured, *_conclude(row))]


def from_cells(cells: Sequence[Any]) -> CheckResult:
    """The row that `cells` wrote, from its values or from their text in the csv; without its measures. Raises
    ValueError."""
    if len(cells) != len(COLUMNS):
        raise ValueError(f"a row has {len(cells)} cells instead of {len(COLUMNS)}")
    texts = {n: None if v == "" else v for n, v in zip(COLUMNS, cells, strict=True)} | {"cls": cells[1] or None}

    def value(name: str) -> Any:
        found = texts[name]
        if name in _WHOLE or name in _REAL:
            return None if found is None else int(found) if name in _WHOLE else float(found)
        if name == "shape":
            return tuple(int(n) for n in str(found or "[]").strip("[]").split(",") if n.strip())
        if found is None:
            return None if name in _MAY_LACK else ""
        return found[1:] if isinstance(found, str) and found[:1] == "'" and found[1:2] in FORMULA else found

    return CheckResult(**{name: value(name) for name in (*_ID[1:], *_MORE) if name != "id"})


def cell(value: object) -> object:
    """One line of plain text: names come from dumps, and a spreadsheet would run a formula."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, str):
        return inert(escaped(value))
    return float(value) if isinstance(value, float) else value  # numpy's floats write themselves in other ways


def lines(
    rows: Sequence[CheckResult], totals: Totals, *, most: int | None = _MOST, machine: MachineHabits | None = None
) -> list[str]:  # fmt: skip
    """The whole report. most: how many failing modules are shown; None: all; machine: how it computes."""
    out = [_sentence(rows, totals)]
    wrong = failures(rows)
    for group in wrong[:most]:
        if is_cache(group[0]):
            out += [f"  {safe(r.tap)}  {safe(r.cls)}: {safe(r.message, 1000)}" for r in group[:_MOST]]
            continue
        worst = max(group, key=lambda r: r.severity)
        roles = ", ".join(sorted({r.role or r.status for r in group}))
        steps = sorted({r.step for r in group if r.step is not None})
        out.append(f"  {safe(worst.tap)}  {safe(worst.cls)}  {safe(roles)}, {_steps(steps)}: {safe(worst.message)}")
        out += [f"    cause: {safe(text, 1000)}" for text in dict.fromkeys(r.cause for r in group if r.cause)][:1]
    if most is not None and len(wrong) > most:
        out.append(f"  ... {len(wrong) - most} more modules: opcheck.csv has all, --verbose shows them")
    out += ["", f"{'class':<36} {'outputs':>7} {'pass':>6} {'fail':>6}  worst / allowed"]
    for cls, verdicts in by_class(rows):
        if not is_cache(verdicts[0]):
            worst = max(verdicts, key=lambda r: r.severity)
            bad = sum(r.status == FAIL for r in verdicts)
            part = f"{worst.severity:.2f}" if worst.severity < 1e4 else "far beyond"
            exact = " (must be equal)" if worst.measure == "exact" else f" ({worst.measure})"
            out.append(f"{safe(cls, 36):<36} {len(verdicts):>7} {len(verdicts) - bad:>6} {bad:>6}  {part}{exact}")
    known = {h.operator for h in machine.habits} if machine else set()
    notes = [*grids(rows), sentence(r for r in rows if r.cls not in known)]
    out += [f"note: {safe(text, 1000)}" for text in notes if text]
    skipped = [f"  {n:>7}  calls: {safe(why)}" for why, n in totals.skipped.items()]
    skipped += [f"  {n:>7}  rows of checked calls: {safe(why)}" for why, n in totals.rows_skipped.items()]
    skipped += [f"  {n:>7}  outputs of checked calls: {safe(why)}" for why, n in totals.outputs_skipped.items()]
    habits = ["", *computes(machine)] if machine is not None and (machine.habits or machine.unknown) else []
    return out + habits + (["", "not checked:", *skipped] if skipped else [])


def computes(machine: MachineHabits) -> list[str]:
    """The section on how this machine computes: a line for each operator and dtype, then what is not known."""
    sentences = (*profile.lines(machine.habits), *machine.unknown)
    return ["How this machine computes:", *(f"  {safe(text, 1000)}" for text in sentences)]


def _sentence(rows: Sequence[CheckResult], totals: Totals) -> str:
    share = f"{totals.checked:,} of {totals.calls:,} calls checked"
    bad, crashed = totals.statuses.get(FAIL, 0), totals.statuses.get(ERROR, 0)
    more = f"; {crashed:,} references failed" if crashed else ""
    caches = [r for r in rows if is_cache(r)]
    found = "PASS: "
    if caches:
        bad -= len(caches)
        others = f" (and {len(caches) - 1:,} more)" if caches[1:] else ""
        found = f"FAIL: {safe(caches[0].message, 1000)}{others}; "
    if not bad:
        return f"{found}{share}, no output is further from its reference than rounding explains{more}"
    wrong = [r for r in rows if r.status == FAIL and not is_cache(r)]
    first = failures(wrong)[0][0]
    n = len({r.tap for r in wrong})
    return (
        f"{found if caches else 'FAIL: '}{share}, {bad:,} outputs of {n} {'module' if n == 1 else 'modules'} are wrong "
        f"for their own inputs, first {safe(first.tap)} ({safe(first.cls)}){more}"
    )


def failures(rows: Iterable[CheckResult]) -> list[list[CheckResult]]:
    """Rows that failed or crashed, by module, the first executed first."""
    groups: dict[tuple[int, str, bool], list[CheckResult]] = {}
    wrong = [r for r in rows if r.status in (FAIL, ERROR)]
    for r in sorted(wrong, key=lambda r: (r.status != FAIL, -1 if r.step is None else r.step, r.seq)):
        groups.setdefault((r.rank, r.tap, is_cache(r)), []).append(r)
    return list(groups.values())


def is_cache(row: CheckResult) -> bool:
    """Whether a row is of a cache, that the dump's own ledger has reported, and of no operator (check_calls.py)."""
    return row.role == CACHE and row.step is None and row.status == FAIL


def by_class(rows: Iterable[CheckResult]) -> list[tuple[str, list[CheckResult]]]:
    """Rows with a verdict."""
    found: dict[str, list[CheckResult]] = {}
    for r in rows:
        if r.status in (PASS, FAIL, WARNING):
            found.setdefault(r.cls, []).append(r)
    return list(found.items())


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "as loaded"
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
