"""Pairs that the lines of both journals decide, tensor by tensor of one place, as columns: equal hashes and statistics.

The problem: of most pairs nothing has to be read, and objects for them cost a hundred times what the decision does. The
idea: which group of golden holds a group's rows follows from moments and row maps alone and is the same for most taps
(`Partners`, made once); per pair of forms everything but hashes and statistics is known; what is left are comparisons
of columns. Statistics bound the error from below (read.statistics_error, here for many). Whatever is not plain (rows in
several tensors, copies that differ, values to be read) is left to the measurer. Not here: reading (measurer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import hypot, prod
from typing import Any, NamedTuple

import numpy as np

from vllm_accprobe.align.data_flow import is_choice
from vllm_accprobe.align.ranks import CAT, ONE
from vllm_accprobe.align.tokens import NO_ROWS, RowSet
from vllm_accprobe.comparison.measure import read
from vllm_accprobe.comparison.measure.measured import Part
from vllm_accprobe.comparison.plan.groups import NONE, Groups
from vllm_accprobe.comparison.plan.make_plan import Indices
from vllm_accprobe.comparison.plan.unit import Group, Unit, family
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.record_table import LazyTable


@dataclass(frozen=True)
class Partners:
    """Of each group of mine: partner, golden's group that has its rows, or -1; complete: whether all its rows are
    compared; both: and all of golden's; rows: those compared; whole: whether it has no rows."""

    partner: np.ndarray
    complete: np.ndarray
    both: np.ndarray
    rows: Sequence[RowSet]
    whole: np.ndarray

    @staticmethod
    def of(golden: Groups, usable: np.ndarray, mine: Groups, indices: Indices) -> Partners:
        n = len(mine)
        partner, complete, both = np.full(n, -1), np.zeros(n, bool), np.zeros(n, bool)
        rows = [NO_ROWS] * n
        whole = mine.space < 0
        with_rows = usable[golden.space[usable] >= 0]
        meet = indices.meetings(tuple(golden.spaces[i] for i in golden.space[with_rows].tolist()))
        for i in np.flatnonzero(~whole).tolist():
            where = mine.spaces[mine.space[i]]
            met = meet(where) if where in indices.kept else None
            if met is not None and met.aligned:
                partner[i], complete[i], both[i] = with_rows[met.used[0]], met.complete, met.both
                rows[i] = met.rows
        last: dict[Any, int] = {}
        for i in usable[golden.space[usable] < 0].tolist():
            moment = golden.moment(i)
            batch = indices.batches[0].get(moment)
            last[moment[1] if batch is None else None, batch] = i
        for i in np.flatnonzero(whole).tolist():
            moment = mine.moment(i)
            batch = indices.batches[1].get(moment)
            if moment not in indices.left_out:
                partner[i] = last.get((moment[1] if batch is None else None, batch), -1)
        plain = partner >= 0
        complete |= whole & plain
        both |= whole & plain
        return Partners(partner, complete, both, rows, whole)


class UnitGroups(NamedTuple):
    """usable: indices of golden's groups that can be compared. whole: tensors without rows can be, as well."""

    unit: Unit
    golden: Groups
    mine: Groups
    usable: np.ndarray
    whole: bool


Decided = tuple[np.ndarray, "list[Part] | LazyTable[Part]"]
"""(which groups of mine lines decide, ascending, their parts)."""


