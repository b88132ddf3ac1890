"""What a command leaves behind that a signal ends: one line, and the words that go on from there.

Ctrl-C is 130, SIGTERM 143, SIGHUP (a closed terminal) 129: a command says early, by `going_on`, what it leaves behind
and which words go on from there, and `interrupted` makes the line of that and of what is really on the disk. All three
unwind the stack, so that servers are ended and what is temporary is removed (`unwinding`). An exception of a signal may
also rise inside a finalizer or a callback of a weak reference (h5py and numba have many), where Python prints a
traceback and drops it; `insisting` gives it once more. Not here: errors (refusals.py), how each command goes on
(comparison/store, opcheck/run, gate).
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import math
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


class CommandInterrupted(Exception):
    """Ctrl-C ended a command. typer makes a bare exit code of KeyboardInterrupt, which a command that `run` started may
    have as well, and says nothing. Exit code 130."""


class CommandTerminated(SystemExit):
    """SIGTERM or SIGHUP ended a command. code: the exit code, as without us. last: when one was raised that was not
    lost, by time.monotonic()."""

    last: ClassVar[float] = -math.inf


@dataclass(frozen=True)
class GoingOn:
    """what: is kept, for people; place: where it is, and it is kept where that exists (None: elsewhere); more: words
    that the command needs to go on; without: options whose earlier values these replace."""

    what: str
    place: Path | None
    more: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


_LEFT: ContextVar[GoingOn | None] = ContextVar("left", default=None)
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


def going_on(what: str, place: Path | None, more: Sequence[str] = (), without: Sequence[str] = ()) -> None:
    """From now on an interrupt leaves ``what`` in ``place``; see GoingOn."""
    _LEFT.set(GoingOn(what, place, tuple(more), tuple(without)))


def begin(alone: bool = False) -> None:
    """A new command line in this process: nothing of an earlier one counts. alone: the process ends with it."""
    _LEFT.set(None)
    _ALONE.set(alone)


def imported() -> None:
    """Of a command with its modules, which stay until its process ends: looking through them once takes 0.03 s."""
    if _ALONE.get():
        gc.freeze()


def interrupted(words: Sequence[str], code: int = 130) -> str:
    """The line. words: the command line without its first word; code: the exit code, 128 + the signal's number."""
    left = _LEFT.get()
    what = "interrupted" if code == 130 else f"ended by {signal.Signals(code - 128).name}"
    if left is None or (left.place is not None and not left.place.exists()):
        return f"{what}; nothing was kept; begin again: {shlex.join(['accprobe', *words])}"
    at = list(words).index("--") if "--" in words else len(words)
    own, theirs = list(words[:at]), list(words[at:])
    for option in left.without:
        while option in own:
            at = own.index(option)
            del own[at : at + 2]
        own = [word for word in own if not word.startswith(f"{option}=")]
    more = () if left.more and left.more[0] in own else left.more
    where = "" if left.place is None else f" in {left.place}"
    return f"{what}; {left.what} kept{where}; go on: {shlex.join(['accprobe', *own, *more, *theirs])}"


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """While it lasts, SIGTERM and SIGHUP raise CommandTerminated, but one that is ignored (nohup) stays so. What comes
    within a second more does not cut short what the first one unwinds: systemd sends both, a terminal SIGHUP twice."""

    def end(number: int, _: object) -> None:
        if time.monotonic() - CommandTerminated.last >= _TOGETHER_S:
            CommandTerminated.last = time.monotonic()
            raise CommandTerminated(128 + number)

    CommandTerminated.last = -math.inf
    main = threading.current_thread() is threading.main_thread()
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


_MOMENT_S = 0.05
"""Long enough for a callback to end, too short to be felt."""
_TOGETHER_S = 1.0
"""Chosen: a later signal is of somebody who insists."""


@contextlib.contextmanager
def insisting() -> Iterator[None]:
    """While it lasts, no such exception of the main thread is lost."""
    before = sys.unraisablehook

    def again(lost: Any) -> None:
        if not issubclass(lost.exc_type, (KeyboardInterrupt, CommandTerminated)):
            before(lost)
            return
        CommandTerminated.last = -math.inf
        number = lost.exc_value.code - 128 if issubclass(lost.exc_type, CommandTerminated) else signal.SIGINT
        timer = threading.Timer(_MOMENT_S, _thread.interrupt_main, [number])
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
