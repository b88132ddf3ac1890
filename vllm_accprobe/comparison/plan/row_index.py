"""Where each row of mine lies among the golden's tensors.

The problem: the rows of one tensor of mine may lie in many tensors of the golden, in any order, and every tap asks
again. The idea: row maps belong to steps, not to taps, so an index from row key to (tensor, row) is made once per set
of row maps and serves all taps that were captured in these steps, and so does the set of the rows that meet.
Not here: how rows get their keys (align/tokens.py), what is done with them (activations.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.align.tokens import SideRows, Space

_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Index:
    """Row keys of several golden tensors: sorted ``keys``, with the tensor's number and the row in it."""

    keys: np.ndarray
    group: np.ndarray
    row: np.ndarray


@dataclass(frozen=True)
class Meeting:
    """The rows of one tensor of mine that lie among some golden tensors; arrays of one length, in mine's order.

    used: numbers of the golden tensors that hold one. row: of mine; number, other: golden's tensor and its row. rows:
    the rows themselves. places: for each tensor in ``used``, where its rows stand in these arrays. aligned: one golden
    tensor, and each row meets the row of the same place. complete: all rows of mine's tensor are here; both: and all
    of the golden's.
    """

    used: tuple[int, ...]
    row: np.ndarray
    number: np.ndarray
    other: np.ndarray
    rows: RowSet
    aligned: bool
    complete: bool
    both: bool
    places: tuple[np.ndarray, ...] = ()


class Indices:
    """What follows from the row maps alone. May be shared by threads: two of them may make the same, to no harm."""

    def __init__(self, sides: tuple[SideRows, SideRows]):
        self.sides = sides
        self.batches = [_batches(s) for s in sides]
        self.left_out = frozenset((w[0], w[1]) for s in sides[1:] for w, rows in s.rows.items() if not rows.keep.all())
        """Mine's moments with rows that are not compared: (cell, step)."""
        self.kept = frozenset(w for w, rows in sides[1].rows.items() if rows.keep.any())
        """Mine's spaces that have a row to compare. Asked for every tensor, hence asked of numpy once."""
        self._known: dict[tuple[Space, ...], Index] = {}
        self._met: dict[tuple[Space, tuple[Space, ...]], Meeting | None] = {}

    def meet(self, where: Space, wheres: tuple[Space, ...]) -> Meeting | None:
        """How the rows of mine's ``where`` that are kept lie among the golden's ``wheres``; None if none does."""
        at = (where, wheres)
        if at not in self._met:
            self._met[at] = self._meet(where, wheres)
        return self._met[at]

    def _meet(self, where: Space, wheres: tuple[Space, ...]) -> Meeting | None:
        index, rows = self.index(wheres), self.sides[1].rows[where]
        kept = np.flatnonzero(rows.keep)
        keys = rows.keys[kept]
        at = np.minimum(np.searchsorted(index.keys, keys), max(len(index.keys) - 1, 0))
        hit = index.keys[at] == keys if len(index.keys) else np.zeros(len(keys), bool)
        if not hit.any():
            return None
        kept, at = kept[hit], at[hit]
        number, other = index.group[at], index.row[at]
        used = tuple(np.unique(number).tolist())
        aligned = len(used) == 1 and np.array_equal(other, kept)
        complete = len(kept) == len(rows.keys)
        both = aligned and complete and len(self.sides[0].rows[wheres[used[0]]].keys) == len(kept)
        places = tuple(np.flatnonzero(number == i) for i in used)
        met = RowSet(rows.keys[kept], rows.decode[kept])
        return Meeting(used, kept, number, other, met, aligned, complete, both, places)

    def index(self, wheres: tuple[Space, ...]) -> Index:
        """Where each kept row lies among ``wheres``; the last one counts where a row lies in several."""
        if wheres not in self._known:
            keys, number, row = [], [], []
            for i, where in enumerate(wheres):
                rows = self.sides[0].rows[where]
                kept = np.flatnonzero(rows.keep)
                keys.append(rows.keys[kept])
                number.append(np.full(len(kept), i))
                row.append(kept)
            k, n, r = (np.concatenate(x) if x else _EMPTY for x in (keys, number, row))
            order = np.argsort(k, kind="stable")
            k, n, r = k[order], n[order], r[order]
            last = np.append(k[1:] != k[:-1], True) if len(k) else np.zeros(0, bool)
            self._known[wheres] = Index(k[last], n[last], r[last])
        return self._known[wheres]


def _batches(side: SideRows) -> dict[tuple[int, int | None], Any]:
    """What each step computed, as a value that is equal for equal batches."""
    out: dict[tuple[int, int | None], Any] = {}
    for where in sorted(side.rows, key=lambda w: (w[0], w[1], w[2])):
        if where[2] != "logits":
            moment = (where[0], where[1])
            out[moment] = (*out.get(moment, ()), where[2], side.rows[where].keys.tobytes())
    return out
