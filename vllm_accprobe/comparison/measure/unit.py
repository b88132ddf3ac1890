"""One unit's numbers: for each tensor of mine, the row table against the golden's rows with the same keys.

The problem: the rows of one tensor of mine may lie in many tensors of the golden, and most tensors of two runs are
equal. The idea: an index (row_index.py) says where each row lies; equal hashes over equal rows end the matter without
reading; else the kernel gathers straight from the stored bits, a stretch of rows at a time (stream.py).
Not here: limits and words (judge/, engine.py), parameters (params.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import Space
from vllm_accprobe.comparison.measure import statistics
from vllm_accprobe.comparison.measure.read import UNREAD, Block, Loader, Unread, cut_shape, find_cut, same_bits
from vllm_accprobe.comparison.measure.replicas import settle
from vllm_accprobe.comparison.measure.stream import RowReader, row_bytes, stretches
from vllm_accprobe.comparison.plan import expert_choices as choices
from vllm_accprobe.comparison.plan import integer_inputs
from vllm_accprobe.comparison.plan.row_index import Indices
from vllm_accprobe.comparison.plan.units import SAMPLER, TOKEN, Group, Unit
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.judge.routing import is_choice, is_weight
from vllm_accprobe.kernels import definition, structure, wide
from vllm_accprobe.kernels import rows as kernel

NO_ROWS_LEFT = "only superseded rows or rows after a flipped token"
BY_EXPERT = "its rows are sorted by expert"
NO_PARTNER = "no row of it in golden"
NO_PAYLOAD = "statistics only, and other rows in the batch"
OTHER_BATCH = "tensor without rows in a step with another batch"
OTHER_WIDTH = "shapes differ"
COLUMN_ROWS = 64
"""Rows that a tensor's column sums are taken over: those that are furthest apart. More would cost a third of the speed
and say the same."""
ROW_COUNT = "its row count disagrees with the row map"
UNKNOWN_DTYPE = "complex numbers are not compared"
_EMPTY = np.zeros(0, np.int64)
_TINY = float(np.finfo(np.float64).tiny)


@dataclass
class Piece:
    """One tensor of mine. keys: of the rows compared, in mine's order; table: their row table, None where ``identical``
    or judged by ``stat_error`` (see statistics_error); columns: float64 [2, width], sums of d*d and of g*g in each
    column (positions finite on both sides) over the rows that are furthest apart, at most COLUMN_ROWS of each
    stretch that is read at once; None where values were not read or do not differ; elements: float64 [10],
    oracle.ELEMENT_FIELDS, None where values were not read; skip: why nothing was compared."""

    group: Group
    golden: list[Group] = field(default_factory=list)
    keys: np.ndarray = field(default_factory=lambda: _EMPTY)
    decode: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    table: np.ndarray | None = None
    columns: np.ndarray | None = None
    elements: np.ndarray | None = None
    softmax: np.ndarray | None = None  # oracle.softmax_sums
    choices: np.ndarray | None = None  # int64 [rows, k]: what mine chose, of a tensor of chosen experts
    margins: np.ndarray | None = None  # float64 [rows, 3], judge.routing.margins, of the same
    structure: np.ndarray | None = None  # kernels.structure's sums over some of the rows
    identical: bool = False
    stat_error: tuple[float, float] | None = None
    figures: tuple[statistics.Figures, statistics.Figures] | None = None  # golden's and mine's, where they decided
    by: str = ""  # what decided where values could not
    skip: str = ""
    feature: tuple[int, ...] = ()
    worst: tuple[int, int, float, float] | None = None  # row, flat index in the row, golden, mine
    replicas: str = ""
    whole: bool = False  # without rows
    same_bits: bool = False  # both were read, and their bits are equal

    @property
    def rows(self) -> int:
        return 1 if self.whole else len(self.keys)

    @property
    def width(self) -> int:
        return prod(self.feature)


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

    def measure(self, unit: Unit) -> Iterator[Piece]:
        """A piece for every tensor of mine in ``unit``, in order of steps."""
        usable = [g for g in unit.golden if g.merge is not None and self._fits(0, g)]
        with_rows = [g for g in usable if g.where is not None]
        wheres = tuple(g.where for g in with_rows if g.where is not None)
        problem = next((g.problem for g in unit.golden if g.problem), "")
        for group in sorted(unit.mine, key=lambda g: (g.moment[1] or 0, g.moment[0])):
            piece = Piece(group, feature=())
            if group.merge is None:
                piece.skip = group.problem
            elif not usable:
                piece.skip = problem or ROW_COUNT
            elif DTYPES[group.first.dtype].kind == "complex":
                piece.skip = UNKNOWN_DTYPE
            elif group.where is None and group.moment[1] is not None and _SORTED.search(unit.key[0]):
                piece.skip = BY_EXPERT
            elif group.where is not None and not self._fits(1, group):
                piece.skip = ROW_COUNT
            else:
                try:
                    if group.where is None:
                        self._whole(piece, usable, unit)
                    else:
                        self._rows(piece, with_rows, wheres, unit)
                except Unread:  # nothing of a pair that was read in part
                    piece = Piece(group, piece.golden, feature=piece.feature, whole=piece.whole, skip=UNREAD)
            yield piece
        self.golden.forget()
        self.mine.forget()

    def _fits(self, side: int, group: Group) -> bool:
        """The row map, made by another journal line, agrees with the tensor's own shape."""
        if group.where is None:
            return True
        rows = self.sides[side].rows.get(group.where)
        dim, shape = group.row_dim, group.merge.shape if group.merge else ()
        return rows is not None and 0 <= dim < len(shape) and shape[dim] == len(rows.keys)

    def _rows(self, piece: Piece, golden: list[Group], wheres: tuple[Space, ...], unit: Unit) -> None:
        assert piece.group.where is not None
        if piece.group.where not in self.indices.kept:
            piece.skip = NO_ROWS_LEFT
            return
        met = self.indices.meet(piece.group.where, wheres)
        if met is None:
            piece.skip = NO_PARTNER
            return
        piece.golden = [golden[i] for i in met.used]
        piece.keys, piece.decode = met.keys, met.decode
        first = piece.golden[0]
        cuts = find_cut(first, piece.group)
        shapes = [_feature(g, c) for g, c in zip((first, piece.group), cuts, strict=True)]
        piece.feature = shapes[1]
        if prod(shapes[0]) != prod(shapes[1]):
            piece.skip = OTHER_WIDTH
            return
        if is_choice(unit.key[1], unit.cls) and piece.group.readable and DTYPES[piece.group.first.dtype].kind == "int":
            chosen, at = self.rows[1].load(piece.group, cuts[1], met.row)
            piece.choices = widen(chosen.data[at], chosen.dtype).astype(np.int64)
        if met.aligned and self._same(piece, first, met.complete):
            return
        if not (piece.group.readable and all(g.readable for g in piece.golden)):
            if met.both:
                self._statistics(piece, first, unit)
            else:
                piece.skip = NO_PAYLOAD
            return
        kept, number, row = met.row, met.number, met.other
        if integer_inputs.mixed(unit, first, piece.group):
            used = zip(met.used, met.places, strict=True)
            blocks = [self.rows[0].load(golden[i], cuts[0], row[at]) for i, at in used]
            if integer_inputs.fractions([*blocks, self.rows[1].load(piece.group, cuts[1], kept)]):
                piece.skip = integer_inputs.OTHER_KIND
                return
        table: np.ndarray | None = None
        piece.same_bits = True
        for i, places in zip(met.used, met.places, strict=True):
            size = max(row_bytes(golden[i]), row_bytes(piece.group))
            for part in stretches(places, size):
                g, g_rows = self.rows[0].load(golden[i], cuts[0], row[part])
                m, m_rows = self.rows[1].load(piece.group, cuts[1], kept[part])
                found = self._table(g, g_rows, m, m_rows, unit, piece)
                if len(part) == len(kept):
                    table = found
                else:
                    table = np.zeros((len(kept), len(definition.ROW_FIELDS))) if table is None else table
                    table[part] = found
                piece.same_bits = piece.same_bits and _equal(found) and same_bits(g, g_rows, m, m_rows)
                self._columns(piece, found, g, g_rows, m, m_rows, unit)
                if piece.choices is not None and unit.router is not None and found[:, definition.MAX_D].any():
                    chosen_at = (golden[i], cuts[0], row[part]), (piece.group, cuts[1], kept[part])
                    margins = choices.margins(self.rows, unit.router, chosen_at, self._fits)
                    if margins is not None:
                        piece.margins = np.full((len(kept), 3), np.nan) if piece.margins is None else piece.margins
                        piece.margins[part] = margins
                self._locate(piece, found, part, g, g_rows, m, m_rows)
        piece.table = table
        self._check_replicas(piece, [(golden[i], number == i) for i in met.used], row, kept, cuts, unit)

    def _table(
        self, g: Block, g_rows: np.ndarray, m: Block, m_rows: np.ndarray, unit: Unit, piece: Piece | None = None
    ) -> np.ndarray:
        """The row table; ``piece``: takes the sums over elements, where their order means something."""
        if is_choice(unit.key[1], unit.cls) or is_weight(unit.key[1], unit.cls):  # a set of experts has no order
            sides = (widen(g.data[g_rows], g.dtype), widen(m.data[m_rows], m.dtype))
            return definition.row_table(*(np.sort(s, axis=1) for s in sides))
        elements = None if piece is None else _elements(piece)
        table = kernel.rows(g.data, g.dtype, g_rows, m.data, m.dtype, m_rows, widen, elements=elements)
        if piece is not None and self.kl:
            sums = definition.softmax_sums(widen(g.data[g_rows], g.dtype), widen(m.data[m_rows], m.dtype))
            piece.softmax = sums if piece.softmax is None else definition.joined_softmax_sums(piece.softmax, sums)
        if unit.key[:2] == (SAMPLER, TOKEN):  # -1: no token was sampled there
            table[(g.data[g_rows] < 0).any(1) | (m.data[m_rows] < 0).any(1)] = 0.0
        return table

    @staticmethod
    def _columns(
        piece: Piece, table: np.ndarray, g: Block, g_rows: np.ndarray, m: Block, m_rows: np.ndarray, unit: Unit
    ) -> None:
        """Adds to the piece's column sums, where the order of the columns means something."""
        rows = np.flatnonzero(table[:, definition.DD])
        if not len(rows) or is_choice(unit.key[1], unit.cls) or is_weight(unit.key[1], unit.cls):
            return
        if all(DTYPES[b.dtype].kind == "float" for b in (g, m)):
            Measurer._structure(piece, rows, g, g_rows, m, m_rows)
        if len(rows) > COLUMN_ROWS:
            far = table[rows, definition.DD] / np.maximum(table[rows, definition.GG], _TINY)
            rows = np.sort(rows[np.argpartition(far, -COLUMN_ROWS)[-COLUMN_ROWS:]])
        if piece.columns is None:
            piece.columns = np.zeros((2, m.data.shape[1]))
        kernel.add_columns(g.data, g.dtype, g_rows[rows], m.data, m.dtype, m_rows[rows], widen, piece.columns)

    @staticmethod
    def _structure(piece: Piece, rows: np.ndarray, g: Block, g_rows: np.ndarray, m: Block, m_rows: np.ndarray) -> None:
        """Adds to the piece's sums by which a fault is told from rounding (kernels/structure.py)."""
        rows = rows[structure.chosen(len(rows), m.data.shape[1])]
        sums = kernel.structure_sums(g.data, g.dtype, g_rows[rows], m.data, m.dtype, m_rows[rows], widen)
        piece.structure = sums if piece.structure is None else piece.structure + sums

    @staticmethod
    def _locate(
        piece: Piece, table: np.ndarray, places: np.ndarray, g: Block, g_rows: np.ndarray, m: Block, m_rows: np.ndarray
    ) -> None:
        """Remembers the element with the largest error of the tensor so far."""
        if not len(table) or not table[:, definition.N].any():
            return
        r = int(table[:, definition.MAX_D].argmax())
        best = abs(piece.worst[3] - piece.worst[2]) if piece.worst else -1.0
        if table[r, definition.MAX_D] > best:
            golden, mine = (widen(b.data[i[r]], b.dtype, as_float=True) for b, i in ((g, g_rows), (m, m_rows)))
            at, gv, mv = definition.locate(golden, mine)
            piece.worst = (int(places[r]), at, gv, mv)

    def _same(self, piece: Piece, golden: Group, all_rows: bool) -> bool:
        """Equal bits by their hashes. Not where a rank's copy differs or NaNs would have to be counted in some rows."""
        mine = piece.group
        prints = golden.fingerprint, mine.fingerprint
        if prints[0] is None or prints[0] != prints[1] or _odd_replicas(mine):
            return False
        if not all_rows and any(s is None or s.nan or s.inf for s in _stats(mine)):
            return False
        piece.identical = True
        return True

    def _statistics(self, piece: Piece, golden: Group, unit: Unit) -> None:
        g = statistics.statistics_of(golden, self.golden)
        m = statistics.statistics_of(piece.group, self.mine)
        if integer_inputs.mixed(unit, golden, piece.group) and (
            integer_inputs.fractional(g) or integer_inputs.fractional(m)
        ):
            piece.skip = integer_inputs.OTHER_KIND
            return
        if g is not None and m is not None and statistics.common(g, m):
            piece.stat_error = statistics.statistics_error(g, m)
            piece.figures = statistics.figures(g), statistics.figures(m)
            return
        equal = statistics.checksums(golden, piece.group)
        if equal is None:
            piece.skip = NO_PAYLOAD
        else:
            piece.stat_error, piece.by = (0.0 if equal else float("inf"), 0.0), "checksums"

    def _whole(self, piece: Piece, golden: list[Group], unit: Unit) -> None:
        """A tensor without rows: against the golden's of a step with the same batch."""
        batch = self.indices.batches[1].get(piece.group.moment)
        same = [g for g in golden if g.where is None and self.indices.batches[0].get(g.moment) == batch]
        if batch is None:  # no row maps at all: steps correspond by number
            same = [g for g in same if g.moment[1] == piece.group.moment[1]]
        if not same:
            piece.skip = OTHER_BATCH
            return
        if piece.group.moment in self.indices.left_out:  # which part of it is of such rows, nobody knows
            piece.skip = NO_ROWS_LEFT
            return
        partner = same[-1]
        assert partner.merge is not None
        assert piece.group.merge is not None
        piece.whole = True
        piece.golden = [partner]
        piece.feature = piece.group.merge.shape
        if prod(partner.merge.shape) != prod(piece.feature):
            piece.skip = OTHER_WIDTH
        elif self._same(piece, partner, True):
            pass
        elif not (piece.group.readable and partner.readable):
            self._statistics(piece, partner, unit)
        else:
            g, m = self.golden.load(partner), self.mine.load(piece.group)
            if integer_inputs.mixed(unit, partner, piece.group) and integer_inputs.fractions(
                (b, np.arange(len(b.data))) for b in (g, m)
            ):
                piece.skip = integer_inputs.OTHER_KIND
                return
            one = np.zeros(1, np.int64)
            flat = [Block(b.data.reshape(1, -1), b.dtype, b.feature) for b in (g, m)]
            piece.table = wide.row(flat[0].data, g.dtype, flat[1].data, m.dtype, widen, elements=_elements(piece))
            found = settle((self.golden, self.mine), (partner, piece.group), flat, piece.table)
            piece.table, flat, piece.replicas = found
            piece.same_bits = _equal(piece.table) and same_bits(flat[0], one, flat[1], one)
            if self.kl:
                piece.softmax = definition.softmax_sums(*(widen(b.data, b.dtype) for b in flat))
            self._locate(piece, piece.table, one, flat[0], one, flat[1], one)

    def _check_replicas(
        self,
        piece: Piece,
        golden: list[tuple[Group, np.ndarray]],
        row: np.ndarray,
        kept: np.ndarray,
        cuts: tuple[Any, Any],
        unit: Unit,
    ) -> None:
        """Where ranks that should hold the same do not, each row shows the worst of them."""
        assert piece.table is not None
        for member in _odd_replicas(piece.group):
            block = self.mine.replica(piece.group, member)
            if block.data.shape[1] != piece.width:
                continue
            for group, mask in golden:
                other = self._table(self.golden.load(group, cuts[0]), row[mask], block, kept[mask], unit)
                places = np.flatnonzero(mask)
                worse = (other[:, definition.DD] > piece.table[places, definition.DD]) | (
                    other[:, definition.MISMATCH] > piece.table[places, definition.MISMATCH]
                )
                piece.table[places[worse]] = other[worse]
            odd, first = piece.group.records[member].rank, piece.group.first.rank
            piece.replicas = f"ranks differ (rank {odd} from rank {first})"


def _equal(table: np.ndarray) -> bool:
    """Whether all numbers of these rows are equal; only then their bits can be, and are worth a look."""
    return not (table[:, definition.MAX_D].any() or table[:, definition.MISMATCH].any())


def _elements(piece: Piece) -> np.ndarray:
    if piece.elements is None:
        piece.elements = np.zeros(len(definition.ELEMENT_FIELDS))
    return piece.elements


def _feature(group: Group, cut: tuple[int, int] | None) -> tuple[int, ...]:
    assert group.merge is not None
    shape = cut_shape(group.merge.shape, cut)
    dim = group.row_dim
    return shape[:dim] + shape[dim + 1 :]


def _stats(group: Group) -> list[Stats | None]:
    return [group.records[i].stats for i in group.merge.use] if group.merge else []


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
