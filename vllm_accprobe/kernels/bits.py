"""Stored bits into float32, block by block: the first half of the compiled loops.

The problem: bfloat16, float16 and 8-bit floats must become numbers at the speed of memory, and positions that are not
finite must be found on the way. The idea: an integer maximum over a block's bits tells whether all are finite, so that
a clean block (nearly all are) runs through loops without branches.
Not here: sums (loops.py), what the words mean (compiler.py), the machine code on disk (machine_code.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_accprobe.compiler import part

_TINY = 0x34000000
"""The float32 bits of formulas.TINY."""


def load(row: Any, kind: int, table: Any, out: Any) -> int:
    """Bits of one block into float32 bits: 0 where not all of them are finite numbers (``out`` is then not filled), 2
    where all of their magnitudes are above TINY, else 1.
    kind: 0 bfloat16, 1 float16, 2 float32, 3 eight bits that ``table`` turns into float32's."""
    top, least = np.uint32(0), np.uint32(0x7FFFFFFF)
    if kind == 0:
        half = part(row, 0, out.size, np.uint16)
        high, low = np.uint16(0), np.uint16(0x7FFF)
        for i in range(half.size):
            b = half[i] & 0x7FFF
            high = b if b > high else high
            low = b if b < low else low
        if high >= 0x7F80:
            return 0
        finite = 2 if low > 0x3400 else 1
        for i in range(half.size):
            out[i] = np.uint32(half[i]) << 16
        return finite
    if kind == 1:
        half = part(row, 0, out.size, np.uint16)
        high, low = np.uint16(0), np.uint16(0x7FFF)
        for i in range(half.size):
            b = half[i] & 0x7FFF
            high = b if b > high else high
            low = b if b < low else low
        if high >= 0x7C00:
            return 0
        finite = 2 if low > 2 else 1
        # Exponent and fraction in the place of float32's; the factor makes up for the bias, exact for subnormals too.
        wide = part(out, 0, out.size, np.float32)
        for i in range(half.size):
            u = np.uint32(half[i])
            out[i] = ((u & 0x7FFF) << 13) | ((u & 0x8000) << 16)
        for i in range(half.size):
            wide[i] = wide[i] * 2.0**112
        return finite
    if kind == 2:
        word = part(row, 0, out.size, np.uint32)
        for i in range(word.size):
            w = word[i]
            out[i] = w
            u = w & 0x7FFFFFFF
            top = u if u > top else top
            least = u if u < least else least
        return 0 if top >= 0x7F800000 else 2 if least > _TINY else 1
    for i in range(row.size):
        w = table[row[i]]
        out[i] = w
        u = w & 0x7FFFFFFF
        top = u if u > top else top
        least = u if u < least else least
    return 0 if top >= 0x7F800000 else 2 if least > _TINY else 1


def load_any(row: Any, kind: int, table: Any, out: Any) -> None:
    """The same for bits that may be NaN or infinite."""
    wide = part(out, 0, out.size, np.float32)
    if kind == 0:
        half = part(row, 0, out.size, np.uint16)
        for i in range(half.size):
            out[i] = np.uint32(half[i]) << 16
    elif kind == 1:
        half = part(row, 0, out.size, np.uint16)
        for i in range(half.size):
            u = np.uint32(half[i])
            sign = (u & 0x8000) << 16
            if u & 0x7C00 == 0x7C00:
                out[i] = sign | 0x7F800000 | ((u & 0x03FF) << 13)
            else:
                out[i] = ((u & 0x7FFF) << 13) | sign
                wide[i] *= 2.0**112
    elif kind == 2:
        word = part(row, 0, out.size, np.uint32)
        for i in range(word.size):
            out[i] = word[i]
    else:
        for i in range(row.size):
            out[i] = table[row[i]]


def leave_out(line: Any, g: Any, m: Any) -> None:
    """Counts in ``line``, a row of the table, the positions that are not finite on both sides, and makes them zeros,
    which add nothing to any sum."""
    out, differ = 0, 0
    for i in range(g.size):
        if not (np.isfinite(g[i]) and np.isfinite(m[i])):
            out += 1
            if not (g[i] == m[i] or (g[i] != g[i] and m[i] != m[i])):
                differ += 1
            g[i] = 0
            m[i] = 0
    line[0] -= out
    line[8] += out
    line[9] += differ
