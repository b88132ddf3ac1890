"""The ledger of one engine: which request wrote what into which block of the cache, and whether it is still there.

The problem: a block that was written correctly may be read wrong: overwritten by another request, not written at all,
replaced by an older copy, changed without a known write. The idea: for each layer and block one number of its bytes
after the last write, and for each group and block who wrote it, when, which positions, and what happened to it since.
Before a read the bytes are compared with that number; where they differ, the ledger tells the cases apart. In host
memory the number is xxh3-64; on a device a sum of 32-bit words with odd weights modulo 2^64, which any one changed word
changes. Numbers of a device arrive later: everything that touches the ledger is a small function, called at once or
queued behind the copy it needs. One wrong block is wrong in every layer and step: findings are gathered by kind, block
and reader.

Not here: which blocks are read and written (schedule.py), the metadata (checks.py), who calls this (observer.py).
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from vllm_accprobe.capture.core.rows import external_ids
from vllm_accprobe.capture.states.checks import SLOTS, WrongNumber, metadata_checks, must_change, token_tails
from vllm_accprobe.capture.states.schedule import (
    COPIED,
    ENDED,
    KV,
    LOADED,
    REUSED,
    STATE,
    Schedule,
    ScheduledRequest,
    UnexpectedBlock,
)
from vllm_accprobe.capture.vllm.step_observer import EngineStep
from vllm_accprobe.dump.journal import CHANGED, FREED, LATE, MOST_FINDINGS, OTHER, STALE, UNWRITTEN, StateFinding

_LATE = 4
"""Steps after which a copy is no longer expected (chosen: asynchronous copies of a step are waited for in the next)."""
_EVENTS = 6
"""Events that are remembered of a block between two writes: the last ones."""


@dataclass(frozen=True)
class Mismatch:
    """Bytes that are not what was written. kind: in the words of dump/journal.py; layer: its number;
    other: a block of the same layer that has just these bytes, -1 for none; how: what is known of them."""

    kind: str
    layer: int
    block: int
    how: str
    other: int = -1


class GroupLedger:
    """Of the layers of one group.

    known, now, before: [layers, blocks]: whether there is a number; the number after the last write; the one before it.
    writer, step, low, high: [blocks]: who wrote last, when, and which positions, the last one included.
    """

    def __init__(self, layers: int, blocks: int):
        self.known = np.zeros((layers, blocks), bool)
        self.now = np.zeros((layers, blocks), np.uint64)
        self.before = np.zeros((layers, blocks), np.uint64)
        self.writer = np.full(blocks, -1, np.int64)
        self.step = np.full(blocks, -1, np.int64)
        self.low = np.full(blocks, -1, np.int64)
        self.high = np.full(blocks, -1, np.int64)
        self.events: dict[int, list[tuple[int, str]]] = {}
        self.source: dict[int, tuple[int, int]] = {}
        """By block: from which block, in which step it was copied last."""

    def assigned(self, blocks: np.ndarray, step: int) -> None:
        """Another request's from now on: nothing is expected of their bytes. Who wrote last is known still."""
        self.before[:, blocks] = self.now[:, blocks]
        self.known[:, blocks] = False
        for block in blocks.tolist():
            self.source.pop(block, None)
            if self.writer[block] >= 0:
                self.events[block] = [(step, REUSED)]

    def loaded(self, blocks: np.ndarray, step: int) -> None:
        """Something is to be brought into ``blocks`` from outside of the engine."""
        self.before[:, blocks] = self.now[:, blocks]
        self.known[:, blocks] = False
        self.writer[blocks] = -1
        for block in blocks.tolist():
            self.events[block] = [(step, LOADED)]

    def happened(self, blocks: Iterable[int], step: int, event: str) -> None:
        """An event, to be named if the bytes turn out to be others."""
        for block in blocks:
            events = self.events.setdefault(block, [])
            events.append((step, event))
            del events[:-_EVENTS]

    def copied(self, source: int, block: int, step: int) -> None:
        """``block`` must have the bytes of ``source`` when it is read next."""
        self.before[:, block] = self.now[:, block]
        self.known[:, block] = self.known[:, source]
        self.now[:, block] = self.now[:, source]
        for ledger in (self.writer, self.step, self.low, self.high):
            ledger[block] = ledger[source]
        self.source[block] = source, step
        self.events[block] = [(step, f"{COPIED} from block {source}")]

    def written_by(self, blocks: np.ndarray, request: int, step: int, low: int, high: int) -> None:
        """A request writes positions ``low`` to ``high`` into ``blocks``."""
        self.writer[blocks], self.step[blocks] = request, step
        self.low[blocks], self.high[blocks] = low, high
        for block in blocks.tolist():
            self.events.pop(block, None)

    def wrote(self, layer: int, blocks: np.ndarray, numbers: np.ndarray) -> list[Mismatch]:
        """The numbers of ``blocks`` after a write. Those that are as they were are stale, if the write must have
        changed them: nothing was written."""
        known = self.known[layer, blocks]
        same = known & (self.now[layer, blocks] == numbers)
        self.before[layer, blocks] = np.where(known, self.now[layer, blocks], self.before[layer, blocks])
        self.now[layer, blocks] = numbers
        self.known[layer, blocks] = True
        if not same.any():
            return []
        how = "the write left the block's bytes as they were"
        return [Mismatch(STALE, layer, int(block), how) for block in blocks[same]]

    def read(self, layer: int, blocks: np.ndarray, numbers: np.ndarray) -> list[int]:
        """Indices of those whose bytes are not what was written. What was unknown is known from now on."""
        known = self.known[layer, blocks]
        if known.all():
            return np.flatnonzero(self.now[layer, blocks] != numbers).tolist()
        unknown = blocks[~known]
        self.now[layer, unknown] = numbers[~known]
        self.known[layer, unknown] = True
        return np.flatnonzero(known & (self.now[layer, blocks] != numbers)).tolist()

    def explain(self, layer: int, block: int, number: int, step: int = 0) -> Mismatch:
        """Why ``block`` has the bytes of ``number`` in ``step``; they are believed from now on, so that it is reported
        once."""
        found = np.uint64(number)
        moved = [what for _, what in self.events.get(block, ()) if what.startswith((COPIED, LOADED))]
        same = np.flatnonzero(self.known[layer] & ((self.now[layer] == found) | (self.before[layer] == found)))
        other = int(same[same != block][0]) if (same != block).any() else -1
        older = bool(self.before[layer, block] == found)
        source, copied = self.source.get(block, (-1, -1))
        if moved:
            kind = LATE
            how = "not yet those that were to come" if source >= 0 else "others by now"
            how = "those from before" if older else how
            how += f": {moved[-1]}"
        elif source >= 0 and source in same and step - copied <= _LATE:
            kind, how = LATE, f"those of block {source} again: its copy of step {copied} arrived behind a write"
        elif older:
            kind, how = STALE, "older than the last write"
        elif other >= 0:
            kind, how = OTHER, f"those of block {other}"
        else:
            kind, how = CHANGED, "of no request: no write is known that left them"
        self.before[layer, block] = self.now[layer, block]
        self.now[layer, block] = found
        return Mismatch(kind, layer, block, f"the bytes are {how}", other)


