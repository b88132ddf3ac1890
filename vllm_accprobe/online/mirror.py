"""What has arrived of one rank: the sender's dump again, file by file, which is also the record of what is here.

The problem: a line breaks, a receiver is killed, and nothing may be lost or be there twice. The idea: no second record
that could disagree with the first: a rank's journal and segments grow here by the bytes by which they grew there, each
piece says where it belongs, and what a receiver has is the length of its files. A piece that is here already is left
out, one that would leave a gap is refused. At a SYNC the payloads go to the disk before the journal's lines that name
them, so that every line that is here can be read after any kill. The files are a dump, which everything else reads as
any other. Not here: who sends (tail.py), checks (live.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import xxhash

from vllm_accprobe.dump.schema import JOURNAL, RUN_JSON, rank_dir
from vllm_accprobe.dump.segment import HEADER_BYTES, part_name, write_all
from vllm_accprobe.online.frames import CHUNK, MOST_SEGMENTS, FrameError
from vllm_accprobe.whole_file import write_private

_PENDING = 8 << 20
"""Chosen: bytes of journal that wait for their SYNC, at most."""
_SEGMENT = re.compile(r"seg-(\d{5,9})\.safetensors\.part", re.ASCII)
_sync = getattr(os, "fdatasync", os.fsync)


class MirrorError(Exception):
    """One line: why nothing more of this rank is taken."""


class RankMirror:
    """The files of one rank below ``root``. budget: bytes that they may have. Raises OSError, MirrorError."""

    def __init__(self, root: Path, rank: int, budget: int):
        self.rank, self.budget = rank, budget
        self.directory = root / rank_dir(rank)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._journal = _opened(self.directory / JOURNAL)
        self.written = os.fstat(self._journal).st_size
        self._hash = xxhash.xxh3_128()
        _add(self._hash, self._journal, self.written)
        self._pending = bytearray()
        self._files: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        for entry in os.scandir(self.directory):
            match = _SEGMENT.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                self.segments[int(match[1])] = max(entry.stat(follow_symlinks=False).st_size - HEADER_BYTES, 0)

    @property
    def journal_bytes(self) -> int:
        """Of the journal, those that wait for a SYNC too."""
        return self.written + len(self._pending)

    @property
    def waits(self) -> bool:
        """Whether something waits for a SYNC."""
        return bool(self._pending)

    @property
    def nbytes(self) -> int:
        return self.journal_bytes + sum(self.segments.values())

    def have(self) -> dict[str, Any]:
        """What WELCOME says: the journal's length, its digest (XXH3-128), and the length of each segment's data."""
        segments = sorted(self.segments.items())
        return {"journal": self.written, "digest": self._hash.hexdigest(), "segments": [list(s) for s in segments]}

    def data(self, segment: int, offset: int, body: memoryview) -> None:
        """Bytes of a segment's data. Raises FrameError, MirrorError, OSError."""
        here = self.segments.get(segment, 0)
        body = _new(body, offset, here, f"segment {segment}")
        if not len(body):
            return
        if segment >= MOST_SEGMENTS:
            raise FrameError(f"segment {segment} is beyond all that a rank may have")
        self._room(len(body))
        if segment not in self._files:
            fd = self._files[segment] = _opened(self.directory / part_name(segment))
            write_all(fd, (HEADER_BYTES - 8).to_bytes(8, "little"), 0)
        write_all(self._files[segment], body, HEADER_BYTES + here)
        self.segments[segment] = here + len(body)

    def journal(self, offset: int, body: memoryview) -> None:
        """Bytes of the journal; they count from the next SYNC on. Raises FrameError, MirrorError."""
        body = _new(body, offset, self.journal_bytes, "the journal")
        self._room(len(body))
        if len(self._pending) + len(body) > _PENDING:
            raise FrameError("too much of a journal without a SYNC")
        self._pending += body

    def sync(self) -> int:
        """Puts all that came on the disk; the journal's length then. Raises OSError."""
        for fd in self._files.values():
            _sync(fd)
        if self._pending:
            write_all(self._journal, bytes(self._pending), self.written)
            _sync(self._journal)
            self._hash.update(self._pending)
            self.written += len(self._pending)
            self._pending.clear()
        while len(self._files) > 2:  # a rank fills one segment after the other
            os.close(self._files.pop(min(self._files)))
        return self.written

    def drop(self) -> None:
        """What waits for a SYNC is let go: it will be sent again."""
        self._pending.clear()

    def close(self) -> None:
        self.drop()
        for fd in (*self._files.values(), self._journal):
            os.close(fd)
        self._files.clear()

    def _room(self, n: int) -> None:
        if self.nbytes + n > self.budget:
            raise MirrorError(f"the receiver's budget of {self.budget / 1e9:.3g} GB for a rank is spent (--max-gb)")


def keep_run(root: Path, text: bytes) -> None:
    """run.json, whole or not at all. Raises OSError, FrameError."""
    try:
        write_private(root / RUN_JSON, text.decode())
    except UnicodeDecodeError:
        raise FrameError("run.json is no text") from None


def digest_of(path: Path, length: int) -> str | None:
    """XXH3-128 of a file's first bytes; None where it is shorter. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        found = xxhash.xxh3_128()
        return found.hexdigest() if _add(found, fd, length) else None
    finally:
        os.close(fd)


def _add(hasher: Any, fd: int, length: int) -> bool:
    at = 0
    while at < length:
        block = os.pread(fd, min(CHUNK, length - at), at)
        if not block:
            return False
        hasher.update(block)
        at += len(block)
    return True


def _new(body: memoryview, offset: int, here: int, what: str) -> memoryview:
    """The bytes that are not here yet. Raises FrameError for a gap."""
    if offset > here:
        raise FrameError(f"{what} goes on at byte {offset:,}, where {here:,} are here")
    return body[here - offset :]


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
