"""Which rows can influence which, and the largest error that reaches each row from one tensor.

The problem: a row of attention's output depends on all earlier rows of its request, a linear layer's on one, a text
row on all rows of its image; and the same tensor stands in front of many others. The idea: one number for each wanted
row, the largest error of the rows that can influence it; rows are sorted by key, so that a request is a stretch and
"all earlier rows" a running maximum. What was asked for before, of the same tensor and the same rows, is kept within
a bound; traces and sets of rows stand in its name, and equal sets are one (align/row_set.py).
Not here: what stands in front of what (origin.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.align.tokens import position, subject
from vllm_accprobe.judge.origins.row_errors import Trace

KEPT = 64 << 20
"""Bytes of answers that are kept."""


class Influence:
    """images: TokenPlan.images, subject of a vision row → the text places which its image fills."""

    def __init__(self, images: Mapping[int, list[tuple[int, int, int]]], kept: int = KEPT):
        self.images, self._limit = images, kept
        self._found: OrderedDict[tuple[Any, ...], np.ndarray] = OrderedDict()
        self._bytes = 0
        self._whole: dict[tuple[RowSet, RowSet], bool] = {}

    def again(
        self, source: Trace, what: str, values: np.ndarray, vision: bool, rows: RowSet, mixing: bool
    ) -> np.ndarray:
        """`of`, remembered. what: names ``values``, which must be the same for one source."""
        name = source, what, vision, rows, mixing
        if name in self._found:
            self._found.move_to_end(name)
            return self._found[name]
        self._found[name] = found = self.of(source, values, vision, rows, mixing)
        self._bytes += found.nbytes
        while self._bytes > self._limit and len(self._found) > 1:
            self._bytes -= self._found.popitem(last=False)[1].nbytes
        return found

    def of(self, source: Trace, values: np.ndarray, vision: bool, wanted: RowSet, mixing: bool) -> np.ndarray:
        """The largest of ``values`` (of ``source``'s rows with errors) among the rows that can influence each of the
        ``wanted``, which are sorted: float64 [len(wanted)], to be read only. vision: these are rows of images."""
        base, keys = source.everywhere, wanted.keys
        if not len(source.keys) or (vision and not source.vision):
            return np.full(len(keys), base)
        if source.vision and vision:
            found = _same_subject(source.keys, values, keys)
        else:
            rows, seen = source.keys, source.seen
            if source.vision:
                rows, values = self._as_text(source.keys, values)
                seen = RowSet(rows)
            found = self._causal(rows, values, seen, wanted) if mixing else spread(keys, rows, values)
        return np.maximum(base, found)

    def _as_text(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """An image's error, at the text positions which the image fills: (keys, values)."""
        worst: dict[int, float] = {}
        for who, e in zip(subject(keys).tolist(), values.tolist(), strict=True):
            worst[who] = max(worst.get(who, 0.0), e)
        at: dict[int, float] = {}
        for who, e in worst.items():
            for text, first, n in self.images.get(who, ()):
                for p in range(first, first + n):
                    key = (text << 32) | p
                    at[key] = max(at.get(key, 0.0), e)
        rows = np.array(sorted(at), np.int64)
        return rows, np.array([at[k] for k in rows.tolist()])

    def _causal(self, rows: np.ndarray, values: np.ndarray, seen: RowSet, wanted: RowSet) -> np.ndarray:
        """Rows of the same request at positions up to the row's; where such a row was computed for another request (a
        shared prefix in the cache), any request's row at that position."""
        keys = wanted.keys
        if not self._complete(seen, wanted):
            return _causal_anywhere(rows, values, seen.keys, keys)
        most = np.array(values, np.float64)
        edges = [*_edges(rows), len(rows)]
        for start, stop in pairwise(edges):
            np.maximum.accumulate(most[start:stop], out=most[start:stop])
        if rows is keys:
            return most
        first = np.searchsorted(rows, subject(keys) << 32)
        at = np.searchsorted(rows, keys, side="right")
        return np.where(at > first, most[np.maximum(at - 1, 0)], 0.0)

    def _complete(self, seen: RowSet, wanted: RowSet) -> bool:
        """Whether ``seen`` has all rows of each request up to the last one that is ``wanted``."""
        name = seen, wanted
        if name not in self._whole:
            keys = wanted.keys
            starts = _edges(keys)
            last = keys[np.append(starts[1:], len(keys)) - 1] if len(keys) else keys
            have = np.searchsorted(seen.keys, last, side="right") - np.searchsorted(seen.keys, subject(last) << 32)
            self._whole[name] = bool((have > position(last)).all())
            while len(self._whole) > 64:
                self._whole.pop(next(iter(self._whole)))
        return self._whole[name]


def spread(wanted: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``values`` of the sorted ``keys`` at all ``wanted`` keys, 0 where there is none: float64, to be read only."""
    if not len(keys) or len(values) != len(keys):
        return np.zeros(len(wanted))
    if keys is wanted or np.array_equal(keys, wanted):  # the usual case, at a tenth of the cost
        return np.asarray(values, np.float64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


def _edges(keys: np.ndarray) -> np.ndarray:
    """Where each request begins in sorted ``keys``."""
    who = subject(keys)
    return np.flatnonzero(np.append(True, who[1:] != who[:-1])) if len(keys) else np.zeros(0, np.int64)


def _same_subject(rows: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    who, owners = subject(keys), subject(rows)
    out = np.zeros(len(keys))
    for one in np.unique(who):
        mask = owners == one
        if mask.any():
            out[who == one] = values[mask].max()
    return out


def _causal_anywhere(rows: np.ndarray, values: np.ndarray, seen: np.ndarray, keys: np.ndarray) -> np.ndarray:
    out = np.zeros(len(keys))
    where = position(keys)
    source_at, seen_at = position(rows), position(seen)
    for one in np.unique(subject(keys)):  # all keys are sorted: a request is a stretch
        mine, own, have = (_stretch(k, int(one)) for k in (keys, rows, seen))
        at, err = source_at[own], values[own]
        top = int(where[mine][-1])
        if np.searchsorted(seen_at[have], top, side="right") <= top:  # rows of this request are missing
            other = ~np.isin(source_at, seen_at[have])
            other[own] = False
            at, err = np.concatenate([at, source_at[other]]), np.concatenate([err, values[other]])
            order = np.argsort(at, kind="stable")
            at, err = at[order], err[order]
        if not len(at):
            continue
        err = np.maximum.accumulate(err)
        i = np.searchsorted(at, where[mine], side="right")
        out[mine] = np.where(i > 0, err[np.maximum(i - 1, 0)], 0.0)
    return out


def _stretch(keys: np.ndarray, who: int) -> slice:
    """Where the rows of one request lie in sorted ``keys``."""
    first, last = np.searchsorted(keys, [who << 32, (who + 1) << 32])
    return slice(int(first), int(last))
