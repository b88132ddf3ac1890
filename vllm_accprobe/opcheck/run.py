"""A whole check: processes that are given taps, rows in the dump's order, and a csv that survives.

The problem: a dump may hold hours of checks; a kernel may crash, memory may end, somebody may press Ctrl-C. The idea:
the checks run in processes of their own (worker.py), a tap at a time; finished taps are appended in the order of the
plan to ``opcheck.csv.part``, which becomes opcheck.csv at the end. A process that dies leaves a row for the call that
killed it and is followed by another. ``--resume`` keeps the finished taps of the part file and checks the others; what
it must have been begun with stands in ``opcheck.json``. This module needs no torch. Not here: the checks.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from vllm_accprobe.opcheck.checked import ERROR, unchecked
from vllm_accprobe.opcheck.table import COLUMNS, cell, cells
from vllm_accprobe.opcheck.worker import STORED, Bench, Job, Tap

PART, DONE, SETTINGS = "opcheck.csv.part", "opcheck.csv", "opcheck.json"
_AT_ONCE = 8
"""Processes that are started before it is known how many taps there are."""
_CRASHES = 20
"""Of one tap; then the rest of it is given up."""
Cells = list[Any]


class RunError(Exception):
    """One line: what cannot be done. Exit code 2."""


@dataclass
class Found:
    """What a run gave: rows as table.cells made them, in order, and sentences for people."""

    rows: list[Any] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run(
    job: Job, out: Path, *, processes: int, resume: bool, keep: Callable[[Cells], Any],
    plan: Callable[[int], object] = lambda n: None, done: Callable[[], object] = lambda: None,
) -> Found:  # fmt: skip
    """Checks ``job`` and leaves out/opcheck.csv. processes: 0 for none besides this one; keep: what is kept of a row
    in memory; plan: told how many taps there are; done: called after each. Raises RunError, DumpError, OSError."""
    team: _Team | _Alone = _Alone(job) if processes == 0 else _Team(job, processes)
    taps = team.taps
    with contextlib.ExitStack() as stack:
        stack.callback(team.close)
        if all(tap == STORED for tap in taps):
            return Found([], team.problems)
        out.mkdir(parents=True, exist_ok=True)
        begun = _begin(job, out, resume)
        f = stack.enter_context((out / PART).open("a", encoding="utf-8", errors="backslashreplace", newline=""))
        writer = csv.writer(f, lineterminator="\n")
        if not begun:
            f.truncate(0)
            writer.writerow(COLUMNS)
        plan(len(taps))
        old = _finished(begun, taps)
        found = Found([keep(cells) for cells in begun[: sum(n for _, n in old)]], team.problems)
        for _ in old:
            done()
        for rows in team.check(taps[len(old) :]):
            writer.writerows(rows)
            f.flush()
            found.rows += map(keep, rows)
            done()
    os.replace(out / PART, out / DONE)
    return found


def _begin(job: Job, out: Path, resume: bool) -> list[Cells]:
    """Writes the settings, and gives the rows that are there already, the part file cut to them."""
    settings, part = out / SETTINGS, out / PART
    asked = {"job": job.to_json(), "journals": _journals(Path(job.dump))}
    finished = not part.exists() and (out / DONE).exists() and settings.exists()
    if not resume or not (finished or part.exists()):
        settings.write_text(json.dumps(asked), encoding="utf-8")
        part.unlink(missing_ok=True)
        return []
    try:
        before = json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RunError(f"--resume: {settings} cannot be read; start again without --resume") from None
    if before != json.loads(json.dumps(asked)):
        changed = [k for k, v in before["job"].items() if v != json.loads(json.dumps(asked["job"])).get(k)]
        what = f"other options ({', '.join(changed)})" if changed else "a dump that has changed since"
        raise RunError(f"--resume: what is in {out} was begun with {what}; start again without --resume")
    if finished:
        os.replace(out / DONE, part)  # all of it is kept, and its last tap checked once more
    return _cut(part)


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
    groups: list[tuple[tuple[str, str], int]] = []
    for row in rows:
        key = _tap(row)
        if groups and groups[-1][0] == key:
            groups[-1] = key, groups[-1][1] + 1
        else:
            groups.append((key, 1))
    found: list[tuple[Tap, int]] = []
    waiting = iter(groups)
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


class _Alone:
    """No process of its own: this one checks."""

    def __init__(self, job: Job):
        self.bench = Bench(job)
        self.taps, self.problems = self.bench.taps(), self.bench.problems

    def check(self, taps: Sequence[Tap]) -> Iterator[list[Cells]]:
        for tap in taps:
            yield list(self.bench.rows(tap, {}, lambda step, call: None))

    def close(self) -> None:
        pass


class _Team:
    """Processes that take taps in the plan's order."""

    def __init__(self, job: Job, processes: int):
        self.job = job
        started = [_Process(job) for _ in range(min(max(1, processes), _AT_ONCE))]  # all import torch at the same time
        try:
            answer = started[0].hear()
            if answer is None:
                raise RunError(f"opcheck's process {_died(started[0])} while it opened the dump")
            if "error" in answer:
                raise RunError(answer["error"])
        except BaseException:
            for process in started:
                process.close()
            raise
        self.taps: list[Tap] = [(t[0], t[1], t[2]) for t in answer["taps"]]
        self.problems: list[str] = list(answer["problems"])
        useful = max(1, min(processes, len(self.taps)))
        self._workers: list[_Process | None] = [*started[:useful], *(None,) * (useful - len(started))]
        for process in started[useful:]:
            process.close()
        self._fresh = set(range(1, len(started)))

    def close(self) -> None:
        for process in self._workers:
            if process is not None:
                process.close()

    def check(self, taps: Sequence[Tap]) -> Iterator[list[Cells]]:
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
            yield held.pop(k)

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
        while True:
            process = self._workers[w]
            if process is None or w in self._fresh:
                self._fresh.discard(w)
                process = self._workers[w] = process or _Process(self.job)
                answer = process.hear()
                if answer is None or "error" in answer:
                    raise RunError(f"opcheck's process cannot start: {(answer or {}).get('error', 'it died')}")
            rows, at, failed = process.check(tap, crashed, self.problems)
            if failed == "":
                return rows
            if failed is not None:
                return [*rows, _error_row(tap, f"opcheck failed: {failed}")]
            why = f"the process {_died(process)} while it was checked"
            process.close()
            self._workers[w] = None
            if at is None or any((s, c) == at for s, c, _ in crashed) or len(crashed) >= _CRASHES:
                return [*rows, _error_row(tap, why)]
            crashed.append((*at, why))


def _error_row(tap: Tap, why: str) -> Cells:
        return cells(unchecked(tap[1], tap[2], tap[0], -1, 0, 0, why, status=ERROR))


def _died(process: _Process) -> str:
    code = process.process.wait()
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else str(-code)
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class _Process:
    """One worker and its two pipes."""

    def __init__(self, job: Job):
        # one thread each: sums come out the same however many processes there are, and small products are no slower
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm_accprobe.opcheck.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, encoding="utf-8", errors="backslashreplace", env={**os.environ, **threads},
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
        self, tap: Tap, crashed: Sequence[tuple[int | None, int, str]], problems: list[str]
    ) -> tuple[list[Cells], tuple[int | None, int] | None, str | None]:
        """(rows, the call that had begun, "" where the tap is done, a sentence where it failed, None where the process
        died)."""
        self._say({"tap": tap, "crashed": crashed})
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
                problems += message["problems"]
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
