"""The compiled loops behind kernel.py; importing this module needs numba.

The problem: fifteen sums and maxima of two streams of odd floats at the speed of memory. The idea: a row is walked in
blocks of 2048 elements that stay in the first-level cache. A block's bits are turned into float32 in a buffer, and an
integer maximum over them tells whether all are finite; a clean block then runs through loops without branches whose
accumulators are float64, a dirty one (rare) through a scalar loop that leaves positions out. What the peak needs after
the row's norm is known is kept in two row-wide buffers, so the inputs are read once.
What it takes to get vector code out of LLVM, each measured: maxima through llvm.maxnum with nnan and nsz (only ever of
finite numbers); slices before loops, because an index that may be negative is checked for it; integer results narrowed
back to 32 bits, because numba widens them.
Not here: dtypes' names and tables, bounds, the meaning of the columns (kernel.py, oracle.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

SHIFT16, HALF, PLAIN32, TABLE8 = range(4)
# Sums may be reordered (that is what vector code does); NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}


def _compile(function: Any) -> Any:
    options = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no place to cache in: a read-only installation without a home
        return njit(**options)(function)


def _extreme(name: str) -> Any:
    @intrinsic
    def extreme(typing: Any, a: Any, b: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = values[0].type
            function = builder.module.declare_intrinsic(name, [kind], ir.FunctionType(kind, [kind, kind]))
            return builder.call(function, values, fastmath=("nnan", "nsz"))

        return types.float64(types.float64, types.float64), build

    return extreme


_larger = _extreme("llvm.maxnum")
_smaller = _extreme("llvm.minnum")


@_compile
def _load(row: Any, kind: int, table: Any, out: Any) -> Any:
    """Bits of one block into float32 bits; whether all of them are finite numbers (if not, ``out`` is not filled)."""
    top = np.uint32(0)
    if kind == 0:
        half = row.view(np.uint16)
        high = np.uint16(0)
        for i in range(half.size):
            b = np.uint16(half[i] & np.uint16(0x7FFF))
            high = b if b > high else high
        if high >= 0x7F80:
            return False
        for i in range(half.size):
            out[i] = np.uint32(half[i]) << np.uint32(16)
        return True
    if kind == 1:
        half = row.view(np.uint16)
        high = np.uint16(0)
        for i in range(half.size):
            b = np.uint16(half[i] & np.uint16(0x7FFF))
            high = b if b > high else high
        if high >= 0x7C00:
            return False
        # Exponent and fraction in the place of float32's; the factor makes up for the bias, exact for subnormals too.
        wide = out.view(np.float32)
        for i in range(half.size):
            u = np.uint32(half[i])
            out[i] = ((u & np.uint32(0x7FFF)) << np.uint32(13)) | ((u & np.uint32(0x8000)) << np.uint32(16))
        for i in range(half.size):
            wide[i] = wide[i] * np.float32(2.0**112)
        return True
    if kind == 2:
        word = row.view(np.uint32)
        for i in range(word.size):
            w = word[i]
            out[i] = w
            u = np.uint32(w & np.uint32(0x7FFFFFFF))
            top = u if u > top else top
        return top < 0x7F800000
    for i in range(row.size):
        w = table[row[i]]
        out[i] = w
        u = np.uint32(w & np.uint32(0x7FFFFFFF))
        top = u if u > top else top
    return top < 0x7F800000


@_compile
def _load_any(row: Any, kind: int, table: Any, out: Any) -> None:
    """The same for bits that may be NaN or infinite."""
    if kind == 0:
        half = row.view(np.uint16)
        for i in range(half.size):
            out[i] = np.uint32(half[i]) << np.uint32(16)
    elif kind == 1:
        half = row.view(np.uint16)
        for i in range(half.size):
            u = np.uint32(half[i])
            sign = (u & np.uint32(0x8000)) << np.uint32(16)
            if u & np.uint32(0x7C00) == np.uint32(0x7C00):
                out[i] = sign | np.uint32(0x7F800000) | ((u & np.uint32(0x03FF)) << np.uint32(13))
            else:
                out[i] = ((u & np.uint32(0x7FFF)) << np.uint32(13)) | sign
                out.view(np.float32)[i] *= np.float32(2.0**112)
    elif kind == 2:
        out[:] = row.view(np.uint32)
    else:
        for i in range(row.size):
            out[i] = table[row[i]]


@_compile
def _leave_out(g: Any, m: Any) -> Any:
    """Zeroes positions that are not finite on both sides: (how many, how many of them differ)."""
    out, differ = 0, 0
    for i in range(g.size):
        if not (np.isfinite(g[i]) and np.isfinite(m[i])):
            out += 1
            if not (g[i] == m[i] or (g[i] != g[i] and m[i] != m[i])):
                differ += 1
            g[i] = np.float32(0)
            m[i] = np.float32(0)
    return out, differ


@_compile
def _sums(g: Any, m: Any, q: Any, rel: Any) -> Any:
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
        top = _larger(top, d)
    for i in range(g.size):
        a = abs(np.float64(g[i]))
        r = q[i] / a
        rel[i] = r if a > 0.0 else np.inf
        far = _larger(far, r if a > 0.0 else 0.0)
    return gg, mm, gm, dd, ad, top, far


@_compile
def _elements(g: Any, q: Any, rel: Any, eps: float, out: Any) -> None:
    """Adds oracle.ELEMENT_FIELDS of one stretch to ``out``; positions left out are counted as zero errors of zero."""
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
        top_rel = _larger(top_rel, r)
        top_abs = _larger(top_abs, d)
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


@_compile
def _peak(q: Any, rel: Any, scale: float) -> float:
    top = 0.0
    for i in range(q.size):
        top = _larger(top, _smaller(rel[i], q[i] * scale))
    return top


@_compile
def _finish(line: Any, width: int, q: Any, rel: Any) -> None:
    """The columns that need the whole row: counts of finite positions, largest relative error, peak."""
    line[0] = width - line[8]
    if line[1] > 0.0:
        if line[6] > 0.0:
            line[10] = _peak(q, rel, 1.0 / np.sqrt(line[1] / max(line[0], 1.0)))
    else:
        line[7] = -1.0
        if line[6] > 0.0:
            line[10] = np.inf


@_compile
def _add(line: Any, g: Any, m: Any, clean: bool, q: Any, rel: Any) -> None:
    """One row's part in a block: ``line`` takes it in."""
    if not clean:
        out, differ = _leave_out(g, m)
        line[8] += out
        line[9] += differ
    gg, mm, gm, dd, ad, top, far = _sums(g, m, q, rel)
    line[1] += gg
    line[2] += mm
    line[3] += gm
    line[4] += dd
    line[5] += ad
    line[6] = max(line[6], top)
    line[7] = max(line[7], far)


