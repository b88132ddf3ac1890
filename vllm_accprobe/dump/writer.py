"""Writes one rank's part of a dump while the model runs.

The problem: gigabytes per second leave a forward pass that must not wait, and a process that may be killed at any
moment must leave nothing behind that seems whole and is not: a line promises that its payload is on disk. The idea: the
model's thread only copies bytes into the current page-aligned block (fresh memory would cost more than the copy).
Blocks are few and used in turn; a block and the lines whose payloads end in it are one batch. It is handed over when
the block is full, a fraction of a second old, or the segment ends. One thread writes the bytes while another computes
statistics from the same block; then the latter writes the lines. When all blocks are under way, the model's thread
waits for the disk. After the first error nothing more is written but the line that names it, and the end.

Not here: what is captured (the capture room), the form of a segment (files.py), how a line is spelt
(journal_writer.py).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.files import ALIGN, HEADER_BYTES, PAGE, HeaderEntry, SegmentFile, part_name
from vllm_accprobe.dump.journal import END, ERROR, STOP, last
from vllm_accprobe.dump.journal_writer import (
    GRACE_S,
    GROWING_S,
    Event,
    JournalFile,
    Line,
    Patience,
    TensorLine,
    encode,
    spell,
    write_run_json,
)
from vllm_accprobe.dump.schema import JOURNAL, SCHEMA, End, Failure, Payload, Stop, rank_dir, segment_name
from vllm_accprobe.dump.stats import StatsCell, TensorMoments, moments_within

_ENTRY_MOST = 1024
"""More bytes than a tensor's entry in a segment's header takes."""


_WITH_GIL = 1 << 20
"""Bytes up to which a copy keeps the GIL: released for a microsecond, it may be milliseconds until it is back."""
_copy_with_gil = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class AlignedBlock:
    """``size`` bytes: ``array`` (uint8) and ``view`` show the same memory at ``address``."""

    __slots__ = ("_map", "address", "array", "size", "view")

    def __init__(self, size: int):
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._map = mmap.mmap(-1, size, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)  # halves the CPU time of a write past the page cache
            except OSError:
                pass
        self.size = size
        self.array = np.frombuffer(self._map, dtype=np.uint8)
        self.array[::4096] = 0  # the first touch of a page costs microseconds: not while a request waits
        self.view = memoryview(self._map)
        self.address = self.array.ctypes.data

    def fill(self, at: int, source: int, nbytes: int) -> None:
        """Copies ``nbytes`` bytes from the address ``source`` to ``at``; while many are copied, the GIL is free."""
        if nbytes <= _WITH_GIL:
            _copy_with_gil(self.address + at, source, nbytes)
        else:
            ctypes.memmove(self.address + at, source, nbytes)

    def zero(self, start: int, nbytes: int) -> None:
        """Gaps are zeros: nothing that lay here before reaches the disk."""
        if nbytes > 0:
            ctypes.memset(self.address + start, 0, nbytes)


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


@dataclass(frozen=True)
class DumpCheckpoint:
    """What of a rank's files is whole, so that a later process can continue behind it: the journal's bytes, finished
    segments, and their bytes but for the first one's header."""

    journal: int = 0
    segments: int = 0
    payload: int = 0


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
        self.brought: list[TensorLine] = []
        self.pieces: list[tuple[StatsCell, int, int]] = []
        self.written = False
        self.error: BaseException | None = None


