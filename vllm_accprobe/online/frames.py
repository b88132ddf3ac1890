"""The pieces that go over the line, and their limits.

The problem: what arrives was written by whoever could connect: lengths that fill the memory, objects that run code.
The idea: a piece is twelve bytes (a word, a kind, a length) and a body that is raw bytes or one flat JSON object; its
length is held against the kind's limit before a byte of it is awaited, and nothing is unpickled. The same pieces, one
after the other and closed by a digest, are a batch of shared storage. Not here: sockets (wire.py), files (shared.py),
what the pieces do (mirror.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

HELLO, WELCOME, RUN, DATA, JOURNAL, SYNC, HAVE, END, REFUSED, READY = range(1, 11)
PROTOCOL = 1
HEAD = struct.Struct("<3sBQ")
PLACE = struct.Struct("<QQ")
"""Before the bytes of a segment and of the journal: segment (0 of the journal), offset in its data."""
MAGIC = b"ap1"
CHUNK = 1 << 20
"""Chosen: bytes of a payload that travel in one piece."""
WORDS = 64 << 10
"""Chosen: the longest JSON object but WELCOME's and RUN's."""
_LIMITS = {
    HELLO: WORDS, WELCOME: CHUNK, RUN: CHUNK, DATA: CHUNK + PLACE.size, JOURNAL: CHUNK + PLACE.size, SYNC: 0,
    HAVE: WORDS, END: WORDS, REFUSED: WORDS, READY: 0,
}  # fmt: skip
MOST_SEGMENTS = 1 << 14
"""Chosen: of one rank; at a gigabyte each more than any disk holds."""


class FrameError(Exception):
    """One line: what arrived is none of ours."""


def head(kind: int, length: int) -> bytes:
    return HEAD.pack(MAGIC, kind, length)


def words(kind: int, said: Mapping[str, Any]) -> list[bytes]:
    """A piece of JSON. Raises FrameError where it is longer than its kind may be."""
    body = orjson.dumps(said)
    if len(body) > _LIMITS[kind]:
        raise FrameError(f"{len(body):,} bytes of JSON are more than the {_LIMITS[kind]:,} that may be sent")
    return [head(kind, len(body)), body]


def placed(kind: int, segment: int, offset: int, body: bytes | memoryview) -> list[bytes | memoryview]:
    """A piece of a segment's data, or of the journal."""
    return [head(kind, PLACE.size + len(body)) + PLACE.pack(segment, offset), body]


def length_of(given: bytes, most: int | None = None) -> tuple[int, int]:
    """(kind, length of the body) of twelve bytes. most: a limit besides the kind's. Raises FrameError."""
    magic, kind, length = HEAD.unpack(given)
    if magic != MAGIC or kind not in _LIMITS:
        raise FrameError("it does not speak accprobe's protocol")
    limit = _LIMITS[kind] if most is None else min(most, _LIMITS[kind])
    if length > limit:
        raise FrameError(f"it announces {length:,} bytes where {limit:,} are allowed")
    return kind, length


def place_of(body: bytes | bytearray | memoryview) -> tuple[int, int, memoryview]:
    """(segment, offset, bytes) of a placed piece. Raises FrameError."""
    if len(body) < PLACE.size:
        raise FrameError("a piece is too short for its place")
    segment, offset = PLACE.unpack_from(body)
    return segment, offset, memoryview(body)[PLACE.size :]


def said_in(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object in a body. Raises FrameError."""
    try:
        found = orjson.loads(body)
    except (ValueError, RecursionError):
        raise FrameError("a piece that should be JSON is none") from None
    if not isinstance(found, dict):
        raise FrameError("a piece that should be a JSON object is none")
    return found


def number(said: Mapping[str, Any], key: str, most: int) -> int:
    """A whole number from 0 to ``most``. Raises FrameError."""
    value = said.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise FrameError(f"{key} is no number from 0 to {most:,}")
    return value


def pieces(read: Callable[[int], bytes], until: int) -> Iterator[tuple[int, bytes]]:
    """The pieces in ``until`` bytes that ``read`` gives. Raises FrameError."""
    left = until
    while left:
        if left < HEAD.size:
            raise FrameError("a batch ends within a piece")
        kind, length = length_of(read(HEAD.size))
        left -= HEAD.size + length
        if left < 0:
            raise FrameError("a batch ends within a piece")
        yield kind, read(length)
