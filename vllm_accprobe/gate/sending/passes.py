"""All prompts to a server, once for each pass, so that the folder holds what the server's own batching changes.

The problem: a difference between two servers means nothing without the difference of a server from itself; and a server
that dies in the middle must not cost what was measured. The idea: the same prompts go twice, one by one and then all at
once; each pass is a queue that a few threads empty at the moments of its arrival. The first failure that is not one
prompt's stops the rest, by closing their sockets; what was answered is in the folder.
Not here: the folder's format (replies.py), which passes are forced (along.py), a command that serves (serving.py).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.sending import prompts as prompts_file
from vllm_accprobe.gate.sending import replies, steps
from vllm_accprobe.gate.sending.along import FREE, SCORE, Forcing
from vllm_accprobe.gate.sending.arrival import Arrival
from vllm_accprobe.gate.sending.client import OtherIds, Sender, SendError, ServerLost
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.ways import SCORED

_LOOK_S = 0.1
_CLOSING_S = 2.0


@dataclass(frozen=True)
class Done:
    """of: prompts in all passes; answered, refused: over all; sent: by this call; reasons: of refusals, by how many."""

    of: int
    answered: int
    refused: int
    sent: int
    reasons: dict[str, int]


def settings(sender: Sender, arrive: list[Arrival], concurrency: int, plan: Forcing = FREE) -> dict[str, Any]:
    """What must be the same where a folder is gone on with."""
    words = [a.word for a in arrive]
    how = {"top": sender.top, "max_tokens": sender.max_tokens, "arrive": words, "concurrency": concurrency}
    return how | ({"score_tokens": sender.score_tokens} if plan.score or plan.how == SCORED else {})


def send(
    sender: Sender,
    server: dict[str, Any],
    lines: list[PromptLine],
    arrive: list[Arrival],
    concurrency: int,
    out: Path,
    made: dict[str, Any],
    progress: Callable[[int], None] = lambda done: None,
    plan: Forcing = FREE,
) -> Done:
    """Sends what ``out`` does not hold yet. server: from `Sender.introduced`; made: version and time, for send.json;
    progress: told how many are done; plan: which passes are forced. Raises ServerLost and SendError with what was kept,
    FolderError, OSError."""
    arrive = [*arrive, Arrival(SCORE)] if plan.score else arrive
    about = _about(sender, server, lines, settings(sender, arrive, concurrency, plan), out, made, plan)
    done = sent = 0
    for index, arrival in enumerate(arrive):
        path = out / replies.pass_name(index)
        had = replies.answered(path)
        first = replies.read_pass(out, 0) if index else {}
        left = [line for line in plan.lines(index, arrival.word, lines, first) if line.name not in had]
        done += len(lines) - len(left)
        progress(done)
        if not left:
            continue
        if had:
            about["passes"][index]["resumed"] += 1
            replies.write_about(out, about)
        asking = replace(sender, way=plan.way(index, arrival.word))
        run = _Pass(asking, left, arrival, concurrency, index, path)
        try:
            run.go(progress, done)
        except (SendError, KeyboardInterrupt) as e:
            _count(about, out)
            if not isinstance(e, SendError) or isinstance(e, OtherIds):
                raise
            total = sum(p["answered"] + p["refused"] for p in about["passes"])
            kept = f"{total:,} of {len(lines) * len(arrive):,} answers are kept in {out}"
            raise type(e)(f"{e}; {kept}, and the same command goes on from there") from None
        finally:
            run.close()
        done += len(left)
        sent += len(left)
    reasons = _count(about, out)
    passes = about["passes"]
    return Done(
        len(lines) * len(arrive), sum(p["answered"] for p in passes), sum(p["refused"] for p in passes), sent, reasons
    )


def _about(
    sender: Sender,
    server: dict[str, Any],
    lines: list[PromptLine],
    how: dict[str, Any],
    out: Path,
    made: dict[str, Any],
    plan: Forcing,
) -> dict[str, Any]:
    """send.json of a new folder, or of one that is gone on with."""
    asked = {"count": len(lines), "sha256": prompts_file.digest(lines)}
    if replies.exists(out):
        about = replies.read_about(out)
        for what, now in (("prompts", asked), ("settings", how)):
            if about.get(what) != now:
                raise replies.FolderError(
                    f"{out} has other {what}: name another --out, or give those it was begun with"
                )
        if (was := about.get("server", {}).get("model")) != server["model"]:
            raise replies.FolderError(
                f"{out} has answers of the model {was}, this is {server['model']}: name another --out"
            )
        return about
    passes: list[dict[str, Any]] = []
    for index, word in enumerate(how["arrive"]):
        way = plan.way(index, word)
        passes.append({"arrive": word, "answered": 0, "refused": 0, "resumed": 0} | ({"forced": way} if way else {}))
    along = {"along": {"sha256": plan.golden, "how": plan.how}} if plan.golden else {}
    about = {"schema": replies.SCHEMA, **made, "url": sender.url, "server": server, "prompts": asked, "settings": how,
             **along, "passes": passes, "complete": False}  # fmt: skip
    replies.begin(out, prompts_file.to_text(lines), about)
    return about


def _count(about: dict[str, Any], out: Path) -> dict[str, int]:
    """Counts what the files hold into send.json; gives the reasons of refusals."""
    reasons: dict[str, int] = {}
    for one, found in zip(about["passes"], replies.read(out).passes, strict=True):
        refused = [r.refused for r in found.values() if r.refused is not None]
        one["answered"], one["refused"] = len(found) - len(refused), len(refused)
        for why in refused:
            reasons[why] = reasons.get(why, 0) + 1
    about["complete"] = all(p["answered"] + p["refused"] == about["prompts"]["count"] for p in about["passes"])
    replies.write_about(out, about)
    return reasons


class _Pass:
    """One pass over ``lines``: threads that take the next line at its moment."""

    def __init__(
        self, sender: Sender, lines: list[PromptLine], arrival: Arrival, concurrency: int, index: int, path: Path
    ):
        self._sender, self._lines, self._index = sender, lines, index
        self._moments = arrival.moments(len(lines))
        self._workers = 1 if arrival.alone else min(concurrency, len(lines))
        self._writer = replies.ReplyWriter(path)
        self._lock = threading.Lock()
        self._next = self._done = 0
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._open: dict[int, socket.socket] = {}

    def go(self, progress: Callable[[int], None], before: int) -> None:
        """Returns when all are answered. before: done in other passes. Raises the first failure."""
        zero = time.monotonic()
        threads = [threading.Thread(target=self._work, args=(zero,), daemon=True) for _ in range(self._workers)]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not self._stop.is_set():
                time.sleep(_LOOK_S if len(self._lines) > 1 else _LOOK_S / 10)
                progress(before + self._done)
        finally:
            self._stop.set()
            self._let_go(threads)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._writer.close()

    def _work(self, zero: float) -> None:
        while not self._stop.is_set():
            with self._lock:
                i, self._next = self._next, self._next + 1
            if i >= len(self._lines) or self._stop.wait(max(zero + self._moments[i] - time.monotonic(), 0)):
                return
            line = self._lines[i]
            try:
                reply = self._sender.ask(line, steps.request_id(line.name, self._index), self._open, zero)
                if self._stop.is_set() and reply.refused is not None:  # whoever stopped may have cut this answer off
                    return
                self._writer.add(reply)
            except BaseException as e:
                with self._lock:
                    if self._failure is None and not self._stop.is_set():
                        said = f"pass {self._index}, request {line.name}: {e}"
                        self._failure = type(e)(said) if isinstance(e, SendError) else e
                self._stop.set()
                return
            with self._lock:
                self._done += 1

    def _let_go(self, threads: list[threading.Thread]) -> None:
        """Ends the waiting of what still waits. Its answers are not looked at."""
        deadline = time.monotonic() + _CLOSING_S
        while any(t.is_alive() for t in threads) and time.monotonic() < deadline:
            for one in list(self._open.values()):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            time.sleep(_LOOK_S / 10)


__all__ = ["Done", "ServerLost", "send", "settings"]
