"""What both dumps know of rows of logits: requests' parameters, masks, and the best logits of flipped tokens.

The problem: where tokens flip, both sides' bytes say only that they differ; who is wrong follows from the request's
parameters, the model's logits, what grammars or penalties left of them, and earlier tokens. The idea: each side's row
goes to judge/sampling_rules.py, and comes back as plain values that a saved comparison keeps. Rows whose processed
logits are the same bits on both sides are left out. Not here: what a flip means (judge/near_ties.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import Flip, SampledHistory, identity
from vllm_accprobe.comparison.measure.read import Loader, Unread
from vllm_accprobe.comparison.plan.unit import (
    MASKED_IDS,
    MASKED_LOGITS,
    SAMPLER,
    TOKEN,
    TOP_IDS,
    TOP_LOGITS,
    Group,
    alone,
)
from vllm_accprobe.comparison.plan.units import Plan
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.schema import FILTERED, LOGITS, MASKS_KNOWN, NOISE, NOISE_DRAWS, SCALED
from vllm_accprobe.judge import sampling_rules as rules

_RAW = "logits"
_MOST = 64
"""Chosen: rows without a flipped token that are computed again; the first of each request come first, and one is
enough to name a processor."""


@dataclass(frozen=True, slots=True)
class _RowPlace:
    """Where one side has a row. at: its place among the rows of the step's logits."""

    rank: int
    step: int
    at: int
    group: tuple[int, int]


class _OneSide:
    """One dump's rows of logits by key. side: 0 golden, 1 mine."""

    def __init__(self, plan: Plan, side: int, loader: Loader, dump: Any):
        self._loader, self._dump = loader, dump
        self._tokens = (plan.tokens.golden, plan.tokens.mine)[side]
        self._histories: dict[int, SampledHistory] = {}
        self.attrs = next(
            (dict(m.attrs) for ms in dump.modules.values() for m in ms if m.tap == SAMPLER), dict[str, Any]()
        )
        self._draw = rules.draw_of(self.attrs.get(NOISE), self.attrs.get(NOISE_DRAWS))
        cells = self._tokens.cells
        self.groups: dict[str, dict[tuple[int, int], Group]] = {}
        self._ranks: dict[tuple[int, int], int] = {}
        for r in dump.records:
            if r.step is None or r.rows != LOGITS or r.call:
                continue
            moment = cells.get(r.rank, 0), r.step
            raw = r.role == "output.0" and r.tap.rpartition(".")[2] == "logits_processor"
            if (r.tap == SAMPLER or raw) and r.payload is not None:
                self.groups.setdefault(_RAW if raw else r.role, {}).setdefault(moment, alone(r, moment[0]))
            if r.tap == SAMPLER:
                self._ranks.setdefault(moment, r.rank)
        self.places: dict[int, _RowPlace] = {}
        for (cell, step, name), rows in self._tokens.rows.items():
            if name != LOGITS or (cell, step) not in self._ranks:
                continue
            for at in np.flatnonzero(rows.keep).tolist():
                self.places[int(rows.keys[at])] = _RowPlace(self._ranks[cell, step], step, at, (cell, step))

    def values(self, role: str, place: _RowPlace) -> np.ndarray | None:
        """One row of a tensor in float64 or int64; None where there is none."""
        group = self.groups.get(role, {}).get(place.group)
        if group is None or not group.readable:
            return None
        try:
            block = self._loader.load(group)
        except Unread:
            return None
        if place.at >= len(block.data):
            return None
        return np.asarray(widen(block.data[place.at], block.dtype, as_float=True), np.float64)

    def best(self, logits: str, ids: str, place: _RowPlace) -> tuple[np.ndarray, np.ndarray] | None:
        found = self.values(logits, place), self.values(ids, place)
        return None if found[0] is None or found[1] is None else (found[0], found[1].astype(np.int64))

    def row(self, place: _RowPlace, token: int | None) -> rules.LogitsRow:
        """All that the dump has of it."""
        h = self._histories.setdefault(place.rank, SampledHistory(self._dump, place.rank)).row(place.step, place.at)
        if h is None:
            return rules.LogitsRow(None, None, None, token, None, None, 0)
        raw, best = self.values(_RAW, place), self.best(TOP_LOGITS, TOP_IDS, place)
        left = self.best(MASKED_LOGITS, MASKED_IDS, place)
        broken = rules.broken(raw, best[0] if best is not None else None)
        if raw is None or not rules.is_of(raw, best):
            raw = rules.of_best(best, left, token)
        masked = self._masked(place, h.request.req if h.request is not None else -1)
        return rules.LogitsRow(
            h.asks, raw, left, token, h.prompt, h.output, h.generated, h.drafts, masked, self._draw,
            self._histories[place.rank].asked(place.step), bool(self.attrs.get(SCALED)),
            str(self.attrs.get(FILTERED) or ""), broken,
        )  # fmt: skip

    def _masked(self, place: _RowPlace, req: int) -> tuple[str, ...] | None:
        mask = self._dump.masks.get((place.rank, place.step, req))
        return None if mask is None else tuple(mask.by)


