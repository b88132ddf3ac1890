"""The row table in one pass over the stored bits, compiled by numba, without the interpreter's lock.

The problem: plain numpy reads each array a dozen times and makes a float64 copy of both sides first. The idea: one row
at a time is turned into float64 in a buffer that stays in the cache, and all sums and maxima are taken there; which
rows meet is given as two index lists, so that gathering makes no copy either. Maxima of non-negative floats are taken
on their bits as integers, because compilers turn that into vector code and do not do so for floats with NaN.
bfloat16, float16, float32 and 8-bit floats run here; everything else, and a Python without numba, goes to oracle.py.
Not here: the meaning of the columns (oracle.ROW_FIELDS).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from vllm_accprobe.metrics import oracle

_SHIFT16, _TABLE16, _PLAIN32, _TABLE8 = range(4)
_KINDS = {"bfloat16": _SHIFT16, "float16": _TABLE16, "float32": _PLAIN32}
Widen = Callable[[np.ndarray, str], np.ndarray]


def rows(
    golden: np.ndarray,
    golden_dtype: str,
    golden_rows: np.ndarray,
    mine: np.ndarray,
    mine_dtype: str,
    mine_rows: np.ndarray,
    widen: Widen,
    *,
    compiled: bool = True,
) -> np.ndarray:
    """Row table (float64 [n, 11], oracle.ROW_FIELDS) of golden[golden_rows[i]] against mine[mine_rows[i]].

    golden, mine: stored bits, C order, [rows, width] of equal width; dtypes: torch names; golden_rows, mine_rows:
    int64 [n], within bounds (checked). widen turns stored bits into numbers (dump.dtypes.widen). compiled=False: the
    oracle.
    """
    if golden.ndim != 2 or mine.ndim != 2 or golden.shape[1] != mine.shape[1]:
        raise ValueError(f"rows of different width: {golden.shape} and {mine.shape}")
    for index, side in ((golden_rows, golden), (mine_rows, mine)):
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(side)):
            raise IndexError(f"row index outside an array of {len(side)} rows")
    run = _compiled() if compiled and golden.shape[1] and _fits(golden_dtype) and _fits(mine_dtype) else None
    if run is None:
        return oracle.row_table(widen(golden[golden_rows], golden_dtype), widen(mine[mine_rows], mine_dtype))
    out = np.zeros((len(mine_rows), len(oracle.ROW_FIELDS)))
    g, m = (np.ascontiguousarray(a).view(np.uint8) for a in (golden, mine))
    gt, mt = _table(golden_dtype, widen), _table(mine_dtype, widen)
    gi, mi = golden_rows.astype(np.int64), mine_rows.astype(np.int64)
    run(g, _kind(golden_dtype), gt, gi, m, _kind(mine_dtype), mt, mi, out)
    return out


def _kind(dtype: str) -> int:
    return _KINDS.get(dtype, _TABLE8)


def _fits(dtype: str) -> bool:
    return dtype in _KINDS or dtype.startswith("float8")


_NO_TABLE = np.zeros(1, np.uint32)
_TABLES: dict[str, np.ndarray] = {}


def _table(dtype: str, widen: Widen) -> np.ndarray:
    """float32 bits by stored bits, for dtypes that need a table. The dictionary is a cache of constants."""
    kind = _kind(dtype)
    if kind in (_SHIFT16, _PLAIN32):
        return _NO_TABLE
    if dtype not in _TABLES:
        codes = np.arange(256, dtype=np.uint8)
        if kind == _TABLE16:
            codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        _TABLES[dtype] = np.ascontiguousarray(widen(codes, dtype), dtype=np.float32).view(np.uint32)
    return _TABLES[dtype]


@cache
def _compiled() -> Any:
    """The compiled loop, or None where numba is missing. Compiled once per machine (numba's cache on disk)."""
    try:
        from numba import njit
    except ImportError:
        return None
    # Sums may be reordered (that is what vector code does); NaN and infinity keep their meaning.
    flags = {"reassoc", "contract", "nsz"}

    @njit(nogil=True, cache=True, fastmath=flags, inline="never")
    def load(row, kind, table, bits):  # type: ignore[no-untyped-def]
        if kind == 0:
            half = row.view(np.uint16)
            for i in range(len(bits)):
                bits[i] = np.uint32(half[i]) << np.uint32(16)
        elif kind == 1:
            half = row.view(np.uint16)
            for i in range(len(bits)):
                bits[i] = table[half[i]]
        elif kind == 2:
            bits[:] = row.view(np.uint32)
        else:
            for i in range(len(bits)):
                bits[i] = table[row[i]]

    @njit(nogil=True, cache=True, fastmath=flags, inline="never")
    def dirty(g, m, line):  # type: ignore[no-untyped-def]
        # Zeroes positions that are not finite on both sides, and counts them.
        for i in range(len(g)):
            if not (np.isfinite(g[i]) and np.isfinite(m[i])):
                line[8] += 1
                same = g[i] == m[i] or (g[i] != g[i] and m[i] != m[i])
                if not same:
                    line[9] += 1
                g[i] = 0.0
                m[i] = 0.0

    @njit(nogil=True, cache=True, fastmath=flags, error_model="numpy")
    def run(g8, gk, gt, gi, m8, mk, mt, mi, out):  # type: ignore[no-untyped-def]
        size = 1 if gk == 3 else (4 if gk == 2 else 2)
        width = g8.shape[1] // size
        gb, mb = np.empty(width, np.uint32), np.empty(width, np.uint32)
        g, m, q = np.empty(width), np.empty(width), np.empty(width)
        qi = q.view(np.int64)
        exponent = np.uint32(0x7F800000)
        for r in range(len(gi)):
            line = out[r]
            load(g8[gi[r]], gk, gt, gb)
            load(m8[mi[r]], mk, mt, mb)
            gf, mf = gb.view(np.float32), mb.view(np.float32)
            odd = np.int32(0)
            for i in range(width):
                odd += np.int32((gb[i] & exponent) == exponent) | np.int32((mb[i] & exponent) == exponent)
                g[i] = gf[i]
                m[i] = mf[i]
            if odd:
                dirty(g, m, line)
            gg = mm = gm = dd = ad = 0.0
            for i in range(width):
                x, y = g[i], m[i]
                d = abs(y - x)
                gg += x * x
                mm += y * y
                gm += x * y
                dd += d * d
                ad += d
            n = width - line[8]
            line[0], line[1], line[2], line[3], line[4], line[5] = n, gg, mm, gm, dd, ad
            line[7] = -1.0
            for i in range(width):
                q[i] = abs(m[i] - g[i])
            top = np.int64(0)
            for i in range(width):
                top = qi[i] if qi[i] > top else top
            q[0], first = q[0], q[0]
            qi[0] = top
            line[6] = q[0]
            q[0] = first
            any_g = np.int32(0)
            for i in range(width):
                a = abs(g[i])
                any_g += np.int32(a > 0)
                q[i] = abs(m[i] - g[i]) / a if a > 0 else 0.0
            if any_g:
                top = np.int64(0)
                for i in range(width):
                    top = qi[i] if qi[i] > top else top
                qi[0] = top
                line[7] = q[0]
            rms = np.sqrt(gg / max(n, 1.0))
            if rms > 0:
                for i in range(width):
                    a = abs(g[i])
                    q[i] = abs(m[i] - g[i]) / (a if a > rms else rms)
                top = np.int64(0)
                for i in range(width):
                    top = qi[i] if qi[i] > top else top
                qi[0] = top
                line[10] = q[0]
            elif line[6] > 0:
                line[10] = np.inf

    return run


def warm_up() -> None:
    """Compiles or loads the loop (some seconds the first time on a machine); safe to call from any thread."""
    one = np.zeros((1, 1), np.uint16)
    at = np.zeros(1, np.int64)
    rows(one, "bfloat16", at, one, "bfloat16", at, lambda a, _: a.astype(np.float32))
