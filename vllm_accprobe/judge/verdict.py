"""From a row table to an error per row, and from that to pass or fail.

The problem: three measures with three limits are three answers. The idea: each is expressed in the unit of the first, a
relative L2 error: a norm ratio or a lone element that reaches its own limit counts as much as a row error that reaches
the row's. So a row has one number, the measure that gave it is kept for the message, and errors at inputs and outputs
can be weighed against each other (origin.py).
Not here: the limits (standards.py), the sums (metrics/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.judge.standards import Limits, Standard
from vllm_accprobe.metrics import oracle

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


def row_errors(table: np.ndarray, floor: float, width: int, standard: Standard, *, exact: bool = False) -> RowErrors:
    """table: float64 [n, 11] (oracle.ROW_FIELDS); floor: norm below which a row's own norm is no measure."""
    rel = oracle.row_rel_l2(table, floor)
    ratio = oracle.row_norm_ratio(table, floor)
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.sqrt(table[:, oracle.GG]) < floor
        rms = floor / math.sqrt(max(width, 1))
        gg = np.maximum(table[:, oracle.GG], floor * floor)
        gain = np.where(gg > 0, (table[:, oracle.GM] - table[:, oracle.GG]) / np.where(gg > 0, gg, 1.0), 0.0)
        peak = table[:, oracle.PEAK]
        if floor > 0:
            peak = np.where(small, table[:, oracle.MAX_D] / rms, peak)
    broken = table[:, oracle.MISMATCH] > 0
    if exact:
        wrong = broken | (table[:, oracle.MAX_D] > 0)
        err = np.where(wrong, np.inf, 0.0)
        return RowErrors(rel, ratio, peak, err, np.full(len(err), EXACTLY, np.int8), gain)
    parts = np.stack([rel, np.abs(ratio - 1.0) / standard.ratio_factor(width), peak / standard.element])
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
    return f"row relative L2 {value:.3g} (limit {limit:.2g})"
