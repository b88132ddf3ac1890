"""What the sums per column of one tensor say, worked out once however often it is asked for.

The problem: each layer's columns are held against those of every other layer, so that what follows from one tensor's
sums would be worked out as often as there are layers. The idea: `Columns` holds the sums and works each answer out when
it is first asked for.
Not here: the sums (kernels/structure.py), what is out of the ordinary (outliers.py).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from vllm_accprobe.judge import constants as c

TINY = 1e-300
"""Instead of 0 in a denominator."""


class Columns:
    """sums: kernels.structure's, float64 [6, width]."""

    def __init__(self, sums: np.ndarray):
        self.sums = sums

    @property
    def width(self) -> int:
        return self.sums.shape[1]

    @property
    def rows(self) -> float:
        """How many rows were summed up."""
        return float(self.sums[4].max())

    @cached_property
    def signs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `column_signs`."""
        return column_signs(self.sums)

    @cached_property
    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """See `column_offsets`."""
        return column_offsets(self.sums)

    @cached_property
    def usual_err(self) -> float:
        return float(np.median(self.signs[0]))

    @cached_property
    def worst_err(self) -> float:
        return float(self.signs[0].max())

    @cached_property
    def most_sure(self) -> float:
        """Of the slopes, in standard errors."""
        return float(np.abs(self.signs[2]).max())

    @cached_property
    def most_offset(self) -> float:
        return float(np.abs(self.offsets[0]).max())

    def uneven(self, unit: float) -> tuple[float, float]:
        """(worst column's error over the typical one's, largest slope in standard errors); not more than a fault would
        give that lies before. unit: one rounding."""
        worst = self.worst_err / max(self.usual_err, c.COLUMN_TYPICAL * unit)
        return min(worst, c.UNEVEN_MOST), min(self.most_sure, c.SURE_MOST)


def column_offsets(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From kernels.structure's sums: (mean error of each column relative to its size, as in `column_signs`; the same in
    standard errors of a mean of random signs)."""
    dd, gg, n, off = sums[0], sums[1], np.maximum(sums[4], 1.0), sums[5]
    size = np.sqrt(np.maximum(gg, max(c.COLUMN_SMALL * float(np.median(gg)), TINY)) / n)
    return off / n / size, np.where(dd > 0, off / np.sqrt(np.maximum(dd, TINY)), 0.0)


def column_signs(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From kernels.structure's sums: (error of each column relative to its size, or to half the typical column's where
    it is smaller; slope - 1; slope in standard errors)."""
    dd, gg, gd, square = sums[:4]
    floor = c.COLUMN_SMALL * float(np.median(gg))
    with np.errstate(divide="ignore", invalid="ignore"):
        err = np.sqrt(dd / np.maximum(gg, max(floor, TINY)))
        slope = gd / np.maximum(gg, max(floor, TINY))
        sure = gd / np.sqrt(np.maximum(square, TINY))
    return err, slope, np.where(gd == 0, 0.0, sure)
