"""One pair of labelled tensors, measured in float64, piece by piece.

Both are flattened where their shapes differ; rows are those of the last dimension where they agree. The sums are the
definitions' own (kernels/definition.py). Not here: which tensors are a pair, and the verdict (labelled_pairs.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.kernels import definition

_PIECE = 1 << 20
"""Elements that are widened at a time."""
_MAX_ROWS = 1 << 20
"""Rows of a row table; a tensor with more is measured as one row."""


@dataclass(frozen=True)
class LabelSide:
    """One side of a pair: its path for the table, dtype and shape ("" and () while unknown), where to read it."""

    path: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    dump: Dump | None = None
    record: Record | None = None
    missing: str = ""
    """Why it cannot be read, or ""."""


@dataclass
class LabelSums:
    """table: one row per row of the tensors (oracle.ROW_FIELDS); elements: oracle.ELEMENT_FIELDS."""

    table: np.ndarray
    elements: np.ndarray
    width: int


def measure(golden: LabelSide, mine: LabelSide) -> LabelSums:
    """Raises DumpError."""
    size = math.prod(golden.shape)
    width = golden.shape[-1] if golden.shape == mine.shape and len(golden.shape) > 1 else size
    if size // max(width, 1) > _MAX_ROWS:
        width = size
    rows = size // width
    table = np.zeros((rows, len(definition.ROW_FIELDS)))
    elements = np.zeros(len(definition.ELEMENT_FIELDS))
    assert golden.dump is not None
    assert golden.record is not None
    assert mine.dump is not None
    assert mine.record is not None
    a, b = golden.dump.read(golden.record).reshape(-1), mine.dump.read(mine.record).reshape(-1)
    for start, stop in _pieces(rows, width):
        g = widen(a[start:stop], golden.dtype, as_float=True)
        m = widen(b[start:stop], mine.dtype, as_float=True)
        definition.add_elements(elements, definition.element_sums(g, m, 0.0))
        if width <= _PIECE:
            part = definition.row_table(g.reshape(-1, width), m.reshape(-1, width))
            table[start // width : stop // width] = part
        else:
            _add_row(table[start // width], definition.row_table(g.reshape(1, -1), m.reshape(1, -1))[0])
    return LabelSums(table, elements, width)


def _pieces(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Stretches of at most _PIECE elements: of whole rows, or within one."""
    if width <= _PIECE:
        many = _PIECE // width * width
        for start in range(0, rows * width, many):
            yield start, min(start + many, rows * width)
        return
    for row in range(rows):
        for start in range(row * width, (row + 1) * width, _PIECE):
            yield start, min(start + _PIECE, (row + 1) * width)


_SUMS = [
    definition.N,
    definition.GG,
    definition.MM,
    definition.GM,
    definition.DD,
    definition.ABS_D,
    definition.NONFINITE,
    definition.MISMATCH,
]
_TOPS = [definition.MAX_D, definition.MAX_REL, definition.PEAK]


def _add_row(row: np.ndarray, more: np.ndarray) -> None:
    row[_SUMS] += more[_SUMS]
    row[_TOPS] = np.maximum(row[_TOPS], more[_TOPS])
