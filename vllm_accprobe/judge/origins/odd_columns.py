"""Columns that err out of the ordinary: the question of outliers.py that is asked of each column.

The problem: one column of a thousand adds nothing to a row's error, and yet it is one wrong weight. The idea: a column
is held against the tensor's other columns in three ways, its error, its slope over the golden and its mean offset; each
counts only where it is more than chance leaves among so many columns, and more than the same operator's columns in
other layers and the inputs' columns show, because honest columns are uneven, too.
Not here: the sums and what follows from them alone (columns.py), errors of rows (outliers.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.chance import Chance, deviation
from vllm_accprobe.judge.origins.columns import TINY, Columns
from vllm_accprobe.judge.origins.peer_evidence import COLUMNS, Hidden, Look
from vllm_accprobe.judge.tiers import UNLIKE_KIN


def odd_columns(look: Look, others: Sequence[Look], chance: Chance) -> Hidden | None:
    """Columns that err more than the others do, or follow the golden's values by another factor. others: the same
    operator in other layers."""
    here = look.columns
    if here is None or here.width < c.NARROW or here.rows < c.FEW:
        return None
    if look.unfed and not look.columns_before:  # what went in may be uneven, and nobody saw it
        return None
    err, slope, sure = here.signs
    width, least = len(err), c.COLUMN_LEAST * look.unit
    sigmas = c.TAILS * chance.sigmas(width)
    by_size = err / least
    usual_err, bulk = max(here.usual_err, c.COLUMN_TYPICAL * look.unit), c.MAD * float(np.median(np.abs(sure)))
    surest = sigmas * max(bulk, 1.0)
    if not (
        (np.minimum(err / (c.COLUMN * usual_err), by_size) > 1).any()
        or (np.minimum(np.abs(sure) / surest, np.abs(slope) / least) > 1).any()
        or (not look.mixing and (_offset(here, sigmas, c.OFFSET_LEAST * look.unit) > 1).any())
    ):
        return None
    # Errors in few columns of the input make errors of one direction, which spread unevenly over the output.
    known = [(o.columns, o.unit) for o in others if o.columns is not None]
    elsewhere = [columns.uneven(unit) for columns, unit in known]
    uneven = [c.COLUMN_KIN * most for most, _ in elsewhere]
    uneven += [c.COLUMN_INPUT * before.uneven(look.unit)[0] for before in look.columns_before]
    by_err = np.minimum(err / (max([c.COLUMN, *uneven]) * usual_err), by_size)
    noisy = max([surest, *(c.COLUMN_SURE * most for _, most in elsewhere)])
    by_slope = np.minimum(np.abs(sure) / noisy, np.abs(slope) / least)
    by_slope = np.where(np.abs(slope) > c.COLUMN_APART * abs(float(np.median(slope))), by_slope, 0.0)
    offsets = _offsets(look, here, sigmas, [k for k, _ in known])
    strength = np.maximum(np.maximum(by_err, by_slope), offsets)
    for before in look.columns_before:
        worst = before.signs[0]
        if before.width % width == 0:  # an operator by element passes a bad column on, from each part
            worst = worst.reshape(-1, width).max(axis=0)
            strength = np.where(err > c.BY_ELEMENT * worst, strength, 0.0)
    bad = np.flatnonzero(strength > 1)
    if not len(bad) or len(bad) > width // 2:
        return None
    at = int(bad[strength[bad].argmax()])
    odd = max(abs(float(sure[at])) / max(bulk, 1.0), _log_deviations(err, at), abs(float(here.offsets[1][at])))
    seldom = chance.of_sigmas(odd / c.TAILS, width)
    return Hidden(look.err > 0, COLUMNS, float(err[bad].max()), float(strength.max()), UNLIKE_KIN, seldom, bad)


def _offset(columns: Columns, sigmas: float, need: float) -> np.ndarray:
    offset, sure = columns.offsets
    return np.minimum(np.abs(sure) / sigmas, np.abs(offset) / need)


def _offsets(look: Look, here: Columns, sigmas: float, elsewhere: Sequence[Columns]) -> np.ndarray:
    """How strongly each column is shifted to one side. A column that hardly changes is rounded to the same side in
    each row, by up to one rounding; what other layers and the inputs show of that is not enough here. Attention
    gives many rows the same values, errors included: there it says nothing."""
    if look.mixing:
        return np.zeros(here.width)
    known = [*elsewhere, *look.columns_before]
    usual = max((k.most_offset for k in known if k.width >= c.NARROW), default=0.0)
    need = max(c.OFFSET_LEAST * look.unit, c.OFFSET_KIN * min(usual, c.OFFSET_MOST * look.unit))
    return _offset(here, sigmas, need)


def _log_deviations(err: np.ndarray, at: int) -> float:
    """How many robust deviations the error of column ``at`` lies above the typical column's, in logarithms."""
    logs = np.log2(np.maximum(err, TINY))
    middle, bulk = deviation(logs)
    return max(float(logs[at]) - middle, 0.0) / max(bulk, c.LEAST_SPREAD)
