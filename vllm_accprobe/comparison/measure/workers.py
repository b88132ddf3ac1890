"""Many units measured at once by threads, in order.

The problem: reading, hashing and arithmetic give up the interpreter's lock, but a unit may be a few kilobytes, and a
thread costs forty microseconds to be told about it; and whatever the dump's size, memory must not grow. The idea: units
are handed over in batches of some megabytes; each thread has its own buffers and keeps them; only so many batches are
under way that no thread waits; results come back in the order of the plan, so that nothing after depends on timing.
Not here: one unit (activations.py, params.py), remembering results (store.py), other processes (spread_out/).
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm_accprobe.comparison.measure.activations import Measurer
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.params import compare_params
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.plan.units import Indices
from vllm_accprobe.standards.limits import Standard

BATCH = 8 << 20
"""Bytes of both sides that a thread is given at a time, or more where one unit has more."""
_MOST = 64
CACHE = 256 << 20
"""Bytes of whole tensors that may be kept per side, by all threads or processes of a machine together."""


class UnitMeasurer:
    """Measures units of one plan in one thread: from a unit of the plan to plain values."""

    def __init__(self, dumps: tuple[Any, Any], indices: Indices, cache: int = CACHE, *, kl: bool = False):
        """cache: bytes of whole tensors that may be kept per side while a unit is measured. kl: see Measurer."""
        self.loaders = Loader(dumps[0], cache), Loader(dumps[1], cache // 4)
        self._measurer = Measurer(dumps, self.loaders, indices, kl)

    def measure(self, unit: Unit) -> MeasuredUnit:
        """Raises DumpError."""
        if unit.is_param:
            return MeasuredUnit.of(unit, compare_params(unit, *self.loaders, Standard()))
        return self._measurer.measure(unit)


def unit_bytes(unit: Unit) -> int:
    """Bytes that the unit's tensors of mine have, and as much for the golden's."""
    return 2 * sum(r.payload.nbytes for g in unit.mine for r in g.records if r.payload is not None)


def batches(units: Sequence[Unit], limit: int = BATCH) -> Iterator[list[Unit]]:
    """``units`` in order, in batches of at least ``limit`` bytes or 64 units."""
    batch: list[Unit] = []
    size = 0
    for unit in units:
        batch.append(unit)
        size += unit_bytes(unit)
        if size >= limit or len(batch) >= _MOST:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def measure_all(
    dumps: tuple[Any, Any], indices: Indices, units: Sequence[Unit], threads: int | None = None, *, kl: bool = False
) -> Iterator[list[MeasuredUnit]]:
    """The results of ``units``, in order, batch by batch. threads: as many as there are processors, at most 16."""
    n = min(threads or _processors(), 16)
    free: queue.SimpleQueue[UnitMeasurer] = queue.SimpleQueue()
    for _ in range(n):
        free.put(UnitMeasurer(dumps, indices, CACHE // n, kl=kl))

    def work(batch: list[Unit]) -> list[MeasuredUnit]:
        worker = free.get()
        try:
            return [worker.measure(unit) for unit in batch]
        finally:
            free.put(worker)

    yield from _in_order(work, batches(units), n)


def _in_order(work: Any, tasks: Iterable[Any], threads: int) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    pool = ThreadPoolExecutor(threads, "accprobe")
    try:
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
