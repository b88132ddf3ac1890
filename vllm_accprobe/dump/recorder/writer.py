"""Writes one rank's part of a dump while the model runs.

The problem: gigabytes per second leave a forward pass that must not wait, and a process that may be killed at any
moment must leave nothing behind that looks whole and is not. The idea: the model's thread only copies bytes into the
current block; two threads of ours do the rest, batch by batch (disk_threads.py): one keeps the disk busy, the other
takes statistics and writes the journal. Blocks are few: when all are under way, the model's thread waits for the disk.
What is not full is written when it is a fraction of a second old, so that a process killed between two requests loses
nothing. Whatever goes wrong ends the capture, never the model. Not here: what is captured (the capture room), how a
segment looks (segment.py), how a line is spelt (journal_writer.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.journal import STOP
from vllm_accprobe.dump.recorder.disk_threads import WriterThread
from vllm_accprobe.dump.recorder.journal_writer import (
    Event,
    JournalFile,
    Line,
    TemplateLine,
    TensorLine,
    WriteBatch,
    digest,
    encode,
    write_run_json,
)
from vllm_accprobe.dump.recorder.staging import BatchStaging
from vllm_accprobe.dump.schema import JOURNAL, SCHEMA, Payload, Stop, rank_dir
from vllm_accprobe.dump.segment import PAGE, entry_room
from vllm_accprobe.dump.stats import StatsCell, TensorMoments

__all__ = ["RankWriter", "StatsCell", "write_run_json"]

_PAYLOAD_AGE = 0.2
_LINE_AGE = 0.1
_LINE_GUESS = 512
"""Bytes of a journal line that is not encoded yet, for the budget."""
_CLOSE_TIMEOUT = 30.0


class RankWriter:
    """The dump of one global rank.

    root: the dump; created, 0700, where missing. start: what the journal's first line says besides ``schema`` and
    ``rank``. budget_bytes: limit of payload and journal bytes. block_bytes (a multiple of 4096) times ``blocks`` is
    the memory used, from the first payload on. segment_bytes: size at which a new segment is begun. on_stop: told
    once, from either thread, why nothing more is written; what it raises is ignored.

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
        self._staging = BatchStaging(self._cond, block_bytes, blocks, segment_bytes)
        self._drained = 0
        self._closing: tuple[str, Mapping[str, Any]] | None = None
        self._drain: WriterThread | None = None
        self._thread: threading.Thread | None = None
        directory = Path(root) / rank_dir(rank)
        try:
            for d in (Path(root), directory):
                if not d.is_dir():
                    d.mkdir(mode=0o700, parents=True, exist_ok=True)
            journal = JournalFile(directory)
            journal.append(encode({"event": "start", "schema": SCHEMA, "rank": rank, **start}))
        except FileExistsError:
            self._stop(f"{directory / JOURNAL} exists: a dump is never written over, choose a new directory")
        except OSError as e:
            self._stop(f"cannot create the dump in {directory}: {e.strerror or e}")
        else:
            self._drain = WriterThread(directory, journal, self._stop)
            name, work = f"accprobe-{rank}", (self._drain,)
            self._thread = threading.Thread(target=self._journal, args=work, name=name, daemon=True)
            self._thread.start()
            threading.Thread(target=self._write, args=work, name=f"{name}-disk", daemon=True).start()

    @property
    def bytes_written(self) -> int:
        """Payload and journal bytes that are on disk."""
        return 0 if self._drain is None else self._drain.bytes_written

    # ---- the model's thread

    def put(self, parts: Sequence[tuple[int, int]], event: Event, cell: StatsCell | None = None) -> Payload | None:
        """Copies the memory regions ``parts``, (address, bytes) each, one after the other, and queues ``event``, which
        stays as it is; it has ``tap``, ``role``, ``dtype`` and ``shape``.

        cell: says the rest of the line, see `told`: it has the hash, gets the payload's place here and, later,
        statistics from the copy. Without one, hash and statistics are the event's where it has such keys, else the
        bytes'. Returns where the payload will lie, or None when nothing is written any more. May wait for the disk.
        """
        nbytes = sum(n for _, n in parts)
        cell = cell or _cell_of(event, parts)
        if not nbytes and cell.dtype is not None:
            cell.add(TensorMoments())
        room = entry_room(event["tap"], event["role"], len(event["shape"]))
        self._bring(TensorLine(event, cell), parts, nbytes, room, event.get("step"))
        return cell.payload

    def tensor(self, line: TemplateLine, address: int) -> None:
        """Copies the ``nbytes`` bytes of the line's template from ``address`` and queues the line; its cell, which has
        their hash, gets their place, and later their statistics. May wait for the disk."""
        template = line[0]
        nbytes = template.nbytes
        self._bring(line, ((address, nbytes),), nbytes, template.room, line[1])

    def _bring(
        self,
        line: TensorLine | TemplateLine,
        parts: Sequence[tuple[int, int]],
        nbytes: int,
        room: int,
        step: int | None,
    ) -> None:
        with self._producer:
            with self._lock:
                if self.stopped or self._closing:
                    return
                if self._affordable(nbytes):
                    self._producing = threading.get_ident()
                    try:
                        self._staging.copy(parts, nbytes, room, line)
                    except BaseException as e:
                        self._interrupted(e, step)
                        raise
                    finally:
                        self._producing = 0
                    return
            self._spent(step)

    def line(self, line: Line) -> None:
        """Queues a line without a payload of its own. A callable is called by a thread of ours, in order, and gives the
        dict or None. With no payload waiting before it, the line is on disk a tenth of a second later."""
        with self._lock:
            if self.stopped or self._closing:
                return
            if self._affordable(0):
                self._staging.append(line)
                return
        if isinstance(line, tuple):
            self._spent(line[1])
        else:
            event = line.event if isinstance(line, TensorLine) else line
            self._spent(event.get("step") if isinstance(event, Mapping) else None)

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
        with self._cond:
            self._staging.seal()
            target = self._staging.sealed
            self._cond.wait_for(lambda: self._drained >= target or self.stopped is not None, timeout)
            return self._drained >= target and self.stopped is None

    def close(self, reason: str, summary: Mapping[str, Any]) -> None:
        """Writes what is waiting, finishes the segment and writes the ``end`` line: ``reason`` and ``summary`` (steps,
        tensors, skipped; the first two are counted from the journal where missing). Waits up to 30 s. A second call
        only waits. Called by a signal handler that interrupted ``put`` it cannot wait, and returns at once."""
        with self._cond:
            if self._closing is None:
                self._closing = (reason, summary)
            self._cond.notify_all()
        if self._thread is None or threading.get_ident() in (self._thread.ident, self._producing):
            return
        self._thread.join(_CLOSE_TIMEOUT)
        if self._thread.is_alive():
            self._stop(f"the disk did not take the rest within {_CLOSE_TIMEOUT:.0f} s")

    def _interrupted(self, error: BaseException, step: Any) -> None:
        """A signal's exception in the middle of a copy: what is half done is never continued."""
        reason = f"interrupted while a tensor was copied ({type(error).__name__})"
        self._staging.append(STOP.to_line(Stop(reason, step)))
        self._stop(reason)

    def _affordable(self, nbytes: int) -> bool:
        staging, drain = self._staging, self._drain
        journal = 0 if drain is None else drain.journal.size
        lines = _LINE_GUESS * (staging.waiting_lines + 2)
        return staging.payload_bytes + nbytes + journal + lines <= self._budget

    def _spent(self, step: Any) -> None:
        gb = self._budget / 1e9
        reason = f"budget of {f'{gb:.1f} GB' if gb >= 0.1 else f'{self._budget} bytes'} spent"
        with self._cond:
            if not self.stopped:
                self._staging.append(STOP.to_line(Stop(reason, step)))
        self._stop(reason)

    # ---- either thread

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
                pass  # it is told, not asked

    # ---- our threads

    def _write(self, drain: WriterThread) -> None:
        """The disk thread: keeps the disk busy, and gives up batches that have become old."""
        while (batch := self._next()) is not None:
            drain.write(batch)
            with self._cond:
                batch.written = True
                self._cond.notify_all()

    def _journal(self, drain: WriterThread) -> None:
        """The journal thread: digests a block while it is being written, then frees it and writes its lines."""
        queue = self._staging.to_journal
        try:
            while True:
                with self._cond:
                    self._cond.wait_for(lambda: queue or (self._closing and self._staging.current is None))
                    if not queue:
                        break
                    batch = queue.popleft()
                drain.digest(batch)
                with self._cond:
                    while not batch.written:
                        self._cond.wait()
                    if batch.block is not None:
                        self._staging.free.append(batch.block)
                    self._cond.notify_all()
                drain.lines(batch)
                with self._cond:
                    self._staging.waiting_lines -= len(batch.lines)
                    self._drained += 1
                    self._cond.notify_all()
            reason, summary = self._closing or ("", {})
            drain.end(reason, summary)
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


def _cell_of(event: Event, parts: Sequence[tuple[int, int]]) -> StatsCell:
    """The cell of an event that came without one."""
    hash = event.get("hash") or digest(parts)
    wanted = "stats" not in event and event["dtype"] in DTYPES
    return StatsCell(event.get("stats"), hash, event["dtype"] if wanted else None)
