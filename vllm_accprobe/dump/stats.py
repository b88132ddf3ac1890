"""Statistics of a tensor from its raw bytes, piece by piece.

The problem: every captured tensor gets min, max, mean, norm and counts of NaN and Inf, while a model is being
served, in whatever dtype it has, and a large tensor arrives in several blocks. The idea: each piece gives its
moments (a small tuple), moments add up, and the last step turns them into ``Stats``. The moments come from compiled
kernels (stats_kernels.py), or, where numba is missing, from numpy. The GIL is free but for small pieces. Not here:
who calls it (writer.py), and the metrics of two tensors (the metrics room).
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES, byte_values, widen
from vllm_accprobe.dump.schema import Payload, Stats

_CHUNK = 32768
_WITH_GIL = 1 << 20
"""Bytes up to which the GIL is kept: some tens of microseconds of work."""

MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")
"""This process's memory, uint8: ``MEMORY[address : address + nbytes]`` is some of it. A type of ctypes for each size
costs 50 us and 3.4 KB."""

Sums = tuple[int, float, float, float, float, int, int]
"""What ``TensorMoments`` holds, as a bare tuple: (n, min, max, sum, squares, nan, inf)."""


class StatsCell:
    """What all journal lines about the same bytes share; each of them may hold the same cell.

    ``value``: their statistics, None until somebody has computed them, for a payload the writer's thread. ``sums``: the
    statistics as moments, which are made into ``value`` on first access. ``hash``: None of a fingerprint.
    ``payload``: where the bytes lie. ``text``: all of it as it stands at the end of a line (journal_writer.py).
    ``dtype``: of the statistics, None where none are wanted.
    """

    __slots__ = ("_value", "dtype", "hash", "payload", "sums", "text")

    def __init__(self, value: Stats | None = None, hash: str | None = None, dtype: str | None = None):
        self._value = value
        self.hash = hash
        self.dtype = dtype
        self.payload: Payload | None = None
        self.sums: Sums | None = None
        self.text = ""

    @property
    def value(self) -> Stats | None:
        """The statistics, or None while they are not computed."""
        if self._value is None and self.sums is not None:
            self._value = Stats(**in_words(self.sums))
        return self._value

    def add(self, sums: Sums) -> None:
        """The moments of the next piece of the payload."""
        self.sums = sums if self.sums is None else TensorMoments(*self.sums) + TensorMoments(*sums)


class TensorMoments(NamedTuple):
    """What adds up over pieces: ``n`` finite elements, their least, greatest, sum, sum of squares, and the others."""

    n: int = 0
    min: float = math.inf
    max: float = -math.inf
    sum: float = 0.0
    squares: float = 0.0
    nan: int = 0
    inf: int = 0

    def __add__(self, other: TensorMoments) -> TensorMoments:  # type: ignore[override]
        return TensorMoments(
            self.n + other.n,
            min(self.min, other.min),
            max(self.max, other.max),
            self.sum + other.sum,
            self.squares + other.squares,
            self.nan + other.nan,
            self.inf + other.inf,
        )

    def stats(self) -> Stats:
        """As the dump's ``Stats``. A mean or norm that overflows float64 is None, as with no finite element at all."""
        return Stats(**in_words(self))


def in_words(sums: Sums) -> dict[str, Any]:
    """The fields of ``Stats`` from the seven numbers of ``TensorMoments``, see there."""
    n, low, high, total, squares, nan, inf = sums
    count = n + nan + inf
    if not n:
        return {"count": count, "min": None, "max": None, "mean": None, "l2": None, "nan": nan, "inf": inf}
    mean: float | None = total / n
    l2: float | None = math.sqrt(squares)
    if not (math.isfinite(mean) and math.isfinite(l2)):  # type: ignore[arg-type]
        mean, l2 = (x if math.isfinite(x) else None for x in (total / n, math.sqrt(squares)))
    return {"count": count, "min": low, "max": high, "mean": mean, "l2": l2, "nan": nan, "inf": inf}


