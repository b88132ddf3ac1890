"""A whole check: processes that are given taps, rows in the dump's order, and a csv that survives.

The problem: a dump may hold hours of checks; a kernel may crash, memory may end, somebody may press Ctrl-C. The idea:
the checks run in processes of their own (worker.py), a tap at a time; finished taps are appended in the order of the
plan to ``opcheck.csv.part``, which becomes opcheck.csv at the end. A process that dies leaves a row for the call that
killed it and is followed by another. ``--resume`` keeps the finished taps of the part file and checks the others; what
it must have been begun with stands in ``opcheck.json``. This module needs no torch. Not here: the processes
(process_pool.py), the checks (worker.py).
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_accprobe.opcheck.run.process_pool import Alone, Cells, RunError, Team
from vllm_accprobe.opcheck.run.result_row import Checked
from vllm_accprobe.opcheck.run.table import COLUMNS, cell, from_cells
from vllm_accprobe.opcheck.run.worker import STORED, Job, Tap

__all__ = ["CheckedRun", "RunError", "run"]

PART, DONE, SETTINGS = "opcheck.csv.part", "opcheck.csv", "opcheck.json"


@dataclass
class CheckedRun:
    """What a run gave: rows in order, without their measures, and sentences for people."""

    rows: list[Checked] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run(
    job: Job, out: Path, *, processes: int, resume: bool,
    plan: Callable[[int], object] = lambda n: None, done: Callable[[], object] = lambda: None,
) -> CheckedRun:  # fmt: skip
    """Checks ``job`` and leaves out/opcheck.csv. processes: 0 for none besides this one; plan: told how many taps
    there are; done: called after each. Raises RunError, DumpError, OSError."""
    team: Team | Alone = Alone(job) if processes == 0 else Team(job, processes)
    taps = team.taps
    with contextlib.ExitStack() as stack:
        stack.callback(team.close)
        if all(tap == STORED for tap in taps):
            return CheckedRun([], team.problems)
        out.mkdir(parents=True, exist_ok=True)
        begun = _begin(job, out, resume)
        f = stack.enter_context((out / PART).open("a", encoding="utf-8", errors="backslashreplace", newline=""))
        writer = csv.writer(f, lineterminator="\n")
        if not begun:
            f.truncate(0)
            writer.writerow(COLUMNS)
        plan(len(taps))
        old = _finished(begun, taps)
        found = CheckedRun([from_cells(row) for row in begun[: sum(n for _, n in old)]], team.problems)
        for _ in old:
            done()
        for rows in team.check(taps[len(old) :]):
            writer.writerows(cells for cells, _ in rows)
            f.flush()
            found.rows += (row for _, row in rows)
            done()
    os.replace(out / PART, out / DONE)
    return found


def _begin(job: Job, out: Path, resume: bool) -> list[Cells]:
    """Writes the settings, and gives the rows that are there already, the part file cut to them."""
    settings, part = out / SETTINGS, out / PART
    asked = {"job": job.to_json(), "journals": _journals(Path(job.dump)) if job.dump else {}}
    finished = not part.exists() and (out / DONE).exists() and settings.exists()
    if not resume or not (finished or part.exists()):
        settings.write_text(json.dumps(asked), encoding="utf-8")
        part.unlink(missing_ok=True)
        return []
    try:
        before = json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise RunError(f"--resume: {settings} cannot be read; start again without --resume") from None
    if before != json.loads(json.dumps(asked)):
        then, now = before["job"], json.loads(json.dumps(asked["job"]))
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
"""What a job's field is called where it is asked for, if otherwise."""


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
