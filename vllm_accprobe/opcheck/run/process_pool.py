"""The processes that check taps, and what becomes of a tap whose process dies.

The problem: a kernel may crash and take its process with it, and torch takes seconds to import. The idea: a `Team` of
worker processes (worker.py) that start together and take taps in the plan's order, each with one thread of torch; rows
come out in that order, however many processes there are; a process that dies leaves a row for the call that killed it
and is followed by another. `Alone` is the same without a process. Needs no torch itself. Not here: the csv (whole.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

from vllm_accprobe.children import ONE_THREAD, Child, how_it_ended
from vllm_accprobe.opcheck.run.result_row import ERROR, Checked, unchecked
from vllm_accprobe.opcheck.run.table import cells, from_cells
from vllm_accprobe.opcheck.run.worker import TOGETHER, Job, OpenJob, Tap

_AT_ONCE = 8
"""Processes that are started before it is known how many taps there are."""
_CRASHES = 20
"""Of one tap; then the rest of it is given up."""
_REUSED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""glibc's settings (mallopt(3)) of a worker: pieces of up to 32 MiB, its largest threshold, are used again instead of
being given back and cleared by the kernel for each float64 copy of an output; 256 MiB of them at most (chosen)."""
Cells = list[Any]
Told = tuple[Cells, Checked]
"""A row as the csv has it, and without its measures."""


class RunError(Exception):
    """One line: what cannot be done. Exit code 2."""


class Alone:
    """No process of its own: this one checks."""

    def __init__(self, job: Job):
        self.bench = OpenJob(job)
        self.taps, self.problems = self.bench.taps(), self.bench.problems

    def check(self, taps: Sequence[Tap]) -> Iterator[list[Told]]:
        for tap in taps:
            rows = self.bench.rows(tap, {}, lambda step, call: None)
            yield [(cells(row), replace(row, measures=None)) for row in rows]

    def close(self) -> None:
        pass


class Team:
    """Processes that take taps in the plan's order."""

    def __init__(self, job: Job, processes: int):
        self.job = job
        # all import torch at the same time
        started = [_WorkerProcess(_shared(job, w)) for w in range(min(max(1, processes), _AT_ONCE))]
        try:
            answer = started[0].hear()
            if answer is None:
                raise RunError(f"opcheck's process {how_it_ended(started[0].process)} while it opened the dump")
            if "error" in answer:
                raise RunError(answer["error"])
        except BaseException:
            for process in started:
                process.close()
            raise
        self.taps: list[Tap] = [(t[0], t[1], t[2]) for t in answer["taps"]]
        self.problems: list[str] = list(answer["problems"])
        useful = max(1, min(processes, len(self.taps)))
        self._workers: list[_WorkerProcess | None] = [*started[:useful], *(None,) * (useful - len(started))]
        for process in started[useful:]:
            process.close()
        self._fresh = set(range(1, len(started)))

    def close(self) -> None:
        for process in self._workers:
            if process is not None:
                process.close()

    def check(self, taps: Sequence[Tap]) -> Iterator[list[Told]]:
        """The rows of each tap, in their order; taps in work are held back until those before them are done."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        ready: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for k in range(len(taps)):
            waiting.put(k)
        threads = [threading.Thread(target=self._work, args=(w, taps, waiting, ready), daemon=True)
                   for w in range(len(self._workers))]  # fmt: skip
        for t in threads:
            t.start()
        held: dict[int, list[Cells]] = {}
        for k in range(len(taps)):
            while k not in held:
                number, rows = ready.get()
                if isinstance(rows, Exception):
                    raise rows
                held[number] = rows
            yield [(row, from_cells(row)) for row in held.pop(k)]

    def _work(self, w: int, taps: Sequence[Tap], waiting: Any, ready: Any) -> None:
        while True:
            try:
                k = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                ready.put((k, self._tap(w, taps[k])))
            except Exception as error:
                ready.put((k, error))
                return

    def _tap(self, w: int, tap: Tap) -> list[Cells]:
        crashed: list[tuple[int | None, int, str]] = []
        alone = False
        while True:
            process = self._workers[w]
            if process is None or w in self._fresh:
                self._fresh.discard(w)
                process = self._workers[w] = process or _WorkerProcess(_shared(self.job, w))
                answer = process.hear()
                if answer is None or "error" in answer:
                    raise RunError(f"opcheck's process cannot start: {(answer or {}).get('error', 'it died')}")
            rows, at, failed = process.check(tap, crashed, self.problems, alone)
            if failed == "":
                return rows
            if failed is not None:
                return [*rows, _error_row(tap, f"opcheck failed: {failed}")]
            why = f"the process {how_it_ended(process.process)} while it was checked"
            process.close()
            self._workers[w] = None
            if at == TOGETHER and not alone:
                alone = True
                continue
            if at is None or any((s, c) == at for s, c, _ in crashed) or len(crashed) >= _CRASHES:
                return [*rows, _error_row(tap, why)]
            crashed.append((*at, why))


def _shared(job: Job, worker: int) -> Job:
    """What a worker is told: of several devices each has its own, in turn."""
    return job.on(job.devices[worker % len(job.devices)]) if job.devices else job


def _error_row(tap: Tap, why: str) -> Cells:
    return cells(unchecked(tap[1], tap[2], tap[0], -1, 0, 0, why, status=ERROR))


class _WorkerProcess:
    """One worker and its two pipes."""

    def __init__(self, job: Job):
        # one thread each: sums come out the same however many processes there are, and small products are no slower
        self.process = Child(
            "vllm_accprobe.opcheck.run.worker", env={**_REUSED, **os.environ, **ONE_THREAD}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._in, self._out = _pipe(self.process.stdin), _pipe(self.process.stdout)
        self._say(job.to_json())

    def _say(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: hear() tells
            self._in.write(json.dumps(message) + "\n")
            self._in.flush()

    def hear(self) -> dict[str, Any] | None:
        """Its next message; None when it is gone."""
        line = self._out.readline()
        if not line.endswith("\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def check(
        self, tap: Tap, crashed: Sequence[tuple[int | None, int, str]], problems: list[str], alone: bool
    ) -> tuple[list[Cells], tuple[int | None, int] | None, str | None]:
        """(rows, the call that had begun, "" where the tap is done, a sentence where it failed, None where the process
        died)."""
        self._say({"tap": tap, "crashed": crashed, "alone": alone})
        rows: list[Cells] = []
        at: tuple[int | None, int] | None = None
        while True:
            message = self.hear()
            if message is None:
                return rows, at, None
            if "row" in message:
                rows.append(message["row"])
            elif "begin" in message:
                at = message["begin"][0], message["begin"][1]
            elif "failed" in message:
                return rows, at, str(message["failed"])
            else:
                problems += [p for p in message["problems"] if p not in problems]  # each process finds them
                return rows, at, ""

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
