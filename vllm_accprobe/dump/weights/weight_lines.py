"""Reads the lines of weights' lives, trusting nothing.

The idea: as for tensors, fields are checked one by one, and what does not hold is a ValueError with a short reason,
which the reader counts. Not here: what is written (dump/weights/).
"""

from __future__ import annotations

from typing import Any

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
from vllm_accprobe.dump.weights.weight_life import Range, WeightEvent, WeightPrint, row_count

_WORD = 300
_HEX = frozenset("0123456789abcdef")


def weight_event(rank: int, e: Event) -> WeightEvent:
    """A ``life`` line. Raises ValueError."""
    seconds = e.get("seconds", 0.0)
    return WeightEvent(
        rank,
        integer(e, "number"),
        string(e, "kind")[:_WORD],
        integer(e, "step", 0),
        string(e, "name", "")[:_WORD],
        optional_integer(e, "slot"),
        float(seconds) if type(seconds) in (int, float) else 0.0,
        integer(e, "nbytes", 0),
        string(e, "detail", "")[:_WORD],
    )


def weight_print(rank: int, e: Event) -> WeightPrint:
    """A ``weight`` line. Raises ValueError."""
    shape = tuple(_numbers(e.get("shape"), "shape"))
    if len(shape) > MAX_DIMS or row_count(shape) > MAX_INT:
        raise ValueError(f"shape is {short(shape)}")
    written = e.get("written")
    return WeightPrint(
        rank,
        integer(e, "life"),
        string(e, "tap"),
        string(e, "class", ""),
        string(e, "name"),
        string(e, "form"),
        string(e, "dtype"),
        shape,
        _sum(e, "order"),
        _sum(e, "bag"),
        integer(e, "zeros", 0),
        optional_integer(e, "nan"),
        string(e, "undone", ""),
        integer(e, "block", 0),
        tuple(_parts(e.get("parts") or [])),
        None if written is None else tuple(_triple(x) for x in _list(written, "written")),
        bool(e.get("raw", False)),
        optional_string(e, "rows"),
    )


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{key} is {short(value)}")
    return value


def _numbers(value: Any, key: str) -> list[int]:
    found = _list(value, key)
    if not all(type(v) is int and 0 <= v <= MAX_INT for v in found):
        raise ValueError(f"{key} is {short(value)}")
    return found


def _triple(value: Any) -> tuple[int, int, int]:
    first, end, times = [*_numbers(value, "written"), 0, 0, 0][:3]
    return first, end, times


def _parts(value: Any) -> list[Range]:
    found: list[Range] = []
    for part in _list(value, "parts"):
        if not isinstance(part, list) or len(part) != 3 or not isinstance(part[0], str):
            raise ValueError(f"parts is {short(value)}")
        first, end = _numbers(part[1:], "parts")
        found.append((part[0][:_WORD], first, end))
    return found


def _sum(e: Event, key: str) -> str:
    value = string(e, key)
    if len(value) != 16 or not _HEX.issuperset(value):
        raise ValueError(f"{key} is {short(value)}, not 16 hex digits")
    return value
