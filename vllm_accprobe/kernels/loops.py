"""The compiled loops behind rows.py; importing this module needs numba.

The problem: fifteen sums and maxima of two streams of floats at the speed of memory. The idea: a row is walked in
blocks that stay in the first-level cache; a block becomes float32 in a buffer (bits.py), and runs through loops without
branches whose accumulators are float64. What the peak needs after the row's norm is known is kept in two row-wide
buffers, so the inputs are read once. All buffers are the caller's, so that the machine code needs nothing of Python's:
`objects` compiles the loops into plain C functions, whose object code native.py keeps.
Not here: dtypes' names and tables, bounds, the meaning of the columns (rows.py, definition.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, types

from vllm_accprobe.kernels import BLOCK
from vllm_accprobe.kernels.bits import FAST, compiled, entry, larger, leave_out, load, load_any, smaller
from vllm_accprobe.kernels.vectors import LANES, add_rows


@compiled
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
        top = larger(top, d)
    for i in range(g.size):
        a = abs(np.float64(g[i]))
        r = q[i] / a
        rel[i] = r if a > 0.0 else np.inf
        far = larger(far, r if a > 0.0 else 0.0)
    return gg, mm, gm, dd, ad, top, far


@compiled
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


@compiled
def _peak(q: Any, rel: Any, scale: float) -> float:
    top = 0.0
    for i in range(q.size):
        top = larger(top, smaller(rel[i], q[i] * scale))
    return top


@compiled
def _finish(line: Any, q: Any, rel: Any) -> None:
    """The columns that need the whole row: largest relative error, peak."""
    if line[1] > 0.0:
        if line[6] > 0.0:
            line[10] = _peak(q, rel, 1.0 / np.sqrt(line[1] / max(line[0], 1.0)))
    else:
        line[7] = -1.0
        if line[6] > 0.0:
            line[10] = np.inf


@compiled
def _add(line: Any, g: Any, m: Any, q: Any, rel: Any) -> None:
    """One row's part in a block: ``line`` takes it in."""
    gg, mm, gm, dd, ad, top, far = _sums(g, m, q, rel)
    line[1] += gg
    line[2] += mm
    line[3] += gm
    line[4] += dd
    line[5] += ad
    line[6] = max(line[6], top)
    line[7] = max(line[7], far)


@compiled
def _leave_out(line: Any, g: Any, m: Any) -> None:
    """Counts in ``line`` what is not finite on both sides, and makes it zeros, which add nothing to any sum."""
    out, differ = leave_out(g, m)
    line[0] -= out
    line[8] += out
    line[9] += differ


@compiled
def _neighbours(gi: Any, mi: Any, most: Any) -> Any:
    """How many rows from the first on follow each other on both sides."""
    n, most = 1, min(most, gi.size)
    while n < most and gi[n] == gi[0] + n and mi[n] == mi[0] + n:
        n += 1
    return n


