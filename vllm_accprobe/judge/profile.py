"""How a machine computes, as a few sentences and a small file that can be carried to another machine.

The problem: whoever brings a model up on a new card sees thousands of small differences, most of which come from a few
decisions of that card. The idea: a `Habit` is one such decision of one operator in one dtype, from a closed list, with
its price; a `Profile` is all of them of one dump. A habit is reported once and is no fault at the default standard. Not
here: how a habit is recognised and decided (opcheck/machine_precision/of_machine.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from vllm_accprobe.dump.decode import Count, Size, at_most, load, object_at, one_of, parse, words

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
Text = Annotated[str, words(_LONGEST)]


@dataclass(frozen=True, slots=True)
class Habit:
    """One decision of a machine. kind: of KINDS; operator: a module's class or an operator's name; dtype: torch's name;
    words: for people, complete with `operator` before them; price: what it can do to one result, in roundings of the
    dtype (2**-8 for bfloat16), 0.0 for what everybody does; outputs, of: that show it, of those that were examined;
    layers: modules that show it."""

    kind: Annotated[str, one_of(KINDS)]
    operator: Text
    dtype: Text
    words: Text
    price: Size
    outputs: Count
    of: Count
    layers: Count

    def plain(self) -> dict[str, Any]:
        """As in compare.json's ``machines``."""
        return asdict(self)


@dataclass(frozen=True)
class Profile:
    """All habits of one machine. host: what its run said of itself (platform, device, model's dtype), texts by name;
    units: relative error of functions that were measured, by operator, dtype and function: ``RMSNorm bfloat16 rsqrt``.
    """

    habits: Annotated[tuple[Habit, ...], at_most(_MOST)]
    host: Annotated[Mapping[Text, Text], at_most(_MOST)] = field(default_factory=dict)
    units: Annotated[Mapping[Text, Size], at_most(_MOST)] = field(default_factory=dict)

    def to_json(self) -> str:
        plain = {"kind": KIND, "schema": SCHEMA, "host": dict(self.host), "units": dict(self.units),
                 "habits": [h.plain() for h in self.habits]}  # fmt: skip
        return json.dumps(plain, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Raises DecodeError for what `to_json` never wrote; the file may be anybody's."""
        return parse(Profile, text, _MOST_BYTES, {"kind": KIND, "schema": SCHEMA})

    @staticmethod
    def read(path: Path) -> Profile:
        """A file that `to_json` wrote. Raises OSError, and DecodeError with the file's name."""
        return load(Profile, path, _MOST_BYTES, {"kind": KIND, "schema": SCHEMA})


def host_of(run: object) -> dict[str, str]:
    """What a run.json says of its machine: plain texts, each printable and short; nothing where it says nothing."""
    found: dict[str, str] = {}
    for name, keys in (("platform", ("system", "machine", "vllm")), ("device", ("type", "name")), ("model", ("dtype",)),
                       ("versions", ("vllm", "torch"))):  # fmt: skip
        part = object_at(run, name) or {}
        for key in keys:
            value = part.get(key)
            if isinstance(value, str) and value and value.isprintable():
                found[f"{name}.{key}"] = value[:_LONGEST]
    return found


def lines(habits: Iterable[Habit]) -> list[str]:
    """One line for each operator and dtype, what costs most first among its habits."""
    groups: dict[tuple[str, str], list[Habit]] = {}
    for h in habits:
        groups.setdefault((h.operator, h.dtype), []).append(h)
    out = []
    for (operator, dtype), mine in groups.items():
        parts = "; ".join(h.words + _price(h.price, dtype) for h in sorted(mine, key=lambda h: -h.price))
        out.append(f"{operator}, {dtype}: {parts}")
    return out


def _price(price: float, dtype: str) -> str:
    return "" if price < 0.005 else f" (up to {price:.2g} {'rounding' if price == 1 else 'roundings'} of {dtype})"
