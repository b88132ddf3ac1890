"""Stored bits into float32, block by block: the first half of the compiled loops; importing this module needs numba.

The problem: bfloat16, float16 and 8-bit floats must become numbers at the speed of memory, and positions that are not
finite must be found on the way. The idea: an integer maximum over a block's bits tells whether all are finite, so that
a clean block (nearly all are) runs through loops without branches.
What it takes to get vector code out of LLVM, each measured: maxima through llvm.maxnum with nnan and nsz (only ever of
finite numbers); parts of arrays that nothing checks (`part`), because an index that may be negative is; integer results
narrowed back to 32 bits, because numba widens them.
Not here: sums (loops.py), the machine code on disk (native.py).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from vllm_accprobe.user_cache import numba_kept

KEPT_ELSEWHERE = sys.platform == "linux"
"""There native.py keeps the machine code; numba's own cache would not notice a change in another file than its own."""
# Sums may be reordered (that is what vector code does); NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz"}


_OPTIONS = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}
entry = njit(inline="always", **_OPTIONS) if KEPT_ELSEWHERE else numba_kept(**_OPTIONS)
"""For what Python calls."""
# Only compiled code calls the others: without a way in from Python compiling them takes a tenth less time.
compiled = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS) if KEPT_ELSEWHERE else entry


def extreme_of(name: str) -> Any:
    @intrinsic
    def extreme(typing: Any, a: Any, b: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = values[0].type
            function = builder.module.declare_intrinsic(name, [kind], ir.FunctionType(kind, [kind, kind]))
            return builder.call(function, values, fastmath=("nnan", "nsz"))

        return types.float64(types.float64, types.float64), build

    return extreme


_TINY = 0x34000000
"""The float32 bits of formulas.TINY."""
larger = extreme_of("llvm.maxnum")
smaller = extreme_of("llvm.minnum")


@intrinsic
def part(typing: Any, array: Any, start: Any, n: Any, kind: Any) -> Any:
    """``n`` numbers of ``kind`` from element ``start`` of a contiguous array, or a pointer, on: no copy, no checks.
    Numba's slices and views check, and compiling them took a third of the time of all."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data, pointer = values[0], isinstance(array, types.CPointer)
        data = builder.gep(data if pointer else context.make_array(array)(context, builder, data).data, [values[1]])
        data = builder.bitcast(data, context.get_data_type(kind.dtype).as_pointer())
        size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        out = context.make_array(signature.return_type)(context, builder)
        populate_array(out, data=data, shape=[values[2]], strides=[size], itemsize=size, meminfo=None)
        return out._getvalue()

    return types.Array(kind.dtype, 1, "C")(array, types.intp, types.intp, kind), build


@compiled
def load(row: Any, kind: int, table: Any, out: Any) -> Any:
    """Bits of one block into float32 bits: 0 where not all of them are finite numbers (``out`` is then not filled), 2
    where all of their magnitudes are above TINY, else 1.
    kind: 0 bfloat16, 1 float16, 2 float32, 3 eight bits that ``table`` turns into float32's."""
    top, least = np.uint32(0), np.uint32(0x7FFFFFFF)
    if kind == 0:
        half = part(row, 0, out.size, np.uint16)
        high, low = np.uint16(0), np.uint16(0x7FFF)
        for i in range(half.size):
            b = np.uint16(half[i] & np.uint16(0x7FFF))
            high = b if b > high else high
            low = b if b < low else low
        if high >= 0x7F80:
            return 0
        finite = 2 if low > 0x3400 else 1
        for i in range(half.size):
            out[i] = np.uint32(half[i]) << np.uint32(16)
        return finite
    if kind == 1:
        half = part(row, 0, out.size, np.uint16)
        high, low = np.uint16(0), np.uint16(0x7FFF)
        for i in range(half.size):
            b = np.uint16(half[i] & np.uint16(0x7FFF))
            high = b if b > high else high
            low = b if b < low else low
        if high >= 0x7C00:
            return 0
        finite = 2 if low > 2 else 1
        # Exponent and fraction in the place of float32's; the factor makes up for the bias, exact for subnormals too.
        wide = part(out, 0, out.size, np.float32)
        for i in range(half.size):
            u = np.uint32(half[i])
            out[i] = ((u & np.uint32(0x7FFF)) << np.uint32(13)) | ((u & np.uint32(0x8000)) << np.uint32(16))
        for i in range(half.size):
            wide[i] = wide[i] * np.float32(2.0**112)
        return finite
    if kind == 2:
        word = part(row, 0, out.size, np.uint32)
        for i in range(word.size):
            w = word[i]
            out[i] = w
            u = np.uint32(w & np.uint32(0x7FFFFFFF))
            top = u if u > top else top
            least = u if u < least else least
        return 0 if top >= 0x7F800000 else 2 if least > _TINY else 1
    for i in range(row.size):
        w = table[row[i]]
        out[i] = w
        u = np.uint32(w & np.uint32(0x7FFFFFFF))
        top = u if u > top else top
        least = u if u < least else least
    return 0 if top >= 0x7F800000 else 2 if least > _TINY else 1


@compiled
def load_any(row: Any, kind: int, table: Any, out: Any) -> None:
    """The same for bits that may be NaN or infinite."""
    wide = part(out, 0, out.size, np.float32)
    if kind == 0:
        half = part(row, 0, out.size, np.uint16)
        for i in range(half.size):
            out[i] = np.uint32(half[i]) << np.uint32(16)
    elif kind == 1:
        half = part(row, 0, out.size, np.uint16)
        for i in range(half.size):
            u = np.uint32(half[i])
            sign = (u & np.uint32(0x8000)) << np.uint32(16)
            if u & np.uint32(0x7C00) == np.uint32(0x7C00):
                out[i] = sign | np.uint32(0x7F800000) | ((u & np.uint32(0x03FF)) << np.uint32(13))
            else:
                out[i] = ((u & np.uint32(0x7FFF)) << np.uint32(13)) | sign
                wide[i] *= np.float32(2.0**112)
    elif kind == 2:
        word = part(row, 0, out.size, np.uint32)
        for i in range(word.size):
            out[i] = word[i]
    else:
        for i in range(row.size):
            out[i] = table[row[i]]


@compiled
def leave_out(line: Any, g: Any, m: Any) -> None:
    """Counts in ``line``, a row of the table, the positions that are not finite on both sides, and makes them zeros,
    which add nothing to any sum."""
    out, differ = 0, 0
    for i in range(g.size):
        if not (np.isfinite(g[i]) and np.isfinite(m[i])):
            out += 1
            if not (g[i] == m[i] or (g[i] != g[i] and m[i] != m[i])):
                differ += 1
            g[i] = np.float32(0)
            m[i] = np.float32(0)
    line[0] -= out
    line[8] += out
    line[9] += differ