def picked(blocks: np.ndarray, step: int, layer: int, share: int) -> np.ndarray:
    """Of ``blocks`` those that are checked in this step and layer: one in ``share``, another one each step, so that
    after ``share`` steps all were; layers take different ones, so that steps cost the same."""
    return blocks[(blocks + step + layer) % share == 0]


class Findings:
    """The findings of one rank. write: takes each line's finding, when its step has ended."""

    def __init__(self, schedule: Schedule, write: Callable[[StateFinding], None]):
        self.schedule = schedule
        self.step = -1
        self.count = 0
        self.first: dict[int, str] = {}
        """By group, its first layer."""
        self._write = write
        self._open: dict[tuple[Any, ...], StateFinding] = {}

    def name(self, internal: str) -> str:
        """As the client calls a request."""
        return external_ids(internal)[-1]

    def number(self, number: int) -> str:
        """As the client calls the request of the ledger's ``number``; "" for none."""
        return self.name(self.schedule.names[number]) if number in self.schedule.names else ""

    def bytes(
        self, layer: Any, found: Mismatch, ledger: GroupLedger, reader: tuple[int, int] | None, step: int,
        how: str = "", size: int = 0, rows: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Bytes of a layer's block. reader: request's number and its column in the table, -1 where not known; rows: the
        positions, where it is not a whole block's."""
        number, column = reader or (-1, -1)
        low = column * size if column >= 0 and size else None
        high = None if low is None else low + size - 1
        low, high = rows or (low, high)
        text = how + found.how
        if found.other >= 0 and found.kind == "other":
            text += f", written last by request '{self.number(int(ledger.writer[found.other]))}'"
        self._add(
            (found.kind, layer.group, found.block, number, layer.part), layer.path,
            StateFinding(step, found.kind, self._cache(layer.group), layer.group, layer.path, 1, found.block,
                         self.number(number), text, None, low, high, **self._writer(ledger, found.block),
                         part=layer.part),
        )  # fmt: skip

    def wrong_number(self, group: int, wrong: WrongNumber, ledger: GroupLedger, layers: int, step: int) -> None:
        """A number of a group's metadata."""
        self._add(
            (wrong.kind, group, wrong.block, wrong.request, wrong.slot), "",
            StateFinding(step, wrong.kind, self._cache(group), group, "", layers, wrong.block, self.name(wrong.name),
                         wrong.how, wrong.slot, wrong.low, wrong.high, **self._writer(ledger, wrong.block),
                         first=self.first.get(group, "")),
        )  # fmt: skip

    def strange(
        self, strange: UnexpectedBlock, how: str, ledger: GroupLedger, layers: int, size: int, step: int
    ) -> None:
        """A block, or a run of blocks, that the schedule cannot mean."""
        low, last = strange.column * size, max(strange.last, strange.column)
        self._add(
            (strange.kind, strange.group, strange.block, strange.request.number), "",
            StateFinding(step, strange.kind, self._cache(strange.group), strange.group, "", layers, strange.block,
                         self.name(strange.request.name), how, None, low, (last + 1) * size - 1,
                         **self._writer(ledger, strange.block), first=self.first.get(strange.group, "")),
        )  # fmt: skip

    def owner(self, number: int, context: tuple[str, str]) -> str:
        """``request 'a' (adapter a1)``, for a sentence. context: (adapter, salt)."""
        name = self.number(number)
        adapter = f" (adapter {context[0]})" if context[0] else ""
        return f"request '{name}'{adapter}" if name else "an unknown request"

    def _writer(self, ledger: GroupLedger, block: int) -> dict[str, Any]:
        events = tuple(f"{what} in step {step}" for step, what in ledger.events.get(block, ()))
        writer = int(ledger.writer[block]) if 0 <= block < len(ledger.writer) else -1
        owner = int(self.schedule.taker[block]) if 0 <= block < len(self.schedule.taker) else -1
        if writer < 0 and owner >= 0 and not len(ledger.known):  # no bytes are watched: its owner writes it
            return {"writer": self.number(owner), "written": int(self.schedule.taken[block]), "between": events}
        if writer < 0:
            return {"between": events}
        return {
            "writer": self.number(writer), "written": int(ledger.step[block]), "wrote_low": int(ledger.low[block]),
            "wrote_high": int(ledger.high[block]), "between": events,
        }  # fmt: skip

    def _cache(self, group: int) -> str:
        return self.schedule.groups[group].kind

    def _add(self, key: tuple[Any, ...], layer: str, finding: StateFinding) -> None:
        known = self._open.get(key)
        if known is None:
            self._open[key] = finding
        elif layer and layer != known.layer:
            self._open[key] = dataclasses.replace(known, layers=known.layers + 1)

    def flush(self) -> None:
        """A step has ended: what it has found is written."""
        if not self._open:
            return
        found, self._open = list(self._open.values()), {}
        for one in found:
            self.count += 1
            if self.count <= MOST_FINDINGS:
                self._write(one)


_MOST_REGIONS = 8
"""Dense regions of one block: keys and values of a few tensors; more is a layout that is not known here."""
_SEED = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


class UnknownLayout(ValueError):
    """Where the bytes of a block are is not known; the message is a short reason, for a skip's line."""


@dataclass(frozen=True)
class Region:
    """One dense part of every block. address: of block 0, in bytes; stride: to the next block; nbytes: of each.

    tensor: int32 or uint8 words [blocks, words], a view of the cache where it is; None where it is not needed."""

    address: int
    stride: int
    nbytes: int
    tensor: torch.Tensor


class Pages:
    """The cache of one layer, block by block.

    Args:
        caches: the layer's tensors: each has as many blocks along one of its first two dimensions.
        blocks: of the scheduler. A kernel's blocks may be a whole fraction of one.

    Raises:
        UnknownLayout: no dimension counts blocks, or a block's bytes do not lie together.
    """

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int):
        self.blocks = blocks
        self.split = 1
        self.regions: list[Region] = []
        for cache in caches:
            self._add(cache)
        if not 1 <= len(self.regions) <= _MOST_REGIONS:
            raise UnknownLayout(f"its cache lies in {len(self.regions)} places")
        self.nbytes = sum(region.nbytes for region in self.regions)
        self.on_host = caches[0].device.type == "cpu"
        self._types = [ctypes.c_char * region.nbytes for region in self.regions]
        self._weights: dict[int, torch.Tensor] = {}

    def _add(self, cache: torch.Tensor) -> None:
        dim = next(
            (d for d in range(min(2, cache.dim())) if cache.shape[d] and cache.shape[d] % self.blocks == 0), None
        )
        if dim is None:
            raise UnknownLayout(f"no dimension of {tuple(cache.shape)} counts {self.blocks} blocks")
        view = cache.movedim(dim, 0)
        split = view.shape[0] // self.blocks
        self.split = max(self.split, split)
        self._dense(view.unflatten(0, (self.blocks, split)) if split > 1 else view)

    def _dense(self, view: torch.Tensor) -> None:
        """view: [blocks, ...], whose interior is dense, or is so without the dimension of its longest stride."""
        size, stride = view.element_size(), view.stride(0)
        numel = view[0].numel()
        if not numel:
            return
        span = 1 + sum((n - 1) * s for n, s in zip(view.shape[1:], view.stride()[1:], strict=True))
        if span == numel:
            start = view.untyped_storage().data_ptr() + view.storage_offset() * size
            nbytes = numel * size
            self.regions.append(Region(start, stride * size, nbytes, _words(view, stride, numel)))
            return
        outer = max(range(1, view.dim()), key=lambda d: view.stride(d))
        if view.shape[outer] > _MOST_REGIONS or len(self.regions) > _MOST_REGIONS:
            raise UnknownLayout(f"a block of {tuple(view.shape[1:])} with strides {view.stride()[1:]} is not dense")
        for i in range(view.shape[outer]):
            self._dense(view.select(outer, i))

    def hashes(self, blocks: np.ndarray) -> np.ndarray:
        """xxh3-64 of each of ``blocks``, int [n] → uint64 [n]. In host memory only."""
        digest = xxhash.xxh3_64_intdigest
        out = np.empty(len(blocks), np.uint64)
        (first, kind), *more = zip(self.regions, self._types, strict=True)
        at, stride, of = first.address, first.stride, kind.from_address
        if not more:
            out[:] = [digest(of(at + b * stride)) for b in blocks.tolist()]
            return out
        for i, b in enumerate(blocks.tolist()):
            hasher = xxhash.xxh3_64(of(at + b * stride))
            for region, other in more:
                hasher.update(other.from_address(region.address + b * region.stride))
            out[i] = hasher.intdigest()
        return out

    def sums(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """The number of each of ``blocks``, int64 [n], into ``out``, int64 [n], both where the cache is. Launches
        kernels and waits for none; words by their `odd_weights`, modulo 2**64, over the regions one after the other."""
        out.zero_()
        begin = 0
        for region in self.regions:
            words = region.tensor.index_select(0, blocks)
            weights = self._weights.get(begin)
            if weights is None:
                made = torch.from_numpy(odd_weights(begin, words.shape[1]).view(np.int64))
                weights = self._weights[begin] = made.to(words.device)
            out.add_((words.to(torch.int64) * weights).sum(1))
            begin += words.shape[1]


def _words(view: torch.Tensor, stride: int, numel: int) -> torch.Tensor:
    """The dense blocks of ``view`` as [blocks, words]; words are int32 where sizes and places allow, else bytes."""
    size = view.element_size()
    flat = view.as_strided((view.shape[0], numel), (stride, 1), view.storage_offset())
    fits = all(n * size % 4 == 0 for n in (numel, stride, view.storage_offset()))
    kind = torch.int32 if fits else torch.uint8
    if size == 1 or kind is torch.uint8 or size >= 4:
        return flat.view(kind) if flat.dtype != kind else flat
    return flat.view(kind)


def odd_weights(begin: int, n: int) -> np.ndarray:
    """Weights of words ``begin`` to ``begin + n``: odd, uint64 [n]: splitmix64's steps, which spread well [G. Steele,
    D. Lea, C. Flood, OOPSLA 2014]."""
    z = np.arange(begin + 1, begin + n + 1, dtype=np.uint64) * np.uint64(_SEED)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def tensors_of(cache: Any) -> list[torch.Tensor]:
    """A layer's ``kv_cache`` as a list: a tensor, or a tuple or list of them (older releases: one per engine)."""
    found = list(cache) if isinstance(cache, (tuple, list)) else [cache]
    return [one for one in found if isinstance(one, torch.Tensor) and one.numel()]


_SLOTS = 1 << 16
"""Numbers of one step that may be on their way, 8 bytes each; what does not fit is counted and not checked."""
_STEPS = 4
"""Steps that may be on their way before one is waited for."""


class Arrivals:
    """The queue of one engine. device: where its caches are; None or a CPU: nothing is queued."""

    def __init__(self, device: torch.device | None = None, staged: bool = False):
        self.direct = not staged and (device is None or device.type == "cpu")
        self.lost = 0
        self._device = device or torch.device("cpu")
        self._now: list[Callable[[], None]] = []
        self._waiting: deque[tuple[Any, list[Callable[[], None]]]] = deque()
        self._rings: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._turn = self._used = 0

    def do(self, what: Callable[[], None]) -> None:
        """Calls ``what`` when everything before it has been done."""
        if self.direct:
            what()
        else:
            self._now.append(what)

    def hashes(self, pages: Pages, blocks: np.ndarray, take: Callable[[np.ndarray], None]) -> None:
        """Gives ``take`` the number of each of ``blocks`` as they are now, uint64 [n]."""
        if self.direct:
            take(pages.hashes(blocks))
            return
        n = len(blocks)
        if self._used + n > _SLOTS:
            self.lost += n
            return
        numbers, host = self._ring()
        part = slice(self._used, self._used + n)
        self._used += n
        at = torch.from_numpy(np.ascontiguousarray(blocks, np.int64))
        if self._device.type != "cpu":
            at = at.pin_memory().to(self._device, non_blocking=True)
        pages.sums(at, numbers[part])
        self._now.append(lambda: take(host[part].numpy().view(np.uint64)))

    def bring(self, tensors: Sequence[torch.Tensor], take: Callable[[Sequence[np.ndarray]], None]) -> None:
        """Gives ``take`` small integer tensors as they are now."""
        if self.direct or all(one.device.type == "cpu" for one in tensors):
            take([one.numpy() for one in tensors]) if self.direct else self._keep(tensors, take)
            return
        hosts = [one.detach().clone().to("cpu", non_blocking=True) for one in tensors]
        self._now.append(lambda: take([one.numpy() for one in hosts]))

    def _keep(self, tensors: Sequence[torch.Tensor], take: Callable[[Sequence[np.ndarray]], None]) -> None:
        kept = [one.numpy().copy() for one in tensors]
        self._now.append(lambda: take(kept))

    def _ring(self) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._rings) <= self._turn:
            pinned = self._device.type != "cpu"
            here = torch.zeros(_SLOTS, dtype=torch.int64, device=self._device)
            self._rings.append((here, torch.zeros(_SLOTS, dtype=torch.int64, pin_memory=pinned)))
        return self._rings[self._turn]

    def end_step(self) -> None:
        """What this step has queued is copied; earlier steps that have arrived are worked off."""
        if self.direct:
            return
        if self._now:
            event = None
            if self._used:
                numbers, host = self._ring()
                host[: self._used].copy_(numbers[: self._used], non_blocking=True)
            if self._device.type != "cpu":
                event = torch.get_device_module(self._device).Event()
                event.record()
            self._waiting.append((event, self._now))
            self._now, self._used = [], 0
            self._turn = (self._turn + 1) % (_STEPS + 1)
        while self._waiting and (len(self._waiting) > _STEPS or self._arrived(self._waiting[0][0])):
            self._work_off()

    def close(self) -> None:
        """Waits for what is on its way."""
        self.end_step()
        while self._waiting:
            self._work_off()

    @staticmethod
    def _arrived(event: Any) -> bool:
        return event is None or bool(event.query())

    def _work_off(self) -> None:
        event, todo = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        for what in todo:
            what()


