"""The tensors of one file, whatever kind of file it is.

Tensors of a .safetensors file.

The problem: the header says where each tensor lies, and may say anything. The idea: tensors may not overlap, not reach
beyond the file, and must have the bytes that dtype and shape take; else the file is refused.
Source: the safetensors format. Dtypes that it does not know are those that our own export noted in its metadata.

The tensors of one file, whatever kind of file it is.

The problem: a file's name says little about what is in it: .bin is torch's or ATB's, .pt may be numpy's. The idea: its
first bytes say what it is, and it becomes a list of `FileTensor`, of which no payload has been read.

Not here: writing (formats/write/containers.py), each kind (npy.py, tensor_file.py, torchfile.py, atb_file.py), the
format of single files (single.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.common.foreign import Read
from vllm_accprobe.formats.io import atb_file, npy, torchfile
from vllm_accprobe.formats.io.plain_file import FileTensor, opened, read_bytes
from vllm_accprobe.formats.io.zipindex import index
from vllm_accprobe.formats.write import containers

MAX_HEADER = 64 << 20
_SAFE = {i.safetensors: i.name for i in DTYPES.values() if not i.tail and i.safetensors != "U8"} | {
    "U8": "uint8", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}  # fmt: skip


def safetensors_items(path: Path, fd: int, size: int) -> Iterator[FileTensor]:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(size - 8, MAX_HEADER):
        raise DumpError(f"{path} is no safetensors file: its header would have {length:,} bytes")
    try:
        header = json.loads(os.pread(fd, length, 8))
        entries = [(k, v) for k, v in header.items() if k != "__metadata__"]
        listed = [(k, v["dtype"], tuple(v["shape"]), *v["data_offsets"]) for k, v in entries]
        about = header.get("__metadata__")
        note = str(about.get(containers.DTYPES_NOTE, "")).encode() if isinstance(about, dict) else b""
        noted = containers.parsed_note(note) if isinstance(about, dict) else {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DumpError(f"{path} has a damaged safetensors header") from None
    end, room = 0, size - 8 - length
    for key, kind, shape, start, stop in sorted(listed, key=lambda e: (_number(e[3]), _number(e[4]))):
        if not isinstance(kind, str) or any(_number(n) < 0 for n in (*shape, start, stop)) or len(shape) > 64:
            raise DumpError(f"{path} has a damaged safetensors header")
        dtype = _SAFE.get(kind, kind)
        info = DTYPES.get(dtype)
        said = DTYPES.get(str(noted.get(key, "")))
        rest = len(shape) - len(said.tail) if said is not None else 0
        if said is not None and said.safetensors == kind and shape[rest:] == said.tail:
            dtype, info, shape = said.name, said, shape[:rest]
        if start < end or stop > room or (info is not None and stop - start != prod(shape) * info.itemsize):
            raise DumpError(f"{path}: {key[:80]!r} does not lie where its header says: damaged, or made up")
        end = stop
        yield FileTensor(key, dtype, shape, _reader(path, 8 + length + start, stop - start, dtype, shape))


def _number(value: Any) -> int:
    return value if type(value) is int and value < 1 << 62 else -1


def _reader(path: Path, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Read:
    def read() -> np.ndarray:
        return read_bytes(path, offset, nbytes).view(DTYPES[dtype].storage).reshape(shape)

    return read


SUFFIXES = (".pt", ".pth", ".npy", ".npz", ".bin", ".safetensors")


def items(path: Path) -> list[FileTensor]:
    """The tensors of a file, told by its beginning and not by its name. Reads no payload. Raises DumpError."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        head = os.pread(fd, 16, 0)
        if not head:
            raise DumpError(f"{path} is empty")
        if head.startswith(npy.MAGIC):
            return [npy.item(path, fd, size)]
        if head.startswith(b"PK\x03\x04"):
            members = index(fd, size)
            if not any(n.endswith("data.pkl") for n in members):
                return list(npy.archive_items(path, fd, members))
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
