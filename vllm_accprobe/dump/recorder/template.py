"""Tensor lines that are text from the start.

The problem: hundreds of tensors per step each become a journal line while a model waits, and nine tenths of such a line
are the same at every call of a tap. The idea: the part that stays is encoded once, as a template; a line on its way is
a template, three numbers and the cell of its bytes (TemplateLine), and text only when it is written. Not here: lines
of other kinds (lines.py), who keeps templates (capture/taps/fast_path.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_accprobe.dump.recorder.lines import encode, statistics
from vllm_accprobe.dump.schema import Payload
from vllm_accprobe.dump.segment import HeaderEntry, entry_room
from vllm_accprobe.dump.stats import StatsCell


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

    def entry(self, step: int, call: int, payload: Payload) -> HeaderEntry:
        """The tensor's entry in a segment's header."""
        return HeaderEntry(f"{step}|{self.name}|{call}", self.dtype, self.shape, payload.off, payload.nbytes)


TemplateLine = tuple[TensorTemplate, int, int, int, StatsCell]
"""A tensor's line: template, step, call, seq, and the cell that has its hash, and by now place and statistics."""


def spell(line: TemplateLine) -> bytes:
    """The line as it is written."""
    template, step, call, seq, cell = line
    return f'{template.head}{call},"seq":{seq},"step":{step}{cell.text or _spell(cell)}'.encode()


def _spell(cell: StatsCell) -> str:
    """What every line about the same bytes ends with."""
    payload = cell.payload
    place = "" if payload is None else f'"seg":{payload.seg},"off":{payload.off},"nbytes":{payload.nbytes},'
    cell.text = f',"hash":"{cell.hash}",{place}"stats":{statistics(cell)}}}\n'
    return cell.text
