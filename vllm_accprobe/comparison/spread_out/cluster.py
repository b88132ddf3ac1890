"""Units measured on the machines of a Ray cluster.

The problem: a dump of many machines is large, and each machine has its own ranks' files on its own disk. The idea: each
machine is asked once which files of both dumps it can read; a batch of units goes to a worker on a machine that holds
all that it needs, and only metrics come back. A worker that dies is replaced on its machine.
The plan is made where the command runs, from all journals: they must be readable there.
Not here: the order, and what is done again (in_order.py), what a worker does (worker.py), the plan (plan/).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.align.tokens import SideRows
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.workers import batches
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.comparison.spread_out.in_order import Died, in_order
from vllm_accprobe.comparison.spread_out.worker import Briefing, Station, heard, side_of
from vllm_accprobe.comparison.store import wire
from vllm_accprobe.dump.schema import Record

BATCH = 64 << 20
"""Bytes per task: sending one costs some milliseconds."""
_AHEAD = 2
File = tuple[int, int, int]
"""(side, rank, segment)."""


def measure_on(
    address: str,
    dumps: tuple[Any, Any],
    sides: tuple[SideRows, SideRows],
    units: Sequence[Unit],
    limit: int = BATCH,
    *,
    kl: bool = False,
) -> Iterator[list[MeasuredUnit]]:
    """As workers.measure_all. address: as for ray.init, ``auto`` or ``host:port``. Raises CompareError, DumpError."""
    ray = _ray()
    golden, mine = dumps
    told = Briefing((side_of(golden), side_of(mine)), sides, kl)
    with _connected(ray, address):
        known: wire.Known = {}
        tasks = [_Task(b, {f for u in b for f in _files(u)}) for b in batches(units, limit)]
        for answer in in_order(_Machines(ray, told, tasks), tasks):
            yield heard(answer, dumps, known)


@dataclass
class _Worker:
    machine: str
    actor: Any
    busy: int = 0


@dataclass
class _Task:
    units: list[Unit]
    files: set[File]


class _Machines:
    """A Crew on a cluster. tasks: all that there will be."""

    who = "workers of the Ray cluster"

    def __init__(self, ray: Any, told: Briefing, tasks: Sequence[_Task]):
        self._ray = ray
        self._near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        machines = {n["NodeID"]: int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]}
        machines = {m: n for m, n in machines.items() if n > 0}
        if not machines:
            raise CompareError("the Ray cluster has no machine with processors")
        self._paths = {(s, *key): str(x.path) for s, side in enumerate(told.places) for key, x in side.data.items()}
        probe = ray.remote(_readable)
        asked = [probe.options(num_cpus=0, scheduling_strategy=self._at(m)).remote(self._paths) for m in machines]
        self.holds = dict(zip(machines, map(set, ray.get(asked)), strict=True))
        self._told = ray.put(told)
        self._workers = [self._hire(m) for m, n in machines.items() for _ in range(n) if self.holds[m]]
        self._running: dict[Any, tuple[int, _Task, _Worker]] = {}
        for task in tasks:
            self._check(task)

    @property
    def ahead(self) -> int:
        return 4 * _AHEAD * max(len(self._workers), 1)

    def start(self, number: int, task: _Task) -> bool:
        able = [w for w in self._workers if w.busy < _AHEAD and task.files <= self.holds[w.machine]]
        if not able:
            return False
        worker = min(able, key=lambda w: w.busy)
        worker.busy += 1
        self._running[worker.actor.answer.remote(task.units)] = number, task, worker
        return True

    def ended(self) -> tuple[int, bytes | Died]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1)
        number, task, worker = self._running.pop(ready[0])
        worker.busy -= 1
        try:
            answer: bytes = self._ray.get(ready[0])
        except self._ray.exceptions.RayTaskError as e:
            raise CompareError(f"a worker of the Ray cluster failed: {_line(e, -1)}") from None
        except self._ray.exceptions.RayError as e:
            self._replace(worker, task)
            return number, Died(f"so: {_line(e, 0)}")
        return number, answer

    def _at(self, machine: str) -> Any:
        return self._near(machine, soft=False)

    def _hire(self, machine: str) -> _Worker:
        actor = self._ray.remote(_Measurer).options(num_cpus=1, scheduling_strategy=self._at(machine))
        return _Worker(machine, actor.remote(self._told))

    def _replace(self, worker: _Worker, task: _Task) -> None:
        """After a death: another worker on the same machine, unless the machine itself is gone."""
        if worker in self._workers:
            self._workers.remove(worker)
            if any(n["NodeID"] == worker.machine and n["Alive"] for n in self._ray.nodes()):
                self._workers.append(self._hire(worker.machine))
        self._check(task)

    def _check(self, task: _Task) -> None:
        if not any(task.files <= self.holds[w.machine] for w in self._workers):
            raise CompareError(self._nowhere(task))

    def _nowhere(self, task: _Task) -> str:
        held = [self.holds[w.machine] for w in self._workers]
        most: set[File] = max(held, key=lambda h: len(task.files & h), default=set())
        lacking = [self._paths.get(f, str(f)) for f in sorted(task.files - most)]
        tap, role, _ = task.units[0].key
        return (f"no machine of the Ray cluster can read all files of {tap}/{role} (at best all but "
                f"{', '.join(lacking[:2])}): put both dumps where one machine sees them")  # fmt: skip


class _Measurer(Station):
    """The actor: a process on some machine."""


def _readable(paths: dict[File, str]) -> list[File]:
    return [key for key, path in paths.items() if os.access(path, os.R_OK)]


def _files(unit: Unit) -> set[File]:
    found: set[File] = set()
    for side, groups in enumerate((unit.golden, unit.mine)):
        routers = unit.router[side] if unit.router is not None else []
        for group in (*groups, *routers):
            for record in group.records:
                _add_files(found, side, record)
    return found


def _add_files(found: set[File], side: int, record: Record) -> None:
    parts = getattr(record, "parts", ())  # of a record that is made of others (align/derived.py)
    for part in parts:
        _add_files(found, side, part)
    if not parts and record.payload is not None:
        found.add((side, record.rank, record.payload.seg))


def _line(error: Exception, which: int) -> str:
    """Of a message of many lines: the first says what became of a worker, the last what its code raised."""
    lines = str(error).strip().splitlines()
    return lines[which].strip()[:200] if lines else type(error).__name__


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError:
        raise CompareError("--ray needs Ray: pip install 'vllm-accprobe[ray]'") from None
    return ray


def _knock(address: str) -> None:
    """Ray waits for minutes before it says that nobody is there."""
    host, _, port = address.rpartition(":")
    if "://" not in address and host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextmanager
def _away() -> Iterator[None]:
    """For a moment, another current directory. Ray's workers look for modules where the driver is when it connects: a
    dump may come from a stranger, with a numpy.py in it. Beside this package they find what the driver has found."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(Path(__file__).resolve().parents[3])
        yield
    finally:
        os.fchdir(here)
        os.close(here)


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """A connection for as long as it takes, unless there is one."""
    own = not ray.is_initialized()
    if own:
        try:
            _knock(address)
            with _away():
                ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as e:
            raise CompareError(f"no Ray cluster at {address!r}: {_line(e, -1)}") from None
    try:
        yield
    finally:
        if own:
            ray.shutdown()
