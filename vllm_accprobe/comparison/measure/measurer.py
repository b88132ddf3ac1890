"""From a unit of the plan to numbers: rows of mine against golden's rows, parameters, and many units by threads.

The problem: the rows of one tensor may lie in many tensors of golden, a tensor may be larger than memory, and most
pairs are equal. The idea: an index says where each row lies; equal hashes end the matter without reading, else rows
that meet are read in stretches (read.py), and a `Reading` adds up what is a sum over all of them. Where values were not
stored, statistics bound the error. A parameter must be equal to the bit, or after rounding the finer dtype to the
coarser; tables that each run computes for itself may differ by rounding. Batches of units go to threads with buffers of
their own, and results come back in the order of the plan. Not here: limits and words (judge/, verdict/), other
processes (comparison/distributed.py).
"""

from __future__ import annotations

import os
import queue
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import is_choice, is_weight
from vllm_accprobe.align.derived import round_to_bfloat16
from vllm_accprobe.align.ranks import ONE
from vllm_accprobe.align.tokens import Space
from vllm_accprobe.comparison.measure import read
from vllm_accprobe.comparison.measure.from_journal import ByLines, Decided, UnitGroups
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part
from vllm_accprobe.comparison.plan import relations
from vllm_accprobe.comparison.plan.groups import Groups
from vllm_accprobe.comparison.plan.make_plan import Indices, Meeting
from vllm_accprobe.comparison.plan.unit import SAMPLER, TOKEN, Group, Unit
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.judge.rounding_unit import unit as rounding_unit
from vllm_accprobe.kernels import definition, rows as kernel, structure
from vllm_accprobe.standards.limits import Standard


class Reading:
    """part: what is filled. golden: the tensors that hold its rows. elements: float64 [10], definition.ELEMENT_FIELDS;
    softmax: definition.softmax_sums; structure: kernels.structure's sums over some of the rows; None where values were
    not read or do not differ."""

    def __init__(self, group: Group, unit: Unit, kl: bool):
        """group: mine's. kl: see UnitMeasurer."""
        self.group, self.unit, self.kl = group, unit, kl
        self.part = Part.of(group)
        self.golden: list[Group] = []
        self.elements: np.ndarray | None = None
        self.softmax: np.ndarray | None = None
        self.structure: np.ndarray | None = None
        self._looked = False

    @property
    def _unordered(self) -> bool:
        """A set of experts has no order: neither its elements nor its columns mean anything one by one."""
        return is_choice(self.unit.key[1], self.unit.cls) or is_weight(self.unit.key[1], self.unit.cls)

    def meet(self, golden: list[Group]) -> None:
        self.golden = golden
        self.part.meet(golden[0])

    def sums(self) -> np.ndarray:
        if self.elements is None:
            self.elements = np.zeros(len(definition.ELEMENT_FIELDS))
        return self.elements

    def table(self, stretch: read.Stretch, *, again: bool = False) -> np.ndarray:
        """The row table of a stretch, and its share of the sums over elements. again: another copy of rows that were
        read; nothing is added."""
        if self._unordered:
            return definition.row_table(*(np.sort(s, axis=1) for s in stretch.numbers))
        found = kernel.wide_rows(*stretch.bits, widen, elements=None if again else self.sums())
        if not again:
            self.add_softmax(stretch)
        if self.unit.key[:2] == (SAMPLER, TOKEN):  # -1: no token was sampled there
            golden, _, golden_rows, mine, _, mine_rows = stretch.bits
            found[(golden[golden_rows] < 0).any(1) | (mine[mine_rows] < 0).any(1)] = 0.0
        return found

    def add_softmax(self, stretch: read.Stretch) -> None:
        if self.kl:
            sums = definition.softmax_sums(*stretch.numbers)
            self.softmax = sums if self.softmax is None else definition.joined_softmax_sums(self.softmax, sums)

    def add_columns(self, table: np.ndarray, stretch: read.Stretch) -> None:
        """The sums by which a fault is distinguished from rounding (kernels/structure.py). table: the stretch's."""
        rows = np.flatnonzero(table[:, definition.DD])
        if not len(rows) or self._unordered or not stretch.floats:
            return
        rows = rows[structure.chosen(len(rows), stretch.mine.data.shape[1])]
        self.part.few |= _few(stretch, rows)
        sums = kernel.structure_sums(*stretch.only(rows).bits, widen)
        self.structure = sums if self.structure is None else self.structure + sums

    def look(self, table: np.ndarray, places: np.ndarray, stretch: read.Stretch, segment: int | None = None) -> None:
        """Whether all bits are equal so far, and the element with the largest error. places: int64 [n], where the rows
        of ``table`` stand in the part. segment: of a single row, where kernel.row found the error."""
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
            part.worst = (int(places[r]), *kernel.locate(*sides, widen, segment))

    def done(self) -> Part:
        if self.elements is not None:
            self.part.elements = tuple(self.elements.tolist())
        if self.softmax is not None:
            self.part.kl = definition.kl_divergence(self.softmax)
        return self.part

    def unread(self) -> Reading:
        bare = Reading(self.group, self.unit, self.kl)
        bare.part = Part.of(self.group, *self.golden[:1], whole=self.part.whole, skip=read.UNREAD)
        bare.part.feature = self.part.feature
        return bare


