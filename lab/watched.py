"""Runs a command and measures it: seconds, processor time, and the memory that it and its children have of their own.

The problem: a tool that maps dumps shows gigabytes that cost nothing, and one that forks counts pages twice. The idea:
of all processes of the tree, sampled while they run, the private and shared-memory pages, which no file backs. Pages
that a fork shares are divided between the processes that have them (Pss of /proc/PID/smaps_rollup). Linux only.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.05
"""Chosen: short beside anything that fills a gigabyte, and a hundredth of a core."""


@dataclass(frozen=True)
class Measured:
    """code: of the exit, -9 where it took too long. cpu_s: of the command and of the children that it waited for.

    own_mb: the largest sum over all processes of Pss_Anon and Pss_Shmem. rss_mb: of RssAnon and RssShmem, in which
    pages that a fork shares count in each process. largest_mb: of RssAnon of one process. All in MiB.
    """

    code: int
    wall_s: float
    cpu_s: float
    own_mb: float
    rss_mb: float
    largest_mb: float
    stdout: str
    stderr: str


def run(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, cores: int, timeout_s: float) -> Measured:
    """``command`` on the first ``cores`` of the cores that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    began = time.monotonic()
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )  # fmt: skip
    own = rss = largest = 0
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - began > timeout_s:
            os.killpg(process.pid, signal.SIGKILL)
        each = {p: _own(p) for p in tree(process.pid)}
        rss, largest = max(rss, sum(each.values())), max(largest, *each.values())
        if sum(each.values()) > own:  # what is shared is in neither more than once
            own = max(own, sum(_share(p) for p in each))
        time.sleep(EVERY_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Measured(
        process.returncode, time.monotonic() - began, used.ru_utime + used.ru_stime, own / 1024, rss / 1024,
        largest / 1024, out.read_text(errors="replace"), err.read_text(errors="replace"),
    )  # fmt: skip


def tree(pid: int) -> Iterator[int]:
    """``pid`` and all that descends from it, as far as it is still there."""
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def _own(pid: int) -> int:
    return _kilobytes(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:"))


def _share(pid: int) -> int:
    return _kilobytes(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))


def _kilobytes(path: str, names: tuple[str, ...]) -> int:
    """The sum of these lines; 0 where the process has ended."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))
