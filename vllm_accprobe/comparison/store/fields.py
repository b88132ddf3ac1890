"""What a file holds of a part and of a unit: the names, their order, and which of them are arrays.

The problem: an interrupted comparison's file and the finished one's spell the same values in two ways, and each field
that is added must be known to both. The idea: what a `Part` is says it once; both files take its values from here, in
this order, and give them back. Rows are one value in memory, two arrays in a file, and are stored once for all parts
that have them.
Not here: bytes and frames (wire.py), the archive (saved.py), what the fields mean (measure/part.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.part import Part

ROWS = {"keys": np.int64, "decode": np.bool_}
"""Part.rows: int64 [n] and bool [n]."""
TABLES = {"table": np.float64, "choices": np.int64, "margins": np.float64}
"""Arrays with a row for each row of the part, or None."""
TUPLES = ("feature", "moment", "stats", "worst", "elements")
PART = tuple(name for f in fields(Part) for name in (ROWS if f.name == "rows" else (f.name,)))
PLAIN = tuple(name for name in PART if name not in ROWS and name not in TABLES)
UNIT = ("key", "cls", "rule", "order", "depth", "is_param", "vision", "columns", "far", "gap")
"""``far``: sums that earlier releases kept; None now."""

plain_of = attrgetter(*PLAIN)
tables_of = attrgetter(*TABLES)


def rows_of(keys: np.ndarray, decode: np.ndarray) -> RowSet:
    """Raises ValueError for what no file of ours holds."""
    return RowSet(_checked("keys", keys, ROWS), _checked("decode", decode, ROWS))


def part_of(values: Mapping[str, Any], rows: RowSet) -> Part:
    """values: by names of PART, those of ROWS left out. Raises ValueError for what no file of ours holds."""
    for name in TABLES:
        if values[name] is not None:
            _checked(name, values[name], TABLES)
    known = {name: tuple(values[name]) for name in TUPLES if values[name] is not None}
    return Part(rows=rows, **{**values, **known})


def _checked(name: str, array: np.ndarray, dtypes: Mapping[str, Any]) -> np.ndarray:
    if array.dtype != dtypes[name]:
        raise ValueError(f"{name} of {array.dtype}")
    return array


def unit_of(values: Mapping[str, Any], parts: list[Part]) -> MeasuredUnit:
    """values: by names of UNIT."""
    return MeasuredUnit(parts=parts, **{name: values[name] for name in UNIT if name != "far"})
