"""One measured piece of a tensor pair: filled once by measuring, saved as it is, judged again from that.

The problem: what is measured, what a file keeps and what is judged must be the same values, or a comparison that is
judged again is another one. The idea: one type of plain values. It begins with what one tensor of mine says of itself,
learns which tensor of golden it met, and is filled by whoever measures; tensors themselves stay with the measurer.
Not here: measuring (activations.py, params.py), a tap's parts together (measured.py), the files (store/).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from vllm_accprobe.align.row_set import NO_ROWS, RowSet
from vllm_accprobe.comparison.plan.coverage import family
from vllm_accprobe.comparison.plan.joining import Group, Moment
from vllm_accprobe.dump.schema import Stats


@dataclass(slots=True)
class Part:
    """One tensor of mine against the golden's rows, or a parameter.

    golden, mine: names in their dumps; step, rank: mine's; feature: shape of one row (of all, where ``whole``).
    rows: those compared, in mine's order. table: row table float64 [rows, 11]
    (kernels.definition.ROW_FIELDS), None where ``identical`` or judged by ``stats``. stats: (lower bound of the
    relative L2 error, largest error of an extreme in units of the rms), from statistics alone. worst: (row, flat index,
    golden, mine) of the largest |d|. whole: a tensor without rows, measured as one. row_norm: rms norm of the golden's
    rows where nothing was read (identical). elements: kernels.definition.ELEMENT_FIELDS, sums over all elements for
    other tools' standards; None where values were not read. figures: golden's and mine's (max, min, mean, norm), where
    they decided. kl: KL divergence, None where not measured. choices: int64 [rows, k], the experts that mine chose, of
    a tensor that holds such; margins: float64 [rows, 3], how clearly either side chose (judge.routing.margins), None
    where the router's logits are not in both dumps or all choices are alike. nonfinite: count where identical;
    own_nonfinite: whether mine's tensor holds NaN or infinity, None where nobody counted; zero: all of it is 0.
    few: its differences are few different ones that come again and again, and so no independent roundings.
    same_bits: both were read, and their bits are equal. equal: of parameters, whether they are equal to the bit. by:
    what decided where that were not the values. skip: why nothing was compared.
    """

    golden: str
    mine: str
    step: int | None
    rank: int | None
    moment: Moment
    dtype_golden: str | None
    dtype_mine: str
    call: int
    feature: tuple[int, ...]
    family: str = "text"
    rows: RowSet = NO_ROWS
    table: np.ndarray | None = None
    identical: bool = False
    stats: tuple[float, float] | None = None
    worst: tuple[int, int, float, float] | None = None
    whole: bool = False
    row_norm: float = 0.0
    nonfinite: int = 0
    zero: bool = False
    equal: bool | None = None
    by: str = ""
    replicas: str = ""
    note: str = ""
    skip: str = ""
    elements: tuple[float, ...] | None = None
    kl: float | None = None
    choices: np.ndarray | None = None
    margins: np.ndarray | None = None
    own_nonfinite: bool | None = None
    figures: tuple[tuple[float | None, ...], ...] | None = None
    same_bits: bool = False
    few: bool = False

    @property
    def width(self) -> int:
        return prod(self.feature)

    @classmethod
    def of(cls, mine: Group, golden: Group | None = None, *, whole: bool = False, skip: str = "") -> Part:
        """What a tensor of mine says of itself, before anything is measured."""
        first, stats = mine.first, stats_of(mine)
        ranks = {r.rank for r in mine.records}
        counted = [s for s in stats if s is not None]
        part = cls(
            golden="",
            mine=first.name,
            step=first.step,
            rank=ranks.pop() if len(ranks) == 1 else None,
            moment=mine.moment,
            dtype_golden=None,
            dtype_mine=first.dtype,
            call=first.call,
            feature=(),
            family=family(mine.where[2] if mine.where else ""),
            whole=whole,
            zero=not any(s.l2 for s in counted),
            note=mine.merge.note if mine.merge else "",
            skip=skip,
            own_nonfinite=any(s.nan + s.inf for s in counted) if stats and len(counted) == len(stats) else None,
        )
        if golden is not None:
            part.meet(golden)
        return part

    def meet(self, golden: Group) -> None:
        """Learns which tensor of golden it is held against."""
        self.golden, self.dtype_golden = golden.first.name, golden.first.dtype

    def agree(self, golden: Group, mine: Group) -> None:
        """All numbers are equal, by their hashes: what was not read is told from statistics."""
        self.identical = True
        self.nonfinite = sum(s.nan + s.inf for s in stats_of(mine) if s is not None)
        first = golden.first
        if not self.whole and first.stats and first.stats.l2:
            self.row_norm = first.stats.l2 / max(first.shape[golden.row_dim], 1) ** 0.5


def stats_of(group: Group) -> list[Stats | None]:
    """As recorded, of the pieces that are used."""
    return [group.records[i].stats for i in group.merge.use] if group.merge else []
