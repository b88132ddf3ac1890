"""The processes that check taps, and a whole check with its csv.

The problem: a kernel may crash and take its process with it, and torch takes seconds to import. The idea: a `Team` of
worker processes (`main`) that start together and take taps in the plan's order, each with one thread of torch; rows
come out in that order, however many processes there are; a process that dies leaves a row for the call that killed it
and is followed by another. Nothing is pickled. `Alone` is the same without a process. Needs no torch itself.

A whole check may take hours, and end early: finished taps are appended to ``opcheck.csv.part``, which becomes
opcheck.csv at the end. ``--resume`` keeps the finished taps of the part file and checks the others; what it must have
been begun with stands in ``opcheck.json``. Not here: the checks (open_job.py).
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_accprobe.children import ONE_THREAD, Child, how_it_ended, own_stdout
from vllm_accprobe.dump.decode import DecodeError, load
from vllm_accprobe.opcheck.run.job import STORED, TOGETHER, Job, Tap
from vllm_accprobe.opcheck.run.result_row import ERROR, CheckResult, unchecked
from vllm_accprobe.opcheck.run.table import COLUMNS, cell, cells, from_cells
from vllm_accprobe.whole_file import GrowingCsv, NoSpace, write_text

_AT_ONCE = 8
"""Processes, at most one per processor, that are started before it is known how many taps there are."""
_CRASHES = 20
"""Of one tap; then the rest of it is given up."""
_REUSED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""glibc's settings (mallopt(3)) of a worker: pieces of up to 32 MiB, its largest threshold, are used again instead of
being returned and cleared by the kernel for each float64 copy of an output; 256 MiB of them at most (chosen)."""
Cells = list[str]
"""A row as opcheck.csv has it."""


class RunError(Exception):
    """One line: what cannot be done. Exit code 2."""


class Alone:
    """No process of its own: this one checks."""

    def __init__(self, job: Job):
        from vllm_accprobe.opcheck.run.open_job import OpenJob

        self.bench = OpenJob(job)
        self.taps, self.problems = self.bench.taps(), self.bench.problems

    def check(self, taps: Sequence[Tap]) -> Iterator[list[CheckResult]]:
        for tap in taps:
            yield list(self.bench.rows(tap, {}, lambda step, call: None))
            self.problems += [p for p in self.bench.problems if p not in self.problems]

    def close(self) -> None:
        pass


