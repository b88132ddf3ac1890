"""A binary dump of one operator by Ascend's graph engine, read without its toolkit.

The problem: the file holds all tensors of an operator after one protobuf header, in layouts of the hardware, and may be
made up. The idea: the wire format (protobuf's "Encoding" page; groups are refused) is a row of (field number, value),
and every length is checked against what is there. Payloads follow in a fixed order (inputs, outputs, buffers, spaces)
with their sizes in the header; a layout is undone by a transpose. Format: uint64 length, little-endian;
toolkit.dump.DumpData (Ascend/metadef's dump_task.proto); payloads. Layouts: FRACTAL_NZ [.., n1, m1, m0, n0] and NC1HWC0
[n, c1, h, w, c0], as in the CANN documents.

Not here: directories of such files and names (torchair.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.io.plain_file import SHORTER_THAN_HEADER, fill, opened

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MAX_FIELDS = 1 << 20


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) of each field of the message ``data``, in file order: an int for varints and fixed
    numbers (unsigned), a memoryview for strings, bytes and messages. Raises ValueError for what is no message."""
    at, count = 0, 0
    while at < len(data):
        count += 1
        if count > _MAX_FIELDS:
            raise ValueError("the message has too many fields")
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError("field number 0")
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, value
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            yield number, int.from_bytes(_take(data, at, size), "little")
            at += size
        elif kind == BYTES:
            size, at = varint(data, at)
            yield number, _take(data, at, size)
            at += size
        else:
            raise ValueError(f"wire type {kind} is not one that such a message has")


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """(unsigned number of at most 64 bits, position behind it)."""
    value, shift = 0, 0
    while True:
        if at >= len(data):
            raise ValueError("a number ends beyond the message")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            if value >> 64:
                raise ValueError("a number is larger than 64 bits")
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than ten bytes")


def numbers(value: int | memoryview) -> list[int]:
    """The numbers of a repeated field, packed or one alone."""
    if isinstance(value, int):
        return [value]
    out, at = [], 0
    while at < len(value):
        number, at = varint(value, at)
        out.append(number)
    return out


def _take(data: memoryview, at: int, size: int) -> memoryview:
    if size > len(data) - at:
        raise ValueError(f"a field of {size} bytes ends beyond the message")
    return data[at : at + size]


_MAX_HEADER = 16 << 20
_MAX_DIMS = 32
_DTYPES = {
    1: "float32", 2: "float16", 3: "int8", 4: "uint8", 5: "int16", 6: "uint16", 7: "int32", 8: "int64", 9: "uint32",
    10: "uint64", 11: "bool", 12: "float64", 16: "complex64", 17: "complex128", 18: "int8", 19: "int16", 20: "int32",
    21: "uint8", 22: "uint16", 27: "bfloat16", 34: "float8_e5m2", 35: "float8_e4m3fn", 36: "float8_e8m0fnu",
}  # fmt: skip
"""GE's data types; of quantised integers (18 to 22) the integers themselves are compared."""
NC1HWC0, FRACTAL_NZ = 3, 29


@dataclass(frozen=True, slots=True)
class GeTensor:
    """One tensor of a file. kind: ``input`` or ``output``; index: its place among them; dtype: torch's name, None for
    one that has no such; shape: as it means to the model, ``stored`` as it lies in the file; offset, nbytes: in the
    file; ref: the operator of the original graph that an output came from, "" where the header does not say."""

    kind: str
    index: int
    dtype: str | None
    code: int
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    format: int
    offset: int
    nbytes: int
    ref: str = ""

    def problem(self) -> str:
        """Why its values cannot be read; "" where they can."""
        if self.dtype is None:
            return f"data type {self.code} has no counterpart in torch"
        wanted = math.prod(self.stored) * DTYPES[self.dtype].itemsize
        if wanted > self.nbytes:
            return f"shape {list(self.stored)} of {self.dtype} needs {wanted} bytes, the header gives it {self.nbytes}"
        return ""


@dataclass(frozen=True, slots=True)
class GeFile:
    """A parsed header. op: the operator's name, "" where the header does not say."""

    path: Path
    op: str
    tensors: tuple[GeTensor, ...]


