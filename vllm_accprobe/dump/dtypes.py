"""What the bits of a stored tensor mean, without torch.

The problem: a dump holds tensors in the model's own dtype, and numpy knows neither bfloat16 nor the 8-bit floats. The
idea: one table from torch's dtype names to a numpy storage dtype that has the same bits, and one function, ``widen``,
that turns the bits into numbers exactly. Not here: how many bytes lie where (reader.py), statistics (stats.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """One dtype of torch.

    name: torch's name without prefix; storage: numpy dtype with the same bits, little-endian;
    safetensors: the name under which a segment's header lists it, chosen so that every release of the library from 0.4
    on can read the file; tail: what the header appends to the shape (a complex number is listed as two floats);
    kind: ``float``, ``int``, ``bool`` or ``complex``; eps: distance from 1.0 to the next number, 0 for int and bool.
    """

    name: str
    storage: np.dtype[Any]
    safetensors: str
    kind: str
    eps: float = 0.0
    tail: tuple[int, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.storage.itemsize)


def _info(name: str, storage: str, st: str, kind: str, eps: float = 0.0, tail: tuple[int, ...] = ()) -> DTypeInfo:
    return DTypeInfo(name, np.dtype(storage), st, kind, eps, tail)


DTYPES: dict[str, DTypeInfo] = {
    i.name: i
    for i in (
        _info("float64", "<f8", "F64", "float", 2.0**-52),
        _info("float32", "<f4", "F32", "float", 2.0**-23),
        _info("float16", "<f2", "F16", "float", 2.0**-10),
        _info("bfloat16", "<u2", "BF16", "float", 2.0**-7),
        _info("float8_e4m3fn", "u1", "F8_E4M3", "float", 2.0**-3),
        _info("float8_e5m2", "u1", "F8_E5M2", "float", 2.0**-2),
        # Not every release of safetensors knows these three, so its header calls them bytes; the journal has the name.
        _info("float8_e4m3fnuz", "u1", "U8", "float", 2.0**-3),
        _info("float8_e5m2fnuz", "u1", "U8", "float", 2.0**-2),
        _info("float8_e8m0fnu", "u1", "U8", "float", 1.0),
        _info("int64", "<i8", "I64", "int"),
        _info("int32", "<i4", "I32", "int"),
        _info("int16", "<i2", "I16", "int"),
        _info("int8", "i1", "I8", "int"),
        _info("uint64", "<u8", "U64", "int"),
        _info("uint32", "<u4", "U32", "int"),
        _info("uint16", "<u2", "U16", "int"),
        _info("uint8", "u1", "U8", "int"),
        _info("bool", "?", "BOOL", "bool"),
        _info("complex64", "<c8", "F32", "complex", 2.0**-23, (2,)),
        _info("complex128", "<c16", "F64", "complex", 2.0**-52, (2,)),
    )
}


def _decode(code: int, exponent_bits: int, bias: int, special: str) -> float:
    mantissa_bits = 7 - exponent_bits
    mantissa, top = code & ((1 << mantissa_bits) - 1), (1 << exponent_bits) - 1
    exponent = (code >> mantissa_bits) & top
    sign = -1.0 if code & 0x80 else 1.0
    if special == "fnuz" and code == 0x80:
        return float("nan")
    if special == "fn" and (code & 0x7F) == 0x7F:
        return float("nan")
    if special == "ieee" and exponent == top:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return float(sign * (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias))


@cache
def byte_values(dtype: str) -> np.ndarray:
    """The 256 numbers of an 8-bit dtype by bit pattern, float32 for the floats and float64 for int8, uint8 and bool.

    Formulas: the OCP "8-bit Floating Point Specification" 1.0 for e4m3fn and e5m2, OCP "Microscaling Formats" 1.0 for
    e8m0, and arXiv:2206.02915 for the two fnuz kinds (one zero, NaN where negative zero would be, bias one larger).
    """
    if dtype == "float8_e8m0fnu":
        values = [2.0 ** (code - 127) for code in range(255)] + [float("nan")]
    elif dtype in _FLOAT8:
        values = [_decode(code, *_FLOAT8[dtype]) for code in range(256)]
    elif dtype == "int8":
        return np.arange(256).astype(np.uint8).view(np.int8).astype(np.float64)
    elif dtype == "uint8":
        return np.arange(256).astype(np.float64)
    elif dtype == "bool":
        return (np.arange(256) != 0).astype(np.float64)
    else:
        raise KeyError(dtype)
    table = np.array(values, dtype=np.float32)
    table.flags.writeable = False
    return table


_FLOAT8: dict[str, tuple[int, int, str]] = {
    "float8_e4m3fn": (4, 7, "fn"),
    "float8_e5m2": (5, 15, "ieee"),
    "float8_e4m3fnuz": (4, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 16, "fnuz"),
}


def put_into(out: np.ndarray | None, bits: np.ndarray, name: str) -> np.ndarray:
    """``bits`` in the memory of ``out``, a contiguous array of any dtype, or as they are where there is none.

    Returns an array of the dtype and shape of ``bits``. Raises ValueError, with ``name``, where ``out`` is too small.
    """
    if out is None:
        return bits
    flat = out.reshape(-1).view(np.uint8)
    if flat.size < bits.nbytes:
        raise ValueError(f"out has {flat.size} bytes, {name} needs {bits.nbytes}")
    target = flat[: bits.nbytes].view(bits.dtype).reshape(bits.shape)
    target[...] = bits
    return target


def widen(array: np.ndarray, dtype: str, *, as_float: bool = False) -> np.ndarray:
    """The numbers that ``array``, stored bits of torch dtype ``dtype``, stands for: exact, same shape, a new array
    unless nothing had to change.

    bfloat16, float16 and the 8-bit floats give float32; float32, float64 and complex stay; signed integers give int64,
    unsigned ones and bool int64 too, except uint64 which stays. ``as_float`` gives float64 for int and bool instead
    (exact up to 2**53). Raises KeyError for a dtype that is not in DTYPES.
    """
    info = DTYPES[dtype]
    if dtype == "bfloat16":
        wide = array.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    if dtype == "float16":
        return array.astype(np.float32)
    if info.kind == "float" and info.storage.kind == "u":  # of bytes, whose values are a table
        return np.asarray(byte_values(dtype)[array])
    if info.kind == "bool":
        bits = array.view(np.uint8) != 0
        return bits.astype(np.float64 if as_float else np.int64)
    if info.kind == "int":
        if as_float:
            return array.astype(np.float64)
        return array if dtype in ("int64", "uint64") else array.astype(np.int64)
    return array


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 bits (uint16), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16)).astype(np.uint16)


SAMPLE = 4096
"""Elements of a parameter's sample: every ceil(n / SAMPLE)-th one of the flattened tensor, from the first."""


def rounded_hashes(values: np.ndarray) -> str:
    """`Record.rounded` of a weight's values: what a run in 16 bits has of the same checkpoint. In pieces: an embedding
    of float32 has gigabytes."""
    import xxhash  # whoever lists a dump hashes nothing

    flat = values.reshape(-1)
    step = max(1, -(-len(flat) // SAMPLE))
    piece = -(-(1 << 20) // step) * step
    found: list[str] = []
    for name in ("bfloat16", "float16"):
        whole, sample = xxhash.xxh3_128(), xxhash.xxh3_128()
        for start in range(0, len(flat), piece):
            some = flat[start : start + piece]
            with np.errstate(over="ignore"):
                narrow = name == "float16"
                data = some.astype(np.float16) if narrow else round_to_bfloat16(some.astype(np.float32))
            whole.update(data.tobytes())
            sample.update(data[::step].tobytes())
        found += [f"{name}:{h.hexdigest()}" for h in (whole, sample)]
    return " ".join(found)
