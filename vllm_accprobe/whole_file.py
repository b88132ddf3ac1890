"""Files that appear whole or not at all.

The problem: whoever reads a result while it is written, or after a full disk, must not take a part of it for all. The
idea: what is written lies next to its place, under a name of its own, and is renamed when it is complete; after an
error the part is left for whoever searches for the reason. Not here: a dump, whose every block counts (dump/writer.py).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """The file to write in place of ``path``. Raises OSError as the file system gives it."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    yield part
    os.replace(part, path)


def write_text(path: str | Path, text: str) -> None:
    """``text`` as UTF-8; what it cannot say (lone surrogates of file names) as escapes. Raises OSError."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def write_private(path: str | Path, text: str) -> None:
    """As `write_text`, for its owner only (0600): users' prompts. A part that is left there, a link too, is replaced,
    never written through. Raises OSError."""
    with whole(path) as part:
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
            f.write(text)


def write_csv_lines(path: str | Path, header: Sequence[object], lines: Iterable[Sequence[object]]) -> None:
    """A csv with ``\\n`` line ends, text as in `write_text`. Raises OSError."""
    with whole(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)
