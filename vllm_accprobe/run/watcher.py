"""How far a capture has come, read from its growing journals.

The problem: the ranks that write are other processes, perhaps on other machines, and journals of large runs have
millions of lines. The idea: each journal is read once, from where the last look ended, and its lines are counted by
their first words without being parsed; sizes come from the file system; whether a rank still writes is read from the
lock that its writer holds. Not here: the words on the terminal (cli/run.py), reading tensors (dump/reader.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_accprobe.dump.journal_writer import lock
from vllm_accprobe.dump.schema import JOURNAL, RUN_JSON

_PIECE = 4 << 20
_PER_LOOK = 64 << 20
"""Bytes of a journal that one look reads at most: progress must not cost what capture costs."""
_MOST = 100
_RANK = re.compile(r"rank\d{4,9}", re.ASCII)
_STEP, _TENSOR, _STOP, _END = (f'{{"event":"{kind}"'.encode() for kind in ("step", "tensor", "stop", "end"))
_AGAIN = b',"graph":{"mode":"'
"""Stands in the line of a step that is written for the second time."""
_ERROR, _LABEL = (f'{{"event":"{kind}"'.encode() for kind in ("error", "label"))


@dataclass
class RankProgress:
    """One journal. tensors: lines of tensors and labels. stop: why its capture ended early. tail: a torn line."""

    path: Path
    offset: int = 0
    steps: int = 0
    tensors: int = 0
    errors: int = 0
    ended: bool = False
    stop: str = ""
    tail: bytes = b""

    def poll(self) -> None:
        """Reads on where the last look ended, a bounded piece of it, and counts lines by what they say."""
        try:
            with open(self.path, "rb") as f:
                f.seek(self.offset)
                for _ in range(_PER_LOOK // _PIECE):
                    piece = f.read(_PIECE)
                    if not piece:
                        break
                    self.offset += len(piece)
                    self._count(piece)
        except OSError:  # not there yet, or no longer
            return

    def _count(self, piece: bytes) -> None:
        whole, newline, rest = (self.tail + piece).rpartition(b"\n")
        self.tail = rest[: 1 << 20]
        if not newline:
            return
        # Inside a JSON string a quote is escaped, so these words only ever begin a line.
        self.steps += whole.count(_STEP) - whole.count(_AGAIN)
        self.tensors += whole.count(_TENSOR) + whole.count(_LABEL)
        self.errors += whole.count(_ERROR)
        self.ended = self.ended or _END in whole
        if not self.stop and _STOP in whole:
            self.stop = _reason(whole[whole.index(_STOP) :].partition(b"\n")[0])

    @property
    def writing(self) -> bool:
        """Whether its writer lives: it holds a lock on the journal until its process ends."""
        if self.ended:
            return False
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            return not lock(fd)
        finally:
            os.close(fd)


def _reason(line: bytes) -> str:
    try:
        reason = json.loads(line).get("reason", "")
    except (ValueError, AttributeError, RecursionError):
        return "unknown"
    return str(reason)[:300]


@dataclass(frozen=True)
class Progress:
    """Of all ranks together. steps: of the rank that has most; nbytes: on disk; stops: reasons, each once."""

    ranks: int = 0
    steps: int = 0
    tensors: int = 0
    errors: int = 0
    nbytes: int = 0
    ended: int = 0
    stops: tuple[str, ...] = ()


class Watcher:
    """Watches the dump that is to appear at ``root``, those next to it (``root.2``: a second engine's), and those that
    the command writes elsewhere by its own settings, which it announces in the file ``register``."""

    def __init__(self, root: Path, register: Path | None = None):
        self.root = root
        self._register = register
        self._settled: list[Path] | None = None
        # Numbers are assigned in rising order, so that the first one that is free ends the search.
        self._before = {p for n in range(2, _MOST) if (p := self._numbered(n)).exists()}
        self._ranks: dict[Path, RankProgress] = {}

    def _numbered(self, number: int) -> Path:
        return self.root.with_name(f"{self.root.name}.{number}")

    def _later(self) -> Iterator[Path]:
        for number in range(2, _MOST):
            place = self._numbered(number)
            if place not in self._before:
                if not place.is_dir():
                    return
                yield place

    def dumps(self) -> list[Path]:
        """The dumps that have appeared since this object was made."""
        if self._settled is not None:
            return self._settled
        places = [self.root, *self._later(), *self._announced()]
        found = {os.path.realpath(p): p for p in reversed(places)}.values()  # each once, however it is spelt
        return [p for p in reversed(found) if (p / RUN_JSON).exists() or any(_ranks_of(p))]

    def settle(self) -> None:
        """No further dump appears from now on, and the register may go."""
        self._settled = self.dumps()

    def _announced(self) -> list[Path]:
        if self._register is None:
            return []
        try:
            lines = self._register.read_bytes()[: 1 << 20].decode(errors="surrogateescape").splitlines()
        except OSError:
            return []
        return [Path(line) for line in lines[:_MOST] if os.path.isabs(line) and os.path.isdir(line)]

    def poll(self) -> Progress:
        """Reads what is new."""
        nbytes = 0
        for dump in self.dumps():
            for directory in _ranks_of(dump):
                journal = directory / JOURNAL
                self._ranks.setdefault(journal, RankProgress(journal)).poll()
                nbytes += _size(directory)
        ranks = list(self._ranks.values())
        return Progress(
            ranks=len(ranks),
            steps=max((r.steps for r in ranks), default=0),
            tensors=sum(r.tensors for r in ranks),
            errors=sum(r.errors for r in ranks),
            nbytes=nbytes,
            ended=sum(r.ended for r in ranks),
            stops=tuple(dict.fromkeys(r.stop for r in ranks if r.stop)),
        )

    def writing(self) -> bool:
        """Whether a rank is still to be closed by a process that lives."""
        self.poll()
        return any(r.writing for r in self._ranks.values())


def _ranks_of(dump: Path) -> list[Path]:
    try:
        return sorted(p for p in dump.iterdir() if _RANK.fullmatch(p.name) and p.is_dir())
    except OSError:
        return []


def _size(directory: Path) -> int:
    """Bytes that its files take on the disk, holes left out."""
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    s = entry.stat(follow_symlinks=False)
                    total += min(s.st_size, s.st_blocks * 512)
    except OSError:
        pass
    return total
