"""The wire format of protocol buffers."""

from __future__ import annotations

import struct

import pytest
from make_ge_files import message, number, varint

from vllm_accprobe.formats.io import ge_dump


def test_wire_format() -> None:
    data = number(1, 300) + message(2, b"abc") + b"\x1d" + struct.pack("<I", 7) + b"\x21" + struct.pack("<Q", 2**63)
    found = [(n, v if isinstance(v, int) else bytes(v)) for n, v in ge_dump.fields(memoryview(data))]
    assert found == [(1, 300), (2, b"abc"), (3, 7), (4, 2**63)]
    assert ge_dump.numbers(memoryview(varint(1) + varint(2**40))) == [1, 2**40]
    assert ge_dump.numbers(5) == [5]


@pytest.mark.parametrize(("data", "said"), [
    (b"\x08", "ends beyond"),
    (b"\x08" + b"\xff" * 9 + b"\x02", "larger than 64 bits"),
    (b"\x08" + b"\xff" * 11, "longer than ten"),
    (b"\x12\x05ab", "ends beyond"),
    (b"\x12" + varint(2**60) + b"ab", "ends beyond"),
    (b"\x0b", "wire type 3"),
    (b"\x00\x01", "field number 0"),
    (b"\x0d\x01", "ends beyond"),
])  # fmt: skip
def test_wire_format_that_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(ge_dump.fields(memoryview(data)))
