"""The csv files that two machines leave: our opcheck.csv, a generated test's details, msprobe's own details.

The problem: three writers, two languages of headers, hundreds of thousands of rows. The idea: a `Sheet` knows from the
header which writer it was and gives `Row`s one at a time: what identifies the output, and its measures by the names of
measures.Measures. msprobe's measures depend on the release that wrote them, so they stand for every release's here.
Sources of msprobe's columns: its two documents and the header that release 26.2 writes.
Not here: how two sheets are joined (verdicts.py).
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_accprobe.standards.measures import Measures

OURS, MSPROBE = "accprobe", "msprobe"
IDENTITY = ("op", "class", "tap", "rank", "step", "call", "role")
"""Columns of ours that say which output a row is about; the last one tells outputs of a call apart."""
_API, _DTYPE = "API Name", "DEVICE Dtype"
_MSPROBE: dict[str, tuple[str, ...]] = {
    "cosine": ("余弦相似度", "Cosine similarity"),
    "max_abs_err": ("最大绝对误差", "Maximum absolute error"),
    "dual_100": ("双百指标", "Dual-100 metric"),
    "dual_1000": ("双千指标", "Dual-1000 metric"),
    "dual_10000": ("双万指标", "Dual-10000 metric"),
    "binary_err_ratio": ("二进制一致错误率", "Binary consistency error rate"),
    "error_balance": ("误差均衡性", "Error balance"),
    "normal_rmse": ("均方根误差", "Root-mean-square error (RMSE)"),
    "small_value_err_ratio": ("小值域错误占比", "Error ratio in small value range"),
    "normal_max_rel_err": ("相对误差最大值", "Maximum relative error"),
    "normal_mean_rel_err": ("相对误差平均值", "Mean relative error"),
    "inf_nan_err_ratio": ("inf/nan错误率", "inf/nan error rate"),
    "rel_err_ratio": ("相对误差错误率", "Relative error rate"),
    "abs_err_ratio": ("绝对误差错误率", "Absolute error rate"),
    "ulp_max": ("ULP误差最大值", "Maximum ULP error"),
    "ulp_mean": ("ULP误差平均值", "Mean ULP error"),
    "ulp_share": ("ULP误差大于阈值占比", "Proportion of ULP errors greater than the threshold"),
}
_AT = {name: i for i, name in enumerate(Measures.FIELDS)}
ALL = (1 << len(Measures.FIELDS)) - 1
"""A row's ``missing`` where nothing was measured."""
_NOTHING = bytes(8 * len(Measures.FIELDS))
_READ = ("status", "message", "measured", "allowed", "dtype", "shape", "DEVICE Dtype", "Shape", "Status", "Message",
         "min_val", "max_val")  # fmt: skip
_LONGEST = 1 << 20
"""Characters of one cell; longer ones are no csv of ours or msprobe's."""


_IN_FOLDERS = ("opcheck.csv", "accuracy_checking_details_*.csv", "*.csv")


class SheetError(ValueError):
    """One line: which file, where, what is wrong, what to do."""


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
    """One csv file. kind: OURS or MSPROBE; keys: the columns that identify a row, of ours."""

    def __init__(self, path: Path):
        self.path = path
        self._columns = self._header()
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
        width = len(self._columns)
        lines = self._lines()
        next(lines, None)  # the header
        for number, cells in lines:
            if len(cells) != width:
                raise SheetError(f"{self.path}: line {number} has {len(cells)} cells instead of {width}; is it whole?")
            cell = {name: cells[i].strip() for name, i in self._read}
            yield self._msprobe(cell, cells, number) if self.kind == MSPROBE else self._ours(cell, cells, keys, number)

    def count(self) -> int:
        """About how many rows there are."""
        with self.path.open("rb") as f:
            return sum(block.count(b"\n") for block in iter(lambda: f.read(1 << 20), b""))

    def _header(self) -> dict[str, int]:
        for _, cells in self._lines():
            names = [c.strip() for c in cells]
            double = next((n for n in names if n and names.count(n) > 1), None)
            if double:
                raise SheetError(f"{self.path}: two columns are called {double!r}")
            return {n: i for i, n in enumerate(names)}
        raise SheetError(f"{self.path}: the file is empty")

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        old = csv.field_size_limit(_LONGEST)
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as f:
                reader = csv.reader(f)
                header = True
                while True:
                    try:
                        cells = next(reader)
                    except StopIteration:
                        return
                    if cells:
                        yield (reader.line_num, cells)
                    elif header:
                        raise SheetError(f"{self.path}: the first line is empty; a header is needed")
                    header = False
        except UnicodeDecodeError as e:
            raise SheetError(f"{self.path}: not UTF-8 text (byte {e.start}): is this a csv file?") from None
        except csv.Error as e:
            raise SheetError(f"{self.path}: line {reader.line_num} is no csv: {e}") from None
        finally:
            csv.field_size_limit(old)

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
    for name, spellings in _MSPROBE.items():
        at = tuple(columns[s] for s in spellings if s in columns)
        for prefix in ("", "v1_", "acc_") if at else ():
            if prefix + name in Measures.FIELDS:
                found[prefix + name] = at
    return found
