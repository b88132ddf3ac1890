"""msprobe's own files of a pre-check, from ours: accuracy_checking_result_<time>.csv and ..._details_<time>.csv.

The problem: msprobe's second stage, and people's scripts, read these two files by name and header. The idea: rows of
opcheck.csv, in msprobe's columns and words, one for each output, and one for each call of its worst. A call that
msprobe recorded keeps its name; another gets one of the same form, ``<where>.<API>.<n>``, and its place in the message.
What release 26.2 reads decides two things: an empty cell is one space, and of a float16, bfloat16 or float32 output
``相对误差错误率`` stays empty, because its second stage takes a number there for an 8-bit input. MindSpore's files have
columns of their own. Sources: the documents' tables and the headers that 26.2 writes. Not here: the second stage's
files (compare_csv.py), reading (diff/csv_rows.py).
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.opcheck.plain_csv import write_rows
from vllm_accprobe.standards.msprobe_apis import api_of

RESULT = ("API name", "Forward Test Success", "Backward Test Success", "Message")
_LABELS = {
    "cosine": "余弦相似度", "max_abs_err": "最大绝对误差", "dual_100": "双百指标", "dual_1000": "双千指标",
    "dual_10000": "双万指标", "binary_err_ratio": "二进制一致错误率", "error_balance": "误差均衡性",
    "normal_rmse": "均方根误差", "small_value_err_ratio": "小值域错误占比", "normal_max_rel_err": "相对误差最大值",
    "normal_mean_rel_err": "相对误差平均值", "inf_nan_err_ratio": "inf/nan错误率", "rel_err_ratio": "相对误差错误率",
    "abs_err_ratio": "绝对误差错误率", "ulp_max": "ULP误差最大值", "ulp_mean": "ULP误差平均值",
    "ulp_share": "ULP误差大于阈值占比",
}  # fmt: skip
DETAILS = ("API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *_LABELS.values(), "Status", "Message")
_MINDSPORE = {"cosine": "Cosine", "max_abs_err": "MaxAbsErr", "max_rel_err": "MaxRelativeErr"}
MINDSPORE_RESULT = ("API Name", *RESULT[1:])
MINDSPORE_DETAILS = ("API Name", "Bench Dtype", "Tested Dtype", "Shape", *_MINDSPORE.values(), "Status", "Message")
EMPTY = " "
"""msprobe's cell that holds nothing; its readers ask for a string of spaces."""
_STATUS = {"pass": "pass", "warning": "warning", "fail": "error", "error": "error", "skip": "SKIP"}
_WORST = ("error", "warning", "pass")
_FLOATS = ("float16", "bfloat16", "float32")
_NAMED = re.compile(r"(.+\.\d+)\.(?:forward|backward)\b")
_STAMP = re.compile(r"accuracy_checking_result_(\d{14})\.csv", re.ASCII)
_ODD = re.compile(r"[^A-Za-z0-9_]")
Call = tuple[str, str, str, str]
"""Rank, step, tap, ordinal, as the csv has them."""


def stamp_of(path: Path) -> str | None:
    """The time in the name of a result file; None where the name is none of msprobe's."""
    match = _STAMP.fullmatch(path.name)
    return match[1] if match else None


def paths(out: Path, stamp: str) -> tuple[Path, Path]:
    """The result file and the details file of one check."""
    return out / f"accuracy_checking_result_{stamp}.csv", out / f"accuracy_checking_details_{stamp}.csv"


def recorded_names(records: Iterable[Any]) -> dict[Call, str]:
    """The names that msprobe gave to calls, from a dump's records."""
    found: dict[Call, str] = {}
    for r in records:
        if match := _NAMED.match(r.name):
            found[str(r.rank), "" if r.step is None else str(r.step), r.tap, str(r.call)] = match[1]
    return found


def begin(out: Path, stamp: str, mindspore: bool) -> list[Path]:
    """Both files with their headers alone, so that an interrupted check can be named and gone on with; those that were
    not there. Raises OSError."""
    result, details = paths(out, stamp)
    made = []
    for path, header in ((result, _result_header(mindspore)), (details, _details_header(mindspore))):
        if not path.exists():
            write_rows(path, header, ())
            made.append(path)
    return made


