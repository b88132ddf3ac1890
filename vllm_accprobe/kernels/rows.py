"""The row table in one pass over the stored bits, compiled, without the interpreter's lock.

The problem: plain numpy reads each array a dozen times and makes a float64 copy of both sides first; a weight of a
billion elements is one row, and the loops keep three numbers per element of a row. The idea: the loops of loops.py read
each element once, and rows that meet are two index lists, so that nothing is copied. bfloat16, float16, float32 and
8-bit floats run there, everything else, and a Python without llvmlite, in definition.py. A wide row is cut into
segments that the kernel takes for rows: sums add up and maxima are maxima. A segment's own peak, whose rms is another,
bounds the whole row's: it is computed again for the segments that can hold it.

Not here: the meaning of the columns (definition.ROW_FIELDS), the loops (loops.py), their buffers (native.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from vllm_accprobe.kernels import definition, native, rows as kernel, structure
from vllm_accprobe.kernels.formulas import eps_of

_KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
_TABLE8 = 3
"""8-bit floats, whose numbers stand in a table. What the loops do with each kind: bits.py."""
_SIZES = (2, 2, 4, 1)
"""Bytes of an element, by kind."""
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
    elements: np.ndarray | None = None,
    compiled: bool = True,
) -> np.ndarray:
    """Row table (float64 [n, 11], definition.ROW_FIELDS) of golden[golden_rows[i]] against mine[mine_rows[i]].

    golden, mine: stored bits, C order, [rows, width] of equal width; dtypes: torch names; golden_rows, mine_rows:
    int64 [n], within bounds (checked). widen turns stored bits into numbers (dump.dtypes.widen). elements: float64
    [10], to which definition.ELEMENT_FIELDS of these rows are added; without it the loops are 1.5 times as fast.
    compiled=False: the oracle.
    """
    _check(golden, golden_rows, mine, mine_rows)
    loops = _loops(golden, golden_dtype, mine_dtype) if compiled else None
    eps = eps_of(golden_dtype)
    if loops is None:
        both = widen(golden[golden_rows], golden_dtype), widen(mine[mine_rows], mine_dtype)
        if elements is not None:
            definition.add_elements(elements, definition.element_sums(*both, eps))
        return definition.row_table(*both)
    out = np.zeros((len(mine_rows), len(definition.ROW_FIELDS)))
    out[:, definition.N] = golden.shape[1]
    if len(out):
        sides = *_side(golden, golden_dtype, golden_rows, widen), *_side(mine, mine_dtype, mine_rows, widen)
        found = np.zeros(0 if elements is None else len(definition.ELEMENT_FIELDS))
        loops.rows(*sides, out, eps, found)
        if elements is not None:
            # The loops take what they leave out for a zero error of zero: close, and within, where eps is not 0.
            left_out = float(out[:, definition.NONFINITE].sum())
            found[definition.CLOSE] -= left_out
            found[: definition.CLOSE] -= left_out if eps else 0.0
            definition.add_elements(elements, found)
    return out


def structure_sums(
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
    """float64 [6, width], the sums of structure.structure, which is the definition, over the rows that meet.

    The arguments are those of `rows`.
    """
    _check(golden, golden_rows, mine, mine_rows)
    loops = _loops(golden, golden_dtype, mine_dtype) if compiled else None
    if loops is None:
        return structure.structure(widen(golden[golden_rows], golden_dtype), widen(mine[mine_rows], mine_dtype))
    sums = np.zeros((structure.FIELDS, golden.shape[1]))
    sides = *_side(golden, golden_dtype, golden_rows, widen), *_side(mine, mine_dtype, mine_rows, widen)
    loops.structure(*sides, sums)
    return sums


def _check(golden: np.ndarray, golden_rows: np.ndarray, mine: np.ndarray, mine_rows: np.ndarray) -> None:
    if golden.ndim != 2 or mine.ndim != 2 or golden.shape[1] != mine.shape[1]:
        raise ValueError(f"rows of different width: {golden.shape} and {mine.shape}")
    if len(golden_rows) != len(mine_rows):
        raise ValueError(f"{len(golden_rows)} rows of golden and {len(mine_rows)} of mine")
    for index, side in ((golden_rows, golden), (mine_rows, mine)):
        # Seen without a sign, a negative number is a very large one.
        if len(index) and int(_rows(index).view(np.uint64).max()) >= len(side):
            raise IndexError(f"row index outside an array of {len(side)} rows")


def _rows(index: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(index, np.int64)


def _side(data: np.ndarray, dtype: str, rows: np.ndarray, widen: Widen) -> tuple[Any, ...]:
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if flat.size != data.size * _SIZES[_kind(dtype)]:  # the loops read so many bytes, and check nothing
        raise ValueError(f"an array of {data.dtype} does not hold the bits of {dtype}")
    return flat, _kind(dtype), _table(dtype, widen), _rows(rows)


def _loops(golden: np.ndarray, *dtypes: str) -> Any:
    """The compiled loops, or None where they do not serve or there are none."""
    return _compiled() if golden.shape[1] and all(map(_fits, dtypes)) else None


def _kind(dtype: str) -> int:
    return _KINDS.get(dtype, _TABLE8)


def _fits(dtype: str) -> bool:
    return dtype in _KINDS or dtype.startswith("float8")


_NO_TABLE = np.zeros(1, np.uint32)
_TABLES: dict[str, np.ndarray] = {}


def _table(dtype: str, widen: Widen) -> np.ndarray:
    """float32 bits by stored bits, for dtypes that need a table. The dictionary is a cache of constants."""
    if _kind(dtype) != _TABLE8:
        return _NO_TABLE
    if dtype not in _TABLES:
        codes = np.arange(256, dtype=np.uint8)
        _TABLES[dtype] = np.ascontiguousarray(widen(codes, dtype), dtype=np.float32).view(np.uint32)
    return _TABLES[dtype]


_LOCK = threading.Lock()


@cache
def _compiled() -> Any:
    """The compiled loops, or None where there are none. Compiled once per machine (machine_code.py)."""
    with _LOCK:  # of many threads that come first, one compiles
        return _find_loops()


@cache
def _find_loops() -> Any:
    try:
        return native.loops()
    except native.Unusable:
        return None


SEGMENT = 1 << 13
"""Elements of a segment. Chosen: what is gone over again is a few of them, and the kernel is as fast as for longer."""
LONGEST = 1 << 19
"""Elements of a row that the kernel gets at once, where there may be many of them."""
_MAXIMA = [definition.MAX_D, definition.MAX_REL]
_SUMS = [i for i in range(len(definition.ROW_FIELDS)) if i not in (*_MAXIMA, definition.PEAK)]
_SLACK = 1 + 1e-9
"""More than the rounding of a bound: a segment that is examined for nothing costs little."""


def wide_rows(
    golden: np.ndarray, golden_dtype: str, golden_rows: np.ndarray,
    mine: np.ndarray, mine_dtype: str, mine_rows: np.ndarray, widen: Widen,
    *, elements: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """As kernel.rows, which takes these arguments too and does it all where the rows are not wide."""
    if golden.shape[1] <= LONGEST:
        return kernel.rows(golden, golden_dtype, golden_rows, mine, mine_dtype, mine_rows, widen, elements=elements)
    each = zip(golden_rows, mine_rows, strict=True)
    found = [row(golden[g], golden_dtype, mine[m], mine_dtype, widen, elements=elements)[0] for g, m in each]
    return np.stack(found) if found else np.zeros((0, len(definition.ROW_FIELDS)))


def row(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen,
    *, elements: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """(row table of two arrays of stored bits [width]: float64 [11]; the segment with the first largest error).
    elements: see kernel.rows."""
    table = _segments(golden, golden_dtype, mine, mine_dtype, widen, elements)
    out = np.zeros(len(definition.ROW_FIELDS))
    with np.errstate(over="ignore", invalid="ignore"):  # what a kernel's own sums do, too
        out[_SUMS] = table[:, _SUMS].sum(axis=0)
    out[_MAXIMA] = table[:, _MAXIMA].max(axis=0, initial=-1.0)
    out[definition.MAX_D] = max(out[definition.MAX_D], 0.0)
    rms = float(np.sqrt(out[definition.GG] / max(out[definition.N], 1.0)))
    out[definition.PEAK] = _peak(golden, golden_dtype, mine, mine_dtype, widen, table, rms)
    return out, _first(table)


def locate(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen, segment: int | None = None
) -> tuple[int, float, float]:
    """definition.locate of two arrays of stored bits [width]. segment: the one that `row` found in the same arrays."""
    if segment is None:
        wide = len(golden) > 2 * SEGMENT
        segment = _first(_segments(golden, golden_dtype, mine, mine_dtype, widen, None)) if wide else -1
    here = slice(segment * SEGMENT, (segment + 1) * SEGMENT) if segment >= 0 else slice(None)
    g, m = widen(golden[here], golden_dtype), widen(mine[here], mine_dtype)
    at, x, y = definition.locate(g, m)
    return max(segment, 0) * SEGMENT + at, x, y


def _segments(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen, elements: np.ndarray | None
) -> np.ndarray:
    """float64 [segments, 11]"""
    width = len(golden)
    whole = width // SEGMENT
    parts = []
    for begin, n in ((0, whole), (whole * SEGMENT, 1 if width % SEGMENT else 0)):
        size = min(SEGMENT, width - begin)
        if n:
            g, m = (x[begin : begin + n * size].reshape(n, size) for x in (golden, mine))
            at = np.arange(n, dtype=np.int64)
            parts.append(kernel.rows(g, golden_dtype, at, m, mine_dtype, at, widen, elements=elements))
    return np.concatenate(parts) if parts else np.zeros((0, len(definition.ROW_FIELDS)))


def _first(table: np.ndarray) -> int:
    """The first segment with the largest error; one in which nothing is finite has none."""
    some = np.where(table[:, definition.N] > 0, table[:, definition.MAX_D], -1.0)
    return int(some.argmax()) if len(some) else 0


def _peak(
    golden: np.ndarray, golden_dtype: str, mine: np.ndarray, mine_dtype: str, widen: Widen, table: np.ndarray,
    rms: float,
) -> float:  # fmt: skip
    """Max of |d| / max(|g|, rms). table: of the segments."""
    bound = _bounds(table, rms)
    peak = 0.0
    for k in np.argsort(-bound):
        if not bound[k] > peak:
            break
        here = slice(int(k) * SEGMENT, int(k + 1) * SEGMENT)
        sides = (golden, golden_dtype), (mine, mine_dtype)
        with np.errstate(invalid="ignore"):
            g, m = (widen(bits[here], dtype).astype(np.float64) for bits, dtype in sides)
        finite = np.isfinite(g) & np.isfinite(m)
        if not finite.all():
            g, m = g[finite], m[finite]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            d = np.abs(m - g)
            seen = np.where(d == 0, 0.0, d / np.maximum(np.abs(g), rms))
        peak = max(peak, float(seen.max(initial=0.0)))
    return peak


def _bounds(table: np.ndarray, rms: float) -> np.ndarray:
    """float64 [segments], no less than each one's share of the peak: its largest error over rms; and its own peak,
    times how much larger its own rms is, as max(|g|, own) / max(|g|, rms) is at most own / rms."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        own = np.sqrt(table[:, definition.GG] / np.maximum(table[:, definition.N], 1.0))
        by_error = table[:, definition.MAX_D] / rms
        by_peak = table[:, definition.PEAK] * np.maximum(own / rms, 1.0)
        bound = np.fmin(by_error, by_peak) * _SLACK
    # Where a sum has overflown nothing is known; where nothing differs there is nothing.
    unknown = np.isnan(bound) | ~np.isfinite(own)
    return np.where(table[:, definition.MAX_D] > 0, np.where(unknown, np.inf, bound), 0.0)