class ByLines:
    """fits: of a side's groups, for which row maps agree with their shapes, and which these are; the same arrays where
    they are equal. Holds nothing but partners."""

    def __init__(self, indices: Indices, fits: Callable[[int, Groups], tuple[np.ndarray, np.ndarray]]):
        self.indices, self.fits = indices, fits
        self._known: dict[tuple[Any, ...], tuple[Partners, Any]] = {}
        self._fit: dict[tuple[int, int, bool], np.ndarray] = {}

    def each(self, units: Sequence[UnitGroups]) -> list[Decided]:
        """Of each of ``units``. Those whose tensors have the same dtype, shape and plan, as most layers' have, are
        decided together: of a few tensors each column is as expensive as of many."""
        alike: dict[tuple[Any, ...], list[tuple[int, np.ndarray, Partners]]] = {}
        for number, one in enumerate(units):
            for at, met in self._of_forms(one):
                first, partner = int(at[0]), int(met.partner[at[0]])
                role, whole = one.unit.key[1], bool(met.whole[first])
                name = (_form_of(one.golden, partner), _form_of(one.mine, first), whole, is_choice(role, one.unit.cls),
                        role.startswith(("input", "inplace")))  # fmt: skip
                alike.setdefault(name, []).append((number, at, met))
        found: list[list[tuple[np.ndarray, LazyTable[Part]]]] = [[] for _ in units]
        for (_, _, whole, chosen, taken), some in alike.items():
            golden = _Side(Groups.joined([(units[i].golden, met.partner[at]) for i, at, met in some]))
            mine = _Side(Groups.joined([(units[i].mine, at) for i, at, _ in some]))
            complete, both = (np.concatenate([getattr(met, name)[at] for _, at, met in some])
                              for name in ("complete", "both"))  # fmt: skip
            rows = [met.rows[i] for _, at, met in some for i in at.tolist()]
            begins = np.cumsum([0, *(len(at) for _, at, _ in some)])
            for which, table in _decided(golden, mine, Met(rows, complete, both, whole, chosen, taken)):
                cuts = np.searchsorted(which, begins).tolist()
                for (i, at, _), begin, start, stop in zip(some, begins.tolist(), cuts, cuts[1:], strict=False):
                    if start < stop:
                        found[i].append((at[which[start:stop] - begin], table.stretch(start, stop)))
        return [_in_order(pieces) for pieces in found]

    def _of_forms(self, one: UnitGroups) -> Iterator[tuple[np.ndarray, Partners]]:
        """Groups of mine that have a partner, by the forms of both."""
        golden, mine = one.golden, one.mine
        met = self._partners(golden, one.usable, mine)
        fits = self.fits(1, mine)[0]
        if (name := (id(met), id(fits), one.whole)) not in self._fit:
            self._fit[name] = np.flatnonzero((met.partner >= 0) & fits & (one.whole | ~met.whole))
        fit = self._fit[name]
        if not len(fit) or len(golden.forms) == len(mine.forms) == 1:
            yield from [(fit, met)] if len(fit) else ()
            return
        pair = golden.form[met.partner[fit]] * len(mine.forms) + mine.form[fit]
        yield from ((fit[pair == form], met) for form in np.unique(pair).tolist())

    def _partners(self, golden: Groups, usable: np.ndarray, mine: Groups) -> Partners:
        name = golden.moments, mine.moments, usable.tobytes()
        if name not in self._known:
            self._known[name] = Partners.of(golden, usable, mine, self.indices), (golden.spaces, mine.spaces)
        return self._known[name][0]


def _form_of(groups: Groups, at: int) -> tuple[Any, ...]:
    """All that groups have in common that are decided together."""
    form, sites = groups.forms[groups.form[at]], groups.records.columns["site"]
    assert form[0] is not None
    records = (groups.order[groups.start[at] + i] for i in form[0].use)
    shapes = tuple(groups.records.sites.all[sites[r]][_DTYPE_SHAPE] for r in records)
    space = int(groups.space[at])
    name = groups.spaces[space][2] if space >= 0 else None
    return id(groups.records), id(groups.order), id(groups.spaces), form, shapes, int(groups.size[at]), name


_DTYPE_SHAPE = slice(3, 5)
"""Of a `TensorSite`."""


def _in_order(pieces: list[tuple[np.ndarray, LazyTable[Part]]]) -> Decided:
    if len(pieces) == 1:
        return pieces[0]
    every = np.concatenate([np.zeros(0, np.int64), *(at for at, _ in pieces)])
    parts = [part for _, table in pieces for part in table]
    order = np.argsort(every)
    return every[order], [parts[i] for i in order.tolist()]


class Met(NamedTuple):
    """Of some groups of mine, as `Partners`. whole: all are tensors without rows; chosen: experts; taken: inputs."""

    rows: Sequence[RowSet]
    complete: np.ndarray
    both: np.ndarray
    whole: bool
    chosen: bool
    taken: bool