OWNERS, EVENTS, FULL = "owners", "events", "full"
SHARE = 16
"""Of blocks that nothing happened to, one in so many is checked in a step (chosen: each is seen every 16 steps, and
the cost is a sixteenth of the read traffic; benchmarks/bench_states.py)."""
_EMPTY = np.empty(0, np.int64)
Again = Callable[[int, np.ndarray, np.ndarray], "bool | None"]
"""(block, rows, slots within it) → whether the block holds what those rows leave there; None where it cannot be
determined."""


@dataclass
class GroupStep:
    """What a step does with one group. reads, writes: blocks, each once; always: of the reads those that are all
    checked; readers: by block, (request's number, column); spans: (blocks, number, first, last position) by request.
    tails: of a group of states, see checks.py, once they are known."""

    reads: np.ndarray = field(default_factory=lambda: _EMPTY)
    writes: np.ndarray = field(default_factory=lambda: _EMPTY)
    always: np.ndarray = field(default_factory=lambda: _EMPTY)
    readers: dict[int, tuple[int, int]] = field(default_factory=dict)
    spans: list[tuple[np.ndarray, int, int, int]] = field(default_factory=list)
    tails: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """A layer with a cache, or one state of a recurrent layer, which is then named by ``part``. number: among those of
    its group."""

    path: str
    group: int
    number: int
    pages: Pages
    part: str = ""


