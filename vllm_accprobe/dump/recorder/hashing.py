"""The hash by which a journal line names bytes, taken from memory.

Apart from statistics (stats.py), which readers of a dump import, too: they need no xxhash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash


def digest(parts: Sequence[tuple[int, int]]) -> str:
    """xxh3-128 over the memory regions (address, bytes) one after the other, 32 hex digits."""
    if len(parts) == 1 and parts[0][1]:
        address, nbytes = parts[0]
        return xxhash.xxh3_128_hexdigest((ctypes.c_char * nbytes).from_address(address))
    hasher = xxhash.xxh3_128()
    for address, nbytes in parts:
        if nbytes:
            hasher.update((ctypes.c_char * nbytes).from_address(address))
    return hasher.hexdigest()
