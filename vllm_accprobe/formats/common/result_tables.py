"""Other tools' tables of results, which people bring in place of a dump: what each is, and what it says.

The problem: msprobe's compare_result and acc_check and SGLang's comparator have judged already, in files without a
tensor, and people ask what such a file says and how to go on. The idea: one table of kinds (`KINDS`): the columns that
one is known by, where the names, the verdicts and the reasons are. Rows are read one at a time from csv, xlsx or
jsonl; counted are the verdicts as they are written, rows that had no partner, and names that are not of the tool's
form; kept are the first rows that are bad, in the file's order, which is the order of execution.

Files may be hostile: an xlsx is unpacked in pieces up to a limit, and XML with a document type (entities) is refused.
Not here: two tables of one machine each (opcheck/diff), how lines are printed (cli/compare_other).
"""

from __future__ import annotations

import csv
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers import expat

from vllm_accprobe.dump.decode import object_at, value_at
from vllm_accprobe.dump.files import DumpError, bounded_lines
from vllm_accprobe.formats.common import sglang_logs
from vllm_accprobe.formats.msprobe import place_of

Columns = dict[str, str]


class SheetError(DumpError):
    """One line: which file, where, what is wrong, what to do."""


BAD = frozenset({"error", "fail", "failed", "errored", "no", "false", "different", "❌", "shape mismatch"})
DOUBTFUL = frozenset({"warning", "unmatched"})
GOOD = frozenset({"pass", "passed", "yes", "true", "✅"})
"""Verdicts, in small letters; true and false are earlier acc_checks'. Any other word is none: SKIP, N/A, an empty
cell."""
_RECORD = re.compile(r"(.+\.(?:forward|backward)(?:\.\d+)?|.+\.parameters_grad)\.(\w+(?:\..+)?)")


def msprobe_place(name: str) -> tuple[str, str] | None:
    """(tap, role) of a tensor's or an API's name, e.g. ``Functional.linear.3.forward.output.0``; None for another
    name."""
    found = _RECORD.fullmatch(name)
    place = place_of(found[1] if found else f"{name}.forward", {})
    return (place.tap, found[2] if found else "") if place.cls else None


@dataclass(frozen=True)
class ResultKind:
    """needs: columns that one has; what: its name; then: what to do next. names, verdicts, message, values: columns,
    of which a release may lack some; partner: the column of the other side's name; place: reads a name."""

    needs: frozenset[str]
    what: str
    then: str
    names: tuple[str, ...]
    verdicts: tuple[str, ...]
    message: str
    values: tuple[str, ...] = ()
    partner: str = ""
    place: Callable[[str], tuple[str, str] | None] | None = None


