"""Which row of one dump is which row of the other.

The problem: a row is a token in some step of some batch; batches, chunks, steps, speculation, preemption and prefix
caches differ between two runs of one prompt. The idea: a row's name is (request, position), or (image, row) in a
vision tower, packed into one int64; everything else drops out. A row counts if its token is the one the request finally
took at that position (a rejected draft is not) and no later step computed the same row again. From the first
sampled token that differs between the runs, a request's rows have different inputs and are not comparable.
Not here: how requests pair (requests.py), names (names.py), ranks (shards.py), reading tensors (comparison/).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.align.final_tokens import (
    POSITION_BITS,
    POSITION_MASK,
    Accepted,
    Numbered,
    accepted_tokens,
    last_rows,
    position,
    subject,
    valid_rows,
)
from vllm_accprobe.align.requests import RequestPlan, identity
from vllm_accprobe.dump.schema import DEALT, DECODE, Request, RowSpace

SUPERSEDED = "superseded rows (rejected drafts, recomputed rows)"
REJECTED = "rows of rejected drafts"
"""Told apart where the capture says which rows are drafts."""
AFTER_FLIP = "rows after a flipped token"
_UNPROVEN_ROWS = 1 << 20
Cell = int
Space = tuple[Cell, int, str]
"""(cell, step, name of the row space)."""
Sampled = Callable[[int, int], "np.ndarray | None"]
"""(rank, step) → the sampled token of each logits row (-1 where none was accepted), or None if not recorded."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One row space: ``keys`` int64 [n]; ``keep`` bool [n]: comparable; ``decode`` bool [n]."""

    keys: np.ndarray
    keep: np.ndarray
    decode: np.ndarray


@dataclass(frozen=True, slots=True)
class Flip:
    """The first sampled token that differs: generated token ``ordinal`` (from 1), made by the logits row ``key``."""

    pair: int
    ordinal: int
    position: int
    key: int
    golden: int
    mine: int


@dataclass(frozen=True)
class SideRows:
    """One dump's rows. ``cells``: rank → cell; the ranks of a cell computed the same rows."""

    rows: dict[Space, Rows]
    cells: dict[int, Cell]


@dataclass(frozen=True)
class TokenPlan:
    """names: subject → (request label, image index or None); a key is ``subject << 32 | position``."""

    golden: SideRows
    mine: SideRows
    names: dict[int, tuple[str, int | None]]
    flips: list[Flip]
    tokens_compared: int
    skipped: dict[str, int]
    images: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """vision subject → the text places it fills: (text subject, first position, placeholders)."""

    def name(self, key: int) -> tuple[str, int]:
        """(request label, position) of a key."""
        return self.names[key >> POSITION_BITS][0], key & POSITION_MASK

    def lines(self) -> list[str]:
        """The plan in sentences: tokens compared, requests that flip, rows left out and why."""
        lines = [f"tokens: {self.tokens_compared} sampled tokens compared, {len(self.flips)} requests flip"]
        return lines + [f"rows: {n} {what} left out" for what, n in self.skipped.items() if n]


def make_key(subject_id: int, pos: int) -> int:
    """One integer for a row: the subject (a request, or one of its images) above, the position below."""
    return (subject_id << POSITION_BITS) | pos


def align_rows(golden: Any, mine: Any, plan: RequestPlan, sampled: tuple[Sampled, Sampled]) -> TokenPlan:
    """Names every row of two dumps (their ``requests`` and ``rows``), and finds which of them may be compared."""
    subjects, names, images = _Subjects.of(plan)
    raw = [_side(dump, subjects[i], sampled[i]) for i, dump in enumerate((golden, mine))]
    flips, compared = _flips(plan, raw[0].accepted, raw[1].accepted)
    skipped = {SUPERSEDED: 0, AFTER_FLIP: 0}
    limits = {f.pair: f.position for f in flips}
    sides = [_finish(r, limits, skipped) for r in raw]
    return TokenPlan(sides[0], sides[1], names, flips, compared, skipped, images)


