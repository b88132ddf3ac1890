"""The row table of rows of any width, in the memory of short ones.

The problem: a tensor without rows is one row of the table, a weight of a billion elements too, and the loops keep three
numbers per element of a row until it ends. The idea: a wide row is cut into segments that the kernel takes for rows of
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
_MAXIMA = [definition.MAX_D, definition.MAX_REL]
_SUMS = [i for i in range(len(definition.ROW_FIELDS)) if i not in (*_MAXIMA, definition.PEAK)]


def rows(
    golden: np.ndarray, golden_dtype: str, golden_rows: np.ndarray,
    mine: np.ndarray, mine_dtype: str, mine_rows: np.ndarray, widen: Widen,
    *, elements: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """As kernel.rows, which takes these arguments too and does it all where the rows are not wide."""
    if golden.shape[1] <= 2 * SEGMENT:
        return kernel.rows(golden, golden_dtype, golden_rows, mine, mine_dtype, mine_rows, widen, elements=elements)
    each = zip(golden_rows, mine_rows, strict=True)
    found = [_row(golden[g], golden_dtype, mine[m], mine_dtype, widen, elements) for g, m in each]
    return np.stack(found) if found else np.zeros((0, len(definition.ROW_FIELDS)))


def _row(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen, elements: np.ndarray | None
) -> np.ndarray:
    """float64 [11] of two arrays of stored bits [width]."""
    width = len(golden)
    whole = width // SEGMENT
    parts = []
    for begin, n in ((0, whole), (whole * SEGMENT, 1 if width % SEGMENT else 0)):
        size = min(SEGMENT, width - begin)
        g, m = (x[begin : begin + n * size].reshape(n, size) for x in (golden, mine))
        at = np.arange(n, dtype=np.int64)
        parts.append(kernel.rows(g, golden_dtype, at, m, mine_dtype, at, widen, elements=elements))
    table = np.concatenate(parts)
    out = np.zeros(len(definition.ROW_FIELDS))
    with np.errstate(over="ignore", invalid="ignore"):  # what a kernel's own sums do, too
        out[_SUMS] = table[:, _SUMS].sum(axis=0)
    out[_MAXIMA] = table[:, _MAXIMA].max(axis=0)
    rms = float(np.sqrt(out[definition.GG] / max(out[definition.N], 1.0)))
    out[definition.PEAK] = _peak(golden, golden_dtype, mine, mine_dtype, widen, table[:, definition.MAX_D], rms)
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
        g, m = (widen(bits[here], dtype).astype(np.float64) for bits, dtype in sides)
        finite = np.isfinite(g) & np.isfinite(m)
        g, m = g[finite], m[finite]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            d = np.abs(m - g)
            seen = np.where(d == 0, 0.0, d / np.maximum(np.abs(g), rms))
        peak = max(peak, float(seen.max(initial=0.0)))
    return peak
