"""The rows of a place that have an error, of all its tensors, as one trace wants them.

The problem: a place has one tensor per step, with rows, without, or with one number that stands for all; blame wants
one list of rows. The idea: the rows with an error of all parts, one after the other, each with what is known of it.
Not here: how large an error is (judge/verdict.py), the union of rows (align/row_set.py), the trace (judging.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_accprobe.align.row_set import RowSet, Union
from vllm_accprobe.comparison.measure.part import Part
from vllm_accprobe.judge.verdict import NONFINITE, RowErrors

_NO_KEYS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Wrong:
    """The rows of a unit that have an error: at, which of its keys, one part after the other; what `Trace` says."""

    at: np.ndarray
    err: np.ndarray
    rel: np.ndarray
    gain: np.ndarray
    broken: np.ndarray
    own: np.ndarray


def spoken_for(parts: list[Part], errors: list[RowErrors], rows: list[RowSet]) -> np.ndarray:
    """`Trace.shared` of the rows of all parts, one after the other: int64; empty where each row has its own error."""
    each = zip(parts, errors, rows, strict=True)
    one = [bool(len(known)) and (part.whole or len(e.err) != len(known)) for part, e, known in each]
    if not any(one):
        return _NO_KEYS
    numbers = (i if whole else -1 for i, whole in enumerate(one))
    return np.concatenate([np.full(len(known), i) for i, known in zip(numbers, rows, strict=True)])


def wrong_rows(
    parts: list[Part], errors: list[RowErrors], rows: list[RowSet], own: np.ndarray = _NO_KEYS
) -> tuple[Wrong, float]:
    """The rows with an error, and the largest error that belongs to no row. rows: that each part speaks for. own: keys
    that are wrong whatever came in."""
    found: list[tuple[np.ndarray, ...]] = []
    everywhere, start = 0.0, 0
    for part, e, known in zip(parts, errors, rows, strict=True):
        n = len(known)
        if part.whole and (e.err > 0).any():
            if n:
                most = np.full(n, e.err.max())
                broken = np.full(n, _broken(part, e).any())
                found.append((np.arange(start, start + n), most, most, np.zeros(n), broken, np.zeros(n, bool)))
            else:
                everywhere = max(everywhere, float(e.err.max()))
        elif not part.whole and len(e.err) == n:
            bad = np.flatnonzero(e.err > 0)
            condemned = np.isin(known.keys[bad], own) if len(own) else np.zeros(len(bad), bool)
            found.append((start + bad, e.err[bad], e.rel[bad], e.gain[bad], _broken(part, e)[bad], condemned))
        elif not part.whole and e.err[0] > 0:
            values = e.err, e.rel, e.gain, _broken(part, e)
            found.append((np.arange(start, start + n), *(np.full(n, v[0]) for v in values), np.zeros(n, bool)))
        start += n
    if not found:
        none, no = np.zeros(0), np.zeros(0, bool)
        return Wrong(np.zeros(0, np.int64), none, none, none, no, no), everywhere
    return Wrong(*(np.concatenate([f[i] for f in found]) for i in range(6))), everywhere


def by_key(wrong: Wrong, rows: Union) -> tuple[np.ndarray, Wrong]:
    """(keys, each once, the rows in their order), of a key with several rows the largest error. rows: of all parts."""
    at = rows.place[wrong.at]
    if rows.distinct and len(at) == len(rows.seen):
        keys = rows.seen.keys  # all of them: the same array, which whoever compares knows again
        order = np.empty(len(at), np.int64)
        order[at] = np.arange(len(at))
    else:
        order = np.lexsort((wrong.err, at))
        order = order[np.append(np.diff(at[order]) != 0, True)] if len(at) else order
        keys = rows.seen.keys[at[order]]
    values = (wrong.at, wrong.err, wrong.rel, wrong.gain, wrong.broken, wrong.own)
    return keys, Wrong(*(v[order] for v in values))


def _broken(part: Part, errors: RowErrors) -> np.ndarray:
    """bool [rows]: NaN or infinity on one side only, and not on golden's."""
    return (errors.measure == NONFINITE) & (part.own_nonfinite is not False)
