"""Tensors of a .safetensors file.

The problem: the header says where each tensor lies, and may say anything. The idea: tensors may not overlap, not reach
beyond the file, and must have the bytes that dtype and shape take; else the file is refused.
Source: the safetensors format. Dtypes that it does not know are those that our own export noted in its metadata.
Not here: what a file is (tensor_file.py), writing (formats/write/containers.py).
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
from vllm_accprobe.formats.io.plain_file import FileTensor, read_bytes
from vllm_accprobe.formats.write import notes

MAX_HEADER = 64 << 20
_SAFE = {i.safetensors: i.name for i in DTYPES.values() if not i.tail and i.safetensors != "U8"} | {
    "U8": "uint8", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}  # fmt: skip


def items(path: Path, fd: int, size: int) -> Iterator[FileTensor]:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(size - 8, MAX_HEADER):
        raise DumpError(f"{path} is no safetensors file: its header would have {length:,} bytes")
    try:
        header = json.loads(os.pread(fd, length, 8))
        entries = [(k, v) for k, v in header.items() if k != "__metadata__"]
        listed = [(k, v["dtype"], tuple(v["shape"]), *v["data_offsets"]) for k, v in entries]
        about = header.get("__metadata__")
        noted = notes.parsed(str(about.get(notes.DTYPES, "")).encode()) if isinstance(about, dict) else {}
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
