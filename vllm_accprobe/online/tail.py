"""One rank of a dump, read from where the receiver stands, while it may still be written.

The problem: a journal grows line by line, its payloads lie in segments that are renamed when they are full, and the
process that writes must not notice that it is read. The idea: whole lines are read from where the receiver's journal
ends; the bytes that they name, which are on the disk before them, go first. Nothing is remembered here that the
receiver's answer does not say. Not here: the way there (sender.py, shared.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from vllm_accprobe.dump.files import MAX_LINE, DumpError, find_segment, open_regular
from vllm_accprobe.dump.recorder.lines import lock
from vllm_accprobe.dump.schema import JOURNAL as JOURNAL_NAME
from vllm_accprobe.dump.schema import rank_dir
from vllm_accprobe.online.frames import CHUNK, DATA, JOURNAL, MOST_SEGMENTS, FrameError, number, placed
from vllm_accprobe.online.mirror import digest_of

_AT_ONCE = 64 << 10
"""Chosen: bytes of journal whose payloads are sent together."""
Piece = list[bytes | memoryview]


class TailError(Exception):
    """One line: why this rank cannot be sent."""


class RankTail:
    """Rank ``rank`` of the dump at ``root``. Raises TailError where it has no journal."""

    def __init__(self, root: Path, rank: int):
        self.rank, self.directory = rank, root / rank_dir(rank)
        self.path = self.directory / JOURNAL_NAME
        try:
            self._journal = open_regular(self.path)
        except OSError as error:
            raise TailError(f"{self.path} cannot be read: {error.strerror or error}") from None
        self.at = 0
        self.ended = False
        """The journal's last line has been read, or sent before."""
        self.lines = 0
        self._sent: dict[int, int] = {}

    def begin(self, have: Mapping[str, Any]) -> None:
        """Goes on behind what the receiver has. Raises TailError where that is of another run, FrameError where it is
        no answer."""
        at = number(have, "journal", 1 << 50)
        if digest_of(self.path, at) != have.get("digest"):
            raise TailError(f"the receiver holds rank {self.rank} of another run: give it another --out")
        held = have.get("segments")
        if not isinstance(held, list) or len(held) > MOST_SEGMENTS:
            raise FrameError("it does not say which segments it has")
        sent: dict[int, int] = {}
        for pair in held:
            if not isinstance(pair, list) or len(pair) != 2 or any(type(n) is not int or n < 0 for n in pair):
                raise FrameError("it does not say which segments it has")
            sent[pair[0]] = pair[1]
        self.at, self._sent, self.ended = at, sent, self._ended_before(at)

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """What there is now, to the last whole line: pieces, each with how many bytes it has. Raises OSError,
        TailError."""
        while chunk := self._lines():
            need: dict[int, int] = {}
            for line in chunk.splitlines():
                self._look(line, need)
            for segment, stop in sorted(need.items()):
                yield from self._data(segment, stop)
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK):
                part = view[start : start + CHUNK]
                yield placed(JOURNAL, 0, self.at, part), len(part)
                self.at += len(part)

    def abandoned(self) -> bool:
        """Whether nobody writes this journal any more: its writer holds a lock on it until it ends. Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return lock(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self._journal)

    def _lines(self) -> bytes:
        """The next whole lines, b"" where there is none."""
        size = _AT_ONCE
        while True:
            block = os.pread(self._journal, size, self.at)
            end = block.rfind(b"\n") + 1
            if end or len(block) < size:
                return block[:end]
            if size > MAX_LINE:
                raise TailError(f"{self.path} has a line of more than {MAX_LINE >> 20} MiB")
            size *= 4

    def _look(self, line: bytes, need: dict[int, int]) -> None:
        """Notes the bytes that a line names. A line that nobody understands names none; the receiver counts it."""
        self.lines += 1
        try:
            e = orjson.loads(line)
        except ValueError:
            return
        if not isinstance(e, dict):
            return
        self.ended = self.ended or e.get("event") == "end"
        segment, off, nbytes = e.get("seg"), e.get("off"), e.get("nbytes")
        if type(segment) is int and type(off) is int and type(nbytes) is int and min(segment, off, nbytes) >= 0:
            need[segment] = max(need.get(segment, 0), off + nbytes)

    def _data(self, segment: int, stop: int) -> Iterator[tuple[Piece, int]]:
        at = self._sent.get(segment, 0)
        if at >= stop or segment >= MOST_SEGMENTS:
            return
        try:
            data = find_segment(self.directory, segment)
            fd = open_regular(data.path)
        except (DumpError, OSError):
            return  # the payloads are lost: whoever opens the copy says so of each
        try:
            while at < min(stop, data.size):
                block = os.pread(fd, min(CHUNK, stop - at), data.start + at)
                if not block:
                    break
                yield placed(DATA, segment, at, block), len(block)
                at = self._sent[segment] = at + len(block)
        finally:
            os.close(fd)

    def _ended_before(self, at: int) -> bool:
        if not at:
            return False
        start = max(at - _AT_ONCE, 0)
        lines = os.pread(self._journal, at - start, start).splitlines()
        need: dict[int, int] = {}
        self.ended, before = False, self.lines
        for line in lines:
            self._look(line, need)
        self.lines = before
        return self.ended
