"""Signals and exit codes pass through as if nobody stood in between, with a terminal and without."""

import itertools
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import gone

from vllm_accprobe.run import launcher
from vllm_accprobe.run.launcher import Guard, LaunchError, command_line, run

CHILD = """
import os, signal, sys, time
def got(number, frame):
    open(sys.argv[1], "a").write(f"{sys.argv[2]} {signal.Signals(number).name}\\n")
    if number == signal.SIGTERM or len(open(sys.argv[1]).readlines()) > 3:
        os._exit(5)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, got)
open(sys.argv[1] + "." + sys.argv[2], "w").close()
for _ in range(200):
    time.sleep(0.05)
"""
PARENT = "import sys; from vllm_accprobe.run.launcher import run; import os; sys.exit(run(sys.argv[1:], os.environ))"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(tmp_path: Path, *words: str, **how: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PARENT, *words]
    return subprocess.Popen(command, **how)  # type: ignore[call-overload,no-any-return]


def test_exit_codes() -> None:
    assert run(["true"], os.environ) == 0
    assert run(["exit 7"], os.environ) == 7
    assert run([sys.executable, "-c", "import sys; sys.exit(3)"], os.environ) == 3
    assert run(["kill -KILL $$"], os.environ) == 128 + 9


def test_the_signal_mask_is_as_before_for_both_sides(tmp_path: Path) -> None:
    out = tmp_path / "mask"
    code = f"import signal; open({str(out)!r}, 'w').write(repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert run([sys.executable, "-c", code], os.environ) == 0
    assert out.read_text() == repr(before)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_what_a_command_is(tmp_path: Path) -> None:
    assert command_line(["sh", "-c", "true"], os.environ)[1:] == ["-c", "true"]
    assert command_line(["cd / && true"], os.environ) == ["/bin/sh", "-c", "cd / && true"]
    script = tmp_path / "my script.sh"
    script.write_text("#!/bin/sh\nexit 4\n")
    script.chmod(0o755)
    assert command_line([str(script)], os.environ) == [str(script)]
    for words in (["nosuchprogram"], ["nosuchprogram", "a b"], []):
        with pytest.raises(LaunchError):
            command_line(words, os.environ)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    process = start(tmp_path, sys.executable, "-c", CHILD, str(log), "a", stdin=subprocess.DEVNULL)
    wait_for(tmp_path / "log.a")
    process.send_signal(number)
    time.sleep(0.4)
    if number != signal.SIGTERM:
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 5
    expected = [f"a {number.name}"] + (["a SIGTERM"] if number != signal.SIGTERM else [])
    assert log.read_text().splitlines() == expected


def test_what_a_shell_left_behind_is_ended_too(tmp_path: Path) -> None:
    """SIGTERM ends ``sh`` at once; the python that it started is in its group and still holds the lock."""
    log = tmp_path / "log"
    child = f"{sys.executable} -c '{CHILD.replace(chr(39), chr(34))}' {log} a; echo after"
    parent = PARENT.replace(
        "run(sys.argv[1:], os.environ)",
        f"run(sys.argv[1:], os.environ, busy=lambda: not os.path.exists({str(log)!r}), patience_s=10)",
    )
    process = subprocess.Popen([sys.executable, "-c", parent, child], stdin=subprocess.DEVNULL)
    wait_for(tmp_path / "log.a")
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert log.read_text().splitlines() == ["a SIGTERM"]


DEAF = """
import os, signal, subprocess, sys, time
from vllm_accprobe.run import launcher
from vllm_accprobe.run.launcher import Guard
guard = Guard(kill_after=1)
child = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(9)"
process = subprocess.Popen([sys.executable, "-c", child, sys.argv[1]], start_new_session=True,
                           preexec_fn=lambda: guard.watch(-os.getpid()))
print(process.pid, flush=True)
time.sleep(99)
"""


def test_a_server_that_does_not_end_is_killed_where_its_command_was(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEAF, str(tmp_path / "ready")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(tmp_path / "ready")
        parent.kill()
    assert gone(pid)


def test_what_is_to_be_killed_at_once_has_a_second(tmp_path: Path) -> None:
    script = "trap 'sleep 0.2; exit 7' TERM; : > \"$0\"; while :; do sleep 0.1; done"
    guard = Guard(kill_after=0)
    with subprocess.Popen(["/bin/sh", "-c", script, str(tmp_path / "ready")], start_new_session=True) as process:
        guard.watch(-process.pid)
        wait_for(tmp_path / "ready")
        assert guard._shell is not None
        guard._shell.communicate()  # as when this process dies
        assert process.wait(10) == 7


def on_terminal(*words: str) -> tuple[int, int]:
    """(pid, master) of a command whose terminal is new and whose process group is in front."""
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", PARENT, *words])
    return pid, master


def end_of(pid: int) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it did not end")


def test_ctrl_c_on_a_terminal_arrives_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pid, master = on_terminal(sys.executable, "-c", CHILD, str(log), "a")
    try:
        wait_for(tmp_path / "log.a")
        os.write(master, b"\x03")
        time.sleep(0.6)
        os.kill(pid, signal.SIGTERM)  # from another process, to us alone: passed on
        assert end_of(pid) == 5
    finally:
        os.close(master)
    assert log.read_text().splitlines() == ["a SIGINT", "a SIGTERM"]


def test_a_command_can_read_the_terminal(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"open({str(out)!r}, 'w').write(input())"
    pid, master = on_terminal(sys.executable, "-c", code)
    try:
        os.write(master, b"hello\n")
        assert end_of(pid) == 0
    finally:
        os.close(master)
    assert out.read_text() == "hello"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.TICK_S == 1.0
    monkeypatch.setattr(launcher, "TICK_S", 0.5)  # longer than one wait for a signal


def test_ticks_come_while_it_runs(often: None) -> None:
    seen = [time.monotonic()]
    run(["sleep", "1.3"], os.environ, tick=lambda: seen.append(time.monotonic()))
    assert len(seen) >= 3
    assert all(later - earlier > 0.45 for earlier, later in itertools.pairwise(seen))


def test_a_broken_progress_leaves_nobody_behind(often: None) -> None:
    seen: list[int] = []

    def tick() -> None:
        seen.append(1)
        raise BrokenPipeError

    assert run(["sleep 1.3; exit 6"], os.environ, tick=tick) == 6
    assert len(seen) == 1


def test_the_writers_are_waited_for() -> None:
    begin = time.monotonic()
    assert run(["true"], os.environ, busy=lambda: time.monotonic() < begin + 0.3) == 0
    assert time.monotonic() - begin >= 0.3
    begin = time.monotonic()
    assert run(["true"], os.environ, busy=lambda: True, patience_s=0.2) == 0
    assert time.monotonic() - begin < 5.0
