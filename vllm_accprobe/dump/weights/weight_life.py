"""Weights over their life: what a journal says of each event, and of each parameter after it.

The problem: weights are loaded, packed, reloaded, put to sleep, synced by a trainer and exchanged in an adapter's slot,
and each of these can leave one of them wrong; all of them again and again would fill a disk. The idea: two kinds of
lines, an event (`WeightEvent`) and a fingerprint (`WeightPrint`) of one tensor in one form after it: 64 bits that know
the order of its elements, 64 that do not, and 32 for each row, which name the rows where two prints differ. The 64-bit
sums are sums modulo 2**64 of mixed bits, so that a range of rows has its own print, made of its rows'. Elements whose
bits are all 0 add nothing to the one without order: padding does not change it. Not here: computing them
(capture/weights/), what they mean (judge/weights/).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LOADED, PACKED, GIVEN, SLOT = "loaded", "packed", "given", "slot"
"""Forms of a parameter: as the checkpoint or a sync gave it; as it lies after packing; an adapter's tensor, and the
slot that holds it. Older dumps have ``columns`` and ``kernel`` too, which nothing reads."""
LOAD, RELOAD, SYNC, WAKE, LORA = "load", "reload", "sync", "wake", "lora"
"""Kinds of events. load: the first; reload: vLLM's reload_weights; sync: load_weights on the live model, or a session
of vLLM's weight transfer; wake: after sleep; lora: an adapter is put into a slot."""
MAX_ROWS = 1 << 18
"""Rows of a tensor that are told apart; of one with more there are the sums only."""
Range = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class WeightEvent:
    """``{"event": "life"}``: what happened to the weights. number: 0 for loading, then in order. step: the first that
    computes with what it left. name: an adapter's; slot: where it was put. seconds: what the prints cost; nbytes: of
    how many bytes. partly: only some tensors were to be written (an adapter, or less than half of a model's)."""

    rank: int
    number: int
    kind: str
    step: int
    name: str = ""
    slot: int | None = None
    seconds: float = 0.0
    nbytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WeightPrint:
    """``{"event": "weight"}``: one tensor in one form after the event ``life``.

    order, bag: the sums with and without order, 16 hex digits. zeros: elements whose bits are all 0; nan: those that
    are not numbers, None where not counted. undone: which packing was taken off before the print was made: ``""`` none,
    ``unknown`` for an order that nobody here can undo. block: rows of one expert, 0 without experts. parts: (name,
    first, end) of the rows of each block that have names of their own. written: (first row, end, times) of what was
    seen to be written, None where nobody looked. raw: memory that nobody had filled before. rows: 32 bits for each row,
    base64 of little-endian; None where there are too many, or they are those of the event before."""

    rank: int
    life: int
    tap: str
    cls: str
    name: str
    form: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    bag: str
    zeros: int = 0
    nan: int | None = None
    undone: str = ""
    block: int = 0
    parts: tuple[Range, ...] = ()
    written: tuple[tuple[int, int, int], ...] | None = None
    raw: bool = False
    rows: str | None = None

    @property
    def parameter(self) -> str:
        """``model.layers.0.mlp.down_proj.weight``."""
        return f"{self.tap}.{self.name}"

    @property
    def count(self) -> int:
        """How many rows it has: a tensor of one dimension has a row for each element."""
        return row_count(self.shape)

    def sums(self) -> np.ndarray | None:
        """The rows' own 32 bits, uint32 [count], or None."""
        return None if self.rows is None else unpack_rows(self.rows, self.count)


def row_count(shape: tuple[int, ...]) -> int:
    """Rows of a tensor: all dimensions but the last; each element where there is one dimension; 1 for a number."""
    found = 1
    for n in shape[:-1] if len(shape) > 1 else shape:
        found *= n
    return found


def pack_rows(sums: np.ndarray) -> str:
    """uint32 [n] as base64."""
    return base64.b64encode(np.ascontiguousarray(sums, "<u4").tobytes()).decode()


def unpack_rows(text: str, count: int) -> np.ndarray | None:
    """What `pack_rows` made, None for anything else: a journal may come from a stranger."""
    if len(text) != (count * 4 + 2) // 3 * 4:
        return None
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<u4").astype(np.uint32)
    except (binascii.Error, ValueError):
        return None


@dataclass
class Lives:
    """All that one dump says of its weights: events and prints in the journals' order."""

    events: list[WeightEvent] = field(default_factory=list)
    prints: list[WeightPrint] = field(default_factory=list)


NO_LIVES = Lives()
"""Of dumps that say nothing of their weights. Not to be added to."""


def event_line(event: WeightEvent) -> dict[str, Any]:
    """The line of an event."""
    line: dict[str, Any] = {"event": "life", "number": event.number, "kind": event.kind, "step": event.step}
    more = {"name": event.name, "slot": event.slot, "detail": event.detail}
    line |= {k: v for k, v in more.items() if v not in (None, "")}
    return line | {"seconds": round(event.seconds, 6), "nbytes": event.nbytes}


def print_line(p: WeightPrint) -> dict[str, Any]:
    """The line of a print; what is 0 or empty is no key."""
    line: dict[str, Any] = {
        "event": "weight", "life": p.life, "tap": p.tap, "class": p.cls, "name": p.name, "form": p.form,
        "dtype": p.dtype, "shape": list(p.shape), "order": p.order, "bag": p.bag,
    }  # fmt: skip
    more: Mapping[str, Any] = {
        "zeros": p.zeros, "nan": p.nan, "undone": p.undone, "block": p.block, "parts": [list(x) for x in p.parts],
        "raw": p.raw, "rows": p.rows,
    }  # fmt: skip
    line |= {k: v for k, v in more.items() if v}
    if p.written is not None:
        line["written"] = [list(x) for x in p.written]
    return line
