"""The replay of two dumps: their taps are checked by several processes.

The problem: a replay of a small pair takes no longer than importing torch, so that another process pays only if it
need not import it, too; and a large pair has more processors and less memory than a process for each. The idea: the
process that has imported torch and opened both dumps forks; all take groups of taps from one pipe until it is empty,
whichever is free, and the others' rows come back as JSON. There are PROCESSES at most, whose blocks fit into 2 GB
together; further processors are threads of these. It forks only on Linux, where there is a second processor, and while
it has no threads that a fork would lose; elsewhere it does all alone. What another process that died has not reported,
the first one checks itself. The rows are the same either way, in the order of the tasks. Calls that are too large for a
block are checked in parts, and are one row again. When the time is over, each ends with the call that it is at.
Not here: which calls (budget.py), the check (check_calls.py), what two dumps' rows prove (make_proof.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch

from vllm_accprobe.children import end_with
from vllm_accprobe.judge.statistic import RATE
from vllm_accprobe.opcheck.calls.batches import Outcome, evaluated
from vllm_accprobe.opcheck.calls.records import Calls, Captured, Chosen, Place, Runs
from vllm_accprobe.opcheck.floors.pooled import Pooled, Pools
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run.check_calls import Options, ToCheck, check_calls
from vllm_accprobe.opcheck.run.judged_row import merged
from vllm_accprobe.opcheck.run.result_row import CheckResult

_GROUPS = 4096
"""At most: four bytes each, which a pipe must hold (64 KiB)."""
LEFT = "left out of the replay"
"""Why a row was not checked that a budget left out."""


PROCESSES = 4
"""Chosen: each holds some 300 MB of blocks; with what the dumps' journals take, these stay below 2 GB."""

MOST = 1 << 22
"""Chosen: elements of a part of a call: 32 MiB of float64, of which a reference holds some eight."""


class Task(NamedTuple):
    """A tap of one dump. side: 0 for golden, 1 for mine; places: which calls and which rows of them, None for all;
    drawn: the calls that were drawn whatever their errors are, of which statistics are made, None for all."""

    side: int
    rank: int
    tap: str
    places: Mapping[Place, Runs] | None = None
    drawn: frozenset[Place] | None = None


class ReplaySide(NamedTuple):
    """Of a dump, or of one of its taps: the rows, and what its outputs come to over all calls."""

    rows: list[CheckResult]
    pooled: list[Pooled]


