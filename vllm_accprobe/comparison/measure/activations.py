"""One unit's numbers: for each tensor of mine, the row table against the golden's rows with the same keys.

The problem: the rows of one tensor of mine may lie in many tensors of the golden, and most tensors of two runs are
equal. The idea: an index (row_index.py) says where each row lies; equal hashes over equal rows end the matter without
reading; else the rows that meet are read, a stretch at a time (stream.py).
Not here: what is taken of a stretch (reading.py), limits and words (judge/, engine.py), parameters (params.py).
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import Space
from vllm_accprobe.comparison.measure import statistics
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.part import stats_of
from vllm_accprobe.comparison.measure.read import Loader, RowBlock, Stretch, Unread, cut_shape, find_cut
from vllm_accprobe.comparison.measure.reading import Reading
from vllm_accprobe.comparison.measure.replicas import settle
from vllm_accprobe.comparison.measure.stream import RowReader, row_bytes, stretches
from vllm_accprobe.comparison.plan import expert_choices as choices
from vllm_accprobe.comparison.plan import integer_inputs
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.row_index import Indices
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.judge.routing import is_choice
from vllm_accprobe.kernels import definition, wide

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
        g = statistics.statistics_of(golden, self.golden)
        m = statistics.statistics_of(group, self.mine)
        if integer_inputs.mixed(unit, golden, group) and (integer_inputs.fractional(g) or integer_inputs.fractional(m)):
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
