"""Arrays with a number or more for each row of a comparison, which together may be larger than memory.

The problem: row tables, errors by row and what is known of each row while origins are looked for add up to gigabytes.
The idea: what goes beyond a bound lies in unnamed mapped files, whose pages `rest` gives back between two tensors. Not
here: files that stay (comparison/store.py).
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from pathlib import Path

import numpy as np

from vllm_accprobe.dump.files import take_room

BOUND = 96 << 20
"""Bytes that stay in memory."""
CHUNK = 64 << 20


class SpillBuffer:
    """Keeps arrays. directory: of the files, which have no names; where that fails, arrays stay in memory."""

    def __init__(self, directory: Path | None = None, bound: int = BOUND):
        self._directory = directory
        self._bound = bound
        self._maps: list[mmap.mmap] = []
        self._at = 0
        self.in_memory = 0
        self.on_disk = 0

    def another(self, bound: int) -> SpillBuffer:
        return SpillBuffer(self._directory, bound)

    def keep(self, array: np.ndarray) -> np.ndarray:
        """The same numbers, wherever they lie."""
        where = self._mapped(array.size, array.dtype)
        if where is None:
            return array
        kept = where.reshape(array.shape)
        kept[...] = array
        return kept

    def empty(self, n: int, dtype: type) -> np.ndarray:
        where = self._mapped(n, np.dtype(dtype))
        return np.empty(n, dtype) if where is None else where

    def _mapped(self, n: int, dtype: np.dtype) -> np.ndarray | None:
        """Room on disk, None where so much has room in memory or nowhere else."""
        nbytes = n * dtype.itemsize
        if self.in_memory + nbytes <= self._bound or not nbytes:
            self.in_memory += nbytes
            return None
        try:
            where = self._room(nbytes)
        except OSError:  # a full disk is no reason to stop while there is memory
            self._bound += nbytes
            self.in_memory += nbytes
            return None
        found = np.frombuffer(where, dtype, n, self._at)
        self._at += (nbytes + 63) // 64 * 64
        self.on_disk += nbytes
        return found

    def rest(self) -> None:
        """Gives the pages back; arrays stay usable and are read again when they are needed."""
        for chunk in self._maps:
            with contextlib.suppress(AttributeError, ValueError, OSError):  # not on every system
                chunk.madvise(mmap.MADV_DONTNEED)

    def _room(self, nbytes: int) -> mmap.mmap:
        if not self._maps or self._at + nbytes > len(self._maps[-1]):
            self.rest()
            with tempfile.TemporaryFile(dir=self._directory, prefix="accprobe-") as file:
                size = max(CHUNK, nbytes)
                file.truncate(size)
                # A hole that a full disk has no page for would end the process that writes there (SIGBUS).
                take_room(file.fileno(), size)
                self._maps.append(mmap.mmap(file.fileno(), size))
            self._at = 0
        return self._maps[-1]
