"""Journal lines as text, the file that they are appended to, run.json, and whether somebody still writes to a dump.

The problem: hundreds of tensors per step each become a line while a model waits, and nine tenths of a line are the same
at every call of a tap; events hold cells that are filled later and numbers that JSON has no word for; a disk that fills
up in the middle of a line must not spoil the lines after it. The idea: the part of a tensor's line that stays is
encoded once, as a template; a line on its way is a template, three numbers and the cell of its bytes. One encoder never
raises. After a failed write the file is cut back to its last whole line, and a small reserve file makes room for the
line that says what happened. A writer locks its journal until it has closed it or died: a front end that ends its
engine waits for that lock, and no longer.

Not here: when a line is written (writer.py), what stands in it (journal.py), who keeps templates (capture).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import xxhash

from vllm_accprobe.dump.files import HeaderEntry, entry_key, entry_room, numbered_siblings, write_all
from vllm_accprobe.dump.findings import ErrcheckError, alive, read
from vllm_accprobe.dump.journal import TensorHead
from vllm_accprobe.dump.schema import JOURNAL, RUN_JSON, SCHEMA, Payload
from vllm_accprobe.dump.stats import MEMORY, StatsCell, in_words


def amend_graphs(root: Path, facts: dict[str, Any]) -> None:
    """Sets ``facts`` in ``engine.graphs`` of the dump at ``root``. Raises OSError; ValueError: run.json is damaged."""
    path = root / RUN_JSON
    run = json.loads(path.read_text(encoding="utf-8"))
    run.setdefault("engine", {}).setdefault("graphs", {}).update(facts)
    part = root / f".{RUN_JSON}.{os.getpid()}"
    with os.fdopen(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
        file.write(json.dumps(run, indent=1) + "\n")
    os.replace(part, path)


def digest(parts: Sequence[tuple[int, int]]) -> str:
    """xxh3-128 over the memory regions (address, bytes) one after the other, 32 hex digits."""
    hasher = xxhash.xxh3_128()
    for address, nbytes in parts:
        hasher.update(MEMORY[address : address + nbytes])
    return hasher.hexdigest()


try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


_RESERVE = ".reserve"
_RESERVE_BYTES = 64 << 10
_CONTINUED = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


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
    """What orjson requires: a cell is its statistics, a dataclass that it writes by itself."""
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
    """Append-only; every method raises OSError as the system gives it. ``size`` counts the whole lines' bytes.

    keep: bytes of a journal that is there and is continued behind them; what follows is cut off. 0: a new one.
    """

    def __init__(self, directory: Path, keep: int = 0):
        self._reserve: Path | None = directory / _RESERVE
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
        self._fd = os.open(directory / JOURNAL, _CONTINUED if keep else flags, 0o600)
        self.size = keep
        free = lock(self._fd)  # locked until this process ends, however it ends: repair keeps away meanwhile
        if keep:
            if not free or os.fstat(self._fd).st_size < keep:
                os.close(self._fd)
                raise OSError(None, "its end is missing" if free else "another run writes it", str(directory / JOURNAL))
            os.ftruncate(self._fd, keep)
            remove_reserve(directory)
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

    def sync(self) -> None:
        """Waits until the lines are on the disk, where a power failure leaves them."""
        os.fsync(self._fd)

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


def write_run_json(root: Path, run: Mapping[str, Any]) -> bool:
    """Creates ``root/run.json`` in one piece, 0600, with ``schema`` added; True if this call made it, False if it was
    there (of several ranks the first wins). Raises OSError where it cannot be written."""
    root = Path(root)
    if not root.is_dir():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(plain({"schema": SCHEMA, **run}), indent=1) + "\n"
    temporary = root / f".{RUN_JSON}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(fd)
        try:
            os.link(temporary, root / RUN_JSON)  # unlike rename, this fails where somebody was faster
        except FileExistsError:
            return False
        except OSError:  # no hard links on this file system
            fd = os.open(root / RUN_JSON, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(fd, "w") as f:
                f.write(text)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)


class TensorTemplate:
    """The part of a tensor's line that stays: made once for each tap, role and form.

    line: what stands in it besides the form, `TensorHead.line`. shape: of what is stored. ``nbytes``: size of the
    payload. ``room``: header bytes that an entry takes.
    """

    __slots__ = ("_front", "dtype", "nbytes", "role", "room", "shape", "tap", "text")

    def __init__(self, line: Mapping[str, Any], dtype: str, shape: tuple[int, ...], nbytes: int):
        self._front = encode(line).decode()[:-2]
        self.tap, self.role = str(line["tap"]), str(line["role"])
        self._shaped(dtype, shape, nbytes)

    def reshaped(self, dtype: str, shape: tuple[int, ...], nbytes: int) -> TensorTemplate:
        """The same tap and role with tensors of another form, which costs a tenth of a new template."""
        other = TensorTemplate.__new__(TensorTemplate)
        other._front, other.tap, other.role = self._front, self.tap, self.role
        other._shaped(dtype, shape, nbytes)
        return other

    def _shaped(self, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        """All that a tensor's form says in its line stands here."""
        self.dtype, self.shape, self.nbytes = dtype, shape, nbytes
        self.room = entry_room(self.tap, self.role, len(shape))
        self.text = f'{self._front},"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]'

    def entry(self, step: int | None, call: int, payload: Payload) -> HeaderEntry:
        """The tensor's entry in a segment's header."""
        key = entry_key(step, self.tap, self.role, call)
        return HeaderEntry(key, self.dtype, self.shape, payload.off, payload.nbytes)


