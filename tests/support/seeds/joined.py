"""One document's lines where several files have some of them: prepared together, in the document's order."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from support.seeds.line import Line


def joined(number: str, *names: str) -> tuple[Callable[[Path], None], list[Line]]:
    """What prepares the lines of document ``number``, and the lines: ``OF_<number>``, ``LINES_<number>`` or ``LINES``
    of these files."""
    found: list[ModuleType] = [importlib.import_module(f"support.seeds.{name}") for name in names]
    lines: list[Line] = []
    for module in found:
        place = next(n for n in (f"OF_{number}", f"LINES_{number}", "LINES") if hasattr(module, n))
        lines += getattr(module, place)

    def prepare(home: Path) -> None:
        for module in found:
            getattr(module, "prepare", lambda home: None)(home)

    return prepare, sorted(lines, key=lambda line: line.at)
