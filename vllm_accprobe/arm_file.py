"""The control file of a running capture, DUMP/arm.json: what is written there, and who may have written it.

The problem: rows are wanted for one pass out of three, while the server stays up and its cache warm; and whoever may
write the file decides whose prompts reach the disk. The idea: a small json in the dump's directory, replaced whole.
It is believed only if it is a plain file of the server's own user that nobody else can read or write, and if every key
in it is known; anything else is refused in one line, and the previous settings stay.
Not here: when a server reads it (capture/arming.py), what a selection does (capture/core/rows.py).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_accprobe.config import Ranges, nearest, parse_ranges, read_globs, read_modules
from vllm_accprobe.dump.decode import fits
from vllm_accprobe.whole_file import whole

NAME = "arm.json"
MAX_BYTES = 1 << 16
"""Chosen: some thousand request ids; it travels to every rank with every step."""


def _read_rows(value: object) -> dict[str, Ranges]:
    assert isinstance(value, Mapping)
    found = {str(name): _merged(parse_ranges(positions)) for name, positions in value.items()}
    if not all(found.values()):
        raise ValueError("rows: a request has no positions")
    return {name: positions for name, positions in found.items() if positions}


def _merged(ranges: Ranges | None) -> Ranges | None:
    """Without positions that two ranges have: each row is captured once."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges or ()):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found) or None


_READERS: dict[str, Callable[[object], Any]] = {
    "requests": read_globs, "tokens": parse_ranges, "modules": read_modules, "steps": parse_ranges, "rows": _read_rows
}  # fmt: skip
_KEYS = ("on", *_READERS)


class ArmFileError(ValueError):
    """One line: why a control file is refused, and what would be right."""


@dataclass(frozen=True)
class ArmSelection:
    """What is captured from now on. on: anything at all. requests: globs; tokens: ordinals; modules: globs, of those
    that VLLM_ACCPROBE_MODULES has chosen; steps: engine steps, the first under this selection is 0. None: as the server
    was started. rows: by request id, the only positions of its sequence that are captured; other requests are captured
    whole."""

    on: bool = True
    requests: tuple[str, ...] | None = None
    tokens: Ranges | None = None
    modules: tuple[str, ...] | None = None
    steps: Ranges | None = None
    rows: Mapping[str, Ranges] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The file's object; ranges as text."""
        spans = {"tokens": _spans(self.tokens), "steps": _spans(self.steps)}
        lists = {"requests": _list(self.requests), "modules": _list(self.modules)}
        rows = {name: _spans(positions) for name, positions in self.rows.items()} or None
        return {"on": self.on, **{k: v for k, v in (lists | spans | {"rows": rows}).items() if v is not None}}


def _list(value: tuple[str, ...] | None) -> list[str] | None:
    return None if value is None else list(value)


def _spans(ranges: Ranges | None) -> str | None:
    return None if ranges is None else ",".join(f"{a}-{b}" if a != b else str(a) for a, b in ranges)


def parse_selection(value: Any) -> ArmSelection:
    """The selection of the file's object, whoever made it. Raises ArmFileError."""
    if not isinstance(value, Mapping):
        raise ArmFileError("it is no object with " + ", ".join(_KEYS))
    for key in value:
        if key not in _KEYS:
            raise ArmFileError(f"{str(key)[:40]!r} is none of {', '.join(_KEYS)}{nearest(str(key)[:40], _KEYS)}")
    on = value.get("on", True)
    if type(on) is not bool:
        raise ArmFileError("on is true or false")
    for key, item in value.items():
        if key in ("requests", "modules"):
            if not fits(str | list[str], item):
                raise ArmFileError(f"{key} is a list of globs")
        elif key == "rows":
            if not fits(dict[str, str | int], item):
                raise ArmFileError("rows is an object: a request's id, and positions such as '0,31-33'")
        elif key != "on" and type(item) not in (str, int):
            raise ArmFileError(f"{key} is a text such as '0-4,7'")
    try:
        found = {key: _READERS[key](value[key]) for key in _KEYS if key in value and key != "on"}
    except ValueError as error:
        raise ArmFileError(str(error)[:200]) from None
    return ArmSelection(on, **found)


def literal(name: str) -> str:
    """A glob that matches this request's id, whatever is in it, and hardly any other."""
    escaped = "".join(f"[{c}]" if c in "*?[" else "?" if c == "," else c for c in name)
    return f"?{escaped[1:]}" if escaped.startswith("!") else escaped


def read(path: Path, owner: int | None = None) -> ArmSelection:
    """What the file says. owner: the user who must own it, this process's by default. Raises ArmFileError, and
    FileNotFoundError where there is none."""
    owner = os.geteuid() if owner is None else owner
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "it is a link" if path.is_symlink() else error.strerror or str(error)
        raise ArmFileError(what) from None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise ArmFileError("it is no plain file")
        if about.st_uid != owner:
            raise ArmFileError("it belongs to another user than the server")
        if stat.S_IMODE(about.st_mode) & 0o177:
            raise ArmFileError(f"its mode is {stat.S_IMODE(about.st_mode):04o}, and only 0600 is believed")
        if about.st_nlink != 1:
            raise ArmFileError("it has a second name (a hard link)")
        raw = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(raw) > MAX_BYTES:
        raise ArmFileError(f"it is larger than {MAX_BYTES >> 10} KiB")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise ArmFileError("it is no json") from None
    return parse_selection(value)


def write(dump: Path, selection: ArmSelection) -> Path:
    """Puts the control file of the dump in place, whole, 0600; the file. Raises OSError."""
    path = dump / NAME
    raw = (json.dumps(selection.to_json(), indent=1) + "\n").encode()
    with whole(path) as part:
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as f:
            os.fchmod(fd, 0o600)
            f.write(raw)
            f.flush()
            os.fsync(fd)
    return path
