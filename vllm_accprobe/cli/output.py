"""What a command prints: one JSON object for a program, or lines for a person, folded where the terminal is narrow.

**JSON.** Two dozen commands print lines, some from several processes, and a script must be able to parse what stdout
holds. `answered` runs a command; with --json, what it prints on stdout goes nowhere (its children's to stderr), while
`answer` and `say_written`, which add nothing to the lines for people, fill the object that is printed at the end:
``schema``, ``command``, ``exit_code``, ``written``, ``notes``, and the command's own fields. A refusal prints nothing
on stdout. Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf", as in compare.json. compare, gate,
self-check, eval-diff, bisect, doctor and inspect --size print objects of their own.

**Folding.** At 80 columns a terminal breaks lines anywhere. While a command runs, `folded` breaks each line between
words with a hanging indent, a name that is longer than a line behind a dot, a shell command with backslashes, so that
it can still be copied. A path stays whole. In a pipe or a file nothing is folded, and JSON never is. A pipe whose
reader leaves ends no command (`without_reader`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import typer

from vllm_accprobe.whole_file import NoSpace, whole


class Format(str, enum.Enum):
    """What stdout gets, and nothing else: which files were written goes to stderr then."""

    terminal = "terminal"
    json = "json"
    markdown = "markdown"
    github = "github"


SCHEMA = 1
_FIELDS: ContextVar[dict[str, Any] | None] = ContextVar("answer", default=None)


def for_program() -> bool:
    """Whether a program reads: what costs time for people only may be left out."""
    return _FIELDS.get() is not None


def answer(**fields: Any) -> None:
    """Puts ``fields`` into the object. Dataclasses, paths and numpy's numbers may be in them."""
    if (current := _FIELDS.get()) is not None:
        current.update(fields)


def add_notes(lines: Iterable[str]) -> None:
    """What a reader of the result should know."""
    if (fields := _FIELDS.get()) is not None:
        fields["notes"] += list(lines)


def say_written(*paths: Path, about: str = "", err: bool = False) -> None:
    """``wrote PATH (about)`` for each of them, the one form that all commands have."""
    show((f"wrote {path}" + (f" ({about})" if about else "") for path in paths), err)
    if (fields := _FIELDS.get()) is not None:
        fields["written"] += [str(path) for path in paths]


def answered(name: str, as_json: bool, command: Callable[[], Any]) -> Any:
    """Runs ``command``; with ``as_json`` prints the object and raises typer.Exit. name: of the command, in the
    object."""
    if not as_json:
        return command()
    fields: dict[str, Any] = {"schema": SCHEMA, "command": name, "exit_code": 0, "written": [], "notes": []}
    token, code = _FIELDS.set(fields), 0
    full: NoSpace | None = None
    try:
        with _stdout_kept_free():
            command()
    except typer.Exit as end:
        code = end.exit_code
    except NoSpace as e:  # the result is there, and its files are not
        if "verdict" not in fields:
            raise
        code, full = 2, e
    finally:
        _FIELDS.reset(token)
    fields["exit_code"] = code
    typer.echo(json.dumps(plain(fields), indent=1, allow_nan=False))
    if full is not None:
        raise full
    raise typer.Exit(code)


@contextlib.contextmanager
def _stdout_kept_free() -> Iterator[None]:
    """Lines for people go nowhere; what a child process writes on file descriptor 1 goes to stderr."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed
        kept = -1
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            if kept >= 0:
                os.dup2(2, 1)
            yield
        finally:
            if kept >= 0:
                os.dup2(kept, 1)
                os.close(kept)


def plain(value: Any) -> Any:
    """What JSON has no word for as what it has: see the module's docstring."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # an array or a number of numpy, which is not imported for it
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def say_notes(lines: Iterable[str], err: bool = True) -> None:
    """A line each for what a reader of a result should know of its dump."""
    lines = list(lines)
    add_notes(lines)
    show((f"note: {line}" for line in lines), err)


def show(lines: Iterable[str], err: bool = False) -> None:
    """A line each."""
    for line in lines:
        typer.echo(line, err=err)


def report(as_json: bool, fields: Any, lines: Iterable[str], indent: int | None = 1) -> None:
    """A result that has an object of its own: with ``as_json`` that, else its lines for people."""
    show([json.dumps(fields, indent=indent)] if as_json else lines)


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
    with whole(path) as part, part.open("w", encoding="utf-8") as f:
        Console(file=f, width=10_000, highlight=False, color_system=None).print(table)


def _alarm(row: Sequence[str]) -> str | None:
    return "red" if any(cell.isdigit() and cell != "0" for cell in row[-2:]) else None


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]], folded: Sequence[str]) -> int:
    """Columns that a table needs, of which a folded one has 24 at least, two blanks apart."""
    widths = [max(len(c) for c in cells) for cells in zip(columns, *rows, strict=True)]
    least = [min(w, 24) if name in folded else w for name, w in zip(columns, widths, strict=True)]
    return sum(least) + 2 * len(least)


