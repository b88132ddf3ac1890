"""Where the model's thread puts bytes and lines, batch by batch.

The problem: payloads of any size must lie one after the other in a segment file that is written in whole aligned
blocks, and each line must travel with the block in which its payload ends. The idea: a current batch that owns one
block; it is sealed, that is handed over, when the block is full, when it is old (the writer decides), and where a
segment ends. Everything here runs under the writer's condition, which is also what a full house waits on. Not here: the
threads that empty the queues, budgets, stopping (writer.py), files (disk_threads.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from vllm_accprobe.dump.recorder.journal_writer import (
    AlignedBlock,
    Line,
    OpenSegment,
    TemplateLine,
    TensorLine,
    WriteBatch,
)
from vllm_accprobe.dump.schema import Payload
from vllm_accprobe.dump.segment import ALIGN, PAGE
from vllm_accprobe.dump.stats import StatsCell

_ENTRY_MOST = 1024
"""More bytes than a tensor's entry in a segment's header takes."""


class BatchStaging:
    """Batches on their way, each in two queues, since two threads work on it at once. ``payload_bytes`` are those
    accepted, ``waiting_lines`` those not yet written (the writer counts them down), ``sealed`` the batches ever queued.
    After ``closed`` is set, nobody waits."""

    def __init__(self, cond: threading.Condition, block_bytes: int, blocks: int, segment_bytes: int):
        self.free: list[AlignedBlock] = []
        self.to_disk: deque[WriteBatch] = deque()
        self.to_journal: deque[WriteBatch] = deque()
        self.current: WriteBatch | None = None
        self.payload_bytes = 0
        self.waiting_lines = 0
        self.sealed = 0
        self.closed = False
        self._cond = cond
        self._block_bytes = block_bytes
        self._blocks = self._unmade_blocks = blocks
        self._segment_bytes = segment_bytes
        self._segment: OpenSegment | None = None

    def copy(self, parts: Sequence[tuple[int, int]], nbytes: int, room: int, line: TensorLine | TemplateLine) -> None:
        """Copies ``parts``, ``nbytes`` in all, as the payload of ``line``, whose header entry takes ``room`` bytes;
        puts its place into the line's cell and queues the line. Neither when ``closed`` came while it waited."""
        cell = line[4] if isinstance(line, tuple) else line.cell
        batch, segment = self.current, self._segment
        if (  # most of a model's tensors: one piece, which fits into the current block as it is
            segment is not None
            and len(parts) == 1
            and batch is not None
            and batch.segment is segment
            and batch.block is not None
            and not segment.end % ALIGN
            and segment.room >= room
            and segment.end + nbytes <= self._segment_bytes
            and 0 < nbytes < self._block_bytes - batch.used
        ):
            start = batch.used
            batch.block.fill(start, parts[0][0], nbytes)
            cell.payload = Payload(segment.index, segment.end, nbytes)
            batch.used = start + nbytes
            batch.pieces.append((cell, start, start + nbytes))
            batch.lines.append(line)
            batch.brought.append(line)
            segment.room -= room
            segment.end += nbytes
            self.payload_bytes += nbytes
            self.waiting_lines += 1
            return
        if segment is None or segment.room < room or segment.end + nbytes > self._segment_bytes:
            segment = self._segment_for(nbytes, room)
        segment.room -= room
        gap = -segment.end % ALIGN
        if gap:
            self._advance(segment, gap)
        payload = Payload(segment.index, segment.end, nbytes)
        for address, left in parts:
            while left > 0:
                batch = self.current
                if batch is None or batch.block is None or batch.used == self._block_bytes:
                    batch = self._with_room(segment)
                if batch is None or batch.block is None:
                    return
                n = min(left, self._block_bytes - batch.used)
                batch.block.fill(batch.used, address, n)
                self._piece(batch, cell, n)
                segment.end += n
                address, left = address + n, left - n
        cell.payload = payload
        self.payload_bytes += nbytes
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
            segment.end + need > self._segment_bytes or segment.room < _ENTRY_MOST * len(sizes)
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
        if segment is None:
            segment = OpenSegment(0)
        elif segment.room < room or (segment.end and segment.end + nbytes > self._segment_bytes):
            batch = self.current = self.current or WriteBatch()
            batch.segment, batch.last = segment, True
            self.seal()
            segment = OpenSegment(segment.index + 1)
        self._segment = segment
        return segment

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

    @staticmethod
    def _piece(batch: WriteBatch, cell: StatsCell, n: int) -> None:
        start, stop = batch.used, batch.used + n
        if batch.pieces and batch.pieces[-1][0] is cell:
            start = batch.pieces.pop()[1]  # parts of one payload: one piece, so that no element is cut
        batch.pieces.append((cell, start, stop))
        batch.used = stop

    def append(self, line: Line) -> None:
        """Queues a line behind everything before it."""
        (self.current or self._batch()).lines.append(line)
        self.waiting_lines += 1

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
        self.to_disk.append(batch)
        self.to_journal.append(batch)
        self.sealed += 1
        self._cond.notify_all()
