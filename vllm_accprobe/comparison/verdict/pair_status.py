"""Whether a pair passes: its errors against its limits, and the row of compare.csv that says so.

The problem: one pair has many measures, limits and places, and a table needs one status and one sentence. The idea: the
measure that decides is the one that is furthest beyond its limit; a pair without rows in common is skipped, one of
tokens is judged by why each of them flipped. Equal pairs, which are most, are made together, column by column. Not
here: limits (standards/, judge/), which pairs are origins and the verdict of all (judging.py), who changes it
afterwards: an origin's pairs (origin_entries.py), another tool's standard (notes.py), a replay (opcheck/proof/
apply_proof.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.measure.measured import ComparisonContext, MeasuredUnit, Part
from vllm_accprobe.comparison.measure.read import figures_text, figures_texts
from vllm_accprobe.comparison.pair import FAIL, NOT_JUDGED, PASS, SKIP, Pair
from vllm_accprobe.dump.record_table import LazyTable, column
from vllm_accprobe.dump.schema import DECODE, PREFILL
from vllm_accprobe.judge import near_ties
from vllm_accprobe.judge.tensor_errors import RowErrors, WorstRow, describe, value_and_limit
from vllm_accprobe.kernels.formulas import Metrics
from vllm_accprobe.standards.limits import Limits

Floor = tuple["float | None", "str | None", "float | None"]
"""(floor of a pair, where that comes from, its error in units of it)."""


_UNREAD = {f.name: f.default for f in fields(Pair)} | {"worst_row_norm_ratio": 1.0, "status": PASS}
_EQUAL = {
    **dict.fromkeys(("max_abs_err", "mean_abs_err", "rmse", "worst_row_rel_l2"), 0.0), "nonfinite_mismatch": 0,
    "identical": True, "bit_identical": True,
}  # fmt: skip


def equal_pairs(
    unit: MeasuredUnit, parts: Sequence[Part], limits: Sequence[float], floors: Sequence[Floor], notes: Sequence[str]
) -> LazyTable[Pair]:
    """Pairs of parts whose numbers are all equal. limits: of their rows; the others as `make_pair` has them."""
    zero = column(parts, "zero")
    messages_of = list(zip(column(parts, "replicas"), column(parts, "note"), notes, strict=True))
    texts = {words: messages.join(*words) for words in set(messages_of)}
    return _unread(unit, parts, floors, {
        **_EQUAL, "cosine": [None if z else 1.0 for z in zero],
        "rel_l2": (relative := [None if z else 0.0 for z in zero]), "max_rel_err": relative,
        "nonfinite": column(parts, "nonfinite"), "limit": limits, "message": list(map(texts.__getitem__, messages_of)),
    }, [0.0] * len(parts))  # fmt: skip


def statistics_pairs(
    unit: MeasuredUnit, parts: LazyTable[Part], errors: Sequence[float], values: Sequence[float], limit: float,
    floors: Sequence[Floor], setting: ComparisonContext,
) -> LazyTable[Pair]:  # fmt: skip
    """Pairs of parts that statistics decided. errors, values: of all their rows, in units of the limit and as the
    table shows them."""
    places: list[tuple[str | None, int | None]] = [(None, None)] * len(parts)
    wrong, rows = [not error <= limit for error in errors], parts.column("rows")
    for i, n in enumerate(sizes_and_phases(tuple(rows))[0]):
        if n == 1 and errors[i] > 0:
            places[i] = setting.name(int(rows[i].keys[0]))
    clauses = ["statistics differ" if w else "no payload: judged by statistics" for w in wrong]
    figures = figures_texts(parts.column("figures"))
    texts = list(map(messages.join, clauses, figures, parts.column("note")))
    return _unread(unit, parts, floors, {
        "worst_row_rel_l2": values, "status": [FAIL if w else PASS for w in wrong], "message": texts, "limit": limit,
        "worst_request": [request for request, _ in places], "worst_position": [at for _, at in places],
    }, values)  # fmt: skip


@lru_cache(8)
def sizes_and_phases(
    rows: tuple[RowSet, ...], wholes: tuple[bool, ...] = ()
) -> tuple[list[int | None], list[str | None]]:  # fmt: skip
    """How many rows each set has, and their phase; None of tensors that are compared as wholes. Most units of a model
    have the same ones."""
    each = list(zip(rows, wholes or repeat(False), strict=bool(wholes)))
    return [None if whole else len(of.keys) for of, whole in each], [None if whole else of.phase for of, whole in each]


def _unread(
    unit: MeasuredUnit, parts: Sequence[Part], floors: Sequence[Floor], found: Mapping[str, Any], rel: Sequence[float]
) -> LazyTable[Pair]:
    """found: columns, lists, and fields that all have alike. rel: of all rows of each."""
    rows, features, wholes = (column(parts, name) for name in ("rows", "feature", "whole"))
    sizes, phases = sizes_and_phases(tuple(rows), tuple(wholes))
    shapes = {key: key[1] if key[0] is None else (key[0], *key[1]) for key in set(zip(sizes, features, strict=True))}
    columns: dict[str, Any] = {
        **{name: column(parts, name) for name in _PART},
        "shape": list(map(shapes.__getitem__, zip(sizes, features, strict=True))),
        "phase": phases, "rows": sizes,
        "prefill_rel_l2": [None if p in (None, DECODE) else v for p, v in zip(phases, rel, strict=True)],
        "decode_rel_l2": [None if p in (None, PREFILL) else v for p, v in zip(phases, rel, strict=True)],
        **dict(zip(("floor", "floor_source", "x_floor"), zip(*floors, strict=True), strict=True)),
        **{name: values for name, values in found.items() if isinstance(values, list)},
    }  # fmt: skip
    same = {name: value for name, value in found.items() if not isinstance(value, list)}
    return LazyTable(Pair, len(parts), columns, _UNREAD | same | _place(unit))


def make_pair(
    unit: MeasuredUnit, part: Part, errors: RowErrors, limits: Limits, setting: ComparisonContext, worst: WorstRow,
    metrics: Metrics | None, floor: Floor, note: str = "",
) -> Pair:  # fmt: skip
    """Of a part that was read, or judged by statistics. metrics: None where values were not read. note: said behind
    everything else."""
    (row, err, of_rows), rows = worst, len(errors.err)
    wrong = err is not None and not err <= limits.row
    request = at = None
    if len(part.rows) and err is not None and err > 0 and rows == len(part.rows):
        request, at = setting.name(int(part.rows.keys[row]))
    decided = value_and_limit(errors, row, limits) if part.table is not None and rows else None
    clause = describe(*decided) if wrong and decided is not None else ""
    if wrong and part.table is None:
        clause = f"{part.by or 'statistics'} differ"
    elif part.table is None:
        clause = f"no payload: judged by {part.by or 'statistics'}"
    if part.figures is not None:
        clause = messages.join(clause, figures_text(part.figures))
    numbers = {} if metrics is None else _numbers(part, metrics)
    # Without a finite position there is no largest error, and all there is to compare are the NaNs.
    same = bool(numbers) and not numbers["max_abs_err"] and not numbers["nonfinite_mismatch"]
    by: dict[str, Any] = {} if decided is None else dict(zip(("measure", "measured", "allowed"), decided, strict=True))
    return Pair(
        **_names(unit, part),
        shape=part.feature if part.whole else (len(part.rows), *part.feature),
        **numbers,
        **of_rows,
        status=FAIL if wrong else PASS,
        message=messages.join(clause, part.replicas, part.note, note),
        rows=None if part.whole else len(part.rows),
        phase=part.phase,
        worst_request=request,
        worst_position=at,
        limit=limits.row,
        identical=same,
        bit_identical=same and part.same_bits,
        elements=part.elements,
        kl=part.kl,
        floor=floor[0],
        floor_source=floor[1],
        x_floor=floor[2],
        **by,
    )


def skipped_pair(unit: MeasuredUnit, part: Part) -> Pair:
    return Pair(**_names(unit, part), shape=part.feature, status=SKIP, message=part.skip)


_METRICS = tuple(f.name for f in fields(Metrics))
_PART = ("golden", "mine", "step", "rank", "dtype_golden", "dtype_mine", "call")
_metrics_of, _part_of = attrgetter(*_METRICS), attrgetter(*_PART)


def _place(unit: MeasuredUnit) -> dict[str, Any]:
    return {"tap": unit.key[0], "cls": unit.cls, "role": unit.key[1], "order": unit.order, "rule": unit.rule}


def _names(unit: MeasuredUnit, part: Part) -> dict[str, Any]:
    return _place(unit) | dict(zip(_PART, _part_of(part), strict=True))


def _numbers(part: Part, m: Metrics) -> dict[str, Any]:
    out = dict(zip(_METRICS, _metrics_of(m), strict=True))
    if part.worst is not None and m.max_abs_err:
        assert part.table is not None
        row, flat, golden, mine = part.worst
        inner = part.feature
        if part.whole and len(inner) > 1:  # the first dimension served as rows
            inner = inner[1:] if len(part.table) > 1 else inner
        place = tuple(int(i) for i in np.unravel_index(flat, inner)) if inner else ()
        head = () if part.whole and len(part.table) == 1 else (row,)
        out |= {"max_abs_index": head + place, "max_abs_golden": golden, "max_abs_mine": mine}
    return out


def judged_tokens(pair: Pair, verdicts: Sequence[str]) -> Pair:
    if not verdicts:
        return replace(pair, status=PASS, message="", limit=0.0)
    counts = Counter(verdicts)
    if sum(counts[why] for why in near_ties.UNJUDGED) == pair.rows:
        return replace(pair, status=SKIP, message=NOT_JUDGED + ", ".join(sorted(counts)))
    message = ", ".join(f"{n} flipped: {why}" for why, n in counts.items())
    bad = counts[near_ties.UPSTREAM] or any(counts[why] for why in near_ties.FAILED)
    return replace(pair, status=FAIL if bad else PASS, message=message)
