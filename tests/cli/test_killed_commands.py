"""No process that a command started outlives it, however the command dies, and whatever the process is doing."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from online.online_runs import free_port
from opcheck.proof.test_replay_process import GAIN, dump
from support.interrupts import in_the_foreground

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc")
ACCPROBE = str(Path(sys.executable).parent / "accprobe")
SLOW = "import time\ntime.sleep(600)\n"
HOLDING = "import ctypes\ndef main():\n    ctypes.PyDLL(None).sleep(600)  # PyDLL: the interpreter's lock stays taken\n"
FREE = "import time\ndef main():\n    time.sleep(600)\n"
PARENT = "import sys, time; from vllm_accprobe.children import Child; c = Child(sys.argv[1]); time.sleep(600)"
BY_THREAD = (
    "import os, sys, time, vllm_accprobe.children as c\n"
    "def no(pipe): raise OSError\n"
    "c._killed_by_kernel = no; c.end_with(0); time.sleep(600)"
)
COMMANDS = {
    "compare": "compare golden mine --out report",
    "opcheck": "opcheck golden --out checked -j 2",
    "doctor": "doctor",
    "doctor-graphs": "doctor --graphs -o NEW -- sleep 600",
    "run-shell": "run -- 'sleep 600 & sleep 601'",
    "golden-make": "golden make MODEL --out x.golden",
    "gate": "gate 'vllm serve MODEL --port PORT' 'vllm serve MODEL' --prompts p.txt --out NEW",
    "bisect": "bisect --prompts p.txt --out NEW -- vllm serve MODEL --port PORT --async-scheduling",
    "self-check": "self-check --prompts p.txt --out NEW -- vllm serve MODEL --port PORT",
}
"""One of each way to start a process: errcheck starts as run does, send as golden does."""


def marked(mark: str) -> list[int]:
    """Processes whose environment has this mark."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and mark.encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def names(pids: list[int]) -> list[str]:
    said = []
    for pid in pids:
        try:
            said.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-200:])
        except OSError:
            continue
    return said


def until(true: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def left_behind(
    words: list[str], mark: str, env: dict[str, str], number: int, cwd: Path, children: int,
    said: int = subprocess.DEVNULL,
) -> list[str]:  # fmt: skip
    """What still runs some seconds after ``words``, which started so many processes, was sent a signal. said: where
    its stderr goes."""
    env = {**os.environ, "ACCPROBE_TEST_MARK": mark, **env}
    process = subprocess.Popen(
        words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
        start_new_session=True, preexec_fn=in_the_foreground,
    )  # fmt: skip
    try:
        assert until(lambda: len(marked(mark)) > children, 60), names(marked(mark))
        time.sleep(0.5)  # what has begun is where it will hang
        process.send_signal(number)
        assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        until(lambda: not marked(mark), 10)
        return names(marked(mark))
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two dumps, and a torch and a vLLM that never end being imported."""
    root = tmp_path_factory.mktemp("children")
    dump(root / "golden", noise=0)
    dump(root / "mine", GAIN)
    (root / "slow").mkdir()
    for name in ("torch", "vllm"):
        (root / "slow" / f"{name}.py").write_text(SLOW)
    (root / "bin").mkdir()
    (root / "bin/vllm").write_text("#!/bin/sh\nexec sleep 600\n")
    (root / "bin/vllm").chmod(0o755)
    (root / "MODEL").mkdir()
    (root / "MODEL/config.json").write_text("{}")
    (root / "p.txt").write_text("a prompt\n")
    return root


TERMINATED = ("gate", "bisect", "self-check")
KILLED = [(name, signal.SIGKILL) for name in COMMANDS if name not in TERMINATED]
KILLED += [("compare", signal.SIGTERM), ("opcheck", signal.SIGHUP), ("run-shell", signal.SIGHUP)]
KILLED += [("golden-make", signal.SIGTERM)]
KILLED += [(name, signal.SIGTERM) for name in TERMINATED]


@pytest.mark.parametrize(("name", "number"), KILLED)
def test_a_command_that_is_killed_leaves_nothing_behind(place, name, number, request, tmp_path):
    command = COMMANDS[name]
    path = os.pathsep.join(filter(None, [str(place / "slow"), os.environ.get("PYTHONPATH")]))
    mark = f"{request.node.name}-{os.getpid()}"
    children = 2 if command.startswith(("opcheck", "golden")) or "&" in command else 1
    words = [ACCPROBE, *shlex.split(command.replace("NEW", f"{name}-{number}").replace("PORT", str(free_port())))]
    before = {*place.glob("accprobe-golden-*")}
    env = {"PYTHONPATH": path, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    with (tmp_path / "stderr").open("w+") as said:
        assert left_behind(words, mark, env, number, place, children, said.fileno()) == []
        assert number == signal.SIGKILL or {*place.glob("accprobe-golden-*")} == before  # up to 20 GB
        said.seek(0)
        lines = [line for line in said if "ended by" in line]
    assert len(lines) == (number != signal.SIGKILL and name != "run-shell"), lines  # which passes it on
    kept = "the (answers|runs) are" if name in TERMINATED else ".*"
    assert all(re.match(rf"accprobe: ended by {signal.Signals(number).name}; {kept} kept", line) for line in lines)


@pytest.mark.parametrize("code", [HOLDING, FREE], ids=["the lock held", "the lock free"])
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only a thread waits, which needs the lock")
def test_native_code_that_holds_the_interpreters_lock_dies_too(tmp_path: Path, code: str) -> None:
    (tmp_path / "busy.py").write_text(code)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-c", PARENT, "busy"]
    assert left_behind(words, f"lock-{os.getpid()}", {"PYTHONPATH": path}, signal.SIGKILL, tmp_path, 1) == []


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_where_the_kernel_does_not_kill_a_thread_ends_the_process(early: bool) -> None:
    theirs, ours = os.pipe()
    if early:
        os.close(ours)
    process = subprocess.Popen([sys.executable, "-c", BY_THREAD], stdin=theirs)
    os.close(theirs)
    try:
        if not early:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            os.close(ours)
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()


def test_a_child_ends_when_nobody_holds_it_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_accprobe.children import Child

    (tmp_path / "busy.py").write_text(FREE)
    mark = f"dropped-{os.getpid()}"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    child = Child("busy", env={**os.environ, "PYTHONPATH": path, "ACCPROBE_TEST_MARK": mark})
    assert until(lambda: marked(mark), 10)
    with pytest.warns(ResourceWarning, match="still running"):
        del child
    assert until(lambda: not names(marked(mark)), 10)


def test_numba_takes_no_settings_from_the_current_directory(tmp_path: Path) -> None:
    """They may name a cache, whose files are pickles."""
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: evil\n")
    (tmp_path / "asks.py").write_text("def main():\n    import numba\n    print(repr(numba.config.CACHE_DIR))\n")
    code = (
        "import os, subprocess, sys; from vllm_accprobe.children import Child; "
        "print(Child('asks', stdout=subprocess.PIPE).communicate()[0].strip()); "
        "import vllm_accprobe.cli as c; c.main(['--version']); import numba; numba.config.reload_config(); "
        "print(repr(numba.config.CACHE_DIR), os.getcwd())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert [*done.stdout.splitlines()[:1], *done.stdout.splitlines()[2:]] == ["''", f"'' {os.path.realpath(tmp_path)}"]
