"""One receiver from its start to its table, and the process that checks meanwhile.

The problem: a kernel may crash the process that runs it, a round over nothing new is wasted, and senders must wait when
the checks do not keep up. The idea: the rounds run in a child (live.py); a thread starts the next when there is more,
no sooner than four times as long after the last one as opening the copy took; what was there when a round began counts
as checked when it ends. If the child dies or its rows are not those of the whole, opcheck makes the table from the
copy. A lock on the copy keeps two receivers from writing one.

Not here: the copy (arrivals.py), how pieces come (connection.py, shared.py), the report (cli/online.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_accprobe.children import ONE_THREAD, Child
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal_writer import lock
from vllm_accprobe.online.arrivals import ArrivedRanks
from vllm_accprobe.online.connection import Receiver, TlsError, secured
from vllm_accprobe.online.keys import Endpoint
from vllm_accprobe.online.shared import FolderReceiver
from vllm_accprobe.opcheck.run import process_pool
from vllm_accprobe.opcheck.run.job import Job
from vllm_accprobe.opcheck.run.process_pool import CheckedRun
from vllm_accprobe.opcheck.run.result_row import CheckResult
from vllm_accprobe.opcheck.run.table import COLUMNS, cells
from vllm_accprobe.whole_file import GrowingCsv

_PAUSE = 4.0
"""Chosen: opening the copy takes at most a fifth of the time."""
_POLL_S = 0.05
_SAID = 10
"""Chosen: failing taps that are named at once; the report names all."""


class Checking:
    """job: its dump is where ``arrivals`` grows; say: gets lines."""

    def __init__(self, job: Job, arrivals: ArrivedRanks, say: Callable[[str], object]):
        self.job, self._arrivals, self._say = job, arrivals, say
        self.calls = 0
        self._child: Child | None = None
        self._given_up = ""
        self._totals: tuple[int, int] | None = None
        self._failed: set[tuple[int, str]] = set()
        self._looked_at = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accprobe-checking", daemon=True)
        self._thread.start()

    def finish(self, out: Path, processes: int) -> CheckedRun:
        """Checks the rest and leaves out/opcheck.csv. Raises RunError, DumpError, OSError, Unavailable."""
        self._stop.set()
        self._thread.join()
        self._arrivals.busy = False
        rows: CheckedRun | None = None
        try:
            if not self._given_up:
                self._look()
                rows = self._table(out)
        finally:
            self._end()
        if rows is not None:
            return rows
        self._say(f"{self._given_up}: opcheck goes over all of it")
        return process_pool.run(self.job, out, processes=processes, resume=False)

    def _run(self) -> None:
        rest = 0.0
        while not self._stop.wait(max(rest, _POLL_S)):
            rest = 0.0
            if not self._given_up and self._arrivals.ranks and self._new():
                rest = self._look() * _PAUSE

    def _new(self) -> bool:
        return sum(r.mirror.written for r in list(self._arrivals.ranks.values())) != self._looked_at

    def _look(self) -> float:
        """One round; how many seconds it took to open the copy."""
        arrivals = self._arrivals
        expected = arrivals.expected()
        if self._child is None:
            ready = all(r in arrivals.ranks and arrivals.ranks[r].mirror.written for r in expected)
            if not expected or (not ready and not self._stop.is_set()):
                return 0.0
            self._begin()
        here, self._looked_at = arrivals.nbytes, sum(r.mirror.written for r in list(arrivals.ranks.values()))
        arrivals.busy = True
        opened = 0.0
        try:
            known = sorted(set(expected) & set(arrivals.ranks)) if self._stop.is_set() else expected
            for message in self._ask({"look": known, "ended": arrivals.ended}, "looked"):
                if "fail" in message:
                    self._fails(*message["fail"])
                elif "looked" in message:
                    self.calls, opened = message["looked"], message["opened"]
        finally:
            arrivals.busy, arrivals.checked_bytes = False, here
        return opened

    def _begin(self) -> None:
        self._totals = self._arrivals.totals()
        self._child = Child(
            "vllm_accprobe.online.live", env={**os.environ, **ONE_THREAD}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        for _ in self._ask({"job": self.job.to_json(), "totals": self._totals}, "ready"):
            pass

    def _ask(self, message: dict[str, Any], last: str) -> Iterator[dict[str, Any]]:
        """The child's answers, to the one that has ``last``; none where it dies, which ends the checks as they come."""
        child = self._child
        if child is None or child.stdin is None or child.stdout is None or self._given_up:
            return
        try:
            child.stdin.write(json.dumps(message) + "\n")
            child.stdin.flush()
            while (line := child.stdout.readline()).endswith("\n"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    self._given_up = f"the checks as they come ended ({answer['error']})"
                    return
                yield answer
                if last in answer or "unsettled" in answer:
                    return
        except (OSError, ValueError):
            pass
        self._given_up = f"the process that checks ended with code {child.wait()}"

    def _fails(self, rank: int, step: int | None, tap: str, cls: str, role: str, why: str) -> None:
        if (rank, tap) in self._failed:
            return
        self._failed.add((rank, tap))
        if len(self._failed) <= _SAID:
            self._say(f"rank {rank}, step {step}: {tap}  {cls}  {role}: {why}")
        elif len(self._failed) == _SAID + 1:
            self._say("further operators fail, too; the report names them")

    def _table(self, out: Path) -> CheckedRun | None:
        """The child's rows as opcheck.csv; None where it cannot vouch for them."""
        out.mkdir(parents=True, exist_ok=True)
        found, done = CheckedRun(), False
        part = out / process_pool.PART
        with contextlib.closing(GrowingCsv(out / process_pool.DONE, part)) as file:
            file.begin(COLUMNS)
            begun = time.monotonic()
            for message in self._ask({"finish": True}, "finished"):
                if "row" in message:
                    row = CheckResult.of_plain(message["row"])
                    file.add([cells(row)], flush=False)
                    found.rows.append(replace(row, measures=None, left=()))
                elif "unsettled" in message:
                    self._given_up = str(message["unsettled"])
                elif "finished" in message:
                    done, again = True, message["finished"]
                    found.problems = list(message["problems"])
                    took = time.monotonic() - begun
                    self._say(f"{self.calls:,} calls were checked as they came; {again:,} taps once more, with all "
                              f"that came later, in {took:.1f} s")  # fmt: skip
            if done:
                file.finish()
                found.lost = file.lost
        if not done:
            part.unlink(missing_ok=True)
            self._given_up = self._given_up or "the process that checks has gone"
            return None
        (out / process_pool.SETTINGS).unlink(missing_ok=True)
        return found

    def close(self) -> None:
        self._stop.set()
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()


RECEIVED = "received"
_SETTLED_S = 1.0
"""Chosen: how long everything must have ended before no further rank is awaited."""


class Serving:
    """ranks: those that are taken, None for all; budget, ahead: those of ArrivedRanks; say: gets lines. Raises
    DumpError, TlsError, OSError."""

    def __init__(
        self, job: Job, endpoint: Endpoint, out: Path, ranks: Sequence[int] | None, *, budget: int, ahead: int,
        say: Callable[[str], object],
    ):  # fmt: skip
        self._out, self._say = out, say
        if endpoint.shared is None:
            secured(endpoint)  # before anything is written
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
        except TlsError:
            os.close(self._lock)
            raise
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