class RequestedRows:
    """Both sides' rows of logits."""

    def __init__(self, plan: Plan, loaders: tuple[Loader, Loader], dumps: tuple[Any, Any]):
        self._sides = [_OneSide(plan, i, loaders[i], dumps[i]) for i in (0, 1)]
        runs = [{k: d.run.get(k) for k in ("versions", "device", "system")} for d in dumps]
        noise = [side.attrs.get(NOISE) for side in self._sides]
        self._same_noise = noise[0] is not None and noise[0] == noise[1] and runs[0] == runs[1]

    def of(self, key: int, tokens: Sequence[int | None]) -> dict[str, Any] | None:
        """What judge.flips.AskedRow is made of, for the row ``key`` of which golden and mine took ``tokens``; None
        where one side does not have it."""
        places = [side.places.get(key) for side in self._sides]
        if places[0] is None or places[1] is None:
            return None
        found = [(side, p) for side, p in zip(self._sides, places, strict=True) if p is not None]
        rows = [side.row(place, token) for (side, place), token in zip(found, tokens, strict=True)]
        asks = [row.asks for row in rows]
        tops = [side.best(TOP_LOGITS, TOP_IDS, place) for side, place in found]
        whole = [row.raw if row.whole else None for row in rows]
        same = None
        if whole[0] is not None and whole[1] is not None:
            same = np.array_equal(whole[0], whole[1])
        left = [row.left for row in rows]
        alike = None
        if left[0] is not None and left[1] is not None:
            alike = all(map(np.array_equal, left[0], left[1]))
        return {
            "checks": [_plain(rules.check(row)) for row in rows],
            "greedy": all(a is not None and a.greedy for a in asks),
            "seeded": all(a is not None and a.seed is not None for a in asks),
            "same_parameters": None if None in asks else asks[0].digest == asks[1].digest,  # type: ignore[union-attr]
            "same_logits": same,
            "same_best": None if None in tops else all(map(np.array_equal, *tops)),  # type: ignore[arg-type]
            "same_left": alike,
            "same_noise": self._same_noise,
        }

    def processed(self, flipped: set[int]) -> list[dict[str, Any]]:
        """The rows without a flipped token whose processed logits are not the same bits on both sides, {"key": ...}
        with what `of` tells of each."""
        found: list[dict[str, Any]] = []
        golden, mine = self._sides
        differing = [
            key for key, place in mine.places.items()
            if key not in flipped and key in golden.places and self._differs(golden.places[key], place)
        ]  # fmt: skip
        for key in sorted(differing, key=lambda k: (mine.places[k].step, k))[:_MOST]:
            both = [side.values(TOKEN, side.places[key]) for side in self._sides]
            told = self.of(key, [None if t is None else int(t[0]) for t in both])
            if told is not None:
                found.append({"key": key} | told)
        return found

    def _differs(self, golden: _RowPlace, mine: _RowPlace) -> bool:
        groups = [
            [side.groups.get(role, {}).get(place.group) for role in (MASKED_LOGITS, MASKED_IDS)]
            for side, place in zip(self._sides, (golden, mine), strict=True)
        ]
        if None in groups[0] or None in groups[1]:
            return False
        prints = [[g.fingerprint for g in side if g is not None] for side in groups]
        if prints[0] == prints[1] and None not in prints[0]:
            return False
        rows = [side.best(MASKED_LOGITS, MASKED_IDS, p) for side, p in zip(self._sides, (golden, mine), strict=True)]
        return None not in rows and not all(map(np.array_equal, *rows))  # type: ignore[arg-type]


