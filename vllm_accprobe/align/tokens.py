"""Which row of one dump is which row of the other: requests, the tokens they took, and row keys.

The problem: engines number requests as they arrive; batches, chunks, steps, speculation, preemption and prefix caches
differ between two runs of one prompt. The idea: a request is its prompt's hash, its adapter and, to tell twins apart,
its id, images and ordinal; pairs are made by the strictest rule that fits, and one id with two prompts is reported. A
row's name is (request, position), or (image, row) in a vision tower, packed into one int64. A row counts if its token
is the one that the request finally took there, and no later step computed it again; from the first token that differs
on, rows are not comparable. A `RowSet` is made once per step and compared by identity; `SampledHistory` is a request's
past. Not here: which rows of two tensors meet (comparison/plan/make_plan.py), names (names.py), ranks (ranks.py).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.record_table import of_sites
from vllm_accprobe.dump.schema import (
    DEALT,
    DECODE,
    LOGITS,
    OWN_REQUEST,
    PREFILL,
    TOKENS,
    Request,
    RowSpace,
    SamplingParameters,
)

_ByNumber = dict[tuple[int, int], Request]
Identity = tuple[str, str, str, int, str]


@dataclass(frozen=True)
class RequestPlan:
    """pairs: (golden, mine, rule); ``label`` names a pair in reports. different: one id, two prompts or adapters."""

    pairs: list[tuple[Request, Request, str]]
    only_golden: list[Request]
    only_mine: list[Request]
    different: list[tuple[Request, Request]]
    images_differ: list[tuple[Request, Request]] = field(default_factory=list)

    @property
    def rehashed(self) -> bool:
        """Whether images differ by their hashes in every request that has any, and in nothing else that is known of
        them: so it is where two releases hash one image in two ways."""
        both = [(g, m) for g, m, _ in self.pairs if g.images and m.images]
        return bool(both) and all(
            len(g.images) == len(m.images)
            and all(a.hash and b.hash and a.hash != b.hash and (a.pos, a.n) == (b.pos, b.n)
                    for a, b in zip(g.images, m.images, strict=True))
            for g, m in both
        )  # fmt: skip

    def lines(self) -> list[str]:
        rules: dict[str, int] = defaultdict(int)
        for _, _, rule in self.pairs:
            rules[rule] += 1
        lines = [f"requests: {n} paired by {rule}" for rule, n in rules.items()]
        for side, left in (("golden", self.only_golden), ("mine", self.only_mine)):
            if left:
                names = ", ".join(repr(r.id) for r in left[:5]) + (", ..." if len(left) > 5 else "")
                lines.append(f"requests: {len(left)} only in {side}: {names}")
        lines += [f"requests: {g.id!r} has {what_differs(g, m)}, not compared" for g, m in self.different]
        return lines


def what_differs(golden: Request, mine: Request) -> str:
    """Why two requests of one id are not one, in words: their prompts, or their adapters."""
    if (golden.prompt, golden.prompt_len) != (mine.prompt, mine.prompt_len):
        return "different prompt tokens"
    adapters = [repr(r.adapter[:80]) if r.adapter else "none" for r in (golden, mine)]
    return f"different adapters (golden {adapters[0]}, mine {adapters[1]})"


def identity(request: Request) -> Identity:
    """What makes lines of different ranks the same request."""
    return (request.internal_id, request.id, request.prompt, request.ordinal, request.adapter or "")


def distinct(requests: _ByNumber) -> list[Request]:
    """Each request once, in order of first appearance, whatever the number of ranks that saw it."""
    seen: dict[Identity, Request] = {}
    for key in sorted(requests, key=lambda k: (k[1], k[0])):
        seen.setdefault(identity(requests[key]), requests[key])
    return list(seen.values())


def pair_requests(golden: list[Request], mine: list[Request]) -> RequestPlan:
    """Pairs by id and prompt, then by prompt, images and ordinal, then prompt and ordinal, then prompt and order; the
    prompt with its adapter, and only then, in the same order, those of which one side knows no adapter."""
    pairs: list[tuple[Request, Request, str]] = []
    left = [[r for r in side if r.id != OWN_REQUEST] for side in (golden, mine)]

    def match(rule: str, key: Callable[[Request], Hashable]) -> None:
        waiting: dict[Any, list[Request]] = defaultdict(list)
        for g in left[0]:
            waiting[key(g)].append(g)
        rest: list[Request] = []
        for m in left[1]:
            found = waiting.get(key(m))
            if found:
                pairs.append((found.pop(0), m, rule))
            else:
                rest.append(m)
        taken = {id(g) for g, _, _ in pairs}
        left[0], left[1] = [g for g in left[0] if id(g) not in taken], rest

    rules: tuple[tuple[str, Callable[[Request], tuple[Hashable, ...]]], ...] = (
        ("id and prompt", lambda r: (r.id, r.prompt, r.prompt_len)),
        ("prompt, images and ordinal", lambda r: (r.prompt, r.prompt_len, _images(r), r.ordinal)),
        ("prompt and ordinal", lambda r: (r.prompt, r.prompt_len, r.ordinal)),
        ("prompt and order", lambda r: (r.prompt, r.prompt_len)),
    )
    for rule, key in rules:
        match(rule, lambda r, key=key: (*key(r), r.adapter))  # type: ignore[misc]
    if any(all(r.adapter is None for r in side) for side in (golden, mine)):
        for rule, key in rules:  # first to those that have none
            match(rule, lambda r, key=key: (*key(r), r.adapter or ""))  # type: ignore[misc]
        for rule, key in rules:
            match(rule, key)
    by_id = {r.id: r for r in left[0]}
    different = [(by_id[m.id], m) for m in left[1] if m.id in by_id]
    images = [(g, m) for g, m, _ in pairs if len(g.images) != len(m.images) or any(
        a.hash and b.hash and a.hash != b.hash for a, b in zip(g.images, m.images, strict=True))]  # fmt: skip
    order = {id(r): i for i, r in enumerate(golden)}
    pairs.sort(key=lambda p: order[id(p[0])])
    return RequestPlan(pairs, left[0], left[1], different, images)


def _images(request: Request) -> tuple[str, ...]:
    return tuple(i.hash for i in request.images)


MIXED = "mixed"
_MOST = 64
_NO_FLAGS = np.zeros(0, bool)


@dataclass(frozen=True, eq=False)
class RowSet:
    """keys: int64 [n], in the tensor's order. decode: bool [n], whether a row was decoded; [0] where it is not
    needed."""

    keys: np.ndarray
    decode: np.ndarray = field(default_factory=lambda: _NO_FLAGS)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def phase(self) -> str | None:
        if not len(self.decode):
            return None
        return DECODE if self.decode.all() else MIXED if self.decode.any() else PREFILL

    def only(self, mask: np.ndarray) -> RowSet:
        return RowSet(self.keys[mask])


NO_ROWS = RowSet(np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Union:
    """seen: the sorted rows of several sets, each once. place: int64 [n], where each row lies in ``seen``.
    distinct: whether all rows are different."""

    seen: RowSet
    place: np.ndarray
    distinct: bool


class Unions:
    """The last few unions that were requested."""

    def __init__(self) -> None:
        self._known: dict[tuple[RowSet, ...], Union] = {}
        self._same: dict[bytes, RowSet] = {}

    def of(self, sets: Sequence[RowSet]) -> Union:
        name = tuple(sets)
        if name not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[name] = self._make(name)
        return self._known[name]

    def _make(self, sets: tuple[RowSet, ...]) -> Union:
        every = np.concatenate([s.keys for s in sets]) if sets else NO_ROWS.keys
        if len(every) < 2 or (np.diff(every) > 0).all():
            seen, place = every, np.arange(len(every))
        else:
            seen, place = np.unique(every, return_inverse=True)
        if len(self._same) >= _MOST:
            self._same.clear()
        digest = hashlib.blake2b(seen.tobytes(), digest_size=16).digest()
        return Union(self._same.setdefault(digest, RowSet(seen)), place, len(seen) == len(every))


Numbered = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of one row space: keys, token ids (or none), decode flags, index of the first row of each row's run."""
Accepted = Mapping[int, tuple[np.ndarray, np.ndarray]]
"""Text subject → sorted positions and the tokens taken there."""
POSITION_BITS = 32
POSITION_MASK = (1 << POSITION_BITS) - 1


