"""What commands have in common: how they refuse, what options become, notes, a progress bar.

Not here: the options' spelling (declared.py), what a selection chooses (dump/select.py), where to write (outputs.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.core

from vllm_accprobe.cli.common.folding import stacked
from vllm_accprobe.cli.common.json_answer import add_notes
from vllm_accprobe.cli.spelling.old_spellings import documented
from vllm_accprobe.cli.spelling.one_spelling import one_spelling
from vllm_accprobe.cli.spelling.refusal import CommandError as CommandError
from vllm_accprobe.cli.spelling.refusal import CommandInterrupted
from vllm_accprobe.cli.spelling.refusal import NothingThere as NothingThere
from vllm_accprobe.cli.spelling.told import spelled

if TYPE_CHECKING:
    from vllm_accprobe.dump.select import Ranges, Selection


def require_directory(path: Path | None, option: str) -> None:
    """Raises CommandError where ``path`` is given and is no directory."""
    if path is not None and not path.is_dir():
        raise CommandError(f"{option}: {path} is no directory")


def say_notes(lines: Iterable[str], err: bool = True) -> None:
    """A line each for what whoever looks at a result should know of its dump."""
    lines = list(lines)
    add_notes(lines)
    for line in lines:
        typer.echo(f"note: {line}", err=err)


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
    """A command that understands other tools' spellings (spelling/told.py) and its own older ones (one_spelling.py),
    and whose help may say ``{standards}``: their names take a while to gather, and are read by few."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values = {name for p in self.params if p.param_type_name == "option" and not p.is_flag for name in p.opts}  # type: ignore[attr-defined]
        words = spelled(self.name or "", documented(self.name, args), values)
        return super().parse_args(ctx, one_spelling(words, self.params, ctx.allow_interspersed_args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise CommandInterrupted from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from vllm_accprobe.standards import COMMANDS, names

        for option in (p for p in self.params if "{standards}" in (getattr(p, "help", None) or "")):
            what = next(kind for kind, command in COMMANDS.items() if command == self.name)
            option.help = option.help.replace("{standards}", ", ".join(names(what)))  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


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
        steps=ranges(step, "--steps"),
        ranks=ranges(rank, "--ranks"),
        requests=tuple(request),
        roles=tuple(role),
        calls=ranges(call, "--calls"),
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


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    texts: Sequence[str],
    folded: Sequence[str],
    path: Path | None = None,
) -> None:
    """A table for the eye, whose last two columns count NaN and Inf: a row that has any is red. texts: the columns
    that are no numbers; folded: those that may take several lines. path: written there instead. In a pipe and in a file
    nothing is folded or cut; on a terminal that is too narrow, a row takes several lines."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if path is None and sys.stdout.isatty():
        rows = [list(row) for row in rows]
        if _least_width(columns, rows, folded) > Console().width:
            for row in rows:
                for line in stacked(columns, row, texts):
                    typer.secho(line, fg=_alarm(row))
            return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: Any = "left" if name in texts else "right"
        table.add_column(name, justify=justify, no_wrap=name not in folded, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_alarm(row) or "") for cell in row))
    if path is None:
        Console(width=None if sys.stdout.isatty() else 10_000, highlight=False).print(table)
        return
    with path.open("w", encoding="utf-8") as f:
        Console(file=f, width=10_000, highlight=False, color_system=None).print(table)


def _alarm(row: Sequence[str]) -> str | None:
    return "red" if any(cell.isdigit() and cell != "0" for cell in row[-2:]) else None


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]], folded: Sequence[str]) -> int:
    """Columns that a table needs, of which a folded one has 24 at least, two blanks apart."""
    widths = [max(len(c) for c in cells) for cells in zip(columns, *rows, strict=True)]
    least = [min(w, 24) if name in folded else w for name, w in zip(columns, widths, strict=True)]
    return sum(least) + 2 * len(least)


def size(nbytes: float) -> str:
    """``1.4 GB``: decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
