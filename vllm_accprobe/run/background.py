"""A command that runs beside us until it has done its work, and then ends, whatever happens here.

The problem: a server never ends by itself, its engine outlives its front end by the seconds in which a dump is closed,
and whoever started it may be killed meanwhile. The idea: a context in which the command runs in a session of its own,
with a log of its own and no terminal; at the context's end it gets SIGTERM, its whole group time to follow, and what is
left then SIGKILL. A guard (launcher.py) ends it where we are killed ourselves.
Not here: commands that keep the terminal (launcher.py); what is asked of a server (doctor/graphs/asking.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from vllm_accprobe.run.launcher import Guard, command_line

_STOP_S = 60.0
"""chosen: what an engine may take to close its dump and free its device."""
_LOOK_S = 0.1
_TAIL = 1 << 16


class Background:
    """``with Background(words, environ, log=...) as command:``; the command's output goes to ``log``, a new file.

    Raises LaunchError where there is no such program, OSError where ``log`` cannot be made.
    """

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], *, log: Path, stop_s: float = _STOP_S):
        self.log = log
        self._argv = command_line(words, environ)
        self._environ = dict(environ)
        self._stop_s = stop_s
        self._guard: Guard | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Background:
        fd = os.open(self.log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._guard = guard = Guard()
        try:
            self._process = subprocess.Popen(
                self._argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=fd, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=lambda: guard.watch(-os.getpid()),
            )  # fmt: skip
        except BaseException:
            guard.dismiss()
            raise
        finally:
            os.close(fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end()
        finally:
            if self._guard is not None:
                self._guard.dismiss()

    @property
    def code(self) -> int | None:
        """Its exit code, 128 + n where signal n ended it; None while it runs."""
        code = None if self._process is None else self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self, timeout: float) -> int | None:
        """Its exit code, or None where it still runs after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while self.code is None and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.code

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines of its log."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + self._stop_s
        try:
            # The front end ends before its engine has; the engine closes the dump.
            while (process.poll() is None or self._anybody_left()) and time.monotonic() < end:
                time.sleep(_LOOK_S)
        finally:  # also where somebody insists
            if self._anybody_left():
                self._to_group(signal.SIGKILL)
            process.wait()

    def _anybody_left(self) -> bool:
        return self._to_group(0)

    def _to_group(self, number: int) -> bool:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True
