"""One unit's numbers: rows of mine against the golden's rows, read in stretches, or their statistics.

Two tensors of which at least one was not stored: what their statistics and checksums say.

The problem: statistics are all that many dumps have, tools take them in different precision and leave some out, and
equal statistics do not prove equal tensors. The idea: only what both sides have is compared, as lower bounds of the
error; a side that has the values but no statistics gets them computed; the four figures of both sides are said beside
the verdict, which is marked as theirs.

Stretches of rows of a dump's tensors, read into memory that is used again and again.

The problem: a tensor may be larger than the memory that a comparison is given, and memory that is new to the process
costs more than the arithmetic (two microseconds for each 4 KiB page). The idea: only the rows that meet are read, a few
megabytes at a time, into one buffer per side and worker; pieces of several ranks are joined in it. What does not lie
row by row (rows in a later dimension, partial sums, tensors made from others) is loaded whole, as read.py does.

One tensor of mine while it is read, stretch by stretch, until its part is full.

The problem: a tensor larger than memory is read a few megabytes at a time, and some of what is told of it are sums over
all of it, which mean nothing before the last stretch. The idea: a `Reading` holds the part and these sums; the kernel
gathers straight from the stored bits of each stretch; what was read in part is thrown away with it.

One unit's numbers: for each tensor of mine, the row table against the golden's rows with the same keys.

The problem: the rows of one tensor of mine may lie in many tensors of the golden, and most tensors of two runs are
equal. The idea: an index (units.py) says where each row lies; equal hashes over equal rows end the matter without
reading; else the rows that meet are read, a stretch at a time.

Not here: what follows from the bounds (judging.py), whole tensors and their cache (read.py), the kernels (kernels/),
limits and words (judge/, engine.py), parameters (params.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.derived import join_stats
from vllm_accprobe.align.ranks import CAT, ONE
from vllm_accprobe.align.tokens import Space
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part, stats_of
from vllm_accprobe.comparison.measure.read import (
    UNREAD,
    Loader,
    RowBlock,
    Stretch,
    Unread,
    cut_shape,
    find_cut,
    settle,
    unread,
)
from vllm_accprobe.comparison.plan import annotations as choices
from vllm_accprobe.comparison.plan import annotations as integer_inputs
from vllm_accprobe.comparison.plan.unit import SAMPLER, TOKEN, Group, Unit
from vllm_accprobe.comparison.plan.units import Indices
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Record, Stats
from vllm_accprobe.dump.stats import tensor_stats
from vllm_accprobe.judge.routing import is_choice, is_weight
from vllm_accprobe.kernels import definition, structure
from vllm_accprobe.kernels import rows as kernel
from vllm_accprobe.kernels import rows as wide

Figures = tuple["float | None", ...]
"""max, min, mean, norm; None what a tool did not take."""
NAMES = ("max", "min", "mean", "norm")
_INFINITE = float("inf"), 0.0


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


def said(pair: tuple[Figures, ...]) -> str:
    """``golden | mine: max 1 | 2, ...``"""
    both = [(n, g, m) for n, g, m in zip(NAMES, *pair, strict=True) if g is not None or m is not None]
    return "golden | mine: " + ", ".join(f"{n} {_text(g)} | {_text(m)}" for n, g, m in both) if both else ""


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
    """How far two tensors must be apart, from statistics alone: lower bounds of (relative L2 error, lone element's).

    |norm(m) - norm(g)| / norm(g) and |mean(m) - mean(g)| / rms(g) are at most the relative L2 error; the extremes'
    differences, in units of max(|extreme|, rms), at most the worst element's. Infinite where NaN or infinity differ.
    A figure that one side does not have says nothing; without golden's norm its extremes are the scale.
    """
    if g.count != m.count or _other_count(g.nan, m.nan) or _other_count(g.inf, m.inf):
        return _INFINITE
    ends = [(a, b) for a, b in ((g.min, m.min), (g.max, m.max)) if a is not None and b is not None]
    n = max(g.count - g.nan - g.inf, 1)
    scale = max((abs(a) for a, _ in ends), default=0.0)
    rms = g.l2 / n**0.5 if g.l2 is not None else scale
    pairs = [*ends, *((a, b) for a, b in ((g.mean, m.mean), (g.l2, m.l2)) if a is not None and b is not None)]
    if not rms:
        return (0.0, 0.0) if all(a == b for a, b in pairs) else _INFINITE
    parts = [0.0]
    if g.l2 is not None and m.l2 is not None and g.l2:
        parts.append(abs(m.l2 - g.l2) / g.l2)
    if g.mean is not None and m.mean is not None:
        parts.append(abs(m.mean - g.mean) / rms)
    peaks = [0.0, *(abs(b - a) / max(abs(a), rms) for a, b in ends)]
    return float(max(parts)), float(max(peaks))


def _other_count(g: int, m: int) -> bool:
    """Some tools say only whether there is any, which is a count of 1."""
    return bool(g) != bool(m) or (g != m and min(g, m) > 1)


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
        held, part = -1, whole
        for k, first, last in plan.pieces:
            if k != held:
                record = group.records[plan.use[k]]
                rows = prod(record.shape[1:]) * storage.itemsize
                self._piece = _room(self._piece, rows * (stop - start))
                part, held = self._part(group, plan.use[k], start, stop, self._piece), k
            whole[(*before, slice(at, at + last - first))] = part[(*before, slice(first, last))]
            at += last - first
        return whole


def stretches(places: np.ndarray, row_bytes: int) -> Iterator[np.ndarray]:
    """``places`` (int64 [n]) cut into runs whose rows have about STRETCH bytes."""
    step = max(STRETCH // max(row_bytes, 1), 1)
    for start in range(0, len(places), step):
        yield places[start : start + step]


def row_bytes(group: Group) -> int:
    """Bytes of one row of the whole tensor."""
    shape = group.merge.shape if group.merge else ()
    rows = shape[group.row_dim] if shape else 1
    return prod(shape) * DTYPES[group.first.dtype].itemsize // max(rows, 1)


def _room(buffer: np.ndarray, nbytes: int) -> np.ndarray:
    return buffer if len(buffer) >= nbytes else np.empty(max(nbytes, min(2 * len(buffer), STRETCH)), np.uint8)


class Reading:
    """part: what is filled. golden: the tensors that hold its rows. elements: float64 [10], definition.ELEMENT_FIELDS;
    softmax: definition.softmax_sums; structure: kernels.structure's sums over some of the rows; None where values were
    not read or do not differ."""

    def __init__(self, group: Group, unit: Unit, kl: bool):
        """group: mine's. kl: see Measurer."""
        self.group, self.unit, self.kl = group, unit, kl
        self.part = Part.of(group)
        self.golden: list[Group] = []
        self.elements: np.ndarray | None = None
        self.softmax: np.ndarray | None = None
        self.structure: np.ndarray | None = None
        self._looked = False
        # A set of experts has no order: neither its elements nor its columns mean anything one by one.
        self._unordered = is_choice(unit.key[1], unit.cls) or is_weight(unit.key[1], unit.cls)

    def meet(self, golden: list[Group]) -> None:
        self.golden = golden
        self.part.meet(golden[0])

    def sums(self) -> np.ndarray:
        """``elements``, to be added to."""
        if self.elements is None:
            self.elements = np.zeros(len(definition.ELEMENT_FIELDS))
        return self.elements

    def table(self, stretch: Stretch, *, again: bool = False) -> np.ndarray:
        """The row table of a stretch, and its share of the sums over elements. again: another copy of rows that were
        read; nothing is added."""
        if self._unordered:
            return definition.row_table(*(np.sort(s, axis=1) for s in stretch.numbers))
        found = wide.wide_rows(*stretch.bits, widen, elements=None if again else self.sums())
        if not again:
            self.add_softmax(stretch)
        if self.unit.key[:2] == (SAMPLER, TOKEN):  # -1: no token was sampled there
            golden, _, golden_rows, mine, _, mine_rows = stretch.bits
            found[(golden[golden_rows] < 0).any(1) | (mine[mine_rows] < 0).any(1)] = 0.0
        return found

    def add_softmax(self, stretch: Stretch) -> None:
        """What the KL divergence needs, where it was asked for."""
        if self.kl:
            sums = definition.softmax_sums(*stretch.numbers)
            self.softmax = sums if self.softmax is None else definition.joined_softmax_sums(self.softmax, sums)

    def add_columns(self, table: np.ndarray, stretch: Stretch) -> None:
        """The sums by which a fault is told from rounding (kernels/structure.py). table: the stretch's."""
        rows = np.flatnonzero(table[:, definition.DD])
        if not len(rows) or self._unordered or not stretch.floats:
            return
        rows = rows[structure.chosen(len(rows), stretch.mine.data.shape[1])]
        self.part.few |= _few(stretch, rows)
        sums = kernel.structure_sums(*stretch.only(rows).bits, widen)
        self.structure = sums if self.structure is None else self.structure + sums

    def look(self, table: np.ndarray, places: np.ndarray, stretch: Stretch, segment: int | None = None) -> None:
        """Whether all bits are equal so far, and the element with the largest error. places: int64 [n], where the rows
        of ``table`` stand in the part. segment: of a single row, where wide.row found the error."""
        part = self.part
        # Only where all numbers are equal their bits can be, and are worth a look.
        equal = not (table[:, definition.MAX_D].any() or table[:, definition.MISMATCH].any())
        part.same_bits = (part.same_bits or not self._looked) and equal and stretch.same_bits()
        self._looked = True
        if not len(table) or not table[:, definition.N].any():
            return
        r = int(table[:, definition.MAX_D].argmax())
        best = abs(part.worst[3] - part.worst[2]) if part.worst else -1.0
        if table[r, definition.MAX_D] > best:
            golden, g_dtype, golden_rows, mine, m_dtype, mine_rows = stretch.bits
            sides = golden[golden_rows[r]], g_dtype, mine[mine_rows[r]], m_dtype
            part.worst = (int(places[r]), *wide.locate(*sides, widen, segment))

    def done(self) -> Part:
        if self.elements is not None:
            self.part.elements = tuple(self.elements.tolist())
        if self.softmax is not None:
            self.part.kl = definition.kl_divergence(self.softmax)
        return self.part

    def unread(self) -> Reading:
        """Nothing of a pair that was read in part."""
        bare = Reading(self.group, self.unit, self.kl)
        bare.part = Part.of(self.group, *self.golden[:1], whole=self.part.whole, skip=UNREAD)
        bare.part.feature = self.part.feature
        return bare


_LOOKED, _NEW = 4096, 0.25
"""Chosen: elements that are looked at, and the part of those that differ which differ in their own way. A bfloat16
tensor has some thousand different values, each with some differences (0.5 and more); pixels have 256 (0.2)."""


def _few(stretch: Stretch, rows: np.ndarray) -> bool:
    """Whether the same number differs in the same way again and again: pixels, a table. Some ``rows`` are looked at."""
    width = stretch.mine.data.shape[1]
    some = rows[np.unique(np.linspace(0, len(rows) - 1, max(_LOOKED // max(width, 1), 8)).astype(np.int64))]
    golden, mine = (side.reshape(-1)[:_MOST] for side in stretch.only(some).numbers)
    at = np.flatnonzero(golden != mine)
    if len(at) < _LOOKED // 16:
        return False
    at = at[np.linspace(0, len(at) - 1, min(len(at), _LOOKED)).astype(np.int64)]
    pairs = np.empty(len(at), np.complex128)  # sorted as numbers: rows of two are sorted forty times more slowly
    pairs.real, pairs.imag = golden[at], mine[at]
    return len(np.unique(pairs)) < _NEW * len(at)


_MOST = 1 << 20
"""Elements of wide rows that are looked at, at most."""


NO_ROWS_LEFT = "only superseded rows or rows after a flipped token"
BY_EXPERT = "its rows are sorted by expert"
NO_PARTNER = "no row of it in golden"
NO_PAYLOAD = "statistics only, and other rows in the batch"
OTHER_BATCH = "tensor without rows in a step with another batch"
OTHER_WIDTH = "shapes differ"
ROW_COUNT = "its row count disagrees with the row map"
UNKNOWN_DTYPE = "complex numbers are not compared"


_SORTED = re.compile(r"(^|\.)experts\.(?!\d)")
"""Taps inside a container that runs all experts at once: rows that no row map describes stand in an order that follows
from the routing of all others."""


class Measurer:
    """Measures units of one plan, in one thread. Holds nothing between units but buffers and indices of row keys."""

    def __init__(self, dumps: tuple[Any, Any], loaders: tuple[Loader, Loader], indices: Indices, kl: bool = False):
        """kl: also take what the KL divergence needs, which costs as much as everything else."""
        self.kl = kl
        self.golden, self.mine = loaders
        self.rows = RowReader(dumps[0], loaders[0]), RowReader(dumps[1], loaders[1])
        self.sides, self.indices = indices.sides, indices

    def measure(self, unit: Unit) -> MeasuredUnit:
        """A part for every tensor of mine in ``unit``, in order of steps. Raises DumpError."""
        found = MeasuredUnit.of(unit)
        usable = [g for g in unit.golden if g.merge is not None and self._fits(0, g)]
        with_rows = [g for g in usable if g.where is not None]
        wheres = tuple(g.where for g in with_rows if g.where is not None)
        problem = next((g.problem for g in unit.golden if g.problem), "")
        for group in sorted(unit.mine, key=lambda g: (g.moment[1] or 0, g.moment[0])):
            reading = Reading(group, unit, self.kl)
            part = reading.part
            if group.merge is None:
                part.skip = group.problem
            elif not usable:
                part.skip = problem or ROW_COUNT
            elif DTYPES[group.first.dtype].kind == "complex":
                part.skip = UNKNOWN_DTYPE
            elif group.where is None and group.moment[1] is not None and _SORTED.search(unit.key[0]):
                part.skip = BY_EXPERT
            elif group.where is not None and not self._fits(1, group):
                part.skip = ROW_COUNT
            else:
                try:
                    if group.where is None:
                        self._whole(reading, usable)
                    else:
                        self._rows(reading, with_rows, wheres)
                except Unread:
                    reading = reading.unread()
            found.add(reading.done(), reading.structure)
        self.golden.forget()
        self.mine.forget()
        return found

    def _fits(self, side: int, group: Group) -> bool:
        """The row map, made by another journal line, agrees with the tensor's own shape."""
        if group.where is None:
            return True
        rows = self.sides[side].rows.get(group.where)
        dim, shape = group.row_dim, group.merge.shape if group.merge else ()
        return rows is not None and 0 <= dim < len(shape) and shape[dim] == len(rows.keys)

    def _rows(self, reading: Reading, golden: list[Group], wheres: tuple[Space, ...]) -> None:
        group, part, unit = reading.group, reading.part, reading.unit
        assert group.where is not None
        if group.where not in self.indices.kept:
            part.skip = NO_ROWS_LEFT
            return
        met = self.indices.meet(group.where, wheres)
        if met is None:
            part.skip = NO_PARTNER
            return
        reading.meet([golden[i] for i in met.used])
        part.rows = met.rows
        first = reading.golden[0]
        cuts = find_cut(first, group)
        shapes = [_feature(g, c) for g, c in zip((first, group), cuts, strict=True)]
        part.feature = shapes[1]
        if prod(shapes[0]) != prod(shapes[1]):
            part.skip = OTHER_WIDTH
            return
        if is_choice(unit.key[1], unit.cls) and group.readable and DTYPES[group.first.dtype].kind == "int":
            chosen, at = self.rows[1].load(group, cuts[1], met.row)
            part.choices = widen(chosen.data[at], chosen.dtype).astype(np.int64)
        if met.aligned and self._same(reading, first, met.complete):
            return
        if not (group.readable and all(g.readable for g in reading.golden)):
            if met.both:
                self._statistics(reading, first)
            else:
                part.skip = NO_PAYLOAD
            return
        kept, number, row = met.row, met.number, met.other
        if integer_inputs.mixed(unit, first, group):
            used = zip(met.used, met.places, strict=True)
            blocks = [self.rows[0].load(golden[i], cuts[0], row[at]) for i, at in used]
            if integer_inputs.fractions([*blocks, self.rows[1].load(group, cuts[1], kept)]):
                part.skip = integer_inputs.OTHER_KIND
                return
        table: np.ndarray | None = None
        for i, places in zip(met.used, met.places, strict=True):
            size = max(row_bytes(golden[i]), row_bytes(group))
            for some in stretches(places, size):
                here = self.rows[0].load(golden[i], cuts[0], row[some])
                stretch = Stretch(*here, *self.rows[1].load(group, cuts[1], kept[some]))
                found = reading.table(stretch)
                if len(some) == len(kept):
                    table = found
                else:
                    table = np.zeros((len(kept), len(definition.ROW_FIELDS))) if table is None else table
                    table[some] = found
                reading.look(found, some, stretch)
                reading.add_columns(found, stretch)
                if (part.choices is not None or unit.takes) and found[:, definition.MAX_D].any():
                    margins = None
                    if unit.takes:
                        margins = choices.logits_alone(here, (stretch.mine, stretch.mine_rows), unit.takes)
                    elif unit.router is not None:
                        chosen_at = (golden[i], cuts[0], row[some]), (group, cuts[1], kept[some])
                        margins = choices.margins(self.rows, unit, chosen_at, self._fits, (self.golden, self.mine))
                    if margins is not None:
                        part.margins = np.full((len(kept), 3), np.nan) if part.margins is None else part.margins
                        part.margins[some] = margins
        part.table = table
        self._check_replicas(reading, [(golden[i], number == i) for i in met.used], row, kept, cuts)

    @staticmethod
    def _same(reading: Reading, golden: Group, all_rows: bool) -> bool:
        """Equal bits by their hashes. Not where a rank's copy differs or NaNs would have to be counted in some rows."""
        mine = reading.group
        prints = golden.fingerprint, mine.fingerprint
        if prints[0] is None or prints[0] != prints[1] or _odd_replicas(mine):
            return False
        if not all_rows and any(s is None or s.nan or s.inf for s in stats_of(mine)):
            return False
        reading.part.agree(golden, mine)
        return True

    def _statistics(self, reading: Reading, golden: Group) -> None:
        group, part, unit = reading.group, reading.part, reading.unit
        g = statistics_of(golden, self.golden)
        m = statistics_of(group, self.mine)
        if integer_inputs.mixed(unit, golden, group) and (integer_inputs.fractional(g) or integer_inputs.fractional(m)):
            part.skip = integer_inputs.OTHER_KIND
            return
        if g is not None and m is not None and common(g, m):
            part.stats = statistics_error(g, m)
            part.figures = figures(g), figures(m)
            return
        equal = checksums(golden, group)
        if equal is None:
            part.skip = NO_PAYLOAD
        else:
            part.stats, part.by = (0.0 if equal else float("inf"), 0.0), "checksums"

    def _whole(self, reading: Reading, golden: list[Group]) -> None:
        """A tensor without rows: against the golden's of a step with the same batch."""
        group, part, unit = reading.group, reading.part, reading.unit
        batch = self.indices.batches[1].get(group.moment)
        same = [g for g in golden if g.where is None and self.indices.batches[0].get(g.moment) == batch]
        if batch is None:  # no row maps at all: steps correspond by number
            same = [g for g in same if g.moment[1] == group.moment[1]]
        if not same:
            part.skip = OTHER_BATCH
            return
        if group.moment in self.indices.left_out:  # which part of it is of such rows, nobody knows
            part.skip = NO_ROWS_LEFT
            return
        partner = same[-1]
        assert partner.merge is not None
        assert group.merge is not None
        part.whole = True
        reading.meet([partner])
        part.feature = group.merge.shape
        if prod(partner.merge.shape) != prod(part.feature):
            part.skip = OTHER_WIDTH
        elif self._same(reading, partner, True):
            pass
        elif not (group.readable and partner.readable):
            self._statistics(reading, partner)
        else:
            g, m = self.golden.load(partner), self.mine.load(group)
            if integer_inputs.mixed(unit, partner, group) and integer_inputs.fractions(
                (b, np.arange(len(b.data))) for b in (g, m)
            ):
                part.skip = integer_inputs.OTHER_KIND
                return
            one = np.zeros(1, np.int64)
            flat = [RowBlock(b.data.reshape(1, -1), b.dtype, b.feature) for b in (g, m)]
            bits = flat[0].data[0], flat[0].dtype, flat[1].data[0], flat[1].dtype
            found, segment = wide.row(*bits, widen, elements=reading.sums())
            part.table, settled, part.replicas = settle((self.golden, self.mine), (partner, group), flat, found[None])
            stretch = Stretch(settled[0], one, settled[1], one)
            reading.add_softmax(stretch)
            reading.look(part.table, one, stretch, segment if settled is flat else None)

    def _check_replicas(
        self,
        reading: Reading,
        golden: list[tuple[Group, np.ndarray]],
        row: np.ndarray,
        kept: np.ndarray,
        cuts: tuple[Any, Any],
    ) -> None:
        """Where ranks that should hold the same do not, each row shows the worst of them."""
        part = reading.part
        assert part.table is not None
        for member in _odd_replicas(reading.group):
            block = self.mine.replica(reading.group, member)
            if block.data.shape[1] != part.width:
                continue
            for theirs, mask in golden:
                stretch = Stretch(self.golden.load(theirs, cuts[0]), row[mask], block, kept[mask])
                other = reading.table(stretch, again=True)
                places = np.flatnonzero(mask)
                worse = (other[:, definition.DD] > part.table[places, definition.DD]) | (
                    other[:, definition.MISMATCH] > part.table[places, definition.MISMATCH]
                )
                part.table[places[worse]] = other[worse]
            odd, first = reading.group.records[member].rank, reading.group.first.rank
            part.replicas = f"ranks differ (rank {odd} from rank {first})"


def _feature(group: Group, cut: tuple[int, int] | None) -> tuple[int, ...]:
    assert group.merge is not None
    shape = cut_shape(group.merge.shape, cut)
    dim = group.row_dim
    return shape[:dim] + shape[dim + 1 :]


def _odd_replicas(group: Group) -> list[int]:
    """Members that should equal the one used, and by their hashes do not."""
    if group.merge is None or group.merge.kind != "one":
        return []
    odd: dict[str, int] = {}
    for copies in group.merge.copies:
        first = group.records[copies[0]].hash
        for i in copies[1:]:
            digest = group.records[i].hash
            if digest is not None and first is not None and digest != first and group.records[i].payload is not None:
                odd.setdefault(digest, i)
    return list(odd.values())
