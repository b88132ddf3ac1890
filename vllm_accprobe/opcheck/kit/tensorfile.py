"""Tensors in a safetensors file, written and read with torch alone.

The problem: the folders that `gentest` writes run where neither safetensors nor numpy need be installed. The idea: the
format is a length, a JSON header and bytes [the safetensors project's README, "Format"]; this file is copied beside the
tests. Not here: what the tensors are (case.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_TYPES = {short: name for name, short in _NAMES.items()}
_MAX_HEADER = 64 << 20
_PIECE = 1 << 24


def save(tensors: Mapping[str, Any], path: Path) -> None:
    """Writes tensors of the dtypes above; whole or not at all. Raises ValueError for another dtype, and OSError."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _NAMES:
            raise ValueError(f"safetensors has no {dtype} ({name})")
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            plain = tensor.detach().cpu().contiguous()
            nbytes = plain.numel() * plain.element_size()
            for start in range(0, nbytes, _PIECE):
                f.write(ctypes.string_at(plain.data_ptr() + start, min(_PIECE, nbytes - start)))
    os.replace(part, path)


def load(path: Path) -> dict[str, Any]:
    """All tensors of a file by name, on the CPU. Raises ValueError where it is damaged, and OSError."""
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 <= length <= min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path}: no safetensors file")
        header = json.loads(f.read(length))
        data = bytearray(f.read())
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        dtype = getattr(torch, _TYPES.get(entry["dtype"], ""), None)
        if dtype is None or not 0 <= begin <= end <= len(data):
            raise ValueError(f"{path}: {name} cannot be read")
        shape, empty = entry["shape"], torch.empty(0, dtype=dtype)
        if end == begin:
            found[name] = empty.reshape(shape)
            continue
        flat = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin)
        found[name] = flat.clone().view(dtype).reshape(shape)  # a clone is aligned, wherever the bytes lay
    return found
