"""Depth chart and heat map as data: each tap and each row over its limit.

The problem: an error is created in one place and carried on, and millions of row errors show no pattern. The idea: all
is drawn as the factor that decided (`facts.severity`), so that 1 is every tap's limit: a point per tap with what it
created and what its outputs are off by; per request a matrix taps x tokens of one byte each on a logarithmic scale,
long requests binned by their worst row, worst requests first, the rest counted. Not here: drawing (html/*.js).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe.align.tokens import POSITION_BITS, POSITION_MASK
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.report.facts import origin_factor
from vllm_accprobe.report.verdict_parts import tap_of

if TYPE_CHECKING:
    from vllm_accprobe.comparison.pair import Pairs
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.comparison.row_table import RowTable


PHASES = ("prefill", "decode", "other")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|layer|block|h)\.(\d{1,6})(?:\.|$)")


@dataclass(frozen=True)
class Point:
    """One tap, in factors over its own limit: ``created`` by it, and ``prefill``, ``decode`` and ``other``, by how much
    the worst row of each phase is off in all; None where nothing was compared or is known, 0.0 where nothing differs.
    An error without a number (NaN, a golden of 0) is none of these and is counted in ``nonfinite``, as ``failed`` and
    ``pairs`` count. ``origin``: its number, the culprit being 1, or None. ``layer`` is the name's layer, such as
    ``model.layers.3``, or None outside of layers."""

    tap: str
    cls: str
    order: int
    layer: str | None
    created: float | None
    prefill: float | None
    decode: float | None
    other: float | None
    origin: int | None
    pairs: int
    failed: int
    nonfinite: int


def layer_of(tap: str) -> str | None:
    """``model.layers.3.mlp.down_proj`` → ``model.layers.3``; None for a tap outside of layers."""
    match = _LAYER.search(tap)
    return tap[: match.end(1)] if match else None


def depth(comparison: Comparison) -> list[Point]:
    """Points in data-flow order; an origin has one, whatever it was blamed for."""
    table = comparison.table
    origins: dict[str, tuple[int, OriginEntry]] = {}
    for number, origin in enumerate(comparison.origins, 1):
        origins.setdefault(tap_of(origin), (number, origin))
    at = np.flatnonzero(on_axis(table) | (table.failed & table.those("tap", origins.__contains__)))
    names, tap = table.numbered("tap", at)
    worst = np.full((len(names), len(PHASES)), -1.0)
    for phase, some, value in _factors(table):
        value = np.where(some & np.isfinite(value), np.maximum(value, 0.0), -1.0)[at]
        np.maximum.at(worst[:, phase], tap, value)
    order = np.array(table.column("order"), np.int64)[at]
    first = np.lexsort((order, tap))[np.searchsorted(np.sort(tap), np.arange(len(names)))]
    every = np.ones(len(table), bool)
    sizes, failed, endless = (np.bincount(tap[which[at]], minlength=len(names)).tolist()
                              for which in (every, table.failed, np.isposinf(table.severities)))  # fmt: skip
    points, classes = [], table.column("cls")
    for i, name in enumerate(names):
        blamed, created = origins.get(name), comparison.created.get(name)
        if blamed is not None:
            text = origin_factor(blamed[1])
            created = text if text is not None and math.isfinite(text) else None
            endless[i] = max(endless[i], text == math.inf)
        prefill, decode, other = (None if x < 0 else x for x in worst[i].tolist())
        cls, place = classes[at[first[i]]] or "", int(order[first[i]])
        points.append(Point(name, cls, place, layer_of(name), created, prefill, decode, other,
                            None if blamed is None else blamed[0], sizes[i], failed[i], endless[i]))  # fmt: skip
    return sorted(points, key=lambda p: (p.order, p.tap))


def on_axis(pairs: Pairs) -> np.ndarray:
    """bool: what is drawn of the pairs."""
    outputs = pairs.those("role", lambda role: role.startswith(("output", "inplace")))
    counts = pairs.those("dtype_golden", lambda dtype: str(dtype).startswith(("int", "uint", "bool")))
    return outputs & ~counts & ~pairs.having("status", "skip")


def _factors(pairs: Pairs) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(index of a phase, which pairs have a factor in it, the factors): of a pair with rows of both phases, the worse
    one has what decided, the other its own rows'."""
    own = [pairs.numbers(f"{phase}_rel_l2") for phase in PHASES[:2]]
    there = [~pairs.missing(f"{phase}_rel_l2") for phase in PHASES[:2]]
    phases = [pairs.having("phase", phase) for phase in (*PHASES[:2], "mixed")]
    same, both, none = pairs.those("identical", bool), there[0] & there[1], ~(there[0] | there[1])
    over = np.where(same, 0.0, pairs.severities)
    limit = np.where(pairs.having("measure", "created"), pairs.numbers("allowed"), pairs.numbers("limit"))
    with np.errstate(all="ignore"):
        split = both & np.isfinite(own[0]) & np.isfinite(own[1]) & (limit != 0) & ~np.isnan(limit) & ~same
        shares = [np.minimum(x / limit, over) for x in own]
    bare = ~pairs.failed
    for name in ("worst_row_rel_l2", "rel_l2", "measured"):
        bare &= pairs.missing(name)
    split &= ~bare
    alone = [there[0] & ~split, there[1] & ~there[0]]
    for i, more in ((0, own[0] >= own[1]), (1, own[1] > own[0])):
        some = (alone[i] & (same | ~bare)) | (none & phases[i] & ~bare) | split
        yield i, some | (same & (both | (none & phases[2]))), np.where(split & ~more, shares[i], over)
    yield 2, none & ~(same & phases[2]) & np.where(bare, same, ~phases[0] & ~phases[1]), over


