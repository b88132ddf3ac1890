"""The same through a folder that both machines see, where no line can be opened between them.

The problem: a shared file system has no connections, shows files half written, and keeps what a killed process left.
The idea: a batch is a numbered file of pieces and a digest, whole under its name or not there; the receiver takes them
in order, deletes what is on its disk, and says in ``have.json`` what it has. A batch that comes twice changes nothing,
one that is damaged is counted, and its sender begins again after what arrived. A sender waits while eight batches are
there. Each batch names its run by the digest of the journal's first line.

Not here: the pieces (arrivals.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from vllm_accprobe.dump.files import open_regular
from vllm_accprobe.dump.schema import JOURNAL, rank_dir
from vllm_accprobe.online import arrivals as frames
from vllm_accprobe.online.arrivals import (
    END,
    HELLO,
    PROTOCOL,
    SYNC,
    ArrivedRanks,
    FrameError,
    MirrorError,
    RankArrival,
    RankTail,
    TailError,
)
from vllm_accprobe.online.line import IDLE_S, POLL_S, NotSent, Refusals
from vllm_accprobe.whole_file import write_private

_BATCH = 4 << 20
"""Chosen: bytes after which a batch is closed."""
_MOST = 8 << 20
"""Of a batch that is taken: a batch and its last piece, with room."""
_WAITING = 8
"""Chosen: batches that may lie in the folder for one rank."""
HAVE = "have.json"
_NAME = re.compile(r"(\d{8})\.batch", re.ASCII)
_DIGEST = 16
_EMPTY: dict[str, Any] = {"journal": 0, "digest": xxhash.xxh3_128().hexdigest(), "segments": []}


def _first_line(journal: Path) -> str:
    """What tells one run's journal from another's; "" where its first line is not there."""
    try:
        with os.fdopen(open_regular(journal), "rb") as f:
            line = f.readline(1 << 20)
    except OSError:
        return ""
    return xxhash.xxh3_128_hexdigest(line) if line.endswith(b"\n") else ""


def _batches(folder: Path) -> list[int]:
    with os.scandir(folder) as entries:
        return sorted(int(m[1]) for entry in entries if (m := _NAME.fullmatch(entry.name)))


class FolderSender:
    """Sends one rank into ``shared``; the rest as sender.RankSender."""

    def __init__(
        self, dump: Path, rank: int, shared: Path, *, totals: tuple[int, int] | None, follow: bool, patience: float,
        say: Callable[[str], object], stop: threading.Event,
    ):  # fmt: skip
        self.dump, self.rank, self.totals, self.follow, self.patience = dump, rank, totals, follow, patience
        self._say, self._stop = say, stop
        self._folder = shared / rank_dir(rank)
        self.bytes = self.connections = 0
        self.tail = RankTail(dump, rank)
        self._damaged = 0

    def run(self) -> None:
        """Raises NotSent."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._send()
        except (FrameError, TailError, OSError) as error:
            raise NotSent(f"rank {self.rank}: {error}") from None

    def _send(self) -> None:
        self._begin()
        parts: list[bytes | memoryview] = []
        size, quiet = 0, time.monotonic()
        while not self._stop.is_set():
            for piece, n in self.tail.pieces():
                parts += [bytes(p) for p in piece]
                size, quiet = size + n, time.monotonic()
                if size >= _BATCH:
                    self._put(parts, size)
                    parts, size = [], 0
                if self._stop.is_set():
                    return
            if size:
                self._put(parts, size)
                parts, size = [], 0
            quiet_s = time.monotonic() - quiet
            if not self.follow or self.tail.ended or (quiet_s > IDLE_S and self.tail.abandoned()):
                self._put(frames.words(END, {"journal": self.tail.at}), 0)
                if self._taken():
                    return
                quiet = time.monotonic()
            self._stop.wait(POLL_S)

    def _begin(self) -> None:
        have = self._have()
        self._damaged = int(have.get("damaged") or 0)
        self.tail.begin({key: have.get(key, _EMPTY[key]) for key in _EMPTY})
        self._next = max(_batches(self._folder), default=int(have.get("batch", -1))) + 1

    def _have(self) -> dict[str, Any]:
        """What the receiver says. Raises NotSent where it takes no more."""
        try:
            with os.fdopen(open_regular(self._folder / HAVE), "rb") as f:
                message = frames.json_in(f.read(frames.CHUNK))
        except FileNotFoundError:
            return dict(_EMPTY)
        if message.get("refused"):
            raise NotSent(f"rank {self.rank}: the receiver refuses: {str(message['refused'])[:500]}")
        return message

    def _put(self, parts: list[Any], size: int) -> None:
        """One batch. Waits while there are many."""
        message = {"protocol": PROTOCOL, "rank": self.rank, "totals": self.totals, "run": _first_line(self.tail.path)}
        whole = b"".join([*frames.words(HELLO, message), *frames.run_piece(self.dump), *parts, frames.head(SYNC, 0)])
        since, before = time.monotonic(), -1
        while not self._stop.is_set() and len(waiting := _batches(self._folder)) >= _WAITING:
            if waiting[0] != before:
                since, before = time.monotonic(), waiting[0]
            elif time.monotonic() - since > self.patience:
                raise NotSent(f"rank {self.rank}: nobody has taken {self._folder} for {self.patience:.0f} s")
            self._stop.wait(POLL_S)
        part = self._folder / f".{self._next:08d}.part"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(fd, "wb") as f:
            f.write(whole)
            f.write(xxhash.xxh3_128_digest(whole))
            f.flush()
            os.fsync(fd)
        os.rename(part, self._folder / f"{self._next:08d}.batch")
        self._next += 1
        self.bytes += size
        have = self._have()
        if int(have.get("damaged") or 0) > self._damaged:
            self._say(f"rank {self.rank}: a batch arrived damaged: going on behind what is there")
            self._begin()

    def _taken(self) -> bool:
        """Waits until all is there; False where it has to be sent again."""
        since, before = time.monotonic(), -1
        while not self._stop.is_set():
            have = self._have()
            if have.get("done") is True and have.get("journal") == self.tail.at:
                return True
            if int(have.get("damaged") or 0) > self._damaged:
                self._begin()
                return False
            if have.get("journal") != before:
                since, before = time.monotonic(), have["journal"]
            elif time.monotonic() - since > self.patience:
                raise NotSent(f"rank {self.rank}: nobody has taken {self._folder} for {self.patience:.0f} s")
            self._stop.wait(POLL_S)
        return True


