"""A command in the background ends with its context, and all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_accprobe.run.launcher import Background, LaunchError

POLITE = """
import signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
def end(number, frame):
    time.sleep(0.2); print("closed", flush=True); child.kill(); sys.exit(4)
signal.signal(signal.SIGTERM, end)
print("up", child.pid, flush=True)
while True: time.sleep(0.05)
"""
STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", subprocess.Popen(["sleep", "600"]).pid, flush=True)
while True: time.sleep(0.05)
"""


def up(command: Background) -> int:
    """The pid of what it has started, once it runs."""
    end = time.monotonic() + 60
    while not (said := command.tail()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return int(said[-1].split()[1])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 30) -> bool:
    """Whether it ends in time: a kill is sent at once, and a process on a busy machine dies when its turn comes."""
    end = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not runs(pid)


def test_a_program_that_ends_by_itself(tmp_path: Path) -> None:
    with Background(["echo hello; exit 7"], os.environ, log=tmp_path / "log") as command:
        assert command.wait(30) == 7
    assert command.tail() == ["hello"]
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_what_ends_on_being_asked_has_time_to(tmp_path: Path) -> None:
    with Background([sys.executable, "-c", POLITE], os.environ, log=tmp_path / "log") as command:
        child = up(command)
        assert command.code is None
        assert command.wait(0.1) is None
    assert (command.code, command.tail()[-1]) == (4, "closed")
    assert gone(child)


def test_what_does_not_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    with Background([sys.executable, "-c", STUBBORN], os.environ, log=tmp_path / "log", stop_s=0.3) as command:
        child = up(command)
    assert command.code == 128 + signal.SIGKILL
    assert gone(child)


def test_no_program_and_no_place(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no-such: no such command"):
        Background(["no-such"], os.environ, log=tmp_path / "log")
    (tmp_path / "log").write_text("somebody's")
    with pytest.raises(FileExistsError), Background(["true"], os.environ, log=tmp_path / "log"):
        pass
    assert (tmp_path / "log").read_text() == "somebody's"


def test_it_ends_where_we_are_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom vllm_accprobe.run.launcher import Background\n"
        f"with Background([sys.executable, '-c', {POLITE!r}], os.environ, log=Path({str(tmp_path / 'log')!r})) as c:\n"
        "    while not c.tail(): time.sleep(0.02)\n"
        "    print(c.tail()[-1], flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    assert runs(child)
    process.kill()
    process.wait()
    assert gone(child)