_LOOKED, _NEW = 4096, 0.25
"""Chosen: elements that are examined, and the part of those that differ which differ in their own way. A bfloat16
tensor has some thousand different values, each with some differences (0.5 and more); pixels have 256 (0.2)."""


def _few(stretch: read.Stretch, rows: np.ndarray) -> bool:
    """Whether the same number differs in the same way again and again: pixels, a table. Some ``rows`` are examined."""
    width = stretch.mine.data.shape[1]
    some = rows[np.unique(np.linspace(0, len(rows) - 1, max(_LOOKED // max(width, 1), 8)).astype(np.int64))]
    golden, mine = (side.reshape(-1)[:_MOST_ELEMENTS] for side in stretch.only(some).numbers)
    at = np.flatnonzero(golden != mine)
    if len(at) < _LOOKED // 16:
        return False
    at = at[np.linspace(0, len(at) - 1, min(len(at), _LOOKED)).astype(np.int64)]
    pairs = np.stack([golden[at], mine[at]], axis=1) + 0.0  # -0 is 0
    words = pairs.view(np.uint64 if pairs.dtype == np.float32 else np.complex128)
    if (nan := np.isnan(pairs)).any():
        words = words[~nan.any(axis=1)]
    # Sorted as words, or as numbers: rows of two are sorted forty times more slowly, and np.unique takes three times.
    words = np.sort(words, axis=0)
    different = 1 + int(np.count_nonzero(words[1:] != words[:-1])) + int(nan.any())
    return different < _NEW * len(at)


_MOST_ELEMENTS = 1 << 20
"""Elements of wide rows that are examined, at most."""


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


CACHE = 256 << 20
"""Bytes of whole tensors that may be kept per side, by all threads or processes of a machine together."""


class UnitMeasurer:
    """Measures units of one plan, in one thread. Holds nothing between units but buffers and indices of row keys."""

    def __init__(self, dumps: tuple[Any, Any], indices: Indices, cache: int = CACHE, *, kl: bool = False):
        """cache: bytes of whole tensors that may be kept per side while a unit is measured. kl: also take what the KL
        divergence needs, which costs as much as everything else."""
        self.kl = kl
        self.golden, self.mine = read.Loader(dumps[0], cache), read.Loader(dumps[1], cache // 4)
        self.rows = read.RowReader(dumps[0], self.golden), read.RowReader(dumps[1], self.mine)
        self.sides, self.indices = indices.sides, indices
        self.by_lines = ByLines(indices, self._fitting)
        self._orders: dict[Any, np.ndarray | None] = {}
        self._lengths: dict[tuple[int, int], tuple[np.ndarray, Any]] = {}
        self._fitted: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

    def measure(self, units: Sequence[Unit]) -> list[MeasuredUnit]:
        """Of each of ``units`` a part for every tensor of mine, in order of steps. Raises DumpError."""
        groups = [self._groups(unit) for unit in units if not unit.is_param]
        found = zip(groups, self.by_lines.each(groups), strict=True)
        return [MeasuredUnit.of(unit, compare_params(unit, self.golden, self.mine, Standard())) if unit.is_param
                else self._measured(*next(found)) for unit in units]  # fmt: skip

    def _groups(self, unit: Unit) -> UnitGroups:
        goldens, mine = Groups.of(unit.golden), Groups.of(unit.mine)
        name = mine.moments[2:]
        if name not in self._orders:
            order = np.lexsort((mine.cell, np.maximum(mine.step, 0)))
            self._orders[name] = order if (order[1:] < order[:-1]).any() else None
        if (other := self._orders[name]) is not None:
            mine = mine.only(other)
        return UnitGroups(unit, goldens, mine, self._fitting(0, goldens)[1], not _SORTED.search(unit.key[0]))

    def _measured(self, groups: UnitGroups, decided: Decided) -> MeasuredUnit:
        unit, goldens, mine, can, _ = groups
        found, (at, parts) = MeasuredUnit.of(unit), decided
        chosen = is_choice(unit.key[1], unit.cls)  # its values are needed even where they are equal
        if len(parts) == len(mine) and not chosen:
            found.parts = parts
            return found
        known = dict(zip(at.tolist(), parts, strict=True))
        usable: list[Group] = [goldens[i] for i in can.tolist()]
        with_rows = [g for g in usable if g.where is not None]
        wheres = tuple(g.where for g in with_rows if g.where is not None)
        meet = self.indices.meetings(wheres)
        problem = next((g.problem for g in unit.golden if g.problem), "")
        unknown = any(DTYPES[g.first.dtype].kind == "complex" for g in usable)
        for i, group in enumerate(mine):
            integers = DTYPES[group.first.dtype].kind == "int"
            if i in known and not (chosen and integers and group.readable and group.where is not None):
                found.add(known[i])
                continue
            reading = Reading(group, unit, self.kl)
            part = reading.part
            if group.merge is None:
                part.skip = group.problem
            elif not usable:
                part.skip = problem or ROW_COUNT
            elif unknown or DTYPES[group.first.dtype].kind == "complex":
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
                        self._rows(reading, with_rows, meet, known.get(i))
                except read.Unread:
                    reading = reading.unread()
            found.add(reading.done(), reading.structure)
        self.golden.forget()
        self.mine.forget()
        return found

    def _fitting(self, side: int, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        """(bool [n]: which groups have a plan, and the row map, made by another journal line, agrees with their own
        shape; their indices)."""
        rows = tuple(
            -2 if p is None else -1 if not 0 <= dim < len(p.shape) else p.shape[dim] for p, _, dim in groups.forms
        )
        name = side, groups.moments, rows, groups.form.tobytes()
        if name not in self._fitted:
            spaces = side, id(groups.spaces)
            if spaces not in self._lengths:
                known = self.sides[side].rows
                lengths = [len(known[where].keys) if where in known else -3 for where in groups.spaces]
                self._lengths[spaces] = np.array([*lengths, -3]), groups.spaces
            row = np.array(rows, np.int64)[groups.form]
            fits = (row > -2) & ((groups.space < 0) | (self._lengths[spaces][0][groups.space] == row))
            self._fitted[name] = fits, np.flatnonzero(fits)
        return self._fitted[name]

    def _fits(self, side: int, group: Group) -> bool:
        if group.where is None:
            return True
        rows = self.sides[side].rows.get(group.where)
        dim, shape = group.row_dim, group.merge.shape if group.merge else ()
        return rows is not None and 0 <= dim < len(shape) and shape[dim] == len(rows.keys)

    def _rows(
        self, reading: Reading, golden: list[Group], meet: Callable[[Space], Meeting | None], decided: Part | None
    ) -> None:  # fmt: skip
        """decided: by lines, of choices."""
        group, part, unit = reading.group, reading.part, reading.unit
        assert group.where is not None
        if group.where not in self.indices.kept:
            part.skip = NO_ROWS_LEFT
            return
        met = meet(group.where)
        if met is None:
            part.skip = NO_PARTNER
            return
        reading.meet([golden[i] for i in met.used])
        part.rows = met.rows
        first = reading.golden[0]
        cuts = read.find_cut(first, group)
        shapes = [read.feature_of(g, c) for g, c in zip((first, group), cuts, strict=True)]
        part.feature = shapes[1]
        if prod(shapes[0]) != prod(shapes[1]):
            part.skip = OTHER_WIDTH
            return
        if is_choice(unit.key[1], unit.cls) and group.readable and DTYPES[group.first.dtype].kind == "int":
            chosen, at = self.rows[1].load(group, cuts[1], met.row)
            part.choices = widen(chosen.data[at], chosen.dtype).astype(np.int64)
            if decided is not None:
                reading.part = replace(decided, choices=part.choices)
                return
        if not (group.readable and all(g.readable for g in reading.golden)):
            if met.both:
                self._statistics(reading, first)
            else:
                part.skip = NO_PAYLOAD
            return
        kept, number, row = met.row, met.number, met.other
        if relations.mixed(unit, first, group):
            used = zip(met.used, met.places, strict=True)
            blocks = [self.rows[0].load(golden[i], cuts[0], row[at]) for i, at in used]
            if relations.fractions([*blocks, self.rows[1].load(group, cuts[1], kept)]):
                part.skip = relations.OTHER_KIND
                return
        table: np.ndarray | None = None
        for i, places in zip(met.used, met.places, strict=True):
            size = max(read.row_bytes(golden[i]), read.row_bytes(group))
            for some in read.stretches(places, size):
                here = self.rows[0].load(golden[i], cuts[0], row[some])
                stretch = read.Stretch(*here, *self.rows[1].load(group, cuts[1], kept[some]))
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
                        margins = relations.logits_alone(here, (stretch.mine, stretch.mine_rows), unit.takes)
                    elif unit.router is not None:
                        chosen_at = (golden[i], cuts[0], row[some]), (group, cuts[1], kept[some])
                        margins = relations.margins(self.rows, unit, chosen_at, self._fits, (self.golden, self.mine))
                    if margins is not None:
                        part.margins = np.full((len(kept), 3), np.nan) if part.margins is None else part.margins
                        part.margins[some] = margins
        part.table = table
        self._check_replicas(reading, [(golden[i], number == i) for i in met.used], row, kept, cuts)

    def _statistics(self, reading: Reading, golden: Group) -> None:
        group, part, unit = reading.group, reading.part, reading.unit
        g = read.statistics_of(golden, self.golden)
        m = read.statistics_of(group, self.mine)
        if relations.mixed(unit, golden, group) and (relations.fractional(g) or relations.fractional(m)):
            part.skip = relations.OTHER_KIND
            return
        if g is not None and m is not None and read.common(g, m):
            part.stats = read.statistics_error(g, m)
            part.figures = read.figures(g), read.figures(m)
            return
        equal = read.checksums(golden, group)
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
        if group.moment in self.indices.left_out:  # which part of it is of such rows, it is not known
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
        elif not (group.readable and partner.readable):
            self._statistics(reading, partner)
        else:
            g, m = self.golden.load(partner), self.mine.load(group)
            if relations.mixed(unit, partner, group) and relations.fractions(
                (b, np.arange(len(b.data))) for b in (g, m)
            ):
                part.skip = relations.OTHER_KIND
                return
            one = np.zeros(1, np.int64)
            flat = [read.RowBlock(b.data.reshape(1, -1), b.dtype, b.feature) for b in (g, m)]
            bits = flat[0].data[0], flat[0].dtype, flat[1].data[0], flat[1].dtype
            found, segment = kernel.row(*bits, widen, elements=reading.sums())
            part.table, settled, part.replicas = read.settle(
                (self.golden, self.mine), (partner, group), flat, found[None]
            )
            stretch = read.Stretch(settled[0], one, settled[1], one)
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
        for member in _unequal_replicas(reading.group):
            block = self.mine.replica(reading.group, member)
            if block.data.shape[1] != part.width:
                continue
            for theirs, mask in golden:
                stretch = read.Stretch(self.golden.load(theirs, cuts[0]), row[mask], block, kept[mask])
                other = reading.table(stretch, again=True)
                places = np.flatnonzero(mask)
                worse = (other[:, definition.DD] > part.table[places, definition.DD]) | (
                    other[:, definition.MISMATCH] > part.table[places, definition.MISMATCH]
                )
                part.table[places[worse]] = other[worse]
            unequal, first = reading.group.records[member].rank, reading.group.first.rank
            part.replicas = f"ranks differ (rank {unequal} from rank {first})"


def _unequal_replicas(group: Group) -> list[int]:
    """Members that should equal the one used, and by their hashes do not."""
    if group.merge is None or group.merge.kind != "one":
        return []
    unequal: dict[str, int] = {}
    for copies in group.merge.copies:
        first = group.records[copies[0]].hash
        for i in copies[1:]:
            digest = group.records[i].hash
            if digest is not None and first is not None and digest != first and group.records[i].payload is not None:
                unequal.setdefault(digest, i)
    return list(unequal.values())


BATCH = 8 << 20
"""Bytes of both sides that a thread is given at a time, or more where one unit has more."""
_MOST = 64


def unit_bytes(unit: Unit) -> int:
    """Bytes that the unit's tensors of mine have, and as much for the golden's."""
    return 2 * Groups.of(unit.mine).payload_bytes


def batches(units: Sequence[Unit], limit: int = BATCH) -> Iterator[list[Unit]]:
    """``units`` in order, in batches of at least ``limit`` bytes or 64 units."""
    batch: list[Unit] = []
    size = 0
    for unit in units:
        batch.append(unit)
        size += unit_bytes(unit)
        if size >= limit or len(batch) >= _MOST:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def measure_all(
    dumps: tuple[Any, Any], indices: Indices, units: Sequence[Unit], threads: int | None = None, *, kl: bool = False
) -> Iterator[list[MeasuredUnit]]:
    """The results of ``units``, in order, batch by batch. threads: as many as there are processors, at most 16."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    n = min(threads or (len(affinity(0)) if affinity else os.cpu_count() or 1), 16)
    free: queue.SimpleQueue[UnitMeasurer] = queue.SimpleQueue()
    for _ in range(n):
        free.put(UnitMeasurer(dumps, indices, CACHE // n, kl=kl))

    def work(batch: list[Unit]) -> list[MeasuredUnit]:
        worker = free.get()
        try:
            return worker.measure(batch)
        finally:
            free.put(worker)

    yield from _in_order(work, batches(units), n)


def _in_order(work: Any, tasks: Iterable[Any], threads: int) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    pool = ThreadPoolExecutor(threads, "accprobe")
    try:
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


PACKED = "packed or quantised parameters of different dtypes"
ELSEWHERE_CUT = "fingerprints of parameters that are cut differently over ranks"
_COMPUTED = re.compile(r"cos_sin_cache|inv_freq|cos_cached|sin_cached|sinusoid|position_ids|attn_bias_cache")


def is_computed(role: str) -> bool:
    """Whether a buffer is computed by each run for itself rather than loaded."""
    return bool(_COMPUTED.search(role))


def compare_params(unit: Unit, golden: read.Loader, mine: read.Loader, standard: Standard) -> list[Part]:
    """Compares a parameter: one group on either side, or, where ranks are compared one by one, one for each rank."""
    found = []
    for m in unit.mine if len(unit.golden) > 1 else unit.mine[-1:]:
        g = next((g for g in unit.golden if g.moment == m.moment), unit.golden[-1])
        try:
            found.append(_compare(Part.of(m, g, whole=True), g, m, golden, mine, standard))
        except read.Unread:
            found.append(Part.of(m, g, whole=True, skip=read.UNREAD))
        finally:
            golden.forget()
            mine.forget()
    return found


def _compare(part: Part, g: Group, m: Group, golden: read.Loader, mine: read.Loader, standard: Standard) -> Part:
    if g.merge is None or m.merge is None:
        return _skipped(part, m.problem or g.problem)
    if "complex" in DTYPES[g.first.dtype].kind + DTYPES[m.first.dtype].kind:
        return _skipped(part, UNKNOWN_DTYPE)
    cuts = read.find_cut(g, m)
    shapes = read.cut_shape(g.merge.shape, cuts[0]), read.cut_shape(m.merge.shape, cuts[1])
    part.feature = shapes[1]
    if shapes[0] != shapes[1]:
        return _skipped(part, f"parameters: {OTHER_WIDTH}")
    if g.fingerprint is not None and g.fingerprint == m.fingerprint:
        part.agree(m)
        return _decided(part, True, "hash")
    floats = [DTYPES[x.first.dtype].kind == "float" for x in (g, m)]
    if g.first.dtype != m.first.dtype and not all(floats):
        return _skipped(part, PACKED)
    if not (g.readable and m.readable):
        return _by_sample(part, g, m, standard)
    a, b = golden.load(g, cuts[0]), mine.load(m, cuts[1])
    data = _common(a.data, a.dtype, b.data, b.dtype)
    at = np.arange(len(b.data))
    elements = np.zeros(len(definition.ELEMENT_FIELDS))
    part.table = kernel.rows(data[0], data[2], at, data[1], data[2], at, widen, elements=elements)
    part.elements = tuple(elements.tolist())
    differ = (part.table[:, definition.MAX_D] > 0) | (part.table[:, definition.MISMATCH] > 0)
    if differ.any() and {a.dtype, b.dtype} == {"float16", "bfloat16"} and _one_number(a, b):
        return _decided(part, True, "values, as far as both dtypes hold them")
    if differ.any():
        r = int(part.table[:, definition.MAX_D].argmax())
        part.worst = (r, *kernel.locate(data[0][r], data[2], data[1][r], data[2], widen))
    part.same_bits = not differ.any() and read.Stretch(a, at, b, at).same_bits()
    return _decided(part, not differ.any(), "values")


def _skipped(part: Part, why: str) -> Part:
    part.skip = why
    return part


def _decided(part: Part, equal: bool, by: str) -> Part:
    part.equal, part.by = equal, by
    return part


def _one_number(a: read.RowBlock, b: read.RowBlock) -> bool:
    """Whether each element of both can be the same number rounded to float16 and to bfloat16. Neither dtype holds all
    values of the other: float16 loses the last bits of what is small (below 2**-14), bfloat16 those of everything."""
    step = max((1 << 22) // max(a.data.shape[1], 1), 1)
    for start in range(0, len(a.data), step):
        x, y = (widen(s.data[start : start + step], s.dtype).astype(np.float64) for s in (a, b))
        half = np.abs(x if a.dtype == "float16" else y)
        brain = np.abs(y if a.dtype == "float16" else x)
        allowed = np.maximum(half * 2.0**-11, 2.0**-25) + brain * 2.0**-8
        with np.errstate(invalid="ignore"):
            good = (np.abs(x - y) <= allowed) | (x == y) | (np.isnan(x) & np.isnan(y))
        if not good.all():
            return False
    return True


def _same_rounded(x: Record, y: Record) -> bool | None:
    """Whether the one weight, rounded to the dtype of the other, has its hash; None where no pack says that."""
    for fine, coarse in ((x, y), (y, x)):
        known = coarse.hash or coarse.sample
        if known and ":" not in known and f"{coarse.dtype}:" in (fine.rounded or ""):
            return f"{coarse.dtype}:{known}" in str(fine.rounded).split()
    return None


def _by_sample(part: Part, g: Group, m: Group, standard: Standard) -> Part:
    assert g.merge is not None
    assert m.merge is not None
    if (g.merge.kind, g.merge.pieces, len(g.merge.use)) != (m.merge.kind, m.merge.pieces, len(m.merge.use)):
        return _skipped(part, ELSEWHERE_CUT)
    pairs = list(zip((g.records[i] for i in g.merge.use), (m.records[i] for i in m.merge.use), strict=True))
    if g.first.dtype == m.first.dtype and all(x.sample and y.sample for x, y in pairs):
        equal = all(x.sample == y.sample for x, y in pairs)
        part.stats = (0.0 if equal else float("inf"), 0.0)
        return _decided(part, equal, "hash of a sample")
    rounded = [_same_rounded(x, y) for x, y in pairs]
    if None not in rounded and not is_computed(m.first.role):
        part.stats = (0.0 if all(rounded) else float("inf"), 0.0)
        return _decided(part, all(rounded), "hash in 16 bits")
    if all(x.stats and y.stats for x, y in pairs):
        errors = [read.statistics_error(x.stats, y.stats) for x, y in pairs if x.stats and y.stats]
        part.stats = max(e[0] for e in errors), max(e[1] for e in errors)
        if len(pairs) == 1 and pairs[0][0].stats and pairs[0][1].stats:
            part.figures = read.figures(pairs[0][0].stats), read.figures(pairs[0][1].stats)
        allowed = max(rounding_unit(g.first.dtype), rounding_unit(m.first.dtype))
        if read.checksums(g, m) is False:
            return _decided(part, False, "checksums")
        known = [read.same_weights(x, y, allowed) for x, y in pairs]
        if None not in known:
            return _decided(part, all(known), "statistics")
        error = max(part.stats[0], part.stats[1] / standard.element)
        return _decided(part, error <= allowed, "statistics")
    same = read.checksums(g, m)
    if same is not None:
        part.stats = 0.0 if same else float("inf"), 0.0
        return _decided(part, same, "checksums")
    return _skipped(part, "parameters without payload, sample or statistics" if g.merge.kind == ONE else ELSEWHERE_CUT)


def _common(a: np.ndarray, a_dtype: str, b: np.ndarray, b_dtype: str) -> tuple[np.ndarray, np.ndarray, str]:
    if a_dtype == b_dtype:
        return a, b, a_dtype
    target = max((a_dtype, b_dtype), key=lambda d: DTYPES[d].eps)
    return _rounded(a, a_dtype, target), _rounded(b, b_dtype, target), target


def _rounded(bits: np.ndarray, dtype: str, target: str) -> np.ndarray:
    if dtype == target:
        return bits
    values = widen(bits, dtype)
    if target == "bfloat16":
        return round_to_bfloat16(values.astype(np.float32))
    if target in ("float16", "float32", "float64"):
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[target].storage)
    # An 8-bit target: the nearest representable value is found by exact comparison of all 256.
    table = widen(np.arange(256, dtype=np.uint8), target).astype(np.float64)
    finite = np.flatnonzero(np.isfinite(table))
    order = finite[np.argsort(table[finite], kind="stable")]
    steps = table[order]
    at = np.clip(np.searchsorted(steps, values), 1, len(steps) - 1)
    nearer = np.where(values - steps[at - 1] <= steps[at] - values, at - 1, at)
    return order[nearer].astype(np.uint8)