class Team:
    """Processes that take taps in the plan's order."""

    def __init__(self, job: Job, processes: int):
        self.job = job
        # all import torch at the same time
        at_once = min(max(1, processes), _AT_ONCE, os.cpu_count() or 1)
        started = [_WorkerProcess(_shared(job, w)) for w in range(at_once)]
        try:
            answer = started[0].heard()
            if answer is None:
                raise RunError(f"opcheck's process {how_it_ended(started[0])} while it opened the dump")
            if "error" in answer:
                raise RunError(answer["error"])
        except BaseException:
            for process in started:
                process.end()
            raise
        self.taps: list[Tap] = [(t[0], t[1], t[2]) for t in answer["taps"]]
        self.problems: list[str] = list(answer["problems"])
        useful = max(1, min(processes, len(self.taps)))
        self._workers: list[_WorkerProcess | None] = [*started[:useful], *(None,) * (useful - len(started))]
        for process in started[useful:]:
            process.end()
        self._fresh = set(range(1, len(started)))

    def close(self) -> None:
        for process in self._workers:
            if process is not None:
                process.end()

    def check(self, taps: Sequence[Tap]) -> Iterator[list[CheckResult]]:
        """The rows of each tap, in their order; taps in work wait until those before them are done."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        ready: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for k in range(len(taps)):
            waiting.put(k)
        threads = [threading.Thread(target=self._work, args=(w, taps, waiting, ready), daemon=True)
                   for w in range(len(self._workers))]  # fmt: skip
        for t in threads:
            t.start()
        done: dict[int, list[CheckResult]] = {}
        for k in range(len(taps)):
            while k not in done:
                number, rows = ready.get()
                if isinstance(rows, Exception):
                    raise rows
                done[number] = rows
            yield done.pop(k)

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

    def _tap(self, w: int, tap: Tap) -> list[CheckResult]:
        crashed: list[tuple[int | None, int, str]] = []
        alone = False
        while True:
            process = self._workers[w]
            if process is None or w in self._fresh:
                self._fresh.discard(w)
                process = self._workers[w] = process or _WorkerProcess(_shared(self.job, w))
                answer = process.heard()
                if answer is None or "error" in answer:
                    raise RunError(f"opcheck's process cannot start: {(answer or {}).get('error', 'it died')}")
            rows, at, failed = process.check(tap, crashed, self.problems, alone)
            if failed == "":
                return rows
            if failed is not None:
                return [*rows, _error_row(tap, f"opcheck failed: {failed}")]
            why = f"the process {how_it_ended(process)} while it was checked"
            process.end()
            self._workers[w] = None
            if at == TOGETHER and not alone:
                alone = True
                continue
            if at is None or any((s, c) == at for s, c, _ in crashed) or len(crashed) >= _CRASHES:
                return [*rows, _error_row(tap, why)]
            crashed.append((*at, why))


def _shared(job: Job, worker: int) -> Job:
    """What a worker gets: of several devices each has its own, in turn."""
    return job.on(job.devices[worker % len(job.devices)]) if job.devices else job


def _error_row(tap: Tap, why: str) -> CheckResult:
    return unchecked(tap[1], tap[2], tap[0], -1, 0, 0, why, status=ERROR)


class _WorkerProcess(Child):
    """One worker and its two pipes."""

    def __init__(self, job: Job):
        # one thread each: sums come out the same however many processes there are, and small products are no slower
        environ = {**_REUSED, **os.environ, **ONE_THREAD}
        super().__init__(__name__, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.tell(json.dumps(job.to_json()))

    def check(
        self, tap: Tap, crashed: Sequence[tuple[int | None, int, str]], problems: list[str], alone: bool
    ) -> tuple[list[CheckResult], tuple[int | None, int] | None, str | None]:
        """(rows, the call that had begun, "" where the tap is done, a sentence where it failed, None where the process
        died)."""
        self.tell(json.dumps({"tap": tap, "crashed": crashed, "alone": alone}))
        rows: list[CheckResult] = []
        at: tuple[int | None, int] | None = None
        while True:
            message = self.heard()
            if message is None:
                return rows, at, None
            if "row" in message:
                rows.append(CheckResult.of_plain(message["row"]))
            elif "begin" in message:
                at = message["begin"][0], message["begin"][1]
            elif "failed" in message:
                return rows, at, str(message["failed"])
            else:
                problems += [p for p in message["problems"] if p not in problems]  # each process finds them
                return rows, at, ""


def main() -> None:
    """A worker: gets a job, then taps, one JSON object a line, and answers likewise; before each call it says which one
    begins. Ends with its input."""
    channel = own_stdout()

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        if "row" not in message:  # rows go out with what is reported next
            channel.flush()

    try:
        job = Job.from_json(json.loads(sys.stdin.readline()))
        if job.runs_here:  # a race takes two; before torch or numba search for them
            for name in ONE_THREAD:
                os.environ.pop(name, None)
        from vllm_accprobe.opcheck.run.open_job import OpenJob

        bench = OpenJob(job)
        problems = list(bench.problems)
        say(taps=bench.taps(), problems=problems)
    except Exception as error:
        kinds = {c.__name__ for c in type(error).__mro__}
        known = kinds & {"DumpError", "OSError", "Unavailable"}
        say(error=str(error) if known else f"{type(error).__name__}: {error}")
        return

    for line in sys.stdin:
        task = json.loads(line)
        crashed = {(step, call): why for step, call, why in task["crashed"]}
        rank, tap, cls = task["tap"]
        try:
            for row in bench.rows((rank, tap, cls), crashed, lambda step, call: say(begin=[step, call]), task["alone"]):
                say(row=row.to_plain())
            say(end=True, problems=[p for p in bench.problems if p not in problems])
            problems = bench.problems
        except Exception as error:  # a defect of ours or of the dump: the tap's row, not the end
            say(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")


__all__ = ["CheckedRun", "RunError", "run"]

_MOST_SETTINGS = 64 << 20
PART, DONE, SETTINGS = "opcheck.csv.part", "opcheck.csv", "opcheck.json"


@dataclass
class CheckedRun:
    """What a run gave: rows in order, without their measures, and sentences for people. lost: why opcheck.csv could
    not be written, to be raised once the verdict is printed."""

    rows: list[CheckResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost: NoSpace | None = None


def run(
    job: Job, out: Path, *, processes: int, resume: bool,
    plan: Callable[[int], object] = lambda n: None, done: Callable[[], object] = lambda: None,
) -> CheckedRun:  # fmt: skip
    """Checks ``job`` and leaves out/opcheck.csv. processes: 0 for none besides this one; plan: called with how many
    taps there are; done: called after each. Raises RunError, DumpError, OSError."""
    team: Team | Alone = Alone(job) if processes == 0 else Team(job, processes)
    taps = team.taps
    with contextlib.ExitStack() as stack:
        stack.callback(team.close)
        if all(tap == STORED for tap in taps):
            return CheckedRun([], team.problems)
        out.mkdir(parents=True, exist_ok=True)
        begun = _begin(job, out, resume)
        file = stack.enter_context(contextlib.closing(GrowingCsv(out / DONE, out / PART)))
        if not begun:
            file.begin(COLUMNS)
        plan(len(taps))
        old = _finished(begun, taps)
        found = CheckedRun([from_cells(row) for row in begun[: sum(n for _, n in old)]], team.problems)
        for _ in old:
            done()
        for rows in team.check(taps[len(old) :]):
            file.add(map(cells, rows))
            found.rows += (replace(row, measures=None, left=()) for row in rows)
            done()
        file.finish()
    if file.lost is not None:
        (out / SETTINGS).unlink(missing_ok=True)
    found.lost = file.lost
    return found


def _begin(job: Job, out: Path, resume: bool) -> list[Cells]:
    """Writes the settings, and gives the rows that are there already, the part file cut to them."""
    settings, part = out / SETTINGS, out / PART
    identity = {"job": job.to_json(), "journals": _journals(Path(job.dump)) if job.dump else {}}
    finished = not part.exists() and (out / DONE).exists() and settings.exists()
    if not resume or not (finished or part.exists()):
        write_text(settings, json.dumps(identity))
        part.unlink(missing_ok=True)
        return []
    try:
        before = load(dict[str, dict[str, Any]], settings, _MOST_SETTINGS)
    except (OSError, DecodeError):
        raise RunError(f"--resume: {settings} cannot be read; start again without --resume") from None
    if before != json.loads(json.dumps(identity)):
        then, now = before.get("job", {}), json.loads(json.dumps(identity["job"]))
        changed = [k for k in {**then, **now} if then.get(k) != now.get(k)]
        options = ", ".join(_SAID.get(k, k) for k in changed)
        what = f"other options ({options})" if changed else "a dump that has changed since"
        raise RunError(f"--resume: what is in {out} was begun with {what}; start again without --resume")
    if finished:
        os.replace(out / DONE, part)  # all of it is kept, and its last tap checked once more
    return _cut(part)


_SAID = {
    "save": "--save-failed", "white": "white_list", "black": "black_list", "once": "--filter_api",
    "devices": "--device", "jit": "--jit_compile",
}  # fmt: skip
"""What a job's field is called in the request, if otherwise."""


