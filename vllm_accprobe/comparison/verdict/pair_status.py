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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.measure.measured import ComparisonContext, MeasuredUnit, Part
from vllm_accprobe.comparison.measure.read import figures_text, figures_texts
from vllm_accprobe.comparison.pair import FAIL, NOT_JUDGED, PASS, SKIP, ByPlace, Pair
from vllm_accprobe.comparison.row_table import numbered_sets
from vllm_accprobe.dump.record_table import LazyTable, column
from vllm_accprobe.dump.schema import DECODE, PREFILL
from vllm_accprobe.judge import near_ties
from vllm_accprobe.judge.tensor_errors import RowErrors, WorstRow, describe, value_and_limit
from vllm_accprobe.kernels.formulas import Metrics
from vllm_accprobe.standards.limits import Limits

Floor = tuple["float | None", "str | None", "float | None"]
"""(floor of a pair, where that comes from, its error in units of it)."""


def decided_alike(parts: Sequence[Part]) -> bool:
    """Whether lines decided all ``parts`` (one or more), all equal or all by statistics, with the same limits."""
    if isinstance(parts, LazyTable):
        return True
    if not parts or parts[0].table is not None or not (parts[0].identical or parts[0].stats):
        return False
    decided = all((p.identical or (p.stats and p.figures)) and not _others_of(p) for p in parts)
    return decided and len(set(map(_form_of, parts))) == 1


def _others_of(part: Part) -> bool:
    """Whether more is known of a part than lines say, or less."""
    found = part.table, part.choices, part.margins, part.elements, part.kl
    return part.skip + part.by + part.replicas != "" or any(x is not None for x in found)


_form_of = attrgetter("dtype_golden", "dtype_mine", "feature", "whole", "identical")


class PartColumns:
    """Parts of some units, the units' one after the other, as columns. of: int64 [n], the unit of each part. sets,
    set_of: the different `RowSet`s, and which each part has."""

    def __init__(self, units: Sequence[MeasuredUnit], parts: Sequence[Sequence[Part]]):
        self.units, self.parts = units, parts
        self.sizes = list(map(len, parts))
        self.of = np.repeat(np.arange(len(units)), self.sizes)
        self._same = [p.same if isinstance(p, LazyTable) else {} for p in parts]
        self.rows: list[RowSet] = self.column("rows")
        self.sets, self.set_of = numbered_sets(self.rows)

    def column(self, name: str) -> list[Any]:
        return list(chain.from_iterable(column(p, name) for p in self.parts))

    def stretches(self) -> list[slice]:
        """Where the parts of each unit are."""
        return [slice(end - n, end) for n, end in zip(self.sizes, accumulate(self.sizes), strict=True)]

    def by_unit(self, name: str) -> list[Any] | None:
        """A field of which all parts of a unit are known to have one value, for each unit."""
        return [s[name] for s in self._same] if all(name in s for s in self._same) else None

    def numbers(self, name: str) -> np.ndarray | None:
        """int64 [n], a number for each different value of a column; None where all parts of a unit have one."""
        values = None if self.by_unit(name) is not None else self.column(name)
        different = set(values or ())
        if values is None or len(different) == 1:
            return None
        known = {value: i for i, value in enumerate(different)}
        found = np.fromiter(map(known.__getitem__, values), np.int64, len(values))
        begins = np.cumsum(self.sizes) - self.sizes
        return None if (found == found[begins][self.of]).all() else found


class _Places:
    """The places of some parts: those of one unit that have all but values and steps alike.

    which: int64 [n], the place of each part; of: the unit of each place; sizes, phases: of its rows, None of tensors
    that are compared as wholes. varies: names of further columns that pairs of one place have alike."""

    def __init__(self, parts: PartColumns, varies: Sequence[str] = ()):
        whole = np.array(parts.column("whole"), bool)
        forms = [(len(s.keys), s.phase) for s in parts.sets] + [(None, None)]
        known = {form: i for i, form in enumerate(dict.fromkeys(forms))}
        form = np.array([known[f] for f in forms])[np.where(whole, len(parts.sets), parts.set_of)]
        code = parts.of * len(known) + form
        for numbers in map(parts.numbers, (*_ALIKE, *varies)):
            if numbers is not None:
                code = np.unique(code, return_inverse=True)[1] * (int(numbers.max()) + 1) + numbers
        _, self.first, self.which = np.unique(code, return_index=True, return_inverse=True)
        self.parts, self.of = parts, parts.of[self.first].tolist()
        forms = list(known)
        self.sizes, self.phases = zip(*(forms[i] for i in form[self.first].tolist()), strict=True)

    def values(self, name: str) -> list[Any]:
        """Of each place, a field of its parts."""
        by_unit = self.parts.by_unit(name)
        if by_unit is not None:
            return [by_unit[i] for i in self.of]
        values = self.parts.column(name)
        return [values[i] for i in self.first.tolist()]

    def table(
        self, steps: Sequence[int | None], columns: Mapping[str, Sequence[Any]], placed: Mapping[str, Sequence[Any]],
        same: Mapping[str, Any],
    ) -> LazyTable[Pair]:  # fmt: skip
        """columns: what is each pair's own beside its step; placed: what each place has; same: all alike."""
        units = [self.parts.units[i] for i in self.of]
        shapes = [own if n is None else (n, *own) for n, own in zip(self.sizes, self.values("feature"), strict=True)]
        every = {
            **{name: self.values(name) for name in _ALIKE if name != "feature"},
            **dict(zip(_PLACE, zip(*map(_place_of, units), strict=True), strict=True)),
            "tap": [u.key[0] for u in units], "role": [u.key[1] for u in units],
            "shape": shapes, "rows": self.sizes, "phase": self.phases, **placed,
        }  # fmt: skip
        own = {name: ByPlace(values, self.which) for name, values in every.items()}
        return LazyTable(Pair, len(self.which), {**own, "step": steps, **columns}, {**_UNREAD, **same})


