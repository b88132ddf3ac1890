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

from vllm_accprobe.align.tokens import SampledHistory, identity
from vllm_accprobe.comparison.measure.read import Loader, Unread
from vllm_accprobe.comparison.plan import unit
from vllm_accprobe.comparison.plan.make_plan import Plan
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.record_table import of_sites
from vllm_accprobe.dump.schema import FILTERED, LOGITS, MASKS_KNOWN, NOISE, NOISE_DRAWS, SCALED, Request
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
    def __init__(self, plan: Plan, side: int, loader: Loader, dump: Any):
        self._loader, self._dump = loader, dump
        self._tokens = (plan.tokens.golden, plan.tokens.mine)[side]
        self._compared = {u.key[1] for u in plan.units if u.key[0] == unit.SAMPLER}
        self._histories: dict[int, SampledHistory] = {}
        self.attrs = next(
            (dict(m.attrs) for ms in dump.modules.values() for m in ms if m.tap == unit.SAMPLER), dict[str, Any]()
        )
        self._draw = rules.draw_of(self.attrs.get(NOISE), self.attrs.get(NOISE_DRAWS))
        cells = self._tokens.cells
        self.groups: dict[str, dict[tuple[int, int], unit.Group]] = {}
        self._ranks: dict[tuple[int, int], int] = {}
        for r in of_sites(dump.records, lambda site: site.rows == LOGITS):
            if r.step is None or r.call:
                continue
            moment = cells.get(r.rank, 0), r.step
            raw = r.role == "output.0" and r.tap.rpartition(".")[2] == "logits_processor"
            if (r.tap == unit.SAMPLER or raw) and r.payload is not None:
                self.groups.setdefault(_RAW if raw else r.role, {}).setdefault(moment, unit.alone(r, moment[0]))
            if r.tap == unit.SAMPLER:
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

    def chosen_from(self, key: int) -> list[list[Any]] | None:
        """[logits, ids] of the best that the model gave a row, where the plan compares these; None else."""
        place = self.places.get(key)
        if place is None or not self._compared >= {unit.TOP_LOGITS, unit.TOP_IDS}:
            return None
        best = self.best(unit.TOP_LOGITS, unit.TOP_IDS, place)
        return None if best is None else [column.astype(np.float64).tolist() for column in best]

    def masks(self, key: int, request: Request) -> list[Any]:
        """What masked the logits of a row of ``request`` before sampling, as `RequestedRows.flips` has it."""
        if not self.attrs.get(MASKS_KNOWN):
            return [None, None, None]
        who, place = identity(request), self.places.get(key)
        made = [w[:2] for w, r in self._tokens.rows.items() if w[2] == LOGITS and ((r.keys == key) & r.keep).any()]
        for (rank, step, req), mask in self._dump.masks.items():
            one = self._dump.requests.get((rank, req))
            if one is None or identity(one) != who or (self._tokens.cells.get(rank, 0), step) not in made:
                continue
            best = None if place is None else self.best(unit.MASKED_LOGITS, unit.MASKED_IDS, place)
            columns = [] if best is None else [column.astype(np.float64).tolist() for column in best]
            # What may not be taken has no place among the best.
            left = [p for p in zip(*columns, strict=True) if math.isfinite(p[0])]
            return [list(mask.by), mask.grammar, [list(column) for column in zip(*left, strict=True)] or None]
        return [[], None, None]

    def row(self, place: _RowPlace, token: int | None) -> rules.LogitsRow:
        h = self._histories.setdefault(place.rank, SampledHistory(self._dump, place.rank)).row(place.step, place.at)
        if h is None:
            return rules.LogitsRow(None, None, None, token, None, None, 0)
        raw, best = self.values(_RAW, place), self.best(unit.TOP_LOGITS, unit.TOP_IDS, place)
        left = self.best(unit.MASKED_LOGITS, unit.MASKED_IDS, place)
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
    def __init__(self, plan: Plan, loaders: tuple[Loader, Loader], dumps: tuple[Any, Any]):
        self._sides = [_OneSide(plan, i, loaders[i], dumps[i]) for i in (0, 1)]
        self._plan = plan
        runs = [{k: d.run.get(k) for k in ("versions", "device", "system")} for d in dumps]
        noise = [side.attrs.get(NOISE) for side in self._sides]
        self._same_noise = noise[0] is not None and noise[0] == noise[1] and runs[0] == runs[1]

    def of(self, key: int, tokens: Sequence[int | None]) -> dict[str, Any] | None:
        """What judge.near_ties.RequestedRow is made of, for the row ``key`` of which golden and mine took ``tokens``;
        None where one side does not have it."""
        places = [side.places.get(key) for side in self._sides]
        if places[0] is None or places[1] is None:
            return None
        found = [(side, p) for side, p in zip(self._sides, places, strict=True) if p is not None]
        rows = [side.row(place, token) for (side, place), token in zip(found, tokens, strict=True)]
        asks = [row.asks for row in rows]
        tops = [side.best(unit.TOP_LOGITS, unit.TOP_IDS, place) for side, place in found]
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
            "untouched": [None if best is None or row.left is None else all(map(np.array_equal, best, row.left))
                          for best, row in zip(tops, rows, strict=True)],
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
            both = [side.values(unit.TOKEN, side.places[key]) for side in self._sides]
            row = self.of(key, [None if t is None else int(t[0]) for t in both])
            if row is not None:
                found.append({"key": key} | row)
        return found

    def flips(self) -> list[dict[str, Any]]:
        """For each flipped token {"flip": its fields, "best": [golden's, mine's], each [logits, ids] or None, "masks":
        [golden's, mine's], each [words or None, hash or None, [logits, ids] or None] as judge.near_ties.Masking,
        "asked": as `of`}."""
        found = []
        for flip in self._plan.tokens.flips:
            best = [side.chosen_from(flip.key) for side in self._sides]
            requests = self._plan.requests.pairs[flip.pair][:2]
            masks = [side.masks(flip.key, request) for side, request in zip(self._sides, requests, strict=True)]
            row = self.of(flip.key, (flip.golden, flip.mine))
            found.append({"flip": asdict(flip), "best": best, "masks": masks, "asked": row})
        return found

    def _differs(self, golden: _RowPlace, mine: _RowPlace) -> bool:
        groups = [
            [side.groups.get(role, {}).get(place.group) for role in (unit.MASKED_LOGITS, unit.MASKED_IDS)]
            for side, place in zip(self._sides, (golden, mine), strict=True)
        ]
        if None in groups[0] or None in groups[1]:
            return False
        prints = [[g.fingerprint for g in side if g is not None] for side in groups]
        if prints[0] == prints[1] and None not in prints[0]:
            return False
        rows = [
            side.best(unit.MASKED_LOGITS, unit.MASKED_IDS, p)
            for side, p in zip(self._sides, (golden, mine), strict=True)
        ]
        return None not in rows and not all(map(np.array_equal, *rows))  # type: ignore[arg-type]


def _plain(checked: rules.RowCheck) -> dict[str, Any]:
    found = asdict(checked)
    del found["best"]
    return found | {"processors": list(checked.processors), "ways": [[list(w), how] for w, how in checked.ways]}
