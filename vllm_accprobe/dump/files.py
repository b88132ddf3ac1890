"""Opening the files of a dump without trusting them.

The problem: a dump may be made up to lead a reader out of its directory, to make it wait or to make it allocate. The
idea: only plain files are opened, never through a link; names are built from numbers; sizes come from the file system;
lines have a limit. Not here: what the lines say (reader.py), the tensors (reader.py).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from vllm_accprobe.dump.schema import segment_name
from vllm_accprobe.dump.segment import MAX_HEADER, part_name

MAX_LINE = 32 << 20
MISSING = "is missing"


class DumpError(Exception):
    """One line: what cannot be read, where, and what to do."""


class SegmentData:
    """Where a segment's data lie: ``size`` bytes from ``start`` on in ``path``."""

    __slots__ = ("path", "size", "start")

    def __init__(self, path: Path, start: int, size: int):
        self.path, self.start, self.size = path, start, size


def beside(root: Path) -> Iterator[Path]:
    """``root`` and the names of what is put beside it where it is taken: ``root.2``, ``root.3`` ... ``root.999``."""
    yield root
    for number in range(2, 1000):
        yield root.with_name(f"{root.name}.{number}")


def open_regular(path: Path) -> int:
    """Raises OSError also for a link or anything else that is not a plain file: a dump's files lie in the dump."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "not a plain file")
    return fd


def read_into(fd: int, offset: int, target: memoryview) -> bool:
    """Fills ``target``, bytes, from ``offset`` of an open file on; False where the file ends before. Raises OSError."""
    done = 0
    while done < len(target):
        n = os.preadv(fd, [target[done:]], offset + done)
        if n == 0:
            return False
        done += n
    return True


def segment_data(path: Path) -> SegmentData:
    """Start and size of the data of a segment file, finished or ``.part``. Raises DumpError."""
    try:
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
            word = os.pread(fd, 8, 0)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise DumpError(f"{path.name} {MISSING}") from None
    except OSError as e:
        raise DumpError(f"{path.name} cannot be opened: {e.strerror or e}") from None
    header = int.from_bytes(word, "little")
    if len(word) < 8 or header > MAX_HEADER or 8 + header > size:
        raise DumpError(f"{path.name} has a damaged header")
    return SegmentData(path, 8 + header, size - 8 - header)


def find_segment(directory: Path, index: int) -> SegmentData:
    """The data of segment ``index`` in a rank's directory, finished or still ``.part``. Raises DumpError."""
    finished = directory / segment_name(index)
    part = directory / part_name(index)
    return segment_data(part if not finished.exists() and part.exists() else finished)


def journal_lines(path: Path) -> Iterator[tuple[int, bytes | None, int]]:
    """(number from 1, line, length) of each line; the line is None where it is longer than MAX_LINE. A last line
    without a newline is torn, and comes with number 0. Raises OSError."""
    with os.fdopen(open_regular(path), "rb", buffering=1 << 20) as f:
        number = 0
        while line := f.readline(MAX_LINE):
            number += 1
            length = len(line)
            whole = line.endswith(b"\n")
            while not whole and (rest := f.readline(MAX_LINE)):
                length, whole, line = length + len(rest), rest.endswith(b"\n"), b""
            yield (number if whole else 0), (line or None), length
