"""What becomes of one batch: its bytes go to the disk, its statistics are taken, its lines go to the journal.

The problem: a journal line promises that its payload is on disk, whatever fails and whenever. The idea: bytes and lines
arrive together in batches, one block of bytes each with the lines that wait for it. One thread writes the bytes, and
meanwhile another computes statistics and hashes from the same block; when both are done, it writes the lines. After the
first error nothing more is written but the line that names it, and the end. Not here: threads, waiting and budgets
(writer.py).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .blocks import Block
from .dtypes import DTYPES
from .lines import JournalFile, encode
from .segment import HEADER_BYTES, Entry, SegmentFile, entry_key
from .stats import Moments, StatsCell, moments

Event = dict[str, Any]


def xxh3_128() -> Any:
    import xxhash  # here, so that a journal without payloads does without it

    return xxhash.xxh3_128()


class Pending:
    """A payload on its way: its event, and the statistics and hash that grow piece by piece."""

    __slots__ = ("cell", "digest", "event", "sums", "wants_stats")

    def __init__(self, event: Event, cell: StatsCell | None):
        self.event = event
        self.cell = cell
        self.wants_stats = cell is not None or "stats" not in event
        self.sums: Moments | None = None
        self.digest: Any = None

    def take(self, piece: Any) -> None:
        """``piece``: contiguous uint8, whole elements, the next ones of the payload."""
        if self.wants_stats and self.event["dtype"] in DTYPES:
            sums = moments(piece, self.event["dtype"])
            self.sums = sums if self.sums is None else self.sums + sums
        if not isinstance(self.event.get("hash"), str):
            if self.digest is None:
                self.digest = xxh3_128()
            self.digest.update(piece)

    def finished(self) -> Event:
        digest = self.event.get("hash")
        if not isinstance(digest, str):
            digest = (self.digest or xxh3_128()).hexdigest()
        self.event["hash"] = digest
        if self.wants_stats:
            empty = self.event["dtype"] in DTYPES and not self.event["nbytes"]
            sums = Moments() if empty else self.sums
            self.event["stats"] = None if sums is None else sums.stats()
        if self.cell is not None:
            self.cell.hash = digest
            self.cell.value = self.event["stats"]
        return self.event

    def entry(self) -> Entry:
        e = self.event
        return Entry(entry_key(e), str(e["dtype"]), tuple(e["shape"]), e["off"], e["nbytes"])


Line = Pending | Event | Callable[[], Event | None]


class OpenSegment:
    """A segment: the producer knows where it ``end``s and how much ``room`` its header has left, the disk thread has
    the ``file``, the journal thread the header's ``entries``."""

    __slots__ = ("end", "entries", "file", "index", "room")

    def __init__(self, index: int) -> None:
        self.index = index
        self.end = 0
        self.room = HEADER_BYTES - 256
        self.entries: list[Entry] = []
        self.file: SegmentFile | None = None


class Batch:
    """``used`` bytes of ``block`` that follow each other in ``segment``, the pieces of payloads in them as (payload,
    start, stop), and the lines to be written when they are on disk. ``last``: the segment ends here. ``written``: the
    disk thread is through with it; ``error``: what went wrong there."""

    __slots__ = ("block", "born", "error", "last", "lines", "pieces", "segment", "used", "written")

    def __init__(self) -> None:
        self.block: Block | None = None
        self.segment: OpenSegment | None = None
        self.used = 0
        self.born = time.monotonic()
        self.last = False
        self.lines: list[Line] = []
        self.pieces: list[tuple[Pending, int, int]] = []
        self.written = False
        self.error: BaseException | None = None