def moments(data: np.ndarray, dtype: str) -> TensorMoments:
    """Moments of the elements in ``data``: contiguous uint8, whole elements of torch dtype ``dtype``.

    Complex numbers count as two elements, real and imaginary part. Raises KeyError for a dtype that is not in DTYPES.
    """
    info = DTYPES[dtype]
    if data.size == 0:
        return TensorMoments()
    if info.kind == "complex":
        dtype = "float32" if dtype == "complex64" else "float64"
    kernels = _kernels()
    if kernels is not None:
        try:
            if info.itemsize == 1:
                return _from_histogram(kernels.histogram(data), dtype)
            return TensorMoments(*kernels.moments(data, dtype))
        except Exception:  # a compiler that fails on this machine must not end a capture
            pass
    return _numpy_moments(data, dtype)


def moments_at(address: int, nbytes: int, dtype: str) -> Sums:
    """Moments of ``nbytes`` bytes at ``address``: contiguous, whole elements of ``dtype``. Raises like ``moments``."""
    kernels = _kernels()
    if kernels is not None and nbytes and nbytes <= _WITH_GIL and dtype in kernels.KINDS:
        try:
            return kernels.with_gil(address, nbytes, kernels.KINDS[dtype])  # type: ignore[no-any-return]
        except Exception:  # a compiler that fails on this machine must not end a capture
            pass
    return moments(_bytes_at(address, nbytes), dtype)


def moments_within(base: int, spans: Sequence[tuple[int, int]], dtype: str) -> list[Sums]:
    """Moments of many pieces, each [start, stop) in bytes after the address ``base``. The GIL is free meanwhile."""
    kernels = _kernels()
    if kernels is not None and dtype in kernels.KINDS:
        try:
            out = np.empty((len(spans), 7))
            kernels.spans(base, np.array(spans, np.int64).reshape(-1, 2), kernels.KINDS[dtype], out)
            return [(int(n), a, b, s, q, int(nan), int(inf)) for n, a, b, s, q, nan, inf in out.tolist()]
        except Exception:
            pass
    return [moments(_bytes_at(base + start, stop - start), dtype) for start, stop in spans]


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(MEMORY[address : address + nbytes], np.uint8)


def tensor_stats(array: np.ndarray, dtype: str) -> Stats:
    """``Stats`` of a whole array of stored bits (any shape; what ``Dump.read`` returns)."""
    return moments(np.ascontiguousarray(array).reshape(-1).view(np.uint8), dtype).stats()


def warm_up(dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32", "int32", "int64", "bool")) -> bool:
    """Compiles (or loads from numba's cache) the kernels of these dtypes, so that no request waits for it. Some
    seconds the first time on a machine, tenths of a second later. False where there is no numba."""
    if _kernels() is None:
        return False
    for dtype in dtypes:
        zeros = np.zeros(DTYPES[dtype].itemsize * 4, np.uint8)
        moments(zeros, dtype)
        moments_at(zeros.ctypes.data, zeros.size, dtype)
        moments_within(zeros.ctypes.data, [(0, zeros.size)], dtype)
    return True


@cache
def _kernels() -> ModuleType | None:
    try:
        from vllm_accprobe.dump import stats_kernels
    except Exception:  # no numba, or one that does not go with this numpy or this machine
        return None
    return stats_kernels


def _from_histogram(counts: np.ndarray, dtype: str) -> TensorMoments:
    values = byte_values(dtype).astype(np.float64)
    finite = np.isfinite(values) & (counts > 0)
    nan = int(counts[np.isnan(values)].sum())
    n = int(counts[finite].sum())
    inf = int(counts.sum()) - n - nan
    if not n:
        return TensorMoments(nan=nan, inf=inf)
    v, c = values[finite], counts[finite].astype(np.float64)
    return TensorMoments(n, float(v.min()), float(v.max()), float((v * c).sum()), float((v * v * c).sum()), nan, inf)


def _numpy_moments(data: np.ndarray, dtype: str) -> TensorMoments:
    stored = data.view(DTYPES[dtype].storage)
    total = TensorMoments()
    for start in range(0, stored.size, _CHUNK):
        with np.errstate(all="ignore"):  # NaN and overflow are counted or become None, not warned about
            x = widen(stored[start : start + _CHUNK], dtype, as_float=True).astype(np.float64)
            finite = np.isfinite(x)
            nan = int(np.isnan(x).sum())
            good = x if finite.all() else x[finite]
            inf = x.size - good.size - nan
            if not good.size:
                total += TensorMoments(nan=nan, inf=inf)
                continue
            squares = float(np.einsum("i,i->", good, good))
            low, high, every = float(good.min()), float(good.max()), float(good.sum())
            total += TensorMoments(good.size, low, high, every, squares, nan, inf)
    return total
