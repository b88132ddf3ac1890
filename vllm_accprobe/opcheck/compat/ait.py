"""ait's operator check: its options, which operators are meant, and its table.

The problem: scripts say ``-i``, ``-ids 24_1,2_3_5``, ``-opname self,linear``, ``-metric abs kl`` and read
``opcheck_result.csv``, whose columns are shares of elements within a tolerance by dtype. The idea: ``24_1`` is the
second operator of node 24 and all that runs inside; ``self`` is every type that begins with it, in any case; the table
is written from opcheck.csv and the dump, in the columns of the first release's documents and ``fail_reason`` of later
ones. ``excuted_information`` follows the standard; what has no verdict is ``addition failed``. Needs no torch.
Elsewhere: the options' spelling (cli/opcheck.py), the measures (opcheck/measures.py).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from vllm_accprobe.formats.atb import AtbDump, id_of
from vllm_accprobe.kernels.formulas import TINY
from vllm_accprobe.opcheck.compat import CompatError
from vllm_accprobe.opcheck.plain_csv import escaped, inert
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, SKIP
from vllm_accprobe.standards.ait import SHARES
from vllm_accprobe.standards.dtype_limits import AIT
from vllm_accprobe.whole_file import write_csv_lines


@dataclass(frozen=True)
class AitWords:
    """dump: None where none is named; table: of operators; ops: words and globs; calls: rank.step.seq; operations:
    ids as ait has them; metrics: of op_csv.METRICS; atb: whether the dump is one of ATB's; notes: for the user."""

    dump: Path | None
    table: Path | None
    ops: tuple[str, ...]
    calls: str
    operations: tuple[str, ...]
    metrics: tuple[str, ...]
    atb: bool
    notes: tuple[str, ...] = ()

    @property
    def kl(self) -> bool:
        return "kl" in self.metrics

    def job(self) -> dict[str, Any]:
        """The fields of job.Job that these words fill."""
        table = str(self.table.resolve()) if self.table else ""
        return {"operations": self.operations, "op_csv": table, "within": "abs" in self.metrics}


def read(checking: Any, own: Any) -> AitWords:
    """The options, read together: cli/opcheck.OpcheckOptions and AitOptions. Raises CompatError."""
    from vllm_accprobe.formats import atb

    dump, same, table = checking.dump, own.same, own.table
    if dump is not None and same is not None and dump != same:
        raise CompatError(f"--input: {same}, and {dump} is named as well: choose one")
    dump = dump if dump is not None else same
    is_atb = dump is not None and dump.is_dir() and atb.recognise(dump)
    words = tuple(w for text in checking.ops for part in text.replace("\uff0c", ",").split(",") if (w := part.strip()))
    listed = [part.strip() for part in checking.ids.replace("\uff0c", ",").split(",") if part.strip()]
    operations = tuple(i for i in listed if is_id(i))
    chosen = _metrics(own.metric)
    used_words = [
        ("--csv-path", table is not None),
        ("-metric", bool(chosen)),
        (f"-ids {','.join(operations)}", operations),
    ]
    for name, used in () if is_atb else used_words:
        if used:
            raise CompatError(f"{name} belongs to dumps of ATB, and {dump or 'what is checked'} is none")
    if is_atb and checking.rerun:
        raise CompatError(
            "--rerun: ATB's operators run on an Ascend card with CANN and ATB only: leave it out, and the dump's own "
            "outputs are checked"
        )
    if table is not None and not table.is_file():
        raise CompatError(f"--csv-path: {table} is no file: name ATB's operation_tensors_N.csv")
    notes: tuple[str, ...] = ()
    if own.card is not None:
        notes = (f"-device {own.card}: no card is used, references are computed on the CPU",)
    calls = ",".join(i for i in listed if not is_id(i))
    return AitWords(dump, table, words, calls, operations, chosen, is_atb, notes)


def write_table(words: AitWords, out: Path) -> list[Path]:
    """ait's table next to opcheck.csv, where the dump is one of ATB's: the files that were written."""
    if not words.atb or words.dump is None:
        return []
    from vllm_accprobe.formats import atb

    opened = atb.open(words.dump)  # once more, for its names and parameters
    if words.table is not None:
        opened.parameters.add_table(words.table)
    write(out / FILE, out / "opcheck.csv", opened, words.metrics)
    return [out / FILE]


def _metrics(texts: Sequence[str]) -> tuple[str, ...]:
    words = [w for text in texts for w in text.replace(",", " ").split()]
    if unknown := [w for w in words if w not in METRICS]:
        raise CompatError(f"-metric: {unknown[0]!r} is none of {', '.join(METRICS)}")
    return tuple(m for m in METRICS if m in words)


_WORD = re.compile(r"(!?)([A-Za-z0-9_]+)", re.ASCII)
_ID = re.compile(r"\d{1,9}(_\d{1,9})*", re.ASCII)


def globs_of(words: Iterable[str]) -> tuple[str, ...]:
    """Globs, a plain word as all that begins with it, in any case."""
    return tuple(_begins(word) for word in words)


def _begins(word: str) -> str:
    match = _WORD.fullmatch(word)
    if match is None:
        return word
    return match[1] + "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in match[2]) + "*"


def is_id(text: str) -> bool:
    """Whether ``text`` is an operator's id as ait writes it."""
    return _ID.fullmatch(text) is not None


def has_id(tap: str, ids: Iterable[str]) -> bool:
    """Whether a tap is one of these operators, or inside of one."""
    own = id_of(tap)
    return any(own == i or own.startswith(f"{i}_") for i in ids)


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
    """Of the table, with those that ``-metric`` requires."""
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
    """Writes the table next to opcheck.csv, whole or not at all. Raises OSError, ValueError."""
    write_csv_lines(path, columns(metrics), _rows(opcheck_csv, dump, metrics))


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
