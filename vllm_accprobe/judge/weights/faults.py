"""A finding about weights, as a plain value. Not here: what finds it (within.py, between.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

NOT_WRITTEN, UNFILLED, ZERO, NAN = "not written", "never filled", "zero", "NaN"
EXCHANGED, VALUE, NOT_PACKED, SLEEP, OLD_ADAPTER, DIFFERS = (
    "exchanged", "value", "not packed again", "sleep", "old adapter", "differs",
)  # fmt: skip
BOTH = "both"
"""The side of a fault that golden and mine have alike: it is no difference between them."""


@dataclass(frozen=True)
class WeightFault:
    """what: one of the words above. side: ``golden``, ``mine`` or BOTH, "" for what is between them. event: in words;
    number: of the event in its own dump. rows: in words, "" for all. says: the whole sentence."""

    what: str
    side: str
    rank: int
    tap: str
    name: str
    event: str
    number: int
    rows: str
    says: str

    def to_dict(self) -> dict[str, Any]:
        """As in compare.json; ``module`` and ``parameter`` as everywhere there."""
        found = asdict(self)
        return {"module": found.pop("tap"), "parameter": found.pop("name")} | found


def wrong_weights(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of compare.json's ``weights``: the findings that tell golden and mine apart."""
    return [f for f in found.get("findings") or [] if f["side"] != BOTH]
