"""One tensor as a file that torch.load opens, written without torch.

The problem: other tools' viewers want .pt files, and a laptop has no torch. The idea: torch's archive is a zip file
with a short pickle that names a storage, and the storage's bytes; both are always the same but for a few numbers.
Dtypes that have no typed storage of their own are written as torch does, as bytes with the dtype behind.
Source: torch/serialization.py and torch/_tensor.py of torch 2.x, file format version 3.
Not here: reading (formats/io/torchfile.py).
"""

from __future__ import annotations

import struct
import zipfile
from math import prod
from pathlib import Path

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.formats.io.torchtensor import STORAGES, contiguous

_TYPED = {dtype: storage for storage, dtype in STORAGES.items()}
_HOOKS = b"\x89ccollections\nOrderedDict\n)R"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def save_pt(path: Path, array: np.ndarray, dtype: str) -> None:
    """Stored bits as .pt, readable by ``torch.load(path, weights_only=True)``. Raises FileExistsError, OSError, and
    KeyError for a dtype that is not in DTYPES."""
    info = DTYPES[dtype]
    bits = np.ascontiguousarray(array, info.storage)
    with zipfile.ZipFile(path, "x") as file:
        for name, data in (
            ("data.pkl", _pickle(dtype, tuple(array.shape))),
            ("byteorder", b"little"),
            ("data/0", bits.tobytes()),
            ("version", b"3\n"),
        ):
            file.writestr(zipfile.ZipInfo(f"archive/{name}", _EPOCH), data)


def _pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    typed = _TYPED.get(dtype)
    numel = prod(shape)
    function = "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"
    storage = f"torch\n{typed}" if typed else "torch.storage\nUntypedStorage"
    out = b"\x80\x02ctorch._utils\n" + function.encode() + b"\n((" + _text("storage")
    out += b"c" + storage.encode() + b"\n" + _text("0") + _text("cpu")
    out += _number(numel if typed else numel * DTYPES[dtype].itemsize) + b"tQ"
    out += _number(0) + _tuple(shape) + _tuple(contiguous(shape)) + _HOOKS
    if not typed:
        out += b"ctorch\n" + dtype.encode() + b"\n"
    return out + b"tR."


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    data = value.to_bytes(max((value.bit_length() + 8) // 8, 1), "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"
