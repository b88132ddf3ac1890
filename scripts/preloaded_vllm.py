"""A `vllm` command whose servers start from one process that has imported vLLM already.

The problem: a tiny server's start is imports, three times over (front end, engine, worker), 20 to 80 s on a busy
machine, and a bisection starts thirty of them. The idea: one process imports once and waits at a socket; the command
`vllm` hands it its words, environment and output, it forks, and the child is `vllm serve` as ever, engine and all;
its own processes are forked, too. For scripts on the CPU only: fork is not for processes that have a device open.

    with preloaded(folder, environ) as bin: ...  # put ``bin`` in front of PATH
    command(bin, path, program)  # ``path`` runs this Python file with its words, in a fork too
    bin / FORKED                 # runs the Python file that is its first word

What vLLM decides while it is imported is decided by ``environ``, and which accprobe it is; OMP_NUM_THREADS and what
else PYTHONPATH has are each command's own. What is done here once is tested by starts from nothing
(tests/e2e/test_run_command.py): that numba comes after vLLM's kernels, and a compiler in a step that is captured.
Not here: what is served.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORKED = "forked-python"
_CLIENT = """#!{python}
import json, os, signal, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect({path!r})
said = json.dumps([{program!r}, sys.argv[{first}:], dict(os.environ), os.getcwd()]).encode() + b"\\n"
socket.send_fds(s, [said[:1]], [0, 1, 2])
s.sendall(said[1:])
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda n, _: s.send(b"%d\\n" % n))
data = b""
while not data.endswith(b"\\n"):
    got = s.recv(64)
    if not got:
        sys.exit(1)
    data += got
sys.exit(int(data))
"""


@contextmanager
def preloaded(folder: Path, environ: Mapping[str, str], timeout: float = 300.0) -> Iterator[Path]:
    """A folder with the command `vllm`. environ: in which vLLM is imported (its log level and PYTHONPATH are read
    then)."""
    at = folder / "socket"
    bin_ = folder / "bin"
    bin_.mkdir(parents=True, exist_ok=True)
    command(bin_, bin_ / "vllm", None)
    command(bin_, bin_ / FORKED, "")
    with (folder / "preloaded.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, __file__, str(at)], env=dict(environ), stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        end = time.monotonic() + timeout
        while not at.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"vLLM was not imported; read {folder / 'preloaded.log'}")
            time.sleep(0.1)
        yield bin_
    finally:
        process.terminate()
        process.wait()
        at.unlink(missing_ok=True)


def command(bin_: Path, path: Path, program: Path | str | None) -> None:
    """Writes ``path``, a command that runs in a fork of the process whose commands are in ``bin_``: ``program``, a
    Python file, vLLM's own command where it is None, or the file that is its first word where it is empty."""
    text = _CLIENT.replace("{program!r}", "sys.argv[1]" if program == "" else repr(str(program) if program else None))
    at, first = str(bin_.parent / "socket"), 2 if program == "" else 1
    path.write_text(text.format(python=sys.executable, path=at, first=first))
    path.chmod(0o700)


def _forked_only() -> None:
    """multiprocessing's contexts are all fork, whatever a platform sets."""
    import multiprocessing

    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]


def _load() -> None:
    """What a server imports, and what each would do anew: vLLM's kernels for a CPU, the compiled count of ranks, the
    compiled sums of the probe."""
    import gc
    import importlib

    import torch

    for name in (
        "vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu.model_runner", "vllm.v1.executor.multiproc_executor",
        "vllm.model_executor.models.qwen2", "vllm.v1.attention.backends.cpu_attn", "vllm.v1.engine.async_llm",
        "vllm.entrypoints.openai.api_server", "vllm.model_executor.model_loader.default_loader",
        "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.core.sched.scheduler", "vllm.renderers.hf",
        "vllm.model_executor.layers.quantization.online.base", "compressed_tensors",
        "vllm.entrypoints.launchers.api_server.routers", "vllm.entrypoints.launchers.run_batch",
        "vllm.entrypoints.serve.profile.api_router", "vllm.entrypoints.openai.responses.api_router",
        "vllm.entrypoints.anthropic.api_router", "vllm.entrypoints.serve.tokenize.api_router",
        "vllm.entrypoints.generate.structured_decisions.api_router", "model_hosting_container_standards.sagemaker",
        "uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto",
    ):  # fmt: skip
        try:
            importlib.import_module(name)
        except ImportError as e:
            print(f"not preloaded: {name}: {e}", flush=True)
    try:
        from vllm.platforms import current_platform
        from vllm.v1.sample.ops.logprobs import batched_count_greater_than

        from vllm_accprobe.dump.stats import warm_up

        # Each engine of vLLM 0.32 walks over all that modules have, half a second, and fails at llvmlite's library.
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        warm_up()
        with torch.inference_mode():
            for vocabulary in (512, 640):  # the second makes it one for all
                values = [torch.zeros(2, n) for n in (vocabulary, 1)]
                for one in values:
                    torch._dynamo.decorators.mark_unbacked(one, 0)
                batched_count_greater_than(*values)
    except Exception as e:
        print(f"not compiled: {type(e).__name__}: {e}", flush=True)
    gc.collect()
    gc.freeze()


def _serve(at: str) -> None:
    _forked_only()
    _load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(at + ".part")
    listener.listen()
    os.rename(at + ".part", at)
    listener.settimeout(1.0)
    parent = os.getppid()
    while os.getppid() == parent:  # a script that was killed leaves nothing behind
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        client.setblocking(True)
        if os.fork() == 0:
            listener.close()
            _one(client)
        client.close()


def _one(client: socket.socket) -> None:
    """Between the zygote and the command: hands the client's signals on, and tells it how the command ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    first, fds, _, _ = socket.recv_fds(client, 1, 3)
    data = first
    while not data.endswith(b"\n"):
        data += client.recv(1 << 16)
    program, words, environ, where = json.loads(data)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for n, fd in enumerate(fds):
            os.dup2(fd, n)
        client.close()
        os.chdir(where)
        os.environ.clear()
        os.environ.update(environ)
        _run(program, words)
    client.setblocking(False)
    code: int | None = None
    parent = os.getppid()
    while code is None:
        if os.getppid() != parent:  # the script was interrupted: no engine is left behind
            os.killpg(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        try:
            said: Any = client.recv(64)
            if said:
                os.kill(pid, int(said.split()[0]))
            else:  # the command was killed: so is what it stands for
                os.killpg(pid, signal.SIGKILL)
        except (BlockingIOError, ProcessLookupError):
            pass
        time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    client.setblocking(True)
    try:
        client.sendall(b"%d\n" % (code if code >= 0 else 128 - code))
    except OSError:
        pass
    os._exit(0)


def _run(program: str | None, words: list[str]) -> None:
    import runpy

    import torch

    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    code = 1
    try:
        if program:
            sys.argv = [program, *words]
            runpy.run_path(program, run_name="__main__")
        else:
            from vllm.entrypoints.cli.main import main

            sys.argv = ["vllm", *words]
            main()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
