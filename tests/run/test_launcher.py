"""Signals and exit codes pass through as if nobody stood in between, with a terminal and without."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_accprobe.run.launcher import Background, LaunchError, ServerCommandError, command_line, run, server_command

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


def test_ticks_come_about_once_a_second() -> None:
    seen: list[float] = []
    run(["sleep", "2.4"], os.environ, tick=lambda: seen.append(time.monotonic()))
    assert len(seen) == 2


def test_a_broken_progress_leaves_nobody_behind() -> None:
    seen: list[int] = []

    def tick() -> None:
        seen.append(1)
        raise BrokenPipeError

    assert run(["sleep 2.2; exit 6"], os.environ, tick=tick) == 6
    assert len(seen) == 1


def test_the_writers_are_waited_for() -> None:
    begin = time.monotonic()
    assert run(["true"], os.environ, busy=lambda: time.monotonic() < begin + 1.0) == 0
    assert time.monotonic() - begin >= 1.0
    begin = time.monotonic()
    assert run(["true"], os.environ, busy=lambda: True, patience_s=0.5) == 0
    assert time.monotonic() - begin < 5.0


# --- a command in the background ends with its context, and all that it started ---


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


# --- what a command's own words say: a server or a program, and where it listens ---


@pytest.mark.parametrize(
    "words",
    [["python", "my_generate.py"], ["vllm", "bench", "serve"], ["bash", "-c", "vllm bench"], ["./serve", "vllm"]],
)
def test_a_program_stays_as_it_is(words: list[str]) -> None:
    command = server_command(words, {})
    assert (list(command.words), command.url) == (words, "")


@pytest.mark.parametrize(
    "words", [["/opt/bin/vllm", "serve", "m"], ["python", "-m", "vllm.entrypoints.openai.api_server"]]
)
def test_a_server_without_a_port_gets_a_free_one(words: list[str]) -> None:
    command = server_command(words, {"VLLM_API_KEY": "secret"})
    port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)", command.url)
    assert port
    assert list(command.words) == [*words, f"--port={port[1]}"]
    assert command.key == "secret"
    assert "secret" not in repr(command)


@pytest.mark.parametrize(("words", "port", "url"), [
    (["vllm", "serve", "m", "--port", "41999"], None, "http://127.0.0.1:41999"),
    (["vllm", "serve", "m", "--host=0.0.0.0", "--port=41999"], 41999, "http://127.0.0.1:41999"),
    (["vllm", "serve", "m", "--host", "::1", "--port=41999"], None, "http://[::1]:41999"),
    (["cd x && vllm serve m --port 41999"], None, "http://127.0.0.1:41999"),
    (["./start.sh"], 41999, "http://127.0.0.1:41999"),
])  # fmt: skip
def test_a_port_that_is_named_is_kept(words: list[str], port: int | None, url: str) -> None:
    command = server_command(words, {}, port)
    assert (list(command.words), command.url) == (words, url)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ServerCommandError, match="--port=1, and the command says --port 2"):
        server_command(["vllm", "serve", "m", "--port", "2"], {}, 1)
    with pytest.raises(ServerCommandError, match="--ssl-keyfile"):
        server_command(["vllm", "serve", "m", "--ssl-keyfile=x"], {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerCommandError, match="something listens on port"):
            server_command(["vllm", "serve", "m", f"--port={taken.getsockname()[1]}"], {})