_TESTS = ("Forward Test Success", "Backward Test Success")
KINDS = (
    ResultKind(frozenset({"NPU Name", "Bench Name", "NPU Tensor Shape"}), "msprobe's compare_result",
               "the dumps themselves are compared by `accprobe compare BENCH_DUMP NPU_DUMP`",
               ("NPU Name",), ("Result", "Accuracy Reached or Not"), "Err_message",
               ("Cosine", "MaxAbsErr", "One Thousandth Err Ratio", "Max diff", "NormRelativeErr", "NPU MD5",
                "BENCH MD5"), "Bench Name", msprobe_place),
    ResultKind(frozenset(_TESTS), "a result of msprobe's acc_check or api_precision_compare",
               "two machines' accuracy_checking_details_*.csv are compared by `accprobe compare GPU.csv NPU.csv`",
               ("API Name", "API name"), _TESTS, "Message", place=msprobe_place),
    ResultKind(frozenset({"API Name", "比对结果", "比对算法"}), "msprobe's api_precision_compare_details",
               "two machines' accuracy_checking_details_*.csv are compared by `accprobe compare GPU.csv NPU.csv`",
               ("API Name",), ("比对结果",), "Message", ("比对算法",), place=msprobe_place),
    ResultKind(frozenset({"Bench Dtype", "Shape", "Status", "Message"}), "msprobe's accuracy_checking_details",
               "two machines' are compared by `accprobe compare GPU.csv NPU.csv`", ("API Name", "API name"),
               ("Status",), "Message", ("余弦相似度", "Cosine similarity", "Cosine", "最大绝对误差",
                "Maximum absolute error", "MaxAbsErr"), place=msprobe_place),
    ResultKind(frozenset({"golden", "mine", "dtype_golden", "dtype_mine"}), "a compare.csv of accprobe",
               "the comparison in its folder is judged again by `accprobe compare --rejudge DIR`", ("mine",),
               ("status",), "message", ("cosine", "max_abs_err", "rel_l2")),
    ResultKind(frozenset({"op", "tap", "role", "dtype", "status", "max_abs_err"}), "an opcheck.csv of accprobe",
               "two machines' are compared by `accprobe compare GOLDEN.csv MINE.csv`", ("tap",), ("status",), "message",
               ("op", "role", "max_abs_err")),
    ResultKind(frozenset({"type=config"}), "a report of SGLang's comparator",
               "the dumps themselves are compared by `accprobe compare BASELINE_DUMP TARGET_DUMP`",
               ("name",), ("category",), "reason", ("step", "rel_diff", "max_abs_diff", "mean_abs_diff")),
    ResultKind(frozenset({sglang_logs.COMPARATOR}), "a log of SGLang's comparator",
               "every row's name is in TARGET_DUMP/comparator_report.jsonl; the dumps themselves are compared by "
               "`accprobe compare BASELINE_DUMP TARGET_DUMP`",
               ("name",), ("category",), "reason", ("step", "rel_diff", "max_abs_diff", "mean_abs_diff")),
    ResultKind(frozenset({sglang_logs.DUMP_COMPARATOR}), "a log of SGLang's dump_comparator",
               "the dumps themselves are compared by `accprobe compare BASELINE_DUMP TARGET_DUMP`", ("name",),
               ("rel_diff mark", "max_abs_diff mark", "mean_abs_diff mark"), "reason",
               ("step", "rel_diff", "max_abs_diff", "mean_abs_diff")),
)  # fmt: skip
_HEAD = 1 << 16
_CELL = 1 << 20
"""Characters of a cell, at most."""
_TEXTS, _SHEET = 1 << 28, 1 << 31
"""Bytes of an xlsx's list of texts and of its sheet, unpacked, at most. The sheet is not kept."""
_NO_BOOK = (expat.ExpatError, zipfile.BadZipFile, zlib.error, EOFError, LookupError, RuntimeError, ValueError)


def kind_of(columns: Iterable[str]) -> ResultKind | None:
    """What a table with these columns is."""
    there = frozenset(columns)
    return next((kind for kind in KINDS if kind.needs <= there), None)


def header_of(path: Path) -> list[str]:
    """The columns of a csv or xlsx, the keys and the type of a jsonl's first line, what kind of log a text is; none of
    another file."""
    if not path.is_file():
        return []
    try:
        if path.suffix in sglang_logs.SUFFIXES:
            return [*filter(None, [sglang_logs.kind_of_log(path)])]
        if path.suffix != ".jsonl":
            return next(lines_of(path, "replace"))[1] if path.suffix in (".csv", ".xlsx") else []
        with path.open("rb") as f:
            first = json.loads(f.readline(_HEAD))
        return [*first, f"type={first.get('type')}"] if isinstance(first, dict) else []
    except (OSError, DumpError, ValueError, RecursionError):
        return []


