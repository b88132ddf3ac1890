"""What the tests of the online check have in common: dumps of many calls, both commands as processes, a line that can
be cut."""

import io
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from opcheck.layer_dumps import build
from support.forked_children import POSSIBLE, Command
from support.interrupts import in_the_foreground

from vllm_accprobe.cli import main

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "vllm_accprobe.cli", "online"]
"""As a user starts it: where a whole process is to be proven."""


def many(root: Path, calls: int, fault: str = "layers.0.norm") -> Path:
    """A dump of so many calls: one decoder layer, five calls a step, prefills and decodes in turn."""
    cycle = [[(0, 0, 9), (1, 0, 6)], *([(0, 9 + k, 1), (1, 6 + k, 1)] for k in range(10))]
    return build(root, fault, spans=tuple(cycle[k % len(cycle)] for k in range(-(-calls // 5))))


class Run:
    """One of the two commands as a process whose output is collected. anew: started as by a user."""

    def __init__(self, *words: str, anew: bool = False):
        how: dict[str, Any] = {"env": ENV, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process: subprocess.Popen[str] = (
            subprocess.Popen([*COMMAND, *words], text=True, preexec_fn=in_the_foreground, **how)
            if anew or not POSSIBLE
            else Command("online", *words, **how)
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in iter(self.process.stdout.readline, ""))

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def until(self, words: str, within: float = 60.0) -> str:
        """The first line that has ``words``."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            for line in list(self.lines):
                if words in line:
                    return line
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"{words!r} was not said, but:\n{self.said}")

    def code(self, within: float = 180.0) -> int:
        code = self.process.wait(within)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def rss_kb(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def serve(out: Path, port: int, *more: str, anew: bool = False) -> Run:
    run = Run("serve", "--port", str(port), "--out", str(out), *more, anew=anew)
    run.until("waiting for calls")
    return run


def sent(*words: str) -> tuple[int, list[str]]:
    """``online send`` to its end, in this process: its exit code, and what it said."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(["online", "send", *words])
    return code, said.getvalue().splitlines()


class Cut:
    """A line between a port of its own and ``port`` that can be cut: bytes go through as they are. At most ``rate``
    bytes a second, and none after ``until`` bytes, so that there is something left to cut."""

    def __init__(self, port: int, rate: float = 1e12):
        self.to, self.rate, self.bytes, self.until = port, rate, 0, math.inf
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.to), 5)
                except OSError:
                    near.close()
                    continue
                self._open += [near, far]
                threading.Thread(target=self._pump, args=(near, far, self.rate), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, 1e12), daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket, rate: float) -> None:
        with suppress(OSError):
            while block := a.recv(1 << 14):
                b.sendall(block)
                self.bytes += len(block)
                time.sleep(len(block) / rate)
                while self.bytes >= self.until and a in self._open:
                    time.sleep(0.01)
        self._close(a, b)

    @staticmethod
    def _close(*ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def wait_until(self, more: int) -> None:
        """Wait until ``more`` bytes went through; the line then stops."""
        self.until, end = self.bytes + more, time.monotonic() + 120
        while self.bytes < self.until:
            assert time.monotonic() < end, f"{self.until - self.bytes:,} of {more:,} bytes are missing"
            time.sleep(0.01)

    def cut(self) -> None:
        gone, self._open = self._open, []
        self._close(*gone)

    def close(self) -> None:
        self._close(self._listener)
        self.cut()


@contextmanager
def ended(*runs: Run) -> Iterator[None]:
    try:
        yield
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.kill()
