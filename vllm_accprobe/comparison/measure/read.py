"""From a group of records to one array of rows, and ranks' copies of one tensor.

From a group of records to one array of rows.

The problem: a tensor may lie in pieces on several ranks, with its rows along any dimension, and golden tensors are
needed many times. The idea: `Loader` joins the pieces as the plan says, turns rows to the front and keeps what it made
in a cache bounded by bytes; nothing else holds payloads, so a dump of any size is compared in the same memory.
A payload that cannot be read (a file that is damaged inside, or closed to us) is remembered in its dump and raised as
`Unread`: whoever compares leaves that pair out and goes on.

Ranks' copies of a tensor without rows: whether they are copies at all, and which of them is worst.

The problem: other tools write neither hashes, so that a wrong copy on one rank would go unseen, nor what a rank's
tensor is, so that a partial sum looks like a copy. The idea: the copies are read; where they differ and nobody wrote
down that they are copies, their sum is tried, and taken if it is much nearer to the other side; else the copy of mine
that is furthest off is what is compared, because that rank goes on with it.

Not here: which rows are wanted (engine.py), rows (activations.py), layouts that are known (align/ranks.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.align.derived import read
from vllm_accprobe.align.ranks import ONE, SUM, TAKEN_FOR_COPIES, merge
from vllm_accprobe.comparison.plan.unit import Group
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.kernels import definition, rows


@dataclass(frozen=True)
class RowBlock:
    """``data``: stored bits of ``dtype``, [rows, width], C order; ``feature``: the shape of one row."""

    data: np.ndarray
    dtype: str
    feature: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows that meet, as they were read: row golden_rows[i] of golden against row mine_rows[i] of mine; int64 [n]."""

    golden: RowBlock
    golden_rows: np.ndarray
    mine: RowBlock
    mine_rows: np.ndarray

    @property
    def bits(self) -> tuple[np.ndarray, str, np.ndarray, np.ndarray, str, np.ndarray]:
        """As the kernels want them: stored bits, dtype and rows of golden, and of mine."""
        g, m = self.golden, self.mine
        return g.data, g.dtype, self.golden_rows, m.data, m.dtype, self.mine_rows

    @property
    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Widened, [n, width] each."""
        golden, g_dtype, g_rows, mine, m_dtype, m_rows = self.bits
        return widen(golden[g_rows], g_dtype), widen(mine[m_rows], m_dtype)

    @property
    def floats(self) -> bool:
        return all(DTYPES[b.dtype].kind == "float" for b in (self.golden, self.mine))

    def only(self, some: np.ndarray) -> Stretch:
        """Those of ``some``, int64 indices."""
        return Stretch(self.golden, self.golden_rows[some], self.mine, self.mine_rows[some])

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """One of them as floating point, [width] each."""
        sides = (self.golden, self.golden_rows), (self.mine, self.mine_rows)
        golden, mine = (widen(b.data[rows[i]], b.dtype, as_float=True) for b, rows in sides)
        return golden, mine

    def same_bits(self) -> bool:
        """Whether they hold the same stored bits: -0 is not 0 here, and a number of another dtype never the same."""
        if self.golden.dtype != self.mine.dtype:
            return False
        return _equal_bytes(_taken(self.golden.data, self.golden_rows), _taken(self.mine.data, self.mine_rows))


def _taken(data: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """``data[rows]``, without a copy where these are a stretch, as they nearly always are."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
        return data[rows[0] : rows[-1] + 1]
    return data[rows]


def _equal_bytes(golden: np.ndarray, mine: np.ndarray) -> bool:
    """Of two arrays in C order; piece by piece, so that the first difference ends it and no piece leaves the cache."""
    if golden.nbytes != mine.nbytes:
        return False
    g, m = (x.reshape(-1).view(np.uint8) for x in (golden, mine))
    for start in range(0, len(g), _PIECE):
        a, b = g[start : start + _PIECE], m[start : start + _PIECE]
        if len(a) % 8 == 0:
            a, b = a.view(np.uint64), b.view(np.uint64)
        if not np.array_equal(a, b):
            return False
    return True


_PIECE = 1 << 18
UNREAD = "payload that cannot be read"
_NAMED = 3


class Unread(Exception):
    """A payload could not be read; what it was stands in its dump's problems."""


def unread(dump: Any, error: Exception) -> Unread:
    """Remembers in ``dump`` that something of it could not be read, as a problem that names it; there may be thousands,
    of which the first are named. Called by many threads: the worst that can happen is one sentence too many."""
    why = " ".join(str(error).split())
    if why not in dump.unread:
        dump.unread.append(why)
        if sum(p in dump.unread for p in dump.problems) < _NAMED:
            dump.problems.append(why)
    return Unread(why)


