"""Units measured by processes of this machine (``--jobs``) or by a Ray cluster, in the order of the plan.

The problem: a worker may be killed, which must change neither the outcome nor its order, and each machine of a cluster
has its own files. The idea: a `Crew` starts tasks and reports which one ended; `in_order` keeps what waits, repeats a
lost task LOST times and bounds how far workers run in front. Processes are children with a thread each for their pipes;
cluster machines are asked once which files they can read, and get the batches for which they have all files. Not here:
what a worker does (worker.py), the plan (plan/), which is made where the command runs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import subprocess
from bisect import insort
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from vllm_accprobe.align.tokens import SideRows
from vllm_accprobe.children import ONE_THREAD, Child, how_it_ended
from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.measurer import CACHE, batches
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.comparison.worker import Briefing, Station, receive, send, side_of, units_of_answer
from vllm_accprobe.dump.schema import Record

LOST = 2
"""How often a task whose worker died is done again: who dies of the same task three times dies of the task."""
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True)
class Died:
    """In place of an answer: the worker has gone. why: how, as the end of a sentence."""

    why: str


class Crew(Protocol[T_contra]):
    """Workers. who: what a message calls them. ahead: so many tasks may be begun or ready before the first that is due
    has ended."""

    who: str

    @property
    def ahead(self) -> int: ...

    def start(self, number: int, task: T_contra) -> bool:
        """False where no worker that could do it is free. Raises CompareError where none ever will be."""

    def ended(self) -> tuple[int, bytes | Died]:
        """Waits for a task that was started: its number and answer. Raises CompareError for what no second attempt
        mends."""


def in_order(crew: Crew[T], tasks: Sequence[T]) -> Iterator[bytes]:
    """The answers to ``tasks``, in their order. Raises CompareError."""
    waiting = list(range(len(tasks)))
    lost = [0] * len(tasks)
    ready: dict[int, bytes] = {}
    due = 0
    while due < len(tasks):
        begun = [i for i in waiting if i < due + crew.ahead and crew.start(i, tasks[i])]
        for i in begun:
            waiting.remove(i)
        number, answer = crew.ended()
        if isinstance(answer, Died):
            lost[number] += 1
            if lost[number] > LOST:
                raise CompareError(f"{crew.who} died {lost[number]} times over one task; the last one {answer.why}")
            insort(waiting, number)
        else:
            ready[number] = answer
        while due in ready:
            yield ready.pop(due)
            due += 1


PROCESS_BATCH = 32 << 20
"""Bytes of both sides per task: telling a child of one costs some milliseconds, and so much is done again when it
dies."""
_AHEAD = 2


def measure_by(
    processes: int,
    dumps: tuple[Any, Any],
    sides: tuple[SideRows, SideRows],
    units: Sequence[Unit],
    limit: int = PROCESS_BATCH,
    *,
    kl: bool = False,
) -> Iterator[list[MeasuredUnit]]:
    """As measurer.measure_all. processes: at least 1. Raises CompareError and DumpError."""
    tasks = list(batches(units, limit))
    n = max(min(processes, len(tasks)), 1)
    golden, mine = dumps
    briefing = Briefing((side_of(golden), side_of(mine)), sides, kl, CACHE // n)
    known: store.Known = {}
    with contextlib.closing(_Processes(n, pickle.dumps(briefing))) as crew:
        for answer in in_order(crew, tasks):
            yield units_of_answer(answer, dumps, known)


class _Processes:
    """A Crew on this machine. told: the pickled Briefing."""

    who = "processes of --jobs"

    def __init__(self, n: int, briefing: bytes):
        self._briefing, self._n = briefing, n
        self._free: queue.SimpleQueue[_ChildProcess] = queue.SimpleQueue()
        self._all = [_ChildProcess(briefing) for _ in range(n)]  # they import at the same time
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
        self._closed = True
        for one in self._all:
            one.kill()
        self._threads.shutdown(cancel_futures=True)
        for one in self._all:
            one.close()


class _ChildProcess:
    def __init__(self, briefing: bytes):
        self._briefing = briefing
        self.start()

    def start(self) -> None:
        self.close()
        # one thread each: they are as many as the user wants
        self._child = Child(
            "vllm_accprobe.comparison.worker", env={**os.environ, **ONE_THREAD}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._fresh = True

    def measure(self, task: list[Unit]) -> bytes | Died:
        to, back = _binary(self._child.stdin), _binary(self._child.stdout)
        with contextlib.suppress(OSError):  # it died: there will be no answer
            if self._fresh:
                self._fresh = False
                send(to, self._briefing)
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
    return cast(BinaryIO, pipe.buffer)


CLUSTER_BATCH = 64 << 20
"""Bytes per task: sending one costs some milliseconds."""

File = tuple[int, int, int]
"""(side, rank, segment)."""


def measure_on(
    address: str,
    dumps: tuple[Any, Any],
    sides: tuple[SideRows, SideRows],
    units: Sequence[Unit],
    limit: int = CLUSTER_BATCH,
    *,
    kl: bool = False,
) -> Iterator[list[MeasuredUnit]]:
    """As measurer.measure_all. address: as for ray.init, ``auto`` or ``host:port``. Raises CompareError, DumpError."""
    ray = _ray()
    golden, mine = dumps
    briefing = Briefing((side_of(golden), side_of(mine)), sides, kl)
    with _connected(ray, address):
        known: store.Known = {}
        tasks = [_Task(b, {f for u in b for f in _files(u)}) for b in batches(units, limit)]
        for answer in in_order(_Machines(ray, briefing, tasks), tasks):
            yield units_of_answer(answer, dumps, known)


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

    def __init__(self, ray: Any, briefing: Briefing, tasks: Sequence[_Task]):
        self._ray = ray
        self._near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        machines = {n["NodeID"]: int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]}
        machines = {m: n for m, n in machines.items() if n > 0}
        if not machines:
            raise CompareError("the Ray cluster has no machine with processors")
        self._paths = {(s, *key): str(x.path) for s, side in enumerate(briefing.places) for key, x in side.data.items()}
        probe = ray.remote(_readable)
        probes = [probe.options(num_cpus=0, scheduling_strategy=self._at(m)).remote(self._paths) for m in machines]
        self.holds = dict(zip(machines, map(set, ray.get(probes)), strict=True))
        self._briefing = ray.put(briefing)
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
        actor = self._ray.remote(Station).options(num_cpus=1, scheduling_strategy=self._at(machine))
        return _Worker(machine, actor.remote(self._briefing))

    def _replace(self, worker: _Worker, task: _Task) -> None:
        """After a death: another worker on the same machine, unless the machine itself is gone."""
        if worker in self._workers:
            self._workers.remove(worker)
            if any(n["NodeID"] == worker.machine and n["Alive"] for n in self._ray.nodes()):
                self._workers.append(self._hire(worker.machine))
        self._check(task)

    def _check(self, task: _Task) -> None:
        files = [self.holds[w.machine] for w in self._workers]
        if any(task.files <= present for present in files):
            return
        most: set[File] = max(files, key=lambda h: len(task.files & h), default=set())
        lacking = [self._paths.get(f, str(f)) for f in sorted(task.files - most)]
        tap, role, _ = task.units[0].key
        raise CompareError(f"no machine of the Ray cluster can read all files of {tap}/{role} (at best all but "
                           f"{', '.join(lacking[:2])}): put both dumps where one machine sees them")  # fmt: skip


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
        os.chdir(Path(__file__).resolve().parents[2])
        yield
    finally:
        os.fchdir(here)
        os.close(here)


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
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