def lines_of(path: Path, errors: str = "strict") -> Iterator[tuple[int, list[str]]]:
    """(number, cells) of the lines of an xlsx or csv, all as wide as the first one. errors: of decoding. Raises
    OSError, SheetError."""
    old, width = csv.field_size_limit(_CELL), 0
    try:
        with path.open(encoding="utf-8-sig", errors=errors, newline="") as f:
            reader = csv.reader(f)
            for number, cells in enumerate(_sheet(path) if path.suffix == ".xlsx" else reader, 1):
                number = reader.line_num or number  # a cell may have several lines
                if not width and not cells:
                    raise SheetError(f"{path}: the first line is empty; a header is needed")
                width = width or len(cells)
                if len(cells) == width:
                    yield number, cells
                elif cells:
                    what = f"line {number} has {len(cells)} cells instead of {width}"
                    raise SheetError(f"{path}: {what}; is it whole?")
        if not width:
            raise SheetError(f"{path}: the file is empty")
    except UnicodeDecodeError as e:
        raise SheetError(f"{path}: not UTF-8 text (byte {e.start}): is this a csv file?") from None
    except csv.Error as e:
        raise SheetError(f"{path}: line {reader.line_num} is no csv: {e}") from None
    except _NO_BOOK as e:
        raise SheetError(f"{path} is no xlsx that can be read: {str(e)[:120]}") from None
    finally:
        csv.field_size_limit(old)


def _sheet(path: Path) -> Iterator[list[str]]:
    """The lines of an xlsx's first sheet [ECMA-376-1, 18.3.1.4, 18.4.9]."""
    with zipfile.ZipFile(path) as book:
        names, texts = book.namelist(), "xl/sharedStrings.xml"
        shared = [cells[0][2] for cells in _elements(book, texts, "si", _TEXTS)] if texts in names else []
        sheet = min((n for n in names if n.startswith("xl/worksheets/") and n.endswith(".xml")), default=texts)
        width = 1 << 14
        for cells in _elements(book, sheet, "row", _SHEET):
            line: list[str] = []
            for reference, kind, text in cells:
                at = 0
                for letter in reference.rstrip("0123456789")[:4]:  # AB12 is in column 27
                    at = at * 26 + ord(letter) - 64
                line += [""] * (min(at, width + 1) - 1 - len(line))
                line.append(shared[int(text)] if kind == "s" else text)
            if len(line) > width:
                raise ValueError(f"a row has more than {width:,} cells")
            width = len(line) if width == 1 << 14 else width
            yield line + [""] * (width - len(line))


def _elements(book: zipfile.ZipFile, name: str, outer: str, limit: int) -> Iterator[list[list[str]]]:
    """Of each element ``outer`` of a member the cells: [reference, type, text]. A document type is refused: no xlsx has
    one, and entities are declared there."""
    parser, tags, cells, done = expat.ParserCreate(), [""], list[list[str]](), list[list[list[str]]]()

    def refuse(*_: Any) -> None:
        raise ValueError(f"{name} has a document type")

    def start(tag: str, attributes: dict[str, str]) -> None:
        tags.append(tag.rpartition(":")[2])
        if tags[-1] in ("c", "si"):
            cells.append([attributes.get("r", ""), attributes.get("t", ""), ""])

    def data(text: str) -> None:
        if cells and tags[-1] in ("v", "t"):
            cells[-1][2] += text
            if len(cells[-1][2]) > _CELL:
                raise ValueError(f"a cell of {name} has more than {_CELL:,} characters")

    def end(_: str) -> None:
        if tags.pop() == outer:
            done.append([*cells])
            cells.clear()

    parser.buffer_text, parser.StartDoctypeDeclHandler = True, refuse
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, data
    with book.open(name) as member:
        while block := member.read(_HEAD):
            limit -= len(block)
            if limit < 0:
                raise ValueError(f"{name} is too large")
            parser.Parse(block, False)
            yield from done
            done.clear()
    parser.Parse(b"", True)


def _rows(path: Path) -> Iterator[Columns]:
    """Of a csv or xlsx. Raises SheetError."""
    lines = lines_of(path)
    header = [name.strip() for name in next(lines)[1]]
    for _, cells in lines:
        yield {name: cell.strip() for name, cell in zip(header, cells, strict=True)}


