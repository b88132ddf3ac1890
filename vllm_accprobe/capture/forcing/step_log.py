"""A line for each engine step: which requests it computed, from where, and how many tokens.

The problem: whether a token was computed in a second chunk, in a batch of nine or after a prefix hit, only the engine
knows, and a client that sees a gap needs it for each token. The idea: a line in a file; the step itself only adds a
string to a list, a thread writes what has come together, so that a killed engine loses at most a tenth of a second.
No token ids are in it. Not here: reading it (gate/sending/steps.py), what a step is (vllm/runner.py).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from vllm_accprobe.capture.core.recording import at_exit
from vllm_accprobe.capture.core.say import say

_WAIT_S = 0.1
"""chosen: lines come together for so long; what kill -9 may cost."""


def log_name(rank: int) -> str:
    return f"steps-rank{rank}.jsonl"


class StepLog:
    """Adds lines to a file, 0600, that may have lines of an earlier engine. Raises OSError where it cannot be made."""

    def __init__(self, path: Path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._lines: list[str] = []
        self._some = threading.Event()
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._broken = False
        self._thread: threading.Thread | None = None
        at_exit(self.close)

    def add(self, step: int, requests: Sequence[tuple[str, int, int]]) -> None:
        """requests: (the client's id, tokens computed before, tokens of this step)."""
        if self._broken or self._end.is_set():
            return
        self._lines.append(json.dumps({"step": step, "requests": requests}, separators=(",", ":")) + "\n")
        if self._thread is None:  # only now: a thread would not survive a fork
            self._thread = threading.Thread(target=self._work, name="accprobe-steps", daemon=True)
            self._thread.start()
        self._some.set()

    def close(self) -> None:
        """What was added is in the file. Safe to call twice; never raises."""
        self._end.set()
        self._some.set()
        self._write()

    def _work(self) -> None:
        while not self._end.is_set():
            self._some.wait()
            self._end.wait(_WAIT_S)
            self._some.clear()
            self._write()

    def _write(self) -> None:
        with self._lock:
            taken, self._lines = self._lines, []
            left = memoryview("".join(taken).encode())
            try:
                while left and not self._broken:
                    left = left[os.write(self._file, left) :]
            except OSError as error:
                self._broken = True
                say(f"{self.path}: {error.strerror or error}: no steps are written any more; serving goes on")
