"""Page-aligned staging memory for the writer.

The problem: writes past the page cache need page-aligned addresses, and fresh memory costs more than the copy into it.
The idea: a few anonymous maps, made once, touched once and used in turn. Not here: who waits for whom (writer.py).
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_HELD = 1 << 20
"""Bytes up to which a copy keeps the GIL: given up for a microsecond, it may be milliseconds until it is back."""
_copy_held = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class AlignedBlock:
    """``size`` bytes: ``array`` (uint8) and ``view`` show the same memory at ``address``."""

    __slots__ = ("_map", "address", "array", "size", "view")

    def __init__(self, size: int):
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._map = mmap.mmap(-1, size, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)  # halves the CPU time of a write past the page cache
            except OSError:
                pass
        self.size = size
        self.array = np.frombuffer(self._map, dtype=np.uint8)
        self.array[::4096] = 0  # the first touch of a page costs microseconds: not while a request waits
        self.view = memoryview(self._map)
        self.address = self.array.ctypes.data

    def fill(self, at: int, source: int, nbytes: int) -> None:
        """Copies ``nbytes`` bytes from the address ``source`` to ``at``; while many are copied, the GIL is free."""
        if nbytes <= _HELD:
            _copy_held(self.address + at, source, nbytes)
        else:
            ctypes.memmove(self.address + at, source, nbytes)

    def zero(self, start: int, nbytes: int) -> None:
        """Gaps are zeros: nothing that lay here before reaches the disk."""
        if nbytes > 0:
            ctypes.memset(self.address + start, 0, nbytes)
