"""From records to arrays of rows, or to what statistics alone say.

The problem: a tensor may lie in pieces on several ranks, with rows along any dimension, and be larger than memory. The
idea: `RowReader` reads only the rows that meet into one buffer that is used again; `Loader` joins whole tensors as the
plan says, in a cache bounded by bytes. A payload that cannot be read raises `Unread` and is left out. Ranks' copies of
a tensor without rows are read and compared: their sum is taken if much nearer, else the worst copy (`settle`). Where
values were not stored, statistics that both sides have bound the error from below (`statistics_error`). Not here: which
rows are wanted (measurer.py), layouts (align/ranks.py), kernels (kernels/).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.derived import join_stats, read
from vllm_accprobe.align.ranks import CAT, ONE, SUM, TAKEN_FOR_COPIES, merge
from vllm_accprobe.comparison.plan.unit import Group
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Record, Stats
from vllm_accprobe.dump.stats import tensor_stats
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
        golden, g_dtype, g_rows, mine, m_dtype, m_rows = self.bits
        return widen(golden[g_rows], g_dtype), widen(mine[m_rows], m_dtype)

    @property
    def floats(self) -> bool:
        return all(DTYPES[b.dtype].kind == "float" for b in (self.golden, self.mine))

    def only(self, some: np.ndarray) -> Stretch:
        return Stretch(self.golden, self.golden_rows[some], self.mine, self.mine_rows[some])

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


def feature_of(group: Group, cut: tuple[int, int] | None) -> tuple[int, ...]:
    """The shape of one row."""
    assert group.merge is not None
    shape = cut_shape(group.merge.shape, cut)
    return shape[: group.row_dim] + shape[group.row_dim + 1 :]


NEARER = 1 / 16
"""How much of one rank's squared error the sum over ranks may have, to be taken in its place."""
SUMMED = "the sum over ranks is compared"


def settle(
    loaders: tuple[Loader, Loader], groups: tuple[Group, Group], flat: list[RowBlock], table: np.ndarray
) -> tuple[np.ndarray, list[RowBlock], str]:
    """(row table, blocks, what to say) of what is to be compared; golden first. flat: the ranks that were read, data
    [1, elements]; table: float64 [1, fields], theirs."""
    text = ""
    for side, (loader, group) in enumerate(zip(loaders, groups, strict=True)):
        copies = list(_copies(loader, group))
        unequal = [(rank, block) for rank, block in copies if not _equal(block, flat[side])]
        if not unequal:
            continue
        if group.merge is not None and group.merge.note == TAKEN_FOR_COPIES:
            trial, found = _trial(flat, side, _sum([flat[side], *(block for _, block in copies)]))
            if trial[side].data.dtype == np.float64 and found[0, definition.DD] < NEARER * table[0, definition.DD]:
                table, flat, text = found, trial, SUMMED
                continue
        for rank, block in unequal if side else ():
            trial, found = _trial(flat, side, block)
            differ = f"ranks differ (rank {rank} from rank {group.first.rank})"
            text = text or differ
            if tuple(found[0, _BY_ERROR]) > tuple(table[0, _BY_ERROR]):
                table, flat, text = found, trial, differ
    return table, flat, text


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
    return a.data.shape == b.data.shape and a.data.tobytes() == b.data.tobytes()


def _sum(blocks: list[RowBlock]) -> RowBlock:
    first = blocks[0]
    if DTYPES[first.dtype].kind != "float":
        return first
    total = np.sum([widen(b.data, b.dtype, as_float=True).astype(np.float64) for b in blocks], axis=0)
    return RowBlock(total, "float64", first.feature)


def _trial(flat: list[RowBlock], side: int, block: RowBlock) -> tuple[list[RowBlock], np.ndarray]:
    """(``flat`` with another block of a side, its row table)."""
    blocks, one = [block if i == side else b for i, b in enumerate(flat)], np.zeros(1, np.int64)
    return blocks, rows.wide_rows(*Stretch(blocks[0], one, blocks[1], one).bits, widen)


_BY_ERROR = [definition.MISMATCH, definition.DD]


Figures = tuple["float | None", ...]
"""max, min, mean, norm; None what a tool did not take."""
NAMES = ("max", "min", "mean", "norm")


def statistics_of(group: Group, loader: Loader) -> Stats | None:
    """Of the whole tensor: as recorded, of disjoint pieces together, or computed from the values."""
    if group.merge is None:
        return None
    found = [group.records[i].stats for i in group.merge.use]
    if group.merge.kind == ONE and found[0] is not None:
        return found[0]
    whole = [(k, 0, group.records[group.merge.use[k]].shape[group.merge.dim or 0]) for k in range(len(found))]
    if group.merge.kind == CAT and sorted(group.merge.pieces) == whole and all(found):
        return join_stats([s for s in found if s is not None])
    if not group.readable:
        return None
    block = loader.load(group)
    return tensor_stats(block.data, block.dtype)


