"""Reads the wire format of protocol buffers, without a schema compiler and without trusting a length.

The problem: graph engines describe a dump in a protobuf message, the usual reader of it comes with a vendor's toolkit,
and the file may be made up. The idea: the wire format is small enough to walk through by hand: a message is a row of
(field number, value); every length is checked against what is really there before it is used.
Format: protobuf's "Encoding" page (varint, fixed64, length-delimited, fixed32; groups are refused).
Not here: what the numbers mean (ge_dump.py).
"""

from __future__ import annotations

from collections.abc import Iterator

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
