"""The errors of one tensor: row by row, in one unit, and summed by column.

The problem: a row error, a norm ratio and a lone element have three limits, and what went into a tap must be weighed
against what came out of it. The idea: each measure is expressed in the unit of the first, a relative L2 error: what
reaches its own limit counts as much as a row that reaches the row's (`row_errors`). A `TensorErrors` holds all of one
(tap, role, call) as arrays sorted by row key; `Columns` holds sums by column and what follows from them. Not here: the
limits (standards/limits.py), the sums (kernels/), which rows influence which (origins.py).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import Key
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.judge import constants as c
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import Limits, Standard

TINY = 1e-300
"""Instead of 0 in a denominator."""


class Columns:
    """sums: kernels.structure's, float64 [6, width]."""

    def __init__(self, sums: np.ndarray):
        self.sums = sums

    @property
    def width(self) -> int:
        return self.sums.shape[1]

    @property
    def rows(self) -> float:
        return float(self.sums[4].max())

    @cached_property
    def signs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return column_signs(self.sums)

    @cached_property
    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        return column_offsets(self.sums)

    @cached_property
    def usual_err(self) -> float:
        return float(np.median(self.signs[0]))

    @cached_property
    def worst_err(self) -> float:
        return float(self.signs[0].max())

    @cached_property
    def most_sure(self) -> float:
        return float(np.abs(self.signs[2]).max())

    @cached_property
    def most_offset(self) -> float:
        return float(np.abs(self.offsets[0]).max())

    def uneven(self, unit: float) -> tuple[float, float]:
        """(worst column's error over the typical one's, largest slope in standard errors); not more than a fault would
        give that lies before. unit: one rounding."""
        worst = self.worst_err / max(self.usual_err, c.COLUMN_TYPICAL * unit)
        return min(worst, c.UNEVEN_MOST), min(self.most_sure, c.SURE_MOST)


def column_offsets(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From kernels.structure's sums: (mean error of each column relative to its size, as in `column_signs`; the same in
    standard errors of a mean of random signs)."""
    dd, gg, n, off = sums[0], sums[1], np.maximum(sums[4], 1.0), sums[5]
    size = np.sqrt(np.maximum(gg, max(c.COLUMN_SMALL * float(np.median(gg)), TINY)) / n)
    return off / n / size, np.where(dd > 0, off / np.sqrt(np.maximum(dd, TINY)), 0.0)


def column_signs(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From kernels.structure's sums: (error of each column relative to its size, or to half the typical column's where
    it is smaller; slope - 1; slope in standard errors)."""
    dd, gg, gd, square = sums[:4]
    floor = c.COLUMN_SMALL * float(np.median(gg))
    with np.errstate(divide="ignore", invalid="ignore"):
        err = np.sqrt(dd / np.maximum(gg, max(floor, TINY)))
        slope = gd / np.maximum(gg, max(floor, TINY))
        sure = gd / np.sqrt(np.maximum(square, TINY))
    return err, slope, np.where(gd == 0, 0.0, sure)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NO_NUMBERS = np.zeros(0)
_NONE = np.zeros(0, np.int64)
_NO_FLAGS = np.zeros(0, bool)


