"""Whether two runs of the same requests gave the same bits, and how far apart they are where not.

The problem: two runs may have put the same rows into other batches, tokens that differ give other inputs from there on,
and what is compared must be the same number, not the same place in a file. The idea: a row is a request's (by its
prompt's hash and ordinal) at a position; each row of one dump is looked up in the other; behind the first token that
differs a request's rows are counted and not compared. Where hashes say that tensors are equal nothing is read.
Not here: what judges numbers that may differ honestly (comparison/): here only equal is equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import LOGITS, ROOT_TAP, TOKENS, Record, RowSpace

SAMPLER, TOKEN = "sampler", "output.token"
TOP = ("output.top_logits", "output.top_ids")

RowKey = tuple[int, str, int, int]
"""(rank, prompt's hash, ordinal, position) of a row."""
Place = tuple[int, str, str, int]
"""(rank, tap, role, call)."""


_HEADS = ("logits_processor", "lm_head")


def decides(tap: str) -> bool:
    """Whether ``tap`` is one that every run records beside the graph, and no place inside."""
    return tap in (ROOT_TAP, SAMPLER) or tap.rpartition(".")[2] in _HEADS


@dataclass(frozen=True)
class Tally:
    """What two runs gave at one place. rows: compared; differing: of these; rel_l2: of the step that is farthest, in
    units of the first run's norm, None where no values were read."""

    rows: int = 0
    differing: int = 0
    rel_l2: float | None = None

    def __add__(self, other: Tally) -> Tally:
        far = [x for x in (self.rel_l2, other.rel_l2) if x is not None]
        return Tally(self.rows + other.rows, self.differing + other.differing, max(far, default=None))

    def beside(self, other: Tally) -> Tally:
        """Both, where they are about the same rows: another tap, another rank."""
        both = self + other
        return Tally(max(self.rows, other.rows), max(self.differing, other.differing), both.rel_l2)

    @property
    def same(self) -> bool | None:
        """None where nothing was compared."""
        return None if not self.rows else not self.differing


@dataclass(frozen=True)
class Effect:
    """What decides of two runs. batches: whether both computed the same rows in the same steps. behind: rows that were
    left out because a token before them differed."""

    tokens: Tally
    top_logits: Tally
    logits: Tally
    root: Tally
    batches: bool
    behind: int = 0

    @property
    def same(self) -> bool | None:
        """Whether no bit differs; None where nothing was compared."""
        known = [spot.same for spot in (self.tokens, self.top_logits, self.logits, self.root) if spot.same is not None]
        return all(known) if known else None


@dataclass(frozen=True)
class Parting:
    """The first place, in order of execution, at which two runs with taps have other values."""

    tap: str
    role: str
    rank: int
    spot: Tally


class Bits:
    """A dump, by rows."""

    def __init__(self, dump: Dump):
        self.dump = dump
        self._requests = {key: (one.prompt, one.ordinal) for key, one in dump.requests.items()}
        self._keys: dict[tuple[int, int, str], tuple[RowKey, ...]] = {}
        self._places: dict[Place, list[Record]] = {}
        for record in dump.records:
            if record.step is not None:
                self._places.setdefault((record.rank, record.tap, record.role, record.call), []).append(record)

    def places(self) -> Mapping[Place, list[Record]]:
        """All records of steps, by place, in the order of the journal."""
        return self._places

    def keys(self, record: Record) -> tuple[RowKey, ...]:
        """Of the record's rows; one key of its own for a tensor without rows."""
        if record.rows is None or record.row_dim != 0 or not record.shape:
            return ((record.rank, "", -1, record.step or 0),)
        where = (record.rank, record.step or 0, record.rows)
        if where not in self._keys:
            space = self.dump.rows.get(where)
            keys = () if space is None else tuple(self._rows_of(record.rank, space))
            self._keys[where] = keys
        return self._keys[where]

    def _rows_of(self, rank: int, space: RowSpace) -> Iterator[RowKey]:
        for part in space.segments:
            prompt, ordinal = self._requests.get((rank, part.req), ("", -1 - part.req))
            image = "" if part.image is None else f"#{part.image}"
            for offset in range(part.n):
                yield rank, prompt + image, ordinal, part.pos + offset

    def token_ids(self) -> dict[RowKey, int]:
        """What the rows were computed from, and what was sampled after them (at the position that it takes)."""
        found: dict[RowKey, int] = {}
        for (rank, _, name), space in self.dump.rows.items():
            if name in (TOKENS, LOGITS) and space.ids:
                found.update(zip(self._rows_of(rank, space), space.ids, strict=False))
        for (_, tap, role, _), records in self._places.items():
            if (tap, role) == (SAMPLER, TOKEN):
                for record in records:
                    if record.payload is not None:
                        values = self.dump.read(record).reshape(-1)
                        for (rank, prompt, ordinal, position), value in zip(self.keys(record), values, strict=False):
                            found[rank, prompt, ordinal, position + 1] = int(value)
        return found

    def batches(self) -> dict[tuple[int, int], tuple[RowKey, ...]]:
        """Rows of the batch of each (rank, step), in order."""
        return {
            (rank, step): tuple(self._rows_of(rank, space))
            for (rank, step, name), space in self.dump.rows.items()
            if name == TOKENS
        }


def outcome(reference: Bits, other: Bits) -> Effect:
    """What decides: the tokens, the best logits, all logits and the root's output, of the rows that both have."""
    compared, ends = _tokens(reference, other)
    pairing = _Pairing(reference, other, ends)
    top, logits, root = Tally(), Tally(), Tally()
    for place in reference.places():
        _, tap, role, _ = place
        if tap == SAMPLER and role in TOP:
            top = top.beside(pairing.spot(place))
        elif tap.rpartition(".")[2] in _HEADS and role.startswith("output."):
            logits = logits.beside(pairing.spot(place))
        elif tap == ROOT_TAP and role.startswith("output."):
            root = root.beside(pairing.spot(place))
    ours, theirs = reference.batches(), other.batches()
    batches = all(ours[key] == theirs[key] for key in ours if key in theirs)
    return Effect(compared, top, logits, root, batches, len(pairing.behind))


def first_parting(reference: Bits, other: Bits) -> Parting | None:
    """Of the places inside that both dumps have: the first one whose values differ."""
    pairing = _Pairing(reference, other, _tokens(reference, other)[1])
    inside = [place for place in reference.places() if not decides(place[1]) and place in other.places()]
    for place in sorted(inside, key=lambda one: reference.places()[one][0].seq):
        spot = pairing.spot(place)
        if spot.differing:
            return Parting(place[1], place[2], place[0], spot)
    return None


_Ends = dict[tuple[int, str, int], int]
"""By (rank, prompt, ordinal): the first position whose token differs."""


def _tokens(reference: Bits, other: Bits) -> tuple[Tally, _Ends]:
    ours, theirs = reference.token_ids(), other.token_ids()
    shared = [key for key in ours if key in theirs]
    wrong = [key for key in shared if ours[key] != theirs[key]]
    ends: _Ends = {}
    for rank, prompt, ordinal, position in wrong:
        ends[rank, prompt, ordinal] = min(ends.get((rank, prompt, ordinal), position), position)
    return Tally(len(shared), len(wrong)), ends


class _Pairing:
    """Looks one dump's rows up in the other. behind: rows left out because a token before them differed."""

    def __init__(self, reference: Bits, other: Bits, ends: _Ends):
        self._reference, self._other, self._ends = reference, other, ends
        self.behind: set[RowKey] = set()

    def spot(self, place: Place) -> Tally:
        """What both gave at one place."""
        there: dict[RowKey, tuple[Record, int]] = {}
        for record in self._other.places().get(place, ()):
            for row, key in enumerate(self._other.keys(record)):
                there[key] = (record, row)
        found = Tally()
        for record in self._reference.places()[place]:
            found += self._one(record, self._reference.keys(record), there)
        return found

    def _one(self, record: Record, keys: tuple[RowKey, ...], there: dict[RowKey, tuple[Record, int]]) -> Tally:
        """Of one tensor of the reference."""
        pairs: dict[int, tuple[Record, list[int], list[int]]] = {}
        for row, key in enumerate(keys):
            if key not in there:
                continue
            if key[3] >= self._ends.get(key[:3], key[3] + 1):
                self.behind.add(key)
                continue
            other, at = there[key]
            _, mine, its = pairs.setdefault(id(other), (other, [], []))
            mine.append(row)
            its.append(at)
        found, error, norm, measured = Tally(), 0.0, 0.0, False
        for other, mine, its in pairs.values():
            whole = mine == its == list(range(len(keys))) and self._other.keys(other) == keys
            if whole and record.hash is not None and (record.hash, record.shape) == (other.hash, other.shape):
                found += Tally(len(mine))
                continue
            if record.payload is None or other.payload is None:  # of statistics only: whole tensors, or nothing
                found += Tally(len(mine), len(mine)) if whole and record.hash and other.hash else Tally()
                continue
            ours, theirs = self._rows(self._reference, record, mine), self._rows(self._other, other, its)
            if (record.dtype, ours.shape) != (other.dtype, theirs.shape):
                found += Tally(len(mine), len(mine))
                continue
            apart = (_bytes(ours) != _bytes(theirs)).any(axis=1)
            found += Tally(len(mine), int(apart.sum()))
            golden, mine_ = (_numbers(values, record.dtype) for values in (ours, theirs))
            with np.errstate(all="ignore"):  # of infinities that differ
                error += float(np.square(golden - mine_).sum())
                norm += float(np.square(golden).sum())
            measured = True
        if found.rows and not measured and not found.differing:
            return Tally(found.rows, 0, 0.0)
        return found + Tally(rel_l2=_relative(error, norm) if measured else None)

    @staticmethod
    def _rows(bits: Bits, record: Record, rows: list[int]) -> np.ndarray:
        """[rows, the rest] of stored bits; a tensor without rows is one row."""
        values = bits.dump.read(record)
        if record.rows is None or record.row_dim != 0 or not record.shape:
            return values.reshape(1, -1)
        return values.reshape(record.shape[0], -1)[rows]


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


def _numbers(rows: np.ndarray, dtype: str) -> np.ndarray:
    values = widen(rows, dtype, as_float=True)
    return np.abs(values) if np.iscomplexobj(values) else values.astype(np.float64)


def _relative(error: float, norm: float) -> float:
    """Infinite where a side is not finite, or where there is a difference from nothing."""
    if not error:
        return 0.0
    relative = float(np.sqrt(error / norm)) if norm else math.inf
    return relative if math.isfinite(relative) else math.inf
