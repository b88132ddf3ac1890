"""Two machines' csv files, both against the CPU, joined into a verdict for every output.

The problem: a kernel's distance from a reference in float64 says little until one knows how far a machine that is
trusted is from the same reference; and three tools write such files, in two languages, of hundreds of thousands of
rows. The idea: a `Sheet` knows from the header which writer it was and gives `Row`s one at a time. Golden's rows are
kept by what identifies them, mine's are streamed past them; each pair is judged by a standard for two machines, and
what is not judged is a row with a reason. Servers that batched differently have no calls in common: `by` makes one row
of a module's calls, or of an operator's (`gathered`). Written: details.csv, result.csv, opdiff.md, and lines for a
terminal, the worst first. Columns follow msprobe's api_precision_compare files and torch_xray's summary.
Elsewhere: the rules (standards/). Sources of msprobe's columns: its two documents and the header of release 26.2.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from vllm_accprobe.formats.common.result_tables import SheetError, kind_of, lines_of
from vllm_accprobe.opcheck import plain_csv
from vllm_accprobe.opcheck.compat.msprobe import SPELLINGS
from vllm_accprobe.standards import UnknownStandard, built_in, find
from vllm_accprobe.standards.declaration import MACHINES, MachineRule
from vllm_accprobe.standards.finding import ERROR, PASS, SKIP, WARNING, Judged, RuleFinding, skip, worst
from vllm_accprobe.standards.measures import DECADES, Measures
from vllm_accprobe.standards.msprobe import LABELS, api_of
from vllm_accprobe.whole_file import GrowingCsv, NoSpace, write_csv_lines

OURS, MSPROBE = "accprobe", "msprobe"
IDENTITY = ("op", "class", "tap", "rank", "step", "call", "role")
"""Columns of ours that say which output a row is about; the last one tells outputs of a call apart."""
_API, _DTYPE = "API Name", "DEVICE Dtype"
_AT = {name: i for i, name in enumerate(Measures.FIELDS)}
ALL = (1 << len(Measures.FIELDS)) - 1
"""A row's ``missing`` where nothing was measured."""
_NOTHING = bytes(8 * len(Measures.FIELDS))
_READ = ("status", "message", "measured", "allowed", "dtype", "shape", "DEVICE Dtype", "Shape", "Status", "Message",
         "min_val", "max_val")  # fmt: skip

_IN_FOLDERS = ("opcheck.csv", "accuracy_checking_details_*.csv", "*.csv")


def in_folder(path: Path) -> Path:
    """``path``, or where it is a folder the one csv in it that opdiff is for. Raises SheetError for none or several."""
    if not path.is_dir():
        return path
    for pattern in _IN_FOLDERS:
        found = sorted(p for p in path.glob(pattern) if p.is_file())
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(p.name for p in found[:3])
            raise SheetError(f"{path}: {len(found)} files may be meant ({names}{' ...' * (len(found) > 3)}); name one")
    raise SheetError(f"{path}: no csv file is in this folder")


@dataclass(frozen=True, slots=True)
class Row:
    """One output. key: what identifies it, in the order of the sheet's keys; group: the same without the output;
    backward: a gradient; api: msprobe's API name, "" in our files; status: pass, warning, error, skip, or "" where the
    writer gave none; severity: our own verdict's measured / allowed; numbers, missing: measures in the order of
    Measures.FIELDS, and a bit for each that is not there; extremes: the smallest and the largest number that was
    given, as a generated test's csv has them, or ""."""

    key: tuple[str, ...]
    group: tuple[str, ...]
    backward: bool
    op: str
    cls: str
    api: str
    dtype: str
    shape: str
    status: str
    message: str
    severity: float
    numbers: array[float]
    missing: int
    extremes: tuple[str, str] = ("", "")

    @property
    def values(self) -> dict[str, float]:
        """What was measured, by the names of Measures."""
        if not self.missing:
            return dict(zip(Measures.FIELDS, self.numbers, strict=True))
        return {n: self.numbers[i] for i, n in enumerate(Measures.FIELDS) if not self.missing >> i & 1}

    def value(self, name: str) -> float | None:
        """One of Measures, None where it was not measured."""
        i = _AT[name]
        return None if self.missing >> i & 1 else self.numbers[i]

    @property
    def measured(self) -> bool:
        """Whether there is any measure."""
        return self.missing != ALL


