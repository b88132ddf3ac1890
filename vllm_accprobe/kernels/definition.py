"""The metrics' definition, in plain numpy and float64.

The problem: a fast kernel can be wrong in ways that look plausible. The idea: every number is defined once, here, as
directly as its formula allows; the kernel is tested against this, and where llvmlite is missing this is what runs.
g is the golden, m is mine, d = m - g, all float64. Positions where g or m is not finite are left out of every
sum and maximum and counted instead; they mismatch unless both hold the same (NaN equals NaN, +inf equals +inf).
Not here: a tensor's metrics from its sums (formulas.py), what a number means (judge/), how bits become numbers
(dump/dtypes.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from vllm_accprobe.kernels.formulas import DUAL, TINY, Metrics, metrics

ROW_FIELDS = ("n", "gg", "mm", "gm", "dd", "abs_d", "max_d", "max_rel", "nonfinite", "mismatch", "peak")
"""Columns of a row table, float64. n: finite positions; gg, mm, gm, dd: sums of g*g, m*m, g*m, d*d; abs_d: sum of |d|;
max_d: max |d|; max_rel: max |d|/|g| over g != 0, or -1 where there is none; nonfinite, mismatch: counts; peak: max of
|d| / max(|g|, rms(g)), rms over the row's finite positions; 0 where d is 0, inf where all of g is 0 and d is not."""
N, GG, MM, GM, DD, ABS_D, MAX_D, MAX_REL, NONFINITE, MISMATCH, PEAK = range(len(ROW_FIELDS))

ELEMENT_FIELDS = (
    "within_100", "within_1000", "within_10000", "close", "above", "sum_rel", "max_rel", "sum_abs", "max_abs",
    "unequal",
)  # fmt: skip
"""Sums over all elements of a tensor that only other tools' standards require, float64. within_N: how many have |d| <
(|g| + eps) / N, eps of the golden's dtype (msprobe's dual-100, -1000, -10000); close: how many have |d| <= 1e-8 + 1e-5
|g| (torch.isclose's defaults); above: how many have |d| > 1e-3; sum_rel, max_rel, sum_abs, max_abs: of |d| / |g| and
of |d|, elements with |g| <= 2**-23 left out, as in msit; unequal: how many have d != 0. Positions that are not
finite on both sides are left out everywhere."""
WITHIN_100, WITHIN_1000, WITHIN_10000, CLOSE, ABOVE, SUM_REL, TOP_REL, SUM_ABS, TOP_ABS, UNEQUAL = range(10)
CLOSE_ABS, CLOSE_REL, ABOVE_BOUND = 1e-8, 1e-5, 1e-3
_TOGETHER = 1 << 15  # rows whose tables are summed up together
_STRETCH = 1 << 18  # elements of a row that are float64 at a time