class BatchStaging:
    """Batches on their way, each in two queues, since two threads work on it at once. ``segment_bytes`` are those
    accepted, with the gaps between them and the headers of all segments but the first; ``waiting_lines`` the lines not
    yet written (the writer counts them down), ``sealed`` the batches ever queued. After ``closed`` is set, nobody
    waits. ``next_segment`` is the index of the next one."""

    def __init__(
        self, cond: threading.Condition, block_bytes: int, blocks: int, segment_bytes: int, begun: DumpCheckpoint
    ):
        self.free: list[AlignedBlock] = []
        self.to_disk: deque[WriteBatch] = deque()
        self.to_journal: deque[WriteBatch] = deque()
        self.current: WriteBatch | None = None
        self.segment_bytes = begun.payload
        self.next_segment = begun.segments
        self.waiting_lines = 0
        self.sealed = 0
        self.closed = False
        self._cond = cond
        self._block_bytes = block_bytes
        self._blocks = self._unmade_blocks = blocks
        self._segment_most = segment_bytes
        self._segment: OpenSegment | None = None

    def copy(self, address: int, line: TensorLine) -> None:
        """Copies the payload of ``line`` from ``address``, puts its place into the line's cell and queues the line.
        Neither when ``closed`` came while it waited."""
        cell, nbytes, room = line[4], line[0].nbytes, line[0].room
        batch, segment = self.current, self._segment
        if (  # most of a model's tensors: they fit into the current block as it is
            segment is not None
            and batch is not None
            and batch.segment is segment
            and batch.block is not None
            and not segment.end % ALIGN
            and segment.room >= room
            and segment.end + nbytes <= self._segment_most
            and 0 < nbytes < self._block_bytes - batch.used
        ):
            start = batch.used
            batch.block.fill(start, address, nbytes)
            cell.payload = Payload(segment.index, segment.end, nbytes)
            batch.used = start + nbytes
            batch.pieces.append((cell, start, start + nbytes))
            batch.lines.append(line)
            batch.brought.append(line)
            segment.room -= room
            segment.end += nbytes
            self.segment_bytes += nbytes
            self.waiting_lines += 1
            return
        if segment is None or segment.room < room or segment.end + nbytes > self._segment_most:
            segment = self._segment_for(nbytes, room)
        segment.room -= room
        gap = -segment.end % ALIGN
        if gap:
            self._advance(segment, gap)
        payload, left = Payload(segment.index, segment.end, nbytes), nbytes
        while left > 0:
            batch = self.current
            if batch is None or batch.block is None or batch.used == self._block_bytes:
                batch = self._with_room(segment)
            if batch is None or batch.block is None:
                return
            n = min(left, self._block_bytes - batch.used)
            batch.block.fill(batch.used, address, n)
            batch.pieces.append((cell, batch.used, batch.used + n))
            batch.used += n
            segment.end += n
            address, left = address + n, left - n
        cell.payload = payload
        self.segment_bytes += nbytes
        batch = self.current or self._batch()
        batch.lines.append(line)
        batch.brought.append(line)
        self.waiting_lines += 1
        if batch.used == self._block_bytes:
            self.seal()

    def room(self, sizes: Sequence[int]) -> bool:
        """Whether payloads of so many bytes each find room in the blocks that are free now."""
        need, segment, current = sum(sizes) + ALIGN * len(sizes), self._segment, self.current
        have = self._free_blocks() * self._block_bytes
        if current is not None and current.block is not None:
            have += self._block_bytes - current.used
        if segment is not None and (
            segment.end + need > self._segment_most or segment.room < _ENTRY_MOST * len(sizes)
        ):
            need += self._block_bytes  # the next segment begins with a block of its own
        return need <= have

    def idle(self) -> bool:
        """Whether all blocks but the current one are free: more room there will never be."""
        return self._free_blocks() >= self._blocks - 1

    def _free_blocks(self) -> int:
        return len(self.free) + self._unmade_blocks

    def _segment_for(self, nbytes: int, room: int) -> OpenSegment:
        segment = self._segment
        if segment and (segment.room < room or (segment.end and segment.end + nbytes > self._segment_most)):
            self.end_segment()
        if self._segment is None:
            self._segment = OpenSegment(self.next_segment)
            self.segment_bytes += HEADER_BYTES if self.next_segment else 0
            self.next_segment += 1
        return self._segment

    def end_segment(self) -> None:
        """The next payload begins another segment."""
        if self._segment is not None:
            batch = self.current = self.current or WriteBatch()
            batch.segment, batch.last = self._segment, True
            self.seal()
            self._segment = None

    def _with_room(self, segment: OpenSegment) -> WriteBatch | None:
        """The current batch, with a block that takes at least one byte more; waits for it. None: stopped."""
        if self.current is not None and self.current.used == self._block_bytes:
            self.seal()
        while self.current is None or self.current.block is None:
            if self.closed:
                return None
            if self.free or self._unmade_blocks:
                batch = self._batch()
                batch.segment = segment
                if self.free:
                    batch.block = self.free.pop()
                else:
                    self._unmade_blocks -= 1
                    batch.block = AlignedBlock(self._block_bytes)
                batch.born = time.monotonic()
            else:
                self._cond.wait()
        return self.current

    def _advance(self, segment: OpenSegment, gap: int) -> None:
        batch = self.current
        if gap and batch is not None and batch.block is not None:
            batch.block.zero(batch.used, gap)
            batch.used += gap
            segment.end += gap
            self.segment_bytes += gap

    def append(self, *lines: Line) -> None:
        """Queues lines behind everything before them."""
        (self.current or self._batch()).lines += lines
        self.waiting_lines += len(lines)

    def _batch(self) -> WriteBatch:
        if self.current is None:
            self.current = WriteBatch()
            self._cond.notify_all()  # the thread sleeps without a timeout while there is nothing
        return self.current

    def seal(self) -> None:
        """Hands the current batch to the thread. Its bytes are rounded up to whole pages, so that the next block is
        written at a page again."""
        batch, self.current = self.current, None
        if batch is None:
            return
        if batch.segment is not None:
            gap = -batch.used % PAGE
            if gap and batch.block is not None:
                batch.block.zero(batch.used, gap)
                batch.used += gap
                batch.segment.end += gap
                self.segment_bytes += gap
        self.to_disk.append(batch)
        self.to_journal.append(batch)
        self.sealed += 1
        self._cond.notify_all()