_UNREAD = {f.name: f.default for f in fields(Pair)} | {"worst_row_norm_ratio": 1.0, "status": PASS}
_EQUAL = {
    **dict.fromkeys(("max_abs_err", "mean_abs_err", "rmse", "worst_row_rel_l2"), 0.0), "nonfinite_mismatch": 0,
    "identical": True, "bit_identical": True,
}  # fmt: skip
FloorOf = Callable[[int, "str | None", float], Floor]
"""Of a unit, by number, a phase of its rows and the relative L2 error of its worst row."""


def equal_pairs(
    parts: PartColumns, limits: Sequence[float], floor_of: FloorOf, notes: Sequence[str] = ()
) -> LazyTable[Pair]:
    """Pairs of parts whose numbers are all equal. limits: of the rows of each unit's; notes: behind everything else,
    one for each, or none."""
    at = _Places(parts, ("zero", "nonfinite", "replicas", "note"))
    zero, replicas, own = map(at.values, ("zero", "replicas", "note"))
    texts: Sequence[str] = list(map(messages.join, replicas, own))
    columns = {}
    if any(notes):
        columns["message"] = [messages.join(texts[i], note) for i, note in zip(at.which.tolist(), notes, strict=True)]
    floors = [floor_of(i, phase, 0.0) for i, phase in zip(at.of, at.phases, strict=True)]
    relative = [None if z else 0.0 for z in zero]
    return at.table(parts.column("step"), columns, {
        "cosine": [None if z else 1.0 for z in zero], "rel_l2": relative, "max_rel_err": relative,
        "nonfinite": at.values("nonfinite"), "limit": [limits[i] for i in at.of],
        "prefill_rel_l2": [None if p in (None, DECODE) else 0.0 for p in at.phases],
        "decode_rel_l2": [None if p in (None, PREFILL) else 0.0 for p in at.phases],
        **dict(zip(_FLOOR, zip(*floors, strict=True), strict=True)),
        **({} if columns else {"message": texts}),
    }, _EQUAL)  # fmt: skip


def statistics_pairs(
    parts: PartColumns, errors: np.ndarray, values: np.ndarray, limits: Sequence[float], floor_of: FloorOf,
    setting: ComparisonContext,
) -> LazyTable[Pair]:  # fmt: skip
    """Pairs of parts that statistics decided. errors, values: float64 [n], of all their rows, in units of the limit and
    as the table shows them. limits: of the rows of each unit's."""
    at = _Places(parts, ("note",))
    wrong, shown = ~(errors <= np.array(limits)[parts.of]), values.tolist()
    failed = wrong.tolist()
    columns: dict[str, Sequence[Any]] = {"worst_row_rel_l2": shown}
    for phase, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
        has = [p not in (None, other) for p in at.phases]
        if all(has):
            columns[f"{phase}_rel_l2"] = shown
        elif any(has):
            known = np.array(has)[at.which].tolist()
            columns[f"{phase}_rel_l2"] = [v if k else None for v, k in zip(shown, known, strict=True)]
    clauses = [STATISTICS_DIFFER if w else BY_STATISTICS for w in failed]
    columns["message"] = list(map(messages.join, clauses, figures_texts(parts.column("figures")), parts.column("note")))
    if wrong.any():
        columns["status"] = [FAIL if w else PASS for w in failed]
    one = np.array([len(own.keys) == 1 for own in parts.sets], bool)[parts.set_of] & (errors > 0)
    if one.any():
        names = {i: setting.name(int(parts.sets[i].keys[0])) for i in np.unique(parts.set_of[one]).tolist()}
        known = [names[i] if own else (None, None) for i, own in zip(parts.set_of.tolist(), one.tolist(), strict=True)]
        columns["worst_request"], columns["worst_position"] = zip(*known, strict=True)
    floors = [floor_of(i, phase, 1.0) for i, phase in zip(at.of, at.phases, strict=True)]
    by = np.array([floor or np.nan for floor, *_ in floors])[at.which]
    with np.errstate(over="ignore"):  # infinite, then
        columns["x_floor"] = (values / by).tolist()
    if (none := np.isnan(by)).any():
        columns["x_floor"] = [None if no else v for v, no in zip(columns["x_floor"], none.tolist(), strict=True)]
    floor, source, _ = zip(*floors, strict=True)
    placed = {"limit": [limits[i] for i in at.of], "floor": floor, "floor_source": source}
    return at.table(parts.column("step"), columns, placed, {})


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
        clause = f"{part.by} differ" if part.by else STATISTICS_DIFFER
    elif part.table is None:
        clause = f"no payload: judged by {part.by}" if part.by else BY_STATISTICS
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
_ALIKE = (*(name for name in _PART if name != "step"), "feature")
_PLACE = ("cls", "order", "rule")
_place_of = attrgetter(*_PLACE)
_FLOOR = ("floor", "floor_source", "x_floor")
STATISTICS_DIFFER, BY_STATISTICS = "statistics differ", "no payload: judged by statistics"
_metrics_of, _part_of = attrgetter(*_METRICS), attrgetter(*_PART)


def _place(unit: MeasuredUnit) -> dict[str, Any]:
    return {"tap": unit.key[0], "role": unit.key[1], **dict(zip(_PLACE, _place_of(unit), strict=True))}


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
