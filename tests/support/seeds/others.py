"""Lines of a document's section that another module has, where it is there: several hands write one document."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from support.seeds.line import Line


def of(*names: str) -> list[Line]:
    """``LINES`` of the modules ``support.seeds.<name>`` that are there."""
    return [line for name in names if (module := _module(name)) is not None for line in module.LINES]


def prepare(home: Path, *names: str) -> None:
    """Their ``prepare``."""
    for name in names:
        made = getattr(_module(name), "prepare", None)
        if made is not None:
            made(home)


def _module(name: str):  # type: ignore[no-untyped-def]
    full = f"support.seeds.{name}"
    return importlib.import_module(full) if importlib.util.find_spec(full) is not None else None