class WriterThread:
    """The files of one rank. Nothing here raises; the first error is ``failed``, and goes to ``on_error`` once.
    ``write`` belongs to one thread, everything else to another."""

    def __init__(self, directory: Path, journal: JournalFile, on_error: Callable[[str], None], payload_bytes: int = 0):
        self.failed: str | None = None
        self.bytes_written = payload_bytes + journal.size
        self._dir = directory
        self.journal = journal
        self._on_error = on_error
        self._segment: OpenSegment | None = None
        self._broken = False
        self._payload_bytes = payload_bytes
        self._steps = self._tensors = self._lost = 0

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
                self.journal.append(self._encoded(batch.lines))
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

    def _encoded(self, lines: list[Line]) -> bytes:
        """The lines as they are written; counts what they say."""
        texts: list[str] = []
        for line in lines:
            if isinstance(line, tuple):
                texts.append(spell(line))
                self._tensors += 1
            elif (event := self._event(line)) is not None:
                texts.append(encode(event).decode())
                kind = event.get("event")
                self._steps += kind == "step"
                self._tensors += kind == "tensor" or kind == "param"
        return "".join(texts).encode()

    def _event(self, line: Event | Callable[[], Event | None]) -> Event | None:
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


def _entry(line: TensorLine) -> HeaderEntry:
    """A segment's entry of the payload that the line brought."""
    template, step, call, _, cell = line
    assert cell.payload is not None
    return template.entry(step, call, cell.payload)


def _remove_from(directory: Path, index: int) -> None:
    """Removes the segments from number ``index`` on. Raises OSError."""
    while any((directory / name(index)).exists() for name in (segment_name, part_name)):
        for name in (segment_name, part_name):
            (directory / name(index)).unlink(missing_ok=True)
        index += 1


__all__ = ["DumpCheckpoint", "RankWriter", "StatsCell", "write_run_json"]

_PAYLOAD_AGE = 0.2
_LINE_AGE = 0.1

_LINE_GUESS = 512
"""Bytes of a journal line that is not encoded yet, for the budget."""
_CLOSE_TIMEOUT, _CLOSE_MOST = GRACE_S - 5.0, GROWING_S - 5.0
"""Without a byte written, and in all: whoever ends this process waits 5 s longer, and the log has what is missing."""


