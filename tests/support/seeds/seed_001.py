"""The lines of document 001."""

from __future__ import annotations

from pathlib import Path

from support.seeds import precheck_lines
from support.seeds.line import Line


def prepare(home: Path) -> None:
    """What the lines read, below an empty folder."""
    precheck_lines.prepare(home)


LINES: list[Line] = sorted(precheck_lines.OF_001, key=lambda line: line.at)