@entry
def rows(
    g8: Any, gk: int, gt: Any, gi: Any, m8: Any, mk: int, mt: Any, mi: Any, out: Any, eps: float, elements: Any,
    gb: Any, mb: Any, q: Any, rel: Any,
) -> None:  # fmt: skip
    """The row table of rows gi of g8 against rows mi of m8 into ``out`` (zeroed float64 [n, 11]).

    g8, m8: uint8, the rows one after the other, of elements of kinds gk and mk; gt, mt: uint32[256] for kind 3. A row's
    width is in ``out``'s first column. elements: float64 [10], to which _elements adds. gb, mb: uint32, room for BLOCK;
    q, rel: float64, room for the larger of BLOCK and the width: |d| and |d| / |g|, of one row where a block is a part
    of it, of a block where that is several rows.
    """
    gs = 1 if gk == 3 else (4 if gk == 2 else 2)
    ms = 1 if mk == 3 else (4 if mk == 2 else 2)
    width: Any = np.int64(out[0, 0])
    r = 0
    while r < gi.size:
        run: Any = _neighbours(gi[r:], mi[r:], max(BLOCK // width, 1))
        for start in range(0, width, BLOCK):
            # Either several whole rows, or a part of one.
            n = run * width if width <= BLOCK else min(BLOCK, width - start)
            g_at, m_at = (gi[r] * width + start) * gs, (mi[r] * width + start) * ms
            g_bits, m_bits = g8[g_at : g_at + n * gs], m8[m_at : m_at + n * ms]
            gw, mw = gb[:n], mb[:n]
            clean_g, clean_m = load(g_bits, gk, gt, gw), load(m_bits, mk, mt, mw)
            clean, large = clean_g > 0 and clean_m > 0, clean_g == 2 and clean_m > 0
            if not clean:
                load_any(g_bits, gk, gt, gw)
                load_any(m_bits, mk, mt, mw)
            gf, mf = gw.view(np.float32), mw.view(np.float32)
            part = n // run
            if not clean:
                for k in range(run):
                    _leave_out(out[r + k], gf[k * part : (k + 1) * part], mf[k * part : (k + 1) * part])
            qs, rels = q[start : start + n], rel[start : start + n]
            if part % LANES == 0:
                whole = part == width
                add_rows(gf, mf, qs, rels, out, r, run, part, whole, large, eps, elements, g_bits, gs, m_bits, ms)
            else:
                for k in range(run):
                    here, there = k * part, (k + 1) * part
                    _add(out[r + k], gf[here:there], mf[here:there], qs[here:there], rels[here:there])
                    if part == width:
                        _finish(out[r + k], qs[here:there], rels[here:there])
                _elements(gf, qs, rels, eps, elements)
            if part < width == start + part:
                _finish(out[r], q[:width], rel[:width])
        r += run


@compiled
def _load_row(bits: Any, size: int, kind: int, table: Any, out: Any) -> Any:
    """One row into ``out`` (uint32, its width), block by block; whether all of it is finite."""
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        if load(bits[start * size : stop * size], kind, table, out[start:stop]) == 0:
            return False
    return True


@entry
def structure(
    g8: Any, gk: int, gt: Any, gi: Any, m8: Any, mk: int, mt: Any, mi: Any, sums: Any, gw: Any, mw: Any
) -> None:
    """Adds kernels.structure's sums of rows gi of g8 and mi of m8, as for ``rows``, to ``sums``, float64 [6, width].
    gw, mw: uint32, room for the width."""
    gs = 1 if gk == 3 else (4 if gk == 2 else 2)
    ms = 1 if mk == 3 else (4 if mk == 2 else 2)
    width: Any = sums.shape[1]
    gf, mf = gw.view(np.float32), mw.view(np.float32)
    dd, gg, gd, gd2, off = sums[0], sums[1], sums[2], sums[3], sums[5]
    count = 0.0
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
        count += 1.0
    for i in range(width):
        sums[4, i] += count


# --- the loops as C functions of one signature, arrays as addresses: numba takes a third of a second to be imported ---

_BYTES, _WORDS = types.CPointer(types.uint8), types.CPointer(types.uint32)
_INDEX, _NUMBERS = types.CPointer(types.int64), types.CPointer(types.float64)
_SIDE = (_BYTES, types.int64, types.int64, _WORDS, _INDEX)
SIGNATURE = types.void(
    *_SIDE, *_SIDE, types.int64, _NUMBERS, types.int64, types.float64, _NUMBERS, _WORDS, _WORDS, _NUMBERS, _NUMBERS
)
"""Of each side: bytes, how many, kind, table, rows. Then: how many rows, the result, width, eps, elements, buffers."""


def _rows(
    g: Any, gn: Any, gk: Any, gt: Any, gi: Any, m: Any, mn: Any, mk: Any, mt: Any, mi: Any, n: Any, out: Any,
    width: Any, eps: Any, elements: Any, a: Any, b: Any, q: Any, rel: Any,
) -> None:  # fmt: skip
    size = max(width, BLOCK)
    rows(
        carray(g, (gn,)), gk, carray(gt, (256,)), carray(gi, (n,)), carray(m, (mn,)), mk, carray(mt, (256,)),
        carray(mi, (n,)), carray(out, (n, 11)), eps, carray(elements, (10,)), carray(a, (BLOCK,)), carray(b, (BLOCK,)),
        carray(q, (size,)), carray(rel, (size,)),
    )  # fmt: skip


def _structure(
    g: Any, gn: Any, gk: Any, gt: Any, gi: Any, m: Any, mn: Any, mk: Any, mt: Any, mi: Any, n: Any, out: Any,
    width: Any, eps: Any, elements: Any, a: Any, b: Any, q: Any, rel: Any,
) -> None:  # fmt: skip
    structure(
        carray(g, (gn,)), gk, carray(gt, (256,)), carray(gi, (n,)), carray(m, (mn,)), mk, carray(mt, (256,)),
        carray(mi, (n,)), carray(out, (6, width)), carray(a, (width,)), carray(b, (width,)),
    )  # fmt: skip


def objects() -> dict[str, tuple[str, list[str], bytes]]:
    """By name of the loop: (its symbol, the symbols it does not define itself, object code). Takes some seconds."""
    out = {}
    for name, function in (("rows", _rows), ("structure", _structure)):
        made = cfunc(SIGNATURE, error_model="numpy", fastmath=FAST)(function)
        library = made._library
        module = library._final_module
        every = [*module.functions, *module.global_variables]
        foreign = [x.name for x in every if x.is_declaration and not x.name.startswith("llvm.")]
        out[name] = made.native_name, foreign, library.serialize_using_object_code()[2][0]
    return out
