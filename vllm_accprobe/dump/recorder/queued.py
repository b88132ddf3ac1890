"""What is on its way through the writer: lines, and the batches in which they travel with the bytes.

Not here: how batches are filled (staging.py) and what becomes of them (disk_threads.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm_accprobe.dump.journal.tensor_lines import told
from vllm_accprobe.dump.recorder.blocks import AlignedBlock
from vllm_accprobe.dump.recorder.template import TemplateLine
from vllm_accprobe.dump.schema import Payload
from vllm_accprobe.dump.segment import HEADER_BYTES, HeaderEntry, SegmentFile, entry_key
from vllm_accprobe.dump.stats import StatsCell

Event = dict[str, Any]


class TensorLine:
    """A tensor's line on its way: ``event``, which was decided once and stays as it is, and the ``cell`` of its bytes,
    which says the rest when the line is written."""

    __slots__ = ("cell", "event")

    def __init__(self, event: Mapping[str, Any], cell: StatsCell):
        self.event = event
        self.cell = cell

    def whole(self) -> Event:
        """The line as it is written; its bytes have all passed by now."""
        cell = self.cell
        if cell.payload is not None:
            cell.settle()
        return {**self.event, **told(cell)}

    def entry(self, payload: Payload) -> HeaderEntry:
        """The tensor's entry in the segment's header."""
        e = self.event
        key = entry_key(e.get("step"), e["tap"], e["role"], e.get("call", 0))
        return HeaderEntry(key, str(e["dtype"]), tuple(e["shape"]), payload.off, payload.nbytes)


Line = TensorLine | Event | Callable[[], Event | None] | TemplateLine


class OpenSegment:
    """A segment: the producer knows where it ``end``s and how much ``room`` its header has left, the disk thread has
    the ``file``, the journal thread the header's ``entries``."""

    __slots__ = ("end", "entries", "file", "index", "room")

    def __init__(self, index: int) -> None:
        self.index = index
        self.end = 0
        self.room = HEADER_BYTES - 256
        self.entries: list[HeaderEntry] = []
        self.file: SegmentFile | None = None


class WriteBatch:
    """``used`` bytes of ``block`` that follow each other in ``segment``, the pieces of payloads in them as (the
    payload's cell, start, stop), the lines to be written when they are on disk, and those of them that ``brought``
    their bytes. ``last``: the segment ends here. ``written``: the disk thread is through with it; ``error``: what
    happened there."""

    __slots__ = ("block", "born", "brought", "error", "last", "lines", "pieces", "segment", "used", "written")

    def __init__(self) -> None:
        self.block: AlignedBlock | None = None
        self.segment: OpenSegment | None = None
        self.used = 0
        self.born = time.monotonic()
        self.last = False
        self.lines: list[Line] = []
        self.brought: list[TensorLine | TemplateLine] = []
        self.pieces: list[tuple[StatsCell, int, int]] = []
        self.written = False
        self.error: BaseException | None = None