@_compile
def _neighbours(gi: Any, mi: Any, most: Any) -> Any:
    """How many rows from the first on follow each other on both sides."""
    n, most = 1, min(most, gi.size)
    while n < most and gi[n] == gi[0] + n and mi[n] == mi[0] + n:
        n += 1
    return n


@_compile
def rows(
    g8: Any, gk: int, gt: Any, gi: Any, m8: Any, mk: int, mt: Any, mi: Any, out: Any, eps: float, elements: Any
) -> None:
    """The row table of rows gi of g8 against rows mi of m8 into ``out`` (zeroed float64 [n, 11]).

    g8, m8: uint8, the rows one after the other, of elements of kinds gk and mk; gt, mt: uint32[256] for TABLE8. A row's
    width is in ``out``'s first column. elements: float64 [10], to which _elements adds.
    """
    gs = 1 if gk == 3 else (4 if gk == 2 else 2)
    ms = 1 if mk == 3 else (4 if mk == 2 else 2)
    width: Any = np.int64(out[0, 0])
    gb, mb = np.empty(2048, np.uint32), np.empty(2048, np.uint32)
    # |d| and |d| / |g|: of one row where a block is a part of it, of a block where that is several rows.
    size: Any = max(width, 2048)
    q, rel = np.empty(size, np.float64), np.empty(size, np.float64)
    r = 0
    while r < gi.size:
        run: Any = _neighbours(gi[r:], mi[r:], max(2048 // width, 1))
        for start in range(0, width, 2048):
            # Either several whole rows, or a part of one.
            n = run * width if width <= 2048 else min(2048, width - start)
            g_at, m_at = (gi[r] * width + start) * gs, (mi[r] * width + start) * ms
            g_bits, m_bits = g8[g_at : g_at + n * gs], m8[m_at : m_at + n * ms]
            gw, mw = gb[:n], mb[:n]
            clean_g, clean_m = _load(g_bits, gk, gt, gw), _load(m_bits, mk, mt, mw)
            clean = clean_g and clean_m
            if not clean:
                _load_any(g_bits, gk, gt, gw)
                _load_any(m_bits, mk, mt, mw)
            gf, mf = gw.view(np.float32), mw.view(np.float32)
            part = n // run
            for k in range(run):
                here, there = k * part, (k + 1) * part
                to_q, to_rel = q[start + here : start + there], rel[start + here : start + there]
                _add(out[r + k], gf[here:there], mf[here:there], clean, to_q, to_rel)
                if start + part == width:
                    _finish(out[r + k], width, q[here : here + width], rel[here : here + width])
            _elements(gf, q[start : start + n], rel[start : start + n], eps, elements)
        r += run


@_compile
def columns(g8: Any, gk: int, gt: Any, gi: Any, m8: Any, mk: int, mt: Any, mi: Any, dd: Any, gg: Any) -> None:
    """Adds d*d and g*g of rows gi of g8 and mi of m8, as for ``rows``, to the sums dd and gg, float64 [width]."""
    gs = 1 if gk == 3 else (4 if gk == 2 else 2)
    ms = 1 if mk == 3 else (4 if mk == 2 else 2)
    gb, mb = np.empty(2048, np.uint32), np.empty(2048, np.uint32)
    # Block by block over all rows, so that a block's sums stay in the cache.
    for start in range(0, dd.size, 2048):
        n = min(2048, dd.size - start)
        gw, mw = gb[:n], mb[:n]
        gf, mf = gw.view(np.float32), mw.view(np.float32)
        to_dd, to_gg = dd[start : start + n], gg[start : start + n]
        for r in range(gi.size):
            g_at, m_at = (gi[r] * dd.size + start) * gs, (mi[r] * dd.size + start) * ms
            g_bits, m_bits = g8[g_at : g_at + n * gs], m8[m_at : m_at + n * ms]
            clean_g, clean_m = _load(g_bits, gk, gt, gw), _load(m_bits, mk, mt, mw)
            if not (clean_g and clean_m):
                _load_any(g_bits, gk, gt, gw)
                _load_any(m_bits, mk, mt, mw)
                _leave_out(gf, mf)
            for i in range(n):
                x = np.float64(gf[i])
                d = np.float64(mf[i]) - x
                to_dd[i] += d * d
                to_gg[i] += x * x


@_compile
def _load_row(bits: Any, size: int, kind: int, table: Any, out: Any) -> Any:
    """One row into ``out`` (uint32, its width), block by block; whether all of it is finite."""
    for start in range(0, out.size, 2048):
        stop = min(start + 2048, out.size)
        if not _load(bits[start * size : stop * size], kind, table, out[start:stop]):
            return False
    return True


@_compile
def structure(g8: Any, gk: int, gt: Any, gi: Any, m8: Any, mk: int, mt: Any, mi: Any, sums: Any, count: Any) -> Any:
    """Adds metrics.structure's sums of rows gi of g8 and mi of m8, as for ``rows``, to ``sums``, float64 [5, width];
    returns ``count`` plus how many rows that were."""
    gs = 1 if gk == 3 else (4 if gk == 2 else 2)
    ms = 1 if mk == 3 else (4 if mk == 2 else 2)
    width: Any = sums.shape[1]
    gw, mw = np.empty(width, np.uint32), np.empty(width, np.uint32)
    gf, mf = gw.view(np.float32), mw.view(np.float32)
    dd, gg, gd, gd2, off = sums[0], sums[1], sums[2], sums[3], sums[4]
    for r in range(gi.size):
        if not _load_row(g8[gi[r] * width * gs : (gi[r] + 1) * width * gs], gs, gk, gt, gw):
            continue
        if not _load_row(m8[mi[r] * width * ms : (mi[r] + 1) * width * ms], ms, mk, mt, mw):
            continue
        norm = 0.0
        for i in range(width):
            norm += np.float64(gf[i]) * np.float64(gf[i])
        if not norm > 0.0:
            continue
        scale = 1.0 / np.sqrt(norm)
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
        count += 1
    return count
