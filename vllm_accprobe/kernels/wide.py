"""The row table of rows of any width, in the memory of short ones, and where the largest error of a row is.

The problem: a tensor without rows is one row of the table, a weight of a billion elements too, and the loops keep three
numbers per element of a row until it ends; and what asks for the whole row (``peak`` for its rms, the place of the
largest error) would go over it again in plain numpy, which takes longer than all the rest. The idea: a wide row is cut
into segments that the kernel takes for rows of their own; sums add up and maxima are maxima. The largest error is
looked for in the first segment that has it. A segment's own peak, whose rms is another, bounds what the peak is with
the whole row's: it is worked out again for the segments that can hold it, until no other could be more.
Not here: the fields (definition.py), the loops (rows.py).
"""

from __future__ import annotations

import numpy as np

from vllm_accprobe.kernels import definition
from vllm_accprobe.kernels import rows as kernel
from vllm_accprobe.kernels.rows import Widen

SEGMENT = 1 << 13
"""Elements of a segment. Chosen: what is gone over again is a few of them, and the kernel is as fast as for longer."""
LONGEST = 1 << 19
"""Elements of a row that the kernel is given at once, where there may be many of them."""
_MAXIMA = [definition.MAX_D, definition.MAX_REL]
_SUMS = [i for i in range(len(definition.ROW_FIELDS)) if i not in (*_MAXIMA, definition.PEAK)]
_SLACK = 1 + 1e-9
"""More than the rounding of a bound: a segment that is looked at for nothing costs little."""


def rows(
    golden: np.ndarray, golden_dtype: str, golden_rows: np.ndarray,
    mine: np.ndarray, mine_dtype: str, mine_rows: np.ndarray, widen: Widen,
    *, elements: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """As kernel.rows, which takes these arguments too and does it all where the rows are not wide."""
    if golden.shape[1] <= LONGEST:
        return kernel.rows(golden, golden_dtype, golden_rows, mine, mine_dtype, mine_rows, widen, elements=elements)
    each = zip(golden_rows, mine_rows, strict=True)
    found = [row(golden[g], golden_dtype, mine[m], mine_dtype, widen, elements=elements)[0] for g, m in each]
    return np.stack(found) if found else np.zeros((0, len(definition.ROW_FIELDS)))


def row(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen,
    *, elements: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """(row table of two arrays of stored bits [width]: float64 [11]; the segment with the first largest error).
    elements: see kernel.rows."""
    table = _segments(golden, golden_dtype, mine, mine_dtype, widen, elements)
    out = np.zeros(len(definition.ROW_FIELDS))
    with np.errstate(over="ignore", invalid="ignore"):  # what a kernel's own sums do, too
        out[_SUMS] = table[:, _SUMS].sum(axis=0)
    out[_MAXIMA] = table[:, _MAXIMA].max(axis=0, initial=-1.0)
    out[definition.MAX_D] = max(out[definition.MAX_D], 0.0)
    rms = float(np.sqrt(out[definition.GG] / max(out[definition.N], 1.0)))
    out[definition.PEAK] = _peak(golden, golden_dtype, mine, mine_dtype, widen, table, rms)
    return out, _first(table)


def locate(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen, segment: int | None = None
) -> tuple[int, float, float]:
    """definition.locate of two arrays of stored bits [width]. segment: the one that `row` found in the same arrays."""
    if segment is None:
        wide = len(golden) > 2 * SEGMENT
        segment = _first(_segments(golden, golden_dtype, mine, mine_dtype, widen, None)) if wide else -1
    here = slice(segment * SEGMENT, (segment + 1) * SEGMENT) if segment >= 0 else slice(None)
    g, m = widen(golden[here], golden_dtype), widen(mine[here], mine_dtype)
    at, x, y = definition.locate(g, m)
    return max(segment, 0) * SEGMENT + at, x, y


def _segments(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen, elements: np.ndarray | None
) -> np.ndarray:
    """float64 [segments, 11]"""
    width = len(golden)
    whole = width // SEGMENT
    parts = []
    for begin, n in ((0, whole), (whole * SEGMENT, 1 if width % SEGMENT else 0)):
        size = min(SEGMENT, width - begin)
        if n:
            g, m = (x[begin : begin + n * size].reshape(n, size) for x in (golden, mine))
            at = np.arange(n, dtype=np.int64)
            parts.append(kernel.rows(g, golden_dtype, at, m, mine_dtype, at, widen, elements=elements))
    return np.concatenate(parts) if parts else np.zeros((0, len(definition.ROW_FIELDS)))


def _first(table: np.ndarray) -> int:
    """The first segment with the largest error; one in which nothing is finite has none."""
    some = np.where(table[:, definition.N] > 0, table[:, definition.MAX_D], -1.0)
    return int(some.argmax()) if len(some) else 0


def _peak(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen, table: np.ndarray,
    rms: float,
) -> float:  # fmt: skip
    """Max of |d| / max(|g|, rms). table: of the segments."""
    bound = _bounds(table, rms)
    peak = 0.0
    for k in np.argsort(-bound):
        if not bound[k] > peak:
            break
        here = slice(int(k) * SEGMENT, int(k + 1) * SEGMENT)
        sides = (golden, golden_dtype), (mine, mine_dtype)
        with np.errstate(invalid="ignore"):
            g, m = (widen(bits[here], dtype).astype(np.float64) for bits, dtype in sides)
        finite = np.isfinite(g) & np.isfinite(m)
        g, m = g[finite], m[finite]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            d = np.abs(m - g)
            seen = np.where(d == 0, 0.0, d / np.maximum(np.abs(g), rms))
        peak = max(peak, float(seen.max(initial=0.0)))
    return peak


def _bounds(table: np.ndarray, rms: float) -> np.ndarray:
    """float64 [segments], no less than each one's share of the peak: its largest error over rms; and its own peak,
    times how much larger its own rms is, as max(|g|, own) / max(|g|, rms) is at most own / rms."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        own = np.sqrt(table[:, definition.GG] / np.maximum(table[:, definition.N], 1.0))
        by_error = table[:, definition.MAX_D] / rms
        by_peak = table[:, definition.PEAK] * np.maximum(own / rms, 1.0)
        bound = np.fmin(by_error, by_peak) * _SLACK
    # Where a sum has overflown nothing is known; where nothing differs there is nothing.
    unknown = np.isnan(bound) | ~np.isfinite(own)
    return np.where(table[:, definition.MAX_D] > 0, np.where(unknown, np.inf, bound), 0.0)
