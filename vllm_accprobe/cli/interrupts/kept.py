"""What a command that is interrupted says: what was kept and where, and the words that go on from there, in one line.

The problem: after Ctrl-C nobody knows whether the last hour is lost. The idea: a command says early, by `going_on`,
what it leaves behind and which words go on with it; where Ctrl-C ends it, `interrupted` makes the line of that, and of
what is really there. Not here: how each goes on (comparison/store/resume.py, opcheck/run/whole.py, gate/).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GoingOn:
    """what: is kept, for people; place: where it is, and it is kept where that exists (None: elsewhere); more: words
    that the command needs to go on; without: options whose earlier values these replace."""

    what: str
    place: Path | None
    more: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


_LEFT: ContextVar[GoingOn | None] = ContextVar("left", default=None)


def going_on(what: str, place: Path | None, more: Sequence[str] = (), without: Sequence[str] = ()) -> None:
    """From now on an interrupt leaves ``what`` in ``place``; see GoingOn."""
    _LEFT.set(GoingOn(what, place, tuple(more), tuple(without)))


def begin() -> None:
    """A new command line in this process: nothing of an earlier one counts."""
    _LEFT.set(None)


def interrupted(words: Sequence[str]) -> str:
    """The line. words: the command line without its first word."""
    left = _LEFT.get()
    if left is None or (left.place is not None and not left.place.exists()):
        return f"interrupted; nothing was kept; begin again: {shlex.join(['accprobe', *words])}"
    own, theirs = _parted(words)
    for option in left.without:
        while option in own:
            at = own.index(option)
            del own[at : at + 2]
        own = [word for word in own if not word.startswith(f"{option}=")]
    more = () if left.more and left.more[0] in own else left.more
    where = "" if left.place is None else f" in {left.place}"
    return f"interrupted; {left.what} kept{where}; go on: {shlex.join(['accprobe', *own, *more, *theirs])}"


def _parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the command's own words, ``--`` and what is behind it)."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at:])
