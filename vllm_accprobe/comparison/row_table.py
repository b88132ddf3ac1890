"""Errors by row and a few values, kept for whoever looks: the heat map, the worst rows of a pair, a scatter.

The problem: a pair says how bad its worst row is, and a person asks which rows, and what the numbers look like. The
idea: `RowLog` listens while pairs are made and keeps one float32 per row of outputs (of inputs only what is wrong);
`RowTable` is the same in columns, beside the finished pairs. `ValueSample` holds some values of both sides of one pair.
Not here: measuring and judging (engine.py); choosing and reading samples (spreads.py); drawing (report/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import POSITION_MASK, RowSet, subject
from vllm_accprobe.comparison.measure.measured import SpillBuffer
from vllm_accprobe.comparison.pair import Pair

Names = dict[int, "tuple[str, int | None]"]
"""Subject of a row key → (request label, image index or None)."""
BOUND = 32 << 20
"""Bytes of errors by row that stay in memory."""
OFTEN = 1 << 18
"""Rows."""


@dataclass(frozen=True)
class RowTable:
    """One entry per compared row of a tensor, all columns of one length.

    pair: int32, ascending, index into ``Comparison.pairs``. request: int32, index into ``requests``, the labels (``a``,
    or ``a, image 0`` for rows of a vision tower). position: int64, of the token in its request, or of the row in its
    image. decode: bool. error: float32, in units of a relative L2 error (judge/verdict.py), 0 where the numbers agree,
    infinite where NaNs differ. ratio: float32, error over the pair's limit; NaN where the pair has none. There are no
    entries at all where every row of every pair agrees.
    """

    requests: tuple[str, ...]
    pair: np.ndarray
    request: np.ndarray
    position: np.ndarray
    decode: np.ndarray
    error: np.ndarray
    ratio: np.ndarray
    shelf: SpillBuffer | None = field(default=None, compare=False, repr=False)
    """Where the columns lie, None where they are in memory."""

    def __len__(self) -> int:
        return len(self.pair)

    def rest(self) -> None:
        """For whoever walks over all rows, now and then: they need not fit into memory."""
        if self.shelf is not None:
            self.shelf.rest()


@dataclass(frozen=True)
class ValueSample:
    """Values of one pair. pair: index into ``Comparison.pairs``. golden, mine: float32 [n], the same places of both
    sides; the first ``worst`` of them lie in the worst row (``request``, ``position``), evenly spread, the others in
    other rows."""

    pair: int
    golden: np.ndarray
    mine: np.ndarray
    worst: int
    request: str | None = None
    position: int | None = None


@dataclass(frozen=True)
class ValueSpread:
    """One pair's values and errors in bins (comparison/measure/spreads.py). pair: index into ``Comparison.pairs``.
    golden, mine: int64 [bins + 3], how many values lie in equal bins from low to high, and NaN, +Inf, -Inf. columns:
    float64, the largest error of the columns in each bin, of ``width`` columns. positions: float64, the largest row
    error in each stretch from first to last; -1 without rows. read, rows: rows whose values were read, of how
    many; of an input only those beyond the limit."""

    pair: int
    low: float
    high: float
    golden: np.ndarray
    mine: np.ndarray
    columns: np.ndarray
    width: int
    first: int
    last: int
    positions: np.ndarray
    read: int
    rows: int


@dataclass
class RowLog:
    """Filled pair by pair while the engine runs; 4 bytes per row, and 25 of the table, on a shelf."""

    shelf: SpillBuffer = field(default_factory=lambda: SpillBuffer(None, BOUND))
    _entries: dict[tuple[Any, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def add(self, pair: Pair, rows: RowSet, error: np.ndarray) -> None:
        """error: float [n] of the n ``rows``, or [1] for all alike."""
        keys, decode = rows.keys, rows.decode
        if not len(keys) or len(decode) != len(keys) or pair.role.startswith("param."):
            return
        error = np.broadcast_to(error, keys.shape) if len(error) == 1 else error
        if len(error) != len(keys):
            return
        error = error.astype(np.float32)
        if not pair.role.startswith(("output", "inplace")):
            bad = np.flatnonzero(error > (pair.limit or 0.0))
            if not len(bad):
                return
            keys, error, decode = keys[bad], error[bad], decode[bad]
        self._entries[_name(pair)] = (keys, self.shelf.keep(error), decode)

    def worst_key(self, pair: Pair) -> tuple[int, np.ndarray] | None:
        """(key of the row with the largest error, all keys of the pair), or None for a pair without rows."""
        entry = self._entries.get(_name(pair))
        return None if entry is None else (int(entry[0][int(entry[1].argmax())]), entry[0])

    def errors(self, pair: Pair) -> tuple[np.ndarray, np.ndarray] | None:
        """(keys, errors) of the pair's rows, or None for a pair without rows."""
        entry = self._entries.get(_name(pair))
        return None if entry is None or not len(entry[0]) else entry[:2]

    def table(self, pairs: Sequence[Pair], names: Names) -> RowTable:
        """``pairs`` in their final order, with their final limits."""
        found = [(i, self._entries[_name(p)], p.limit) for i, p in enumerate(pairs) if _name(p) in self._entries]
        if not any(entry[1].any() for _, entry, _ in found):  # all agrees: no row has anything to tell
            found = []
        owners = np.unique(np.concatenate([np.zeros(0, np.int64), *(np.unique(subject(e[0])) for _, e, _ in found)]))
        labels = tuple(_label(*names.get(int(s), (str(int(s)), None))) for s in owners)
        n = sum(len(entry[0]) for _, entry, _ in found)
        # Filled stretch by stretch: of millions of rows, joined arrays would be most of the memory.
        empty = self.shelf.empty
        out = RowTable(
            labels, empty(n, np.int32), empty(n, np.int32), empty(n, np.int64), empty(n, bool),
            empty(n, np.float32), empty(n, np.float32), self.shelf,
        )  # fmt: skip
        start = rested = 0
        for i, (keys, error, decode), limit in found:
            here = slice(start, start := start + len(keys))
            out.pair[here] = i
            out.request[here] = np.searchsorted(owners, subject(keys))
            out.position[here] = keys & POSITION_MASK
            out.decode[here], out.error[here] = decode, error
            with np.errstate(divide="ignore", invalid="ignore"):
                allowed = np.float32(np.nan if limit is None else limit)
                out.ratio[here] = np.where(error == 0, np.float32(0), error / allowed)
            if start - rested > OFTEN:
                out.rest()
                rested = start
        return out


def _name(pair: Pair) -> tuple[Any, ...]:
    return pair.golden, pair.mine, pair.step, pair.rank


def _label(request: str, image: int | None) -> str:
    return request if image is None else f"{request}, image {image}"


def row_labels(names: Names, keys: np.ndarray) -> dict[str, list[tuple[int, int]]]:
    """Rows by the label of their request, as in `RowTable`: half-open ranges of positions. keys: int64, ascending."""
    out: dict[str, list[tuple[int, int]]] = {}
    for part in np.split(keys, np.flatnonzero(np.diff(keys) != 1) + 1) if len(keys) else ():
        who, first = int(subject(part[:1])[0]), int(part[0]) & POSITION_MASK
        found = out.setdefault(_label(*names.get(who, (str(who), None))), [])
        found.append((first, first + len(part)))
    return {label: sorted(found) for label, found in out.items()}
