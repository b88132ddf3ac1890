"""The lines of document 001."""

from __future__ import annotations

from pathlib import Path

from support.seeds import online_lines
from support.seeds.line import Line


def prepare(home: Path) -> None:
    """What the lines read, below an empty folder."""


LINES: list[Line] = sorted([*online_lines.LINES], key=lambda line: line.at)
