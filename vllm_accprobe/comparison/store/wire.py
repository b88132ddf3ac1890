"""Measured units as bytes, to be appended to a file or sent to another machine.

The problem: results must survive a kill between any two bytes, and what comes from a file may be damaged or made up, so
it must not be a pickle. The idea: a frame is two lengths, a hash, a JSON text and the arrays' bytes; the text says
which stretch of the bytes is which array. A frame that is not whole is not there.
Not here: what the values mean (measured.py), the finished comparison's file (saved.py), when to write (resume.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.store import fields

_HEAD = struct.Struct("<QQ16s")
LAYOUT = " ".join(["2", *fields.PLAIN, *fields.TABLES, "|", *fields.UNIT])
"""Changes whenever old frames would be misread."""
Known = dict[tuple[bytes, bytes], RowSet]
"""Sets of rows by the bytes of their keys and flags."""


def pack(units: Sequence[MeasuredUnit]) -> bytes:
    """One frame."""
    out = _Arrays()
    said = fields.say(units, out.put)
    return frame({"units": said, "arrays": out.described}, b"".join(out.data))


def unpack(text: dict[str, Any], data: bytes, known: Known | None = None) -> list[MeasuredUnit]:
    """The units of a frame. Raises ValueError for anything that `pack` does not write.

    known: remembers sets of rows: those of a step belong to all its tensors.
    """
    known = {} if known is None else known

    def rows_at(where: list[int]) -> RowSet:
        keys, decode = (arrays[i] for i in where)
        name = keys.tobytes(), decode.tobytes()
        if name not in known:
            known[name] = fields.rows_of(keys.copy(), decode.copy())
        return known[name]

    try:
        arrays = [_array(data, dtype, shape, start) for dtype, shape, start in text["arrays"]]
        return fields.hear(text["units"], lambda i: None if i is None else arrays[i], rows_at)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as e:
        raise ValueError(f"not a frame of measured units: {e}") from None


def frame(text: dict[str, Any], data: bytes = b"") -> bytes:
    head = json.dumps(text, default=fields.plain).encode()
    return _HEAD.pack(len(head), len(data), _digest(head, data)) + head + data


def frames(stored: bytes | memoryview) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    """(text, data, end) of each whole frame at the beginning of ``stored``; ends at the first that is not whole."""
    at = 0
    while at + _HEAD.size <= len(stored):
        n, m, digest = _HEAD.unpack_from(stored, at)
        start, middle, end = at + _HEAD.size, at + _HEAD.size + n, at + _HEAD.size + n + m
        if end > len(stored):
            return
        head, data = bytes(stored[start:middle]), bytes(stored[middle:end])
        if _digest(head, data) != digest:
            return
        yield json.loads(head), data, end
        at = end


def _digest(head: bytes, data: bytes) -> bytes:
    import xxhash

    value = xxhash.xxh3_128(head)
    value.update(data)
    return value.digest()


class _Arrays:
    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.described: list[list[Any]] = []
        self._end = 0

    def put(self, array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        data = np.ascontiguousarray(array).tobytes()
        self.described.append([array.dtype.str, list(array.shape), self._end])
        self.data.append(data)
        self._end += len(data)
        return len(self.described) - 1


def _array(data: bytes, dtype: str, shape: list[int], start: int) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind not in "fiub":
        raise ValueError(f"arrays of {dtype} are not stored here")
    count = int(np.prod(shape, dtype=np.int64))
    if start < 0 or count < 0 or start + count * kind.itemsize > len(data):
        raise ValueError("an array lies outside its frame")
    return np.frombuffer(data, kind, count, start).reshape(shape)