def subject(keys: np.ndarray) -> np.ndarray:
    return keys >> POSITION_BITS


def position(keys: np.ndarray) -> np.ndarray:
    return keys & POSITION_MASK


def accepted_tokens(
    spaces: Mapping[tuple[int, int, str], Numbered],
    sampled: Callable[[int, int], np.ndarray | None],
    prompt_len: Mapping[int, int],
) -> Accepted:
    """What each request took: what was sampled where that is recorded, else the last id seen there.

    spaces: by (cell, step, name), in order of steps; sampled: (cell, step) → token of each logits row, -1 for none;
    prompt_len: text subject → length of its prompt, whose tokens no sampling changes.
    """
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    for (_, _, name), (keys, ids, _, _) in spaces.items():
        if len(ids) and not name.startswith("vision"):
            seen.append((keys[keys >= 0], ids[keys >= 0]))
    for (cell, step, name), (keys, _, _, _) in spaces.items():
        tokens = sampled(cell, step) if name == "logits" else None
        if tokens is not None and len(tokens) == len(keys):
            lengths = np.array([prompt_len.get(int(k), 0) for k in subject(keys)], np.int64)
            real = (tokens >= 0) & (keys >= 0) & (position(keys) + 1 >= lengths)
            seen.append((keys[real] + 1, tokens[real].astype(np.int64)))
    if not seen:
        return {}
    keys, tokens = last_of_each(np.concatenate([k for k, _ in seen]), np.concatenate([t for _, t in seen]))
    if not len(keys):
        return {}
    accepted = {}
    edges = np.flatnonzero(np.diff(subject(keys), prepend=-1))
    for start, stop in zip(edges, [*edges[1:], len(keys)], strict=True):
        accepted[int(subject(keys[start : start + 1])[0])] = (position(keys[start:stop]), tokens[start:stop])
    return accepted