MAX_BINS = 512
"""Columns of one request; a screen shows no more."""
MAX_CELLS = 3_000_000
"""Bytes of all requests' matrices."""
MAX_REQUESTS = 200
STRETCH = 1 << 18
"""Rows that are examined together."""
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


def heat(comparison: Comparison, max_cells: int = MAX_CELLS, over: np.ndarray | None = None) -> Heat:
    """Empty where the comparison keeps no errors by row. over: `factors` of it, where they are known."""
    rows = comparison.rows
    if rows is None or not len(rows):
        return Heat((), (), (), 0)
    table = comparison.table
    at = np.flatnonzero(on_axis(table) & ~table.missing("limit"))
    names, number = table.numbered("tap", at)
    last = np.zeros(len(names), np.int64)
    np.maximum.at(last, number, np.array(table.column("order"), np.int64)[at])  # outputs come after what lies inside
    place = sorted(range(len(names)), key=lambda i: (last[i], names[i]))
    taps = [names[i] for i in place]
    tap_of = np.full(len(table), -1)
    tap_of[at] = np.argsort(place)[number] if len(at) else number
    step_of = np.array([-1 if step is None else step for step in table.column("step")], np.int64)
    shown = _Shown(rows, factors(comparison) if over is None else over, tap_of, step_of)
    ranked, worst = shown.ranked()
    out = shown.requests(ranked[:MAX_REQUESTS], worst, len(taps), max_cells)
    return Heat(tuple(taps), tuple(layer_of(t) for t in taps), tuple(out), len(ranked) - len(out))


