"""Strings, numbers and places as all reports spell them.

The problem: a name from a stranger's dump may hold terminal escapes, newlines or right-to-left marks. The idea: every
name goes through ``safe``, every number through one formatter. Not here: escaping for HTML (html/), facts (facts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_
from typing import Any

MISSING = "–"
"""What stands where a number does not exist (a cosine of zero vectors, the limit of a skipped pair)."""


def safe(value: object, limit: int = 200) -> str:
    """``value`` as one line of printable characters: others as escapes; beyond ``limit`` characters the middle is left
    out."""
    text = str(value)
    if len(text) > limit:
        half = (limit - 1) // 2
        text = text[: limit - 1 - half] + "…" + text[len(text) - half :]
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode("ascii") for ch in text)


def num(value: Any, digits: int = 3) -> str:
    """A float with ``digits`` significant digits; ``None`` as a dash, NaN and infinities by name."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return safe(value)
    if isinstance(value, int):
        return f"{value:,}"
    return nonfinite(value) or f"{value:.{digits}g}"


def nonfinite(value: float) -> str:
    """``NaN``, ``Inf``, ``-Inf``; empty for a number."""
    return "" if math.isfinite(value) else "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def count(n: int, one: str, many: str | None = None) -> str:
    """``1 pair``, ``1,200 pairs``."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def each(values: Sequence[Any], text: Callable[[Any], Any]) -> list[Any]:
    """``text`` of each value, made once for an object that comes often: equal pairs share most of theirs."""
    if values and all(map(is_, values, repeat(values[0]))):
        return [text(values[0])] * len(values)
    known = {i: text(value) for i, value in dict(zip(map(id, values), values, strict=True)).items()}
    return [known[i] for i in map(id, values)]


def once(
    make: Callable[[Any, Sequence[Any]], Any], columns: Iterable[tuple[Any, Sequence[Any]]], kind: Callable[[Any], Any]
) -> list[Any]:  # fmt: skip
    """``make`` of each (name, column); once for columns of one kind that hold the same floats, as most errors of a pair
    do that nobody read."""
    known: list[tuple[Any, Sequence[Any], Any]] = []
    out = []
    for name, values in columns:
        own, floats = kind(name), len(values) > 0 and type(values[0]) is float
        alike = (made for k, other, made in known if floats and k == own and all(map(is_, other, values)))
        found = next(alike, None)
        out.append(make(name, values) if found is None else found)
        known.append((own, values, out[-1]))
    return out


def size(nbytes: float) -> str:
    """``1.4 GB``: decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def more(total: int, shown: int, where: str) -> list[str]:
    """``… 5 more: compare.json, origins``, where not all are shown."""
    return [f"… {total - shown:,} more: {where}"] if total > shown else []


def times(value: float | None, limit: float | None) -> str:
    """``13x``, ``1.04x``; empty where ``ratio`` is None or infinite."""
    from vllm_accprobe.comparison.pair import ratio  # brings numpy, which completion by Tab does without

    r = ratio(value, limit)
    return "" if r is None or math.isinf(r) else f"{factor(r)}x"


def factor(r: float, digits: int = 3) -> str:
    """``1.04``, ``130``, ``5e+07``: how many times; ``digits`` below ten."""
    if r < 10:
        return f"{r:.{digits}g}"
    return f"{r:,.0f}" if r < 1e6 else f"{r:.0e}"


def against(value: float | None, limit: float | None) -> str:
    """``0.21, limit 0.016 (13x)``: a value with its limit."""
    text = num(value)
    if limit is not None:
        text += f", limit {num(limit)}"
        if t := times(value, limit):
            text += f" ({t})"
    return text


def place(request: object = None, position: object = None, phase: object = None) -> str:
    """``request 'a', position 17 (decode)``, without what is None."""
    parts = []
    if request is not None:
        parts.append(f"request '{safe(request, 80)}'")
    if position is not None:
        parts.append(f"position {safe(position, 40)}")
    text = ", ".join(parts)
    if phase is not None:
        text += f" ({safe(phase, 20)})" if text else safe(phase, 20)
    return text