@dataclass(frozen=True, eq=False)
class TensorErrors:
    """One (tap, role, call) of mine with its errors.

    kind: input, output (also what was changed in place) or param. seen: the rows that were compared, sorted by key.
    keys, err: the rows with an error, sorted by key, and how large it is (verdict.RowErrors.err). everywhere: an error
    that belongs to no row (a parameter). limit: what the tap may create. vision: the keys are rows of images.
    allowed: what may have piled up there. weak: err is a lower bound, from statistics. rel, gain: of the same rows,
    relative L2 error and slope of mine over the golden minus 1. rounding: one rounding's relative error, 0.0 where
    values must be equal. broken: of the same rows, whether mine holds NaN or infinity where golden does not; spoilt:
    the same of what belongs to no row. own: of the same rows, whether they are known to be wrong whatever came in.
    columns: kernels.structure's sums. width: elements of a row. gap: layers that lie unseen in front.
    shared: of the rows seen, the number of the tensor without rows (a pooled vector) whose one error they all have, -1
    for a row with an error of its own; empty where all are. few: its errors are few that come again and again, which no
    statistics of independent ones describe. doubted: sorted keys of rows that may differ by earlier rows that were not
    compared (near_ties.Routing).
    """

    tap: str
    role: str
    call: int
    kind: str
    order: int
    limit: float
    seen: RowSet
    keys: np.ndarray
    err: np.ndarray
    everywhere: float = 0.0
    vision: bool = False
    allowed: float = 0.0
    weak: bool = False
    rel: np.ndarray = field(default_factory=lambda: _NO_NUMBERS)
    gain: np.ndarray = field(default_factory=lambda: _NO_NUMBERS)
    rounding: float = 0.0
    columns: np.ndarray | None = None
    width: int = 1
    broken: np.ndarray = field(default_factory=lambda: _NO_FLAGS)
    own: np.ndarray = field(default_factory=lambda: _NO_FLAGS)
    spoilt: bool = False
    gap: int = 0
    shared: np.ndarray = field(default_factory=lambda: _NONE)
    few: bool = False
    doubted: np.ndarray = field(default_factory=lambda: _NONE)

    @property
    def key(self) -> Key:
        return self.tap, self.role, self.call

    @property
    def of_tensors(self) -> bool:
        return len(self.shared) > 0 and bool((self.shared >= 0).all())

    def largest(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """``values`` [len(keys)] of some of the rows seen; where one tensor speaks for several, the largest of theirs:
        it may have been made of any of them."""
        if not len(self.shared) or not len(keys):
            return values
        which = self.shared[np.searchsorted(self.seen.keys, keys)]
        most = np.zeros(int(which.max()) + 2, values.dtype)
        np.maximum.at(most, which, values)  # -1 is the last place
        return np.where(which >= 0, most[which], values)

    @cached_property
    def by_column(self) -> Columns | None:
        return None if self.columns is None else Columns(self.columns)

    @property
    def broken_keys(self) -> np.ndarray:
        """The rows where mine holds NaN or infinity and golden does not; none where it was not checked."""
        return self.keys[self.broken] if len(self.broken) == len(self.keys) else self.keys[:0]


@cache
def operator_of(tap: str) -> str:
    """What modules have in common whose paths differ by a number alone: ``model.layers.*.mlp.down_proj``."""
    return _NUMBER.sub("*", tap)


def kind_of_place(tap: str, role: str) -> str:
    """What a tap and role has in common with the same operator in other layers."""
    return f"{operator_of(tap)}|{role}"


def spread(wanted: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``values`` of the sorted ``keys`` at all ``wanted`` keys, 0 where there is none: float64, to be read only."""
    if not len(keys) or len(values) != len(keys):
        return np.zeros(len(wanted))
    if keys is wanted or np.array_equal(keys, wanted):  # the usual case, at a tenth of the cost
        return np.asarray(values, np.float64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


ROW, RATIO, ELEMENT, EXACTLY, NONFINITE = range(5)
METRICS = ("row_rel_l2", "row_norm_ratio", "element", "exact", "nonfinite")


@dataclass(frozen=True, slots=True)
class RowErrors:
    """rel, ratio: as the table shows them; gain: slope of mine over the golden, minus 1; err: in units of a
    relative L2 error; measure: which of METRICS made err."""

    rel: np.ndarray
    ratio: np.ndarray
    peak: np.ndarray
    err: np.ndarray
    measure: np.ndarray
    gain: np.ndarray


WorstRow = tuple[int, "float | None", dict[str, Any]]
"""(the first row with the largest error, its error, what a pair says of its rows: the largest relative error, the norm
ratio furthest from 1); None and nothing where there are no rows."""


def row_errors(
    table: np.ndarray, floor: float, width: int, standard: Standard, *, exact: bool = False, inside: float | None = None
) -> RowErrors:
    """table: float64 [n, 11] (kernels.definition.ROW_FIELDS); floor: norm below which a row's own norm is no measure;
    inside: the narrowest that the rows were in the operator (limits.narrowest), where that is not ``width``."""
    rel = definition.row_rel_l2(table, floor)
    ratio = definition.row_norm_ratio(table, floor)
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.sqrt(table[:, definition.GG]) < floor
        rms = floor / math.sqrt(max(width, 1))
        gg = np.maximum(table[:, definition.GG], floor * floor)
        gain = np.where(gg > 0, (table[:, definition.GM] - table[:, definition.GG]) / np.where(gg > 0, gg, 1.0), 0.0)
        peak = table[:, definition.PEAK]
        if floor > 0:
            peak = np.where(small, table[:, definition.MAX_D] / rms, peak)
    broken = table[:, definition.MISMATCH] > 0
    if exact:
        wrong = broken | (table[:, definition.MAX_D] > 0)
        err = np.where(wrong, np.inf, 0.0)
        return RowErrors(rel, ratio, peak, err, np.full(len(err), EXACTLY, np.int8), gain)
    scale = standard.ratio_factor(width if inside is None else inside)
    parts = np.stack([rel, np.abs(ratio - 1.0) / scale, peak / standard.element])
    parts[np.isnan(parts)] = np.inf  # NaN never passes
    measure = parts.argmax(axis=0).astype(np.int8)
    err = parts.max(axis=0)
    err[broken] = np.inf
    measure[broken] = NONFINITE
    return RowErrors(rel, ratio, peak, err, measure, gain)


def value_and_limit(errors: RowErrors, row: int, limits: Limits) -> tuple[str, float, float]:
    """(metric, value, limit) of one row in the measure that decided it, for a sentence or compare.json."""
    measure = int(errors.measure[row])
    of_row, exactly = (errors.rel, limits.row), (errors.rel, 0.0)
    values, limit = (of_row, (errors.ratio, limits.ratio), (errors.peak, limits.element), exactly, exactly)[measure]
    return METRICS[measure], float(values[row]), limit


def describe(metric: str, value: float, limit: float) -> str:
    """One clause: what is wrong with a row, and by how much."""
    if metric == "row_norm_ratio":
        return f"row norm is {value:.4g} times the golden's (allowed 1 ± {limit:.2g})"
    if metric == "element":
        return f"an element is off by {value:.3g} of its size or the row's rms (limit {limit:.2g})"
    if metric == "exact":
        return "values differ and must be equal"
    if metric == "nonfinite":
        return "NaN or infinity on one side only"
    if math.isinf(value):
        return "the golden's row is 0 and mine's is not"
    return f"row relative L2 {value:.3g} (limit {limit:.2g})"


def alike(value: float, *, exact: bool) -> RowErrors:
    """Of a tensor of which only one number is known, which stands for all rows. Of equal tensors it is always the same:
    forgiving rows of them changes nothing."""
    if not value:
        return _EQUAL
    err = np.array([np.inf if exact and value > 0 else value])
    return RowErrors(np.array([value]), np.ones(1), err, err, np.zeros(1, np.int8), np.zeros(1))


_EQUAL = RowErrors(np.zeros(1), np.ones(1), np.zeros(1), np.zeros(1), np.zeros(1, np.int8), np.zeros(1))


def rows_of(errors: RowErrors, at: slice | np.ndarray) -> RowErrors:
    """Some of the rows; of a slice the same numbers, not a copy."""
    return RowErrors(*(getattr(errors, name)[at] for name in RowErrors.__slots__))


def worst_of_each(found: Sequence[RowErrors]) -> list[WorstRow]:
    """Of each: those with as many rows are searched together."""
    out: list[WorstRow] = [(0, None, {}) for _ in found]
    by_rows: dict[int, list[int]] = defaultdict(list)
    for i, errors in enumerate(found):
        by_rows[len(errors.err)].append(i)
    for rows, these in by_rows.items():
        if not rows:
            continue
        err, rel, ratio = (np.stack([getattr(found[i], name) for i in these]) for name in ("err", "rel", "ratio"))
        lines = np.arange(len(these))
        at, far = err.argmax(axis=1), np.abs(ratio - 1.0).argmax(axis=1)
        columns = at, err[lines, at], rel.max(axis=1), ratio[lines, far]
        for i, row, most, rel_most, furthest in zip(these, *(x.tolist() for x in columns), strict=True):
            out[i] = row, most, {"worst_row_rel_l2": rel_most, "worst_row_norm_ratio": furthest}
    return out
