"""From the values of a journal's line to plain objects, trusting nothing.

The problem: a journal may come from a killed run, a newer release or a stranger, and analysis wants plain objects whose
numbers it may use as sizes. The idea: types and ranges are checked, and what does not hold is a ValueError with a short
reason; the reader counts these. Strings that repeat on every line are kept once. Not here: whole lines (event_lines.py,
tensor_lines.py, opcalls.py), files (reader.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

MAX_DIMS = 32
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


def short(value: Any) -> str:
    """A value for a sentence, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
