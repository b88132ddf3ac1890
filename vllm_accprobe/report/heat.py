"""Layers by tokens: how far each row of each tap is off, in units of its limit, small enough for a page.

The problem: a comparison holds millions of row errors, and what a person wants is a picture: which layer, which token.
The idea: per request a matrix taps × tokens of one byte each, on a logarithmic scale; long requests are binned (the
worst row of a bin counts), the worst requests come first, and what does not fit is counted. A page folds taps into
layers and unfolds a layer again. Not here: drawing (html/heat.js), the rows themselves (comparison/row_table.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_accprobe.report import facts
from vllm_accprobe.report.depth import layer_of, on_axis

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.comparison.row_table import RowTable

MAX_BINS = 512
"""Columns of one request; a screen shows no more."""
MAX_CELLS = 3_000_000
"""Bytes of all requests' matrices."""
MAX_REQUESTS = 200
MISSING, IDENTICAL, INFINITE = 0, 1, 255
PER_DECADE, LOWEST = 30, -4.0
"""Codes 2 to 254 are ratios on a logarithmic scale: 2 is 1e-4 and less, 30 codes to a factor of ten."""


@dataclass(frozen=True)
class HeatRequest:
    """One request's rows. start: first position of each bin; step0, step1: mine's steps that computed it, -1 for none;
    decode: whether its last row was decoding; all int32 [bins]. width: positions per bin. codes: uint8 [taps, bins].
    worst: the largest ratio, infinite where NaNs differ."""

    label: str
    start: np.ndarray
    step0: np.ndarray
    step1: np.ndarray
    decode: np.ndarray
    width: int
    codes: np.ndarray
    worst: float


@dataclass(frozen=True)
class Heat:
    """taps: in data-flow order; layers: of each tap, None outside of layers. requests: worst first. left_out: requests
    that did not fit."""

    taps: tuple[str, ...]
    layers: tuple[str | None, ...]
    requests: tuple[HeatRequest, ...]
    left_out: int


def encode(ratio: np.ndarray) -> np.ndarray:
    """float [n] of error over limit → uint8 codes; NaN never passes and counts as infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.rint((np.log10(ratio) - LOWEST) * PER_DECADE)
    codes = np.clip(np.nan_to_num(scaled, nan=0, posinf=0, neginf=0), 0, 252) + 2
    codes = np.where(ratio == 0, IDENTICAL, codes)
    return np.where(np.isfinite(ratio), codes, INFINITE).astype(np.uint8)


def heat(comparison: Comparison, max_cells: int = MAX_CELLS) -> Heat:
    """Empty where the comparison keeps no errors by row."""
    rows = comparison.rows
    pairs = comparison.pairs
    if rows is None or not len(rows):
        return Heat((), (), (), 0)
    shown = np.array([on_axis(p) and p.limit is not None for p in pairs], bool)
    order: dict[str, int] = {}
    for p, ok in zip(pairs, shown, strict=True):
        if ok:
            order[p.tap] = max(order.get(p.tap, p.order), p.order)  # outputs come after those of what lies inside
    taps = sorted(order, key=lambda t: (order[t], t))
    number = {t: i for i, t in enumerate(taps)}
    tap_of = np.array([number.get(p.tap, -1) for p in pairs], np.int64)
    step_of = np.array([-1 if p.step is None else p.step for p in pairs], np.int64)
    kept = np.flatnonzero(shown[rows.pair])
    ratio, owner = factors(comparison)[kept], rows.request[kept].astype(np.int64)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    worst = np.zeros(len(rows.requests))
    np.maximum.at(worst, owner, ratio.astype(np.float64))  # of other types it takes ten times as long
    present = np.flatnonzero(np.bincount(owner, minlength=len(worst)))
    beyond = np.bincount(owner[ratio > 1], minlength=len(worst))  # of those that are equally bad, who shows more
    ranked = sorted(present, key=lambda r: (-worst[r], -beyond[r], rows.requests[r]))
    by_request = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[by_request], np.arange(len(rows.requests) + 1))
    out: list[HeatRequest] = []
    cells = 0
    for r in ranked[:MAX_REQUESTS]:
        mine = by_request[bounds[r] : bounds[r + 1]]
        request = _request(rows, kept[mine], ratio[mine], tap_of, step_of, len(taps), rows.requests[r], worst[r])
        if out and cells + request.codes.size > max_cells:
            break
        cells += request.codes.size
        out.append(request)
    return Heat(tuple(taps), tuple(layer_of(t) for t in taps), tuple(out), len(ranked) - len(out))


def _request(
    rows: RowTable, at: np.ndarray, ratio: np.ndarray, tap_of: np.ndarray, step_of: np.ndarray, taps: int, label: str,
    worst: float,
) -> HeatRequest:  # fmt: skip
    position = rows.position[at]
    known = np.unique(position)
    width = max(1, -(-len(known) // MAX_BINS))
    start = known[::width]
    column = np.searchsorted(start, position, side="right") - 1
    codes = np.zeros(taps * len(start), np.uint8)
    np.maximum.at(codes, tap_of[rows.pair[at]] * len(start) + column, encode(ratio))  # one index is ten times as fast
    steps = step_of[rows.pair[at]]
    step0, step1 = np.full(len(start), np.iinfo(np.int32).max), np.full(len(start), -1)
    np.minimum.at(step0, column, steps)
    np.maximum.at(step1, column, steps)
    decode = np.zeros(len(start), np.int32)
    np.maximum.at(decode, column, rows.decode[at].astype(np.int32))
    return HeatRequest(label, start, step0, step1, decode, width, codes.reshape(taps, -1), float(worst))


def factors(comparison: Comparison) -> np.ndarray:
    """float32, an entry a row of ``Comparison.rows``: how many times its limit it is off, infinite where NaNs differ,
    NaN where a pair has no limit.

    A row is measured against its tensor's limit, and a pair in which an error was created against what one operator may
    create: of such a pair the worst row has the pair's factor and no other has more, so that one fault has one factor
    in the sentence, the table and the picture."""
    rows = comparison.rows
    assert rows is not None
    of = {i: facts.severity(p) for i, p in enumerate(comparison.pairs) if p.status == "fail" and p.measure == "created"}
    if not of:
        return rows.ratio
    most = np.full(len(comparison.pairs), np.nan, np.float32)
    most[list(of)] = list(of.values())
    at = np.flatnonzero(~np.isnan(most)[rows.pair])
    if not len(at):
        return rows.ratio
    out = rows.ratio.copy()
    pair = rows.pair[at]
    out[at] = np.minimum(out[at], most[pair])
    for i, own in _by_pair(at, pair):
        worst = comparison.pairs[i]
        named = own[rows.position[own] == worst.worst_position] if worst.worst_position is not None else own[:0]
        named = named[[rows.requests[r] == worst.worst_request for r in rows.request[named].tolist()]]
        if not len(named):  # the worst row is not told, or was not kept
            named = own[[int(np.nanargmax(np.nan_to_num(rows.error[own], nan=np.inf)))]]
        out[named] = most[i]
    return out


def _by_pair(at: np.ndarray, pair: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(pair, its entries) of each."""
    order = np.argsort(pair, kind="stable")
    numbers, first = np.unique(pair[order], return_index=True)
    return list(zip(numbers.tolist(), np.split(at[order], first[1:]), strict=True))
