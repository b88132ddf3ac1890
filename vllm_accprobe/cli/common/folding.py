"""Lines that a terminal is too narrow for, folded where a reader would: between words, never within a number.

The problem: at 80 columns, and at 40 in a split window, a terminal breaks lines anywhere, and a table's columns are cut
or squeezed to a letter. The idea: while a command runs, a terminal's stdout folds each line at its width: between words
with a hanging indent, a name that is longer than a line behind a dot, a shell command with backslashes, so that it can
still be copied. A path stays whole on a line of its own for the same reason: there the terminal breaks. In a pipe or a
file nothing is folded, and JSON never is. Not here: what lines say (report/), tables of the dump's tensors
(options.print_table), which asks `stacked` where a row has no room.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

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


class FoldingStdout:
    """A terminal's stdout that folds whole lines; everything else is the stream's own."""

    def __init__(self, stream: TextIO, width: int):
        self._stream, self._width, self._held = stream, width, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self._held and text.startswith(("{", "[")):  # a program may read it later, from the screen
            return self._stream.write(text)
        *lines, self._held = (self._held + text).split("\n")
        for line in lines:
            self._stream.write("".join(f"{part}\n" for part in fold(line, self._width)))
        return len(text)

    def flush(self) -> None:
        held, self._held = self._held, ""
        self._stream.write(held)
        self._stream.flush()


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
