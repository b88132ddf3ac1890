"""Every tap of two dumps checked, by two processes.

The problem: a replay of a small pair takes no longer than importing torch, so that a second process pays only if it
need not import it, too. The idea: the process that has imported torch and opened both dumps forks; both take groups of
taps from one pipe until it is empty, whichever is free, and the second one's rows come back as JSON. It forks only on
Linux, where there is a second processor, and while it has no threads that a fork would lose; elsewhere it does all
alone. What a second process that died has not told, the first one checks itself. The rows are the same either way, in
the dumps' order. Not here: the check (replay.py), what two dumps' rows prove (prove.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_accprobe.children import end_with
from vllm_accprobe.opcheck.calls.batches import Outcome, evaluated
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.floors.chance import RATE
from vllm_accprobe.opcheck.floors.peers import Pooled
from vllm_accprobe.opcheck.floors.pools import Pools
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run.replay import Options, check_call
from vllm_accprobe.opcheck.run.result_row import COLUMNS, Checked

_GROUPS = 4096
"""At most: four bytes each, which a pipe must hold (64 KiB)."""


class Task(NamedTuple):
    """A tap of one dump. side: 0 for golden, 1 for mine."""

    side: int
    rank: int
    tap: str


class ReplaySide(NamedTuple):
    """Of a dump, or of one of its taps: the rows, and what its outputs come to over all calls."""

    rows: list[Checked]
    pooled: list[Pooled]


def check_both(
    sides: Sequence[Calls], references: References, ops: Sequence[str], told: Callable[[int, int], object],
    rate: float = RATE,
) -> list[ReplaySide]:  # fmt: skip
    """What each dump gives, in its order. ops: globs, all if empty; told: how many taps are done of how many; rate:
    false alarms of each dump's replay."""
    options = [Options(measured=False, budget=c.budget(rate)) for c in sides]
    tasks = [Task(n, rank, tap) for n, c in enumerate(sides) for rank, tap, _ in c.taps(ops)]
    told(0, len(tasks))
    size = -(-len(tasks) // _GROUPS)
    groups = [range(k, min(k + size, len(tasks))) for k in range(0, len(tasks), size or 1)]

    def rows(group: Sequence[int]) -> list[ReplaySide]:
        return [check_task(sides[t.side], t, references, options[t.side]) for t in map(tasks.__getitem__, group)]

    found: dict[int, list[ReplaySide]] = {}
    with _shared(len(groups)) as queue:
        other = _second(queue, lambda k: rows(groups[k])) if len(groups) > 1 and may_fork() else None
        for k, left in queue.take():
            found[k] = rows(groups[k])
            told(len(tasks) - min(len(tasks), left * size), len(tasks))
        if other is not None:
            found |= other()
    for k in range(len(groups)):  # a second process that died
        if k not in found:
            found[k] = rows(groups[k])
    told(len(tasks), len(tasks))
    out = [ReplaySide([], []) for _ in sides]
    for k, group in enumerate(groups):
        for n, more in zip(group, found[k], strict=True):
            out[tasks[n].side].rows.extend(more.rows)
            out[tasks[n].side].pooled.extend(more.pooled)
    return out


def check_task(calls: Calls, task: Task, references: References, options: Options) -> ReplaySide:
    """The rows of one tap."""
    pools = Pools()
    found = ReplaySide([], [])
    for captured, expected in evaluated(calls.of(task.rank, task.tap), references):
        found.rows.extend(check_call(calls.dump, captured, partial(_known, expected), options, pools))
    found.rows.extend(pools.rows(options.budget))
    found.pooled.extend(pools.pooled(options.budget))
    return found


def _known(expected: Outcome, captured: Captured) -> Outcome:
    return expected


def may_fork() -> bool:
    """Whether a fork is safe and worth it: on Linux, with two processors, and no thread but Python's own and the one
    that waits for the parent's end, which the second process starts for itself."""
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2 or torch.get_num_threads() > 1:
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


def _second(queue: _Queue, rows: Callable[[int], list[ReplaySide]]) -> Callable[[], dict[int, list[ReplaySide]]]:
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
            with os.fdopen(writing, "w", encoding="utf-8") as channel:
                done = [(k, [_told(side) for side in rows(k)]) for k, _ in queue.take()]
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
                        found[k] = [_heard(*tap) for tap in taps]
        finally:
            os.close(alive)
            os.waitpid(pid, 0)
        return found

    return wait


_NAMES = tuple(name for name in COLUMNS if name != "measures")


def _told(side: ReplaySide) -> list[list[object]]:
    return [[_plain(row) for row in side.rows], [asdict(p) for p in side.pooled]]


def _heard(rows: list[list[object]], pooled: list[dict[str, Any]]) -> ReplaySide:
    return ReplaySide([_row(row) for row in rows], [Pooled(**p) for p in pooled])


def _plain(row: Checked) -> list[object]:
    return [getattr(row, name) for name in _NAMES]


def _row(values: Sequence[object]) -> Checked:
    given = dict(zip(_NAMES, values, strict=True))
    return Checked(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})  # type: ignore[arg-type]
