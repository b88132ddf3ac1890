"""Statistics of tensors that another tool stored without any.

The problem: most tools write values and no statistics, and a list of tensors without a number says nothing. The idea:
what has values and no statistics is read once, some tensors at a time, and the journal's own sums are taken of it; the
dump is not written into. Not here: the sums (dump/stats.py), who shows them (cli/summary.py).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import Record, Stats
from vllm_accprobe.dump.stats import tensor_stats

_AT_ONCE = 4
"""Tensors in memory at a time, at most (chosen: reading and summing overlap; a few of the largest must fit)."""


def missing(record: Record) -> bool:
    """Whether its values are there and its statistics are not, or not all: msprobe takes no mean of integers."""
    s = record.stats
    return record.payload is not None and (s is None or None in (s.min, s.max, s.mean, s.l2))


def computed(
    dump: Dump, records: Sequence[Record], done: Callable[[], object] = lambda: None
) -> tuple[list[Record], list[str]]:
    """``records``, those that lack statistics with computed ones, and a sentence where some could not be read.

    done: called after each tensor that was read. At most four tensors are in memory at a time."""
    found = list(records)
    failed: list[str] = []
    waiting: deque[tuple[int, Future[Stats]]] = deque()

    def take() -> None:
        index, future = waiting.popleft()
        try:
            found[index] = replace(found[index], stats=_filled(found[index].stats, future.result()))
        except (DumpError, OSError, ValueError) as e:
            failed.append(str(e))
        done()

    workers = min(_AT_ONCE, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        for index, record in enumerate(found):
            if missing(record):
                waiting.append((index, pool.submit(_of, dump, record)))
            if len(waiting) >= workers:
                take()
        while waiting:
            take()
    return found, [f"no statistics of {len(failed):,} tensors: {failed[0]}"] if failed else []


def _filled(theirs: Stats | None, ours: Stats) -> Stats:
    """What the tool has taken, and where it took none, what was computed."""
    if theirs is None:
        return ours
    return replace(theirs, **{k: getattr(ours, k) for k in ("min", "max", "mean", "l2") if getattr(theirs, k) is None})


def _of(dump: Dump, record: Record) -> Stats:
    return tensor_stats(dump.read(record), record.dtype)
