"""Files as Ascend's graph engine writes them: a length, a protobuf header, payloads."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"float32": 1, "float16": 2, "int8": 3, "uint8": 4, "int32": 7, "int64": 8, "bool": 11}


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def tensor(
    values: np.ndarray, *, output: bool, form: int = 2, original: Sequence[int] = (), packed: bool = True, code: int = 0
) -> bytes:
    dims = values.shape
    shape = message(1, b"".join(map(varint, dims))) if packed else b"".join(number(1, d) for d in dims)
    body = number(1, code or CODES[values.dtype.name]) + number(2, form) + message(3, shape)
    if original:
        body += message(7 if output else 6, message(1, b"".join(map(varint, original))))
    if output:
        body += message(4, message(1, b"origin") + number(2, 0))
    return body + number(6 if output else 5, values.nbytes)


def ge(path: Path, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], name: str = "", **how: object) -> Path:
    """A file as the graph engine writes it: the header lists outputs first, the payloads come inputs first."""
    head = message(1, b"2.0") + number(2, 1795200000000000)
    head += b"".join(message(3, tensor(v, output=True, **how)) for v in outputs)  # type: ignore[arg-type]
    head += b"".join(message(4, tensor(v, output=False)) for v in inputs)
    head += message(6, name.encode()) if name else b""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(v.tobytes() for v in (*inputs, *outputs)))
    return path
