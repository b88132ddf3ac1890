"""The compiled loops behind rows.py.

The problem: fifteen sums and maxima of two streams of floats at the speed of memory. The idea: a row is walked in
blocks that stay in the first-level cache; a block becomes float32 in a buffer (bits.py), and runs through loops without
branches whose accumulators are float64. What the peak needs after the row's norm is known is kept in two row-wide
buffers of the caller's, so the inputs are read once.
Not here: dtypes' names and tables, bounds, the meaning of the columns (rows.py, definition.py), who translates this
(compiler.py).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_accprobe.compiler import larger, part, scratch, smaller
from vllm_accprobe.kernels import BLOCK, MOST_ROWS, ROWS_AT_ONCE
from vllm_accprobe.kernels.bits import leave_out, load, load_any
from vllm_accprobe.kernels.vectors import LANES, add_columns, add_rows

Bytes: TypeAlias = NDArray[np.uint8]
Words: TypeAlias = NDArray[np.uint32]
Index: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = NDArray[np.float64]


def _add(line: Any, g: Any, m: Any, q: Any, rel: Any) -> None:
    """One row's part in a block: ``line``, its row of the table, takes it in."""
    gg = mm = gm = dd = ad = top = far = 0.0
    for i in range(g.size):
        x, y = np.float64(g[i]), np.float64(m[i])
        d, a = abs(y - x), abs(x)
        gg += x * x
        mm += y * y
        gm += x * y
        dd += d * d
        ad += d
        q[i] = d
        top = larger(top, d)
    for i in range(g.size):
        a = abs(np.float64(g[i]))
        r = q[i] / a
        rel[i] = r if a > 0.0 else np.inf
        far = larger(far, r if a > 0.0 else 0.0)
    line[1] += gg
    line[2] += mm
    line[3] += gm
    line[4] += dd
    line[5] += ad
    line[6] = max(line[6], top)
    line[7] = max(line[7], far)


def _elements(g: Any, q: Any, rel: Any, eps: float, out: Any) -> None:
    """Adds definition.ELEMENT_FIELDS of one stretch to ``out``; positions left out count as zero errors of zero."""
    c2 = c3 = c4 = close = above = unequal = sum_rel = top_rel = sum_abs = top_abs = 0.0
    for i in range(g.size):
        a, d = abs(np.float64(g[i])), q[i]
        b = a + eps
        c2 += 1.0 if d < b * 1e-2 else 0.0
        c3 += 1.0 if d < b * 1e-3 else 0.0
        c4 += 1.0 if d < b * 1e-4 else 0.0
        close += 1.0 if d <= 1e-8 + 1e-5 * a else 0.0
        above += 1.0 if d > 1e-3 else 0.0
        unequal += 1.0 if d > 0.0 else 0.0
    for i in range(g.size):
        seen = abs(np.float64(g[i])) > 1.1920928955078125e-07
        r, d = rel[i] if seen else 0.0, q[i] if seen else 0.0
        sum_rel += r
        sum_abs += d
        top_rel = larger(top_rel, r)
        top_abs = larger(top_abs, d)
    out[0] += c2
    out[1] += c3
    out[2] += c4
    out[3] += close
    out[4] += above
    out[5] += sum_rel
    out[6] = max(out[6], top_rel)
    out[7] += sum_abs
    out[8] = max(out[8], top_abs)
    out[9] += unequal


def _peak(q: Any, rel: Any, scale: float) -> float:
    top = 0.0
    for i in range(q.size):
        top = larger(top, smaller(rel[i], q[i] * scale))
    return top


def _finish(line: Any, q: Any, rel: Any) -> None:
    """The columns that need the whole row: largest relative error, peak."""
    if line[1] > 0.0:
        if line[6] > 0.0:
            line[10] = _peak(q, rel, 1.0 / np.sqrt(line[1] / max(line[0], 1.0)))
    else:
        line[7] = -1.0
        if line[6] > 0.0:
            line[10] = np.inf