def template_of(head: TensorHead, dtype: str, shape: tuple[int, ...], nbytes: int) -> TensorTemplate:
    """The template of the tensors at ``head``."""
    return TensorTemplate(head.line(), dtype, shape, nbytes)


TensorLine = tuple[TensorTemplate, "int | None", int, int, StatsCell]
"""A tensor's line on its way: template, step (None of a parameter), call, seq, and the cell that has its hash, and by
the time of writing place and statistics."""


def spell(line: TensorLine) -> str:
    """The line as it is written."""
    template, step, call, seq, cell = line
    if step is None:
        return f'{template.text},"call":{call},"seq":{seq}{cell.text or _spell(cell)}'
    return f'{template.text},"call":{call},"seq":{seq},"step":{step}{cell.text or _spell(cell)}'


def _spell(cell: StatsCell) -> str:
    """What every line about the same bytes ends with."""
    payload = cell.payload
    place = "" if payload is None else f'"seg":{payload.seg},"off":{payload.off},"nbytes":{payload.nbytes},'
    hash = "" if cell.hash is None else f'"hash":"{cell.hash}",'
    cell.text = f',{hash}{place}"stats":{statistics(cell)}}}\n'
    return cell.text


GRACE_S = 30.0
"""How long a front end waits for an engine that was ordered to end and whose dump does not grow."""
SETTLE_S = 5.0
"""How long it waits for one that has closed its dump, or never had one, at least."""
GROWING_S = 55.0
"""How long it waits for one that grows, at most: gate, bisect and self-check kill a server 60 s after its SIGTERM."""


class Patience:
    """Waiting for what another thread or process writes: ``still`` seconds without a change, ``most`` in all."""

    def __init__(self, still: float, most: float):
        self._still, self._most, self._seen = still, most, None
        self._began = self._moved = time.monotonic()

    def left(self, seen: Any) -> bool:
        """seen: what changes while something is written."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._moved = seen, now
        return now - self._moved < self._still and now - self._began < self._most


def end(procs: Sequence[Any], timeout: float, root: str) -> None:
    """Tells processes (multiprocessing's) to end and waits for them: ``timeout`` seconds, and longer while they write
    to the dump ``root`` ("" for none)."""
    begin, patience = time.monotonic(), Patience(GRACE_S, GROWING_S)
    for process in procs:
        if process.is_alive():
            process.terminate()
    while running := [process for process in procs if process.is_alive()]:
        now = time.monotonic() - begin
        closed = now >= SETTLE_S and not (root and writing(Path(root)))
        if now >= timeout and (closed or not patience.left(_bytes(root))):
            return
        running[0].join(0.2)


def settle(procs: Sequence[Any], root: str) -> None:
    """Waits for processes (multiprocessing's) that end by themselves while they write to the dump ``root``."""
    patience = Patience(GRACE_S, GROWING_S)
    while root and (running := [process for process in procs if process.is_alive()]) and writing(Path(root)):
        if not patience.left(_bytes(root)):
            return
        running[0].join(0.2)


def _bytes(root: str) -> int:
    """Of all files of the dumps that ``writing`` examines, 0 where they cannot be read."""
    try:
        return sum(f.stat().st_size for dump in _dumps(Path(root)) for f in dump.glob("rank*/*")) if root else 0
    except OSError:
        return 0


def _dumps(root: Path) -> Iterator[Path]:
    return itertools.takewhile(lambda dump: dump == root or dump.is_dir(), numbered_siblings(root))


def writing(root: Path) -> bool:
    """Whether a rank's journal or report is open below ``root``, its ``errcheck``, or the dumps of further engines
    next to it (``root.2`` ...). Never raises."""
    return any(_written(place) for dump in _dumps(root) for place in (dump, dump / "errcheck"))


def _written(dump: Path) -> bool:
    try:
        journals = list(dump.glob(f"rank*/{JOURNAL}"))
        return any(map(_locked, journals)) or alive(read(dump))
    except (OSError, ErrcheckError):
        return False


def _locked(journal: Path) -> bool:
    fd = os.open(journal, os.O_RDONLY)
    try:
        return not lock(fd)
    finally:
        os.close(fd)


Event = dict[str, Any]


Line = TensorLine | Event | Callable[[], Event | None]