class Sheet:
    """One csv file. kind: OURS or MSPROBE; keys: the columns that identify a row, of ours; unparsed: of msprobe's, the
    names that are none of ``Kind.api.N``, as far as rows were read."""

    def __init__(self, path: Path):
        self.path, self.unparsed = path, list[str]()
        self._columns = self._header()
        ours = next((n for n in Measures.FIELDS if n in self._columns), "")
        theirs = next((n for names in SPELLINGS.values() for n in names if n in self._columns), "")
        if ours and theirs:  # an RMSE of the one is over other elements than the other's
            raise SheetError(
                f"{path}: it has measures of accprobe ({ours}) and of msprobe ({theirs}), which are not computed "
                "alike: name a file that one of the two wrote"
            )
        if _API in self._columns or "API name" in self._columns:
            self.kind: str = MSPROBE
            self.keys: tuple[str, ...] = (_API if _API in self._columns else "API name",)
            self._at = _msprobe_columns(self._columns)
            needed = {"Status", _DTYPE} - set(self._columns)
        else:
            self.kind, self.keys = OURS, tuple(c for c in IDENTITY if c in self._columns)
            self._at = {n: (self._columns[n],) for n in Measures.FIELDS if n in self._columns}
            needed = {"dtype"} - set(self._columns)
            if not {"op", "class", "tap"} & set(self.keys):
                needed = {"op"}
        if needed or not self._at:
            lacking = f"it has no column {min(needed)!r}" if needed else "it has no column of measures"
            if kind := kind_of(self._columns):
                raise SheetError(f"{path} is {kind.what}: {kind.then}; `accprobe inspect` says what is in it")
            raise SheetError(
                f"{path}: {lacking}; tables that are compared are opcheck.csv, a generated test's --detail-csv and "
                "msprobe's accuracy_checking_details_*.csv"
            )

        read = (*IDENTITY, *_READ, *self.keys)
        self._read = tuple((n, i) for n, i in self._columns.items() if n in read)
        # A measure with two spellings in one header is read from the later one that has it.
        self._plan = tuple((_AT[n], at) for n, places in self._at.items() for at in places)

    def rows(self, keys: Sequence[str] = ()) -> Iterator[Row]:
        """One at a time. keys: other columns that identify a row, of those that the sheet has. Raises SheetError."""
        keys = tuple(keys) or self.keys
        for number, cells in islice(lines_of(self.path), 1, None):  # without the header
            cell = {name: cells[i].strip() for name, i in self._read}
            yield self._msprobe(cell, cells, number) if self.kind == MSPROBE else self._ours(cell, cells, keys, number)

    def count(self) -> int:
        """About how many rows there are."""
        with self.path.open("rb") as f:
            return sum(block.count(b"\n") for block in iter(lambda: f.read(1 << 20), b""))

    def _header(self) -> dict[str, int]:
        names = [c.strip() for _, cells in islice(lines_of(self.path), 1) for c in cells]
        if double := next((n for n in names if n and names.count(n) > 1), None):
            raise SheetError(f"{self.path}: two columns are called {double!r}")
        return {n: i for i, n in enumerate(names)}

    def _numbers(self, cells: Sequence[str], number: int) -> tuple[array[float], int]:
        numbers, missing = array("d", _NOTHING), ALL
        for i, at in self._plan:
            text = cells[at]
            if not text or text.isspace():
                continue
            try:
                numbers[i] = float(text)
            except ValueError:
                name = Measures.FIELDS[i]
                raise SheetError(f"{self.path}: line {number}: {name} is {text[:40]!r}, which is no number") from None
            missing &= ~(1 << i)
        return numbers, missing

    def _ours(self, cell: Mapping[str, str], cells: Sequence[str], keys: Sequence[str], number: int) -> Row:
        numbers, missing = self._numbers(cells, number)
        key = tuple(cell[k] for k in keys)
        status = {"fail": "error", "crash": "error"}.get(cell.get("status", "").lower(), cell.get("status", "").lower())
        role = cell.get("role", "")
        return Row(
            key, tuple(c for k, c in zip(keys, key, strict=True) if k != "role"),
            role.startswith(("grad", "backward")), cell.get("op", ""), cell.get("class", ""), "", cell["dtype"],
            cell.get("shape", ""), status, cell.get("message", ""), _severity(cell), numbers, missing,
            (_real(cell.get("min_val", "")), _real(cell.get("max_val", ""))),
        )  # fmt: skip

    def _msprobe(self, cell: Mapping[str, str], cells: Sequence[str], number: int) -> Row:
        numbers, missing = self._numbers(cells, number)
        name = cell[self.keys[0]]
        call, _, output = name.partition(".forward")
        backward = not output and ".backward" in name
        if backward:
            call = name.partition(".backward")[0]
        parts = call.split(".")
        api = ".".join(parts[1:-1]) if len(parts) in (3, 4) else name
        if api == name:
            self.unparsed.append(name)
        return Row(
            (name,), (call,), backward, api, "", api, cell[_DTYPE].removeprefix("torch."), cell.get("Shape", ""),
            cell["Status"].lower(), cell.get("Message") or cell.get("message", ""), 0.0, numbers, missing,
        )  # fmt: skip


