"""compare.csv, labels.csv, labels.json and the labels' lines.

The problem: people sort and filter these files in other tools. The idea: the fields of `Pair` are the columns; floats
with all digits, None is an empty cell, tuples are JSON lists. labels.csv has the columns of ait's ``aclcmp`` report in
its order. Not here: which pairs there are, measuring and judging (comparison/).
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain, repeat, zip_longest
from operator import mod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe.comparison.labelled_pairs import FAIL, PASS, SKIP, LabelComparison, LabelPair, LabelSide
from vllm_accprobe.comparison.pair import COLUMNS, ByPlace, Pair, Pairs
from vllm_accprobe.dump.record_table import alike
from vllm_accprobe.report.text import count, each, num, once, safe
from vllm_accprobe.whole_file import write_csv_lines, write_lines, write_text

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison


_NUMBER = ("int", "float", "bool", "int | None", "float | None")
_WRITTEN = frozenset(f.name for f in fields(Pair) if str(f.type) not in _NUMBER)
"""Columns whose values are no numbers: the others are written as they are."""
_CHUNK, _FEW = 4096, 64
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def cell(value: Any) -> Any:
    """One csv cell. Text that a spreadsheet would run as a formula gets a leading apostrophe: dumps may be hostile."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(str(v) for v in value) + "]"
    text = str(value)
    return "'" + text if text.startswith(_FORMULA) else text


def pair_lines(pairs: Pairs, others: Sequence[tuple[Any, ...]] | None) -> Iterator[str]:
    """The lines of the pairs: COLUMNS, then the cells of ``others``. Column by column: most cells of one are alike, and
    of a place the pairs' lines differ in a few cells."""
    for start in range(0, len(pairs), _CHUNK):
        here = slice(start, start + _CHUNK)
        columns: list[Sequence[Any]] = [pairs.column(name)[here] for name in COLUMNS]
        columns += zip(*others[here], strict=True) if others is not None else ()
        which = next((c.which for c in columns if isinstance(c, ByPlace)), np.zeros(len(columns[0]), np.int64))
        used, which = np.unique(which, return_inverse=True)
        values = ([c.values[i] for i in used.tolist()] if isinstance(c, ByPlace) else c for c in columns)
        kinds = ((name in _WRITTEN, isinstance(c, ByPlace)) for name, c in zip_longest(COLUMNS, columns))
        cells = once(lambda kind, c: _cells(kind[0], c), zip(kinds, values, strict=True), tuple)
        line: list[Iterable[str]] = []
        own: list[list[str]] = []
        for column, found in zip(columns, cells, strict=True):
            if isinstance(found, str):
                line.append(repeat(found.replace("%", "%%"), len(used)))
            elif isinstance(column, ByPlace):
                line.append(cell.replace("%", "%%") for cell in found)
            else:
                line.append(repeat("%s", len(used)))
                own.append(found)
        lines = [",".join(place) + "\n" for place in zip(*line, strict=True)]
        each_line = zip(*own, strict=True) if own else repeat((), len(which))
        yield "".join(map(mod, map(lines.__getitem__, which.tolist()), each_line))


def _cells(written: bool, values: Sequence[Any]) -> list[str] | str:
    """One text where all are one object. written: of texts and shapes, of which equal ones are not always one."""
    if alike(values):
        return _text(values[0])
    try:
        if written:
            if 2 * len(set(values[:_FEW])) > len(values[:_FEW]):  # each its own
                return _plain(values) or list(map(_text, values))
            known = {value: _text(value) for value in set(values)}
            return list(map(known.__getitem__, values))
    except TypeError:  # a list has no hash
        pass
    if 2 * len(set(map(id, values))) < len(values) or not set(map(type, values)) <= {float, int, type(None)}:
        return each(values, _text)
    return repr(list(values))[1:-1].replace("None", "").split(", ")  # the same, all at once


def _plain(texts: Sequence[Any]) -> list[str] | None:
    """`_text` of each, several times as fast; None where one needs more than quotes around commas."""
    if set(map(type, texts)) != {str}:
        return None
    every = "\n".join(["", *texts])
    if '"' in every or "\r" in every or every.count("\n") > len(texts) or any(f"\n{c}" in every for c in _FORMULA):
        return None
    return [f'"{text}"' if "," in text else text for text in texts]


def _text(value: Any) -> str:
    """As csv.writer writes a cell."""
    if type(value) is float or type(value) is int:
        return repr(value)
    if value is None:
        return ""
    if type(value) is str and not (value.startswith(_FORMULA) or '"' in value or "\n" in value or "\r" in value):
        return f'"{value}"' if "," in value else value
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow((cell(value), ""))
    return line.getvalue()[:-2]


def write_csv(comparison: Comparison, path: str | Path) -> None:
    """Write ``comparison.pairs`` to ``path`` (UTF-8, header line, ``\\n`` line ends). The file appears whole or
    not at all.

    Raises OSError as the file system gives it.
    """
    other = comparison.foreign
    head = [*COLUMNS, *(other.columns if other is not None else ())]
    lines = pair_lines(comparison.table, other.rows if other is not None else None)
    write_lines(path, chain([",".join(map(_text, head)) + "\n"], lines))


