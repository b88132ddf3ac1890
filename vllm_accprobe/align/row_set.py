"""Rows of one tensor, and what follows from them, worked out once.

The problem: hundreds of taps have the rows of the same steps, and each of them asks which phase these are and wants
them sorted and without repetition. The idea: a `RowSet` is made once per step and handed to all taps of it; it is told
by identity, so that it may stand in the name of what is remembered, and holds what was worked out of it. `Unions` joins
the sets of a tap's tensors, and gives equal rows one sorted set.
Not here: where keys come from (tokens.py), which rows of two tensors meet (comparison/plan/row_index.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from vllm_accprobe.dump.schema import DECODE, PREFILL

MIXED = "mixed"
_MOST = 64
_NO_FLAGS = np.zeros(0, bool)


@dataclass(frozen=True, eq=False)
class RowSet:
    """keys: int64 [n], in the tensor's order. decode: bool [n], whether a row was decoded; [0] where nobody asks."""

    keys: np.ndarray
    decode: np.ndarray = field(default_factory=lambda: _NO_FLAGS)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def phase(self) -> str | None:
        """prefill, decode or mixed; None where it is not known."""
        if not len(self.decode):
            return None
        return DECODE if self.decode.all() else MIXED if self.decode.any() else PREFILL

    def only(self, mask: np.ndarray) -> RowSet:
        """Those of ``mask``, bool [n], whatever their phase."""
        return RowSet(self.keys[mask])


NO_ROWS = RowSet(np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Union:
    """seen: the sorted rows of several sets, each once. place: int64 [n], where each row given lies in ``seen``.
    distinct: whether all rows given are different."""

    seen: RowSet
    place: np.ndarray
    distinct: bool


class Unions:
    """The last few unions that were asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[RowSet, ...], Union] = {}
        self._same: dict[bytes, RowSet] = {}

    def of(self, sets: Sequence[RowSet]) -> Union:
        name = tuple(sets)
        if name not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[name] = self._make(name)
        return self._known[name]

    def _make(self, sets: tuple[RowSet, ...]) -> Union:
        every = np.concatenate([s.keys for s in sets]) if sets else NO_ROWS.keys
        if len(every) < 2 or (np.diff(every) > 0).all():
            seen, place = every, np.arange(len(every))
        else:
            seen, place = np.unique(every, return_inverse=True)
        if len(self._same) >= _MOST:
            self._same.clear()
        digest = hashlib.blake2b(seen.tobytes(), digest_size=16).digest()
        return Union(self._same.setdefault(digest, RowSet(seen)), place, len(seen) == len(every))
