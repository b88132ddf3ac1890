"""Tensor lines that are text from the start.

The problem: hundreds of tensors per step each become a journal line while a model waits, and nine tenths of such a line
are the same at every call of a tap. The idea: the part that stays is encoded once, as a template; a line is that text,
three numbers, what is said of the bytes (StatsCell.tail), and the statistics, which come last because they are the last
to be known. Not here: lines of other kinds (lines.py), who keeps templates (capture/express.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .lines import encode
from .schema import Payload
from .segment import Entry, entry_room


class TensorTemplate:
    """``event``: the keys of a tensor's line that do not change: tap, class, role, rows, row_dim, dtype, shape, layout.
    ``nbytes``: size of its payload. ``room``: header bytes that an entry takes."""

    __slots__ = ("dtype", "head", "name", "nbytes", "room", "shape")

    def __init__(self, event: Mapping[str, Any], nbytes: int):
        self.head = encode({"event": "tensor", **event}).decode()[:-2] + ',"call":'
        self.name = f"{event['tap']}|{event['role']}"
        self.dtype = str(event["dtype"])
        self.shape = tuple(event["shape"])
        self.nbytes = nbytes
        self.room = entry_room(event["tap"], event["role"], len(self.shape))

    def line(self, step: int, call: int, seq: int, tail: str) -> str:
        """The line up to its statistics."""
        return f'{self.head}{call},"seq":{seq},"step":{step}{tail}'

    def entry(self, step: int, call: int, payload: Payload) -> Entry:
        return Entry(f"{step}|{self.name}|{call}", self.dtype, self.shape, payload.off, payload.nbytes)


def tail(digest: str, payload: Payload | None) -> str:
    """What a line says of its bytes: hash, place, and the key of the statistics that follow."""
    if payload is None:
        return f',"hash":"{digest}","stats":'
    return f',"hash":"{digest}","seg":{payload.seg},"off":{payload.off},"nbytes":{payload.nbytes},"stats":'
