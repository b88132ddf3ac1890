"""Rows of one part that a router sent to other experts, and those that come after one.

The problem: a row behind a near tie has other values than golden's and no error; it must neither fail its pair nor
teach blame anything, and a tensor without rows does not say which part of it is such a row's. The idea: before a part
is judged, its errors are forgiven where a near tie explains them, and what was left out is said. Not here: what is a
near tie (judge/routing.py), the pair (judging.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.part import Part
from vllm_accprobe.judge.routing import Rerouted, is_choice
from vllm_accprobe.judge.tensor_errors import TensorErrors
from vllm_accprobe.judge.verdict import RowErrors


@dataclass(frozen=True)
class Settled:
    """What choices of experts make of a part. note: for its pair. left: bool [rows], which are not judged. own: keys of
    the rows whose choice is wrong by mine's own logits."""

    note: str = ""
    left: np.ndarray | None = None
    own: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def settle(
    unit: MeasuredUnit, part: Part, rows: RowSet, errors: RowErrors, rerouted: Rerouted, rounding: float,
    traces: Sequence[TensorErrors],
) -> Settled:  # fmt: skip
    """Finds rows sent to other experts at a near tie, adds them to ``rerouted``, and forgives, in ``errors``, the rows
    that come after one. rows: that the part speaks for; rounding: the model's unit (judge.floor.flow_unit); traces:
    of what lies before."""
    keys = rows.keys
    if part.whole:  # rows sorted by expert: one that goes elsewhere moves all others
        if not rerouted.after(keys).any():
            return Settled()
        _forgive(errors, np.ones(len(errors.err), bool))
        why = "not judged: its step has rows after a router's near tie, and it does not say which are theirs"
        return Settled(why, np.ones(len(keys), bool))
    if len(errors.err) != len(keys):
        return Settled()
    wrong = np.zeros(len(keys), bool)
    if is_choice(unit.key[1], unit.cls):
        other = np.flatnonzero(errors.err > 0)
        found = None if part.margins is None else part.margins[other]
        excused, bad = rerouted.judge(keys[other], found, rounding, unit, traces)
        rerouted.add(keys[other[excused]])
        wrong[other[bad]] = True
    mask = rerouted.after(keys) & ~wrong
    own = keys[wrong]
    if not mask.any():
        return Settled("", None, own)
    _forgive(errors, mask)
    return Settled(f"{int(mask.sum())} rows after a router's near tie are not judged", mask, own)


def add_undecided(
    part: Part, rows: RowSet, errors: RowErrors, rerouted: Rerouted, rounding: float, allowed: float
) -> None:
    """Adds rows that a near tie of these logits may have sent elsewhere, where nobody saw the choice (near_ties.py), to
    ``rerouted``: from here on they are not judged. The logits themselves are. allowed: the limit of their rows."""
    if part.margins is None or part.choices is not None or len(errors.err) != len(rows.keys):
        return
    other = np.flatnonzero(~np.isnan(part.margins[:, 0]))
    err = errors.err[other]
    keys = rows.keys[other]
    rerouted.add(keys[rerouted.undecided(keys, part.margins[other], rounding, (err > 0) & (err <= allowed))])


def _forgive(errors: RowErrors, mask: np.ndarray) -> None:
    errors.err[mask], errors.rel[mask], errors.ratio[mask], errors.peak[mask] = 0.0, 0.0, 1.0, 0.0
    errors.gain[mask] = 0.0
