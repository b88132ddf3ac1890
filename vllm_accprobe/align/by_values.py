"""What a model's source computed between two modules, found from the values on both sides.

The problem: a residual sum, a gate's product or the split of a joined projection is a line of Python that no module
boundary shows, and a graph without it falls apart. The idea: each of these is exact. A slice has the very bits; a sum
or a product of two tensors of one dtype is rounded once (IEEE 754), so that computing it here gives the same bits. It
is tried on the first rows or on all, and all bits must agree: what only nearly fits is no relation.
Not here: where the tensors come from (topology/data_flow.py, opcheck/proof/explained.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, Protocol

import numpy as np

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import Record

ROWS = 16
"""Rows that are compared (chosen): 16 rows of 64 columns in bfloat16 agree by chance with less than 2**-1000."""
ENOUGH = 32
"""Elements below which bits may agree by chance: not asked (chosen)."""
_NEAR = 12
"""Tensors of one shape whose sums and products are tried: the latest (chosen)."""
LARGEST = 256 << 20
"""Bytes of a tensor that is read (chosen)."""
_FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": None}


class TensorLike(Protocol):
    """A tensor at a call. record: None where nothing of it was stored."""

    @property
    def record(self) -> Record | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Relation:
    """kind: Slice (columns), Gather (rows), Add or Mul; takes: names of what it takes."""

    kind: str
    takes: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Relations:
    """The tensors of one dump. rows: how many of each are read and must agree; None: all of them."""

    def __init__(self, dump: Dump, rows: int | None = ROWS):
        self._dump = dump
        self._count = rows
        self._first: dict[str, np.ndarray | None] = {}

    def explain(self, missing: TensorLike, had: Sequence[tuple[str, TensorLike]]) -> Relation | None:
        """How ``missing`` follows from tensors that were there before; the latest are asked first. None where nothing
        fits exactly, or there are no values."""
        wanted = self._rows(missing, self._count)
        if wanted is None or wanted.size < ENOUGH:
            return None
        near = [(name, seen) for name, seen in reversed(had) if seen.dtype == missing.dtype]
        for name, seen in near:
            if seen.shape[:-1] == missing.shape[:-1] and seen.shape[-1:] > missing.shape[-1:]:
                rows = self._begin(name, seen)
                at = None if rows is None else _offset(rows, wanted)
                if at is not None:
                    return Relation("Slice", (name,), {"axis": -1, "begin": at, "end": at + missing.shape[-1]})
            elif seen.shape[1:] == missing.shape[1:] and len(seen.shape) > 1 and seen.shape[0] > missing.shape[0]:
                rows = self._rows(seen, None) if seen.shape[-1] >= ENOUGH else None
                if rows is not None and _picked(rows, wanted):
                    return Relation("Gather", (name,), {"axis": 0, "rows": missing.shape[0]})
        if missing.dtype not in _FLOATS:
            return None
        alike = [(name, seen) for name, seen in near if seen.shape == missing.shape][:_NEAR]
        same = [(name, rows) for name, seen in alike if (rows := self._begin(name, seen)) is not None]
        for (a, x), (b, y) in combinations(same, 2):
            for kind, f in (("Add", np.add), ("Mul", np.multiply)):
                # One row first: most pairs part there.
                if _computes(f, x[:1], y[:1], wanted[:1], missing.dtype, 1) and _computes(
                    f, x, y, wanted, missing.dtype, ENOUGH
                ):
                    return Relation(kind, (b, a))
        return None

    def _begin(self, name: str, seen: TensorLike) -> np.ndarray | None:
        if name not in self._first:
            self._first[name] = self._rows(seen, self._count)
        return self._first[name]

    def _rows(self, seen: TensorLike, most: int | None) -> np.ndarray | None:
        """The first rows' stored bits as a matrix, or all; None where there are no values."""
        r = seen.record
        if r is None or r.payload is None or r.payload.nbytes > LARGEST or not r.shape or not r.shape[-1]:
            return None
        try:
            if most is not None and len(r.shape) > 1 and r.row_dim == 0:
                bits = self._dump.read_rows(r, slice(0, most))
            else:
                bits = self._dump.read(r)
        except (DumpError, OSError):
            return None
        return bits.reshape(-1, r.shape[-1])[:most].copy()


def _picked(whole: np.ndarray, part: np.ndarray) -> bool:
    """Whether each row of ``part`` is one of ``whole``, later ones behind earlier ones."""
    known: dict[bytes, int] = {row.tobytes(): i for i, row in enumerate(whole)}
    places = [known.get(row.tobytes(), -1) for row in part]
    return min(places) >= 0 and all(a < b for a, b in pairwise(places))


def _offset(whole: np.ndarray, part: np.ndarray) -> int | None:
    """Where the columns of ``part`` begin in ``whole``; None where they are not in it, or in several places."""
    width = part.shape[1]
    windows = np.lib.stride_tricks.sliding_window_view(whole[0], width)
    hits = [int(i) for i in np.flatnonzero(windows[:, 0] == part[0, 0]) if (whole[:, i : i + width] == part).all()]
    return hits[0] if len(hits) == 1 else None


def _computes(f: np.ufunc, x: np.ndarray, y: np.ndarray, wanted: np.ndarray, dtype: str, enough: int) -> bool:
    """Whether ``f`` of both gives exactly what is wanted. enough: elements of which no side may be zero, for a sum with
    zeros and a product of them tell nothing."""
    with np.errstate(all="ignore"):
        exact = f(widen(x, dtype).astype(np.float64), widen(y, dtype).astype(np.float64))
        want = widen(wanted, dtype).astype(np.float64)
        if dtype == "bfloat16":
            got = _to_bfloat16(exact.astype(np.float32))
        else:
            got = exact.astype(_FLOATS[dtype]).astype(np.float64)
        if not np.isfinite(want).all() or not (got == want).all():
            return False
        return enough <= 1 or all(np.count_nonzero(side) >= enough for side in (widen(x, dtype), widen(y, dtype), want))


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, ties to even, as float64."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)
