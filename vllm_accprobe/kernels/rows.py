"""The row table in one pass over the stored bits, compiled by numba, without the interpreter's lock.

The problem: plain numpy reads each array a dozen times and makes a float64 copy of both sides first. The idea: the
loops of loops.py read each element once; which rows meet is given as two index lists, so that gathering makes no copy
either. bfloat16, float16, float32 and 8-bit floats run there; everything else, and a Python without numba, goes to
definition.py.
Not here: the meaning of the columns (definition.ROW_FIELDS), the loops (loops.py), where their machine code comes from
(native.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from vllm_accprobe.kernels import BLOCK, definition, native, structure
from vllm_accprobe.kernels.formulas import eps_of

_KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
_TABLE8 = 3
"""8-bit floats, whose numbers stand in a table. What the loops do with each kind: bits.py."""
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
    [10], to which definition.ELEMENT_FIELDS of these rows are added. compiled=False: the oracle.
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
        found = np.zeros(len(definition.ELEMENT_FIELDS))
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
    return flat, _kind(dtype), _table(dtype, widen), _writeable(_rows(rows))


def _writeable(rows: np.ndarray) -> np.ndarray:
    """Arrays that may only be read are another type to the compiler, and would be compiled for once more."""
    return rows if rows.flags.writeable else rows.copy()


def _loops(golden: np.ndarray, *dtypes: str) -> Any:
    """The compiled loops, or None where they do not serve or numba is missing."""
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
    """The compiled loops, or None where numba is missing. Compiled once per machine (native.py)."""
    with _LOCK:  # of many threads that come first, one compiles
        return _find_loops()


@cache
def _find_loops() -> Any:
    try:
        return native.loops()
    except native.Unusable:
        pass
    try:
        from vllm_accprobe.kernels import loops
    except ImportError:
        return None
    return _ByNumba(loops)


class _ByNumba:
    """The loops as numba runs them, with new buffers for each call."""

    def __init__(self, loops: Any):
        self._loops = loops

    def rows(self, *given: Any) -> None:
        self._loops.rows(*given, *_buffers(int(given[8][0, 0])))

    def structure(self, *given: Any) -> None:
        self._loops.structure(*given, *_buffers(given[8].shape[1])[:2])


def _buffers(width: int) -> list[np.ndarray]:
    return native.buffers(max(width, BLOCK))