_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_COMMAND = re.compile(r"\s+(?:[A-Z_]+=\S+ +)*(?:accprobe|pytest|vllm|python3?|pip|bash) ")
_WORD = re.compile(r"\s*(?:\[\d+(?:, \d+)*\]\S*|\S+)")
"""Or a shape, [5, 32], which is as one number."""
_SHELL_WORD = re.compile(r"\s*(?:'[^']*'|\"[^\"]*\"|\S)+")
_BEHIND = re.compile(r"(?<=[._,:;=/-])")
_LEAST = 20
"""Columns below which nothing can be read, and nothing is folded."""


def width_of(text: str) -> int:
    """The columns that ``text`` takes, colours left out."""
    plain = _ESCAPE.sub("", text)
    if plain.isascii():
        return len(plain)
    from rich.cells import cell_len

    return cell_len(plain)


def fold(line: str, width: int) -> list[str]:
    """``line`` as lines of at most ``width`` columns."""
    if width < _LEAST or width_of(line) <= width:
        return [line]
    command = _COMMAND.match(line) is not None
    end, room = (" \\", width - 2) if command else ("", width)
    body = line.lstrip(" ")
    indent = min(len(line) - len(body), width // 4)
    hang = " " * min(indent + 4, width // 3)
    out, now = [], " " * indent
    begun = False
    for word in (_SHELL_WORD if command else _WORD).findall(body):
        if begun and width_of(now + word) > room:
            out.append(now + end)
            now, begun, word = hang, False, word.lstrip()
        pieces = [word] if command or "/" in word else _pieces(word, room - width_of(now), room - len(hang))
        for piece in pieces[:-1]:
            out.append(now + piece)
            now = hang
        now, begun = now + pieces[-1], True
    return [*out, now]


def _pieces(word: str, room: int, then: int) -> list[str]:
    """A word in pieces, the first of ``room`` columns and the others of ``then``, behind a dot or the like where there
    is one."""
    out: list[str] = []
    while width_of(word) > room > 0:
        at = max((m.start() for m in _BEHIND.finditer(word) if 0 < m.start() <= room), default=room)
        out.append(word[:at])
        word, room = word[at:], then
    return [*out, word]


def stacked(columns: Sequence[str], row: Sequence[str], texts: Sequence[str]) -> list[str]:
    """A row of a table that is wider than the terminal: what it is of in one line, then each number with its name."""
    named = [(name, cell) for name, cell in zip(columns, row, strict=True)]
    first = [cell for name, cell in named[:1]] + [cell for name, cell in named if name in texts]
    rest = [f"{name} {cell}" for name, cell in named[1:] if name not in texts]
    return ["  ".join(first), "    " + "  ".join(rest)]


class _Stream:
    """Another stream, but for what a subclass writes otherwise."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class FoldingStdout(_Stream):
    """A terminal's stdout that folds whole lines."""

    def __init__(self, stream: TextIO, width: int):
        super().__init__(stream)
        self._width, self._begun = width, ""

    def write(self, text: str) -> int:
        if not self._begun and text.startswith(("{", "[")):  # a program may read it later, from the screen
            return self._stream.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._stream.write("".join(f"{part}\n" for part in fold(line, self._width)))
        return len(text)

    def flush(self) -> None:
        rest, self._begun = self._begun, ""
        self._stream.write(rest)
        self._stream.flush()


class PipeStream(_Stream):
    """stdout or stderr whose reader may leave, as `head` does: what is printed from then on goes nowhere, and the
    command goes on, so that its files and its exit code are those of the whole run."""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._to_nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._to_nowhere()

    def _to_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()  # what it still has


@contextlib.contextmanager
def without_reader() -> Iterator[None]:
    """stdout and stderr may lose their readers."""
    with contextlib.ExitStack() as both:
        if sys.stdout is not None:
            both.enter_context(contextlib.redirect_stdout(PipeStream(sys.stdout)))  # type: ignore[type-var]
        if sys.stderr is not None:
            both.enter_context(contextlib.redirect_stderr(PipeStream(sys.stderr)))  # type: ignore[type-var]
        yield
        if sys.stdout is not None:
            sys.stdout.flush()


@contextlib.contextmanager
def folded() -> Iterator[None]:
    """Stdout folds its lines, where it is a terminal."""
    import shutil

    try:
        wide = sys.stdout.isatty()
    except (AttributeError, ValueError):  # None, or closed
        wide = False
    if not wide:
        yield
        return
    stream = FoldingStdout(sys.stdout, shutil.get_terminal_size().columns)
    try:
        with contextlib.redirect_stdout(stream):  # type: ignore[type-var]
            yield
    finally:
        stream.flush()