def checksums(golden: Group, mine: Group) -> bool | None:
    """Whether the checksums of one kind that both sides have are equal; None where they have none."""
    g, m = golden.fingerprint, mine.fingerprint
    if g is None or m is None:
        return None
    kinds = [{str(h).partition(":")[0] for h in f[-1]} for f in (g, m)]
    named = all(":" in str(h) for f in (g, m) for h in f[-1])
    return g[-1] == m[-1] if named and kinds[0] == kinds[1] else None


def common(golden: Stats, mine: Stats) -> bool:
    """Whether both sides have one of the four figures, or a non-finite value."""
    both = zip(figures(golden), figures(mine), strict=True)
    return any(g is not None and m is not None for g, m in both) or any((golden.nan, golden.inf, mine.nan, mine.inf))


def figures(stats: Stats) -> Figures:
    return stats.max, stats.min, stats.mean, stats.l2


def figures_text(pair: tuple[Figures, ...]) -> str:
    """``golden | mine: max 1 | 2, ...``"""
    flat = tuple(chain.from_iterable(zip(*pair, strict=True)))
    if None not in flat:
        return _TEMPLATE % flat
    both = [(name, *flat[2 * i : 2 * i + 2]) for i, name in enumerate(NAMES)]
    words = ", ".join(f"{n} {_text(g)} | {_text(m)}" for n, g, m in both if g is not None or m is not None)
    return f"golden | mine: {words}" if words else ""


def figures_texts(pairs: Sequence[tuple[Figures, ...]]) -> list[str]:
    """`figures_text` of each: all at once where none lacks a figure, which takes half as long."""
    flat = np.array(pairs, np.float64).transpose(0, 2, 1).reshape(-1)
    if np.isnan(flat).any():
        return list(map(figures_text, pairs))
    return ("\n".join([_TEMPLATE] * len(pairs)) % tuple(flat.tolist())).split("\n")


_TEMPLATE = "golden | mine: " + ", ".join(f"{name} %.9g | %.9g" for name in NAMES)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def same_weights(golden: Record, mine: Record, allowed: float) -> bool | None:
    """Whether two weights of one dtype can be the same by their statistics: extremes to the bit, which no order of
    summation changes, norm and mean within ``allowed`` roundings of the norm. None where they do not say."""
    g, m = golden.stats, mine.stats
    if golden.dtype != mine.dtype or g is None or m is None or None in (g.min, g.max, m.min, m.max):
        return None
    if (g.min, g.max) != (m.min, m.max):
        return False
    error = statistics_error(g, m)
    return error[0] <= 2 * allowed


def statistics_error(g: Stats, m: Stats) -> tuple[float, float]:
    """`statistics_errors` of one pair."""
    columns = ({f.name: np.array([np.nan if (v := getattr(s, f.name)) is None else v]) for f in fields(Stats)}
               for s in (g, m))  # fmt: skip
    row, peak = statistics_errors(*columns)
    return float(row[0]), float(peak[0])


