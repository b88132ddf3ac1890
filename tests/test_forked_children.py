"""A forked child is as one that was started: what it finds, and how it ends; and what breaks is an error, no wait."""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forked_children
from support.forked_children import Command, Forking

from vllm_accprobe.children import Child

pytestmark = pytest.mark.skipif(not forked_children.POSSIBLE, reason="children are forked on Linux alone")
FOUND = """
import atexit, json, os, resource, signal, sys, threading
print(json.dumps({
    "argv": sys.argv[1:], "cwd": os.getcwd(), "one": os.environ.get("ONE"), "home": os.environ.get("HOME"),
    "parent": os.getppid(), "limit": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
    "files": len(os.listdir("/proc/self/fd")), "threads": [t.name for t in threading.enumerate()],
    "interrupt": signal.getsignal(signal.SIGINT).__name__,
}))
atexit.register(print, "at exit")
threading.Timer(0.2, print, ["a thread"]).start()
print("no end of a line", end="", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forking]:
    """One of this test's own, which imports nothing before."""
    made = Forking(modules=("json",))
    monkeypatch.setattr(Child, "_execute_child", forked_children._by(made))
    yield made
    made.close()


def asked(text: str, *words: str, **how: Any) -> tuple[str, str, int]:
    run = Command("-c", text, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)
    try:
        return *run.communicate(timeout=60), run.returncode
    finally:
        run.end()


def test_what_it_finds_and_how_it_ends(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (123_456_789, before[1]))
    try:
        out, err, code = asked(FOUND, "a", "b c", env={"ONE": "1"}, cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    first, *rest = out.splitlines()
    assert json.loads(first) == {
        "argv": ["a", "b c"], "cwd": str(tmp_path), "one": "1", "home": None, "parent": os.getpid(),
        "limit": 123_456_789, "files": 6, "threads": ["MainThread", "accprobe-parent"],
        "interrupt": "default_int_handler",
    }  # fmt: skip
    assert (rest, err, code) == (["a thread", "at exit"], "no end of a line", 7)
    assert asked("import os; os.kill(os.getpid(), 9)")[2] == -signal.SIGKILL
    _, err, code = asked("1 / 0")
    assert (err.splitlines()[-1], code) == ("ZeroDivisionError: division by zero", 1)


def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    run = Command("-c", "import time; print(1, flush=True); time.sleep(600)", stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == "1\n"
    os.close(run._ours)
    run._ours = -1
    assert run.wait(20) == -signal.SIGKILL
    run.end()


def test_one_that_hangs_or_dies_is_an_error_and_the_next_begins_anew(forking, monkeypatch):
    assert asked("print(1)")[0] == "1\n"
    monkeypatch.setattr(forked_children, "PATIENCE_S", 0.5)
    begin = time.monotonic()
    os.kill(forking._process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"no child was forked .*TimeoutError"):
        asked("print(2)")
    assert time.monotonic() - begin < 20
    monkeypatch.undo()
    monkeypatch.setattr(Child, "_execute_child", forked_children._by(forking))
    assert asked("print(3)")[0] == "3\n"
    monkeypatch.setattr(forked_children, "MODULES", (*forked_children.MODULES, "nowhere"))
    assert Child("nowhere", stderr=subprocess.DEVNULL).wait(60) == 1
    os.kill(forking._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"no child was forked .*(killed by SIGKILL|BrokenPipe|ConnectionReset)"):
        asked("print(4)")
    assert asked("print(5)")[0] == "5\n"


def test_what_this_process_forks_starts_its_own_as_ever(tmp_path: Path) -> None:
    module, words = forked_children.MODULES[0], tmp_path / "words"
    if not (child := os.fork()):
        try:
            own, end = Child(module, stdin=subprocess.PIPE), time.monotonic() + 20
            while not (line := Path(f"/proc/{own.pid}/cmdline").read_bytes()) and time.monotonic() < end:
                time.sleep(0.001)  # empty for a moment in execve(2)
            words.write_bytes(line)
            own.end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert module.encode() in words.read_bytes().split(b"\0")
