"""One tensor file of Ascend's transformer boost library: lines of text, then the values.

The problem: the header is text that anybody can write, and a dump has a hundred thousand of these files. The idea: a
header is parsed once for all files that have the same one, every number in it is checked against the file's size before
it is used, and values are read when they are needed.
Layout: ``key=value`` lines up to ``$End=1``; ``dtype`` is an aclDataType, ``dims`` a list with commas; ``data``: the
values lie in another file; ``min``, ``max``, ``mean``, ``l2norm``: statistics in place of values.
Not here: directories of such files (atb.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.formats.io.plain_file import SHORTER_THAN_HEADER, fill, opened

_MAX_HEADER = 64 << 10
_USUAL_HEADER = 1 << 10
_MAX_DIMS = 32
_DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16", 8: "uint32", 9: "int64",
    10: "uint64", 11: "float64", 12: "bool", 16: "complex64", 17: "complex128", 27: "bfloat16", 35: "float8_e5m2",
    36: "float8_e4m3fn", 37: "float8_e8m0fnu",
}  # fmt: skip
"""aclDataType of the CANN runtime."""


@dataclass(frozen=True, slots=True)
class AtbHeader:
    """What a .bin says about itself. dtype: torch's name, or ``acl:<code>`` where torch has none; offset: of the
    payload in the file; stored: whether the payload is there; stats: of a file that has statistics instead."""

    dtype: str
    shape: tuple[int, ...]
    format: int
    offset: int
    stored: bool
    stats: Stats | None = None


def read_header(path: Path) -> AtbHeader:
    """The header of an ATB .bin, checked against the file's size. Raises DumpError, one line."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        data = os.pread(fd, _USUAL_HEADER, 0)
        if b"$End=" not in data:
            data = os.pread(fd, _MAX_HEADER, 0)
    try:
        return parse_header(data, size)
    except ValueError as e:
        raise DumpError(f"{path}: not an ATB tensor: {e}") from None


def parse_header(data: bytes, size: int) -> AtbHeader:
    """``data``: the file's first bytes; ``size``: of the file. Raises ValueError with a short reason."""
    end = data.find(b"\n", data.find(b"$End=")) if b"$End=" in data else -1
    found = _parse(data[: end + 1] if end >= 0 else data)
    if found.stored:
        needed = math.prod(found.shape) * DTYPES[found.dtype].itemsize if found.dtype in DTYPES else 0
        if needed > size - found.offset:
            if size > found.offset or found.stats is None:
                what = f"dims {list(found.shape)} of {found.dtype} need {needed} bytes"
                raise ValueError(f"{what}, the file holds {size - found.offset} after its header")
            return replace(found, stored=False)
    return found


@lru_cache(maxsize=1024)
def _parse(data: bytes) -> AtbHeader:
    """A dump has a hundred thousand files and some dozens of headers."""
    values: dict[str, str] = {}
    at = 0
    while True:
        end = data.find(b"\n", at)
        if end < 0:
            raise ValueError("its header does not end ($End=1 is missing)" if data else "the file is empty")
        key, sign, value = data[at:end].decode("latin-1").partition("=")
        at = end + 1
        if not sign:
            raise ValueError(f"a header line without '=': {_short(key)}")
        if key == "$End":
            break
        values[key.strip()] = value.strip()
    shape = _shape(values.get("dims"))
    code = _integer(values.get("dtype"), "dtype", 0, 1 << 16)
    dtype = _DTYPES.get(code, f"acl:{code}")
    form = _integer(values.get("format", "2"), "format", -1, 1 << 16)
    stats = _stats(values, shape)
    return AtbHeader(dtype, shape, form, at, not values.get("data"), stats)


def _shape(text: str | None) -> tuple[int, ...]:
    if text is None:
        raise ValueError("its header has no dims")
    dims = tuple(_integer(d, "dims", 0, 1 << 40) for d in text.split(",")) if text else ()
    if len(dims) > _MAX_DIMS or math.prod(max(d, 1) for d in dims) >= 1 << 56:
        raise ValueError(f"dims are {_short(text)}: no tensor has these")
    return dims


def _integer(text: str | None, key: str, low: int, top: int) -> int:
    plain = (text or "").strip()
    if not re.fullmatch(r"-?\d{1,18}", plain, re.ASCII) or not low <= int(plain) <= top:
        raise ValueError(f"{key} is {_short(plain)}, not a number from {low} to {top}")
    return int(plain)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _stats(values: Mapping[str, str], shape: tuple[int, ...]) -> Stats | None:
    return stats_of(shape, *(number(values.get(k)) for k in ("min", "max", "mean", "l2norm")))


def stats_of(
    shape: tuple[int, ...], low: float | None, high: float | None, mean: float | None, norm: float | None
) -> Stats | None:
    """Statistics as these tools write them; None where one is missing or no number (NaN, infinity)."""
    if None in (low, high, mean, norm):
        return None
    return Stats(math.prod(shape), low, high, mean, norm, 0, 0)


def number(text: str | None) -> float | None:
    """A finite number, or None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_tensor(path: Path, header: AtbHeader) -> np.ndarray:
    """The bits, shape ``header.shape``, C order. Raises DumpError."""
    with opened(path) as fd:
        return fill(path, fd, header.offset, np.empty(header.shape, DTYPES[header.dtype].storage), SHORTER_THAN_HEADER)
