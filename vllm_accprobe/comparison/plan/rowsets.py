"""Sets of rows that many tensors share, sorted once.

The problem: hundreds of taps have the rows of the same steps, and each trace wants them sorted and without repetition.
The idea: parts hold one array of keys per step (row_index.py gives all taps the same), so a list of such arrays is
known again by their identities; equal sets are one array, so that whoever comes later can compare by identity, too. Not
here: where keys come from (align/tokens.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST = 64


@dataclass(frozen=True)
class RowSet:
    """seen: the sorted keys, each once. place: int64 [n], where each key given lies in ``seen``. distinct: whether all
    keys given are different. held: what was given, so that identities stay their own."""

    seen: np.ndarray
    place: np.ndarray
    distinct: bool
    held: tuple[np.ndarray, ...]


class RowSets:
    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], RowSet] = {}
        self._same: dict[bytes, np.ndarray] = {}

    def of(self, keys: Sequence[np.ndarray]) -> RowSet:
        """The set of all ``keys``, int64 arrays."""
        name = tuple(map(id, keys))
        if name not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[name] = self._make(keys)
        return self._known[name]

    def _make(self, keys: Sequence[np.ndarray]) -> RowSet:
        every = np.concatenate(keys) if keys else np.zeros(0, np.int64)
        if len(every) < 2 or (np.diff(every) > 0).all():
            seen, place = every, np.arange(len(every))
        else:
            seen, place = np.unique(every, return_inverse=True)
        if len(self._same) >= _MOST:
            self._same.clear()
        seen = self._same.setdefault(hashlib.blake2b(seen.tobytes(), digest_size=16).digest(), seen)
        return RowSet(seen, place, len(seen) == len(every), tuple(keys))
