"""The lines of document 004."""

from __future__ import annotations

from pathlib import Path

from support.seeds import errcheck_lines
from support.seeds.line import Line


def prepare(home: Path) -> None:
    """What the lines read, below an empty folder."""
    errcheck_lines.prepare(home)


LINES: list[Line] = sorted([*errcheck_lines.LINES], key=lambda line: line.at)
