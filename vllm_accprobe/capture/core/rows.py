"""Which row of a tensor is which token of which request, and the row map in the journal.

The problem: a serving engine mixes requests in one batch, cuts prompts into chunks, reuses cached prefixes, verifies
drafts and pads; a row has no name. The idea: at each step the runner knows the order of the requests and how many
tokens each computes, from which every row's (request, position) follows. Spaces hold this for tokens, for rows that
reach the logits, and for vision patches: which rows are kept, and what they are. Requests and token ordinals are
selected here, once per step, never per tensor. Token ids, and positions that speculation corrects, are read from the
runner's buffers when copies of them are in host memory; a position is believed only as far as it can be true.

Not here: where the runner keeps its batch (vllm/), what is done with the rows (session.py), the copies (staging.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.config import ProbeConfig, Ranges, in_ranges
from vllm_accprobe.dump.schema import (
    DEALT,
    DECODE,
    LOGITS,
    OWN_REQUEST,
    PADDING,
    PREFILL,
    TOKENS,
    Image,
    Request,
    RowSpace,
    SamplingParameters,
    Segment,
    hash_tokens,
)

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_FRONT = re.compile(r"^(cmpl|chatcmpl|generate-tokens|embd|resp|score|rerank|classify|pool)-(?=.)")


def external_ids(internal: str) -> tuple[str, ...]:
    """What a client may call the request that the engine calls ``internal``; the shortest, best one last.

    vLLM makes ``cmpl-<X-Request-Id>-<prompt index>-<8 random hex>`` of a completion and
    ``chatcmpl-<X-Request-Id>-<8 random hex>`` of a chat; ``generate-tokens-...`` in the same way of /inference.
    """
    names = [internal]
    without = _SUFFIX.sub("", internal)
    if without != internal:
        names.append(without)
    front = _FRONT.match(without)
    if front:
        without = without[front.end() :]
        names.append(without)
        if front[1] not in ("chatcmpl", "generate-tokens") and without.endswith("-0"):
            names.append(without[:-2])
    return tuple(names)


PROMPTS = 1 << 16
"""Chosen: different prompts after which those that did not come again begin to be forgotten; each takes 0.1 KB."""


class Requests:
    """The requests that a rank has seen, by the engine's id: their numbers in the journal, prompts and images. A server
    runs for months: of a finished request only a hash of its prompt stays, until PROMPTS to 2 * PROMPTS others came."""

    def __init__(self, config: ProbeConfig):
        self._chosen: ProbeConfig | None = config
        self._by_id: dict[str, Request] = {}
        self._wanted: dict[str, bool] = {}
        self._rows: Mapping[str, Ranges] = {}
        self._positions: dict[str, Ranges] = {}
        self._named: set[int] = set()
        self._prompts: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._next = 0
        self.unsent: list[Request] = []

    def add(
        self, internal: str, prompt_ids: Sequence[int] | None, prompt_len: int, images: tuple[Image, ...] = (),
        adapter: str | None = None, embedded: Callable[[], str] | None = None, salt: str = "",
        sampling: Callable[[], SamplingParameters | None] | None = None,
    ) -> Request:  # fmt: skip
        """Registers a request the first time it is scheduled; a resumed one keeps its number. adapter, embedded, salt,
        sampling: as NewRequest has them."""
        known = self._by_id.get(internal)
        if known is not None:
            return known
        prompt = embedded() if embedded else hash_tokens(prompt_ids) if prompt_ids is not None else ""
        named = (external_ids(internal)[-1], internal, prompt, prompt_len)
        asks = sampling() if sampling is not None else None
        ordinal = self._ordinal(hash((prompt, adapter)))
        request = Request(self._next, *named, ordinal, images, adapter, salt or None, asks)
        self._next += 1
        self._by_id[internal] = request
        self._choose(internal, request)
        return request

    def _ordinal(self, prompt: int) -> int:
        """How often this prompt has come before."""
        if len(self._prompts) >= PROMPTS:
            self._prompts, self._older = {}, self._prompts
        ordinal = self._prompts.get(prompt) or self._older.get(prompt, 0)
        self._prompts[prompt] = ordinal + 1
        return ordinal

    def aim(self, config: ProbeConfig | None, rows: Mapping[str, Ranges] | None = None) -> None:
        """Other settings choose from now on, also among the requests that are known; None: no request is chosen.
        rows: by a request's external id, the only positions that are kept."""
        self._chosen, self._named = config, self._named - {request.req for request in self.unsent}
        self._rows, self._positions = rows or {}, {}
        self.unsent.clear()
        for internal, request in self._by_id.items():
            self._choose(internal, request)

    def _choose(self, internal: str, request: Request) -> None:
        names = external_ids(internal)
        wanted = self._chosen is not None and OWN_REQUEST not in names and self._chosen.wants_request(*names)
        self._wanted[internal] = wanted
        if self._rows and (positions := next((self._rows[name] for name in names if name in self._rows), ())):
            self._positions[internal] = positions
        if wanted and request.req not in self._named:  # the others leave no trace on the disk, not even a hash
            self._named.add(request.req)
            self.unsent.append(request)

    def get(self, internal: str) -> Request | None:
        """The request of vLLM's own id, or None once it was forgotten."""
        return self._by_id.get(internal)

    def wanted(self, internal: str) -> bool:
        """Whether the settings choose this request; False for one that is not known."""
        return self._wanted.get(internal, False)

    def positions(self, internal: str) -> Ranges:
        """The only positions of this request that are kept; () for all."""
        return self._positions.get(internal, ())

    def forget(self, internal: str) -> None:
        """Frees what a finished request holds; its number is never used again. One that no step was taken of is not
        named any more: where no further step is chosen, they would wait for it in ever greater number."""
        request = self._by_id.pop(internal, None)
        self._wanted.pop(internal, None)
        self._positions.pop(internal, None)
        if request is not None:
            self._named.discard(request.req)
            self.unsent[:] = [one for one in self.unsent if one is not request]


