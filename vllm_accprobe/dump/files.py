"""The files of a dump: how a segment is written, and how any of them is opened without trusting it.

The problem: safetensors wants its header, which lists every tensor, before the data, and a capture knows the list only
when it is over; and a dump may be made to lead a reader out of its directory, to make it wait or allocate. The idea:
the header's length is fixed and its room reserved at creation, so the start of the data is known while the file is
still called ``.part``; data follow in large aligned writes, past the page cache where the file system can; at the end
the header is filled in and the file renamed. Gaps of alignment are listed as tensors named ``__pad...``, since the
format allows none. Only plain files are opened, never through a link; names come from numbers, sizes from the file
system.

Not here: what is written when (writer.py), what lines say and reading tensors (reader.py), repair (repair.py).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from json.encoder import encode_basestring_ascii as quote
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

from vllm_accprobe.dump.schema import segment_name

try:
    import fcntl
except ImportError:  # Windows can read dumps, and write them without O_DIRECT
    fcntl = None  # type: ignore[assignment]

from vllm_accprobe.dump.dtypes import DTYPES

ALIGN = 64
PAGE = 4096
HEADER_BYTES = 1 << 20
"""Length word, header and padding of a segment: data start here, on a page."""
MAX_HEADER = 100_000_000
"""The longest header that the safetensors library accepts."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)


def take_room(fd: int, size: int) -> None:
    """The first ``size`` bytes of a file get their place on the disk now, where its file system can do so. Raises
    OSError where there is none."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


class HeaderEntry(NamedTuple):
    """One tensor of a segment's header; ``off`` counts from the start of the data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    off: int
    nbytes: int


def part_name(index: int) -> str:
    """Name of a segment that is being written."""
    return segment_name(index) + ".part"


def entry_key(step: int | None, tap: str, role: str, call: int) -> str:
    """A tensor's name in the header; step: None of a parameter."""
    return f"{'param' if step is None else step}|{tap}|{role}|{call}"


def entry_room(tap: str, role: str, ndim: int) -> int:
    """Header bytes to expect of one tensor and of the pad before it. Too little only for names full of quotes and
    control characters; ``build_header`` then leaves the names out."""
    length = len(tap) + len(role)
    return (length if tap.isascii() else 6 * length) + 20 * ndim + 250


