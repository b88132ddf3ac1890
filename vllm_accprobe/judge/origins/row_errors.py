"""The errors of one tensor, row by row, as blame is found from them.

The problem: what went into a tap and what came out must be laid side by side, whatever steps and batches they were in.
The idea: a `Trace` is all of one (tap, role, call) as arrays sorted by row key.
Not here: how large an error is (verdict.py), which rows influence which (influence.py), blame (origin.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.judge.origins.columns import Columns

INPUT, OUTPUT, PARAM = "input", "output", "param"
_NO_NUMBERS = np.zeros(0)
_NONE = np.zeros(0, np.int64)
_NO_FLAGS = np.zeros(0, bool)


class Keeper(Protocol):
    """Keeps arrays of a number per row while blame is found: of many rows they need not fit into memory."""

    def keep(self, array: np.ndarray) -> np.ndarray:
        """The same numbers, wherever they lie."""

    def rest(self) -> None:
        """Called between places: what lies elsewhere need not be in memory any more."""


class InMemory:
    """A `Keeper` that leaves everything where it is."""

    def keep(self, array: np.ndarray) -> np.ndarray:
        return array

    def rest(self) -> None:
        pass


IN_MEMORY = InMemory()


@dataclass(frozen=True, eq=False)
class Trace:
    """One (tap, role, call) of mine with its errors.

    kind: input, output (also what was changed in place) or param. seen: the rows that were compared, sorted by key.
    keys, err: the rows with an error, sorted by key, and how large it is (verdict.RowErrors.err). everywhere: an error
    that belongs to no row (a parameter). limit: what the tap may create. vision: the keys are rows of images.
    allowed: what may have piled up there. weak: err is a lower bound, from statistics. rel, gain: of the same rows,
    relative L2 error and slope of mine over the golden minus 1. rounding: one rounding's relative error, 0.0 where
    values must be equal. broken: of the same rows, whether mine holds NaN or infinity where golden does not; spoilt:
    the same of what belongs to no row. own: of the same rows, whether they are known to be wrong whatever came in.
    columns: kernels.structure's sums. width: elements of a row. gap: layers that lie unseen in front (unseen.py).
    shared: of the rows seen, the number of the tensor without rows (a pooled vector) whose one error they all have, -1
    for a row with an error of its own; empty where all are. few: its errors are few that come again and again, which no
    statistics of independent ones describe.
    """

    tap: str
    role: str
    call: int
    kind: str
    order: int
    limit: float
    seen: RowSet
    keys: np.ndarray
    err: np.ndarray
    everywhere: float = 0.0
    vision: bool = False
    allowed: float = 0.0
    weak: bool = False
    rel: np.ndarray = field(default_factory=lambda: _NO_NUMBERS)
    gain: np.ndarray = field(default_factory=lambda: _NO_NUMBERS)
    rounding: float = 0.0
    columns: np.ndarray | None = None
    width: int = 1
    broken: np.ndarray = field(default_factory=lambda: _NO_FLAGS)
    own: np.ndarray = field(default_factory=lambda: _NO_FLAGS)
    spoilt: bool = False
    gap: int = 0
    shared: np.ndarray = field(default_factory=lambda: _NONE)
    few: bool = False

    @property
    def of_tensors(self) -> bool:
        """Whether no row has an error of its own."""
        return len(self.shared) > 0 and bool((self.shared >= 0).all())

    def largest(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """``values`` [len(keys)] of some of the rows seen; where one tensor speaks for several, the largest of theirs:
        it may have been made of any of them."""
        if not len(self.shared) or not len(keys):
            return values
        which = self.shared[np.searchsorted(self.seen.keys, keys)]
        most = np.zeros(int(which.max()) + 2, values.dtype)
        np.maximum.at(most, which, values)  # -1 is the last place
        return np.where(which >= 0, most[which], values)

    @cached_property
    def by_column(self) -> Columns | None:
        """What ``columns`` say, worked out once for all that ask."""
        return None if self.columns is None else Columns(self.columns)

    @property
    def broken_keys(self) -> np.ndarray:
        """The rows where mine holds NaN or infinity and golden does not; none where nobody looked."""
        return self.keys[self.broken] if len(self.broken) == len(self.keys) else self.keys[:0]


def kind_of(role: str) -> str:
    return INPUT if role.startswith("input") else PARAM if role.startswith("param") else OUTPUT