@dataclass
class _Subjects:
    """Numbers for what rows belong to: shared by both dumps for paired requests and equal images."""

    text: dict[Any, int]
    vision: dict[tuple[Any, int], int]

    @staticmethod
    def of(plan: RequestPlan) -> tuple[list[_Subjects], dict[int, tuple[str, int | None]], dict[int, list[Any]]]:
        names: dict[int, tuple[str, int | None]] = {}
        sides = [_Subjects({}, {}), _Subjects({}, {})]
        for i, (g, m, _) in enumerate(plan.pairs):  # pair i is subject i: flips rely on it
            sides[0].text[identity(g)] = sides[1].text[identity(m)] = i
            names[i] = (m.id, None)
        for side, left in zip(sides, (plan.only_golden, plan.only_mine), strict=True):
            for r in left:
                names[len(names)] = (r.id, None)
                side.text[identity(r)] = len(names) - 1
        hashes = [{im.hash for r in rs for im in r.images if im.hash} for rs in _all(plan)]
        shared: dict[Any, int] = {}
        fills: dict[int, list[Any]] = defaultdict(list)
        for side, requests in zip(sides, _all(plan), strict=True):
            for r in requests:
                text = side.text[identity(r)]
                for k, im in enumerate(r.images):
                    what: Any = im.hash if im.hash in hashes[0] & hashes[1] else (text, k)
                    if what not in shared:
                        shared[what] = len(names)
                        names[len(names)] = (r.id, k)
                    side.vision[(identity(r), k)] = shared[what]
                    fills[shared[what]].append((text, im.pos, im.n))
        return sides, names, dict(fills)


def _all(plan: RequestPlan) -> tuple[list[Request], list[Request]]:
    golden = [g for g, _, _ in plan.pairs] + plan.only_golden
    mine = [m for _, m, _ in plan.pairs] + plan.only_mine
    return golden, mine


@dataclass
class _Numbering:
    spaces: dict[Space, Numbered]
    cells: dict[int, Cell]
    accepted: Accepted
    drafts: dict[Space, np.ndarray]


def _side(dump: Any, subjects: _Subjects, sampled: Sampled) -> _Numbering:
    cells, members = find_cells(dump)
    spaces: dict[Space, Any] = {}
    drafts: dict[Space, np.ndarray] = {}
    for (rank, step, name), space in sorted(dump.rows.items(), key=lambda item: (item[0][1], item[0][0], item[0][2])):
        where = (own_cell(rank) if DEALT in name else cells[rank], step, name)
        # A few bytes of a journal can claim any number of rows; only ids, one each, show that they were really there.
        if where not in spaces and space.n <= max(len(space.ids), _UNPROVEN_ROWS):
            spaces[where] = _number(dump, rank, space, subjects)
            drafts[where] = _drafts(space)
    text = subjects.text
    lengths = {text[identity(r)]: r.prompt_len for r in dump.requests.values() if identity(r) in text}

    def of_cell(cell: Cell, step: int) -> np.ndarray | None:
        return next((t for t in (sampled(rank, step) for rank in members[cell]) if t is not None), None)

    return _Numbering(spaces, cells, accepted_tokens(spaces, of_cell, lengths), drafts)


def find_cells(dump: Any) -> tuple[dict[int, Cell], dict[Cell, list[int]]]:
    """Ranks that computed the same rows (tensor and pipeline parallel) share a cell; data-parallel ones do not."""
    maps: dict[int, dict[tuple[int, str], Any]] = {rank: {} for rank in dump.ranks}
    for (rank, step, name), space in dump.rows.items():
        if DEALT not in name:
            maps[rank][(step, name)] = _canonical(dump, rank, space)
    cells: dict[int, Cell] = {}
    members: dict[Cell, list[int]] = {}
    for rank in sorted(maps):
        for cell, ranks in members.items():
            first = maps[ranks[0]]
            common = first.keys() & maps[rank].keys()
            if all(first[c] == maps[rank][c] for c in common) and (common or not first or not maps[rank]):
                cells[rank] = cell
                ranks.append(rank)
                break
        else:
            cells[rank] = len(members)
            members[cells[rank]] = [rank]
    return cells, members


def own_cell(rank: int) -> Cell:
    """The cell of what ``rank`` has for itself: images that were dealt to it, beside the rows that it shares."""
    return -1 - rank


def _canonical(dump: Any, rank: int, space: RowSpace) -> Any:
    who = [identity(dump.requests[(rank, s.req)]) if (rank, s.req) in dump.requests else s.req for s in space.segments]
    return tuple((w, s.pos, s.n, s.image) for w, s in zip(who, space.segments, strict=True))