class RankWriter:
    """The dump of one global rank.

    root: the dump; created, 0700, where missing. start: what the journal's first line says besides ``schema`` and
    ``rank``. budget_bytes: limit of the files' sizes; they may exceed it by two headers (2 MiB). block_bytes (a
    multiple of 4096) times ``blocks`` is the memory used, from the first payload on. segment_bytes: size at which a new
    segment is begun. on_stop: called once, from either thread, why nothing more is written; what it raises is ignored.
    begun: of a dump that another process has begun, which is continued; what it wrote after its `checkpoint` is
    removed.

    No method raises because of the disk: see ``stopped``. One producer thread at a time.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        start: Mapping[str, Any],
        *,
        budget_bytes: int,
        block_bytes: int = 4 << 20,
        blocks: int = 6,
        segment_bytes: int = 1 << 30,
        on_stop: Callable[[str], None] | None = None,
        begun: DumpCheckpoint | None = None,
    ):
        if block_bytes <= 0 or block_bytes % PAGE or blocks < 2:
            raise ValueError(f"block_bytes must be a multiple of {PAGE} and blocks at least 2")
        self.stopped: str | None = None
        self._budget = budget_bytes
        self._on_stop = on_stop
        self._producer = threading.RLock()
        self._producing = 0  # the thread that is inside put
        self._lock = threading.RLock()
        self._cond = threading.Condition(self._lock)
        self.pending: list[TensorLine] = []
        """Lines without payload that no lock was taken for yet: whoever appends one calls ``release`` soon."""
        begun = begun or DumpCheckpoint()
        self._staging = BatchStaging(self._cond, block_bytes, blocks, segment_bytes, begun)
        self._done = self._steps_done = 0  # batches; what is done of them: written, digested, with their lines
        self._closing: tuple[str, Mapping[str, Any]] | None = None
        self._output: WriterThread | None = None
        self._thread: threading.Thread | None = None
        directory = Path(root) / rank_dir(rank)
        try:
            for d in (Path(root), directory):
                if not d.is_dir():
                    d.mkdir(mode=0o700, parents=True, exist_ok=True)
            journal = JournalFile(directory, begun.journal)
            if begun.journal:
                _remove_from(directory, begun.segments)
            else:
                journal.append(encode({"event": "start", "schema": SCHEMA, "rank": rank, **start}))
        except FileExistsError:
            self._stop(f"{directory / JOURNAL} exists: a dump is never written over, choose a new directory")
        except OSError as e:
            self._stop(f"cannot create the dump in {directory}: {e.strerror or e}")
        else:
            self._output = WriterThread(directory, journal, self._stop, begun.payload)
            name, work = f"accprobe-{rank}", (self._output,)
            self._thread = threading.Thread(target=self._journal, args=work, name=name, daemon=True)
            self._thread.start()
            threading.Thread(target=self._write, args=work, name=f"{name}-disk", daemon=True).start()

    @property
    def bytes_written(self) -> int:
        """Payload and journal bytes that are on disk."""
        return 0 if self._output is None else self._output.bytes_written

    def tensor(self, line: TensorLine, address: int) -> None:
        """Copies the ``nbytes`` bytes of the line's template from ``address`` and queues the line; its cell, which has
        their hash, gets their place, and later their statistics. May wait for the disk."""
        nbytes, step, cell = line[0].nbytes, line[1], line[4]
        if not nbytes and cell.dtype is not None:
            cell.sums = TensorMoments()
        with self._producer:
            with self._lock:
                if self.stopped or self._closing:
                    return
                if self._affordable(nbytes, len(self.pending)):
                    self._producing = threading.get_ident()
                    try:
                        self._append_pending()
                        self._staging.copy(address, line)
                    except BaseException as e:
                        self._interrupted(e, step)
                        raise
                    finally:
                        self._producing = 0
                    return
            self.release()
            self._spent(step)

    def line(self, line: Line) -> None:
        """Queues a line without a payload of its own. A callable is called by a thread of ours, in order, and gives the
        dict or None. With no payload waiting before it, the line is on disk a tenth of a second later; a tensor's line
        without payload waits for 63 more, or the end of its step (`release`)."""
        if self.pending:
            self.release()
        with self._lock:
            if self.stopped or self._closing:
                return
            if self._affordable(0):
                self._staging.append(line)
                return
        if isinstance(line, tuple):
            self._spent(line[1])
        else:
            self._spent(line.get("step") if isinstance(line, Mapping) else None)

    def release(self) -> None:
        """Queues the ``pending`` lines, all under one lock: taken for each of hundreds in a step, it costs more than
        the rest of their way. Every other method that queues does it first, so the order stays."""
        left: Any = None
        with self._lock:
            if self.stopped or self._closing:
                self.pending.clear()
            while self.pending and not self._affordable(0, len(self.pending)):
                left = self.pending.pop()
            self._append_pending()
        if left is not None:
            self._spent(left[1])

    def _append_pending(self) -> None:
        if self.pending:
            lines = []
            while self.pending:  # one by one: a signal's handler may come here, too, and no line is written twice
                lines.append(self.pending.pop(0))
            self._staging.append(*lines)

    def room(self, sizes: Sequence[int]) -> bool:
        """Whether payloads of so many bytes each can be taken now without waiting for the disk."""
        with self._lock:
            return self.stopped is not None or self._staging.room(sizes)

    def idle(self) -> bool:
        """Whether there is as much room as there will ever be."""
        with self._lock:
            return self._staging.idle()

    def flush(self, timeout: float = _CLOSE_TIMEOUT) -> bool:
        """Waits until everything queued so far is on disk; False when it is not, or capture has stopped."""
        self.release()
        with self._cond:
            self._staging.seal()
            target = self._staging.sealed
            self._cond.wait_for(lambda: self._done >= target or self.stopped is not None, timeout)
            return self._done >= target and self.stopped is None

    def checkpoint(self, timeout: float = _CLOSE_TIMEOUT) -> DumpCheckpoint | None:
        """Finishes the segment and waits until everything is on disk; None when it is not, or capture has stopped.
        Raises OSError."""
        self.release()
        with self._cond:
            self._staging.end_segment()
        if not self.flush(timeout) or self._output is None:
            return None
        self._output.journal.sync()
        return DumpCheckpoint(self._output.journal.size, self._staging.next_segment, self._staging.segment_bytes)

    def close(self, reason: str, summary: Mapping[str, Any]) -> None:
        """Writes what is waiting, finishes the segment and writes the ``end`` line: ``reason`` and ``summary`` (steps,
        tensors, skipped; the first two are counted from the journal where missing). Waits while bytes are written
        (`Patience`). A second call only waits. Called by a signal handler that interrupted ``put`` it cannot wait, and
        returns at once."""
        self.release()
        with self._cond:
            if self._closing is None:
                self._closing = (reason, summary)
            self._cond.notify_all()
        if self._thread is None or threading.get_ident() in (self._thread.ident, self._producing):
            return
        patience = Patience(_CLOSE_TIMEOUT, _CLOSE_MOST)
        while self._thread.is_alive() and patience.left(self._steps_done):
            self._thread.join(0.2)
        if self._thread.is_alive():
            self._stop("the disk did not take the rest in time")

    def _interrupted(self, error: BaseException, step: Any) -> None:
        """A signal's exception in the middle of a copy: what is half done is never continued."""
        reason = f"interrupted while a tensor was copied ({type(error).__name__})"
        self._staging.append(STOP.to_line(Stop(reason, step)))
        self._stop(reason)

    def _affordable(self, nbytes: int, lines: int = 0) -> bool:
        staging, output = self._staging, self._output
        journal = 0 if output is None else output.journal.size
        guess = _LINE_GUESS * (staging.waiting_lines + lines + 2)
        return staging.segment_bytes + nbytes + journal + guess <= self._budget

    def _spent(self, step: Any) -> None:
        gb = self._budget / 1e9
        reason = f"budget of {f'{gb:.1f} GB' if gb >= 0.1 else f'{self._budget} bytes'} spent"
        with self._cond:
            if not self.stopped:
                self._staging.append(STOP.to_line(Stop(reason, step)))
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        with self._cond:
            if self.stopped:
                return
            self.stopped = reason
            self._staging.closed = True
            self._cond.notify_all()
        if self._on_stop is not None:
            try:
                self._on_stop(reason)
            except Exception:
                pass  # its failure changes nothing

    def _write(self, output: WriterThread) -> None:
        """The disk thread: keeps the disk busy, and gives up batches that have become old."""
        while (batch := self._next()) is not None:
            output.write(batch)
            with self._cond:
                batch.written = True
                self._steps_done += 1
                self._cond.notify_all()

    def _journal(self, output: WriterThread) -> None:
        """The journal thread: digests a block while it is being written, then frees it and writes its lines."""
        queue = self._staging.to_journal
        try:
            while True:
                with self._cond:
                    self._cond.wait_for(lambda: queue or (self._closing and self._staging.current is None))
                    if not queue:
                        break
                    batch = queue.popleft()
                output.digest(batch)
                with self._cond:
                    self._steps_done += 1
                    while not batch.written:
                        self._cond.wait()
                    if batch.block is not None:
                        self._staging.free.append(batch.block)
                    self._cond.notify_all()
                output.lines(batch)
                with self._cond:
                    self._staging.waiting_lines -= len(batch.lines)
                    self._done += 1
                    self._steps_done += 1
                    self._cond.notify_all()
            reason, summary = self._closing or ("", {})
            output.end(reason, summary)
        except BaseException as e:  # a defect of ours: end the capture, wake whoever waits for a block
            self._stop(f"error in the writer: {type(e).__name__}: {e}")

    def _next(self) -> WriteBatch | None:
        with self._cond:
            while True:
                if self._staging.to_disk:
                    return self._staging.to_disk.popleft()
                batch = self._staging.current
                if batch is None:
                    if self._closing:
                        return None
                    self._cond.wait()
                    continue
                age = time.monotonic() - batch.born
                limit = _PAYLOAD_AGE if batch.used else _LINE_AGE
                if age >= limit or self._closing or self.stopped:
                    self._staging.seal()
                else:
                    self._cond.wait(limit - age)