def row_table(golden: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Sums and maxima of each row of two numeric arrays of one shape [rows, width]: float64 [rows, 11], ROW_FIELDS."""
    if golden.shape != mine.shape or golden.ndim != 2:
        raise ValueError(f"row_table needs two arrays of one shape [rows, width], not {golden.shape} and {mine.shape}")
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        g, m = golden.astype(np.float64), mine.astype(np.float64)
    finite = np.isfinite(g) & np.isfinite(m)
    same = (g == m) | (np.isnan(g) & np.isnan(m))
    zg, zm = np.where(finite, g, 0.0), np.where(finite, m, 0.0)
    # Nearly the largest float64 may overflow in a sum; inf is then the right answer and no warning helps.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        d = np.abs(zm - zg)
        out = np.zeros((g.shape[0], len(ROW_FIELDS)))
        out[:, N] = finite.sum(axis=1)
        out[:, GG], out[:, MM], out[:, GM] = (zg * zg).sum(axis=1), (zm * zm).sum(axis=1), (zg * zm).sum(axis=1)
        out[:, DD], out[:, ABS_D] = (d * d).sum(axis=1), d.sum(axis=1)
        out[:, NONFINITE] = (~finite).sum(axis=1)
        out[:, MISMATCH] = (~finite & ~same).sum(axis=1)
        if g.shape[1]:
            out[:, MAX_D] = d.max(axis=1)
            nonzero = zg != 0
            out[:, MAX_REL] = np.where(nonzero, d / np.where(nonzero, np.abs(zg), 1.0), -1.0).max(axis=1)
            rms = np.sqrt(out[:, GG] / np.maximum(out[:, N], 1))[:, None]
            scale = np.maximum(np.abs(zg), rms)
            out[:, PEAK] = np.where(d == 0, 0.0, d / scale).max(axis=1)
        else:
            out[:, MAX_REL] = -1.0
    return out


def element_sums(golden: np.ndarray, mine: np.ndarray, eps: float) -> np.ndarray:
    """ELEMENT_FIELDS of two numeric arrays of one shape: float64 [10]. eps: formulas.eps_of's."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        g, m = golden.astype(np.float64).ravel(), mine.astype(np.float64).ravel()
        finite = np.isfinite(g) & np.isfinite(m)
        a, d = np.abs(g[finite]), np.abs(m[finite] - g[finite])
        seen = a > TINY
        rel, big = d[seen] / a[seen], d[seen]
        counts = [(d < (a + eps) * t).sum() for t in DUAL]
        counts += [(d <= CLOSE_ABS + CLOSE_REL * a).sum(), (d > ABOVE_BOUND).sum()]
    tops = [x.max() if len(x) else 0.0 for x in (rel, big)]
    return np.array([*counts, rel.sum(), tops[0], big.sum(), tops[1], (d > 0).sum()], np.float64)


def add_elements(total: np.ndarray, more: np.ndarray) -> None:
    """Adds ``more`` to ``total``, both as element_sums gives them, of other elements of the same tensor."""
    tops = [TOP_REL, TOP_ABS]
    largest = np.maximum(total[tops], more[tops])
    total += more
    total[tops] = largest


def softmax_sums(golden: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """What `kl_divergence` needs of some elements: float64 [5], max g, sum of exp(g - max g), the same of m, and the
    sum of exp(g - max g) * (g - m). Positions that are not finite on both sides are left out."""
    g, m = golden.astype(np.float64).ravel(), mine.astype(np.float64).ravel()
    finite = np.isfinite(g) & np.isfinite(m)
    g, m = g[finite], m[finite]
    if not len(g):
        return np.array([-np.inf, 0.0, -np.inf, 0.0, 0.0])
    weight = np.exp(g - g.max())
    with np.errstate(over="ignore"):
        return np.array([g.max(), weight.sum(), m.max(), np.exp(m - m.max()).sum(), (weight * (g - m)).sum()])


def joined_softmax_sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sums of all elements from those of two parts."""
    out = a.copy()
    for top, sums in ((0, (1, 4)), (2, (3,))):
        out[top] = max(a[top], b[top])
        if np.isfinite(out[top]):
            for i in sums:
                out[i] = a[i] * np.exp(a[top] - out[top]) + b[i] * np.exp(b[top] - out[top])
    return out


def kl_divergence(sums: np.ndarray) -> float | None:
    """KL(softmax(g) || softmax(m)) over all elements [Kullback and Leibler 1951], at least 0; None without elements."""
    if not np.isfinite(sums[0]):
        return None
    g, m = (sums[i] + np.log(sums[i + 1]) for i in (0, 2))
    return max(float(sums[4] / sums[1] - g + m), 0.0)


def tensor_metrics(table: np.ndarray) -> Metrics:
    """The metrics of a whole tensor from its row table; where the largest error is, says `locate`."""
    return metrics_of_each([table])[0]


def metrics_of_each(tables: Sequence[np.ndarray]) -> list[Metrics]:
    """`tensor_metrics` of many tables: those with as many rows are summed up together, to the same sums."""
    out: list[Metrics | None] = [None] * len(tables)
    by_rows: dict[int, list[int]] = defaultdict(list)
    for i, table in enumerate(tables):
        by_rows[len(table)].append(i)
    for rows, every in by_rows.items():
        many = max(_TOGETHER // max(rows, 1), 1)
        for first in range(0, len(every), many):
            these = every[first : first + many]
            # Each column as one stretch, so that numpy sums it as it would sum the column of one table.
            columns = np.ascontiguousarray(np.stack([tables[i] for i in these]).transpose(2, 0, 1))
            with np.errstate(invalid="ignore", over="ignore"):
                sums = columns.sum(axis=2)
            tops = columns[[MAX_D, MAX_REL]].max(axis=2) if rows else np.full((2, len(these)), -1.0)
            for i, s, top in zip(these, sums.T.tolist(), tops.T.tolist(), strict=True):
                n, gg, mm, gm, dd, abs_d = (s[k] for k in (N, GG, MM, GM, DD, ABS_D))
                counts = int(s[NONFINITE]), int(s[MISMATCH])
                out[i] = metrics(n, gg, mm, gm, dd, abs_d, top[0], top[1], *counts)
    return [m for m in out if m is not None]


def locate(golden_row: np.ndarray, mine_row: np.ndarray) -> tuple[int, float, float]:
    """(index, golden value, mine value) of the first largest |d| among the finite positions of two 1-d arrays."""
    at, largest = 0, -1.0
    for begin in range(0, len(golden_row), _STRETCH):  # a whole tensor is one row: float64 of it all would not fit
        part = slice(begin, begin + _STRETCH)
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
            g, m = golden_row[part].astype(np.float64), mine_row[part].astype(np.float64)
        finite = np.isfinite(g) & np.isfinite(m)
        d = np.where(finite, np.abs(np.where(finite, m, 0.0) - np.where(finite, g, 0.0)), -1.0)
        here = int(d.argmax())
        if d[here] > largest:
            at, largest = begin + here, float(d[here])
    with np.errstate(invalid="ignore"):
        return at, float(golden_row[at]), float(mine_row[at])


def row_rel_l2(table: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """Per row sqrt(dd) / max(sqrt(gg), floor), float64 [rows]: 0 where dd is 0, inf where only the divisor is 0.

    A row with a non-finite mismatch is infinitely wrong: NaN never passes.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rel = np.sqrt(table[:, DD]) / np.maximum(np.sqrt(table[:, GG]), floor)
    rel[table[:, DD] == 0] = 0.0
    rel[(table[:, MISMATCH] > 0) | np.isnan(rel)] = np.inf
    return rel


def row_norm_ratio(table: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """Per row norm(mine) / norm(golden), float64 [rows].

    Where the golden norm is below the floor: 1 + (norm(mine) - norm(golden)) / floor. 1 where both norms are 0, inf
    where only the golden's is.
    """
    g, m = np.sqrt(table[:, GG]), np.sqrt(table[:, MM])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = 1.0 + (m - g) / np.maximum(g, floor)
    ratio[g == m] = 1.0
    return ratio
