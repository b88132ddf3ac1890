"""What commands raise where they refuse: one line, and an exit code by its kind (cli/__init__.py)."""

from __future__ import annotations


class CommandError(Exception):
    """One line: what was asked for and cannot be done. Exit code 2."""


class CommandInterrupted(Exception):
    """Ctrl-C ended a command. typer makes a bare exit code of KeyboardInterrupt, which a command that `run` started may
    have as well, and says nothing. Exit code 130."""


class NothingThere(CommandError):
    """One line: what there was nothing of to work on. Exit code 3."""