class Loader:
    """Reads groups of one dump. limit: bytes of joined tensors that are kept for the next time."""

    def __init__(self, dump: Any, limit: int = 512 << 20):
        self._dump = dump
        self._limit = limit
        self._kept: OrderedDict[Any, RowBlock] = OrderedDict()
        self._bytes = 0

    def load(self, group: Group, cut: tuple[int, int] | None = None) -> RowBlock:
        """The whole of ``group``; ``cut`` = (dimension, size): without padding that the other side does not have.
        Raises Unread."""
        key = (group, cut)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        block = self._make(group, cut)
        self._kept[key] = block
        self._bytes += block.data.nbytes
        while self._bytes > self._limit and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._bytes -= old.data.nbytes
        return block

    def forget(self) -> None:
        """Empties the cache: called when a unit is done, because no other unit reads its tensors."""
        self._kept.clear()
        self._bytes = 0

    def replica(self, group: Group, member: int) -> RowBlock:
        """The copy that another rank holds of a replicated tensor."""
        return self._rows(group, self._read(group, member), group.records[member].dtype, None)

    def _make(self, group: Group, cut: tuple[int, int] | None) -> RowBlock:
        plan = group.merge
        assert plan is not None
        dtype = group.first.dtype
        arrays = [self._read(group, i) for i in plan.use]
        if plan.kind == SUM:
            whole = merge(plan, [widen(a, dtype, as_float=True) for a in arrays])
            dtype = "float64"  # rounding the sum again would be an error of our own
        else:
            whole = merge(plan, arrays)
        return self._rows(group, whole, dtype, cut)

    def _read(self, group: Group, member: int) -> np.ndarray:
        """Raises Unread."""
        try:
            data = read(self._dump, group.records[member])
        except (DumpError, OSError) as error:
            raise unread(self._dump, error) from None
        return data

    @staticmethod
    def _rows(group: Group, whole: np.ndarray, dtype: str, cut: tuple[int, int] | None) -> RowBlock:
        if cut is not None and cut[1] < whole.shape[cut[0]]:
            whole = np.take(whole, range(cut[1]), axis=cut[0])
        if group.where is None:
            # Without rows: a parameter's first dimension serves, so that a bad row of a weight shows.
            rows = whole.shape[0] if whole.ndim > 1 else 1
            feature = whole.shape[1:] if whole.ndim > 1 else whole.shape
        else:
            whole = np.moveaxis(whole, group.row_dim, 0)
            rows, feature = whole.shape[0], whole.shape[1:]
        width = int(np.prod(feature, dtype=np.int64))
        return RowBlock(np.ascontiguousarray(whole).reshape(rows, width), dtype, feature)


def find_cut(golden: Group, mine: Group) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Where one side has lost its padding and the other has not, how to cut the other: (golden's cut, mine's cut)."""
    assert golden.merge is not None
    assert mine.merge is not None
    out: list[tuple[int, int] | None] = [None, None]
    for side, (this, other) in enumerate(((golden, mine), (mine, golden))):
        cut = other.merge.cut if other.merge else None
        shape = this.merge.shape if this.merge else ()
        if cut is not None and cut[0] < len(shape) and shape[cut[0]] > cut[1]:
            out[side] = cut
    return out[0], out[1]


def cut_shape(shape: tuple[int, ...], cut: tuple[int, int] | None) -> tuple[int, ...]:
    return shape if cut is None else (*shape[: cut[0]], cut[1], *shape[cut[0] + 1 :])


NEARER = 1 / 16
"""How much of one rank's squared error the sum over ranks may have, to be taken in its place."""
SUMMED = "the sum over ranks is compared"


def settle(
    loaders: tuple[Loader, Loader], groups: tuple[Group, Group], flat: list[RowBlock], table: np.ndarray
) -> tuple[np.ndarray, list[RowBlock], str]:
    """(row table, blocks, what to say) of what is to be compared; golden first. flat: the ranks that were read, data
    [1, elements]; table: float64 [1, fields], theirs."""
    said = ""
    for side, (loader, group) in enumerate(zip(loaders, groups, strict=True)):
        copies = list(_copies(loader, group))
        odd = [(rank, block) for rank, block in copies if not _equal(block, flat[side])]
        if not odd:
            continue
        if group.merge is not None and group.merge.note == TAKEN_FOR_COPIES:
            trial = _with(flat, side, _sum([flat[side], *(block for _, block in copies)]))
            found = _table(trial)
            if trial[side].data.dtype == np.float64 and found[0, definition.DD] < NEARER * table[0, definition.DD]:
                table, flat, said = found, trial, SUMMED
                continue
        for rank, block in odd if side else ():
            trial = _with(flat, side, block)
            found = _table(trial)
            said = said or f"ranks differ (rank {rank} from rank {group.first.rank})"
            if _error(found) > _error(table):
                table, flat, said = found, trial, f"ranks differ (rank {rank} from rank {group.first.rank})"
    return table, flat, said


def _copies(loader: Loader, group: Group) -> Iterator[tuple[int, RowBlock]]:
    """(rank, copy) of the ranks that were not read, unless hashes say that they are equal."""
    plan = group.merge
    for copies in plan.copies if plan is not None and plan.kind == ONE else ():
        digest = group.records[copies[0]].hash
        for i in copies[1:]:
            record = group.records[i]
            if record.payload is not None and (digest is None or record.hash != digest):
                block = loader.replica(group, i)
                yield record.rank, RowBlock(block.data.reshape(1, -1), block.dtype, block.feature)


def _equal(a: RowBlock, b: RowBlock) -> bool:
    """By their bits, so that NaN equals NaN."""
    return a.data.shape == b.data.shape and a.data.tobytes() == b.data.tobytes()


def _sum(blocks: list[RowBlock]) -> RowBlock:
    first = blocks[0]
    if DTYPES[first.dtype].kind != "float":
        return first
    total = np.sum([widen(b.data, b.dtype, as_float=True).astype(np.float64) for b in blocks], axis=0)
    return RowBlock(total, "float64", first.feature)


def _with(flat: list[RowBlock], side: int, block: RowBlock) -> list[RowBlock]:
    return [block if i == side else b for i, b in enumerate(flat)]


def _table(flat: list[RowBlock]) -> np.ndarray:
    one = np.zeros(1, np.int64)
    return rows.wide_rows(*Stretch(flat[0], one, flat[1], one).bits, widen)


def _error(table: np.ndarray) -> tuple[float, float]:
    return float(table[0, definition.MISMATCH]), float(table[0, definition.DD])
