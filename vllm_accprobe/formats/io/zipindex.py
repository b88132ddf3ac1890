"""Where the members of a zip archive lie, without unpacking anything.

The problem: torch's files and npz are zip archives, and an archive can announce any size and any number of members. The
idea: the central directory alone is read, as large as it really is; a member is a stretch of the file, read only within
the file; one that is compressed is unpacked piece by piece and never beyond what was requested.
Source: PKWARE APPNOTE 6.3.9, sections 4.3.7, 4.3.12 to 4.3.16 and 4.5.3.
Not here: what the members are.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

from vllm_accprobe.dump.files import read_into
from vllm_accprobe.formats.io.plain_file import SHORTER, FileProblem

MAX_DIRECTORY = 512 << 20
_END, _END64, _LOCATOR, _CENTRAL, _LOCAL = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x01\x02", b"PK\x03\x04"
_ENTRY = struct.Struct("<4xHHHHHHIIIHHHHHII")
"""Versions made by and needed, flags, method, time, date, CRC, packed, size, lengths of name, extra and comment, disk,
two attributes, where the local header is."""
STORED, DEFLATED = 0, 8
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_MUCH, _DENSE = 64 << 20, 250
"""Bytes from which on what is packed must be no smaller than one byte for so many."""


class ZipError(FileProblem):
    """What is wrong with the archive."""


@dataclass(frozen=True, slots=True)
class ZipMember:
    """size: bytes it says to have; packed: bytes that it takes in the file; header: where its local header begins."""

    name: str
    method: int
    packed: int
    size: int
    header: int

    def start(self, fd: int) -> int:
        """Where the data of a stored member begin. Raises ZipError for a compressed one."""
        if self.method != STORED:
            raise ZipError(f"{self.name[:60]!r} is compressed, which torch never does")
        if self.size != self.packed:
            raise ZipError("its directory is damaged")
        return self.data(fd)

    def data(self, fd: int) -> int:
        """Where its bytes, packed or not, begin in the file."""
        if self.header > os.fstat(fd).st_size:  # pread takes no offset beyond 2**63
            raise ZipError(f"{self.name[:60]!r} is not where the archive's directory says")
        local = os.pread(fd, 30, self.header)
        if len(local) < 30 or local[:4] != _LOCAL:
            raise ZipError(f"{self.name[:60]!r} is not where the archive's directory says")
        name, extra = struct.unpack_from("<HH", local, 26)
        begin: int = self.header + 30 + name + extra
        if begin + self.packed > os.fstat(fd).st_size:
            raise ZipError(f"it {SHORTER}")
        return begin

    def read(self, fd: int, limit: int) -> bytes:
        """All of it, unpacked. Raises ZipError beyond ``limit`` bytes."""
        if self.size > limit:
            raise ZipError(f"{self.name[:60]!r} has {self.size:,} bytes, more than the {limit:,} it may have")
        if self.method == STORED:
            return _exactly(fd, self.start(fd), self.size)
        return Unpacker(self, fd).read(self.size)


class Unpacker:
    """The bytes of a member, one after the other, packed or not."""

    def __init__(self, member: ZipMember, fd: int):
        if member.method not in (STORED, DEFLATED):
            raise ZipError(f"{member.name[:60]!r} is packed by method {member.method}, which is not known here")
        self._member, self._fd = member, fd
        self._at = member.data(fd)
        self._end = self._at + member.packed
        self._inflate = zlib.decompressobj(-15) if member.method == DEFLATED else None
        self._rest = b""

    def read(self, n: int) -> bytes:
        """The next ``n`` bytes. Raises ZipError where there are fewer."""
        out = bytearray()
        while len(out) < n:
            piece = self._next(n - len(out))
            if not piece:
                raise ZipError(f"{self._member.name[:60]!r} is shorter than it says")
            out += piece
        return bytes(out)

    def into(self, target: memoryview) -> None:
        """Fills ``target``. Raises ZipError where there are fewer bytes."""
        done = 0
        while done < len(target):
            piece = self._next(min(len(target) - done, 1 << 20))
            if not piece:
                raise ZipError(f"{self._member.name[:60]!r} is shorter than it says")
            target[done : done + len(piece)] = piece
            done += len(piece)

    def _next(self, most: int) -> bytes:
        if self._inflate is None:
            piece = os.pread(self._fd, min(most, self._end - self._at), self._at)
            self._at += len(piece)
            return piece
        while True:
            if not self._rest and self._at < self._end:
                self._rest = os.pread(self._fd, min(1 << 16, self._end - self._at), self._at)
                self._at += len(self._rest)
            try:
                piece = self._inflate.decompress(self._rest, most)
            except zlib.error:
                raise ZipError(f"{self._member.name[:60]!r} is damaged") from None
            self._rest = self._inflate.unconsumed_tail
            if piece or self._inflate.eof or (not self._rest and self._at >= self._end):
                return piece


def index(fd: int, size: int, *, once: bool = False, most: int = MAX_DIRECTORY) -> dict[str, ZipMember]:
    """The members by name; of several with one name the first, or, with ``once``, an error. most: bytes of the
    directory. Raises ZipError."""
    tail_at, tail = _end_record(fd, size)
    count, length, start = struct.unpack_from("<HII", tail, 10)
    if count == _FULL16 or _FULL32 in (length, start):
        count, length, start = _zip64(fd, tail_at)
    if length > most or start + length > size or count * 46 > length:
        raise ZipError("its directory is damaged")
    data = _exactly(fd, start, length)
    members: dict[str, ZipMember] = {}
    at = 0
    for _ in range(count):
        if data[at : at + 4] != _CENTRAL or at + 46 > length:
            raise ZipError("its directory is damaged")
        (_, _, flags, method, _, _, _, packed, whole, n_name, n_extra, n_comment, _, _, _, header) = _ENTRY.unpack_from(
            data, at
        )
        end = at + 46 + n_name + n_extra + n_comment
        if end > length:
            raise ZipError("its directory is damaged")
        if flags & 1:
            raise ZipError("it is encrypted")
        name = data[at + 46 : at + 46 + n_name].decode("utf-8", "replace")
        if _FULL32 in (packed, whole, header):
            extra = data[at + 46 + n_name : at + 46 + n_name + n_extra]
            whole, packed, header = _large(extra, whole, packed, header)
        if once and name in members:
            raise ZipError(f"it has {name[:60]!r} twice")
        members.setdefault(name, ZipMember(name, method, packed, whole, header))
        at = end
    return members


def too_much(packed: int, whole: int) -> bool:
    """Whether what is packed would grow more than a tensor of numbers does: deflate's own limit is 1032 to one, and
    what is large and nearly all zeros is a trap far more often than a dump."""
    return whole > 1100 * packed + (64 << 10) or (whole > _MUCH and whole > _DENSE * packed)


def _end_record(fd: int, size: int) -> tuple[int, bytes]:
    """(where, record) of the end of the central directory: the last thing in the file but for a comment."""
    for room in (22, 22 + _FULL16):
        start = max(size - room, 0)
        tail = os.pread(fd, room, start)
        at = tail.rfind(_END)
        if at >= 0 and at + 22 <= len(tail):
            return start + at, tail[at : at + 22]
    raise ZipError("it has no end: not all of it was written or copied")


def _zip64(fd: int, tail_at: int) -> tuple[int, int, int]:
    locator = os.pread(fd, 20, max(tail_at - 20, 0))
    if locator[:4] != _LOCATOR:
        raise ZipError("its directory is damaged")
    record = os.pread(fd, 56, struct.unpack_from("<Q", locator, 8)[0] & 0x7FFFFFFFFFFFFFFF)
    if len(record) < 56 or record[:4] != _END64:
        raise ZipError("its directory is damaged")
    count, length, start = struct.unpack_from("<QQQ", record, 32)
    return count, length, start


def _large(extra: bytes, whole: int, packed: int, header: int) -> tuple[int, int, int]:
    """Sizes that do not fit 32 bits stand in the extra field 1, in this order, those alone that do not fit."""
    at = 0
    while at + 4 <= len(extra):
        kind, n = struct.unpack_from("<HH", extra, at)
        if kind == 1 and n % 8 == 0 and at + 4 + n <= len(extra):
            values = list(struct.unpack_from(f"<{n // 8}Q", extra, at + 4))
            out = [values.pop(0) if v == _FULL32 and values else v for v in (whole, packed, header)]
            return out[0], out[1], out[2]
        at += 4 + n
    raise ZipError("its directory is damaged")


def _exactly(fd: int, start: int, n: int) -> bytes:
    data = bytearray(n)
    if not read_into(fd, start, memoryview(data)):
        raise ZipError(f"it {SHORTER}")
    return bytes(data)
