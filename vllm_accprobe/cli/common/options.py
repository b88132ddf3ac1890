"""What several commands' options share: their spelling, and how they become a Selection.

Not here: what a selection chooses (dump/select.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.core

if TYPE_CHECKING:
    from vllm_accprobe.dump.select import Ranges, Selection


class CommandError(Exception):
    """One line: what was asked for and cannot be done. Exit code 2."""


def writable(directory: Path, option: str = "--out") -> None:
    """Raises CommandError where nothing can be written into ``directory``, which need not exist: before the work, not
    after hours of it. It is tried, for permissions do not tell (a read-only disk, /proc); nothing of it stays."""
    import tempfile

    made: list[Path] = []
    above = Path(os.path.abspath(directory))
    missing = []
    while not os.path.lexists(above):
        missing.append(above)
        above = above.parent
    try:
        for place in reversed(missing):
            place.mkdir()
            made.append(place)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as e:
        raise CommandError(
            f"{option}: nothing can be written into {directory} ({e.strerror or e}): name another directory"
        ) from None
    finally:
        for place in reversed(made):
            place.rmdir()


class Command(typer.core.TyperCommand):
    """A command whose help may say ``{standards}``: their names take a while to gather, and are read by few."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from vllm_accprobe.standards import COMMANDS, names

        for option in (p for p in self.params if "{standards}" in (getattr(p, "help", None) or "")):
            what = next(kind for kind, command in COMMANDS.items() if command == self.name)
            option.help = option.help.replace("{standards}", ", ".join(names(what)))  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


STEP = typer.Option("", "--step", metavar="RANGES", help="Engine steps, e.g. 0-3,7.")
RANK = typer.Option("", "--rank", metavar="RANGES", help="Global ranks, e.g. 0,2-3.")
ROLE = typer.Option([], "--role", metavar="GLOB", help="E.g. output.0 or 'input.*'; '!...' excludes. Can be repeated.")
CALL = typer.Option("", "--call", metavar="RANGES", help="Ordinals of the tap's calls within a step.")
REQUEST = typer.Option(
    [],
    "--request",
    metavar="GLOB",
    help="Only tensors with rows of these requests: id, or start of the prompt's hash; '!...' excludes.",
)


def ranges(text: str, option: str) -> Ranges:
    """``0-4,7`` as ((0, 4), (7, 7)). Raises CommandError naming the option."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", item)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise CommandError(f"{option}: {item!r} is no range of numbers; write for example 0-3,7")
        found.append((low, high))
    return tuple(found)


def selection(
    names: Sequence[str] = (),
    step: str = "",
    rank: str = "",
    request: Sequence[str] = (),
    role: Sequence[str] = (),
    call: str = "",
    parameters: bool = False,
) -> Selection:
    """The tensors that a command's options choose. Raises CommandError for a range that is none."""
    from vllm_accprobe.dump.select import Selection

    return Selection(
        names=tuple(names),
        steps=ranges(step, "--step"),
        ranks=ranges(rank, "--rank"),
        requests=tuple(request),
        roles=tuple(role),
        calls=ranges(call, "--call"),
        parameters=parameters,
    )


@contextmanager
def progress(title: str, total: int, steps: bool = False) -> Iterator[Any]:
    """A function that counts one more done, or with ``steps`` is told how many are: with a bar where stderr is a
    terminal, silently in a pipe."""
    import sys

    if not sys.stderr.isatty() or total < 2:
        yield lambda *done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield (lambda done: bar.update(task, completed=done)) if steps else (lambda: bar.advance(task))


def size(nbytes: float) -> str:
    """``1.4 GB``: decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
