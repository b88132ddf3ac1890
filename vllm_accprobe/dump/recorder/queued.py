"""What is on its way through the writer: payloads, lines, and the batches they travel in.

Not here: how batches are filled (staging.py) and what becomes of them (disk_threads.py).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.recorder.blocks import AlignedBlock
from vllm_accprobe.dump.recorder.template import TemplateLine
from vllm_accprobe.dump.segment import HEADER_BYTES, HeaderEntry, SegmentFile, entry_key
from vllm_accprobe.dump.stats import StatsCell, Sums, TensorMoments

Event = dict[str, Any]


def xxh3_128() -> Any:
    """A new hash."""
    import xxhash  # here, so that a journal without payloads does without it

    return xxhash.xxh3_128()


class PendingPayload:
    """A payload on its way: its event, and the statistics and hash that grow piece by piece. ``dtype``: of the
    statistics, None where none are wanted."""

    __slots__ = ("_sums", "_wants_stats", "cell", "digest", "dtype", "event", "wants_hash")

    def __init__(self, event: Event, cell: StatsCell | None):
        self.event = event
        self.cell = cell
        self._wants_stats = cell is not None or "stats" not in event
        self.dtype: str | None = event["dtype"] if self._wants_stats and event["dtype"] in DTYPES else None
        self.wants_hash = not isinstance(event.get("hash"), str)
        self._sums: TensorMoments | None = None
        self.digest: Any = None

    def add(self, sums: Sums) -> None:
        """The moments of the next piece of the payload."""
        self._sums = TensorMoments(*sums) if self._sums is None else self._sums + TensorMoments(*sums)

    def update(self, address: int, nbytes: int) -> None:
        """The bytes of the next piece, for the hash."""
        if self.digest is None:
            self.digest = xxh3_128()
        self.digest.update((ctypes.c_char * nbytes).from_address(address))

    def finished(self) -> Event:
        """The event with hash and statistics, once all its bytes have passed."""
        digest = self.event.get("hash")
        if not isinstance(digest, str):
            digest = (self.digest or xxh3_128()).hexdigest()
        self.event["hash"] = digest
        if self._wants_stats:
            empty = self.dtype is not None and not self.event["nbytes"]
            sums = TensorMoments() if empty else self._sums
            self.event["stats"] = None if sums is None else sums.stats()
        if self.cell is not None:
            self.cell.hash = digest
            self.cell.value = self.event["stats"]
        return self.event

    def entry(self) -> HeaderEntry:
        """Its entry in the segment's header."""
        e = self.event
        return HeaderEntry(entry_key(e), str(e["dtype"]), tuple(e["shape"]), e["off"], e["nbytes"])


Line = PendingPayload | Event | Callable[[], Event | None] | TemplateLine


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
    """``used`` bytes of ``block`` that follow each other in ``segment``, the pieces of payloads in them as (payload,
    start, stop), the lines to be written when they are on disk, and those from templates that brought their bytes.
    ``last``: the segment ends here. ``written``: the disk thread is through with it; ``error``: what happened there."""

    __slots__ = ("block", "born", "error", "last", "lines", "pieces", "segment", "templates", "used", "written")

    def __init__(self) -> None:
        self.block: AlignedBlock | None = None
        self.segment: OpenSegment | None = None
        self.used = 0
        self.born = time.monotonic()
        self.last = False
        self.lines: list[Line] = []
        self.templates: list[TemplateLine] = []
        self.pieces: list[tuple[PendingPayload | StatsCell, int, int]] = []
        self.written = False
        self.error: BaseException | None = None
