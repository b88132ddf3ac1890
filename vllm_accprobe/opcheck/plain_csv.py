"""Csv files and lines of text that hold strangers' names: whole or not at all, and nothing in them runs.

The problem: names come from dumps and from others' csv files; a spreadsheet runs what begins like a formula, and a
terminal obeys control characters. The idea: a quote before the one, escapes for the other, one place for both.
Not here: which columns (run/table.py, opcheck/diff.py). Needs neither numpy nor torch.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a cell that a spreadsheet would run begins with."""


def inert(text: str) -> str:
    """A cell that no spreadsheet runs."""
    return "'" + text if text.startswith(FORMULA) else text


def escaped(text: str) -> str:
    """Printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def safe(text: str, most: int = 200) -> str:
    """Printable, in one line, not endless."""
    plain = escaped(text)
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def write_rows(path: Path, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """A csv in UTF-8; whole or not at all, whatever ``lines`` raises. Raises OSError."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as f:
            writer = csv.writer(f, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(lines)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