def _plain(checked: rules.RowCheck) -> dict[str, Any]:
    found = asdict(checked)
    del found["best"]
    return found | {"processors": list(checked.processors), "ways": [[list(w), how] for w, how in checked.ways]}


Lookups = dict[str, "list[Group]"]
"""By role of the sampler: one side's tensors, in order of steps."""


def best_logits(
    plan: Plan, loaders: tuple[Loader, Loader], dumps: tuple[Any, Any], sampled: RequestedRows | None = None
) -> list[dict[str, Any]]:
    """For each flipped token {"flip": its fields, "best": [golden's, mine's], each [logits, ids] or None, "masks":
    [golden's, mine's], each [words or None, hash or None, [logits, ids] or None] as judge.flips.Masking, "asked": as
    `RequestedRows.of`}."""
    found = []
    groups = [_lookups(plan, side, dump) for side, dump in enumerate(dumps)]
    for flip in plan.tokens.flips:
        best = [_best(plan, side, groups[side], loaders[side], flip.key, TOP_LOGITS, TOP_IDS) for side in (0, 1)]
        masks = [_masks(plan, side, groups[side], loaders[side], flip, dumps[side]) for side in (0, 1)]
        asked = sampled.of(flip.key, (flip.golden, flip.mine)) if sampled is not None else None
        found.append({"flip": asdict(flip), "best": best, "masks": masks, "asked": asked})
    return found


def _lookups(plan: Plan, side: int, dump: Any) -> Lookups:
    """What the plan paired; and what masks left, which one side may have alone."""
    groups: Lookups = {u.key[1]: u.mine if side else u.golden for u in plan.units if u.key[0] == SAMPLER}
    cells = (plan.tokens.golden, plan.tokens.mine)[side].cells
    for r in dump.records:
        if r.tap == SAMPLER and r.role in (MASKED_LOGITS, MASKED_IDS) and r.role not in groups:
            groups[r.role] = [
                alone(x, cells.get(x.rank, 0)) for x in dump.records if (x.tap, x.role) == (SAMPLER, r.role)
            ]
    return groups


def _masks(plan: Plan, side: int, groups: Lookups, loader: Loader, flip: Flip, dump: Any) -> list[Any]:
    """What masked the logits that ``flip`` was sampled from, on one side."""
    known = any(m.tap == SAMPLER and m.attrs.get(MASKS_KNOWN) for ms in dump.modules.values() for m in ms)
    if not known:
        return [None, None, None]
    golden, mine, _ = plan.requests.pairs[flip.pair]
    who = identity(mine if side else golden)
    tokens = (plan.tokens.golden, plan.tokens.mine)[side]
    made = [
        (cell, step)
        for (cell, step, name), rows in tokens.rows.items()
        if name == LOGITS and ((rows.keys == flip.key) & rows.keep).any()
    ]
    for (rank, step, req), mask in dump.masks.items():
        request = dump.requests.get((rank, req))
        if request is None or identity(request) != who or (tokens.cells.get(rank, 0), step) not in made:
            continue
        best = _best(plan, side, groups, loader, flip.key, MASKED_LOGITS, MASKED_IDS)
        left = [] if best is None else [p for p in zip(*best, strict=True) if math.isfinite(p[0])]
        # What may not be taken has no place among the best.
        return [list(mask.by), mask.grammar, [list(column) for column in zip(*left, strict=True)] or None]
    return [[], None, None]


def _best(
    plan: Plan, side: int, groups: Lookups, loader: Loader, key: int, logits: str, ids: str
) -> list[list[Any]] | None:
    rows = [_row(plan, side, groups.get(role, []), loader, key) for role in (logits, ids)]
    return [rows[0].tolist(), rows[1].tolist()] if rows[0] is not None and rows[1] is not None else None


def _row(plan: Plan, side: int, groups: Sequence[Group], loader: Loader, key: int) -> np.ndarray | None:
    """One row's numbers, of the last group that holds it."""
    tokens = (plan.tokens.golden, plan.tokens.mine)[side]
    for group in reversed(groups):
        rows = tokens.rows.get(group.where) if group.where else None
        if rows is None or not group.readable:
            continue
        at = np.flatnonzero((rows.keys == key) & rows.keep)
        if len(at):
            try:
                block = loader.load(group)
            except Unread:
                continue
            return np.asarray(widen(block.data[int(at[0])], block.dtype, as_float=True))
    return None
