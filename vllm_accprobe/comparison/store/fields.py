"""Measured units as JSON and arrays, and back.

The problem: an interrupted comparison's file and the finished one's hold the same values, and each field that is added
must be known to both. The idea: what a `Part` is says it once; here units become lists that JSON can hold, in which an
array is a word for where it lies. Where that is, each file decides for itself. Rows are one value in memory, two arrays
in a file, and are stored once for all parts that have them.
Not here: bytes and frames (wire.py), the archive (saved.py), what the fields mean (measure/part.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
TUPLES = ("feature", "moment", "stats", "worst", "elements", "figures")
PLAIN = tuple(f.name for f in fields(Part) if f.name != "rows" and f.name not in TABLES)
UNIT = ("key", "cls", "rule", "order", "depth", "is_param", "vision", "gap")

_plain_of, _tables_of, _unit_of = attrgetter(*PLAIN), attrgetter(*TABLES), attrgetter(*UNIT)
Put = Callable[["np.ndarray | None"], Any]
"""Keeps an array and says where; None for none."""
Get = Callable[[Any], Any]
"""The array that lies there."""


def say(units: Iterable[MeasuredUnit], put: Put) -> list[Any]:
    """``units`` as JSON (see `plain`)."""
    known: dict[RowSet, list[Any]] = {}

    def rows(of: RowSet) -> list[Any]:
        if of not in known:
            known[of] = [put(getattr(of, name)) for name in ROWS]
        return known[of]

    out = []
    for u in units:
        parts = [[_plain_of(p), [*rows(p.rows), *map(put, _tables_of(p))]] for p in u.parts]
        out.append([_unit_of(u), parts, [put(u.columns), None]])  # None: sums that earlier releases kept
    return out


def hear(said: Sequence[Any], get: Get, rows_at: Callable[[list[Any]], RowSet]) -> list[MeasuredUnit]:
    """The units that `say` made ``said`` of. rows_at: `rows_of` the arrays at two places. Raises ValueError, or what
    Python says of a list that is none of ours, for anything else."""
    units = []
    for head, parts, (columns, _) in said:
        made = []
        for plain, arrays in parts:
            values = dict(zip(PLAIN, plain, strict=True))
            values |= {name: _tuple(values[name]) for name in TUPLES if values[name] is not None}
            for name, table in zip(TABLES, map(get, arrays[len(ROWS) :]), strict=True):
                values[name] = None if table is None else _checked(name, table, TABLES)
            made.append(Part(**values, rows=rows_at(arrays[: len(ROWS)])))
        unit = dict(zip(UNIT, head, strict=True))
        units.append(MeasuredUnit(**unit | {"key": _tuple(unit["key"])}, parts=made, columns=get(columns)))
    return units


def rows_of(keys: np.ndarray, decode: np.ndarray) -> RowSet:
    """Raises ValueError for what no file of ours holds."""
    return RowSet(_checked("keys", keys, ROWS), _checked("decode", decode, ROWS))


def plain(value: Any) -> Any:
    """What JSON does not know of a unit's and a setting's values: json.dumps' ``default``."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def _tuple(value: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(v) if isinstance(v, list) else v for v in value)


def _checked(name: str, array: np.ndarray, dtypes: Mapping[str, Any]) -> np.ndarray:
    if array.dtype != dtypes[name]:
        raise ValueError(f"{name} of {array.dtype}")
    return array
