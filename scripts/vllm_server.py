"""A `vllm serve` that always ends: started on a free port, watched until it answers, stopped by SIGTERM.

Used by the demo and by the tests that need a real server. Not here: what is asked of it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

READY_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
SMALL = (
    "--served-model-name=tiny",
    "--dtype=bfloat16",
    "--max-model-len=512",
    "--max-num-seqs=8",
    "--kv-cache-memory-bytes=16M",
)
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}


class ServerError(RuntimeError):
    """The server did not come up; the message holds the end of its log."""


class Server:
    """``with Server(model, log=...) as server: ... server.url``. The process group is killed if SIGTERM is not enough.

    env: added to this process's environment. args: after ``vllm serve MODEL``, over small defaults. vllm: the command.
    ready_s, stop_s: seconds it took to answer the first time, and to end.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        vllm: Path | None = None,
    ) -> None:
        self.model, self.log, self.env, self.args = model, log, dict(env or {}), tuple(args)
        self.vllm = vllm or Path(sys.executable).parent / "vllm"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_s = self.stop_s = 0.0

    def __enter__(self) -> Server:
        begin = time.monotonic()
        command = [str(self.vllm), "serve", str(self.model), "--host=127.0.0.1"]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--port={self.port}", *SMALL, *self.args],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | ENV | self.env,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(begin)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - begin
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def _wait_until_ready(self, begin: float) -> None:
        assert self.process is not None
        while time.monotonic() - begin < READY_TIMEOUT_S:
            if self.process.poll() is not None:
                raise ServerError(f"vllm serve ended with code {self.process.returncode}\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise ServerError(f"vllm serve did not answer within {READY_TIMEOUT_S} s\n{self.tail()}")

    def stop(self) -> int | None:
        """SIGTERM, then after a minute SIGKILL to all that is left of its process group. Returns its exit code."""
        process = self.process
        if process is None:
            return None
        begin = time.monotonic()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        # The front end ends before its engine has; the engine closes the dump, so it is waited for, too.
        while time.monotonic() - begin < STOP_TIMEOUT_S and (process.poll() is None or self._anyone_left()):
            time.sleep(0.05)
        if self._anyone_left():
            os.killpg(process.pid, signal.SIGKILL)
        self.stop_s = time.monotonic() - begin
        return process.wait()

    def _anyone_left(self) -> bool:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def tail(self, lines: int = 20) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"--- end of {self.log} ---", *text[-lines:]])


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
