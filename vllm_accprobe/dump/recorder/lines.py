"""Journal lines: how an event becomes one line of JSON, and the file they are appended to.

The problem: an event is a dict that may hold dataclasses of schema.py, cells that are filled later and numbers that
JSON has no word for, and a disk that fills up in the middle of a line must not spoil the lines after it. The idea:
one encoder that never raises, and a file that is cut back to its last whole line after a failed write; a small
reserve file is kept until then, so that there is room for the line that says what happened. Not here: when a line is
written (writer.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

from vllm_accprobe.dump.schema import JOURNAL
from vllm_accprobe.dump.segment import write_all
from vllm_accprobe.dump.stats import StatsCell, in_words

_RESERVE = ".reserve"
_RESERVE_BYTES = 64 << 10


def plain(value: Any) -> Any:
    """``value`` in words that JSON has: dataclasses become dicts without their None fields, cells what they hold,
    numbers of numpy plain ones, NaN and infinity strings, anything else its ``str``."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, StatsCell):
        return plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {k: plain(v) for k, v in fields.items() if v is not None}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return plain(value.item())
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return plain(value.tolist())
    return str(value)


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=plain)


def _cell(value: Any) -> Any:
    """What orjson asks for: a cell is its statistics, a dataclass that it writes by itself."""
    if type(value) is StatsCell:
        return value.value
    raise TypeError  # the slow way knows


def encode(event: Mapping[str, Any]) -> bytes:
    """One line, with its newline. A cell gives its statistics."""
    if event.get("event") in ("tensor", "op"):
        try:  # the kinds of line that are written thousands of times; their numbers are finite by construction
            return orjson.dumps(event, _cell, orjson.OPT_APPEND_NEWLINE)
        except TypeError:
            pass
    try:
        text = _ENCODER.encode(event)
    except (ValueError, TypeError):  # NaN, a key that is no string, a circle: take the slow way round
        text = _ENCODER.encode(plain(event))
    return text.encode() + b"\n"


def statistics(cell: StatsCell) -> str:
    """What stands behind ``"stats":`` in a line about the bytes of ``cell``."""
    if cell.sums is None:
        return _ENCODER.encode(plain(cell.value))
    return str(orjson.dumps(in_words(cell.sums)), "ascii")


class JournalFile:
    """Append-only; every method raises OSError as the system gives it. ``size`` counts the whole lines' bytes."""

    def __init__(self, directory: Path):
        self._reserve: Path | None = directory / _RESERVE
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
        self._fd = os.open(directory / JOURNAL, flags, 0o600)
        self.size = 0
        lock(self._fd)  # held until this process ends, however it ends: repair keeps away meanwhile
        fd = os.open(self._reserve, flags, 0o600)
        try:
            write_all(fd, bytes(_RESERVE_BYTES), 0)
        finally:
            os.close(fd)

    def append(self, data: bytes) -> None:
        """All of ``data`` or, with OSError, nothing of it."""
        try:
            write_all(self._fd, data, self.size)
        except OSError:
            try:
                os.ftruncate(self._fd, self.size)
            except OSError:
                pass
            raise
        self.size += len(data)

    def release_reserve(self) -> None:
        """Gives the reserved room back to the file system, for the last lines."""
        if self._reserve is not None:
            self._reserve.unlink(missing_ok=True)
            self._reserve = None

    def close(self) -> None:
        """Syncs and closes the file; later calls do nothing. Raises OSError."""
        if self._fd >= 0:
            try:
                os.fsync(self._fd)
            finally:
                os.close(self._fd)
                self._fd = -1


def lock(fd: int) -> bool:
    """Claims a journal for writing; False when another process has it. True where the file system has no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove_reserve(directory: Path) -> None:
    """For a killed run, which left it behind."""
    (directory / _RESERVE).unlink(missing_ok=True)
