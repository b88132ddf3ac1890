"""ait's table of a check: a row for each output of each ATB operator, in the columns of its documents.

The problem: scripts read ``opcheck_result``, and its columns say less than opcheck.csv and other things: shares of
elements within a tolerance by dtype. The idea: the same run written a second time, from opcheck.csv and the dump that
was checked. Columns are those of the first release's documents and ``fail_reason`` of later ones;
``excuted_information`` follows the standard that was asked for, and what has no verdict is ``addition failed``, as ait
calls what it does not know. Needs no torch. Not here: the measures (opcheck/measures.py), what ait's own verdict is
(standards/ait.py).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from vllm_accprobe.formats.atb import AtbDump
from vllm_accprobe.formats.common.atb_params import id_of
from vllm_accprobe.kernels.formulas import TINY
from vllm_accprobe.opcheck.plain_csv import escaped, inert, write_rows
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, SKIP
from vllm_accprobe.standards.ait import SHARES
from vllm_accprobe.standards.dtype_limits import AIT

FILE = "opcheck_result.csv"
ABS, COSINE, KL = METRICS = ("abs", "cos_sim", "kl")
_MORE = {ABS: ("abs_precision_result(%)", "max_abs_error"), COSINE: ("cosine_similarity",), KL: ("kl_divergence",)}
FIRST = ("op_id", "op_name", "op_param", "tensor_path", "out_tensor_id", "precision_standard", "excuted_information",
         "precision_result(%)", "max_rel_error")  # fmt: skip
_SAID = {FAIL: "execution failed", ERROR: "execution failed", SKIP: "addition failed"}
_NONE = "NaN"
WITHIN = "abs_share="
"""Before the share in opcheck.csv's column algorithm."""
_SHARE = re.compile(re.escape(WITHIN) + r"([0-9.e+-]+)", re.ASCII)


def columns(metrics: Sequence[str]) -> tuple[str, ...]:
    """Of the table, with those that ``-metric`` asks for."""
    return (*FIRST, *(c for m in METRICS if m in metrics for c in _MORE[m]), "fail_reason")


def abs_share(reference: Any, mine: Any, dtype: str) -> float | None:
    """The share of elements whose absolute error is within ait's tolerance of ``dtype``; where the reference is nearly
    0 ait counts no error. Tensors float64 or integers; None where there are no elements, NaN is never within."""
    g, m = reference.reshape(-1).double(), mine.reshape(-1).double()
    if not g.numel():
        return None
    good = ((m - g).abs() <= AIT.get(dtype, AIT["float16"])) | (g == m) | ((g.abs() <= TINY) & (m == m))
    return int(good.sum()) / g.numel()


def write(path: Path, opcheck_csv: Path, dump: AtbDump, metrics: Sequence[str]) -> None:
    """Writes the table beside opcheck.csv, whole or not at all. Raises OSError, ValueError."""
    write_rows(path, columns(metrics), _rows(opcheck_csv, dump, metrics))


def _rows(path: Path, dump: AtbDump, metrics: Sequence[str]) -> Iterator[list[object]]:
    labels = {(r.rank, r.step, r.tap, r.role): r for r in dump.records}
    taps: dict[tuple[int, int | None, str], Any] = {}
    for r in dump.records:
        taps.setdefault((r.rank, r.step, r.tap), r)
    with path.open(encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            place = int(row["rank"]), int(row["step"]) if row["step"] else None, row["tap"]
            record = labels.get((*place, row["role"]), taps.get(place))
            param = dump.parameters.of(place[0], place[1], row["tap"]) if place[1] is not None else None
            yield [_plain(v) for v in _row(row, _folder(record), param, metrics)]


def _folder(record: Any) -> str:
    """The operator's, as the dump has it."""
    return str(Path(record.label).parent.parent) if record is not None else ""


def _row(row: Mapping[str, str], folder: str, param: Any, metrics: Sequence[str]) -> Iterator[object]:
    dtype, measured = row["dtype"], row["status"] != SKIP and bool(row["elements"])
    role, _, number = row["role"].rpartition(".")
    yield id_of(row["tap"])
    yield row["class"]
    yield orjson.dumps(dict(param)).decode() if param is not None else ""
    yield folder
    yield _NONE if not role else number if role == "output" else f"intensor{number}"
    tolerance = AIT.get(dtype, AIT["float16"])
    yield f"{100 * SHARES.get(dtype, SHARES['float16']):g}%(error<{tolerance:g})" if measured else _NONE
    yield _SAID.get(row["status"], "execution successful")
    yield _percent(row["ait_share"]) if measured else _NONE
    yield row["max_rel_err"] or _NONE
    more = {ABS: (_percent(_within(row["algorithm"])), row["max_abs_err"]), COSINE: (row["cosine"],), KL: (row["kl"],)}
    for metric in METRICS:
        if metric in metrics:
            yield from (value or _NONE for value in more[metric])
    yield row["message"]


def _within(text: str) -> str:
    match = _SHARE.search(text)
    return match[1] if match else ""


def _percent(share: str) -> str:
    return f"{100 * float(share):.9g}" if share else _NONE


def _plain(value: object) -> object:
    return inert(escaped(value)) if isinstance(value, str) and value != _NONE else value
