"""The row table of one very long row, in the memory of a short one.

The problem: a tensor without rows is one row of the table, a weight of a billion elements too, and the loops keep three
numbers per element of a row until it ends. The idea: the row is cut into segments that the kernel takes for rows of
their own; sums add up and maxima are maxima. Only ``peak`` asks for the rms of the whole row, which no segment knows:
it is worked out again for the segments that can hold it, the largest error first, until no other could be more.
Not here: the fields (definition.py), the loops (rows.py).
"""

from __future__ import annotations

import numpy as np

from vllm_accprobe.kernels import definition
from vllm_accprobe.kernels import rows as kernel
from vllm_accprobe.kernels.rows import Widen

SEGMENT = 1 << 18
"""Elements of a segment."""
_SUMS = [
    definition.N,
    definition.GG,
    definition.MM,
    definition.GM,
    definition.DD,
    definition.ABS_D,
    definition.NONFINITE,
    definition.MISMATCH,
]
_MAXIMA = [definition.MAX_D, definition.MAX_REL]


def row(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen,
    *, elements: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Row table (float64 [1, 11]) of two arrays of stored bits [1, width]. The other arguments are kernel.rows'."""
    width = golden.shape[1]
    if width <= 2 * SEGMENT:
        one = np.zeros(1, np.int64)
        return kernel.rows(golden, golden_dtype, one, mine, mine_dtype, one, widen, elements=elements)
    whole = width // SEGMENT
    parts = []
    for begin, rows in ((0, whole), (whole * SEGMENT, 1 if width % SEGMENT else 0)):
        size = min(SEGMENT, width - begin)
        g, m = (x.reshape(-1)[begin : begin + rows * size].reshape(rows, size) for x in (golden, mine))
        at = np.arange(rows, dtype=np.int64)
        parts.append(kernel.rows(g, golden_dtype, at, m, mine_dtype, at, widen, elements=elements))
    table = np.concatenate(parts)
    out = np.zeros((1, len(definition.ROW_FIELDS)))
    with np.errstate(over="ignore", invalid="ignore"):  # what a kernel's own sums do, too
        out[0, _SUMS] = table[:, _SUMS].sum(axis=0)
    out[0, _MAXIMA] = table[:, _MAXIMA].max(axis=0)
    rms = float(np.sqrt(out[0, definition.GG] / max(out[0, definition.N], 1.0)))
    out[0, definition.PEAK] = _peak(golden, golden_dtype, mine, mine_dtype, widen, table[:, definition.MAX_D], rms)
    return out


def _peak(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen, largest: np.ndarray,
    rms: float,
) -> float:  # fmt: skip
    """Max of |d| / max(|g|, rms). largest: float64 [segments], max |d| of each."""
    peak = 0.0
    for k in np.argsort(-largest):
        if not largest[k] > peak * rms:  # nothing there is larger than this over rms
            break
        here = slice(int(k) * SEGMENT, int(k + 1) * SEGMENT)
        sides = (golden, golden_dtype), (mine, mine_dtype)
        g, m = (widen(bits.reshape(-1)[here], dtype).astype(np.float64) for bits, dtype in sides)
        finite = np.isfinite(g) & np.isfinite(m)
        g, m = g[finite], m[finite]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            d = np.abs(m - g)
            seen = np.where(d == 0, 0.0, d / np.maximum(np.abs(g), rms))
        peak = max(peak, float(seen.max(initial=0.0)))
    return peak
