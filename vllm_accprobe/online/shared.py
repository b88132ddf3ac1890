"""The same through a folder that both machines see, where no line can be opened between them.

The problem: a shared file system has no connections, shows files half written, and keeps what a killed process left.
The idea: a batch is a numbered file of pieces and a digest, whole under its name or not there; the receiver takes them
in order, deletes what is on its disk, and says in ``have.json`` what it has. A batch that comes twice changes nothing,
one that is damaged is counted, and is to its sender a line that broke. Each batch names its run by the digest of the
journal's first line.

Not here: the pieces (arrivals.py), when a sender waits (sending.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import xxhash

from vllm_accprobe.dump.decode import Count
from vllm_accprobe.dump.files import open_regular
from vllm_accprobe.dump.schema import JOURNAL, rank_dir
from vllm_accprobe.online import arrivals as frames
from vllm_accprobe.online.connection import Broken, NotSent, Refusals
from vllm_accprobe.whole_file import write_private

_MOST = 8 << 20
"""Of a batch that is taken: a batch and its last piece, with room."""
HAVE_FILE = "have.json"
POLL_S = 0.05
_NAME = re.compile(r"(\d{8})\.batch", re.ASCII)
_DIGEST = 16


@dataclass(frozen=True)
class FolderHave(frames.Have):
    """have.json. done: all of the rank is here. damaged: how many batches; batch: the last that was taken; refused: why
    no more is taken."""

    done: bool = False
    damaged: Count = 0
    batch: int = -1
    refused: str = ""


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


def _have(folder: Path) -> FolderHave:
    """What the receiver says. Raises FrameError, OSError."""
    try:
        with os.fdopen(open_regular(folder / HAVE_FILE), "rb") as f:
            return frames.said_in(FolderHave, f.read(frames.CHUNK))
    except FileNotFoundError:
        return FolderHave()


class FolderWire:
    """The sender's end, used as line.Wire. What is sent up to a SYNC or END is one batch, after the HELLO and the
    run.json that were sent first; the answer is what the receiver says once it has taken that batch. journal: of the
    rank that is sent; patience: seconds in which nothing is taken. Raises NotSent, FrameError, OSError."""

    def __init__(self, shared: Path, rank: int, journal: Path, patience: float, stop: threading.Event):
        self._rank, self._journal, self._patience, self._stop = rank, journal, patience, stop
        self._folder = shared / rank_dir(rank)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hello = frames.Hello(rank)
        self._run: list[Any] = []
        self._parts: list[Any] = []
        self._sent: deque[int] = deque()
        have = _have(self._folder)
        self._damaged = have.damaged
        self._next = max(_batches(self._folder), default=have.batch) + 1

    def send(self, parts: Sequence[Any], within: float = 0.0) -> None:
        """Whole pieces, of one kind."""
        kind = frames.length_of(bytes(parts[0][: frames.HEAD.size]))[0] if parts else frames.RUN
        if kind == frames.HELLO:
            self._hello = frames.said_in(frames.Hello, parts[1])
        elif kind == frames.RUN:
            self._run = list(parts)
        else:
            self._parts += [bytes(p) for p in parts]
        if kind in (frames.SYNC, frames.END):
            self._put()

    def receive(self, within: float) -> tuple[int, bytes | bytearray]:
        """WELCOME before a batch is sent, then HAVE for each; REFUSED. Raises Broken for a batch that was damaged."""
        since, before = time.monotonic(), -1
        while not self._stop.is_set():
            have = _have(self._folder)
            if have.refused:
                return frames.REFUSED, orjson.dumps(frames.Refusal(have.refused))
            if not self._sent:
                return frames.WELCOME, orjson.dumps(frames.Have(have.journal, have.digest, have.segments))
            if have.damaged > self._damaged:
                raise Broken("a batch arrived damaged")
            if (taken := have.batch) >= self._sent[0]:
                self._sent.popleft()
                return frames.HAVE, b"{}"
            if taken != before:
                since, before = time.monotonic(), taken
            elif time.monotonic() - since > self._patience:
                raise NotSent(f"rank {self._rank}: {self._folder} was not taken for {self._patience:.0f} s")
            self._stop.wait(POLL_S)
        return frames.HAVE, b"{}"

    def close(self) -> None:
        """There is nothing that is open."""

    cut = close

    def _put(self) -> None:
        hello = replace(self._hello, run=_first_line(self._journal))
        batch = b"".join([*frames.words(frames.HELLO, hello), *self._run, *self._parts])
        write_private(self._folder / f"{self._next:08d}.batch", batch + xxhash.xxh3_128_digest(batch), sync=True)
        self._sent.append(self._next)
        self._next += 1
        self._parts.clear()


class FolderReceiver:
    """Takes the batches below ``shared`` until `close`. Raises OSError."""

    def __init__(self, shared: Path, arrivals: frames.ArrivedRanks, say: Callable[[str], object]):
        self._shared, self.arrivals, self._say = shared, arrivals, say
        self.refusals = Refusals(say)
        self._damaged: dict[int, int] = {}
        self._refused: set[int] = set()
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        for rank in self._ranks():  # what another receiver refused, this one may take
            with contextlib.suppress(OSError, frames.FrameError):
                if _have(shared / rank_dir(rank)).refused:
                    (shared / rank_dir(rank) / HAVE_FILE).unlink()
        self._thread = threading.Thread(target=self._watch, name="accprobe-shared", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.arrivals.stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self.arrivals.stop.wait(POLL_S):
            try:
                for rank in self._ranks():
                    self._rank(rank)
            except OSError as error:
                self.refusals.add(str(self._shared), error.strerror or str(error))

    def _ranks(self) -> list[int]:
        """Whose folders are there. A link may lead anywhere, and what is in a folder is written and deleted."""
        with os.scandir(self._shared) as entries:
            folders = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        return sorted(int(m[1]) for name in folders if (m := frames.RANK_FOLDER.fullmatch(name)))

    def _rank(self, rank: int) -> None:
        folder = self._shared / rank_dir(rank)
        for number in _batches(folder) if rank not in self._refused else ():
            path = folder / f"{number:08d}.batch"
            arrival: frames.RankArrival | None = None
            try:
                arrival = self._take(path, rank)
            except frames.MirrorError as why:
                self.refusals.add(str(folder), str(why))
                self._refused.add(rank)
                self._write(folder, FolderHave(refused=str(why)))
                return
            except (frames.FrameError, OSError) as why:
                self._damaged[rank] = self._damaged.get(rank, 0) + 1
                self.refusals.add(str(folder), f"a damaged batch: {why}")
                arrival = self.arrivals.ranks.get(rank)
            have = arrival.mirror.have() if arrival is not None else frames.Have()
            done, damaged = arrival is not None and arrival.ended, self._damaged.get(rank, 0)
            self._write(folder, FolderHave(have.journal, have.digest, have.segments, done, damaged, number))
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            if done and arrival is not None:
                self._say(f"rank {rank}: all is here, {arrival.mirror.nbytes / 1e6:,.1f} MB")
            self.arrivals.room()
            if self.arrivals.stop.is_set():
                return

    def _take(self, path: Path, rank: int) -> frames.RankArrival:
        """Raises FrameError, MirrorError, OSError."""
        with os.fdopen(open_regular(path), "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if not _DIGEST < size <= _MOST:
                raise frames.FrameError(f"it has {size:,} bytes, and at most {_MOST:,} are taken")
            whole = f.read(size)
        if xxhash.xxh3_128_digest(whole[:-_DIGEST]) != whole[-_DIGEST:]:
            raise frames.FrameError("its digest is of other bytes")
        arrival: frames.RankArrival | None = None
        for kind, body in frames.pieces(io.BytesIO(whole).read, size - _DIGEST):
            if kind == frames.HELLO and arrival is None:
                hello = frames.said_in(frames.Hello, body)
                if hello.rank != rank:
                    raise frames.FrameError("it is of another rank than its folder")
                arrival = self.arrivals.begin(hello)
                arrival.mirror.drop()
                ours = _first_line(arrival.mirror.directory / JOURNAL)
                if ours and hello.run != ours:
                    raise frames.MirrorError(f"this receiver holds rank {rank} of another run: give it another --out")
            elif arrival is None:
                raise frames.FrameError("its first piece is no greeting")
            else:
                arrival.apply(kind, body)
        if arrival is None:
            raise frames.FrameError("there is nothing in it")
        return arrival

    def _write(self, folder: Path, have: FolderHave) -> None:
        write_private(folder / HAVE_FILE, orjson.dumps(have).decode() + "\n")