class Drain:
    """The files of one rank. Nothing here raises; the first error is ``failed``, and is told to ``on_error`` once.
    ``write`` belongs to one thread, everything else to another."""

    def __init__(self, directory: Path, journal: JournalFile, on_error: Callable[[str], None]):
        self.failed: str | None = None
        self.bytes_written = journal.size
        self._dir = directory
        self._journal = journal
        self._on_error = on_error
        self._segment: OpenSegment | None = None
        self._broken = False
        self._payload_bytes = self._steps = self._tensors = self._lost = 0

    @property
    def journal_bytes(self) -> int:
        return self._journal.size

    def write(self, batch: Batch) -> None:
        """The bytes, to the segment they belong to, which is opened with its first block."""
        if self._broken or self.failed or batch.block is None or batch.segment is None or not batch.used:
            return
        try:
            if batch.segment.file is None:
                batch.segment.file = SegmentFile(self._dir, batch.segment.index)
            batch.segment.file.write(batch.block.view[: batch.used])
        except BaseException as e:  # it is the other thread's to say, in its place among the lines
            batch.error = e
            self._broken = True

    def digest(self, batch: Batch) -> None:
        """Statistics and hashes of the pieces, while the bytes are being written."""
        if self.failed or batch.block is None:
            return
        try:
            for pending, start, stop in batch.pieces:
                pending.take(batch.block.array[start:stop])
        except Exception as e:
            self._fail(e, f"segment {batch.segment.index if batch.segment else 0}")

    def lines(self, batch: Batch) -> None:
        """The lines, once the bytes are written and digested, and the end of the segment where it is due."""
        if batch.segment is not None and batch.used:
            self._segment = batch.segment
        if batch.error is not None:
            self._fail(batch.error, f"segment {batch.segment.index if batch.segment else 0}")
        if not self.failed:
            self._payload_bytes += sum(stop - start for _, start, stop in batch.pieces)
            try:
                events = [event for line in batch.lines if (event := self._event(line)) is not None]
                self._journal.append(b"".join(map(encode, events)))
                if batch.segment is not None:
                    batch.segment.entries += [line.entry() for line in batch.lines if isinstance(line, Pending)]
                self.bytes_written = self._payload_bytes + self._journal.size
                kinds = [event.get("event") for event in events]
                self._steps += kinds.count("step")
                self._tensors += kinds.count("tensor") + kinds.count("param")
            except Exception as e:
                self._lost += sum(isinstance(line, Pending) for line in batch.lines)
                self._fail(e, "the journal")
        else:
            self._lost += sum(isinstance(line, Pending) for line in batch.lines)
        if batch.last and batch.segment is not None:
            self._finish_segment(batch.segment)

    def end(self, reason: str, summary: Mapping[str, Any]) -> None:
        """Finishes the open segment, writes the ``end`` line and closes everything."""
        if self._segment is not None:
            self._finish_segment(self._segment)
        try:
            skipped = {str(k): v for k, v in dict(summary.get("skipped") or {}).items()}
            if self._lost:
                skipped["not written when capture stopped"] = self._lost
            event: Event = {"event": "end", "reason": reason, "steps": self._steps, "tensors": self._tensors}
            event |= {k: v for k, v in summary.items() if v is not None}
            event |= {"bytes": self.bytes_written, "skipped": skipped}
            self._journal.release_reserve()
            self._journal.append(encode(event))
            self.bytes_written = self._payload_bytes + self._journal.size
            self._journal.close()
        except Exception as e:
            self._fail(e, "the journal")

    def _event(self, line: Line) -> Event | None:
        if isinstance(line, Pending):
            return line.finished()
        if not callable(line):
            return line
        try:
            return line()
        except Exception as e:  # the line is lost, but not silently and not the capture with it
            return {"event": "error", "where": "journal line", "message": f"{type(e).__name__}: {e}"}

    def _finish_segment(self, segment: OpenSegment) -> None:
        if self._segment is segment:
            self._segment = None
        if segment.file is None:
            return
        segment.file.entries = segment.entries
        try:
            segment.file.finish()
        except Exception as e:
            self._fail(e, f"segment {segment.index}, left as .part")
        segment.file = None

    def _fail(self, error: BaseException, where: str) -> None:
        if self.failed:
            return
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            self.failed = f"{'disk full' if full else 'write error'} at {where}: {error.strerror or error}"
        else:
            self.failed = f"error in the writer at {where}: {type(error).__name__}: {error}"
        try:
            self._journal.release_reserve()
            self._journal.append(encode({"event": "stop", "reason": self.failed}))
        except Exception:
            pass  # the disk is gone altogether: the missing ``end`` line tells the reader
        self._on_error(self.failed)
