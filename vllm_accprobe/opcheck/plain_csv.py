"""Csv files and lines of text that hold strangers' names: nothing in them runs.

The problem: names come from dumps and from others' csv files; a spreadsheet runs what begins like a formula, and a
terminal obeys control characters. The idea: a quote before the one, escapes for the other, one place for both.
Not here: writing (whole_file.py), which columns (run/table.py, opcheck/diff.py). Needs neither numpy nor torch.
"""

from __future__ import annotations

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
