"""Words of a command line that can be copied: quoted paths, and names of a dump as globs.

The problem: a name comes from a dump and may hold a blank, a quote, a star, a comma or a line break, and an option may
take a list of globs. The idea: a path or an exact name is quoted, or there is no command with it at all; in a glob,
whatever would mean something there becomes ``?``, which stands for any one character. Not here: which commands are
worth typing (next_steps.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

LONGEST = 900
"""chosen: characters of a line that is still shown whole everywhere (the reports cut texts of 1,000)."""
_SPECIAL = "*?[],!"
"""What lists of globs are made of: see dump/select.py's `matches`, and ``--taps``, which splits at commas."""


def line_of(words: Sequence[str]) -> str | None:
    """The words as one line that a shell takes apart as they are; None where it could not be shown as it is."""
    line = " ".join(shlex.quote(word) for word in words)
    return line if line.isprintable() and len(line) <= LONGEST else None


def path_word(path: str) -> str:
    """A path as an argument: one that begins with a dash would be read as an option."""
    return f"./{path}" if path.startswith("-") else path


def glob_of(name: str) -> str:
    """A glob that matches ``name``, wherever globs are taken."""
    spelled = "".join("?" if c in _SPECIAL or c.isspace() or not c.isprintable() else c for c in name)
    return f"?{spelled[1:]}" if spelled.startswith("-") else spelled
