"""Compiled kernels for stats.py; importing this module needs numba.

The problem: one pass over the bytes at several GB/s with float64 accumulators, for floats that numpy does not know,
with NaN and Inf left out. The idea: walk blocks that stay in the first-level cache. The bits of a float, with the
magnitude of negative ones inverted, are integers in the order of the floats, so minimum and maximum are integer
reductions, which LLVM vectorises where it would not for floats; they also tell whether the block holds a NaN or Inf at
all. A clean block is summed by a loop without branches; a dirty one (rare) element by element. Floats of the kinds that
models compute in are also taken straight from an address, one piece or many in a call, since for a small tensor the
making of arrays would cost more than the sums. Not here: names, dtypes' tables, merging.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from vllm_accprobe.user_cache import numba_kept

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2
KINDS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
"""The floats that ``with_gil`` and ``spans`` know."""
_BLOCK = 2048
# The sums may be reordered (that is what vectorising is); nothing may assume that NaN does not happen.
_FAST = {"reassoc", "contract", "nsz"}


_OPTIONS = {"nogil": True, "fastmath": _FAST}
_compile = numba_kept(**_OPTIONS)
_inner = njit(**_OPTIONS)
"""For functions that call others of their closure: numba would keep them, and find none of them again."""


@_compile
def histogram(data: np.ndarray) -> np.ndarray:
    """How often each byte occurs: int64[256]. Four tables, so that equal neighbours do not wait for each other."""
    table = np.zeros((4, 256), np.int64)
    n4 = data.size - data.size % 4
    for i in range(0, n4, 4):
        table[0, data[i]] += 1
        table[1, data[i + 1]] += 1
        table[2, data[i + 2]] += 1
        table[3, data[i + 3]] += 1
    for i in range(n4, data.size):
        table[0, data[i]] += 1
    return table[0] + table[1] + table[2] + table[3]


@_compile
def _sum_clean(x: np.ndarray) -> tuple[float, float]:
    s = 0.0
    q = 0.0
    for i in range(x.size):
        v = np.float64(x[i])
        s += v
        q += v * v
    return s, q


def _bits_as(number: Any, integer: Any, llvm: Any) -> Any:
    """An intrinsic: the float with the bits of an integer."""

    @intrinsic
    def bits_as(typing: Any, bits: Any) -> Any:
        return number(integer), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], llvm)

    return bits_as


_as_float32 = _bits_as(types.float32, types.int32, ir.FloatType())
_as_float64 = _bits_as(types.float64, types.int64, ir.DoubleType())


@_compile
def _bfloat16_value(bits: int) -> float:
    return np.float64(_as_float32(np.int32(np.int32(bits) << np.int32(16))))


@_compile
def _float16_value(bits: int) -> float:
    u = np.uint32(np.uint16(bits))
    wide = ((u & np.uint32(0x7FFF)) << np.uint32(13)) | ((u & np.uint32(0x8000)) << np.uint32(16))
    return np.float64(_as_float32(np.int32(wide)) * np.float32(2.0**112))


@_compile
def _float32_value(bits: int) -> float:
    return np.float64(_as_float32(bits))


@_compile
def _float64_value(bits: int) -> float:
    return _as_float64(bits)  # type: ignore[no-any-return]


_Sums = tuple[int, int, int, float, float, int, int]
"""(finite, min, max, sum, sum of squares, NaN, Inf); the extremes are ordered bits."""


def _adds_up(word: Any, infinity: int, value: Any) -> Callable[[np.ndarray], _Sums]:
    """What takes the sums of floats. word: of the signed integers that their bits are; infinity: as one of them; value:
    the number that such bits are."""
    top, shift = int(np.iinfo(word).max), np.iinfo(word).bits - 1

    @_inner
    def sum_clean(block: np.ndarray) -> tuple[float, float]:
        s = 0.0
        q = 0.0
        for i in range(block.size):
            v = value(block[i])
            s += v
            q += v * v
        return s, q

    @_inner
    def add(block: np.ndarray, sums: Any) -> Any:
        n, low, high, total, squares, nan, inf = sums
        lo, hi = word(top), word(-top - 1)
        for i in range(block.size):
            b = block[i]
            key = word(b ^ word(word(b >> word(shift)) & word(top)))
            lo = key if key < lo else lo
            hi = key if key > hi else hi
        if hi < infinity and lo > -infinity - 1:
            s, q = sum_clean(block)
            return n + block.size, min(low, np.int64(lo)), max(high, np.int64(hi)), total + s, squares + q, nan, inf
        for i in range(block.size):
            b = block[i]
            magnitude = word(b & word(top))
            if magnitude > infinity:
                nan += 1
            elif magnitude == infinity:
                inf += 1
            else:
                key64 = np.int64(word(b ^ word(word(b >> word(shift)) & word(top))))
                low, high = min(low, key64), max(high, key64)
                v = value(b)
                n += 1
                total += v
                squares += v * v
        return n, low, high, total, squares, nan, inf

    @_inner
    def every(bits: np.ndarray) -> Any:
        sums = _EMPTY
        for start in range(0, bits.size, _BLOCK):
            sums = add(bits[start : start + _BLOCK], sums)
        return sums

    return every  # type: ignore[no-any-return]


_HIGHEST = np.iinfo(np.int64).max
_EMPTY = (0, _HIGHEST, -_HIGHEST - 1, 0.0, 0.0, 0, 0)
_bfloat16 = _adds_up(np.int16, 0x7F80, _bfloat16_value)
_float16 = _adds_up(np.int16, 0x7C00, _float16_value)
_float32 = _adds_up(np.int32, 0x7F800000, _float32_value)
_float64 = _adds_up(np.int64, 0x7FF0000000000000, _float64_value)


@_compile
def _integers(x: np.ndarray) -> tuple[float, float, float, float]:
    lo, hi = x[0], x[0]
    for i in range(x.size):
        v = x[i]
        lo = v if v < lo else lo
        hi = v if v > hi else hi
    total, squares = 0.0, 0.0
    for start in range(0, x.size, _BLOCK):
        s, q = _sum_clean(x[start : start + _BLOCK])
        total += s
        squares += q
    return np.float64(lo), np.float64(hi), total, squares


@intrinsic
def _int16_at(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(16).as_pointer())

    return types.CPointer(types.int16)(types.int64), generate


@intrinsic
def _int32_at(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())

    return types.CPointer(types.int32)(types.int64), generate


@_compile
def _doubles(bits: np.ndarray) -> _Sums:
    return _float64(bits)  # type: ignore[no-any-return]


@_compile
def _decode(key: int, kind: int) -> float:
    """The float whose ordered bits are ``key``."""
    if kind == FLOAT32:
        return _float32_value(np.int32(key ^ ((key >> 31) & 0x7FFFFFFF)))  # type: ignore[no-any-return]
    half = np.int16(key ^ ((key >> 15) & 0x7FFF))
    return _bfloat16_value(half) if kind == BFLOAT16 else _float16_value(half)  # type: ignore[no-any-return]


@_compile
def _piece(address: int, nbytes: int, kind: int) -> tuple[int, float, float, float, float, int, int]:
    if kind == FLOAT32:
        n, low, high, total, squares, nan, inf = _float32(carray(_int32_at(address), nbytes // 4))
    elif kind == BFLOAT16:
        n, low, high, total, squares, nan, inf = _bfloat16(carray(_int16_at(address), nbytes // 2))
    else:
        n, low, high, total, squares, nan, inf = _float16(carray(_int16_at(address), nbytes // 2))
    if n == 0:
        return 0, np.inf, -np.inf, 0.0, 0.0, nan, inf
    return n, _decode(low, kind), _decode(high, kind), total, squares, nan, inf


def _with_gil(address: int, nbytes: int, kind: int) -> tuple[int, float, float, float, float, int, int]:
    """(finite, min, max, sum, sum of squares, NaN, Inf) of ``nbytes`` bytes at ``address``. Keeps the GIL: whoever
    gives it up for some microseconds may wait milliseconds to get it back."""
    return _piece(address, nbytes, kind)


with_gil = numba_kept(**{**_OPTIONS, "nogil": False})(_with_gil)


@_compile
def spans(base: int, pieces: np.ndarray, kind: int, out: np.ndarray) -> None:
    """The same seven numbers for each row [start, stop) of ``pieces`` (int64, bytes after the address ``base``), into
    the rows of ``out`` (float64). Gives up the GIL once for all of them."""
    for i in range(pieces.shape[0]):
        n, low, high, total, squares, nan, inf = _piece(base + pieces[i, 0], pieces[i, 1] - pieces[i, 0], kind)
        out[i, 0] = n
        out[i, 1] = low
        out[i, 2] = high
        out[i, 3] = total
        out[i, 4] = squares
        out[i, 5] = nan
        out[i, 6] = inf


def moments(data: np.ndarray, dtype: str) -> tuple[int, float, float, float, float, int, int]:
    """(finite, min, max, sum, sum of squares, NaN, Inf) of contiguous uint8 ``data``, at least one element; not for
    8-bit or complex dtypes."""
    if dtype in KINDS:
        return _piece(data.ctypes.data, data.size, KINDS[dtype])
    if dtype == "float64":
        n, low, high, total, squares, nan, inf = _doubles(data.view(np.int64))
        if not n:
            return 0, float("inf"), float("-inf"), 0.0, 0.0, nan, inf
        return n, _ordered64(low), _ordered64(high), total, squares, nan, inf
    x = data.view(np.dtype(dtype))
    lo, hi, total, squares = _integers(x)
    return x.size, lo, hi, total, squares, 0, 0


def _ordered64(key: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)))[0])