def _number(dump: Any, rank: int, space: RowSpace, subjects: _Subjects) -> Numbered:
    """Keys, ids, decode flags, and for each row the index of the first row of its run of consecutive positions."""
    keys: list[np.ndarray] = []
    decode: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    at, previous = 0, (-1, -1)
    for s in space.segments:
        request = dump.requests.get((rank, s.req))
        if request is None:
            who = -1
        elif space.space.startswith("vision"):
            who = subjects.vision.get((identity(request), s.image or 0), -1)
        else:
            who = subjects.text.get(identity(request), -1)
        if who < 0 or s.pos < 0 or s.pos + s.n > POSITION_MASK:
            keys.append(np.full(s.n, -1, np.int64))  # a row of nobody: never compared
        else:
            keys.append((who << POSITION_BITS) + np.arange(s.pos, s.pos + s.n, dtype=np.int64))
        first = starts[-1][-1] if starts and previous == (s.req, s.pos) and s.n and len(starts[-1]) else at
        starts.append(np.full(s.n, first, np.int64))
        decode.append(np.full(s.n, s.phase == DECODE))
        at, previous = at + s.n, (s.req, s.pos + s.n)
    if not keys:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, np.int64)
    ids = np.array(space.ids, np.int64) if len(space.ids) == at else np.zeros(0, np.int64)
    return np.concatenate(keys), ids, np.concatenate(decode), np.concatenate(starts)


def _drafts(space: RowSpace) -> np.ndarray:
    """bool [n]: the row is a guess that its step verifies."""
    flags = np.zeros(sum(s.n for s in space.segments), bool)
    at = 0
    for s in space.segments:
        at += s.n
        flags[at - min(s.drafts or 0, s.n) : at] = True
    return flags


def _flips(plan: RequestPlan, golden: Accepted, mine: Accepted) -> tuple[list[Flip], int]:
    flips, compared = [], 0
    for pair, (g, _, _) in enumerate(plan.pairs):
        if pair not in golden or pair not in mine:
            continue
        positions, gi, mi = np.intersect1d(golden[pair][0], mine[pair][0], assume_unique=True, return_indices=True)
        gt, mt = golden[pair][1][gi], mine[pair][1][mi]
        made = positions >= g.prompt_len
        differ = np.flatnonzero(made & (gt != mt))
        if not len(differ):
            compared += int(made.sum())
            continue
        at = int(differ[0])
        p = int(positions[at])
        compared += int(made[: at + 1].sum())
        flips.append(Flip(pair, p - g.prompt_len + 1, p, make_key(pair, p - 1), int(gt[at]), int(mt[at])))
    return flips, compared


def _finish(raw: _Numbering, limits: dict[int, int], skipped: dict[str, int]) -> SideRows:
    """Decides which rows are kept: right token, last computation, before the flip."""
    valid = {w: valid_rows(keys, ids, starts, raw.accepted) for w, (keys, ids, _, starts) in raw.spaces.items()}
    by_name: dict[str, list[Space]] = defaultdict(list)
    for where in sorted(raw.spaces, key=lambda w: (w[1], w[0])):
        by_name[where[2]].append(where)
    # pair → first position that is not comparable
    first = np.full(max(limits, default=-1) + 1, POSITION_MASK, np.int64)
    for pair, at in limits.items():
        first[pair] = at
    rows: dict[Space, Rows] = {}
    for name, places in by_name.items():
        kept = last_rows([raw.spaces[w][0] for w in places], [valid[w] for w in places])
        keep = dict(zip(places, kept, strict=True))
        for where in places:
            keys, _, decode, _ = raw.spaces[where]
            dropped = int((~keep[where] & (keys >= 0)).sum())
            late = np.zeros(len(keys), bool)
            if limits and not name.startswith("vision"):
                who = subject(keys)
                flipped = (who >= 0) & (who < len(first))
                late[flipped] = position(keys[flipped]) >= first[who[flipped]]
            if name != "logits":  # the same rows once more
                rejected = int((~keep[where] & ~valid[where] & (keys >= 0) & raw.drafts[where]).sum())
                skipped[SUPERSEDED] += dropped - rejected
                if rejected:
                    skipped[REJECTED] = skipped.get(REJECTED, 0) + rejected
                skipped[AFTER_FLIP] += int((late & keep[where]).sum())
            rows[where] = Rows(keys, keep[where] & ~late, decode)
    return SideRows(rows, raw.cells)
