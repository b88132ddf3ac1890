"""Opening and reading one file of another tool's dump.

The problem: a dump's file may be a link that leads elsewhere, be gone, or be shorter than it said a moment ago, and
whatever reads it must say so in one line that names it. The idea: only plain files are opened (dump/files.py), what
goes wrong inside is a `FileProblem` without a name, and `opened` puts the name in front; text has a limit.
Not here: what the bytes mean (the other modules of this room), which files there are (walk.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.files import DumpError, open_regular, read_into
from vllm_accprobe.formats.common.foreign import Read

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
    """``out``, contiguous, filled with the file's bytes from ``offset`` on; the caller has held its size against the
    file's. Raises DumpError, with the sentence ``short``, where the file ends before, and OSError."""
    if out.size and not read_into(fd, offset, out.reshape(-1).view(np.uint8).data):
        raise DumpError(f"{path} {short}")
    return out


def read_bytes(path: Path, offset: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of a file from ``offset`` on; the caller has held it against the file's size."""
    with descriptor(path) as fd:
        return fill(path, fd, offset, np.empty(nbytes, np.uint8), "has become shorter since it was opened")


def read_text(path: Path, limit: int = _MAX_TEXT) -> str:
    """A text file as UTF-8, what is no UTF-8 replaced. Raises ValueError where it is larger than ``limit``, OSError."""
    with os.fdopen(open_regular(path), "rb") as f:
        data = f.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit >> 20} MiB")
    return data.decode("utf-8", "replace")


def read_json(path: Path, limit: int) -> Any:
    """A file of JSON, with NaN and Infinity, which tools write. Raises ValueError, also for what is nested too deep,
    and OSError."""
    import json

    import orjson

    text = read_text(path, limit)
    try:
        return orjson.loads(text)
    except ValueError:
        try:
            return json.loads(text)
        except RecursionError as e:
            raise ValueError(str(e)) from None
