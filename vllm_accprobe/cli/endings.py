"""How a command ends that does not end well: one line and an exit code, never a traceback.

A refusal is a `CommandError` (2) or `NothingThere` (3); `explain` turns any other exception into a line. Ctrl-C is 130:
a command says early, by `going_on`, what it leaves behind and which words go on from there, and `interrupted` makes the
line of that and of what is really on the disk. KeyboardInterrupt may also rise inside a finalizer or a callback of a
weak reference (h5py and numba have many), where Python prints a traceback and drops it; `insisting` gives it once more.
Not here: how each command goes on (comparison/store, opcheck/run, gate).
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import resource
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.whole_file import NoSpace, no_space

TRACEBACK = "ACCPROBE_TRACEBACK"
"""Environment variable: 1 shows the traceback of an internal error."""


class CommandError(Exception):
    """One line: what cannot be done. Exit code 2."""


class CommandInterrupted(Exception):
    """Ctrl-C ended a command. typer makes a bare exit code of KeyboardInterrupt, which a command that `run` started may
    have as well, and says nothing. Exit code 130."""


class NothingThere(CommandError):
    """One line: what there was nothing of to work on. Exit code 3."""


CODES = {"pass": 0, "fail": 1, None: 3}
"""Of a verdict."""
_UNREADABLE = {
    "ArmFileError", "BisectError", "CommandError", "CompareError", "CompatError", "ConfigError", "DumpError",
    "ErrcheckError", "FolderError", "LaunchError", "PatchError", "PromptsError", "RunError", "SamplesError",
    "SendError", "SheetError", "SideError", "SizeError", "TeacherForcingError", "Unavailable", "WheelError",
}  # fmt: skip
"""What rooms raise whose text is the line; by name, so that none of them is imported for it."""
_NOTHING = {"NoPrompt", "NothingCompared", "NothingReadable", "NothingThere", "NotComparable", "OtherIds"}
_WHOLE = {"h5py", "llvmlite", "numba"}
"""What the distribution vllm-accprobe-capture does without (scripts/two_wheels.py)."""


def explain(error: Exception) -> tuple[str, int]:
    """One line and the exit code for whatever a command raised."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "ClickException" in kinds:  # typer brings its own copy of click, older ones use the real one
        usage: Any = error
        command = usage.ctx.command_path if getattr(usage, "ctx", None) else "accprobe"
        line = one_line(usage.format_message()).replace(" Value error, ", " ")
        return f"{line} (see `{command} --help`)", 2
    if kinds & (_NOTHING | _UNREADABLE):
        return one_line(error), 3 if kinds & _NOTHING else 2
    if (code := no_space(error)) is not None:
        return full_disk(error, code), 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", 2
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _WHOLE:
        return (
            f"{error.name} is not installed, which this needs: pip install vllm-accprobe "
            "(vllm-accprobe-capture alone captures, and does not compare)",
            2,
        )
    if isinstance(error, RecursionError) and "JSON" in str(error):
        return "a JSON file that was read is nested far too deeply: it is damaged, or made to be", 2
    if isinstance(error, MemoryError):
        return "not enough memory; choose fewer tensors at a time", 2
    return (
        f"internal error, please report: {type(error).__name__}: {one_line(error)} ({TRACEBACK}=1 shows where)",
        2,
    )


_FULL = {
    errno.ENOSPC: ("the disk is full", "make room"),
    errno.EDQUOT: ("the disk quota is used up", "remove files"),
    errno.EFBIG: ("the file would be larger than files may be", "raise that limit (`ulimit -f`)"),
}


def full_disk(error: BaseException, code: int) -> str:
    """Where, how many bytes are needed and free, and what to do. code: a key of _FULL."""
    what, remedy = _FULL[code]
    name = getattr(error, "filename", None)
    if not isinstance(name, str):
        return f"stdout or a temporary file: {what}; {remedy}, or write to another disk"
    place = Path(os.path.abspath(name))
    while not place.exists():
        place = place.parent
    numbers = [f"{shutil.disk_usage(place).free:,} bytes are free"]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if code == errno.EFBIG and limit != resource.RLIM_INFINITY:
        numbers.insert(0, f"{limit:,} are allowed")
    if isinstance(error, NoSpace) and error.needed:
        numbers.insert(0, f"{'' if error.exact else 'more than '}{error.needed:,} bytes are needed")
    return one_line(f"{name}: {what} ({', '.join(numbers)}): it was not written; {remedy}, or write to another disk")


def one_line(value: object) -> str:
    text = " ".join(str(value).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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


_MOMENT_S = 0.05
"""Long enough for a callback to end, too short to be felt."""


@contextlib.contextmanager
def insisting() -> Iterator[None]:
    """While it lasts, no interrupt of the main thread is lost."""
    before = sys.unraisablehook

    def again(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
            return
        timer = threading.Timer(_MOMENT_S, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
