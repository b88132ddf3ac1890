"""Inputs that are integers on one side and fractions on the other.

The problem: what one engine hands to a model as pixels of 8 bits, another hands over normalised, and comparing both
condemns a model that is right. The idea: an input of another kind of number is left out, and counted. Whole numbers
that a tool wrote down as floating point (ids as float32) are no other kind. Not here: outputs, whose kind is the
model's own doing, and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vllm_accprobe.comparison.measure.read import RowBlock
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.schema import Stats

_MOST = 2.0**53
"""Beyond this, floating point has no room for every integer."""
OTHER_KIND = "inputs of another kind of number (integers against fractions)"


def mixed(unit: Unit, golden: Group, mine: Group) -> bool:
    """Whether this is an input of integers on one side and of floating point on the other."""
    kinds = {DTYPES[g.first.dtype].kind for g in (golden, mine)}
    return unit.key[1].startswith(("input", "inplace")) and "float" in kinds and len(kinds) > 1


def fractions(blocks: Iterable[tuple[RowBlock, np.ndarray]]) -> bool:
    """Whether a block of floating point holds, in its rows, numbers that no integer can be: not whole, or beyond all
    ids (what is added to scores where a mask of booleans forbids)."""
    for block, rows in blocks:
        if DTYPES[block.dtype].kind == "float":
            values = widen(block.data[rows], block.dtype, as_float=True)
            whole = (values == np.rint(values)) & (np.abs(values) <= _MOST)
            if not (whole | np.isnan(values)).all():
                return True
    return False


def fractional(stats: Stats | None) -> bool:
    """Whether statistics alone show numbers that are not whole."""
    return stats is not None and any(v is not None and v != round(v) for v in (stats.min, stats.max))