def _journals(dump: Path) -> dict[str, int]:
    return {str(p.relative_to(dump)): p.stat().st_size for p in sorted(dump.glob("rank*/journal.jsonl"))}


def _cut(part: Path) -> list[Cells]:
    """The complete rows but those of the last tap, which may not be all; the file is cut behind them."""
    data = part.read_bytes()
    data = data[: data.rfind(b"\n") + 1]
    lines = data.decode("utf-8", "backslashreplace").split("\n")
    rows = list(csv.reader(lines[:-1]))
    if len(rows) != len(lines) - 1 or not rows or tuple(rows[0]) != COLUMNS:
        part.unlink()
        return []
    last = _tap(rows[-1]) if len(rows) > 1 else None
    while len(rows) > 1 and (_tap(rows[-1]) == last or len(rows[-1]) != len(COLUMNS)):
        rows.pop()
    kept = "\n".join(lines[: len(rows)]) + "\n"
    part.write_bytes(kept.encode("utf-8", "backslashreplace"))
    return rows[1:]


_TAP, _RANK, _STEP = 2, 6, 5  # places of table.COLUMNS


def _tap(row: Sequence[str]) -> tuple[str, str]:
    """What tells the rows of one tap from the next one's; all stored parameters are one."""
    if len(row) <= _RANK:
        return "", ""
    return ("", "") if row[_STEP] == "" else (row[_TAP], row[_RANK])


def _finished(rows: Sequence[Cells], taps: Sequence[Tap]) -> list[tuple[Tap, int]]:
    """The taps of the plan, from its beginning, whose rows are there, with how many rows each has."""
    found: list[tuple[Tap, int]] = []
    waiting = ((key, len(list(group))) for key, group in groupby(rows, _tap))
    group = next(waiting, None)
    for tap in taps:
        key = ("", "") if tap[0] < 0 else (_escaped(tap[1]), str(tap[0]))
        if group is None:
            break
        if group[0] == key:
            found.append((tap, group[1]))
            group = next(waiting, None)
        else:
            found.append((tap, 0))  # a tap before one that is there: it had no rows
    return found


def _escaped(tap: str) -> str:
    return str(cell(tap))
