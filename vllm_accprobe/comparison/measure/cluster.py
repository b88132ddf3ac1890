"""Units measured on the machines of a Ray cluster.

The problem: a dump of many machines is large, and each machine has its own ranks' files on its own disk. The idea: each
machine is asked once which files of both dumps it can read; a batch of units goes to a worker on a machine that holds
all that it needs, and only metrics come back. A worker that dies is replaced and its batch measured again; results are
taken in the order of the plan, so that the outcome does not depend on where and when anything ran.
The plan is made where the command runs, from all journals: they must be readable there. Nothing from a dump is ever
unpickled; what Ray sends between its own processes is values of the plan and frames of bytes (wire.py).
Not here: one unit (workers.py), the plan (units.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_accprobe.align.tokens import SideRows
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.workers import UnitMeasurer, batches
from vllm_accprobe.comparison.plan.row_index import Indices
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.comparison.store import wire
from vllm_accprobe.dump.reader import reopen
from vllm_accprobe.dump.schema import Record

BATCH = 64 << 20
"""Bytes per task: sending one costs some milliseconds."""
RETRIES = 3
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
    """As workers.measure_all. address: as for ray.init, ``auto`` or ``host:port``. Raises CompareError."""
    ray = _ray()
    with _connected(ray, address):
        known: wire.Known = {}
        for data in _Cluster(ray, dumps, sides, kl).run(list(batches(units, limit))):
            ((text, payload, _),) = wire.frames(data)
            yield wire.unpack(text, payload, known)


@dataclass
class _Worker:
    machine: str
    actor: Any
    busy: int = 0


@dataclass
class _Task:
    units: list[Unit]
    files: set[File]
    tries: int = 0
    result: bytes | None = field(default=None, repr=False)


class _Cluster:
    def __init__(self, ray: Any, dumps: tuple[Any, Any], sides: tuple[SideRows, SideRows], kl: bool):
        self._ray, self._sides = ray, sides
        self._near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        machines = {n["NodeID"]: int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]}
        machines = {m: n for m, n in machines.items() if n > 0}
        if not machines:
            raise CompareError("the Ray cluster has no machine with processors")
        self._paths = {(side, *key): str(x.path) for side, d in enumerate(dumps) for key, x in d.data.items()}
        probe = ray.remote(_readable)
        asked = [probe.options(num_cpus=0, scheduling_strategy=self._at(m)).remote(self._paths) for m in machines]
        self.holds = dict(zip(machines, map(set, ray.get(asked)), strict=True))
        self._common = ray.put(([(d.path, d.data) for d in dumps], sides, kl))
        self._workers = [self._hire(m) for m, n in machines.items() for _ in range(n) if self.holds[m]]

    def _at(self, machine: str) -> Any:
        return self._near(machine, soft=False)

    def _hire(self, machine: str) -> _Worker:
        actor = self._ray.remote(_Measurer).options(num_cpus=1, scheduling_strategy=self._at(machine))
        return _Worker(machine, actor.remote(self._common))

    def run(self, batches: list[list[Unit]]) -> Iterator[bytes]:
        tasks = [_Task(b, {f for u in b for f in _files(u)}) for b in batches]
        for task in tasks:
            if not any(task.files <= self.holds[w.machine] for w in self._workers):
                raise CompareError(self._nowhere(task))
        waiting, given = list(range(len(tasks))), 0
        running: dict[Any, tuple[int, _Worker]] = {}
        while given < len(tasks):
            self._assign(tasks, waiting, running)
            ready, _ = self._ray.wait(list(running), num_returns=1)
            i, worker = running.pop(ready[0])
            worker.busy -= 1
            try:
                tasks[i].result = self._ray.get(ready[0])
            except self._ray.exceptions.RayTaskError as e:
                raise CompareError(f"a worker of the Ray cluster failed: {_last_line(e)}") from None
            except self._ray.exceptions.RayError as e:
                self._replace(worker, tasks[i], e)
                waiting.insert(0, i)
            while given < len(tasks) and (done := tasks[given].result) is not None:
                tasks[given].result = None
                given += 1
                yield done

    def _assign(self, tasks: list[_Task], waiting: list[int], running: dict[Any, tuple[int, _Worker]]) -> None:
        for i in list(waiting):
            able = [w for w in self._workers if w.busy < _AHEAD and tasks[i].files <= self.holds[w.machine]]
            if not able:
                if all(w.busy >= _AHEAD for w in self._workers):
                    return
                continue
            worker = min(able, key=lambda w: w.busy)
            worker.busy += 1
            running[worker.actor.measure.remote(tasks[i].units)] = i, worker
            waiting.remove(i)

    def _replace(self, worker: _Worker, task: _Task, error: Exception) -> None:
        """After a death: another worker on the same machine, unless the machine itself is gone."""
        task.tries += 1
        if task.tries > RETRIES:
            raise CompareError(f"workers of the Ray cluster died {task.tries} times over one task: {_last_line(error)}")
        if worker in self._workers:
            self._workers.remove(worker)
            if any(n["NodeID"] == worker.machine and n["Alive"] for n in self._ray.nodes()):
                self._workers.append(self._hire(worker.machine))
        if not any(task.files <= self.holds[w.machine] for w in self._workers):
            raise CompareError(self._nowhere(task))

    def _nowhere(self, task: _Task) -> str:
        held = [self.holds[w.machine] for w in self._workers]
        most: set[File] = max(held, key=lambda h: len(task.files & h), default=set())
        lacking = [self._paths.get(f, str(f)) for f in sorted(task.files - most)]
        tap, role, _ = task.units[0].key
        return (f"no machine of the Ray cluster can read all files of {tap}/{role} (at best all but "
                f"{', '.join(lacking[:2])}): put both dumps where one machine sees them")  # fmt: skip


class _Measurer:
    """The actor: a process on some machine."""

    def __init__(self, common: Any):
        places, sides, kl = common
        golden, mine = (reopen(Path(path), data) for path, data in places)
        self._measurer = UnitMeasurer((golden, mine), Indices(sides), kl=kl)

    def measure(self, units: list[Unit]) -> bytes:
        return wire.pack([self._measurer.measure(u) for u in units])


def _readable(paths: dict[File, str]) -> list[File]:
    return [key for key, path in paths.items() if os.access(path, os.R_OK)]


def _files(unit: Unit) -> set[File]:
    found: set[File] = set()
    for side, groups in enumerate((unit.golden, unit.mine)):
        for group in groups:
            for record in group.records:
                _add_files(found, side, record)
    return found


def _add_files(found: set[File], side: int, record: Record) -> None:
    parts = getattr(record, "parts", ())  # of a record that is made of others (align/derived.py)
    for part in parts:
        _add_files(found, side, part)
    if not parts and record.payload is not None:
        found.add((side, record.rank, record.payload.seg))


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:200] if lines else type(error).__name__


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
            raise CompareError(f"no Ray cluster at {address!r}: {_last_line(e)}") from None
    try:
        yield
    finally:
        if own:
            ray.shutdown()