RowForm = tuple[Any, ...]


@dataclass
class Space:
    """The rows of one kind in one step. ``ranges`` are the kept [start, stop) of the tensor's row dimension.

    src: rows the model computed for real; padded: rows its tensors may have; whole: every one of them is kept.
    ids, positions: tensors with one number per token row (tokens space only); token_rows: the token row of each kept
    row of another space (logits). floors: by request number, the lowest position that its rows may turn out to have
    where the scheduler guessed with drafts; empty where the scheduler's positions are exact.
    """

    name: str
    src: int
    padded: int
    ranges: list[tuple[int, int]]
    segments: list[Segment]
    n: int = 0
    whole: bool = False
    announced: bool = False
    ids: Any = None
    positions: Any = None
    token_rows: list[int] = field(default_factory=list)
    floors: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n = sum(stop - start for start, stop in self.ranges)
        self.whole = self.n == self.src

    def form(self) -> RowForm:
        """All that decides which rows of a tensor are kept, whoever they are."""
        return self.src, self.padded, tuple(self.ranges)


@dataclass(frozen=True)
class Scheduled:
    """One request's part of a step, in row order: ``n`` tokens from position ``start``; ``drafts`` of them are guesses.

    known: tokens known before this step (prompt and outputs): a chunk that ends earlier yields no token.
    """

    internal: str
    start: int
    n: int
    drafts: int = 0
    known: int | None = None


def kept(
    config: ProbeConfig, start: int, n: int, prompt_len: int, positions: Ranges = ()
) -> list[tuple[int, int, str]]:
    """The parts [offset, stop, phase] of rows at positions start .. start+n-1 whose token ordinal is selected.

    The ordinal is 0 for positions of the prompt and ``position - prompt_len + 1`` after it. positions: of those, the
    only ones; () for all.
    """
    if positions:
        return [
            (max(first, low - start), min(stop, high + 1 - start), phase)
            for first, stop, phase in kept(config, start, n, prompt_len)
            for low, high in positions
            if max(first, low - start) < min(stop, high + 1 - start)
        ]
    parts: list[tuple[int, int, str]] = []
    inside = min(max(prompt_len - start, 0), n)
    if inside and in_ranges(config.tokens, 0):
        parts.append((0, inside, PREFILL))
    if not config.tokens:
        if inside < n:
            parts.append((inside, n, DECODE))
        return parts
    offset = inside
    while offset < n:
        if in_ranges(config.tokens, start + offset - prompt_len + 1):
            stop = offset + 1
            while stop < n and in_ranges(config.tokens, start + stop - prompt_len + 1):
                stop += 1
            parts.append((offset, stop, DECODE))
            offset = stop
        else:
            offset += 1
    return parts


