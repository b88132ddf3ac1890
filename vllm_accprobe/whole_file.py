"""Files that appear whole or not at all, and what a full disk does to them.

The problem: whoever reads a result while it is written, or after a full disk, must not take a part of it for all. The
idea: what is written lies next to its place, under a name of its own, and is renamed when it is complete; after an
error it is removed. A full disk is `NoSpace`, whoever wrote, with the path; one that is met while rows are computed
(`GrowingCsv`) ends the file and not the computing. Not here: a dump, whose every block counts (dump/writer.py); the
line that a user reads (refusals.py).
"""

from __future__ import annotations

import csv
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NoSpace(OSError):
    """A file could not be written for want of space: errno is one of FULL. needed: its bytes where ``exact``, else
    those that were written before the error."""

    def __init__(self, code: int, path: Path, needed: int = 0, exact: bool = False):
        super().__init__(code, os.strerror(code), str(path))
        self.needed, self.exact = needed, exact


def no_space(error: BaseException) -> int | None:
    """The errno of FULL that ``error`` is about. numpy's `tofile` has no errno, and h5py names it in its text only."""
    if isinstance(error, OSError) and error.errno in FULL:
        return error.errno
    if isinstance(error, (OSError, RuntimeError)):
        if named := re.search(r"errno = (\d+)", str(error)):
            return code if (code := int(named[1])) in FULL else None
        if re.fullmatch(r"\d+ requested and \d+ written", str(error)):
            return errno.ENOSPC
    return None


@contextmanager
def naming(path: Path, part: Path, needed: int = 0) -> Iterator[None]:
    """Makes a full disk a NoSpace at ``path``. part: the file that is written; needed: its bytes, 0: not known."""
    try:
        yield
    except (OSError, RuntimeError) as e:
        code = no_space(e)
        if code is None or isinstance(e, NoSpace):
            raise
        written = 0
        with suppress(OSError):
            written = part.stat().st_size
        raise NoSpace(code, path, needed or written, bool(needed)) from e


@contextmanager
def whole(path: str | Path, end: str = ".part", needed: int = 0) -> Iterator[Path]:
    """The file, or folder, to write in place of ``path``: its name and ``end``. Nothing stays of it after an error.
    Raises NoSpace, and other OSError as the file system gives it."""
    path = Path(path)
    part = path.with_name(path.name + end)
    try:
        with naming(path, part, needed):
            yield part
            os.replace(part, path)
    finally:
        _remove(part)


def _remove(part: Path) -> None:
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """``text`` as UTF-8; what it cannot say (lone surrogates of file names) as escapes. Raises OSError."""
    data = text.encode("utf-8", "backslashreplace")
    with whole(path, needed=len(data)) as part:
        part.write_bytes(data)


def write_private(path: str | Path, content: str | bytes, *, sync: bool = False) -> None:
    """As `write_text`, for its owner only (0600): users' prompts. A part that is left there, a link too, is replaced,
    never written through. sync: it is on the disk before it is at its place. Raises OSError."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    with whole(path, needed=len(data)) as part:
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as f:
            f.write(data)
            if sync:
                f.flush()
                os.fsync(f.fileno())


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Lines with their ends, text as in `write_text`. Raises OSError."""
    with whole(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as f:
        f.writelines(lines)


def write_csv_lines(path: str | Path, header: Sequence[object], lines: Iterable[Sequence[object]]) -> None:
    """A csv with ``\\n`` line ends, text as in `write_text`. Raises OSError."""
    with whole(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)


class GrowingCsv:
    """A csv whose rows are computed while it is written to ``part``, behind what is there; ``path`` once it is
    finished. Where the disk is full, the part is removed, `lost` says so, and further rows are dropped: who computes
    them raises `lost` when the result is printed."""

    def __init__(self, path: Path, part: Path):
        self.lost: NoSpace | None = None
        self._path, self._part = path, part
        self._file = part.open("a", encoding="utf-8", errors="backslashreplace", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def add(self, rows: Iterable[Sequence[object]], flush: bool = True) -> None:
        """Raises OSError other than NoSpace. flush: False where a later call does it."""
        if self.lost is not None:
            return
        try:
            with naming(self._path, self._part):
                self._writer.writerows(rows)
                if flush:
                    self._file.flush()
        except NoSpace as e:
            self.lost = e
            self.close()
            _remove(self._part)

    def begin(self, header: Sequence[object]) -> None:
        """Drops what is there."""
        self._file.truncate(0)
        self.add([header])

    def finish(self) -> None:
        """Raises OSError other than NoSpace."""
        self.add(())
        self.close()
        if self.lost is None:
            os.replace(self._part, self._path)

    def close(self) -> None:
        with suppress(OSError):  # it tries once more to write what did not fit
            self._file.close()

    def drop(self) -> None:
        """Nothing stays of it, unless it is finished."""
        self.close()
        _remove(self._part)