class _Side:
    """Groups ``at`` of those of one form, which has a plan; all where that is None."""

    def __init__(self, groups: Groups, at: np.ndarray | None = None):
        self.groups, self.at = groups, np.arange(len(groups)) if at is None else at
        (plan, problem, self.dim), = groups.forms
        assert plan is not None
        self.plan = plan
        self.template = Group((), (0, None), None, plan, problem, self.dim)
        self.used = [self.records(i) for i in plan.use]
        self.site = groups.records.sites.all[groups.records.columns["site"][self.used[0][0]]]
        self.first = self.used[0]

    def records(self, member: int) -> np.ndarray:
        return self.groups.order[self.groups.start[self.at] + member]

    def column(self, name: str, records: np.ndarray) -> np.ndarray:
        return self.groups.records.columns[name][records]

    @cached_property
    def readable(self) -> np.ndarray:
        return np.logical_and.reduce([self.column("seg", r) >= 0 for r in self.used])

    @cached_property
    def counted(self) -> np.ndarray:
        """Whether all used records have statistics."""
        return np.logical_and.reduce([self.column("count", r) >= 0 for r in self.used])

    @cached_property
    def nonfinite(self) -> np.ndarray:
        """NaN and infinities in those that have statistics."""
        each = [(self.column(n, r), self.column("count", r) >= 0) for r in self.used for n in ("nan", "inf")]
        return np.sum([np.where(known, n, 0) for n, known in each], axis=0)

    @property
    def unequal(self) -> np.ndarray:
        """Whether a member that should equal the one used does not, by its hash."""
        found = np.zeros(len(self.at), bool)
        for copies in self.plan.copies if self.plan.kind == ONE else ():
            first = self.column("hash", self.records(copies[0]))
            for i in copies[1:]:
                other, stored = (self.column(name, self.records(i)) for name in ("hash", "seg"))
                found |= ~np.equal(first, NONE) & ~np.equal(other, NONE) & np.not_equal(first, other) & (stored >= 0)
        return found

    def only(self, some: np.ndarray) -> _Side:
        return _Side(self.groups, self.at[some])

    def statistics(self) -> dict[str, np.ndarray] | None:
        """Of the whole tensors, None where pieces do not tell it: as recorded, or of disjoint pieces together
        (align/derived.join_stats). NaN for what was not taken."""
        each = [{name: self.column(name, r) for name in FIGURES} for r in self.used]
        if self.plan.kind == ONE:
            return each[0]
        sites = self.groups.records.sites.all
        shapes = [sites[self.column("site", r)[0]].shape for r in self.used]
        whole = [(k, 0, shape[self.plan.dim or 0]) for k, shape in enumerate(shapes)]
        if self.plan.kind != CAT or sorted(self.plan.pieces) != whole:
            return None
        counts = [s["count"] - s["nan"] - s["inf"] for s in each]
        some = [n != 0 for n in counts]
        out = {name: np.sum([s[name] for s in each], axis=0) for name in ("count", "nan", "inf")}
        lost = np.logical_or.reduce([s["count"] < 0 for s in each]) | (sum(counts) == 0)
        for s, n in zip(each, some, strict=True):
            lost |= n & np.isnan([s[name] for name in ("min", "max", "mean", "l2")]).any(0)
        out["count"] = np.where(lost, -1, out["count"])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            mean = sum(np.where(np.isnan(s["mean"]), 0.0, s["mean"]) * n for s, n in zip(each, counts, strict=True))
            out["mean"] = mean / sum(counts)
        norms = (np.where(n, s["l2"], 0.0).tolist() for s, n in zip(each, some, strict=True))
        out["l2"] = np.array(list(map(hypot, *norms)))
        out["min"] = np.fmin.reduce([np.where(n, s["min"], np.nan) for s, n in zip(each, some, strict=True)])
        out["max"] = np.fmax.reduce([np.where(n, s["max"], np.nan) for s, n in zip(each, some, strict=True)])
        return out


FIGURES = ("count", "nan", "inf", "min", "max", "mean", "l2")


def _decided(golden: _Side, mine: _Side, met: Met) -> list[tuple[np.ndarray, LazyTable[Part]]]:
    whole = met.whole
    kinds = [DTYPES[side.site.dtype].kind for side in (golden, mine)]
    cuts = read.find_cut(golden.template, mine.template)
    if whole:
        shapes = [golden.plan.shape, mine.plan.shape]
    else:
        shapes = [read.feature_of(side.template, cut) for side, cut in zip((golden, mine), cuts, strict=True)]
    if "complex" in kinds or prod(shapes[0]) != prod(shapes[1]):
        return []
    equal = np.full(len(mine.at), all(a == b for a, b in (
        (golden.plan.kind, mine.plan.kind), (golden.plan.pieces, mine.plan.pieces),
        (golden.site.dtype, mine.site.dtype), (golden.site.shape, mine.site.shape),
    )) and len(golden.used) == len(mine.used))  # fmt: skip
    if equal.any():
        for theirs, own in zip(golden.used, mine.used, strict=True):
            digest = mine.column("hash", own)
            equal &= np.equal(golden.column("hash", theirs), digest) & ~np.equal(digest, NONE)
        equal &= ~mine.unequal & (met.complete | (mine.counted & (mine.nonfinite == 0)))
    left = ~equal & met.both & ~(golden.readable & mine.readable)
    if not whole and kinds[1] == "int" and met.chosen:
        left &= ~mine.readable
    if met.taken and "float" in kinds and kinds[0] != kinds[1]:
        left[:] = False  # relations.mixed
    found = []
    if equal.any():
        g, m = (golden, mine) if equal.all() else (golden.only(equal), mine.only(equal))
        columns: dict[str, Any] = {"nonfinite": m.nonfinite.tolist()}
        if not whole:
            columns["row_norm"] = _row_norms(g)
        found.append((m.at, _table(g, m, met, shapes[1], columns, identical=True)))
    if left.any():
        found += _by_statistics(golden.only(left), mine.only(left), met, shapes[1])
    return found