def check_both(
    sides: Sequence[Calls], references: References, ops: Sequence[str], progress: Callable[[int, int], object],
    rate: float = RATE, tasks: Sequence[Task] | None = None, ends: Callable[[], bool] = lambda: False,
) -> list[ReplaySide]:  # fmt: skip
    """What each dump gives, in the order of the tasks. ops: globs, all if empty; progress: gets the
    numbers of taps done and in all; rate: false alarms of each dump's replay; tasks: what is done, all of the dumps by
    default; ends: whether the time is over."""
    options = [Options(measured=False, budget=c.budget(rate)) for c in sides]
    if tasks is None:
        tasks = [Task(n, rank, tap) for n, c in enumerate(sides) for rank, tap, _ in c.taps(ops)]
    progress(0, len(tasks))
    size = -(-len(tasks) // _GROUPS)
    groups = [range(k, min(k + size, len(tasks))) for k in range(0, len(tasks), size or 1)]

    def rows(group: Sequence[int]) -> list[ReplaySide]:
        return [check_task(sides[t.side], t, references, options[t.side], ends) for t in map(tasks.__getitem__, group)]

    found: dict[int, list[ReplaySide]] = {}
    with contextlib.ExitStack() as open_:
        queue = open_.enter_context(_shared(len(groups)))
        for calls in sides:
            open_.enter_context(calls.reads_kept())
        more = min(len(groups), PROCESSES, processors()) - 1 if may_fork() else 0
        threads = processors() // (more + 1) if more == PROCESSES - 1 else 1
        others = [_other(queue, lambda k: rows(groups[k]), threads) for _ in range(more)]
        if threads > 1:
            torch.set_num_threads(threads)
        for k, left in queue.take():
            found[k] = rows(groups[k])
            progress(len(tasks) - min(len(tasks), left * size), len(tasks))
        for other in others:
            found |= other()
    for k in range(len(groups)):  # another process that died
        if k not in found:
            found[k] = rows(groups[k])
    progress(len(tasks), len(tasks))
    out = [ReplaySide([], []) for _ in sides]
    for k, group in enumerate(groups):
        for n, side in zip(group, found[k], strict=True):
            out[tasks[n].side].rows.extend(side.rows)
            out[tasks[n].side].pooled.extend(side.pooled)
    return out


def check_task(
    calls: Calls, task: Task, references: References, options: Options, ends: Callable[[], bool] = lambda: False
) -> ReplaySide:
    """The rows of one tap."""
    pools = Pools()
    found = ReplaySide([], [])
    if ends():
        return found
    places = calls.places(task.rank, task.tap) if task.places is None else task.places
    parts: list[tuple[Captured, list[CheckResult]]] = []
    chosen = Chosen(places, references.by_rows, MOST)

    def to_check() -> Iterator[tuple[Captured, list[ToCheck]]]:
        for captured, expected in evaluated(calls.of(task.rank, task.tap, chosen=chosen), references):
            pooled = pools if task.drawn is None or (captured.step, captured.call) in task.drawn else None
            own = options.each_of(_parts_of(captured))
            yield captured, [ToCheck(captured, partial(_known, expected), own, pooled)]
            if ends():
                return

    for captured, rows in check_calls(calls.dump, to_check()):
        if parts and (captured.whole is None or (captured.step, captured.call) != (parts[0][0].step, parts[0][0].call)):
            found.rows.extend(_whole(parts))
            parts = []
        if captured.whole is None:
            found.rows.extend(rows)
        else:
            parts.append((captured, rows))
    found.rows.extend(_whole(parts))
    found.rows.extend(pools.rows(options.budget))
    found.pooled.extend(pools.pooled(options.budget))
    return found


def _parts_of(captured: Captured) -> int:
    """How many parts of its size a call has."""
    rows = next((r.shape[0] for r in captured.records.values()), 0)
    return 1 if captured.whole is None or not rows else -(-captured.whole // rows)


def _whole(parts: Sequence[tuple[Captured, list[CheckResult]]]) -> Iterator[CheckResult]:
    """The rows of a call that was checked in parts, output by output."""
    by_role: dict[str, list[CheckResult]] = {}
    runs: list[list[int]] = []
    for captured, rows in parts:
        n = next(iter(captured.records.values())).shape[0]
        if runs and runs[-1][1] == captured.first:
            runs[-1][1] += n
        else:
            runs.append([captured.first, captured.first + n])
        for row in rows:
            by_role.setdefault(row.role, []).append(row)
    for rows in by_role.values():
        whole = parts[0][0].whole or 0
        row = merged(rows, (whole, *rows[0].shape[1:]) if rows[0].shape else ())
        covered = sum(b - a for a, b in runs)
        if covered < whole:
            row = replace(row, rows=whole, unchecked_because=row.unchecked_because or LEFT,
                          replayed=tuple((a, b) for a, b in runs))  # fmt: skip
        yield row


def _known(expected: Outcome, captured: Captured) -> Outcome:
    return expected


def processors() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def may_fork() -> bool:
    """Whether a fork is safe and worth it: on Linux, with two processors, and no thread but Python's own and the one
    that waits for the parent's end, which the second process starts for itself."""
    if sys.platform != "linux" or processors() < 2 or torch.get_num_threads() > 1:
        return False
    try:
        return len(os.listdir("/proc/self/task")) <= 2
    except OSError:
        return False


class _Queue:
    """Numbers in a pipe, from which any process takes the next one."""

    def __init__(self, reading: int):
        self._reading = reading

    def take(self) -> Iterator[tuple[int, int]]:
        """(number, how many are left) until none is."""
        import fcntl
        import struct
        import termios

        while True:
            data = os.read(self._reading, 4)
            if len(data) < 4:
                return
            (left,) = struct.unpack("i", fcntl.ioctl(self._reading, termios.FIONREAD, b"\0" * 4))
            yield int.from_bytes(data, "little"), left // 4


@contextlib.contextmanager
def _shared(n: int) -> Iterator[_Queue]:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"".join(k.to_bytes(4, "little") for k in range(n)))
    finally:
        os.close(writing)
    try:
        yield _Queue(reading)
    finally:
        os.close(reading)


def _other(
    queue: _Queue, rows: Callable[[int], list[ReplaySide]], threads: int
) -> Callable[[], dict[int, list[ReplaySide]]]:
    """Forks; what it gives waits for the other process and gives what that one checked."""
    ends, alive = os.pipe()  # the end of this process is the end of the other
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(alive)
            os.close(reading)
            end_with(ends)
            if threads > 1:
                torch.set_num_threads(threads)
            with os.fdopen(writing, "w", encoding="utf-8") as channel:
                done = [(k, [([row.to_plain() for row in side.rows], [asdict(p) for p in side.pooled])
                             for side in rows(k)]) for k, _ in queue.take()]  # fmt: skip
                for item in done:  # at the end: until then nobody reads
                    channel.write(json.dumps(item) + "\n")
            code = 0
        finally:
            os._exit(code)
    os.close(ends)
    os.close(writing)

    def wait() -> dict[int, list[ReplaySide]]:
        found = {}
        try:
            with os.fdopen(reading, encoding="utf-8") as channel:
                for line in channel:
                    if line.endswith("\n"):
                        k, taps = json.loads(line)
                        found[k] = [ReplaySide([CheckResult.of_plain(r) for r in side], [Pooled(**p) for p in pooled])
                                    for side, pooled in taps]  # fmt: skip
        finally:
            os.close(alive)
            os.waitpid(pid, 0)
        return found

    return wait
