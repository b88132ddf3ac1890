"""Arrays of numpy: .npy files, and the members of an .npz archive.

The problem: numpy's files say their dtype and shape as Python text, may hold pickled objects, and an archive's members
may be packed to a thousandth. The idea: the text is read as a literal and held against the file's size before anything
is allocated; objects and text are refused; of an archive each member is a tensor, or a reason why it is none.
Source: numpy/lib/format.py (npy 1.0 to 3.0).
Not here: the archive's directory (zipindex.py), what a file is (tensor_file.py).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.common.foreign import Read, numpy_dtype
from vllm_accprobe.formats.io.plain_file import FileTensor, descriptor, read_bytes
from vllm_accprobe.formats.io.zipindex import DEFLATED, STORED, Unpacker, ZipError, ZipMember, too_much

MAGIC = b"\x93NUMPY"
MAX_UNPACKED = 1 << 30
"""Bytes of a compressed member: what a small file may grow to."""


@dataclass(frozen=True)
class NpyHeader:
    """dtype: torch's name; swap: the other byte order; offset: of the values, from the array's first byte."""

    dtype: str
    shape: tuple[int, ...]
    swap: bool
    fortran: bool
    offset: int

    @property
    def nbytes(self) -> int:
        info = DTYPES.get(self.dtype)
        return prod(self.shape) * info.itemsize if info else 0

    def array(self, data: np.ndarray) -> np.ndarray:
        """The bits from ``data``, uint8 [nbytes]."""
        info = DTYPES[self.dtype]
        flat = data.view(info.storage)
        if self.swap:
            flat = flat.view(info.storage.newbyteorder(">")).astype(info.storage)
        if self.fortran:
            return np.ascontiguousarray(flat.reshape(self.shape[::-1]).T)
        return flat.reshape(self.shape)


def npy_header(begin: bytes, where: str) -> NpyHeader:
    """From the first bytes of an npy array, all of its header. Raises DumpError."""
    if len(begin) < 12 or begin[:6] != MAGIC:
        raise DumpError(f"{where} is no npy array, or ends too early")
    wide = begin[6] > 1
    start = 12 if wide else 10
    length = int.from_bytes(begin[8:start], "little")
    if begin[6] > 3 or len(begin) < start + length or length > 1 << 20:
        raise DumpError(f"{where} has a damaged npy header")
    try:
        said = ast.literal_eval(begin[start : start + length].decode("utf-8" if begin[6] > 2 else "latin1").strip())
        descr, shape, fortran = said["descr"], said["shape"], said["fortran_order"]
        plain = isinstance(descr, str) and len(descr) < 20 and "O" not in descr
        dtype = np.dtype(descr) if plain else None
        ok = isinstance(shape, tuple) and len(shape) <= 64 and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        raise DumpError(f"{where} has a damaged npy header") from None
    if not ok:
        raise DumpError(f"{where} has an npy header with an impossible shape")
    if dtype is None or dtype.kind not in "fiubcV":
        raise DumpError(f"{where} holds {str(descr)[:40]}, not numbers: object arrays and text are not read")
    name = "bfloat16" if dtype == np.dtype("V2") else numpy_dtype(dtype)  # how numpy saves ml_dtypes' bfloat16
    return NpyHeader(name, shape, dtype.byteorder == ">", bool(fortran), start + length)


def item(path: Path, fd: int, size: int) -> FileTensor:
    header = npy_header(os.pread(fd, _npy_room(os.pread(fd, 12, 0)), 0), str(path))
    if header.offset + header.nbytes > size:
        raise DumpError(f"{path} has {size - header.offset:,} bytes of values where {header.nbytes:,} were announced")

    def read() -> np.ndarray:
        return header.array(read_bytes(path, header.offset, header.nbytes))

    return FileTensor("", header.dtype, header.shape, read)


def _npy_room(begin: bytes) -> int:
    """How many bytes an array's header has, at most."""
    wide = len(begin) > 6 and begin[6] > 1
    length = int.from_bytes(begin[8 : 12 if wide else 10], "little")
    return 12 + min(length, 1 << 20)


def archive_items(path: Path, fd: int, members: dict[str, ZipMember]) -> Iterator[FileTensor]:
    for name, member in members.items():
        if name.endswith("/"):
            continue
        key, where = name.removesuffix(".npy"), f"{path}: {name[:80]!r}"
        try:
            header = _member_header(member, fd, where)
        except DumpError as e:  # the other members can be read all the same
            why = f"{where} cannot be read: {e}" if isinstance(e, ZipError) else str(e)
            yield FileTensor(key, "", (), _nothing, why)
            continue
        yield FileTensor(key, header.dtype, header.shape, _npz_read(path, member, header))


def _member_header(member: ZipMember, fd: int, where: str) -> NpyHeader:
    """Raises DumpError."""
    if member.method not in (STORED, DEFLATED):
        raise DumpError(f"{where} is packed by method {member.method}, which is not known here")
    if member.method == DEFLATED and (too_much(member.packed, member.size) or member.size > MAX_UNPACKED):
        raise DumpError(f"{where} would grow from {member.packed:,} to {member.size:,} bytes: not unpacked "
                        "(numpy.savez stores it as it is)")  # fmt: skip
    begin = Unpacker(member, fd).read(min(12, member.size))
    begin = Unpacker(member, fd).read(min(_npy_room(begin), member.size))
    header = npy_header(begin, where)
    if header.offset + header.nbytes > member.size:
        raise DumpError(f"{where} ends before its {header.nbytes:,} bytes of values do")
    return header


def _nothing() -> np.ndarray:
    raise DumpError("this member cannot be read")


def _npz_read(path: Path, member: ZipMember, header: NpyHeader) -> Read:
    def read() -> np.ndarray:
        data = np.empty(header.nbytes, np.uint8)
        try:
            with descriptor(path) as fd:
                unpacker = Unpacker(member, fd)
                unpacker.read(header.offset)
                unpacker.into(data.data)
        except ZipError as e:
            raise DumpError(f"{path} cannot be read: {e}") from None
        return header.array(data)

    return read