LABEL_COLUMNS = (
    "data_id", "pta_data_path", "pta_dtype", "pta_shape", "acl_data_path", "acl_dtype", "acl_shape", "cmp_flag",
    "cosine_similarity", "max_relative_error", "mean_relative_error", "relative_euclidean_distance",
    "cmp_fail_reason",
)  # fmt: skip
"""Meaning, as in ait: cmp_flag: whether the pair was compared; cmp_fail_reason: why it was not, or why it fails."""


def row(pair: LabelPair) -> list[Any]:
    """The cells of one pair, or of a label without partner."""
    return [
        cell(pair.data_id),
        *_side(pair.pta),
        *_side(pair.acl),
        pair.compared,
        pair.cosine,
        pair.max_rel,
        pair.mean_rel,
        pair.rel_euclid,
        cell(pair.reason),
    ]


def _side(side: LabelSide | None) -> list[Any]:
    if side is None:
        return [None, None, None]
    return [cell(side.path), side.dtype or None, cell(side.shape) if side.dtype else None]


def write(found: LabelComparison, out: Path) -> list[Path]:
    """Writes labels.csv and labels.json into ``out``, whole or not at all. Raises OSError."""
    table, facts = out / "labels.csv", out / "labels.json"
    write_csv_lines(table, LABEL_COLUMNS, (row(p) for p in [*found.pairs, *found.unpaired]))
    write_text(facts, json.dumps(to_json(found), indent=1))
    return [table, facts]


def to_json(found: LabelComparison) -> dict[str, Any]:
    """``{"schema": 1, "verdict", "counts", "skipped", "pairs": [...]}``; numbers that JSON cannot say are text."""
    return {
        "schema": 1,
        "verdict": verdict(found),
        "counts": {
            "pairs": len(found.pairs), "pass": found.count(PASS), "fail": found.count(FAIL),
            "not_compared": found.count(SKIP), "unpaired": len(found.unpaired),
        },
        "skipped": found.skipped,
        "pairs": [_facts(p) for p in [*found.pairs, *found.unpaired]],
    }  # fmt: skip


def _facts(p: LabelPair) -> dict[str, Any]:
    values = {
        "data_id": p.data_id, "step": p.step, "rank": p.rank, "call": p.call, "status": p.status,
        "compared": p.compared, "cosine_similarity": p.cosine, "max_relative_error": p.max_rel,
        "mean_relative_error": p.mean_rel, "relative_euclidean_distance": p.rel_euclid,
        "nonfinite_mismatch": p.nonfinite_mismatch, "worst_request": p.request, "worst_position": p.position,
        "limit": p.limit, "reason": p.reason,
    }  # fmt: skip
    for name, side in (("pta", p.pta), ("acl", p.acl)):
        if side is not None:
            values[name] = {"path": side.path, "dtype": side.dtype, "shape": list(side.shape)}
    return {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def verdict(found: LabelComparison) -> str | None:
    """pass, fail, or None where nothing could be compared."""
    if found.count(FAIL):
        return FAIL
    return PASS if found.count(PASS) else None


def lines(found: LabelComparison, most: int | None = 10) -> list[str]:
    """What the terminal shows: the verdict, what fails first, what was not compared and why."""
    out = []
    failed = [p for p in found.pairs if p.status == FAIL]
    head = f"{count(len(found.pairs), 'labelled pair')}: {found.count(PASS)} pass, {len(failed)} fail"
    if found.count(SKIP):
        head += f", {found.count(SKIP)} not compared"
    out.append(f"{'FAIL' if failed else 'PASS' if found.count(PASS) else 'nothing compared'}: {head}")
    for p in failed[:most]:
        at = "" if p.position is None else f" at {safe(p.request or '?')} position {p.position}"
        numbers = ""
        if p.compared:
            numbers = f": cosine {num(p.cosine, 6)}, relative distance {num(p.rel_euclid, 4)}"
        out.append(f"  {_place(p)}{numbers}; {safe(p.reason, 300)}{at}")
    if most is not None and len(failed) > most:
        out.append(f"  ... {len(failed) - most} more: -v shows all, labels.csv has all")
    reasons = Counter(p.reason for p in [*found.pairs, *found.unpaired] if p.status == SKIP)
    first = {p.reason: p for p in reversed([*found.pairs, *found.unpaired]) if p.status == SKIP}
    for reason, n in reasons.most_common():
        out.append(f"not compared: {n} x {safe(reason, 300)}, e.g. {_place(first[reason])}")
    out += [f"left out by the capture: {n} x {safe(why)}" for why, n in found.skipped.items()]
    return out


def _place(p: LabelPair) -> str:
    call = f" call {p.call}" if p.call else ""
    return f"{safe(p.data_id)} (step {p.step}, rank {p.rank}{call})"
