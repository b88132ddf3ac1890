"""How a machine computes, as a few sentences and a small file that can be carried to another machine.

The problem: whoever brings a model up on a new card sees thousands of small differences, most of which come from a few
decisions of that card. The idea: a `Habit` is one such decision of one operator in one dtype, from a closed list, with
its price; a `Profile` is all of them of one dump. A habit is reported once and is no fault at the default standard. Not
here: how a habit is recognised and decided (opcheck/habits/decided.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

NAME, KIND, SCHEMA = "profile.json", "accprobe-profile", 1
OURS = r'\A\{\s*"kind":\s*"accprobe-profile"'
"""How such a file begins: what stands in its place and does not is not ours to write over."""
ROUNDING, SUBNORMALS, ACCUMULATOR, TWICE, SPLIT, FUNCTION = (
    "rounding", "subnormals", "accumulator", "twice", "split", "function",
)  # fmt: skip
KINDS = (ROUNDING, SUBNORMALS, ACCUMULATOR, TWICE, SPLIT, FUNCTION)
"""The closed list: how a result is rounded; whether subnormal results become 0; how wide sums are; what is rounded
before the last rounding; sums whose parts are rounded before they are added; functions that are approximated."""
_MOST_BYTES = 1 << 20
"""Chosen: a habit takes some 300 bytes, and a model some 50 kinds of operators."""
_MOST, _LONGEST = 10_000, 500
"""Chosen: habits in a file; characters of one of its texts."""


@dataclass(frozen=True, slots=True)
class Habit:
    """One decision of a machine. kind: of KINDS; operator: a module's class or an operator's name; dtype: torch's name;
    words: for people, complete with `operator` before them; price: what it can do to one result, in roundings of the
    dtype (2**-8 for bfloat16), 0.0 for what everybody does; outputs, of: that show it, of those that were examined;
    layers: modules that show it."""

    kind: str
    operator: str
    dtype: str
    words: str
    price: float
    outputs: int
    of: int
    layers: int

    def plain(self) -> dict[str, Any]:
        """As in compare.json's ``machines``."""
        return asdict(self)

    @staticmethod
    def of_plain(value: object) -> Habit:
        """Raises ValueError for what `plain` never made."""
        if not isinstance(value, Mapping) or set(value) != {f.name for f in fields(Habit)}:
            raise ValueError("a habit has other fields than it should")
        texts = [value[n] for n in ("kind", "operator", "dtype", "words")]
        if not all(map(_is_text, texts)):
            raise ValueError("a habit's text is none, too long, or not printable")
        counts = [value[n] for n in ("outputs", "of", "layers")]
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 53 for n in counts):
            raise ValueError("a habit's count is none")
        if not _is_number(value["price"]):
            raise ValueError("a habit's price is no number")
        if value["kind"] not in KINDS:
            raise ValueError("a habit of a kind that this version does not know")
        return Habit(texts[0], texts[1], texts[2], texts[3], float(value["price"]), *counts)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True)
class Profile:
    """All habits of one machine. host: what its run said of itself (platform, device, model's dtype), texts by name;
    units: relative error of functions that were measured, by operator, dtype and function: ``RMSNorm bfloat16 rsqrt``.
    """

    habits: tuple[Habit, ...]
    host: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        plain = {"kind": KIND, "schema": SCHEMA, "host": dict(self.host), "units": dict(self.units),
                 "habits": [h.plain() for h in self.habits]}  # fmt: skip
        return json.dumps(plain, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Raises ValueError for what `to_json` never wrote; the file may be anybody's."""
        if len(text) > _MOST_BYTES:
            raise ValueError(f"a profile has at most {_MOST_BYTES >> 20} MiB")
        try:
            value = json.loads(text)
        except RecursionError:
            raise ValueError("not a profile: nested too deep") from None
        if not isinstance(value, dict) or value.get("kind") != KIND or value.get("schema") != SCHEMA:
            raise ValueError("not a profile of this version")
        host, units, habits = (value.get(n) for n in ("host", "units", "habits"))
        if not isinstance(host, dict) or not isinstance(units, dict) or not isinstance(habits, list):
            raise ValueError("a profile without host, units or habits")
        if max(len(host), len(units), len(habits)) > _MOST:
            raise ValueError(f"a profile has at most {_MOST} entries")
        if not all(map(_is_text, (*host, *host.values(), *units))):
            raise ValueError("a profile's text is none, too long, or not printable")
        if not all(map(_is_number, units.values())):
            raise ValueError("a profile's unit is no number")
        return Profile(tuple(map(Habit.of_plain, habits)), host, {k: float(x) for k, x in units.items()})

    @staticmethod
    def read(path: Path) -> Profile:
        """A file that `to_json` wrote. Raises OSError, and ValueError with the file's name."""
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path} is no profile: it is too large")
        try:
            return Profile.from_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def host_of(run: object) -> dict[str, str]:
    """What a run.json says of its machine: plain texts, each printable and short; nothing where it says nothing."""
    found: dict[str, str] = {}
    for name, keys in (("platform", ("system", "machine", "vllm")), ("device", ("type", "name")), ("model", ("dtype",)),
                       ("versions", ("vllm", "torch"))):  # fmt: skip
        part = run.get(name) if isinstance(run, Mapping) else None
        plain = part if isinstance(part, Mapping) else {}
        for key in keys:
            value = plain.get(key)
            if isinstance(value, str) and value and value.isprintable():
                found[f"{name}.{key}"] = value[:_LONGEST]
    return found


def lines(habits: Iterable[Habit]) -> list[str]:
    """One line for each operator and dtype, what costs most first among its habits."""
    groups: dict[tuple[str, str], list[Habit]] = {}
    for h in habits:
        groups.setdefault((h.operator, h.dtype), []).append(h)
    said = []
    for (operator, dtype), mine in groups.items():
        parts = "; ".join(h.words + _price(h.price, dtype) for h in sorted(mine, key=lambda h: -h.price))
        said.append(f"{operator}, {dtype}: {parts}")
    return said


def _price(price: float, dtype: str) -> str:
    return "" if price < 0.005 else f" (up to {price:.2g} {'rounding' if price == 1 else 'roundings'} of {dtype})"
