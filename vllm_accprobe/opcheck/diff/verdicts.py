"""Two machines' csv files, both against the CPU, joined into a verdict for every output.

The problem: a kernel's distance from a reference in float64 says little until one knows how far a machine that is
trusted is from the same reference. The idea: golden's rows are kept by what identifies them, mine's are streamed past
them; each pair is judged by a standard for two machines, and everything that is not judged is a row with a reason.
Where two rows of a file have one identity (a call that was made again), the first meets the first, the second the
second. Servers that batched differently have no calls in common: `by` makes one row of a module's calls, or of an
operator's, on each side (aggregate.py).
Not here: reading the files (csv_rows.py), the rules (standards/), what is printed (lines.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from vllm_accprobe.opcheck.diff.aggregate import gathered
from vllm_accprobe.opcheck.diff.csv_rows import MSPROBE, Row, Sheet, SheetError, in_folder
from vllm_accprobe.standards import MACHINES, UnknownStandard, built_in, find
from vllm_accprobe.standards.declaration import MachineRule
from vllm_accprobe.standards.finding import ERROR, PASS, SKIP, WARNING, Judged, RuleFinding, skip, worst
from vllm_accprobe.standards.msprobe_apis import api_of

CALL, TAP, OP = BY = ("call", "tap", "operator")
_LEFT_OUT = {CALL: (), TAP: ("step", "call"), OP: ("tap", "rank", "step", "call")}
SHAPES = "shapes differ"


@dataclass(frozen=True, slots=True)
class Compared:
    """One output. golden, mine: its row in each file, None where it has none; api: msprobe's name of the operator;
    level: L0 to L2, "" where the standard has none; side: "" or the only side that has it."""

    golden: Row | None
    mine: Row | None
    api: str
    level: str
    finding: RuleFinding

    @property
    def row(self) -> Row:
        """Mine's, or golden's where mine has none."""
        found = self.mine if self.mine is not None else self.golden
        if found is None:
            raise ValueError("an output that neither side has")
        return found

    @property
    def side(self) -> str:
        return "golden" if self.mine is None else "mine" if self.golden is None else ""


@dataclass(frozen=True)
class Diff:
    """Two files under a standard. ``keys``: the columns that identify an output in both; by: one of BY."""

    golden: Sheet
    mine: Sheet
    standard: str
    rule: MachineRule
    algorithms: tuple[tuple[str, str], ...]
    keys: tuple[str, ...]
    by: str = CALL

    def rows(self) -> Iterator[Compared]:
        """Mine's rows in their order, then those that only golden has. Raises SheetError on the way."""
        waiting: dict[tuple[str, ...], list[Row]] = {}
        for row in self._rows(self.golden):
            waiting.setdefault(row.key, []).append(row)
        for row in self._rows(self.mine):
            found = waiting.get(row.key)
            if found:
                yield self._judge(found.pop(0), row)
            else:
                yield self._alone(None, row)
        for left in waiting.values():
            for row in left:
                yield self._alone(row, None)

    def _rows(self, sheet: Sheet) -> Iterator[Row]:
        rows = sheet.rows(self.keys)
        return rows if self.by == CALL else gathered(rows)

    def _alone(self, golden: Row | None, mine: Row | None) -> Compared:
        row = golden if mine is None else mine
        only = "golden" if mine is None else "mine"
        return Compared(golden, mine, _api(row) if row else "", "", skip("", f"only in {only}"))

    def _judge(self, golden: Row, mine: Row) -> Compared:
        api = _api(mine)
        finding = self._unmeasured(golden, mine) or self._by_standard(golden, mine, api)
        if golden.dtype != mine.dtype and finding.status != SKIP:
            said = f"golden is {golden.dtype}, mine {mine.dtype}"
            joined = f"{finding.message}; {said}" if finding.message else said
            finding = RuleFinding(finding.status, finding.algorithm, joined, finding.judged)
        return Compared(golden, mine, api, self.rule.level(api), finding)

    def _by_standard(self, golden: Row, mine: Row, api: str) -> RuleFinding:
        names = (api, mine.op, mine.cls)
        algorithm = next((a for glob, a in self.algorithms if any(fnmatchcase(n, glob) for n in names if n)), None)
        return self.rule.rule(golden, mine, api, algorithm)

    def _unmeasured(self, golden: Row, mine: Row) -> RuleFinding | None:
        """Why a pair cannot be judged, or that mine alone has no result; None where it can."""
        if golden.shape != mine.shape and golden.shape and mine.shape:
            return skip("", f"{SHAPES}: golden {golden.shape}, mine {mine.shape}")
        if mine.shape in ("(0,)", "[0]"):
            return skip("", "empty tensor")
        for side, row, other in (("golden", golden, mine), ("mine", mine, golden)):
            if row.status == SKIP or not row.dtype:
                return skip("", f"{side}: {row.message or 'skipped'}")
            if not row.measured:
                said = f"{side} has no result: {row.message or row.status or 'no measures'}"
                if side == "mine" and row.status == ERROR and other.measured:
                    return RuleFinding(ERROR, "", said, (Judged("result", None, None, ERROR, said),))
                return skip("", said)
        return None