def _by_statistics(
    golden: _Side, mine: _Side, met: Met, shape: tuple[int, ...]
) -> list[tuple[np.ndarray, LazyTable[Part]]]:
    sides = [golden.statistics(), mine.statistics()]
    g, m = sides
    if g is None or m is None:
        return []
    known = [~np.isnan(np.stack([s[name] for name in NAMES])) for s in (g, m)]
    common = (known[0] & known[1]).any(0) | (g["nan"] + g["inf"] + m["nan"] + m["inf"] > 0)
    some = (g["count"] >= 0) & (m["count"] >= 0) & common
    if not some.any():
        return []
    if not some.all():
        golden, mine = golden.only(some), mine.only(some)
        g, m = ({name: values[some] for name, values in s.items()} for s in (g, m))
    figures = [zip(*(_or_none(s[name]) for name in NAMES), strict=True) for s in (g, m)]
    columns = {
        "stats": list(zip(*(e.tolist() for e in read.statistics_errors(g, m)), strict=True)),
        "figures": list(zip(*figures, strict=True)),
    }
    return [(mine.at, _table(golden, mine, met, shape, columns))]


NAMES = ("max", "min", "mean", "l2")


def _or_none(values: np.ndarray) -> list[float | None]:
    """None for NaN."""
    found = values.tolist()
    return [None if v != v else v for v in found] if np.isnan(values).any() else found


def _row_norms(golden: _Side) -> list[float]:
    """The rms norm of golden's rows."""
    rows = max(golden.site.shape[golden.dim], 1) ** 0.5
    norms = golden.column("l2", golden.first) / rows
    return np.where((golden.column("count", golden.first) >= 0) & (norms != 0) & ~np.isnan(norms), norms, 0.0).tolist()


def _table(
    golden: _Side, mine: _Side, met: Met, shape: tuple[int, ...], columns: dict[str, Any], **same: Any
) -> LazyTable[Part]:
    """Parts of groups that are decided. columns, same: what is known beside names and places."""
    groups, first, at = mine.groups, mine.first, mine.at.tolist()
    steps = [None if s < 0 else s for s in groups.step[mine.at].tolist()]
    norms = [(mine.column("l2", r), mine.column("count", r) >= 0) for r in mine.used]
    some = np.logical_or.reduce([known & (l2 != 0) & ~np.isnan(l2) for l2, known in norms])
    one = int(groups.size[at[0]]) == 1
    nonfinite = (mine.nonfinite > 0).tolist()
    return LazyTable(Part, len(at), {
        "golden": golden.groups.records.names(golden.first), "mine": groups.records.names(first), "step": steps,
        "rank": mine.column("rank", first).tolist() if one else [None] * len(at),
        "moment": list(zip(groups.cell[mine.at].tolist(), steps, strict=True)),
        "call": mine.column("call", first).tolist(), "rows": [met.rows[i] for i in at],
        "zero": (~some).tolist(),
        "own_nonfinite": [n if known else None for n, known in zip(nonfinite, mine.counted.tolist(), strict=True)],
        **columns,
    }, _DEFAULTS | {
        "dtype_golden": golden.site.dtype, "dtype_mine": mine.site.dtype, "feature": shape, "note": mine.plan.note,
        "whole": met.whole, "family": family("" if met.whole else groups.spaces[groups.space[at[0]]][2]),
    } | same)  # fmt: skip


_DEFAULTS = {f.name: f.default for f in fields(Part)}