class FolderReceiver:
    """Takes the batches below ``shared`` until `close`. Raises OSError."""

    def __init__(self, shared: Path, arrivals: ArrivedRanks, say: Callable[[str], object]):
        self._shared, self.arrivals, self._say = shared, arrivals, say
        self.refusals = Refusals(say)
        self._damaged: dict[int, int] = {}
        self._refused: set[int] = set()
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._watch, name="accprobe-shared", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.arrivals.stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self.arrivals.stop.wait(POLL_S):
            try:
                with os.scandir(self._shared) as entries:
                    folders = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
                for rank in sorted(int(m[1]) for name in folders if (m := frames.RANK_FOLDER.fullmatch(name))):
                    self._rank(rank)
            except OSError as error:
                self.refusals.add(str(self._shared), error.strerror or str(error))

    def _rank(self, rank: int) -> None:
        folder = self._shared / rank_dir(rank)
        for number in _batches(folder) if rank not in self._refused else ():
            path = folder / f"{number:08d}.batch"
            arrival: RankArrival | None = None
            try:
                arrival = self._take(path, rank)
            except MirrorError as why:
                self.refusals.add(str(folder), str(why))
                self._refused.add(rank)
                self._write(folder, {**_EMPTY, "refused": str(why)})
                return
            except (FrameError, OSError) as why:
                self._damaged[rank] = self._damaged.get(rank, 0) + 1
                self.refusals.add(str(folder), f"a damaged batch: {why}")
                arrival = self.arrivals.ranks.get(rank)
            have = arrival.mirror.have() if arrival is not None else dict(_EMPTY)
            done = arrival is not None and arrival.ended
            self._write(folder, {**have, "done": done, "damaged": self._damaged.get(rank, 0), "batch": number})
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            if done and arrival is not None:
                self._say(f"rank {rank}: all is here, {arrival.mirror.nbytes / 1e6:,.1f} MB")
            self.arrivals.room()
            if self.arrivals.stop.is_set():
                return

    def _take(self, path: Path, rank: int) -> RankArrival:
        """Raises FrameError, MirrorError, OSError."""
        with os.fdopen(open_regular(path), "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if not _DIGEST < size <= _MOST:
                raise FrameError(f"it has {size:,} bytes, and at most {_MOST:,} are taken")
            whole = f.read(size)
        if xxhash.xxh3_128_digest(whole[:-_DIGEST]) != whole[-_DIGEST:]:
            raise FrameError("its digest is of other bytes")
        at = 0

        def read(n: int) -> bytes:
            nonlocal at
            at += n
            return whole[at - n : at]

        arrival: RankArrival | None = None
        for kind, body in frames.pieces(read, size - _DIGEST):
            if kind == HELLO and arrival is None:
                message = frames.json_in(body)
                if message.get("rank") != rank:
                    raise FrameError("it is of another rank than its folder")
                arrival = self.arrivals.begin(message)[1]
                arrival.mirror.drop()
                ours = _first_line(arrival.mirror.directory / JOURNAL)
                if ours and message.get("run") != ours:
                    raise MirrorError(f"this receiver holds rank {rank} of another run: give it another --out")
            elif arrival is None:
                raise FrameError("its first piece is no greeting")
            else:
                arrival.apply(kind, body)
        if arrival is None:
            raise FrameError("there is nothing in it")
        return arrival

    def _write(self, folder: Path, have: dict[str, Any]) -> None:
        write_private(folder / HAVE, json.dumps(have) + "\n")
