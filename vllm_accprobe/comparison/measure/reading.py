"""One tensor of mine while it is read, stretch by stretch, until its part is full.

The problem: a tensor larger than memory is read a few megabytes at a time, and some of what is told of it are sums over
all of it, which mean nothing before the last stretch. The idea: a `Reading` holds the part and these sums; the kernel
gathers straight from the stored bits of each stretch; what was read in part is thrown away with it.
Not here: which rows meet and when nothing need be read (activations.py), the kernels (kernels/).
"""

from __future__ import annotations

import numpy as np

from vllm_accprobe.comparison.measure.part import Part
from vllm_accprobe.comparison.measure.read import UNREAD, Stretch
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.unit import SAMPLER, TOKEN, Unit
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.judge.routing import is_choice, is_weight
from vllm_accprobe.kernels import definition, structure, wide
from vllm_accprobe.kernels import rows as kernel


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
        found = wide.rows(*stretch.bits, widen, elements=None if again else self.sums())
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
    pairs = np.stack([golden[at], mine[at]], axis=1)
    return len(np.unique(pairs, axis=0)) < _NEW * len(at)


_MOST = 1 << 20
"""Elements of wide rows that are looked at, at most."""
