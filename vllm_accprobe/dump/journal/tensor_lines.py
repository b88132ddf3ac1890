"""A tensor's line in the journal: how it is written, and how it is read, trusting nothing.

The problem: of a tensor the tap knows where it was, its bytes tell hash and statistics, and the writer where they lie,
each a little later and perhaps on another thread, for thousands of tensors per step. The idea: what the tap knows is a
`TensorHead`; ``line`` makes a dict of it once, when dtype and shape are decided; ``told`` is what the cell of its bytes
adds when the line is written; ``record`` reads all of it. Written by hand, since there are thousands; so are the lines
of which nine tenths are text from the start (recorder/template.py), which a test holds to these. Not here: other lines
(event_lines.py), whether a payload really lies where the line says (reading.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.journal.events import (
    MAX_DIMS,
    MAX_INT,
    Event,
    integer,
    optional_integer,
    optional_string,
    short,
    string,
)
from vllm_accprobe.dump.schema import REPLICATED, Layout, Payload, Record, Stats
from vllm_accprobe.dump.stats import StatsCell


class TensorHead(NamedTuple):
    """What a tap knows of a tensor, see `Record`. step: None of a parameter. layout: as `Layout.to_event` gives it,
    None for a whole tensor. (No dataclass: those that are frozen take five times as long to make.)"""

    step: int | None
    tap: str
    cls: str
    role: str
    call: int = 0
    seq: int = 0
    rows: str | None = None
    row_dim: int = 0
    layout: Mapping[str, Any] | None = None
    mutated: bool = False
    sample: str | None = None

    def line(self, dtype: str, shape: Sequence[int]) -> dict[str, Any]:
        """The line without what its bytes tell."""
        step, tap, cls, role, call, seq, rows, row_dim, layout, mutated, sample = self
        line: dict[str, Any] = {"event": "param"} if step is None else {"event": "tensor", "step": step}
        line |= {
            "tap": tap, "class": cls, "role": role, "call": call, "seq": seq, "rows": rows, "row_dim": row_dim,
        }  # fmt: skip
        form: dict[str, Any] = {"dtype": dtype, "shape": shape}
        if step is None:
            line |= form
            form = {}
        if sample is not None:
            line["sample"] = sample
        if layout is not None:
            line["layout"] = layout
        if mutated:
            line["mutated"] = True
        return line | form


def told(cell: StatsCell) -> dict[str, Any]:
    """What the bytes tell, and where they lie, as far as it is known by now."""
    line: dict[str, Any] = {} if cell.hash is None else {"hash": cell.hash}
    line["stats"] = cell.value
    payload = cell.payload
    if payload is not None:
        line |= {"seg": payload.seg, "off": payload.off, "nbytes": payload.nbytes}
    return line


def last(line: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The same line with ``keys``, as far as it has them, at its end: some lines have always had another order."""
    return {k: v for k, v in line.items() if k not in keys} | {k: line[k] for k in keys if k in line}


def record(rank: int, e: Event, layouts: dict[str, Layout]) -> Record:
    """A ``tensor`` or ``param`` event. The payload's size is checked against dtype and shape, not against a file.
    ``layouts`` remembers those seen before: a dump has thousands of lines and a dozen layouts."""
    dtype = string(e, "dtype")
    info = DTYPES.get(dtype)
    if info is None:
        raise ValueError(f"dtype {dtype[:40]} is not known to this release")
    raw_shape = e.get("shape")
    if not isinstance(raw_shape, list) or len(raw_shape) > MAX_DIMS:
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