def build_header(
    entries: Iterable[HeaderEntry],
    data_bytes: int,
    room: int,
    metadata: Mapping[str, str] = MappingProxyType({}),
    once: bool = True,
) -> bytes:
    """The header, exactly ``room`` bytes, for ``entries`` within ``data_bytes`` of data.

    Entries of the same bytes are listed once, unless ``once`` is False (tensors without elements share a place). A
    dtype that is not known, or a shape that does not fit the bytes, is listed as plain bytes. metadata: what else the
    header says of the file. Raises ValueError when entries overlap, reach past the data, or do not fit into ``room``.
    """
    names: list[str] = []
    descriptions: list[str] = []  # text at once: thousands of small dicts are a feast for the garbage collector
    used = {"__metadata__"}
    repeats: dict[str, int] = {}
    end = 0
    last = (-1, -1)

    def add(name: str, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> None:
        if not name.isascii():  # half a surrogate pair can stand in a Python string, but not in the library's JSON
            name = name.encode("utf-8", "backslashreplace").decode()
        unique = name
        while unique in used:
            repeats[name] = repeats.get(name, 1) + 1
            unique = f"{name}~{repeats[name]}"
        used.add(unique)
        names.append(unique)
        sizes = ",".join(map(str, shape))
        descriptions.append(f'{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{start},{stop}]}}')

    for e in sorted(entries, key=lambda e: (e.off, e.off + e.nbytes)):
        if (e.off, e.nbytes) == last and once:
            continue
        last = (e.off, e.nbytes)
        if e.off < end or e.nbytes < 0:
            raise ValueError(f"tensors overlap at byte {e.off} ({e.key})")
        if e.off > end:
            add(f"__pad{len(names)}", "U8", (e.off - end,), end, e.off)
        end = e.off + e.nbytes
        dtype, shape = _file_dtype(e)
        add(e.key, dtype, shape, e.off, end)
    if end > data_bytes:
        raise ValueError(f"the last tensor ends at byte {end} of {data_bytes}")
    if end < data_bytes:
        add("__pad_end", "U8", (data_bytes - end,), end, data_bytes)
    text = _joined(names, descriptions, metadata)
    if len(text) > room:  # short names cost less than entry_room says of any name
        text = _joined([f"t{i}" for i in range(len(names))], descriptions, metadata)
    if len(text) > room:
        raise ValueError(f"a header of {len(text)} bytes does not fit into the {room} reserved")
    return text + b" " * (room - len(text))


def _joined(names: list[str], descriptions: list[str], metadata: Mapping[str, str]) -> bytes:
    listed = (f"{quote(name)}:{text}" for name, text in zip(names, descriptions, strict=True))
    about = ",".join(f"{quote(k)}:{quote(v)}" for k, v in {"format": "accprobe", **metadata}.items())
    return ",".join([f'{{"__metadata__":{{{about}}}', *listed]).encode() + b"}"


def _file_dtype(e: HeaderEntry) -> tuple[str, tuple[int, ...]]:
    info = DTYPES.get(e.dtype)
    if info is not None:
        size = info.itemsize
        for d in e.shape:
            size *= d
        if size == e.nbytes:
            return info.safetensors, e.shape + info.tail
    return "U8", (e.nbytes,)


class SegmentFile:
    """A segment being written. Every method raises OSError as the system gives it."""

    def __init__(self, directory: Path, index: int, *, direct: bool = True):
        self.index = index
        self.path = directory / segment_name(index)
        self.part = directory / part_name(index)
        self.entries: list[HeaderEntry] = []
        self.written = 0
        self._fd = os.open(self.part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            write_all(self._fd, (HEADER_BYTES - 8).to_bytes(8, "little"), 0)
            # The header is written last; its room is taken first, so that a disk that fills up meanwhile cannot make
            # the data before it unreadable for other tools.
            take_room(self._fd, HEADER_BYTES)
            if direct:
                self._set_direct(True)
        except OSError:
            os.close(self._fd)
            raise

    def write(self, block: memoryview) -> None:
        """Appends ``block``. To go past the page cache its address must be page-aligned and its length, except for the
        last one, a multiple of PAGE. After an error the file is cut back to what was whole before, to free the disk."""
        try:
            self._write(block)
        except OSError:
            try:
                os.ftruncate(self._fd, HEADER_BYTES + self.written)
            except OSError:
                pass
            raise
        self.written += len(block)

    def _write(self, block: memoryview) -> None:
        offset = HEADER_BYTES + self.written
        try:
            write_all(self._fd, block, offset)
        except OSError as e:
            # EINVAL: this file system takes O_DIRECT at open but not like this, or a short write ended unaligned.
            if e.errno != errno.EINVAL or not self._set_direct(False):
                raise
            write_all(self._fd, block, offset)

    def _set_direct(self, on: bool) -> bool:
        if not (_O_DIRECT and fcntl):
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, (flags | _O_DIRECT) if on else (flags & ~_O_DIRECT))
        except OSError:  # tmpfs before Linux 6.6 and some network file systems have none
            return False
        return True

    def finish(self) -> None:
        """Fills in the header with those entries whose bytes are written, syncs and takes off ``.part``."""
        try:
            self._set_direct(False)
            entries = [e for e in self.entries if e.off + e.nbytes <= self.written]
            end = max((e.off + e.nbytes for e in entries), default=0)
            write_all(self._fd, build_header(entries, end, HEADER_BYTES - 8), 8)
            os.ftruncate(self._fd, HEADER_BYTES + end)
            getattr(os, "fdatasync", os.fsync)(self._fd)
        finally:
            self.abandon()
        os.rename(self.part, self.path)

    def abandon(self) -> None:
        """Closes the file and leaves it as ``.part``; the journal still finds the tensors in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite until everything is written. Raises OSError."""
    view = memoryview(data)
    while len(view):
        n = os.pwrite(fd, view, offset)
        if n == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[n:], offset + n


MAX_LINE = 32 << 20
MISSING = "is missing"


class DumpError(Exception):
    """One line: what cannot be read, where, and what to do."""


class SegmentData:
    """Where a segment's data lie: ``size`` bytes from ``start`` on in ``path``."""

    __slots__ = ("path", "size", "start")

    def __init__(self, path: Path, start: int, size: int):
        self.path, self.start, self.size = path, start, size


def numbered_siblings(root: Path) -> Iterator[Path]:
    """``root`` and the names of what is used where it is taken: ``root.2``, ``root.3`` ... ``root.999``."""
    yield root
    for number in range(2, 1000):
        yield root.with_name(f"{root.name}.{number}")


def open_regular(path: Path) -> int:
    """Raises OSError also for a link or anything else that is not a plain file: a dump's files lie in the dump."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "not a plain file")
    return fd


def read_into(fd: int, offset: int, target: memoryview) -> bool:
    """Fills ``target``, bytes, from ``offset`` of an open file on; False where the file ends before. Raises OSError."""
    done = 0
    while done < len(target):
        n = os.preadv(fd, [target[done:]], offset + done)
        if n == 0:
            return False
        done += n
    return True


def segment_data(path: Path) -> SegmentData:
    """Start and size of the data of a segment file, finished or ``.part``. Raises DumpError."""
    try:
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
            word = os.pread(fd, 8, 0)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise DumpError(f"{path.name} {MISSING}") from None
    except OSError as e:
        raise DumpError(f"{path.name} cannot be opened: {e.strerror or e}") from None
    header = int.from_bytes(word, "little")
    if len(word) < 8 or header > MAX_HEADER or 8 + header > size:
        raise DumpError(f"{path.name} has a damaged header")
    return SegmentData(path, 8 + header, size - 8 - header)


def find_segment(directory: Path, index: int) -> SegmentData:
    """The data of segment ``index`` in a rank's directory, finished or still ``.part``. Raises DumpError."""
    finished = directory / segment_name(index)
    part = directory / part_name(index)
    return segment_data(part if not finished.exists() and part.exists() else finished)


def bounded_line(f: IO[bytes], path: Path, most: int | None = None) -> bytes:
    """The next line of ``f``, b"" at its end. Raises DumpError where it is longer than ``most`` (MAX_LINE) bytes."""
    most = most or MAX_LINE
    raw = f.readline(most + 1)
    if len(raw) > most:
        raise DumpError(f"{path}: a line has more than {most >> 20} MiB: write one object on each line (jsonl)")
    return raw


def bounded_lines(path: Path, most: int | None = None) -> Iterator[bytes]:
    """The lines of a file that people bring. Raises OSError, DumpError."""
    with path.open("rb") as f:
        yield from iter(lambda: bounded_line(f, path, most), b"")


_PIECE = 1 << 16
"""Bytes of a line that are read at once: few lines are longer, and some thousand lie in memory together."""


def journal_lines(path: Path, most: int, number: int = 1, at: int = 0) -> Iterator[tuple[int, list[bytes], int]]:
    """(number of the first, up to ``most`` lines, their length). number, at: of the line to begin with, and where it
    is. A line longer than MAX_LINE comes alone and is not there; a last line without a newline is torn, and comes alone
    with number 0. Raises OSError."""
    with os.fdopen(open_regular(path), "rb", buffering=1 << 20) as f:
        f.seek(at)
        more = partial(f.readline, min(_PIECE, MAX_LINE))
        while lines := list(islice(iter(more, b""), most)):
            if not all(map(_WHOLE, lines)):
                pieces, lines = iter(lines), []
                for piece in pieces:
                    own, length = [piece], len(piece)
                    while not (whole := piece.endswith(b"\n")) and (piece := next(pieces, b"") or more()):
                        length += len(piece)
                        own = [*own, piece] if length <= MAX_LINE else []
                    if whole and own:
                        lines.append(b"".join(own))
                        continue
                    if lines:
                        yield number, lines, sum(map(len, lines))
                    number, lines = number + len(lines), []
                    yield (number if whole else 0), [b"".join(own)] if own else [], length
                    number += 1
            if lines:
                yield number, lines, sum(map(len, lines))
                number += len(lines)


_WHOLE = methodcaller("endswith", b"\n")
