"""What cannot be done, in one line and with an exit code, never a traceback.

A refusal is a `CommandError` (2) or `NothingThere` (3); `explain` turns any other exception into a line. Not here:
Ctrl-C (cli/endings.py), what writes (whole_file.py).
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

from vllm_accprobe.whole_file import NoSpace, no_space

TRACEBACK = "ACCPROBE_TRACEBACK"
"""Environment variable: 1 shows the traceback of an internal error."""


class CommandError(Exception):
    """One line: what cannot be done. Exit code 2."""


class NothingThere(CommandError):
    """One line: what there was nothing of to work on. Exit code 3."""


CODES = {"pass": 0, "fail": 1, None: 3}
"""Of a verdict."""
_UNREADABLE = {
    "ArmFileError", "BisectError", "CommandError", "CompareError", "CompatError", "ConfigError", "DumpError",
    "ErrcheckError", "FolderError", "LaunchError", "PatchError", "PromptsError", "RunError", "SamplesError",
    "SendError", "SheetError", "SideError", "TeacherForcingError", "TlsError", "Unavailable", "WheelError",
}  # fmt: skip
"""What rooms raise whose text is the line; by name, so that none of them is imported for it."""
_NOTHING = {"NothingCompared", "NothingReadable", "NothingThere", "NotComparable"}
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