def wanted_at_all(config: ProbeConfig, requests: Requests, scheduled: Sequence[tuple[str, int, int]]) -> bool:
    """Whether any row of (internal id, start, n) triples is selected: decides if a step is armed."""
    for internal, start, n in scheduled:
        request = requests.get(internal)
        if request is not None and requests.wanted(internal) and _kept(config, requests, internal, start, n):
            return True
    return False


def _kept(config: ProbeConfig, requests: Requests, internal: str, start: int, n: int) -> list[tuple[int, int, str]]:
    """`kept` of a request that is known."""
    request = requests.get(internal)
    assert request is not None
    return kept(config, start, n, request.prompt_len, requests.positions(internal))


def token_space(config: ProbeConfig, requests: Requests, batch: Sequence[Scheduled], padded: int) -> Space:
    """The rows of every tensor that has one row per scheduled token."""
    ranges: list[tuple[int, int]] = []
    segments: list[Segment] = []
    row = 0
    for part in batch:
        request = requests.get(part.internal)
        if request is not None and requests.wanted(part.internal):
            for run in _kept(config, requests, part.internal, part.start, part.n):
                _extend(ranges, row + run[0], row + run[1])
                segments.append(_segment(request.req, part.start, row, run, part.n - part.drafts))
        row += part.n
    return Space(TOKENS, row, max(padded, row), ranges, segments)


def logits_space(config: ProbeConfig, requests: Requests, batch: Sequence[Scheduled]) -> Space:
    """The rows that reach the logits: the last token of each request, and with drafts the last ``drafts + 1``.

    A chunk that does not complete its prompt is sampled by the engine and thrown away; its row is not kept.
    """
    ranges: list[tuple[int, int]] = []
    segments: list[Segment] = []
    token_rows: list[int] = []
    row = token = 0
    for part in batch:
        rows = part.drafts + 1
        request = requests.get(part.internal)
        end = part.start + part.n
        complete = part.known is None or end >= part.known
        if request is not None and requests.wanted(part.internal) and complete:
            begin = end - rows
            for first, stop, phase in _kept(config, requests, part.internal, begin, rows):
                _extend(ranges, row + first, row + stop)
                segments.append(_segment(request.req, begin, row, (first, stop, phase), 1))
                token_rows += range(token + part.n - rows + first, token + part.n - rows + stop)
        row += rows
        token += part.n
    return Space(LOGITS, row, row, ranges, segments, token_rows=token_rows)


@dataclass(frozen=True)
class EncoderItem:
    """One multi-modal item that the encoder computes in this step."""

    internal: str
    index: int
    modality: str
    placeholders: int


@dataclass(frozen=True)
class ItemRun:
    """``n`` placeholders of ``item`` from its ``first`` on; an item of None is padding, whose rows are of no
    request."""

    item: EncoderItem | None
    first: int
    n: int


@dataclass(frozen=True)
class EncoderDataParallel:
    """What one rank computes of a step's distributed items. number: of the call in the step, from 1; runs: in the order
    of its rows, None where it is not known."""

    number: int
    runs: tuple[ItemRun, ...] | None


def vision_space(config: ProbeConfig, requests: Requests, items: Sequence[EncoderItem], rows: int) -> Space | None:
    """The rows of a vision tensor with ``rows`` rows over ``items``, or None if they cannot be distinguished.

    A tower computes k rows for each placeholder token (patches before merging, one after), or one row per image.
    Rows within an image are counted from 0 in the tower's own order, which depends on the image's grid only.
    """
    return _vision(config, requests, [ItemRun(item, 0, item.placeholders) for item in items], rows)


def share_space(config: ProbeConfig, requests: Requests, share: EncoderDataParallel, rows: int) -> Space | None:
    """The rows of a vision tensor on a rank that computes ``share``: as vision_space, and its name ends with ``#`` and
    the number of the call. Rows of an image that is cut are counted from where the image begins."""
    space = None if share.runs is None else _vision(config, requests, share.runs, rows)
    if space is not None:
        space.name += f"{DEALT}{share.number}"
    return space


