"""The tensors of one file, whatever kind of file it is; .safetensors files.

The problem: a file's name says little about what is in it (.bin is torch's or ATB's, .pt may be numpy's), and a header
may say anything. The idea: the first bytes say what it is, and it becomes a list of `FileTensor`, of which no payload
has been read. Of .safetensors, tensors may not overlap or reach beyond the file, and must have the bytes that dtype and
shape take; dtypes that it does not know are those that our own export noted in its metadata.

Not here: writing (containers.py), each other kind (plain_file.py, torchfile.py, atb_file.py).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from vllm_accprobe.dump.decode import DecodeError, at_most, between, decode, parse
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.common.foreign import Read, numpy_dtype
from vllm_accprobe.formats.io import atb_file, containers, torchfile
from vllm_accprobe.formats.io.plain_file import FileTensor, descriptor, opened, read_bytes
from vllm_accprobe.formats.io.zipindex import DEFLATED, STORED, Unpacker, ZipError, ZipMember, index, too_much

# --- numpy (numpy/lib/format.py, npy 1.0 to 3.0) ---

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
        header = ast.literal_eval(begin[start : start + length].decode("utf-8" if begin[6] > 2 else "latin1").strip())
        descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
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


def npy_item(path: Path, fd: int, size: int) -> FileTensor:
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
            yield FileTensor(key, "", (), _unreadable_member, why)
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


def _unreadable_member() -> np.ndarray:
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


# --- safetensors ---

MAX_HEADER = 64 << 20
_SAFE = {i.safetensors: i.name for i in DTYPES.values() if not i.tail and i.safetensors != "U8"} | {
    "U8": "uint8", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}  # fmt: skip


_Size = Annotated[int, between(0, (1 << 62) - 1)]


@dataclass(frozen=True)
class _Listed:
    """A tensor in such a header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], at_most(64)]
    data_offsets: tuple[_Size, _Size]


def safetensors_items(path: Path, fd: int, size: int) -> Iterator[FileTensor]:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(size - 8, MAX_HEADER):
        raise DumpError(f"{path} is no safetensors file: its header would have {length:,} bytes")
    try:
        header = parse(dict[str, Any], os.pread(fd, length, 8), length)
        about = decode(dict[str, str], header.pop("__metadata__", {}), "__metadata__")
        listed = decode(dict[str, _Listed], header)
    except DecodeError as e:
        raise DumpError(f"{path} has a damaged safetensors header: {e}") from None
    noted = containers.parsed_note(about.get(containers.DTYPES_NOTE, "").encode())
    end, room = 0, size - 8 - length
    for key, entry in sorted(listed.items(), key=lambda e: e[1].data_offsets):
        kind, shape, (start, stop) = entry.dtype, entry.shape, entry.data_offsets
        dtype = _SAFE.get(kind, kind)
        info = DTYPES.get(dtype)
        noted_dtype = DTYPES.get(str(noted.get(key, "")))
        rest = len(shape) - len(noted_dtype.tail) if noted_dtype is not None else 0
        if noted_dtype is not None and noted_dtype.safetensors == kind and shape[rest:] == noted_dtype.tail:
            dtype, info, shape = noted_dtype.name, noted_dtype, shape[:rest]
        if start < end or stop > room or (info is not None and stop - start != prod(shape) * info.itemsize):
            raise DumpError(f"{path}: {key[:80]!r} does not lie where its header says: damaged, or made up")
        end = stop
        yield FileTensor(key, dtype, shape, _reader(path, 8 + length + start, stop - start, dtype, shape))


def _reader(path: Path, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Read:
    def read() -> np.ndarray:
        return read_bytes(path, offset, nbytes).view(DTYPES[dtype].storage).reshape(shape)

    return read


# --- any file ---

SUFFIXES = (".pt", ".pth", ".npy", ".npz", ".bin", ".safetensors")


def items(path: Path) -> list[FileTensor]:
    """The tensors of a file, recognised by its first bytes and not by its name. Reads no payload. Raises DumpError."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        head = os.pread(fd, 16, 0)
        if not head:
            raise DumpError(f"{path} is empty")
        if head.startswith(MAGIC):
            return [npy_item(path, fd, size)]
        if head.startswith(b"PK\x03\x04"):
            members = index(fd, size)
            if not any(n.endswith("data.pkl") for n in members):
                return list(archive_items(path, fd, members))
        elif path.suffix.lower() == ".safetensors":
            return list(safetensors_items(path, fd, size))
        elif path.suffix.lower() == ".bin" and b"=" in head:
            return [_atb_item(path)]
    return [FileTensor(key, t.dtype, t.shape, t.read) for key, t in torchfile.items(path)]


def first(path: Path) -> FileTensor:
    """The tensor of a file that has one. Raises DumpError."""
    found = items(path)
    if not found or found[0].problem:
        raise DumpError(found[0].problem if found else f"{path} holds no tensor")
    return found[0]


def _atb_item(path: Path) -> FileTensor:
    header = atb_file.read_header(path)
    if not header.stored:
        raise DumpError(f"{path} holds statistics only, or its values lie in another file")
    return FileTensor("", header.dtype, header.shape, lambda: atb_file.read_tensor(path, header))