def parse(path: Path) -> GeFile:
    """Reads the header of ``path``, no payload. Raises DumpError, one line, for anything that is no such dump."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        start = os.pread(fd, 8, 0)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 0 < length <= min(_MAX_HEADER, size - 8):
            raise DumpError(f"{path}: not a graph engine dump: its header would be {length} of {size} bytes")
        header = memoryview(os.pread(fd, length, 8))
    try:
        return _file(path, header, 8 + length, size)
    except ValueError as e:
        raise DumpError(f"{path}: not a graph engine dump: {e}") from None


def _file(path: Path, header: memoryview, offset: int, size: int) -> GeFile:
    if len(header) + 8 != offset:
        raise ValueError("its header is cut off")
    found: dict[int, list[memoryview]] = {3: [], 4: []}
    op = ""
    for number, value in fields(header):
        if number in found and not isinstance(value, int):
            found[number].append(value)
        elif number == 6 and not isinstance(value, int):
            op = _text(value)
    tensors = []
    for kind, number, places in (("input", 4, _INPUT), ("output", 3, _OUTPUT)):
        for index, data in enumerate(found[number]):
            t = _tensor(data, kind, index, offset, *places)
            if t.nbytes > size - offset:
                left = f"{kind} {index} should have {t.nbytes} bytes, the file has {max(size - offset, 0)} left"
                raise ValueError(f"cut off: {left}")
            tensors.append(t)
            offset += t.nbytes
    if not tensors:
        raise ValueError("it describes no tensor")
    return GeFile(path, op, tuple(tensors))


_INPUT, _OUTPUT = (5, 6, 0), (6, 7, 4)
"""The fields of size, original shape and, where there is one, the operator of the original graph."""


def _tensor(
    data: memoryview, kind: str, index: int, offset: int, size_field: int, original_shape: int, ref: int
) -> GeTensor:
    code = form = nbytes = 0
    shape: tuple[int, ...] = ()
    original: tuple[int, ...] = ()
    name = ""
    for number, value in fields(data):
        if number == size_field and isinstance(value, int):
            nbytes = value
        elif number == 1 and isinstance(value, int):
            code = value
        elif number == 2 and isinstance(value, int):
            form = value & 0xFF  # the upper bits are a sub-format
        elif number == 3 and not isinstance(value, int):
            shape = _shape(value)
        elif number == original_shape and not isinstance(value, int):
            original = _shape(value)
        elif ref and number == ref and not isinstance(value, int):
            name = next((_text(v) for n, v in fields(value) if n == 1 and not isinstance(v, int)), "")
    # The shape that the model sees: of a layout that can be undone, the original one.
    meant = original if original and _undoes(shape, form, original) else shape
    return GeTensor(kind, index, _DTYPES.get(code), code, meant, shape, form, offset, nbytes, name)


def _shape(data: memoryview) -> tuple[int, ...]:
    dims = [d for number, value in fields(data) if number == 1 for d in numbers(value)]
    if len(dims) > _MAX_DIMS or any(d >= 1 << 40 for d in dims) or math.prod(max(d, 1) for d in dims) >= 1 << 56:
        raise ValueError(f"a shape of {len(dims)} dimensions that no tensor has")
    return tuple(dims)


def _text(value: memoryview) -> str:
    return bytes(value[:1000]).decode("utf-8", "replace")


def _undoes(stored: tuple[int, ...], form: int, meant: tuple[int, ...]) -> bool:
    if form == FRACTAL_NZ and len(stored) == len(meant) + 2 and len(meant) >= 2:
        *lead, n1, m1, m0, n0 = stored
        return tuple(lead) == meant[:-2] and meant[-2] <= m1 * m0 and meant[-1] <= n1 * n0
    if form == NC1HWC0 and len(stored) == 5 and len(meant) == 4:
        n, c1, h, w, c0 = stored
        return (n, h, w) == (meant[0], meant[2], meant[3]) and meant[1] <= c1 * c0
    return False


def read(path: Path, tensor: GeTensor) -> np.ndarray:
    """The bits of ``tensor``, shape ``tensor.shape``, dtype DTYPES[tensor.dtype].storage, C order. Raises DumpError."""
    problem = tensor.problem()
    if problem or tensor.dtype is None:
        raise DumpError(f"{path}: {tensor.kind} {tensor.index}: {problem}")
    storage = DTYPES[tensor.dtype].storage
    with opened(path) as fd:
        data = fill(path, fd, tensor.offset, np.empty(tensor.stored, storage), SHORTER_THAN_HEADER)
    if tensor.shape == tensor.stored:
        return data
    return np.ascontiguousarray(_undo(data, tensor.format, tensor.shape))


def _undo(data: np.ndarray, form: int, shape: tuple[int, ...]) -> np.ndarray:
    if form == FRACTAL_NZ:
        *lead, n1, m1, m0, n0 = data.shape
        k = len(lead)
        turned = data.transpose(*range(k), k + 1, k + 2, k, k + 3).reshape(*lead, m1 * m0, n1 * n0)
        return np.asarray(turned[..., : shape[-2], : shape[-1]])
    n, c1, h, w, c0 = data.shape
    return data.transpose(0, 1, 4, 2, 3).reshape(n, c1 * c0, h, w)[:, : shape[1]]