def _vision(config: ProbeConfig, requests: Requests, runs: Sequence[ItemRun], rows: int) -> Space | None:
    total = sum(run.n for run in runs)
    if not total or not rows:
        return None
    whole = all(run.item is not None and run.n == run.item.placeholders for run in runs)
    if rows % total == 0:
        k = rows // total
        name, counts = f"vision/{k}", [(run.first * k, run.n * k) for run in runs]
    elif whole and rows == len(runs):
        name, counts = "vision/image", [(0, 1) for _ in runs]
    elif whole and rows == total + len(runs):  # one class token per image in front
        name, counts = "vision/class", [(0, run.n + 1) for run in runs]
    elif total % rows == 0:
        k = total // rows
        if any(run.n % k or run.first % k for run in runs):
            return None
        name, counts = f"vision/1:{k}", [(run.first // k, run.n // k) for run in runs]
    else:
        return None
    ranges: list[tuple[int, int]] = []
    segments: list[Segment] = []
    row = 0
    chosen = in_ranges(config.tokens, 0)
    for run, (first, count) in zip(runs, counts, strict=True):
        item = run.item
        request = None if item is None else requests.get(item.internal)
        if chosen and item is not None and request is not None and requests.wanted(item.internal):
            _extend(ranges, row, row + count)
            segments.append(Segment(request.req, first, count, row, PREFILL, item.index))
        row += count
    return Space(name, row, row, ranges, segments)


def _segment(req: int, start: int, row: int, run: tuple[int, int, str], sure: int) -> Segment:
    """Of a request's rows behind position ``start`` and tensor row ``row`` those of ``run``, [first, stop, phase]; from
    the request's row ``sure`` on they are drafts."""
    first, stop, phase = run
    return Segment(req, start + first, stop - first, row + first, phase, drafts=max(stop - max(first, sure), 0) or None)


def _extend(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))


Finish = Callable[[Sequence[torch.Tensor]], RowSpace]


class RowMaps:
    """The row maps of one rank. What ``of`` returns is finished on one thread, in the order of the calls."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._positions: list[int] = []
        self.disbelieved = 0
        """Segments whose positions the runner gave otherwise than can be."""

    def new_step(self) -> None:
        """Forgets the last step's tokens; in its place among the finished ones."""
        self._ids = []
        self._positions = []

    def of(self, step: int, space: Space) -> tuple[list[torch.Tensor], Finish]:
        """The tensors whose values the line needs (ids and positions: integers, [token rows]), and what makes the
        row map of their copies in host memory."""
        name, src_rows = space.name, space.src
        segments, ranges, token_rows = list(space.segments), list(space.ranges), list(space.token_rows)
        floors = dict(space.floors)
        nobodys = space.n if name == PADDING else None
        found = [(name, tensor) for name in ("ids", "positions") if (tensor := getattr(space, name)) is not None]

        def finish(hosts: Sequence[torch.Tensor]) -> RowSpace:
            named = dict(zip((name for name, _ in found), hosts, strict=True))
            ids: list[int] = []
            if "ids" in named:
                self._ids = named["ids"].tolist()
                ids = [i for start, stop in ranges for i in self._ids[start:stop]]
            # Asynchronous speculation corrects positions on the device after the scheduler has guessed them.
            if "positions" in named:
                self._positions = named["positions"].tolist()
                rows = [s.row for s in segments]
            else:
                rows = _firsts(segments, token_rows)
            if token_rows and self._ids:
                ids = [self._ids[row] for row in token_rows]
            true = segments
            if rows and self._positions:
                true = [self._corrected(s, r, floors.get(s.req)) for s, r in zip(segments, rows, strict=True)]
            return RowSpace(step, name, src_rows, tuple(true), tuple(ids), nobodys)

        return [tensor for _, tensor in found], finish

    def _corrected(self, segment: Segment, row: int, floor: int | None) -> Segment:
        """The segment where the runner's positions, from token row ``row`` on, say that it is.

        floor: the lowest position to which it may be corrected; None where the scheduler's is exact.
        """
        found = self._positions[row : row + segment.n]
        first = found[0] if found else -1
        if found == list(range(first, first + segment.n)):
            if first == segment.pos:
                return segment
            if floor is not None and floor <= first < segment.pos:
                return dataclasses.replace(segment, pos=first)
        if not self.disbelieved:
            say(
                f"the runner's positions are not the scheduler's ({first} and {segment.pos}, the first time): the "
                "scheduler's are taken; if rows seem to be others' in this dump, report this vLLM's version"
            )
        self.disbelieved += 1
        return segment


def _firsts(segments: Sequence[Segment], token_rows: Sequence[int]) -> list[int]:
    """The token row of each segment's first row; empty where the space's rows are no tokens."""
    if not token_rows:
        return []
    firsts, at = [], 0
    for segment in segments:
        firsts.append(token_rows[at])
        at += segment.n
    return firsts
