"""Where each row of mine lies among the golden's tensors.

The problem: the rows of one tensor of mine may lie in many tensors of the golden, in any order, and every tap asks
again. The idea: row maps belong to steps, not to taps, so an index from row key to (tensor, row) is made once per set
of row maps and serves all taps that were captured in these steps.
Not here: how rows get their keys (align/tokens.py), what is done with them (measure.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import Side, Space
from vllm_accprobe.compare.plan import Group

_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Index:
    """Row keys of several golden tensors: sorted ``keys``, with the tensor's number and the row in it."""

    keys: np.ndarray
    group: np.ndarray
    row: np.ndarray


class Indices:
    """What follows from the row maps alone. May be shared by threads: two of them may make the same, to no harm."""

    def __init__(self, sides: tuple[Side, Side]):
        self.sides = sides
        self.batches = [_batches(s) for s in sides]
        self._known: dict[tuple[Space, ...], Index] = {}

    def index(self, groups: list[Group]) -> Index:
        """Where each kept row lies among ``groups``; the last one counts where a row lies in several."""
        wheres = tuple(g.where for g in groups if g.where is not None)
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


def _batches(side: Side) -> dict[tuple[int, int | None], Any]:
    """What each step computed, as a value that is equal for equal batches."""
    out: dict[tuple[int, int | None], Any] = {}
    for where in sorted(side.rows, key=lambda w: (w[0], w[1], w[2])):
        if where[2] != "logits":
            moment = (where[0], where[1])
            out[moment] = (*out.get(moment, ()), where[2], side.rows[where].keys.tobytes())
    return out
