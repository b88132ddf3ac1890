"""Which errors upstream of a tensor may reach each of its rows.

The problem: an error is introduced where nothing upstream explains it; a row of attention depends on all earlier rows
of its request, a linear layer's on one, a text row on all rows of its image. The idea: of each source the largest error
that can reach a row counts (`Influence`): rows are sorted by key, so that "all earlier rows" is a running maximum.
`Prefixes` continues from the longest list of sources already worked out. Not here: what is upstream
(align/data_flow.py), limits (standards/limits.py), origins (origins.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from vllm_accprobe.align.tokens import RowSet, position, subject
from vllm_accprobe.judge.constants import NARROW
from vllm_accprobe.judge.tensor_errors import Columns, TensorErrors, spread

KEPT = 64 << 20
"""Bytes of answers that are kept."""


@dataclass(frozen=True, eq=False)
class PassedOn:
    """What a list of sources passes on to the rows of a place: as TensorStats' before, gain_before, columns_before."""

    err: np.ndarray
    gain: np.ndarray
    columns: list[Columns]


class Influence:
    """images: TokenPlan.images, subject of a vision row → the text places which its image fills."""

    def __init__(self, images: Mapping[int, list[tuple[int, int, int]]], kept: int = KEPT):
        self.images, self._limit = images, kept
        self._found: OrderedDict[tuple[Any, ...], np.ndarray] = OrderedDict()
        self._bytes = 0
        self._whole: dict[tuple[RowSet, RowSet], bool] = {}

    def again(
        self, source: TensorErrors, what: str, values: np.ndarray, vision: bool, rows: RowSet, mixing: bool
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

    def of(self, source: TensorErrors, values: np.ndarray, vision: bool, wanted: RowSet, mixing: bool) -> np.ndarray:
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

    def passed_on(
        self, sink: TensorErrors, sources: list[TensorErrors], mixing: bool, known: PassedOn | None
    ) -> PassedOn:
        """What reaches the rows of ``sink`` from ``sources``, and from those whose share is ``known``."""
        if known is None:
            before, gain = np.zeros(len(sink.seen)), np.zeros(len(sink.seen))
        else:
            before, gain = known.err.copy(), known.gain.copy()
        for source in sources:
            # What has few elements multiplies whole rows: a gate, the weights of the chosen experts.
            factor = np.maximum(np.abs(source.gain), source.rel) if source.width < NARROW else np.abs(source.gain)
            for what, values, out in (("rel", source.rel, before), ("gain", factor, gain)):
                if len(values) == len(source.keys):
                    found = self.again(source, what, values, sink.vision, sink.seen, mixing)
                    np.maximum(out, found, out=out)
        columns = [s.by_column for s in sources if s.by_column is not None]
        return PassedOn(before, gain, columns if known is None else [*known.columns, *columns])

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


def _edges(keys: np.ndarray) -> np.ndarray:
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
    first, last = np.searchsorted(keys, [who << 32, (who + 1) << 32])
    return slice(int(first), int(last))


LONG = 16
"""Shorter lists are not worth it."""
OPEN = 16
"""Lists that are remembered: places come tap by tap, so that few are open at a time."""
S = TypeVar("S")


class Prefixes(Generic[S]):
    """Remembers a state S, never to be changed in place, for lists of sources."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[list[TensorErrors], S]] = OrderedDict()

    def begun(
        self, name: tuple[Hashable, ...], sources: Sequence[TensorErrors], sink: TensorErrors
    ) -> tuple[int, S | None]:
        """(how many of ``sources`` a state is known for, the state). name: what else it depends on. sink: is no source
        of its own, so that nothing is known where it is among them."""
        if len(sources) < LONG or (name, sources[0]) not in self._known:
            return 0, None
        known, state = self._known[name, sources[0]]
        if len(known) > len(sources) or list(sources[: len(known)]) != known or sink in known:
            return 0, None
        return len(known), state

    def keep(self, name: tuple[Hashable, ...], sources: Sequence[TensorErrors], sink: TensorErrors, state: S) -> None:
        if len(sources) < LONG or sink in sources:
            return
        self._known[name, sources[0]] = list(sources), state
        self._known.move_to_end((name, sources[0]))
        while len(self._known) > OPEN:
            self._known.popitem(last=False)
