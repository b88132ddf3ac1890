"""A comparison that was interrupted goes on where it stopped.

The problem: comparing a terabyte takes an hour, and a lost connection should not cost it. The idea: units that are
measured are appended to a file beside the results; the same command finds them there again. The file begins with what
the results depend on (both dumps' journals and segments by name, size and time, the choice of taps, the release); if
any of it differs the file begins anew. It is removed when the results are written. What is done within a few seconds
is not worth a file: it is written down only where it takes longer, or ends early.
Not here: how units become bytes (wire.py).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.store import wire
from vllm_accprobe.judge.flow import Key

NAME = "measured.part"
PATIENCE = 2.0
"""Seconds before anything is written."""
PIECE = 4 << 20
"""Bytes of row tables that are packed together, or more where one unit has more."""


def identity(dumps: Sequence[Any], *choices: Any) -> str:
    """A hash of everything that measured units depend on. choices: plain values or text."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = version("vllm-accprobe")
    except PackageNotFoundError:
        release = "?"
    files = []
    for dump in dumps:
        root = Path(dump.path)
        files.append([str(root.resolve()), len(dump.records), sorted(_files(root))])
    text = json.dumps([release, wire.LAYOUT, files, [repr(c) for c in choices]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _files(root: Path) -> list[list[Any]]:
    found = []
    if root.is_file():
        state = root.stat()
        return [[root.name, state.st_size, state.st_mtime_ns]]
    for directory, _, names in os.walk(root):
        for name in names:
            if name == NAME:  # results may be written into the dump's own directory
                continue
            path = Path(directory, name)
            try:
                state = path.stat()
            except OSError:
                continue
            found.append([str(path.relative_to(root)), state.st_size, state.st_mtime_ns])
    return found


class Finished:
    """The units of one comparison that are measured. ``done``: those of an earlier, interrupted run.

    Where the file cannot be written (a full disk), the comparison goes on without; `problem` then says why.
    """

    def __init__(self, directory: Path, identity: str):
        self.done: dict[Key, MeasuredUnit] = {}
        self.problem = ""
        self.directory = directory
        self._waiting: list[MeasuredUnit] = []
        self._begin = time.monotonic() + PATIENCE
        self._path = directory / NAME
        self._fd = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
            end = self._read(identity)
            os.ftruncate(self._fd, end)
            if not end:
                self._append(wire.frame({"identity": identity}))
        except OSError as e:
            self._fail(e)

    def add(self, units: Sequence[MeasuredUnit]) -> None:
        self._waiting += units
        if time.monotonic() >= self._begin:
            self._write()

    def close(self, *, needed: bool = True) -> None:
        """needed: False where the results are there, so that what has not been written need not be."""
        if needed:
            self._write()
        self._waiting.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        units, self._waiting = self._waiting, []
        if self._fd >= 0 and units:
            try:
                for some in _pieces(units):
                    self._append(wire.pack(some))
            except OSError as e:
                self._fail(e)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _fail(self, error: OSError) -> None:
        self.problem = f"{self._path}: {error.strerror or error}; an interrupted comparison would begin anew"
        self.close()

    def _read(self, identity: str) -> int:
        """How much of the file is of use."""
        size = os.fstat(self._fd).st_size
        if not size:
            return 0
        stored = memoryview(mmap.mmap(self._fd, size, prot=mmap.PROT_READ))
        end = 0
        known: wire.Known = {}
        for text, data, stop in wire.frames(stored):
            if not end and text.get("identity") != identity:
                return 0
            try:
                units = wire.unpack(text, data, known) if end else []
            except ValueError:
                return end
            self.done.update((u.key, u) for u in units)
            end = stop
        return end


def _pieces(units: Sequence[MeasuredUnit]) -> Iterator[list[MeasuredUnit]]:
    """``units`` by some megabytes: what waited for PATIENCE seconds, packed at once, would be a second copy of it."""
    piece: list[MeasuredUnit] = []
    size = 0
    for unit in units:
        piece.append(unit)
        size += sum(p.table.nbytes for p in unit.parts if p.table is not None)
        if size >= PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def forget(directory: Path) -> None:
    """Removes the file: the results are written."""
    (directory / NAME).unlink(missing_ok=True)
