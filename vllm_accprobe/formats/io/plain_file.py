"""Files and directories that another program wrote: opened, read and walked within limits, never outside the dump.

The problem: a file may be a link that leads elsewhere, be gone, or be shorter than it said; a dump has a hundred
thousand files, and a made-up one directories without end. The idea: only plain files and directories are opened, to a
bounded depth, in the order of names where numbers count as numbers; text has a limit. What goes wrong inside is a
`FileProblem` without a name, and `opened` puts the name in front. What is passed over is kept (`Passed`), because a
dump must say what it leaves out; `probe` searches for one file of a kind and gives up early.

Not here: what the bytes mean (the other modules here), what the names mean (each format's module).
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from vllm_accprobe.dump.files import DumpError, open_regular, read_into
from vllm_accprobe.formats.common.foreign import Read

if TYPE_CHECKING:
    from vllm_accprobe.formats.common.foreign import ForeignDump


SHORTER = "is shorter than it says: not all of it was written or copied"
SHORTER_THAN_HEADER = "is shorter than its header says"
_MAX_TEXT = 256 << 20


class FileProblem(DumpError):
    """What is wrong with a file, without its name."""


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file. key: "" where the file has just one and no name for it; dtype as Tensor's; problem: why it
    cannot be read, a sentence that names the file, or ""."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    read: Read
    problem: str = ""


@contextmanager
def descriptor(path: Path) -> Iterator[int]:
    """The open file. Raises OSError for what is no plain file."""
    fd = open_regular(path)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The open file; what goes wrong with it comes out as a DumpError that names it."""
    try:
        with descriptor(path) as fd:
            yield fd
    except FileProblem as e:
        raise DumpError(f"{path} cannot be read: {e}") from None
    except OSError as e:
        raise DumpError(f"cannot read {path}: {e.strerror or e}") from None


def fill(path: Path, fd: int, offset: int, out: np.ndarray, short: str = SHORTER) -> np.ndarray:
    """``out``, contiguous, filled with the file's bytes from ``offset`` on; the caller has checked its size against the
    file's. Raises DumpError, with the sentence ``short``, where the file ends before, and OSError."""
    if out.size and not read_into(fd, offset, out.reshape(-1).view(np.uint8).data):
        raise DumpError(f"{path} {short}")
    return out


def read_bytes(path: Path, offset: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of a file from ``offset`` on; the caller has checked it against the file's size."""
    with descriptor(path) as fd:
        return fill(path, fd, offset, np.empty(nbytes, np.uint8), "has become shorter since it was opened")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise DumpError(f"cannot read {path}: {e.strerror or e}") from None
    except (ValueError, RecursionError, csv.Error) as e:
        raise DumpError(f"{path} is damaged: {str(e)[:120]}") from None


def read_text(path: Path, limit: int = _MAX_TEXT) -> str:
    """A text file of at most ``limit`` bytes as UTF-8, what is no UTF-8 replaced. Raises DumpError."""
    with _named(path), os.fdopen(open_regular(path), "rb") as f:
        data = f.read(limit + 1)
        if len(data) > limit:
            raise DumpError(f"{path} is larger than {limit >> 20} MiB")
    return data.decode("utf-8", "replace")


def read_json(path: Path, limit: int) -> Any:
    """A file of JSON, with NaN and Infinity, which tools write. Raises DumpError, also for what is nested too deep."""
    text = read_text(path, limit)
    with _named(path):
        try:
            return orjson.loads(text)
        except ValueError:
            return json.loads(text)


def read_rows(path: Path) -> list[list[str]]:
    """The lines of a table, cut at ``|`` where the first one has that, else at commas. Raises DumpError."""
    text = read_text(path)
    with _named(path):
        if "|" in text.partition("\n")[0]:
            return list(csv.reader(io.StringIO(text), delimiter="|", quoting=csv.QUOTE_NONE))
        return list(csv.reader(io.StringIO(text)))


MAX_DEPTH = 48
_PROBE = 4000
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A plain file. parts: the names of the directories between the root and it, then its own."""

    parts: tuple[str, ...]
    where: str

    @property
    def path(self) -> Path:
        return Path(self.where)

    @property
    def name(self) -> str:
        """The path relative to the root, with slashes."""
        return "/".join(self.parts)


@dataclass
class Passed:
    """What a walk passed over. links: names of links; odd: (name, why) of what has a wanted file's name and is none,
    and of directories that cannot be listed."""

    links: list[str] = field(default_factory=list)
    unusable: list[tuple[str, str]] = field(default_factory=list)

    def report(self, dump: ForeignDump) -> None:
        """Puts all of it into the dump's skips and problems."""
        for name, why in self.unusable:
            dump.unreadable(f"{name}: {why}", name)
        if self.links:
            more = f" and {len(self.links) - 1} more" if len(self.links) > 1 else ""
            dump.problem(f"{self.links[0]}{more}: a link, not followed (a dump's files lie in the dump)")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by which ``9_x`` comes before ``10_x``."""
    pieces = _NUMBER.split(name)
    return tuple((1, int(p), p) if i % 2 else (0, 0, p) for i, p in enumerate(pieces) if p)


def files(root: Path, wanted: Callable[[str], bool] | None = None, passed: Passed | None = None) -> Iterator[FoundFile]:
    """Every plain file under ``root`` whose own name is ``wanted``, directories in natural order. passed: gets what was
    left out. Raises OSError where ``root`` itself cannot be listed."""
    stack: list[tuple[tuple[str, ...], str]] = [((), str(root))]
    while stack:
        parts, directory = stack.pop()
        below = []
        try:
            with os.scandir(directory) as entries:
                listed = list(entries)
        except OSError as e:
            if not parts or passed is None:
                raise
            passed.unusable.append(("/".join(parts), f"cannot be listed: {e.strerror or e}"))
            continue
        if len(listed) > 1:
            listed.sort(key=lambda e: natural(e.name))
        for entry in listed:
            here = (*parts, entry.name)
            if entry.is_symlink():
                if passed is not None:
                    passed.links.append("/".join(here))
            elif entry.is_dir(follow_symlinks=False):
                if passed is not None and wanted is not None and "." in entry.name and wanted(entry.name):
                    passed.unusable.append(("/".join(here), "a directory in place of a file"))
                if len(parts) < MAX_DEPTH:
                    below.append((here, entry.path))
            elif wanted is None or wanted(entry.name):
                if entry.is_file(follow_symlinks=False):
                    yield FoundFile(here, entry.path)
                elif passed is not None:
                    passed.unusable.append(("/".join(here), "not a plain file"))
        stack += reversed(below)


def probe(root: Path, found: Callable[[tuple[str, ...]], bool], depth: int = 20) -> bool:
    """Whether there is a file whose parts are ``found``, looking at no more than some thousand names: depth first, so
    that one file at the bottom of a large dump is met soon."""
    if not root.is_dir():
        return False
    stack: list[tuple[tuple[str, ...], Path]] = [((), root)]
    seen = 0
    while stack and seen < _PROBE:
        parts, directory = stack.pop()
        below = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _PROBE or entry.is_symlink():
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if len(parts) < depth:
                            below.append(((*parts, entry.name), Path(entry.path)))
                    elif found((*parts, entry.name)):
                        return True
        except OSError:
            continue
        stack += sorted(below, reverse=True)
    return False