def _sglang_rows(path: Path) -> Iterator[Columns]:
    """Of a report: each comparison with its category, as SGLang concludes it. Raises DumpError."""
    for number, raw in enumerate(bounded_lines(path), 1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            raise DumpError(f"{path}: line {number} is no json; is it whole?") from None
        kind = str(value_at(line, "type")).removeprefix("comparison_")
        if kind not in ("comparison", "tensor", "skip", "non_tensor", "error"):
            continue
        diff, place = (object_at(line, k) or {} for k in ("diff", "location"))
        checks = line["replicated_checks"] if isinstance(line.get("replicated_checks"), list) else []
        failed = bool(line.get("errors") or line.get("warnings"))
        failed |= any(not isinstance(c, dict) or c.get("passed") is not True for c in checks)
        failed |= kind != "skip" and (line.get("values_equal") or diff.get("passed")) is not True
        words = {"error": "errored", "skip": "failed" if failed else "skipped"}
        why = [line.get(k) for k in ("reason", "exception_type", "errors", "warnings")]
        row = {**diff, "name": line.get("name"), "category": words.get(kind, "failed" if failed else "passed"),
               "reason": next(filter(None, why), ""), "step": place.get("step")}  # fmt: skip
        yield {k: "" if v is None else v if isinstance(v, str) else json.dumps(v)[:200] for k, v in row.items()}


@dataclass
class ResultTable:
    """What a file of results says. verdicts: by column, how often each word is there; bad: (number, name, row) of the
    first rows that are wrong, then of the doubtful ones. errors, warnings, judged: numbers of rows; alone: of those
    without a partner; unparsed: of names that are not of the tool's form, the first of which is kept. note: where the
    file's own summary counts otherwise."""

    kind: ResultKind
    verdicts: dict[str, Counter[str]]
    bad: list[tuple[int, str, Columns]]
    rows: int = 0
    errors: int = 0
    warnings: int = 0
    judged: int = 0
    alone: int = 0
    unparsed: int = 0
    first_unparsed: str = ""
    note: str = ""


def read(path: Path, most: int = 10) -> ResultTable | None:
    """None for a file of no kind in KINDS. most: rows that are kept in ``bad``. Raises OSError, DumpError."""
    kind = kind_of(header_of(path))
    if kind is None:
        return None
    found, doubtful, concluded = ResultTable(kind, {}, []), list[tuple[int, str, Columns]](), Counter[str]()
    if path.suffix in sglang_logs.SUFFIXES:
        rows = sglang_logs.rows(path, concluded)
    else:
        rows = _sglang_rows(path) if path.suffix == ".jsonl" else _rows(path)
    for row in rows:
        found.rows += 1
        name = next((row[c] for c in kind.names if row.get(c)), "")
        words = {c: row[c] for c in kind.verdicts if row.get(c)}
        for column, word in words.items():
            found.verdicts.setdefault(column, Counter())[word] += 1
        there = {word.lower() for word in words.values()}
        alone = bool(kind.partner) and row.get(kind.partner, "").lower() in ("", "n/a", "none", "nan")
        found.alone += alone
        found.judged += not alone and bool(there & (BAD | DOUBTFUL | GOOD))
        if there & BAD:
            found.errors += 1
            found.bad += [(found.rows, name, row)] * (found.errors <= most)
        elif there & DOUBTFUL:
            found.warnings += 1
            doubtful += [(found.rows, name, row)] * (found.warnings <= most)
        if kind.place is not None and kind.place(name) is None:
            found.unparsed += 1
            found.first_unparsed = found.first_unparsed or name[:200] or "(empty)"
    found.bad = [*found.bad, *doubtful][:most]
    if sglang_logs.COMPARATOR in kind.needs and +concluded != found.verdicts.get("category", Counter()):
        summary = ", ".join(f"{n:,} {word}" for word, n in concluded.items())
        found.note = (f"the log's summary is {summary}: not all of its lines could be read" if summary else
                      "the log has no summary: it was cut off, or the comparison ended early")  # fmt: skip
    return found