class ByteChecks:
    """See above. now: the step's plan by group, None outside of a step; batch: its requests in the order of rows."""

    def __init__(
        self, schedule: Schedule, ledger: Sequence[GroupLedger], mode: str, findings: Findings, arrivals: Arrivals
    ):
        self.schedule, self.ledger, self.mode = schedule, ledger, mode
        self.findings, self.arrivals = findings, arrivals
        self.hashed = self.checked = 0
        self.memory: dict[int, int] = {}
        """By group of states, how many tokens must be known to tell that one must change; none: it cannot be
        determined."""
        self.unseen: Counter[str] = Counter()
        self.now: list[GroupStep] | None = None
        self.batch: list[ScheduledRequest] = []
        self.step = -1

    def enters(self, layer: Layer) -> None:
        """``layer`` is about to write and to read."""
        now = self.now
        if now is None or self.mode == OWNERS:
            return
        group = now[layer.group]
        if len(group.always) or self.mode != EVENTS:
            self.check(layer, self.chosen(layer, group), group.readers)

    def chosen(self, layer: Layer, group: GroupStep) -> np.ndarray:
        if self.mode == FULL:
            return group.reads
        if self.mode == EVENTS:
            return group.always
        some = picked(group.reads, self.step, layer.number, SHARE)
        return np.union1d(some, group.always) if len(group.always) else some

    def wrote(self, layer: Layer, again: Again | None = None) -> None:
        """``layer`` has written its rows, or its states. again: tries the rows of one block once more, elsewhere.

        A write that leaves a block as it was is stale, or the bytes were there already, of an earlier life of the
        block with the same tokens. Where it cannot be determined, it is counted.
        """
        now = self.now
        if now is None or self.mode == OWNERS or not len(now[layer.group].writes):
            return
        group = now[layer.group]
        blocks = group.writes
        ledger, changes = self.ledger[layer.group], self.schedule.groups[layer.group].kind == KV
        self.hashed += len(blocks)
        step, mine = self.step, group.spans

        def take(numbers: np.ndarray) -> None:
            same = ledger.wrote(layer.number, blocks, numbers)
            if not changes:
                self._unwritten(layer, group, [one.block for one in same], step)
                return
            for found in same:
                there = again(*self._rows(layer.group, found.block)) if again is not None else None
                if there is None:
                    self.unseen["writes that changed nothing, and could not be tried again"] += 1
                elif not there:
                    self.findings.bytes(layer, found, ledger, _writer(mine, found.block), step)

        self.arrivals.hashes(layer.pages, blocks, take)

    def _unwritten(self, layer: Layer, group: GroupStep, blocks: Sequence[int], step: int) -> None:
        """States that a step left as they were, of those that it must have changed."""
        ledger = self.ledger[layer.group]
        for block in blocks:
            span = next((one for one in group.spans if block in one[0]), None)
            if span is not None and must_change(group.tails, span[1], self.memory.get(layer.group, 0)):
                n = span[3] - span[2] + 1
                chunk = f"{layer.part or 'state'} of step {step} was not written (chunk of {n} token{'s' * (n > 1)})"
                found = Mismatch(UNWRITTEN, layer.number, block, chunk)
                self.findings.bytes(layer, found, ledger, (span[1], -1), step, rows=(span[2], span[3]))

    def _rows(self, g: int, block: int) -> tuple[int, np.ndarray, np.ndarray]:
        """(block, rows of the step that are written there, their slots within the block)."""
        slots = np.concatenate([self.schedule.slots(g, one) for one in self.batch])
        size = self.schedule.groups[g].block_size
        rows = np.flatnonzero(slots // size == block)
        return block, rows, slots[rows] - block * size

    def leaves(self, layer: Layer) -> None:
        """``layer`` has read."""
        now = self.now
        if now is None or self.mode != FULL:
            return
        group = now[layer.group]
        self.check(layer, np.union1d(group.reads, group.writes), group.readers, how="while it was read: ")

    def check(
        self, layer: Layer, blocks: np.ndarray, readers: Mapping[int, tuple[int, int]], *, known_only: bool = False,
        how: str = "",
    ) -> None:  # fmt: skip
        if not len(blocks) or self.mode == OWNERS:
            return
        ledger, step = self.ledger[layer.group], self.step
        if known_only and self.arrivals.direct:
            blocks = blocks[ledger.known[layer.number, blocks]]
            if not len(blocks):
                return
        self.checked += len(blocks)
        size = self.schedule.groups[layer.group].block_size

        def take(numbers: np.ndarray) -> None:
            for i in ledger.read(layer.number, blocks, numbers):
                block = int(blocks[i])
                found = ledger.explain(layer.number, block, int(numbers[i]), step)
                reader = readers.get(block) or self._reader(layer.group, block)
                self.findings.bytes(layer, found, ledger, reader, step, how, size)

        self.arrivals.hashes(layer.pages, blocks, take)

    def _reader(self, g: int, block: int) -> tuple[int, int] | None:
        """Who reads a block that was checked as one of many."""
        for one in self.batch:
            columns = np.flatnonzero(one.tables[g] == block)
            if len(columns):
                return one.number, int(columns[0])
        return None


def _writer(spans: Sequence[tuple[np.ndarray, int, int, int]], block: int) -> tuple[int, int] | None:
    for blocks, number, _, _ in spans:
        columns = np.flatnonzero(blocks == block)
        if len(columns):
            return number, -1
    return None


_AGAIN = 2
"""Steps in which blocks that came from elsewhere are checked once more after their first read: a copy that ends after
the read ends within them (chosen: asynchronous copies of one step are waited for in the next)."""
_BACKENDS = frozenset((
    "cpu_attn", "flash_attn", "triton_attn", "mamba_attn", "mamba1_attn", "mamba2_attn", "gdn_attn", "linear_attn",
    "short_conv_attn",
))  # fmt: skip
"""vLLM's backends whose metadata mean what the scheduler decided, row by row and request by request (read in 0.32)."""


class BlockLedger:
    """See above. layers: by group. slack: see checks.metadata_checks. inside: each layer's moments are seen; else
    (graphs) what they read is checked before the forward, and what they wrote after it."""

    def __init__(
        self, schedule: Schedule, layers: Sequence[Sequence[Layer]], mode: str, findings: Findings, arrivals: Arrivals,
        *, slack: int = 0, inside: bool = True,
    ):  # fmt: skip
        self.schedule, self.layers, self.mode, self.findings = schedule, layers, mode, findings
        self.arrivals, self.slack, self.inside = arrivals, slack, inside
        blocks = len(schedule.gen)
        watched = mode != OWNERS
        self.groups = [GroupLedger(len(of) if watched else 0, blocks) for of in layers]
        self.bytes = ByteChecks(schedule, self.groups, mode, findings, arrivals)
        self.prefixes: list[tuple[ScheduledRequest, tuple[tuple[int, int, int], ...], str]] = []
        """Of this step: a request, its prefix in the cache as runs of (position, how many, whose number), and what is
        wrong with it."""
        self.strange_metadata: set[tuple[int, str]] = set()
        """(group, what) of metadata that were never right: their backend means something else by them."""
        self._right: set[tuple[int, str]] = set()
        self._names = [len({layer.path for layer in of}) for of in layers]
        findings.first = {g: of[0].path for g, of in enumerate(layers) if of}
        self.steps = self.held = 0
        self.events: Counter[str] = Counter()
        self._due: list[set[int]] = [set() for _ in layers]
        self._again: list[dict[int, int]] = [{} for _ in layers]

    def begin(self, step: EngineStep) -> None:
        """The scheduler has made ``step``; nothing of it has been done."""
        assert step.blocks is not None
        assert step.number is not None
        moves = step.blocks()
        self.bytes.step, self.bytes.now = step.number, None
        self.steps += 1
        self.findings.step = step.number
        self.ended(step.finished)
        starts = step.starts()
        before = self.schedule.gen.copy() if moves.tables or moves.more else self.schedule.gen
        new = {one.name: one for one in step.new}
        arrivals, fresh = self.schedule.begin(step.number, moves, step.counts, starts, new)
        if len(fresh):
            self._reused(np.unique(fresh[before[fresh] > 0]))
            for ledger in self.groups:
                self.arrivals.do(partial(ledger.assigned, fresh, self.bytes.step))
        for source, block in moves.copies:
            for g, ledger in enumerate(self.groups):
                self.arrivals.do(partial(ledger.copied, source, block, self.bytes.step))
                self._due[g].add(block)
                self._again[g][block] = self.bytes.step + _AGAIN
            self.events[COPIED] += 1
        wrong: dict[str, str] = {}
        for arrival in arrivals:
            if first_text := self._arrives(arrival):
                wrong.setdefault(arrival.request.name, first_text)
        for one in dict.fromkeys(a.request.name for a in arrivals if a.event != LOADED):
            self._prefix(self.schedule.requests[one], wrong.get(one, ""))
        self.bytes.batch = [self.schedule.requests[name] for name in step.counts]

    def _prefix(self, one: ScheduledRequest, why: str) -> None:
        """Whose rows a request finds in the cache."""
        owners = self.schedule.owners(one, one.start)
        if not len(owners) or (owners == one.number).all():
            return  # its own, after a preemption
        cuts = np.flatnonzero(np.diff(owners)) + 1
        begins = [0, *cuts.tolist()]
        runs = zip(begins, [*begins[1:], len(owners)], strict=True)
        self.prefixes.append((one, tuple((low, stop - low, int(owners[low])) for low, stop in runs), why))

    def ended(self, names: Sequence[str]) -> None:
        """Requests get no more rows; the last step's are computed."""
        for one in self.schedule.ended(names):
            self._ended(one)
        self.schedule.forget([ledger.writer for ledger in self.groups])

    def _ended(self, one: ScheduledRequest) -> None:
        """All its blocks are checked a last time, before others get it."""
        self.events[ENDED] += 1
        for g, table in enumerate(one.tables if self.mode != OWNERS else ()):
            columns = np.flatnonzero((table != 0) & (self.schedule.gen[table] == one.gens[g]))
            if self.schedule.groups[g].kind == STATE:
                columns = columns[-1 - self.schedule.groups[g].extra :]
            readers = {int(table[c]): (one.number, int(c)) for c in columns.tolist()}
            for layer in self.layers[g]:
                self.bytes.check(layer, table[columns], readers, known_only=True)

    def _reused(self, blocks: np.ndarray) -> None:
        """Blocks get another owner: has anybody written there since the last one did?"""
        if not len(blocks):
            return
        self.events[REUSED] += len(blocks)
        for layers in self.layers:
            for layer in layers:
                self.bytes.check(layer, blocks, {}, known_only=True)

    def _arrives(self, arrival: Any) -> str:
        """What is wrong with it, "" for nothing."""
        one, g = arrival.request, arrival.group
        blocks = one.tables[g][arrival.columns]
        self.events[arrival.event] += 1
        ledger, step = self.groups[g], self.bytes.step
        if arrival.event == LOADED:
            self.arrivals.do(partial(ledger.loaded, blocks, step))
            self._again[g].update(dict.fromkeys(blocks.tolist(), step + _AGAIN))
        else:
            event = f"{arrival.event} of request '{self.findings.name(one.name)}'"
            self.arrivals.do(partial(ledger.happened, blocks.tolist(), step, event))
        self._due[g].update(blocks.tolist())
        first_text = ""
        for strange in self.schedule.unexpected(arrival):
            how = self._hit(strange)
            first_text = first_text or how
            self._strange(strange, how)
        return first_text

    def _hit(self, strange: UnexpectedBlock) -> str:
        """``request 'b' (adapter a2) reads blocks 0-1 (positions 0 to 63), which request 'a' (adapter a1) wrote``."""
        size = self.schedule.groups[strange.group].block_size
        last = max(strange.column, strange.last)
        contexts, owner = self.schedule.contexts, self.findings.owner
        reader = owner(strange.request.number, contexts[strange.request.context])
        writer = owner(strange.taken, contexts[int(self.schedule.context[strange.block])])
        which = f"block {strange.column}" if last == strange.column else f"blocks {strange.column}-{last}"
        positions = f"positions {strange.column * size} to {min((last + 1) * size, strange.request.start) - 1}"
        did = "was assigned and has not filled" if strange.kind == STALE else "wrote"
        why = f" {'for' if strange.why == 'other positions' else 'with'} {strange.why}"
        more = "" if strange.kind == STALE or strange.why == "another adapter" else why
        return f"{reader} reads {which} ({positions}), which {writer} {did}{more}"

    def forward(self, names: Sequence[str], metadata_of: Callable[[int], tuple[Any, Any]], ids: Any = None) -> None:
        """The runner has prepared the step. names: its requests in the order of its rows. metadata_of: by group, the
        attention's metadata and slot mapping, None where there are none. ids: the step's token ids, a tensor, where
        the runner has them."""
        if self.bytes.now is not None:
            return
        self.bytes.batch = [self.schedule.requests[name] for name in names]
        self.bytes.now = []
        tails: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        if ids is not None and self.bytes.memory and self.mode != OWNERS:
            parts = [(one, one.start, one.n) for one in self.bytes.batch]
            ids = ids[: sum(one.n for one in self.bytes.batch)]
            self.arrivals.bring([ids], lambda hosts: tails.update(token_tails(parts, hosts[0])))
        for g in range(len(self.groups)):
            self._moved_states(g)
            self.bytes.now.append(self._plan(g) if self.mode != OWNERS else GroupStep())
            self.bytes.now[-1].tails = tails
            if self.mode == OWNERS:
                self._lost(g)
            if self.layers[g]:
                metadata, slots = metadata_of(g)
                self._hold(g, metadata, slots)
        if not self.inside:
            for layer in (one for layers in self.layers for one in layers):
                self.bytes.enters(layer)

    def _lost(self, g: int) -> None:
        """Blocks that were assigned to another request, of those requests that may have lost some."""
        for one in self.bytes.batch if self.layers[g] else ():
            if one.name in self.schedule.suspects:
                for strange in self.schedule.lost(g, one, self.schedule.reads(g, one)):
                    self._strange(strange, "")

    def _plan(self, g: int) -> GroupStep:
        now, schedule = GroupStep(), self.schedule
        reads, writes = [], []
        for one in self.bytes.batch:
            columns = schedule.reads(g, one)
            for strange in schedule.lost(g, one, columns):
                self._strange(strange, "")
            table = one.tables[g]
            blocks = table[columns]
            reads.append(blocks)
            writing = schedule.writes(g, one)
            written = table[writing]
            writes.append(written)
            now.spans.append((written, one.number, one.start, one.start + one.n - 1))
            if self.mode == FULL or self._due[g]:
                now.readers.update((b, (one.number, c)) for b, c in zip(blocks.tolist(), columns.tolist(), strict=True))
        now.reads = np.concatenate(reads) if reads else _EMPTY
        now.writes = np.concatenate(writes) if writes else _EMPTY
        now.reads = np.unique(now.reads)  # requests that share a prefix read the same
        again = self._again[g]
        for block in [b for b, last in again.items() if last < self.bytes.step]:
            del again[block]
        due = self._due[g] | again.keys()
        if due:
            now.always = now.reads[np.isin(now.reads, list(due))]
            self._due[g].clear()
        return now

    def _moved_states(self, g: int) -> None:
        """A state that goes on in another block was copied there before the forward."""
        group = self.schedule.groups[g]
        if group.kind != STATE or not group.aligned or self.mode == OWNERS:
            return
        ledger, step = self.groups[g], self.bytes.step
        for one in self.bytes.batch:
            column = self.schedule.state_column(g, one)
            last = one.wrote.get(g, (one.start - 1) // group.block_size if one.start else -1)
            if last not in (-1, column) and not group.extra and max(last, column) < len(one.tables[g]):
                source, block = int(one.tables[g][last]), int(one.tables[g][column])
                self.arrivals.do(partial(ledger.copied, source, block, step))
                self._due[g].add(block)
                self.events[COPIED] += 1
            elif last not in (-1, column) and column < len(one.tables[g]):
                block = int(one.tables[g][column])
                self.arrivals.do(partial(ledger.assigned, np.array([block]), step))
            one.wrote[g] = column

    def _hold(self, g: int, metadata: Any, slots: Any) -> None:
        if metadata is None or not self.bytes.batch:
            self.bytes.unseen["steps without attention metadata"] += 1
            return
        split = self.layers[g][0].pages.split
        found, missing = metadata_checks(
            self.schedule, g, self.bytes.batch, metadata, slots, split=split, slack=self.slack, holders=self._holder
        )
        for reason in missing:
            self.bytes.unseen[reason] += 1
        known = _known(metadata)
        if self.mode == OWNERS and self.schedule.groups[g].chunk:  # backends cut such requests into several
            found = [check for check in found if check.what == SLOTS]
        for check in found:
            self.held += check.numbers
            kind = g, check.what

            def compare(
                arrived: Sequence[np.ndarray], check: Any = check, step: int = self.bytes.step, kind: Any = kind
            ) -> None:
                wrong = check.compare(arrived[0])
                if not wrong:
                    self._right.add(kind)
                elif self.mode == OWNERS and not known and kind not in self._right:
                    self.strange_metadata.add(kind)
                    return
                for one in wrong:
                    self.findings.wrong_number(g, one, self.groups[g], self._names[g], step)

            self.arrivals.bring([check.tensor], compare)

    def _holder(self, block: int) -> str:
        """Whose a block is, for a sentence."""
        if not 0 <= block < len(self.schedule.taker):
            return "which is none of the cache"
        taker = int(self.schedule.taker[block])
        return f"assigned to request '{self.findings.number(taker)}'" if taker >= 0 else "assigned to no request"

    def _strange(self, strange: UnexpectedBlock, how: str) -> None:
        if strange.kind == FREED:
            who = f"request '{self.findings.number(strange.taken)}'" if strange.taken >= 0 else "another request"
            how = f"the block was assigned to {who} in step {strange.taken_step} and is read here all the same"
        ledger, layers = self.groups[strange.group], self._names[strange.group]
        size, step = self.schedule.groups[strange.group].block_size, self.bytes.step
        self.arrivals.do(lambda: self.findings.strange(strange, how, ledger, layers, size, step))

    def computed(self) -> None:
        """The forward is over: who wrote what is entered."""
        if self.mode == OWNERS:
            for one in self.bytes.batch:
                for g in range(len(self.groups)):
                    self.schedule.filled(g, one)
            if self.bytes.now is not None:
                self.schedule.suspects -= {one.name for one in self.bytes.batch}
            self.bytes.now = None
        if self.bytes.now is None:
            return
        for g, group in enumerate(self.bytes.now):
            if not self.inside:
                for layer in self.layers[g]:
                    self.bytes.wrote(layer)
            ledger, step = self.groups[g], self.bytes.step
            for blocks, number, low, high in group.spans:
                self.arrivals.do(partial(ledger.written_by, blocks, number, step, low, high))
            for one in self.bytes.batch:
                self.schedule.filled(g, one)
        self.bytes.now = None

    def end_step(self) -> None:
        """What the step has found is written."""
        self.arrivals.end_step()
        self.findings.flush()


def _known(metadata: Any) -> bool:
    """Whether these metadata are of a backend whose words are known; others must have been right once."""
    package, _, module = type(metadata).__module__.rpartition(".")
    return package == "vllm.v1.attention.backends" and module in _BACKENDS