def _api(row: Row) -> str:
    return row.api or api_of(row.op, row.cls)


def _shown(row: Row, api: str) -> str:
    """The operator as the csv calls it, and what it was judged as."""
    name = row.op or row.cls or api
    return name if name == api else f"{name} ({api})"


def open_diff(
    golden: Path, mine: Path, standard: str = "msprobe", algorithms: Sequence[str] = (), by: str = CALL
) -> Diff:
    """golden, mine: csv files, or folders with one. algorithms: ``GLOB=NAME``, over API names, operators and classes,
    NAME one of the standard's. Raises SheetError for files that are none or do not belong together, for unknown names,
    and OSError."""
    try:
        rule = find(standard, MACHINES).machines
    except UnknownStandard as e:
        raise SheetError(f"--standard: {e}") from None
    assert rule is not None
    if algorithms and not rule.algorithms:
        those = [s.name for s in built_in().values() if s.machines is not None and s.machines.algorithms]
        raise SheetError(f"--algorithm: {standard} has no algorithms to choose from; {', '.join(those)} have")
    sheets = Sheet(in_folder(golden)), Sheet(in_folder(mine))
    if sheets[0].kind != sheets[1].kind:
        kinds = " and ".join(f"{s.path} is {s.kind}'s" for s in sheets)
        raise SheetError(f"{kinds}: two files of one kind are needed")
    if by not in BY or (by != CALL and sheets[0].kind == MSPROBE):
        raise SheetError(f"--by: {by!r} is none of {', '.join(BY)}" if by not in BY else
                         f"--by {by}: msprobe's files name calls, not modules; leave it out")  # fmt: skip
    keys = tuple(k for k in sheets[1].keys if k in sheets[0].keys and k not in _LEFT_OUT[by])
    if not keys:
        raise SheetError(f"{mine}: no column identifies its rows that {golden} has, too (op, tap, call, role ...)")
    return Diff(*sheets, standard, rule, tuple(_choice(text, rule) for text in algorithms), keys, by)


def _choice(text: str, rule: MachineRule) -> tuple[str, str]:
    glob, found, name = text.rpartition("=")
    if not found or not glob or name not in rule.algorithms:
        raise SheetError(f"--algorithm: {text!r} is not GLOB=NAME with NAME one of {', '.join(rule.algorithms)}")
    return glob, rule.algorithms[name]


@dataclass
class CallStatuses:
    """What became of a call's outputs: their statuses, forward and backward, and the worst message."""

    api: str
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    algorithms: set[str] = field(default_factory=set)
    message: str = ""
    severity: float = -1.0

    def add(self, c: Compared) -> None:
        (self.backward if c.row.backward else self.forward).append(c.finding.status)
        if c.finding.algorithm:
            self.algorithms.add(c.finding.algorithm)
        weight = {ERROR: 3e300, WARNING: 2e300}.get(c.finding.status, 0.0) + min(c.finding.severity, 1e300)
        if c.finding.message and weight > self.severity:
            self.message, self.severity = c.finding.message, weight

    @property
    def statuses(self) -> tuple[str, str]:
        """Forward and backward: error, warning, pass, skip where all outputs were, "" where there is none."""
        return worst(self.forward) if self.forward else "", worst(self.backward) if self.backward else ""


class DiffTotals:
    """What is known after all rows: by call, by operator, reasons, and the worst outputs. most: how many of these."""

    def __init__(self, most: int = 200):
        self.most = most
        self.calls: dict[tuple[str, ...], CallStatuses] = {}
        self.statuses: Counter[str] = Counter()
        self.operators: dict[str, Counter[str]] = {}
        self.algorithms: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.alone: Counter[str] = Counter()
        self.worst: list[Compared] = []

    def add(self, c: Compared) -> None:
        status, row = c.finding.status, c.row
        self.calls.setdefault(row.group, CallStatuses(c.api)).add(c)
        if c.side:
            self.alone[c.side] += 1
            return
        self.statuses[status] += 1
        self.operators.setdefault(_shown(row, c.api), Counter())[status] += 1
        if status == SKIP:
            message = c.finding.message
            self.skipped[SHAPES if message.startswith(SHAPES) else message] += 1
            return
        self.algorithms[c.finding.algorithm or "no result"] += 1
        if status in (WARNING, ERROR):
            self.worst.append(c)
            if len(self.worst) > 2 * self.most:
                self._cut()

    @property
    def judged(self) -> int:
        return sum(self.statuses[s] for s in (PASS, WARNING, ERROR))

    def worst_first(self) -> list[Compared]:
        """Errors before warnings, each the furthest beyond its limit first."""
        self._cut()
        return self.worst

    def _cut(self) -> None:
        self.worst.sort(key=lambda c: (c.finding.status != ERROR, -c.finding.severity, c.row.key))
        del self.worst[self.most :]


def is_msprobe(diff: Diff) -> bool:
    """Whether the files are msprobe's, whose names are API names."""
    return diff.mine.kind == MSPROBE
