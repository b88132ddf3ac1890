"""A command in the background: what its words say, what its log says of its death, and that nothing of it stays."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.processes import gone, runs

from vllm_accprobe import progress
from vllm_accprobe.gate import served_run
from vllm_accprobe.gate.sending.client import NotServed, SendError, ServerLost
from vllm_accprobe.gate.served_run import ADVICE, ServedRun, ServerCommand, cause, served, server_command

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


def started(folder: Path, *words: str, stop_s: float = 60.0) -> ServedRun:
    return ServedRun("the run", ServerCommand(words), os.environ, log=folder / "log", stop_s=stop_s)


def up(run: ServedRun) -> int:
    """The pid of what it has started, once it runs."""
    end = time.monotonic() + 60
    while not (said := run.tail(1)):
        assert time.monotonic() < end
        time.sleep(0.02)
    return int(said[-1].split()[1])


def test_a_program_that_ends_by_itself(tmp_path: Path) -> None:
    with started(tmp_path, "echo hello; exit 7") as run:
        assert run.wait(30) == 7
    assert run.tail(20) == ["hello"]
    ended = rf"^x; the server ended with exit code 7: hello; read {tmp_path / 'log'}$"
    with pytest.raises(SendError, match=ended), run.reporting():
        raise SendError("x")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_what_ends_on_being_asked_has_time_to(tmp_path: Path) -> None:
    with started(tmp_path, sys.executable, "-c", POLITE) as run:
        child = up(run)
        assert run.code is None
        assert run.wait(0.1) is None
    assert (run.code, run.tail(1)) == (4, ["closed"])
    assert gone(child)


def test_what_does_not_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    with started(tmp_path, sys.executable, "-c", STUBBORN, stop_s=0.3) as run:
        child = up(run)
    assert run.code == 128 + signal.SIGKILL
    assert gone(child)


def test_ctrl_c_while_it_is_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun = subprocess.Popen, []

    def interrupted(*args: Any, **options: Any) -> Any:
        begun.append(real(*args, **options))
        if "start_new_session" in options and options.get("preexec_fn"):
            raise KeyboardInterrupt
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), started(tmp_path, "sleep", "600"):
        pass
    assert begun[-1].wait(30) == -signal.SIGTERM


def test_no_program_and_no_place(tmp_path: Path) -> None:
    with pytest.raises(NotServed, match="no-such: no such command"):
        started(tmp_path, "no-such")
    (tmp_path / "log").write_text("somebody's")
    with pytest.raises(FileExistsError), started(tmp_path, "true"):
        pass
    assert (tmp_path / "log").read_text() == "somebody's"


def test_it_ends_where_we_are_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from vllm_accprobe.gate.served_run import ServedRun, ServerCommand\n"
        f"command = ServerCommand((sys.executable, '-c', {POLITE!r}))\n"
        f"with ServedRun('the run', command, os.environ, log=Path({str(tmp_path / 'log')!r})) as run:\n"
        "    while not run.tail(1): time.sleep(0.02)\n"
        "    print(run.tail(1)[0], flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    assert runs(child)
    process.kill()
    process.wait()
    assert gone(child)


# --- while it starts, and where it dies ---


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `vllm serve` is a shell script: VLLM_SCRIPT."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\neval "$VLLM_SCRIPT"\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "MODE": "old"}


def test_settings_in_front_of_a_command(tmp_path: Path, shell: dict[str, str]) -> None:
    """The program gets them, with blanks and quotes and all; `x=1` behind it is its own word."""
    shell["VLLM_SCRIPT"] = 'echo "$MODE|$FAULT|$1 $2 $3"; exit 4'
    before, command = dict(shell), """MODE= FAULT='{"kind": "a=b"}' vllm serve x=1 --port 0"""
    said = '''ended with exit code 4 before it served: |{"kind": "a=b"}|serve x=1 --port; read '''
    with pytest.raises(NotServed, match=re.escape(said)), served("golden", command, shell, tmp_path, 20):
        pass
    assert shell == before
    with pytest.raises(NotServed, match="variables and no program"), served("golden", "MODE=1", shell, tmp_path, 20):
        pass


def test_a_start_is_not_silent_and_shows_no_key(tmp_path, shell, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PIPE_S", 0.5)
    line = "(EngineCore pid=7) INFO 11-26 21:00:00 [loader.py:1] args: s3cret"
    more = "(EngineCore pid=7) INFO 11-26 21:00:00 [loader.py:2] \treserved_cpus=[1]"
    script = f"echo '{line}'; echo '{more}'; sleep 1.7; echo 'ValueError: s3cret'; exit 1"
    shell |= {"VLLM_API_KEY": "s3cret", "VLLM_SCRIPT": script}
    quoted = r"exit code 1 before it served: ValueError: \$KEY; read"
    with pytest.raises(NotServed, match=quoted), served("golden", "vllm serve M", shell, tmp_path, 20):
        pass
    said = capsys.readouterr().err.splitlines()
    assert 2 <= len(said) <= 4
    assert re.fullmatch(r"accprobe: golden is starting: args: \$KEY \(\d s\)", said[-1])


@pytest.mark.parametrize(
    ("ends", "lost", "says"),
    [
        ("server.handle_request()\nraise RuntimeError('the device is gone')", "no answer",
         "the server ended with exit code 1: RuntimeError: the device is "),
        # vLLM's API server answers 503 for as long as its engine takes to end.
        ("print('ValueError: the engine is gone', flush=True)\nserver.serve_forever()", "500",
         "the server's log ends with: ValueError: the engine is gone; read /"),
    ],
    ids=["while it is asked", "its engine, and the server still runs"],
)  # fmt: skip
def test_a_server_that_dies(ends, lost, says, tmp_path, shell, monkeypatch):
    monkeypatch.setattr("vllm_accprobe.gate.served_run._DIES_S", 0.2 if lost == "500" else served_run._DIES_S)
    monkeypatch.setattr("vllm_accprobe.gate.served_run._STOP_S", 1.0)
    code = (
        "import sys\nfrom http.server import *\n"
        f"server = HTTPServer(('127.0.0.1', int(sys.argv[1][7:])), SimpleHTTPRequestHandler)\n{ends}"
    )
    shell["VLLM_SCRIPT"] = f'{sys.executable} -c "$CODE" "$3" {"2>/dev/null" * (lost == "500")}'
    with (
        pytest.raises(ServerLost, match=f"^{lost}; {says}"),
        served("golden", "vllm serve M", shell | {"CODE": code}, tmp_path, 30),
    ):
        raise ServerLost(lost)


CORE = "(EngineCore pid=41) ERROR 11-26 21:00:00 [core.py:1023] "
API = "(APIServer pid=40) "
NO_MODEL = "OSError: Can't load the configuration of 'm'. If you were trying to load it, it is not a local folder"
LOGS = {
    # what a log ends with -> what is quoted, a word of the advice ("" for none)
    f"{CORE}Traceback (most recent call last):\n{CORE}ValueError: No available memory for the cache blocks. Try "
    f"increasing `gpu_memory_utilization`.\n{API}Traceback:\n{API}RuntimeError: Engine core initialization failed. "
    "See root cause above. Failed core proc(s): {}\n":
        ("ValueError: No available memory for the cache blocks. Try increasing `g", "--kv-cache-memory-bytes"),
    f"{CORE}ValueError: To serve at least one request with the model's max seq len (4096), (0.5 GiB KV cache is needed"
    ", which is larger than the available KV cache memory (0.1 GiB).": ("ValueError: To serve", "--max-model-len"),
    f"{CORE}ValueError: Free memory on device cuda:0 (1.2/80.0 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 72.0 GiB).": ("ValueError: Free memory on device", "another process"),
    "(VllmWorker-0 pid=42) ERROR 11-26 21:00:00 [multiproc_executor.py:953] ValueError: Available memory on node 0 (10."
    "92/23.54 GiB) on startup is less than desired CPU memory utilization (0.99, 23.31 GiB).\nRuntimeError: Engine "
    "core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}":
        ("ValueError: Available memory on node 0", "another process"),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\nEngineDeadError: see above":
        ("torch.OutOfMemoryError: CUDA", "--max-num-seqs"),
    f"{API}OSError: [Errno 98] Address already in use\n": ("OSError: [Errno 98]", "--port"),
    f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n{API}  Value error, "
    "Invalid repository ID or local directory specified: 'm'.\n":
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value err", "config.json"),
    f"{API}{NO_MODEL}\n": ("OSError: Can't load", "config.json"),
    "usage: vllm serve\nvllm serve: error: unrecognized arguments: --fast\n":
        ("vllm serve: error: unrecognized arguments: --fast", "--help=all"),
    f"{API}INFO 11-26 21:00:01 [x.py:1] loading\nSegmentation fault\n\n": ("Segmentation fault", ""),
    f"{CORE}Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor.\n{CORE}RuntimeError: "
    f"cancelled\n{API}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\nleaked 4 instances!":
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor", "processor"),
    "ValueError: a line of\n  File 'x.py'\n    ^^^^\n": ("ValueError: a line of File 'x.py'", ""),
    "": ("", ""),
}  # fmt: skip


@pytest.mark.parametrize(("log", "quoted", "advice"), [(log, *said) for log, said in LOGS.items()])
def test_what_a_log_says_of_its_end(log: str, quoted: str, advice: str) -> None:
    found = cause(log)
    assert found.startswith(quoted)
    error, _, more = found.partition("; ")
    assert bool(more) == bool(advice)
    assert advice in more
    assert not more or more in [what for _, what in ADVICE]
    assert "\n" not in error
    assert bool(error) == bool(log)


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
    with pytest.raises(NotServed, match="--port=1, and the command says --port 2"):
        server_command(["vllm", "serve", "m", "--port", "2"], {}, 1)
    with pytest.raises(NotServed, match="--ssl-keyfile"):
        server_command(["vllm", "serve", "m", "--ssl-keyfile=x"], {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(NotServed, match="something listens on port"):
            server_command(["vllm", "serve", "m", f"--port={taken.getsockname()[1]}"], {})
