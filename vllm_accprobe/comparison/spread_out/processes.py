"""Units measured by processes of this machine: ``--jobs N``.

The problem: threads share one interpreter, and a file that kills the process which reads it (a bad disk, no memory)
takes the command along. The idea: N children (children.py), each with its own files, buffers and one thread, are given
a batch at a time; one that is killed is replaced, and its batch done again. A thread for each child writes to it and
waits, so that none waits for another; everything else is in_order.py's, as on a cluster.
Not here: what a child does (worker.py).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, BinaryIO, cast

from vllm_accprobe.align.tokens import SideRows
from vllm_accprobe.children import ONE_THREAD, Child, how_it_ended
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.workers import CACHE, batches
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.spread_out.in_order import Died, in_order
from vllm_accprobe.comparison.spread_out.worker import Briefing, heard, receive, send, side_of
from vllm_accprobe.comparison.store import wire

BATCH = 32 << 20
"""Bytes of both sides per task: telling a child of one costs some milliseconds, and so much is done again when it
dies."""
_AHEAD = 2


def measure_by(
    processes: int,
    dumps: tuple[Any, Any],
    sides: tuple[SideRows, SideRows],
    units: Sequence[Unit],
    limit: int = BATCH,
    *,
    kl: bool = False,
) -> Iterator[list[MeasuredUnit]]:
    """As workers.measure_all. processes: at least 1. Raises CompareError and DumpError."""
    tasks = list(batches(units, limit))
    n = max(min(processes, len(tasks)), 1)
    golden, mine = dumps
    told = Briefing((side_of(golden), side_of(mine)), sides, kl, CACHE // n)
    known: wire.Known = {}
    with contextlib.closing(_Processes(n, pickle.dumps(told))) as crew:
        for answer in in_order(crew, tasks):
            yield heard(answer, dumps, known)


class _Processes:
    """A Crew on this machine. told: the pickled Briefing."""

    who = "processes of --jobs"

    def __init__(self, n: int, told: bytes):
        self._told, self._n = told, n
        self._free: queue.SimpleQueue[_Measuring] = queue.SimpleQueue()
        self._all = [_Measuring(told) for _ in range(n)]  # they import at the same time
        for one in self._all:
            self._free.put(one)
        self._threads = ThreadPoolExecutor(n, "accprobe-jobs")
        self._running: dict[Future[bytes | Died], int] = {}
        self._closed = False

    @property
    def ahead(self) -> int:
        return 4 * _AHEAD * self._n

    def start(self, number: int, task: list[Unit]) -> bool:
        if len(self._running) >= _AHEAD * self._n:
            return False
        self._running[self._threads.submit(self._do, task)] = number
        return True

    def ended(self) -> tuple[int, bytes | Died]:
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        first = min(done, key=self._running.__getitem__)
        return self._running.pop(first), first.result()

    def _do(self, task: list[Unit]) -> bytes | Died:
        process = self._free.get()
        try:
            answer = process.measure(task)
            if isinstance(answer, Died) and not self._closed:
                process.start()
            return answer
        finally:
            self._free.put(process)

    def close(self) -> None:
        """Ends them, whatever they are doing."""
        self._closed = True
        for one in self._all:
            one.kill()
        self._threads.shutdown(cancel_futures=True)
        for one in self._all:
            one.close()


class _Measuring:
    """One child, and its pipes."""

    def __init__(self, told: bytes):
        self._told = told
        self.start()

    def start(self) -> None:
        """Anew, where there was one."""
        self.close()
        # one thread each: they are as many as the user wants
        self._child = Child(
            "vllm_accprobe.comparison.spread_out.worker", env={**os.environ, **ONE_THREAD}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._fresh = True

    def measure(self, task: list[Unit]) -> bytes | Died:
        to, back = _binary(self._child.stdin), _binary(self._child.stdout)
        with contextlib.suppress(OSError):  # it died: there will be no answer
            if self._fresh:
                self._fresh = False
                send(to, self._told)
            send(to, pickle.dumps(task))
        answer = receive(back)
        return Died(how_it_ended(self._child)) if answer is None else answer

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        child: Child | None = getattr(self, "_child", None)
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _binary(pipe: Any) -> BinaryIO:
    """Of Popen's text."""
    return cast(BinaryIO, pipe.buffer)