def rows(
    g8: Bytes, gk: int, gt: Words, gi: Index, m8: Bytes, mk: int, mt: Words, mi: Index, out: Numbers, eps: float,
    elements: Numbers, q: Numbers, rel: Numbers,
) -> None:  # fmt: skip
    """The row table of rows gi of g8 against rows mi of m8 into ``out`` (zeroed float64 [n * 11]).

    g8, m8: uint8, the rows one after the other, of elements of kinds gk and mk; gt, mt: uint32[256] for kind 3. A row's
    width is in ``out``'s first column. elements: float64 [10], to which _elements adds, or [0]. q, rel: float64, room
    for the larger of BLOCK and the width: |d| and |d| / |g|, of one row where a block is a part of it, of a block where
    that is several rows.
    """
    gs = 1 if gk == 3 else (4 if gk == 2 else 2)
    ms = 1 if mk == 3 else (4 if mk == 2 else 2)
    width: Any = np.int64(out[0])
    gb, mb = scratch(BLOCK, np.uint32), scratch(BLOCK, np.uint32)
    r = 0
    while r < gi.size:
        # How many rows follow each other on both sides.
        run, most = 1, min(max(BLOCK // width, 1), gi.size - r)
        while run < most and gi[r + run] == gi[r] + run and mi[r + run] == mi[r] + run:
            run += 1
        for start in range(0, width, BLOCK):
            # Either several whole rows, or a part of one.
            n = run * width if width <= BLOCK else min(BLOCK, width - start)
            g_at, m_at = (gi[r] * width + start) * gs, (mi[r] * width + start) * ms
            g_bits, m_bits = part(g8, g_at, n * gs, np.uint8), part(m8, m_at, n * ms, np.uint8)
            gw, mw = part(gb, 0, n, np.uint32), part(mb, 0, n, np.uint32)
            clean_g, clean_m = load(g_bits, gk, gt, gw), load(m_bits, mk, mt, mw)
            clean, large = clean_g > 0 and clean_m > 0, clean_g == 2 and clean_m > 0
            if not clean:
                load_any(g_bits, gk, gt, gw)
                load_any(m_bits, mk, mt, mw)
            gf, mf = part(gw, 0, n, np.float32), part(mw, 0, n, np.float32)
            size = n // run
            if not clean:
                for k in range(run):
                    x, y = part(gf, k * size, size, np.float32), part(mf, k * size, size, np.float32)
                    leave_out(part(out, (r + k) * 11, 11, np.float64), x, y)
            qs, rels = part(q, start, n, np.float64), part(rel, start, n, np.float64)
            if size % LANES == 0:
                whole = size == width
                add_rows(gf, mf, qs, rels, out, r, run, size, whole, large, eps, elements, g_bits, gs, m_bits, ms)
            else:
                for k in range(run):
                    line = part(out, (r + k) * 11, 11, np.float64)
                    d, far = part(qs, k * size, size, np.float64), part(rels, k * size, size, np.float64)
                    x, y = part(gf, k * size, size, np.float32), part(mf, k * size, size, np.float32)
                    _add(line, x, y, d, far)
                    if size == width:
                        _finish(line, d, far)
                if elements.size > 0:
                    _elements(gf, qs, rels, eps, elements)
            if size < width and width == start + size:
                d, far = part(q, 0, width, np.float64), part(rel, 0, width, np.float64)
                _finish(part(out, r * 11, 11, np.float64), d, far)
        r += run


def _load_row(bits: Any, size: int, kind: int, table: Any, out: Any) -> bool:
    """One row into ``out`` (uint32, its width), block by block; whether all of it is finite."""
    for start in range(0, out.size, BLOCK):
        n = min(BLOCK, out.size - start)
        if load(part(bits, start * size, n * size, np.uint8), kind, table, part(out, start, n, np.uint32)) == 0:
            return False
    return True


def structure(
    g8: Bytes, gk: int, gt: Words, gi: Index, m8: Bytes, mk: int, mt: Words, mi: Index, sums: Numbers, gw: Words,
    mw: Words,
) -> None:  # fmt: skip
    """Adds kernels.structure's sums of rows gi of g8 and mi of m8, as for ``rows``, to ``sums``, float64 [6 * width].
    gw, mw: uint32, room for as many rows as fit into ROWS_AT_ONCE numbers, or one."""
    gs = 1 if gk == 3 else (4 if gk == 2 else 2)
    ms = 1 if mk == 3 else (4 if mk == 2 else 2)
    width: Any = sums.size // 6
    most = min(max(ROWS_AT_ONCE // width, 1), MOST_ROWS)
    scales = scratch(MOST_ROWS, np.float64)
    counted = part(sums, 4 * width, width, np.float64)
    count, n = 0.0, 0
    for r in range(gi.size):
        gr, mr = part(gw, n * width, width, np.uint32), part(mw, n * width, width, np.uint32)
        good = _load_row(part(g8, gi[r] * width * gs, width * gs, np.uint8), gs, gk, gt, gr)
        if good:
            good = _load_row(part(m8, mi[r] * width * ms, width * ms, np.uint8), ms, mk, mt, mr)
        if good:
            gf = part(gr, 0, width, np.float32)
            norm = 0.0
            for i in range(width):
                norm += np.float64(gf[i]) * np.float64(gf[i])
            if norm > 0.0:
                scales[n] = 1.0 / np.sqrt(norm)
                n += 1
                count += 1.0
        if n == most or (n > 0 and r == gi.size - 1):
            gf, mf = part(gw, 0, n * width, np.float32), part(mw, 0, n * width, np.float32)
            if width % LANES == 0:
                add_columns(gf, mf, scales, n, width, sums)
            else:
                for k in range(n):
                    _add_row(part(gf, k * width, width, np.float32), part(mf, k * width, width, np.float32), scales[k],
                             sums)  # fmt: skip
            n = 0
    for i in range(width):
        counted[i] += count


def _add_row(gf: Any, mf: Any, scale: Any, sums: Any) -> None:
    """One row's part in the sums of its columns."""
    width: Any = gf.size
    dd, gg = part(sums, 0, width, np.float64), part(sums, width, width, np.float64)
    gd, gd2 = part(sums, 2 * width, width, np.float64), part(sums, 3 * width, width, np.float64)
    off = part(sums, 5 * width, width, np.float64)
    for i in range(width):
        x = np.float64(gf[i])
        d = (np.float64(mf[i]) - x) * scale
        x *= scale
        both = x * d
        dd[i] += d * d
        gg[i] += x * x
        gd[i] += both
        gd2[i] += both * both
        off[i] += d


LOOPS = (rows, structure)