@dataclass(frozen=True)
class _Shown:
    """The rows that are drawn, stretch by stretch: of millions of rows, a few numbers each would be most of the memory.

    over: `factors`. tap, step: int64, of each pair; the tap is -1 where a pair is not drawn."""

    rows: RowTable
    over: np.ndarray
    tap: np.ndarray
    step: np.ndarray

    def ranked(self) -> tuple[list[int], np.ndarray]:
        """(the requests that have rows, worst first; the largest ratio of every request)."""
        names = self.rows.requests
        worst, count, beyond = np.zeros(len(names)), np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
        for at in self._stretches():
            owner, ratio = self.rows.request[at].astype(np.int64), self._ratio(at)
            np.maximum.at(worst, owner, ratio.astype(np.float64))  # of other types it takes ten times as long
            count += np.bincount(owner, minlength=len(names))
            beyond += np.bincount(owner[ratio > 1], minlength=len(names))  # of those equally bad, who shows more
        order = sorted(np.flatnonzero(count).tolist(), key=lambda r: (-worst[r], -beyond[r], names[r]))
        return order, worst

    def requests(self, ranked: Sequence[int], worst: np.ndarray, taps: int, most: int) -> list[HeatRequest]:
        """Those of ``ranked`` that fit into ``most`` cells, the first in any case."""
        bins = self._bins(ranked, taps, most)
        firsts = np.cumsum([0, *(len(start) for start, _ in bins)])
        total = int(firsts[-1])
        starts = np.concatenate([_place(np.int64(k), start) for k, (start, _) in enumerate(bins)])
        codes = np.zeros(taps * total, np.uint8)
        step0, step1 = np.full(total, np.iinfo(np.int32).max), np.full(total, -1)
        decode = np.zeros(total, np.int32)
        for at, key in self._of(ranked[: len(bins)]):
            column = np.searchsorted(starts, key, side="right") - 1
            pair = self.rows.pair[at]
            # One index is ten times as fast as two.
            np.maximum.at(codes, self.tap[pair] * total + column, encode(self._ratio(at)))
            np.minimum.at(step0, column, self.step[pair])
            np.maximum.at(step1, column, self.step[pair])
            np.maximum.at(decode, column, self.rows.decode[at].astype(np.int32))
        matrix = codes.reshape(taps, total)
        here = [slice(a, b) for a, b in pairwise(firsts.tolist())]
        return [
            HeatRequest(self.rows.requests[r], start, step0[at], step1[at], decode[at], width, matrix[:, at].copy(),
                        float(worst[r]))
            for r, (start, width), at in zip(ranked, bins, here, strict=False)
        ]  # fmt: skip

    def _bins(self, ranked: Sequence[int], taps: int, most: int) -> list[tuple[np.ndarray, int]]:
        """(first position of each bin, positions of a bin) of those that fit."""
        known = np.zeros(0, np.int64)
        for _, key in self._of(ranked):
            known = np.union1d(known, key)
        out: list[tuple[np.ndarray, int]] = []
        cells = 0
        for positions in np.split(known & POSITION_MASK, np.searchsorted(known, _place(np.arange(1, len(ranked)), 0))):
            width = max(1, -(-len(positions) // MAX_BINS))
            start = positions[::width]
            cells += taps * len(start)
            if out and cells > most:
                break
            out.append((start, width))
        return out

    def _of(self, ranked: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, their places, sorted by request in this order and position) of some requests, stretch by stretch."""
        rank = np.full(len(self.rows.requests), -1, np.int64)
        rank[list(ranked)] = np.arange(len(ranked))
        for at in self._stretches():
            own = rank[self.rows.request[at]]
            at, own = at[own >= 0], own[own >= 0]
            yield at, _place(own, self.rows.position[at])

    def _stretches(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self.rows), STRETCH):
            yield start + np.flatnonzero(self.tap[self.rows.pair[start : start + STRETCH]] >= 0)
            self.rows.rest()

    def _ratio(self, at: np.ndarray) -> np.ndarray:
        ratio = self.over[at]
        return np.where(np.isnan(ratio), np.inf, ratio)


def _place(rank: Any, position: Any) -> Any:
    return (rank << POSITION_BITS) | position


def factors(comparison: Comparison) -> np.ndarray:
    """float32, an entry a row of ``Comparison.rows``: how many times its limit it is off, infinite where NaNs differ,
    NaN where a pair has no limit.

    A row is measured against its tensor's limit, and a pair in which an error was created against what one operator may
    create, all of its rows: the worst has the pair's factor and no other has more, so that one fault has one factor in
    the sentence, the table and the picture."""
    rows = comparison.rows
    assert rows is not None
    table = comparison.table
    of = table.failed & table.having("measure", "created")
    if not of.any():
        return rows.ratio
    most = np.where(of, np.minimum(table.severities, np.finfo(np.float32).max), np.nan).astype(np.float32)
    at = np.flatnonzero(~np.isnan(most)[rows.pair])
    if not len(at):
        return rows.ratio
    out = rows.ratio.copy()
    pair = rows.pair[at]
    allowed = np.array([limit or np.nan for limit in table.column("allowed")], np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        out[at] = np.fmin(rows.error[at] / allowed[pair], most[pair])
    for i, own in _by_pair(at, pair):
        worst = comparison.pairs[i]
        named = own[rows.position[own] == worst.worst_position] if worst.worst_position is not None else own[:0]
        named = named[[rows.requests[r] == worst.worst_request for r in rows.request[named].tolist()]]
        if not len(named):  # the worst row is not known, or was not kept
            named = own[[int(np.nanargmax(np.nan_to_num(rows.error[own], nan=np.inf)))]]
        out[named] = most[i]
    return out


def _by_pair(at: np.ndarray, pair: np.ndarray) -> list[tuple[int, np.ndarray]]:
    order = np.argsort(pair, kind="stable")
    numbers, first = np.unique(pair[order], return_index=True)
    return list(zip(numbers.tolist(), np.split(at[order], first[1:]), strict=True))
