"""From a tensor's journal line to its Record, trusting nothing.

The problem: a journal may come from a killed run, a newer release or a stranger, and analysis wants plain objects whose
numbers it may use as sizes. The idea: types and ranges are checked, and what does not hold is a ValueError with a short
reason; the reader counts these. Strings that repeat on every line are kept once. Not here: other lines
(event_lines.py, opcalls.py), files (reader.py), whether a payload really lies where the line says (reading.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.schema import REPLICATED, Layout, Payload, Record, Stats

_MAX_DIMS = 32
MAX_INT = 1 << 53

Event = Mapping[str, Any]


def integer(e: Event, key: str, default: int | None = None, top: int = MAX_INT) -> int:
    """A whole number from 0 to ``top``. Raises ValueError."""
    value = e.get(key, default)
    if type(value) is not int or not 0 <= value <= top:
        raise ValueError(f"{key} is {short(value)}, not a number from 0 to {top}")
    return value


def string(e: Event, key: str, default: str | None = None) -> str:
    """Text, interned: a dump says few things often. Raises ValueError."""
    value = e.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {short(value)}, not a string")
    return sys.intern(value)


def optional_string(e: Event, key: str) -> str | None:
    """Text or None. Raises ValueError."""
    return None if e.get(key) is None else string(e, key)


def optional_integer(e: Event, key: str) -> int | None:
    """A whole number or None. Raises ValueError."""
    return None if e.get(key) is None else integer(e, key)


def record(rank: int, e: Event, layouts: dict[str, Layout]) -> Record:
    """A ``tensor`` or ``param`` event. The payload's size is checked against dtype and shape, not against a file.
    ``layouts`` remembers those seen before: a dump has thousands of lines and a dozen layouts."""
    dtype = string(e, "dtype")
    info = DTYPES.get(dtype)
    if info is None:
        raise ValueError(f"dtype {dtype[:40]} is not known to this release")
    raw_shape = e.get("shape")
    if not isinstance(raw_shape, list) or len(raw_shape) > _MAX_DIMS:
        raise ValueError(f"shape is {short(raw_shape)}")
    for d in raw_shape:
        if type(d) is not int or not 0 <= d <= MAX_INT:
            raise ValueError(f"shape is {short(raw_shape)}")
    shape = tuple(raw_shape)
    size = math.prod(shape) * info.itemsize
    if size >= 1 << 60 or (size == 0 and math.prod(max(d, 1) for d in shape) >= 1 << 56):
        raise ValueError(f"shape is {short(raw_shape)}")
    payload = None
    if e.get("seg") is not None:
        payload = Payload(integer(e, "seg"), integer(e, "off"), integer(e, "nbytes"))
        if size != payload.nbytes:
            raise ValueError(f"{payload.nbytes} bytes are not a {dtype} tensor of shape {list(shape)}")
    row_dim = e.get("row_dim", 0)
    if type(row_dim) is not int or not 0 <= row_dim <= max(len(shape) - 1, 0):
        raise ValueError(f"row_dim is {short(row_dim)} for shape {list(shape)}")
    return Record(
        rank=rank,
        step=None if e["event"] == "param" else integer(e, "step"),
        tap=string(e, "tap"),
        cls=string(e, "class", ""),
        role=string(e, "role"),
        call=integer(e, "call", 0),
        seq=integer(e, "seq", 0),
        dtype=dtype,
        shape=shape,
        rows=optional_string(e, "rows"),
        row_dim=row_dim,
        stats=_stats(e.get("stats")),
        hash=optional_string(e, "hash"),
        layout=_layout(e.get("layout"), layouts),
        payload=payload,
        sample=optional_string(e, "sample"),
        mutated=bool(e.get("mutated", False)),
    )


def _stats(e: Any) -> Stats | None:
    if e is None:
        return None
    if not isinstance(e, dict):
        raise ValueError(f"stats is {short(e)}")
    return Stats(
        count=integer(e, "count"),
        min=_finite(e.get("min")),
        max=_finite(e.get("max")),
        mean=_finite(e.get("mean")),
        l2=_finite(e.get("l2")),
        nan=integer(e, "nan", 0),
        inf=integer(e, "inf", 0),
    )


def _finite(value: Any) -> float | None:
    """Infinity and NaN, which JSON cannot say, are as good as missing."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    return float(value) if type(value) is int and abs(value) <= MAX_INT else None


def _layout(e: Any, known: dict[str, Layout]) -> Layout:
    if not e:
        return REPLICATED
    key = repr(e)
    found = known.get(key)
    if found is None:
        found = known[key] = _new_layout(e)
    return found


def _new_layout(e: Any) -> Layout:
    if not isinstance(e, dict):
        raise ValueError(f"layout is {short(e)}")
    string(e, "kind")
    index, size = integer(e, "index", 0), integer(e, "size", 1)
    parts = e.get("parts") or []
    whole = type(e.get("dim") or 0) is int and isinstance(parts, list)
    if not whole or not all(_is_pair(p) for p in parts) or not 0 <= index < max(size, 1):
        raise ValueError(f"layout is {short(e)}")
    optional_integer(e, "valid")
    return Layout.from_event(e)


def _is_pair(p: Any) -> bool:
    return isinstance(p, list) and len(p) == 2 and all(type(v) is int and 0 <= v <= MAX_INT for v in p)


def short(value: Any) -> str:
    """A value for a sentence, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