def last_of_each(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct keys, each with its last value."""
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    last = np.append(keys[1:] != keys[:-1], True) if len(keys) else np.zeros(0, bool)
    return keys[last], values[last]


def valid_rows(keys: np.ndarray, ids: np.ndarray, starts: np.ndarray, accepted: Accepted) -> np.ndarray:
    """bool [n]: the row holds the accepted token, and so does every row before it in its run."""
    valid = keys >= 0
    if not len(ids):
        return valid
    right = valid.copy()
    for who in np.unique(subject(keys[valid])):
        if int(who) in accepted:
            mask = valid & (subject(keys) == who)
            at, tokens = accepted[int(who)]
            where = np.searchsorted(at, position(keys[mask]))
            known = (where < len(at)) & (at[np.minimum(where, len(at) - 1)] == position(keys[mask]))
            right[mask] = ~known | (tokens[np.minimum(where, len(at) - 1)] == ids[mask])
    wrong_before = np.cumsum(~right)
    base = wrong_before[starts] - ~right[starts]
    return valid & (wrong_before - base == 0)


def last_rows(keys: Sequence[np.ndarray], valid: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For row spaces in order of time: of several valid rows with one key only the last is kept. bool, as ``keys``."""
    if not keys:
        return []
    every = np.concatenate(keys)
    index = np.flatnonzero(np.concatenate(valid))
    _, last = last_of_each(every[index], index)
    keep = np.zeros(len(every), bool)
    keep[last] = True
    return np.split(keep, np.cumsum([len(k) for k in keys])[:-1])


TokenIds = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""External id of a request → sorted positions and the ids there, both int64 [n]."""


def token_ids(dump: Any) -> TokenIds:
    """Of every request of ``dump`` (its ``requests`` and ``rows``) whose ids were recorded. Requests that share their
    external id and differ otherwise are left out: which of them is meant is not known."""
    found: dict[str, dict[Identity, list[tuple[np.ndarray, np.ndarray]]]] = defaultdict(lambda: defaultdict(list))
    for (rank, _, name), space in sorted(dump.rows.items(), key=lambda item: (item[0][1], item[0][0], item[0][2])):
        if name.startswith("vision") or len(space.ids) != sum(s.n for s in space.segments):
            continue
        ids = np.array(space.ids, np.int64)
        for s, rows in space.stretches():
            request = dump.requests.get((rank, s.req))
            if request is not None and s.n and s.pos >= 0:
                where = np.arange(s.pos, s.pos + s.n, dtype=np.int64)
                found[request.id][identity(request)].append((where, ids[rows]))
    one = {label: next(iter(by.values())) for label, by in found.items() if len(by) == 1}
    return {
        label: last_of_each(np.concatenate([p for p, _ in runs]), np.concatenate([i for _, i in runs]))
        for label, runs in one.items()
    }


_KINDS = 64
"""Chosen: requests of one step that are tried for a row of which another's parameters may have been taken."""
_SAMPLER, _TOKEN = "sampler", "output.token"


@dataclass(frozen=True, slots=True)
class SampledRow:
    """request: None where the journal does not name it. position: of the token whose row this is; generated: how many
    tokens of the answer are known by then, this one among them. prompt, output: as judge.sampling_rules.LogitsRow.
    drafts: whether its request has guesses in this step."""

    request: Request | None
    position: int
    generated: int
    prompt: np.ndarray | None
    output: np.ndarray | None
    drafts: bool

    @property
    def asks(self) -> SamplingParameters | None:
        return self.request.sampling if self.request is not None else None


def _put(seen: dict[int, list[tuple[np.ndarray, np.ndarray]]], space: RowSpace, ids: np.ndarray, on: int) -> None:
    """The tokens ``ids`` of the rows of a space; on: how far behind its row a token stands."""
    for s, rows in space.stretches():
        seen.setdefault(s.req, []).append((np.arange(s.pos + on, s.pos + on + s.n), ids[rows]))


def is_sampled_token(tap: str, role: str) -> bool:
    """Whether these tensors are the tokens that a sampler chose, of which later steps have a history."""
    return (tap, role) == (_SAMPLER, _TOKEN)


class SampledHistory:
    def __init__(self, dump: Any, rank: int):
        self._dump, self._rank = dump, rank
        self._tokens: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
        self._prompts: dict[int, np.ndarray | None] = {}
        self._requested: dict[int, tuple[tuple[SamplingParameters, np.ndarray | None], ...]] = {}

    def of(self, step: int, n: int) -> list[SampledRow]:
        """The rows of the logits of a step, in their order; [] where these are not ``n``."""
        space = self._dump.rows.get((self._rank, step, LOGITS))
        if space is None or space.n != n:
            return []
        return [found for at in range(n) if (found := self.row(step, at)) is not None]

    def asked(self, step: int) -> tuple[tuple[SamplingParameters, np.ndarray | None], ...]:
        """What the requests of a step require, with the distinct tokens of each one's prompt."""
        if step not in self._requested:
            space = self._dump.rows.get((self._rank, step, LOGITS))
            found: list[tuple[SamplingParameters, np.ndarray | None]] = []
            for req in dict.fromkeys(s.req for s in space.segments) if space is not None else ():
                request = self._dump.requests.get((self._rank, req))
                if request is not None and request.sampling is not None and len(found) < _KINDS:
                    found.append((request.sampling, self._prompt(req, request)))
            self._requested = {step: tuple(found)}
        return self._requested[step]

    def row(self, step: int, at: int) -> SampledRow | None:
        """The ``at``-th of them; None where there is none."""
        space = self._dump.rows.get((self._rank, step, LOGITS))
        for s in space.segments if space is not None else ():
            if 0 <= at < s.n:
                alone = s.n == 1 and sum(other.req == s.req for other in space.segments) == 1
                return self._row(s.req, s.pos + at, bool(s.drafts) or not alone)
            at -= s.n
        return None

    def _row(self, req: int, position: int, drafts: bool) -> SampledRow:
        request = self._dump.requests.get((self._rank, req))
        if request is None:
            return SampledRow(None, position, 0, None, None, drafts)
        generated = max(position + 1 - request.prompt_len, 0)
        output = self._between(req, request.prompt_len, position + 1)
        return SampledRow(request, position, generated, self._prompt(req, request), output, drafts)

    def _prompt(self, req: int, request: Request) -> np.ndarray | None:
        if req not in self._prompts:
            asks = request.sampling
            if asks is not None and asks.prompt is not None:
                found: np.ndarray | None = np.array(asks.prompt, np.int64)
            else:
                tokens = self._between(req, 0, request.prompt_len)
                found = None if tokens is None else np.unique(tokens)
            self._prompts[req] = found
        return self._prompts[req]

    def _between(self, req: int, start: int, stop: int) -> np.ndarray | None:
        """The tokens at positions start .. stop - 1; None where one is not known, or not for sure."""
        if stop <= start:
            return np.zeros(0, np.int64)
        if self._tokens is None:
            self._tokens = self._read()
        if req not in self._tokens:
            return None
        positions, tokens, sure = self._tokens[req]
        first = int(np.searchsorted(positions, start))
        span = slice(first, first + stop - start)
        if len(positions) < first + stop - start or positions[first] != start or positions[span][-1] != stop - 1:
            return None
        return tokens[span] if bool(sure[span].all()) else None

    def _read(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """By request: sorted distinct positions, their tokens, and whether all rows say the same."""
        seen: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for (rank, _, name), space in self._dump.rows.items():
            if rank == self._rank and name == TOKENS and len(space.ids) == space.n:
                _put(seen, space, np.array(space.ids, np.int64), 0)
        for r in of_sites(self._dump.records, lambda site: is_sampled_token(site.tap, site.role)):
            if r.rank != self._rank or r.step is None or r.payload is None:
                continue
            space = self._dump.rows.get((self._rank, r.step, LOGITS))
            if space is not None and (self._rank, r.step, TOKENS) not in self._dump.rows and r.shape == (space.n,):
                try:
                    _put(seen, space, np.asarray(self._dump.read(r), np.int64), 1)
                except (DumpError, OSError):
                    continue  # its tokens are not known
        found = {}
        for req, parts in seen.items():
            positions, tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.lexsort((tokens, positions))
            positions, tokens = positions[order], tokens[order]
            first = np.append(True, positions[1:] != positions[:-1])
            last = np.append(positions[1:] != positions[:-1], True)
            sure = (tokens[first] == tokens[last]) & (tokens[first] >= 0)
            found[req] = positions[first], tokens[first], sure
        return found


SUPERSEDED = "superseded rows (rejected drafts, recomputed rows)"
REJECTED = "rows of rejected drafts"
"""Distinguished where the capture says which rows are drafts."""
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
    """One dump's rows. ``cells``: rank → cell; the ranks of a cell computed the same rows. ``images``: (request, image)
    → vision subject."""

    rows: dict[Space, Rows]
    cells: dict[int, Cell]
    images: Mapping[tuple[Identity, int], int] = field(default_factory=dict)

    def of(self, rank: int, step: int, name: str) -> Rows | None:
        """The rows of a space that ``rank`` has."""
        return self.rows.get((own_cell(rank) if DEALT in name else self.cells.get(rank, 0), step, name))


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
        return self.names[key >> POSITION_BITS][0], key & POSITION_MASK

    def lines(self) -> list[str]:
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
    sides = [_finish(r, limits, skipped, s.vision) for r, s in zip(raw, subjects, strict=True)]
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
            who = (dump.requests.get((rank, s.req)) for s in space.segments)
            maps[rank][(step, name)] = tuple(
                (s.req if request is None else identity(request), s.pos, s.n, s.image)
                for request, s in zip(who, space.segments, strict=True)
            )
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
    """The cell of what ``rank`` has for itself: images that were distributed to it, next to the rows that it shares."""
    return -1 - rank


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
            keys.append(np.full(s.n, -1, np.int64))  # a row of no request: never compared
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
    for s, rows in space.stretches():
        flags[rows.stop - min(s.drafts or 0, s.n) : rows.stop] = True
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


def _finish(
    raw: _Numbering, limits: dict[int, int], skipped: dict[str, int], images: Mapping[tuple[Identity, int], int]
) -> SideRows:
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
    return SideRows(rows, raw.cells, images)
