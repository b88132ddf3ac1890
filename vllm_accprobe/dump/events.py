"""From a journal line to the dataclass of schema.py, trusting nothing.

The problem: a journal may come from a killed run, a newer release or a stranger, and analysis wants plain objects whose
numbers it may use as sizes. The idea: one function per kind of event that checks types and ranges and raises ValueError
with a short reason; the reader counts these. Strings that repeat on every line are kept once. Not here: files
(reader.py), whether a payload really lies where the line says (reader.py), writing (lines.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.schema import (
    DECODE,
    PREFILL,
    REPLICATED,
    End,
    Image,
    Label,
    Layout,
    Mask,
    Masks,
    Module,
    Payload,
    Record,
    Request,
    RowSpace,
    Skip,
    Stats,
    Step,
    Stop,
)
from vllm_accprobe.dump.schema import Segment as RowSegment

MAX_ROWS = 1 << 26
"""Stored rows of one row space, and elements along any dimension of a vision item: more is no step of a model."""
_MAX_DIMS = 32
_MAX_INT = 1 << 53
_WORD = 200
"""Characters of a word that says what masked logits: it stands in sentences."""

Event = Mapping[str, Any]


def integer(e: Event, key: str, default: int | None = None, top: int = _MAX_INT) -> int:
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
        if type(d) is not int or not 0 <= d <= _MAX_INT:
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
    return float(value) if type(value) is int and abs(value) <= _MAX_INT else None


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
    return isinstance(p, list) and len(p) == 2 and all(type(v) is int and 0 <= v <= _MAX_INT for v in p)


def request(e: Event) -> Request:
    """A ``request`` event. Raises ValueError."""
    images = tuple(
        Image(string(i, "hash", ""), integer(i, "pos", 0), integer(i, "n", 0, MAX_ROWS)) for i in _dicts(e, "images")
    )
    return Request(
        req=integer(e, "req"),
        id=string(e, "id"),
        internal_id=string(e, "internal_id", ""),
        prompt=string(e, "prompt", ""),
        prompt_len=integer(e, "prompt_len", 0),
        ordinal=integer(e, "ordinal", 0),
        images=images,
    )


def row_space(e: Event) -> RowSpace:
    """A ``rows`` event, of at most MAX_ROWS rows. Raises ValueError."""
    segments = []
    total = 0
    for s in _dicts(e, "segments"):
        phase = string(s, "phase", PREFILL)
        if phase not in (PREFILL, DECODE):
            raise ValueError(f"phase is {short(phase)}")
        n = integer(s, "n", None, MAX_ROWS)
        image = optional_integer(s, "image")
        segments.append(RowSegment(integer(s, "req"), integer(s, "pos"), n, integer(s, "row", 0), phase, image))
        total += n
    if total > MAX_ROWS:
        raise ValueError(f"{total} rows in one step")
    ids = e.get("ids") or []
    if not isinstance(ids, list) or not all(type(i) is int and abs(i) <= _MAX_INT for i in ids):
        raise ValueError("ids is not a list of token ids")
    if ids and len(ids) != total:
        raise ValueError(f"{len(ids)} token ids for {total} rows")
    return RowSpace(integer(e, "step"), string(e, "space"), integer(e, "src_rows", total), tuple(segments), tuple(ids))


def step(e: Event) -> Step:
    """A ``step`` event. Raises ValueError."""
    batch = e.get("batch") or {}
    if not isinstance(batch, dict):
        raise ValueError(f"batch is {short(batch)}")
    time = e.get("time", 0.0)
    return Step(integer(e, "step"), batch, float(time) if type(time) in (int, float) else 0.0)


def module(e: Event) -> Module:
    """A ``module`` event. Raises ValueError."""
    attrs = e.get("attrs") or {}
    if not isinstance(attrs, dict):
        raise ValueError(f"attrs is {short(attrs)}")
    return Module(string(e, "tap"), string(e, "class", ""), integer(e, "index", 0), attrs)


def skip(e: Event) -> Skip:
    """A ``skip`` event. Raises ValueError."""
    tap, role, count = string(e, "tap", ""), optional_string(e, "role"), integer(e, "count", 1)
    return Skip(tap, string(e, "reason"), optional_integer(e, "step"), role, count)


def masks(e: Event) -> Masks:
    """A ``masks`` event. Raises ValueError."""
    masked: dict[int, Mask] = {}
    for m in _dicts(e, "masked"):
        by = m.get("by") or []
        if not isinstance(by, list) or not all(isinstance(word, str) for word in by):
            raise ValueError(f"by is {short(by)}")
        masked[integer(m, "req")] = Mask(tuple(sys.intern(w[:_WORD]) for w in by), optional_string(m, "grammar"))
    return Masks(integer(e, "step"), masked)


def stop(e: Event) -> Stop:
    """A ``stop`` event. Raises ValueError."""
    return Stop(string(e, "reason"), optional_integer(e, "step"))


def end(e: Event) -> End:
    """An ``end`` event. Raises ValueError."""
    skipped = e.get("skipped") or {}
    if not isinstance(skipped, dict) or not all(type(v) is int for v in skipped.values()):
        raise ValueError(f"skipped is {short(skipped)}")
    steps, tensors, nbytes = integer(e, "steps", 0), integer(e, "tensors", 0), integer(e, "bytes", 0)
    return End(string(e, "reason", ""), steps, tensors, nbytes, skipped)


LABEL_ENDINGS = ("bin", "npy", "npz", "pt", "pth", "safetensors")
"""Kinds of files that labels may name."""


def label(rank: int, e: Event) -> Label:
    """A ``label`` event of rank ``rank``. Raises ValueError."""
    ending, file = string(e, "ending", ""), optional_integer(e, "file")
    if file is not None and ending not in LABEL_ENDINGS:
        raise ValueError(f"ending is {short(ending)}")
    return Label(
        rank,
        integer(e, "step"),
        string(e, "tap"),
        string(e, "role"),
        integer(e, "call", 0),
        string(e, "path"),
        integer(e, "pid", 0),
        string(e, "task", ""),
        integer(e, "execution", 0),
        file,
        ending,
        string(e, "reason", ""),
    )


PLAIN: dict[str, Callable[[Event], Any]] = {
    "request": request,
    "rows": row_space,
    "step": step,
    "module": module,
    "masks": masks,
    "skip": skip,
    "stop": stop,
    "end": end,
}
"""The kinds besides ``start``, ``tensor``, ``param`` and ``error``, and what reads them. All raise ValueError."""


def _dicts(e: Event, key: str) -> list[dict[str, Any]]:
    value = e.get(key) or []
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{key} is {short(value)}")
    return value


def short(value: Any) -> str:
    """A value for a sentence, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
