"""One unit's numbers: for each tensor of mine, the row table against the golden's rows with the same keys.

The problem: the rows of one tensor of mine may lie in many tensors of the golden, and most tensors of two runs are
equal. The idea: an index (row_index.py) says where each row lies; equal hashes over equal rows end the matter without
reading; else the kernel gathers straight from the stored bits, a stretch of rows at a time (stream.py).
Not here: limits and words (judge/, engine.py), parameters (params.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import Space
from vllm_accprobe.comparison.measure import statistics
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.part import Part, stats_of
from vllm_accprobe.comparison.measure.read import UNREAD, Block, Loader, Unread, cut_shape, find_cut, same_bits
from vllm_accprobe.comparison.measure.replicas import settle
from vllm_accprobe.comparison.measure.stream import RowReader, row_bytes, stretches
from vllm_accprobe.comparison.plan import expert_choices as choices
from vllm_accprobe.comparison.plan import integer_inputs
from vllm_accprobe.comparison.plan.row_index import Indices
from vllm_accprobe.comparison.plan.units import SAMPLER, TOKEN, Group, Unit
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.judge.routing import is_choice, is_weight
from vllm_accprobe.kernels import definition, structure, wide
from vllm_accprobe.kernels import rows as kernel

NO_ROWS_LEFT = "only superseded rows or rows after a flipped token"
BY_EXPERT = "its rows are sorted by expert"
NO_PARTNER = "no row of it in golden"
NO_PAYLOAD = "statistics only, and other rows in the batch"
OTHER_BATCH = "tensor without rows in a step with another batch"
OTHER_WIDTH = "shapes differ"
ROW_COUNT = "its row count disagrees with the row map"
UNKNOWN_DTYPE = "complex numbers are not compared"


@dataclass
class _Reading:
    """One tensor of mine while it is measured: its part, and what grows with each stretch that is read. golden: the
    tensors that hold its rows. elements: float64 [10], definition.ELEMENT_FIELDS; softmax: definition.softmax_sums;
    structure: kernels.structure's sums over some of the rows; None where values were not read or do not differ."""

    group: Group
    part: Part
    golden: list[Group] = field(default_factory=list)
    elements: np.ndarray | None = None
    softmax: np.ndarray | None = None
    structure: np.ndarray | None = None

    def meet(self, golden: list[Group]) -> None:
        self.golden = golden
        self.part.meet(golden[0])

    def sums(self) -> np.ndarray:
        """``elements``, to be added to."""
        if self.elements is None:
            self.elements = np.zeros(len(definition.ELEMENT_FIELDS))
        return self.elements

    def done(self) -> Part:
        if self.elements is not None:
            self.part.elements = tuple(self.elements.tolist())
        if self.softmax is not None:
            self.part.kl = definition.kl_divergence(self.softmax)
        return self.part

    def unread(self) -> _Reading:
        """Nothing of a pair that was read in part."""
        bare = Part.of(self.group, *self.golden[:1], whole=self.part.whole, skip=UNREAD)
        bare.feature = self.part.feature
        return _Reading(self.group, bare)


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
            reading = _Reading(group, part := Part.of(group))
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
                        self._whole(reading, usable, unit)
                    else:
                        self._rows(reading, with_rows, wheres, unit)
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

    def _rows(self, reading: _Reading, golden: list[Group], wheres: tuple[Space, ...], unit: Unit) -> None:
        group, part = reading.group, reading.part
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
                self._statistics(reading, first, unit)
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
        part.same_bits = True
        for i, places in zip(met.used, met.places, strict=True):
            size = max(row_bytes(golden[i]), row_bytes(group))
            for some in stretches(places, size):
                g, g_rows = self.rows[0].load(golden[i], cuts[0], row[some])
                m, m_rows = self.rows[1].load(group, cuts[1], kept[some])
                found = self._table(g, g_rows, m, m_rows, unit, reading)
                if len(some) == len(kept):
                    table = found
                else:
                    table = np.zeros((len(kept), len(definition.ROW_FIELDS))) if table is None else table
                    table[some] = found
                part.same_bits = part.same_bits and _equal(found) and same_bits(g, g_rows, m, m_rows)
                self._structure(reading, found, g, g_rows, m, m_rows, unit)
                if part.choices is not None and unit.router is not None and found[:, definition.MAX_D].any():
                    chosen_at = (golden[i], cuts[0], row[some]), (group, cuts[1], kept[some])
                    margins = choices.margins(self.rows, unit.router, chosen_at, self._fits)
                    if margins is not None:
                        part.margins = np.full((len(kept), 3), np.nan) if part.margins is None else part.margins
                        part.margins[some] = margins
                self._locate(part, found, some, g, g_rows, m, m_rows)
        part.table = table
        self._check_replicas(reading, [(golden[i], number == i) for i in met.used], row, kept, cuts, unit)

    def _table(
        self, g: Block, g_rows: np.ndarray, m: Block, m_rows: np.ndarray, unit: Unit, reading: _Reading | None = None
    ) -> np.ndarray:
        """The row table; ``reading``: takes the sums over elements, where their order means something."""
        if is_choice(unit.key[1], unit.cls) or is_weight(unit.key[1], unit.cls):  # a set of experts has no order
            sides = (widen(g.data[g_rows], g.dtype), widen(m.data[m_rows], m.dtype))
            return definition.row_table(*(np.sort(s, axis=1) for s in sides))
        elements = None if reading is None else reading.sums()
        table = kernel.rows(g.data, g.dtype, g_rows, m.data, m.dtype, m_rows, widen, elements=elements)
        if reading is not None and self.kl:
            sums = definition.softmax_sums(widen(g.data[g_rows], g.dtype), widen(m.data[m_rows], m.dtype))
            known = reading.softmax
            reading.softmax = sums if known is None else definition.joined_softmax_sums(known, sums)
        if unit.key[:2] == (SAMPLER, TOKEN):  # -1: no token was sampled there
            table[(g.data[g_rows] < 0).any(1) | (m.data[m_rows] < 0).any(1)] = 0.0
        return table

    @staticmethod
    def _structure(
        reading: _Reading, table: np.ndarray, g: Block, g_rows: np.ndarray, m: Block, m_rows: np.ndarray, unit: Unit
    ) -> None:
        """Adds to the sums by which a fault is told from rounding (kernels/structure.py), where the order of the
        columns means something."""
        rows = np.flatnonzero(table[:, definition.DD])
        if not len(rows) or is_choice(unit.key[1], unit.cls) or is_weight(unit.key[1], unit.cls):
            return
        if all(DTYPES[b.dtype].kind == "float" for b in (g, m)):
            rows = rows[structure.chosen(len(rows), m.data.shape[1])]
            sums = kernel.structure_sums(g.data, g.dtype, g_rows[rows], m.data, m.dtype, m_rows[rows], widen)
            reading.structure = sums if reading.structure is None else reading.structure + sums

    @staticmethod
    def _locate(
        part: Part, table: np.ndarray, places: np.ndarray, g: Block, g_rows: np.ndarray, m: Block, m_rows: np.ndarray
    ) -> None:
        """Remembers the element with the largest error of the tensor so far."""
        if not len(table) or not table[:, definition.N].any():
            return
        r = int(table[:, definition.MAX_D].argmax())
        best = abs(part.worst[3] - part.worst[2]) if part.worst else -1.0
        if table[r, definition.MAX_D] > best:
            golden, mine = (widen(b.data[i[r]], b.dtype, as_float=True) for b, i in ((g, g_rows), (m, m_rows)))
            at, gv, mv = definition.locate(golden, mine)
            part.worst = (int(places[r]), at, gv, mv)

    @staticmethod
    def _same(reading: _Reading, golden: Group, all_rows: bool) -> bool:
        """Equal bits by their hashes. Not where a rank's copy differs or NaNs would have to be counted in some rows."""
        mine = reading.group
        prints = golden.fingerprint, mine.fingerprint
        if prints[0] is None or prints[0] != prints[1] or _odd_replicas(mine):
            return False
        if not all_rows and any(s is None or s.nan or s.inf for s in stats_of(mine)):
            return False
        reading.part.agree(golden, mine)
        return True

    def _statistics(self, reading: _Reading, golden: Group, unit: Unit) -> None:
        group, part = reading.group, reading.part
        g = statistics.statistics_of(golden, self.golden)
        m = statistics.statistics_of(group, self.mine)
        if integer_inputs.mixed(unit, golden, group) and (
            integer_inputs.fractional(g) or integer_inputs.fractional(m)
        ):
            part.skip = integer_inputs.OTHER_KIND
            return
        if g is not None and m is not None and statistics.common(g, m):
            part.stats = statistics.statistics_error(g, m)
            part.figures = statistics.figures(g), statistics.figures(m)
            return
        equal = statistics.checksums(golden, group)
        if equal is None:
            part.skip = NO_PAYLOAD
        else:
            part.stats, part.by = (0.0 if equal else float("inf"), 0.0), "checksums"

    def _whole(self, reading: _Reading, golden: list[Group], unit: Unit) -> None:
        """A tensor without rows: against the golden's of a step with the same batch."""
        group, part = reading.group, reading.part
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
            self._statistics(reading, partner, unit)
        else:
            g, m = self.golden.load(partner), self.mine.load(group)
            if integer_inputs.mixed(unit, partner, group) and integer_inputs.fractions(
                (b, np.arange(len(b.data))) for b in (g, m)
            ):
                part.skip = integer_inputs.OTHER_KIND
                return
            one = np.zeros(1, np.int64)
            flat = [Block(b.data.reshape(1, -1), b.dtype, b.feature) for b in (g, m)]
            part.table = wide.row(flat[0].data, g.dtype, flat[1].data, m.dtype, widen, elements=reading.sums())
            found = settle((self.golden, self.mine), (partner, group), flat, part.table)
            part.table, flat, part.replicas = found
            part.same_bits = _equal(part.table) and same_bits(flat[0], one, flat[1], one)
            if self.kl:
                reading.softmax = definition.softmax_sums(*(widen(b.data, b.dtype) for b in flat))
            self._locate(part, part.table, one, flat[0], one, flat[1], one)

    def _check_replicas(
        self,
        reading: _Reading,
        golden: list[tuple[Group, np.ndarray]],
        row: np.ndarray,
        kept: np.ndarray,
        cuts: tuple[Any, Any],
        unit: Unit,
    ) -> None:
        """Where ranks that should hold the same do not, each row shows the worst of them."""
        part = reading.part
        assert part.table is not None
        for member in _odd_replicas(reading.group):
            block = self.mine.replica(reading.group, member)
            if block.data.shape[1] != part.width:
                continue
            for theirs, mask in golden:
                other = self._table(self.golden.load(theirs, cuts[0]), row[mask], block, kept[mask], unit)
                places = np.flatnonzero(mask)
                worse = (other[:, definition.DD] > part.table[places, definition.DD]) | (
                    other[:, definition.MISMATCH] > part.table[places, definition.MISMATCH]
                )
                part.table[places[worse]] = other[worse]
            odd, first = reading.group.records[member].rank, reading.group.first.rank
            part.replicas = f"ranks differ (rank {odd} from rank {first})"


def _equal(table: np.ndarray) -> bool:
    """Whether all numbers of these rows are equal; only then their bits can be, and are worth a look."""
    return not (table[:, definition.MAX_D].any() or table[:, definition.MISMATCH].any())


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