def write(table: Path, out: Path, stamp: str, names: Mapping[Call, str], digits: int, mindspore: bool) -> None:
    """Both files from opcheck.csv. digits: decimal places. Raises OSError."""
    named = _Names(names)
    result, details = paths(out, stamp)
    calls: dict[str, _CallWords] = {}
    with table.open(encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            if row["step"] == "":
                continue  # a stored parameter is no call
            name, backward = named.of(row)
            call = calls.setdefault(name, _CallWords())
            status = _STATUS.get(row["status"], "error")
            way = call.backward if backward else call.forward
            if status != "pass" and row["message"]:
                call.messages.append(row["message"])
            full = f"{name}.{'backward' if backward else 'forward'}.output.{len(way)}"
            way.append((status, _details(full, row, status, digits, mindspore)))
    # msprobe's second stage takes all rows of a call from one place, its gradients behind it
    write_rows(details, _details_header(mindspore), (r for c in calls.values() for _, r in (*c.forward, *c.backward)))
    lines = ([name, _worst(c.forward), _worst(c.backward), "; ".join(dict.fromkeys(c.messages))[:1000]]
             for name, c in calls.items())  # fmt: skip
    write_rows(result, _result_header(mindspore), lines)


class _CallWords:
    """The status and the row of each of a call's outputs, and what was said of those that did not pass."""

    def __init__(self) -> None:
        self.forward: list[tuple[str, list[str]]] = []
        self.backward: list[tuple[str, list[str]]] = []
        self.messages: list[str] = []


class _Names:
    """A name of msprobe's form for each call, the same for all its rows."""

    def __init__(self, recorded: Mapping[Call, str]):
        self._recorded = recorded
        self._given: dict[Call, str] = {}
        self._count: Counter[str] = Counter()

    def of(self, row: Mapping[str, str]) -> tuple[str, bool]:
        """(name, whether it is of gradients)."""
        backward = row["role"].startswith("grad") or row["tap"].startswith("backward.")
        call = row["rank"], row["step"], row["tap"], row["call"]
        if call in self._recorded:
            return self._recorded[call], backward
        if call not in self._given:
            op = row["op"]
            kind = "Aten" if op.startswith("aten.") else "NPU" if ".npu" in op or op.startswith("npu.") else "Module"
            kind = "Torch" if "." in op and kind == "Module" else kind
            base = f"{kind}.{_ODD.sub('_', api_of(op)) or 'call'}"
            self._given[call] = f"{base}.{self._count[base]}"
            self._count[base] += 1
        return self._given[call], backward


def _details(name: str, row: Mapping[str, str], status: str, digits: int, mindspore: bool) -> list[str]:
    dtype = f"torch.{row['dtype']}" if row["dtype"] else EMPTY
    bench = "torch.float64" if "float" in row["dtype"] else dtype
    shape = f"({row['shape'].strip('[]')}{',' * (row['shape'].count(',') == 0 and row['shape'] != '[]')})"
    measured = row["elements"] != ""
    labels = _MINDSPORE if mindspore else _LABELS
    cells = []
    for measure in labels:
        text = row.get(measure, "")
        left = measure == "rel_err_ratio" and row["dtype"] in _FLOATS
        left = left or (not mindspore and "float" not in row["dtype"] and measure != "binary_err_ratio")
        cells.append(EMPTY if left or not measured or text == "" else f"{float(text):.{digits}f}")
    said = f"{row['tap']}, step {row['step']}" + (f": {row['message']}" if row["message"] else "")
    return [name, bench, dtype, shape if measured else EMPTY, *cells, status, said]


def _worst(rows: Sequence[tuple[str, list[str]]]) -> str:
    statuses = [status for status, _ in rows]
    if not statuses:
        return EMPTY
    return next((s for s in _WORST if s in statuses), "SKIP")


def _result_header(mindspore: bool) -> tuple[str, ...]:
    return MINDSPORE_RESULT if mindspore else RESULT


def _details_header(mindspore: bool) -> tuple[str, ...]:
    return MINDSPORE_DETAILS if mindspore else DETAILS
