"""One receiver from its start to its table.

The problem: receiving, checking and ending meet: who ends first, what stays, who may write where. The idea: this object
holds the three, and a lock on the copy, so that two receivers never write one. Not here: each of them (receiver.py or
shared.py, checking.py), the report (cli/online.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.recorder.lines import lock
from vllm_accprobe.online.arrivals import ArrivedRanks
from vllm_accprobe.online.checking import Checking
from vllm_accprobe.online.keys import Endpoint
from vllm_accprobe.online.line.receiver import Receiver
from vllm_accprobe.online.line.tls import TlsError
from vllm_accprobe.online.shared import FolderReceiver
from vllm_accprobe.opcheck.run.whole import CheckedRun
from vllm_accprobe.opcheck.run.worker import Job

RECEIVED = "received"
_SETTLED_S = 1.0
"""Chosen: how long everything must have ended before no further rank is awaited."""


class Serving:
    """ranks: those that are taken, None for all; budget, ahead: those of ArrivedRanks; say: gets lines. Raises
    DumpError, OSError."""

    def __init__(
        self, job: Job, endpoint: Endpoint, out: Path, ranks: Sequence[int] | None, *, budget: int, ahead: int,
        say: Callable[[str], object],
    ):  # fmt: skip
        self._out, self._say = out, say
        root = Path(job.dump)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        if not lock(self._lock):
            os.close(self._lock)
            raise DumpError(f"another receiver writes into {out}: name another directory with --out")
        self.arrivals = ArrivedRanks(root, ranks, budget=budget, ahead=ahead, say=say)
        try:
            self.receiver: Receiver | FolderReceiver
            if endpoint.shared is not None:
                self.receiver = FolderReceiver(endpoint.shared, self.arrivals, say)
                say(f"waiting for calls in {endpoint.shared}")
            else:
                self.receiver = Receiver(endpoint, self.arrivals, say)
                how = "TLS, certificates on both sides" if endpoint.tls else "plain, this machine only"
                say(f"waiting for calls at {endpoint.host}:{self.receiver.port} ({how})")
        except TlsError as why:
            os.close(self._lock)
            raise DumpError(str(why)) from None
        self.checking = Checking(job, self.arrivals, say)

    def wait(self, idle: float) -> None:
        """Until all ranks have ended, or nothing came for ``idle`` seconds (0: however long), or Ctrl-C."""
        ended_since: float | None = None
        last, since = -1, time.monotonic()
        try:
            while True:
                time.sleep(0.1)
                now = time.monotonic()
                ended_since = (ended_since or now) if self.arrivals.complete() else None
                if ended_since is not None and now - ended_since >= _SETTLED_S:
                    return
                here = self.arrivals.nbytes
                if here != last or self.arrivals.busy:
                    last, since = here, now
                elif idle and now - since > idle:
                    self._say(f"nothing came for {idle:.0f} s: what is here is checked")
                    return
        except KeyboardInterrupt:
            self._say("interrupted: what is here is checked; Ctrl-C again ends at once")

    def finish(self, processes: int) -> CheckedRun | None:
        """Takes no more, and checks the rest; None where nothing came. Raises RunError, DumpError, Unavailable."""
        self.receiver.close()
        missing = sorted(set(self.arrivals.expected()) - set(self.arrivals.ended))
        if not any(r.mirror.written for r in self.arrivals.ranks.values()):
            for line in self.receiver.refusals.lines():
                self._say(line)
            return None
        for rank in missing:
            there = rank in self.arrivals.ranks
            self._say(f"rank {rank}: {'its end is not here' if there else 'nothing of it came'}")
        for line in self.receiver.refusals.lines():
            self._say(line)
        return self.checking.finish(self._out, processes)

    def close(self) -> None:
        self.receiver.close()
        self.checking.close()
        os.close(self._lock)