def _real(text: str) -> str:
    """``text`` where it is a number, else ""."""
    try:
        float(text)
    except ValueError:
        return ""
    return text


def _severity(cell: Mapping[str, str]) -> float:
    """measured / allowed of our own verdict, 0 where a csv has none."""
    try:
        measured, allowed = float(cell.get("measured") or 0.0), float(cell.get("allowed") or 1.0)
    except ValueError:
        return 0.0
    return measured / allowed if allowed else (float("inf") if measured else 0.0)


def _msprobe_columns(columns: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Where each measure lies, the other releases' and algorithms' names for it included."""
    found: dict[str, tuple[int, ...]] = {}
    for name, spellings in SPELLINGS.items():
        at = tuple(columns[s] for s in spellings if s in columns)
        for prefix in ("", "v1_", "acc_") if at else ():
            if prefix + name in Measures.FIELDS:
                found[prefix + name] = at
    return found


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
        self.message = self.skipped = ""
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
        self.message = self.message or row.message
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
            if not self.weights[i] or math.isnan(value):
                self.totals[i] = value
            elif not math.isnan(old):
                self.totals[i] = best(old, value)
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
            text = f"{self.failed} of {self.calls} calls: {self.message or 'no measures'}"
            return replace(first, shape="", status=ERROR, message=text, missing=ALL)
        numbers, missing = array("d", self.totals), 0
        for i, (rule, weight) in enumerate(zip(_RULES, self.weights, strict=True)):
            if not weight:
                missing |= 1 << i
            elif rule in (MEAN, SQUARE):
                value = self.totals[i] / weight
                numbers[i] = value if rule == MEAN else math.sqrt(value)
        status = worst(sorted(self.statuses)) if self.statuses - {""} else ""
        return replace(first, shape="", status=status, message=self.message, severity=self.severity, numbers=numbers,
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
        finding = self._unmeasured(golden, mine)
        if finding is None:
            names = (api, mine.op, mine.cls)
            algorithm = next((a for glob, a in self.algorithms if any(fnmatchcase(n, glob) for n in names if n)), None)
            finding = self.rule.rule(golden, mine, api, algorithm)
        if golden.dtype != mine.dtype and finding.status != SKIP:
            text = f"golden is {golden.dtype}, mine {mine.dtype}"
            joined = f"{finding.message}; {text}" if finding.message else text
            finding = RuleFinding(finding.status, finding.algorithm, joined, finding.judged)
        return Compared(golden, mine, api, self.rule.level(api), finding)

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
                text = f"{side} has no result: {row.message or row.status or 'no measures'}"
                if side == "mine" and row.status == ERROR and other.measured:
                    return RuleFinding(ERROR, "", text, (Judged("result", None, None, ERROR, text),))
                return skip("", text)
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


JUDGED = (
    *LABELS.values(), "inf_nan_err_ratio", "rel_err_ratio", "abs_err_ratio", "binary_err_ratio", "ulp_mean",
    "ulp_share", "ulp_share_ratio", "dual_1000", "error_balance",
)  # fmt: skip
"""Columns that details.csv has under every standard, some of which have more (MachineRule.columns)."""
FURTHER = ("max_abs_err", "cosine", "rel_l2", *DECADES)
STEP = 1000
"""Rows between two signs of progress."""


def identity(diff: Diff) -> tuple[str, ...]:
    """The columns in front: what identifies an output, then dtype and shape."""
    return (*(("api_name",) if is_msprobe(diff) else diff.keys), "dtype", "shape")


def write_details(
    diff: Diff, path: Path, totals: DiffTotals, done: Callable[[], object] = lambda: None,
    also: Callable[[Compared], object] = lambda compared: None,
) -> NoSpace | None:  # fmt: skip
    """A row for each output of either file; adds all to ``totals``. Whole or not at all; a full disk is returned, and
    ends the file alone. done: called every STEP rows; also: called with each. Raises OSError, SheetError."""
    numbers = tuple(dict.fromkeys((*JUDGED, *diff.rule.columns)))
    header = (
        *identity(diff), "api", "algorithm", "level", "status", "message",
        *(c for name in numbers for c in (name, f"{name}_status")),
        *(f"{side}_{name}" for name in FURTHER for side in ("golden", "mine")),
    )  # fmt: skip

    def cells() -> Iterator[list[object]]:
        for number, c in enumerate(diff.rows(), 1):
            totals.add(c)
            also(c)
            if not number % STEP:
                done()
            yield _details(c, numbers)

    file = GrowingCsv(path, path.with_name(path.name + ".part"))
    try:
        file.begin(header)
        for row in cells():
            file.add([row], flush=False)
        file.finish()
    finally:
        file.drop()
    return file.lost


def _details(c: Compared, names: Sequence[str]) -> list[object]:
    judged = {j.name: j for j in c.finding.judged}
    numbers: list[object] = []
    for name in names:
        found = judged.get(name)
        numbers += [found.value, found.status] if found else [None, None]
    sides = (c.golden, c.mine)
    further = [None if side is None else side.value(name) for name in FURTHER for side in sides]
    row = c.row
    cells = c.api, c.finding.algorithm, c.level, c.finding.status, c.finding.message
    return [_cell(v) for v in (*row.key, row.dtype, row.shape, *cells, *numbers, *further)]


def write_result(diff: Diff, path: Path, totals: DiffTotals) -> None:
    """A row for each call: its outputs' worst status, forward and backward. Raises OSError."""
    names = ("api_name",) if is_msprobe(diff) else tuple(k for k in diff.keys if k != "role")
    header = (*names, "api", "forward", "backward", "outputs", "algorithm", "message")
    write_csv_lines(path, header, (_result(key, call) for key, call in totals.calls.items()))


def _result(key: Sequence[str], call: CallStatuses) -> list[object]:
    outputs = len(call.forward) + len(call.backward)
    values = *key, call.api, *call.statuses, outputs, ", ".join(sorted(call.algorithms)), call.message
    return [_cell(v) for v in values]


def _cell(value: object) -> object:
    return plain_csv.inert(value) if isinstance(value, str) else value


def lines(diff: Diff, totals: DiffTotals, most: int | None = 10) -> list[str]:
    """For a terminal. most: how many outputs are shown; None: all that were kept."""
    out = [sentence(diff, totals)]
    shown = totals.worst_first()[:most]
    out += [f"  {c.finding.status:<7}  {_where(c, diff)}: {safe(c.finding.message)}" for c in shown]
    hidden = totals.statuses[ERROR] + totals.statuses[WARNING] - len(shown)
    if hidden > 0:
        out.append(f"  ... {hidden:,} more: details.csv has all" + ("" if most is None else ", --verbose shows more"))
    out += ["", f"{'operator':<36} {'outputs':>8} {'pass':>7} {'warning':>7} {'error':>7} {'skip':>7}"]
    for name, counts in operators(totals):
        numbers = [counts[s] for s in (PASS, WARNING, ERROR, SKIP)]
        out.append(f"{safe(name, 36):<36} {sum(numbers):>8} " + " ".join(f"{n:>7}" for n in numbers))
    if totals.algorithms:
        out += ["", "judged by: " + ", ".join(f"{name} {n:,}" for name, n in totals.algorithms.most_common())]
    for sheet in (diff.golden, diff.mine):
        if names := sheet.unparsed:
            where = f"names in {safe(str(sheet.path))} that cannot be parsed, each its own operator"
            out.append(f"{where}: {len(names):,}, the first {safe(names[0])!r}")
    return out + left_out(diff, totals)


def sentence(diff: Diff, totals: DiffTotals) -> str:
    """The first line."""
    paired = sum(totals.statuses.values())
    share = f"{totals.judged:,} of {paired:,} outputs judged by {diff.standard}"
    alone = sum(totals.alone.values())
    if alone:
        share += f" ({alone:,} more are in one file only)"
    errors, warnings = totals.statuses[ERROR], totals.statuses[WARNING]
    more = f", {warnings:,} {'warning' if warnings == 1 else 'warnings'}" if warnings else ""
    if not errors:
        return f"PASS: {share}, none is wrong beside golden{more}"
    first = totals.worst_first()[0]
    wrong = sum(1 for counts in totals.operators.values() if counts[ERROR])
    where = f"{wrong} {'operator' if wrong == 1 else 'operators'}"
    return f"FAIL: {share}, {errors:,} wrong in {where}{more}, worst {_where(first, diff)}"


def operators(totals: DiffTotals) -> list[tuple[str, dict[str, int]]]:
    """Those with the most errors first, then warnings, then the most outputs."""

    def weight(item: tuple[str, dict[str, int]]) -> tuple[int, int, int, str]:
        name, counts = item
        return -counts[ERROR], -counts[WARNING], -sum(counts.values()), name

    return sorted(((name, dict.fromkeys((PASS, WARNING, ERROR, SKIP), 0) | dict(c)) for name, c in
                   totals.operators.items()), key=weight)  # fmt: skip


def left_out(diff: Diff, totals: DiffTotals) -> list[str]:
    """Everything that was not judged, counted."""
    out = [f"  {n:>7}  outputs: {safe(why)}" for why, n in totals.skipped.most_common()]
    for side, sheet in (("golden", diff.golden), ("mine", diff.mine)):
        if totals.alone[side]:
            out.append(f"  {totals.alone[side]:>7}  outputs: only in {safe(str(sheet.path))} ({side})")
    apart = totals.skipped[SHAPES] + sum(totals.alone.values())
    if diff.by == CALL and diff.golden.kind == OURS and apart > totals.judged:
        out.append("  few calls meet; did the runs batch differently? --by tap judges a module's calls together")
    return ["", "not judged:", *out] if out else []


def markdown(diff: Diff, totals: DiffTotals) -> str:
    """opdiff.md: what is wrong, by output and by operator, and what was not judged."""
    out = [f"# {sentence(diff, totals)}", "", f"Golden: `{diff.golden.path}`; mine: `{diff.mine.path}`.", ""]
    shown = totals.worst_first()
    if shown:
        out += [
            "| status | output | dtype | shape | algorithm | beyond | why |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for c in shown:
            beyond = f"{c.finding.severity:.3g}x" if math.isfinite(c.finding.severity) else "must be 0"
            f = c.finding
            cells = f.status, _where(c, diff), c.row.dtype, c.row.shape, f.algorithm, beyond, f.message
            out.append("| " + " | ".join(_md(x) for x in cells) + " |")
        hidden = totals.statuses[ERROR] + totals.statuses[WARNING] - len(shown)
        out += (["", f"{hidden:,} more are in details.csv."] if hidden > 0 else []) + [""]
    out += ["| operator | outputs | pass | warning | error | skip |", "| --- | --- | --- | --- | --- | --- |"]
    for name, counts in operators(totals):
        numbers = [counts[s] for s in (PASS, WARNING, ERROR, SKIP)]
        out.append(f"| {_md(name)} | {sum(numbers)} | " + " | ".join(map(str, numbers)) + " |")
    rest = left_out(diff, totals)
    if rest:
        out += ["", "Not judged:", "", *(f"- {_md(' '.join(line.split()))}" for line in rest[2:])]
    return "\n".join(out) + "\n"


def _where(c: Compared, diff: Diff) -> str:
    row = c.row
    if row.api:
        return safe(row.key[0])
    named = dict(zip(diff.keys, row.key, strict=True))
    front = [row.op or row.cls, *(named[k] for k in ("tap", "role") if named.get(k) and named[k] != row.op)]
    behind = [f"{k} {named[k]}" for k in ("rank", "step", "call") if named.get(k)]
    return safe(" ".join(front) + (f" ({', '.join(behind)})" if behind else ""))


def _md(text: str) -> str:
    return safe(text).replace("|", "\\|").replace("<", "&lt;")


def safe(text: str, most: int = 240) -> str:
    """Printable, in one line, not endless: names come from files."""
    return plain_csv.safe(" ".join(text.split()), most)