def statistics_errors(g: Mapping[str, np.ndarray], m: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """How far tensors must be apart, from statistics alone: lower bounds of (relative L2 errors, lone elements').

    |norm(m) - norm(g)| / norm(g) and |mean(m) - mean(g)| / rms(g) are at most the relative L2 error; the extremes'
    differences, in units of max(|extreme|, rms), at most the worst element's. Infinite where NaN or infinity differ.
    A figure that one side does not have (NaN) says nothing; without golden's norm its extremes are the scale.
    g, m: of each field of `Stats`, golden's and mine's.
    """
    worse = g["count"] != m["count"]
    for name in ("nan", "inf"):  # some tools say only whether there is any NaN, which is a count of 1
        a, b = g[name], m[name]
        worse = worse | ((a > 0) != (b > 0)) | ((a != b) & (np.minimum(a, b) > 1))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ends = [(np.where(np.isnan(m[name]), np.nan, g[name]), m[name]) for name in ("min", "max")]
        counts, at = np.unique(np.maximum(g["count"] - g["nan"] - g["inf"], 1), return_inverse=True)
        scale = np.fmax(np.fmax(abs(ends[0][0]), abs(ends[1][0])), 0.0)
        rms = np.where(np.isnan(g["l2"]), scale, g["l2"] / np.array([n**0.5 for n in counts.tolist()])[at])
        norm = np.where(g["l2"] != 0, abs(m["l2"] - g["l2"]) / g["l2"], np.nan)
        row = np.fmax(np.fmax(norm, abs(m["mean"] - g["mean"]) / rms), 0.0)
        peaks = [abs(b - a) / np.fmax(abs(a), rms) for a, b in ends]
        peak = np.fmax(np.fmax(*peaks), 0.0)
    pairs = [*ends, *((g[name], m[name]) for name in ("mean", "l2"))]
    differ = np.logical_or.reduce([(a != b) & ~np.isnan(a) & ~np.isnan(b) for a, b in pairs])
    none = rms == 0
    infinite = worse | (none & differ)
    return np.where(infinite, np.inf, np.where(none, 0.0, row)), np.where(infinite | none, 0.0, peak)


STRETCH = 4 << 20
"""Bytes of one side that are read at a time: fits the second-level caches together with the other side's, nearly."""
_SPARSE = 4
"""A stretch is read in one go only if it has at most so many times the rows that are wanted."""


class RowReader:
    """Rows of one dump. A block that it returns is valid until the next call."""

    def __init__(self, dump: Any, loader: Loader):
        self._dump, self._loader = dump, loader
        self._whole = np.empty(0, np.uint8)
        self._piece = np.empty(0, np.uint8)
        self._read = getattr(dump, "read_rows", None)

    def load(self, group: Group, cut: tuple[int, int] | None, rows: np.ndarray) -> tuple[RowBlock, np.ndarray]:
        """(block, where the wanted ``rows`` of the group, int64 and not empty, lie in it). Raises read.Unread."""
        start, stop = int(rows.min()), int(rows.max()) + 1
        if cut is not None or not self._streams(group) or stop - start > max(_SPARSE * len(rows), 64):
            return self._loader.load(group, cut), rows
        plan = group.merge
        assert plan is not None
        dtype, feature = group.first.dtype, plan.shape[1:]
        shape = (stop - start, *feature)
        itemsize = DTYPES[dtype].storage.itemsize
        if plan.kind == ONE:
            self._whole = data = _room(self._whole, prod(shape) * itemsize)
            found = self._part(group, plan.use[0], start, stop, data)
        else:
            found = self._join(group, start, stop, shape)
        width = prod(feature)
        return RowBlock(found.reshape(stop - start, width), dtype, feature), rows - start

    def _streams(self, group: Group) -> bool:
        plan = group.merge
        if self._read is None or plan is None or group.where is None or group.row_dim != 0 or not plan.shape:
            return False
        used = [group.records[i] for i in plan.use]
        if any(type(r) is not Record or r.row_dim != 0 or r.shape[0] != plan.shape[0] for r in used):
            return False
        return plan.kind == ONE or (plan.kind == CAT and plan.dim != 0)

    def _part(self, group: Group, member: int, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        try:
            found: np.ndarray = self._dump.read_rows(group.records[member], slice(start, stop), out)
        except (DumpError, OSError) as error:
            raise unread(self._dump, error) from None
        return found

    def _join(self, group: Group, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        plan = group.merge
        assert plan is not None
        assert plan.dim is not None
        storage = DTYPES[group.first.dtype].storage
        nbytes = prod(shape) * storage.itemsize
        self._whole = _room(self._whole, nbytes)
        whole = self._whole[:nbytes].view(storage).reshape(shape)
        before = (slice(None),) * plan.dim
        at = 0
        key, part = -1, whole
        for k, first, last in plan.pieces:
            if k != key:
                record = group.records[plan.use[k]]
                rows = prod(record.shape[1:]) * storage.itemsize
                self._piece = _room(self._piece, rows * (stop - start))
                part, key = self._part(group, plan.use[k], start, stop, self._piece), k
            whole[(*before, slice(at, at + last - first))] = part[(*before, slice(first, last))]
            at += last - first
        return whole


def stretches(places: np.ndarray, row_bytes: int) -> Iterator[np.ndarray]:
    """``places`` (int64 [n]) cut into runs whose rows have about STRETCH bytes."""
    step = max(STRETCH // max(row_bytes, 1), 1)
    for start in range(0, len(places), step):
        yield places[start : start + step]


def row_bytes(group: Group) -> int:
    shape = group.merge.shape if group.merge else ()
    rows = shape[group.row_dim] if shape else 1
    return prod(shape) * DTYPES[group.first.dtype].itemsize // max(rows, 1)


def _room(buffer: np.ndarray, nbytes: int) -> np.ndarray:
    return buffer if len(buffer) >= nbytes else np.empty(max(nbytes, min(2 * len(buffer), STRETCH)), np.uint8)
