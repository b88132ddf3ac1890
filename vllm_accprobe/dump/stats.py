"""Statistics of a tensor from its raw bytes, piece by piece.

The problem: every captured tensor gets min, max, mean, norm and counts of NaN and Inf, while a model is being served,
in whatever dtype it has, and a large tensor arrives in several blocks. The idea: each piece gives its moments (a
small tuple), moments add up, and the last step turns them into ``Stats``. The moments come from compiled kernels that
release the GIL (stats_kernels.py), or, where numba is missing, from numpy. Not here: who calls it (writer.py), and
the metrics of two tensors (the metrics room).
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np

from .dtypes import DTYPES, byte_values, widen
from .schema import Stats

_CHUNK = 32768


class StatsCell:
    """A place for one payload's statistics and hash, filled by the writer's thread: ``value`` and ``hash`` are None
    until then. Several journal lines may hold the same cell."""

    __slots__ = ("hash", "value")

    def __init__(self, value: Stats | None = None, hash: str | None = None):
        self.value = value
        self.hash = hash


class Moments(NamedTuple):
    """What adds up over pieces: ``n`` finite elements, their least, greatest, sum, sum of squares, and the others."""

    n: int = 0
    min: float = math.inf
    max: float = -math.inf
    sum: float = 0.0
    squares: float = 0.0
    nan: int = 0
    inf: int = 0

    def __add__(self, other: Moments) -> Moments:  # type: ignore[override]
        return Moments(
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
        count = self.n + self.nan + self.inf
        if not self.n:
            return Stats(count, None, None, None, None, self.nan, self.inf)
        mean, l2 = self.sum / self.n, math.sqrt(self.squares)
        return Stats(
            count,
            self.min,
            self.max,
            mean if math.isfinite(mean) else None,
            l2 if math.isfinite(l2) else None,
            self.nan,
            self.inf,
        )


def moments(data: np.ndarray, dtype: str) -> Moments:
    """Moments of the elements in ``data``: contiguous uint8, whole elements of torch dtype ``dtype``.

    Complex numbers count as two elements, real and imaginary part. Raises KeyError for a dtype that is not in DTYPES.
    """
    info = DTYPES[dtype]
    if data.size == 0:
        return Moments()
    if info.kind == "complex":
        dtype = "float32" if dtype == "complex64" else "float64"
    kernels = _kernels()
    if kernels is not None:
        try:
            if info.itemsize == 1:
                return _from_histogram(kernels.histogram(data), dtype)
            return Moments(*kernels.moments(data, dtype))
        except Exception:  # a compiler that fails on this machine must not end a capture
            pass
    return _numpy_moments(data, dtype)


def tensor_stats(array: np.ndarray, dtype: str) -> Stats:
    """``Stats`` of a whole array of stored bits (any shape; what ``Dump.read`` returns)."""
    return moments(np.ascontiguousarray(array).reshape(-1).view(np.uint8), dtype).stats()


def warm_up(dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32", "int32", "int64", "bool")) -> bool:
    """Compiles (or loads from numba's cache) the kernels of these dtypes, so that no request waits for it. Some
    seconds the first time on a machine, tenths of a second later. False where there is no numba."""
    if _kernels() is None:
        return False
    for dtype in dtypes:
        moments(np.zeros(DTYPES[dtype].itemsize * 4, np.uint8), dtype)
    return True


@cache
def _kernels() -> ModuleType | None:
    try:
        from . import stats_kernels
    except Exception:  # no numba, or one that does not go with this numpy or this machine
        return None
    return stats_kernels


def _from_histogram(counts: np.ndarray, dtype: str) -> Moments:
    values = byte_values(dtype).astype(np.float64)
    finite = np.isfinite(values) & (counts > 0)
    nan = int(counts[np.isnan(values)].sum())
    n = int(counts[finite].sum())
    inf = int(counts.sum()) - n - nan
    if not n:
        return Moments(nan=nan, inf=inf)
    v, c = values[finite], counts[finite].astype(np.float64)
    return Moments(n, float(v.min()), float(v.max()), float((v * c).sum()), float((v * v * c).sum()), nan, inf)


def _numpy_moments(data: np.ndarray, dtype: str) -> Moments:
    stored = data.view(DTYPES[dtype].storage)
    total = Moments()
    for start in range(0, stored.size, _CHUNK):
        with np.errstate(all="ignore"):  # NaN and overflow are counted or given as None, not warned about
            x = widen(stored[start : start + _CHUNK], dtype, as_float=True).astype(np.float64)
            finite = np.isfinite(x)
            nan = int(np.isnan(x).sum())
            good = x if finite.all() else x[finite]
            inf = x.size - good.size - nan
            if not good.size:
                total += Moments(nan=nan, inf=inf)
                continue
            squares = float(np.einsum("i,i->", good, good))
            total += Moments(good.size, float(good.min()), float(good.max()), float(good.sum()), squares, nan, inf)
    return total
