"""From a row table to an error per row, and from that to pass or fail.

The problem: three measures with three limits are three answers. The idea: each is expressed in the unit of the first, a
relative L2 error: a norm ratio or a lone element that reaches its own limit counts as much as a row error that reaches
the row's. So a row has one number, the measure that gave it is kept for the message, and errors at inputs and outputs
can be weighed against each other (origin.py).
Not here: the limits (standards/limits.py), the sums (kernels/).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import Limits, Standard

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


@dataclass(frozen=True, slots=True)
class Worst:
    """What a pair says of its rows. row, err: the first row with the largest error. rel: the largest; ratio: the one
    furthest from 1; prefill, decode: the largest rel of each phase. None where there is no such row."""

    row: int = 0
    err: float | None = None
    rel: float | None = None
    ratio: float | None = None
    prefill: float | None = None
    decode: float | None = None


def row_errors(
    table: np.ndarray, floor: float, width: int, standard: Standard, *, exact: bool = False, inside: float | None = None
) -> RowErrors:
    """table: float64 [n, 11] (oracle.ROW_FIELDS); floor: norm below which a row's own norm is no measure; inside: the
    narrowest that the rows were in the operator (limits.narrowest), where that is not ``width``."""
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
    name = METRICS[measure]
    if measure == RATIO:
        return name, float(errors.ratio[row]), limits.ratio
    if measure == ELEMENT:
        return name, float(errors.peak[row]), limits.element
    if measure in (EXACTLY, NONFINITE):
        return name, float(errors.rel[row]), 0.0
    return name, float(errors.rel[row]), limits.row


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
    """Of a tensor of which only one number is known, which stands for all rows."""
    err = np.array([np.inf if exact and value > 0 else value])
    return RowErrors(np.array([value]), np.ones(1), err, err, np.zeros(1, np.int8), np.zeros(1))


def rows_of(errors: RowErrors, at: slice | np.ndarray) -> RowErrors:
    """Some of the rows; of a slice the same numbers, not a copy."""
    e = errors
    return RowErrors(e.rel[at], e.ratio[at], e.peak[at], e.err[at], e.measure[at], e.gain[at])


def worst_of_each(found: Sequence[RowErrors]) -> list[Worst]:
    """A Worst of each, without the phases: those with as many rows are looked through together."""
    out = [Worst()] * len(found)
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
        for i, *values in zip(these, *(c.tolist() for c in columns), strict=True):
            out[i] = Worst(*values)
    return out
