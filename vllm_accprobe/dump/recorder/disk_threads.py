"""What becomes of one batch: its bytes go to the disk, its statistics are taken, its lines go to the journal.

The problem: a journal line promises that its payload is on disk, whatever fails and whenever. The idea: bytes and lines
arrive together in batches, one block of bytes each with the lines that wait for it. One thread writes the bytes, and
meanwhile another computes statistics from the same block; when both are done, it writes the lines. After the
first error nothing more is written but the line that names it, and the end. Not here: threads, waiting and budgets
(writer.py).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.journal import END, ERROR, STOP, last
from vllm_accprobe.dump.recorder.journal_writer import (
    Event,
    JournalFile,
    Line,
    OpenSegment,
    TemplateLine,
    TensorLine,
    WriteBatch,
    encode,
    spell,
)
from vllm_accprobe.dump.schema import End, Failure, Stop
from vllm_accprobe.dump.segment import HeaderEntry, SegmentFile
from vllm_accprobe.dump.stats import StatsCell, moments_within


class WriterThread:
    """The files of one rank. Nothing here raises; the first error is ``failed``, and is told to ``on_error`` once.
    ``write`` belongs to one thread, everything else to another."""

    def __init__(self, directory: Path, journal: JournalFile, on_error: Callable[[str], None]):
        self.failed: str | None = None
        self.bytes_written = journal.size
        self._dir = directory
        self.journal = journal
        self._on_error = on_error
        self._segment: OpenSegment | None = None
        self._broken = False
        self._payload_bytes = self._steps = self._tensors = self._lost = 0

    def write(self, batch: WriteBatch) -> None:
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

    def digest(self, batch: WriteBatch) -> None:
        """Statistics of the pieces, while the bytes are being written."""
        if self.failed or batch.block is None:
            return
        base = batch.block.address
        try:
            # All pieces of a dtype in one call: each call gives up the GIL, and may wait for milliseconds to get it.
            alike: dict[str, list[tuple[StatsCell, int, int]]] = {}
            for piece in batch.pieces:
                dtype = piece[0].dtype
                if dtype is not None:
                    alike.setdefault(dtype, []).append(piece)
            for dtype, pieces in alike.items():
                found = moments_within(base, [(start, stop) for _, start, stop in pieces], dtype)
                for (cell, _, _), sums in zip(pieces, found, strict=True):
                    cell.add(sums)
        except Exception as e:
            self._fail(e, f"segment {batch.segment.index if batch.segment else 0}")

    def lines(self, batch: WriteBatch) -> None:
        """The lines, once the bytes are written and digested, and the end of the segment where it is due."""
        if batch.segment is not None and batch.used:
            self._segment = batch.segment
        if batch.error is not None:
            self._fail(batch.error, f"segment {batch.segment.index if batch.segment else 0}")
        if not self.failed:
            self._payload_bytes += sum(stop - start for _, start, stop in batch.pieces)
            try:
                self.journal.append(b"".join(self._encoded(batch.lines)))
                if batch.segment is not None:
                    batch.segment.entries += map(_entry, batch.brought)
                self.bytes_written = self._payload_bytes + self.journal.size
            except Exception as e:
                self._lost += len(batch.brought)
                self._fail(e, "the journal")
        else:
            self._lost += len(batch.brought)
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
            counted = {"steps": self._steps, "tensors": self._tensors}
            steps, tensors = (n if summary.get(key) is None else summary[key] for key, n in counted.items())
            self.journal.release_reserve()
            line = END.to_line(End(reason, steps, tensors, self.bytes_written, skipped))
            self.journal.append(encode(last(line, "bytes")))
            self.bytes_written = self._payload_bytes + self.journal.size
            self.journal.close()
        except Exception as e:
            self._fail(e, "the journal")

    def _encoded(self, lines: list[Line]) -> list[bytes]:
        """The lines as they are written; counts what they say."""
        encoded: list[bytes] = []
        steps = tensors = 0
        for line in lines:
            if isinstance(line, tuple):
                encoded.append(spell(line))
                tensors += 1
            elif (event := self._event(line)) is not None:
                encoded.append(encode(event))
                kind = event.get("event")
                steps += kind == "step"
                tensors += kind == "tensor" or kind == "param"
        self._steps += steps
        self._tensors += tensors
        return encoded

    def _event(self, line: TensorLine | Event | Callable[[], Event | None]) -> Event | None:
        if isinstance(line, TensorLine):
            return line.whole()
        if not callable(line):
            return line
        try:
            return line()
        except Exception as e:  # the line is lost, but not silently and not the capture with it
            return ERROR.to_line(Failure("journal line", f"{type(e).__name__}: {e}"), "step")

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
            self.journal.release_reserve()
            self.journal.append(encode(STOP.to_line(Stop(self.failed), "step")))
        except Exception:
            pass  # the disk is gone altogether: the missing ``end`` line tells the reader
        self._on_error(self.failed)


def _entry(line: TensorLine | TemplateLine) -> HeaderEntry:
    """A segment's entry of the payload that the line brought."""
    if isinstance(line, TensorLine):
        assert line.cell.payload is not None
        return line.entry(line.cell.payload)
    template, step, call, _, cell = line
    assert cell.payload is not None
    return template.entry(step, call, cell.payload)
