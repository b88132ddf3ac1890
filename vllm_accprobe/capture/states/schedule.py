"""What the scheduler has decided: which request has which blocks, and what a step must read and write in them.

The problem: a kernel gets block tables, slots and lengths that a runner keeps up to date over many steps; one that is
stale is a wrong answer of a correct kernel. The idea: a second account, from nothing but the scheduler's output (new
blocks, whole tables, finished requests), from which follows what each request reads and where each row is written. Each
block has a generation, which changes when the block is assigned again, and an owner: the request, its positions,
adapter and salt, and a key of the tokens and images that fill it. A request whose prefix comes from the cache reads
another request's rows, which are right only if adapter, salt, images and tokens agree up to there.

Not here: what the kernel got (checks.py), bytes (ledger.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from vllm_accprobe.capture.vllm.step_observer import BlockMoves, NewRequest
from vllm_accprobe.dump.journal import FOREIGN, FREED, STALE, STRANGE
from vllm_accprobe.dump.schema import Image

KV, STATE = "kv", "state"
NULL = 0
"""The block that stands for none: rows outside of a window, padding."""
HIT, RESUMED, LOADED, COPIED, REUSED, ENDED = (
    "prefix hit", "resume after preemption", "transfer", "copy", "reuse", "end of the request",
)  # fmt: skip
"""Events, as they are named and counted."""


@dataclass(frozen=True)
class CacheGroup:
    """One group of the cache. kind: KV or STATE. block_size: tokens. window: positions that a query sees, 0 for all;
    chunk: positions are seen back to a multiple of it, 0 for all. extra: blocks of a state besides the current one
    (drafts). aligned: a state moves on to another block at each multiple of block_size, else it stays in the first.
    watched: False for one whose blocks are not understood: nothing is concluded from them."""

    kind: str
    block_size: int
    window: int = 0
    chunk: int = 0
    extra: int = 0
    aligned: bool = False
    watched: bool = True


@dataclass
class ScheduledRequest:
    """A request and what it holds. number: in the ledger; tables: by group, int64 [blocks]; gens: the generation of
    each block when it was assigned. keys: of the prompt's whole blocks, by group, see prompt_keys; wrote: by group, the
    column of the state that it wrote last, -1 for none. context: index into Schedule.contexts. tail: its last token ids
    before position tail_end, as far as somebody asks for them (checks.py)."""

    name: str
    number: int
    prompt: Sequence[int] | None
    tables: list[np.ndarray]
    gens: list[np.ndarray]
    keys: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    wrote: dict[int, int] = field(default_factory=dict)
    start: int = 0
    n: int = 0
    accepted: int | None = None
    context: int = 0
    images: tuple[Image, ...] = ()
    tail: np.ndarray | None = None
    tail_end: int = -1


@dataclass(frozen=True)
class UnexpectedBlock:
    """A block that the schedule itself cannot mean. kind: FREED, or STRANGE, FOREIGN, STALE, of a prefix that came from
    the cache; taken: by whom (a number, -1 for none), in which step. last: the last column of a run of such blocks;
    why: what is wrong with their owner."""

    kind: str
    group: int
    block: int
    request: ScheduledRequest
    column: int
    taken: int = -1
    taken_step: int = -1
    last: int = -1
    why: str = ""


@dataclass(frozen=True)
class BlockArrival:
    """Blocks that come to a request with something in them. event: HIT, RESUMED or LOADED; columns of its table."""

    request: ScheduledRequest
    group: int
    event: str
    columns: np.ndarray


RECENT = 1024
"""Chosen: requests that began or ended last, which stay known whatever blocks say."""
MORE = RECENT // 4
"""Chosen: how many more are known at most, besides those that blocks name, before they are looked through; 0.3 KB
each."""


class Schedule:
    """The ledger of one engine. groups: of the cache; blocks: in all; loads: a connector may bring blocks from outside
    the engine."""

    def __init__(self, groups: Sequence[CacheGroup], blocks: int, loads: bool = False):
        self.groups = list(groups)
        self.loads = loads
        self.requests: dict[str, ScheduledRequest] = {}
        self.names: dict[int, str] = {}
        self.gen = np.zeros(blocks, np.int64)
        self.taker = np.full(blocks, -1, np.int64)
        self.taken = np.full(blocks, -1, np.int64)
        self.content = [np.zeros(blocks, np.uint64) for _ in groups]
        """By group, the key of the prompt's tokens up to the end of the block that was filled with them; 0: unknown."""
        self.pictures = [np.zeros(blocks, np.uint64) for _ in groups]
        """The same of its images; 0 where ``content`` is."""
        self.column = [np.full(blocks, -1, np.int32) for _ in groups]
        """By group, for which column of its owner's table a block was assigned."""
        self.context = np.zeros(blocks, np.int32)
        """Index into ``contexts`` of the owner's."""
        self.contexts: dict[int, tuple[str, str]] = {0: ("", "")}
        """(adapter, salt) of requests; the first one is that of requests that have neither."""
        self._context_of = {("", ""): 0}
        self._next = self._next_context = 0
        self._most = RECENT + MORE
        self.done: dict[int, int] = {}
        """By number, how many positions a request has computed, those of this step included."""
        self.req: dict[int, int] = {}
        """By number, what the capture calls a request, -1 where it does not."""
        self.holders = np.zeros(blocks, np.int32)
        """How many requests have the block in their table."""
        self.suspects: set[str] = set()
        """Requests one of whose blocks was assigned to another request: `lost` must check them."""

    def ended(self, names: Sequence[str]) -> list[ScheduledRequest]:
        """These requests get no more rows: their blocks, which others may get from now on."""
        found = [self.requests.pop(name) for name in names if name in self.requests]
        for one in found:
            self._holds(one, -1)
            self.suspects.discard(one.name)
            self.names[one.number] = self.names.pop(one.number)  # among the recent ones, however old its number is
        return found

    def forget(self, writers: Sequence[np.ndarray]) -> None:
        """Frees what is known of ended requests and their contexts, where no block has them: as its owner, or as who
        wrote last, ``writers`` [blocks]. RECENT ones stay, which numbers on their way from a device may name."""
        if len(self.names) < self._most:
            return
        live = list(self.requests.values())
        old = np.array(list(self.names)[:-RECENT], np.int64)
        used = np.isin(old, [one.number for one in live])
        for of in (self.taker, *writers):
            used |= np.isin(old, of)
        for number in old[~used].tolist():
            del self.names[number], self.done[number], self.req[number]
        contexts = {0, *(one.context for one in live), *np.unique(self.context).tolist()}
        self.contexts = {n: context for n, context in self.contexts.items() if n in contexts}
        self._context_of = {context: n for n, context in self.contexts.items()}
        self._most = len(self.names) + MORE

    def _holds(self, one: ScheduledRequest, by: int) -> None:
        for table in one.tables:
            np.add.at(self.holders, table[table != NULL], by)

    def begin(
        self,
        step: int,
        moves: BlockMoves,
        counts: Mapping[str, int],
        starts: Mapping[str, int],
        new: Mapping[str, NewRequest],
    ) -> tuple[list[BlockArrival], np.ndarray]:
        """Takes a step's words. Returns what arrived with something in it, and the blocks that were assigned anew,
        int64, which had other owners. Raises KeyError for a request that was not named."""
        fresh: list[np.ndarray] = []
        arrivals: list[BlockArrival] = []
        copied = {dst for _, dst in moves.copies}
        for name, tables in moves.tables.items():
            resumed = name in self.requests
            one = self.requests.get(name) or self._new(name, new.get(name))
            self._holds(one, -1)
            one.tables = [np.asarray(ids, np.int64) for ids in tables]
            one.wrote.clear()
            start = starts.get(name, 0)
            for g, table in enumerate(one.tables):
                full = self._arrived_columns(g, start, len(table))
                came = np.zeros(len(table), bool)
                came[full] = True
                came &= table != NULL
                if copied:
                    came &= ~np.isin(table, list(copied))
                event = RESUMED if resumed else HIT
                if self.loads and came.any():
                    loaded = came & ~self._ours(one, g, table)
                    came &= ~loaded
                    self.taker[table[loaded]], self.taken[table[loaded]] = one.number, step
                    self.content[g][table[loaded]] = 0
                    arrivals += self._arrival(one, g, LOADED, loaded)
                arrivals += self._arrival(one, g, event, came)
                fresh.append(self._give(one, g, np.flatnonzero(~came & (table != NULL)), step))
            self._holds(one, 1)
            one.gens = [self.gen[table].copy() for table in one.tables]  # once all of it is assigned
        for name, tables in moves.more.items():
            one = self.requests[name]
            for g, ids in enumerate(tables):
                more = np.asarray(ids, np.int64)
                first = len(one.tables[g])
                one.tables[g] = np.concatenate([one.tables[g], more])
                fresh.append(self._give(one, g, first + np.flatnonzero(more != NULL), step))
                np.add.at(self.holders, more[more != NULL], 1)
                one.gens[g] = np.concatenate([one.gens[g], self.gen[more]])
        for name, n in counts.items():
            one = self.requests[name]
            start, length = starts.get(name, 0), len(one.prompt) if one.prompt is not None else one.start + one.n + 1
            generated = name not in moves.tables and one.n and one.start >= length
            one.accepted = start - one.start if generated else None
            one.start, one.n = start, n
            self.done[one.number] = max(self.done[one.number], start + n)
        return arrivals, np.concatenate(fresh) if fresh else np.empty(0, np.int64)

    def _new(self, name: str, new: NewRequest | None) -> ScheduledRequest:
        number, prompt = self._next, None if new is None else new.prompt
        self._next += 1
        one = self.requests[name] = ScheduledRequest(name, number, prompt, [], [])
        self.names[number], self.done[number], self.req[number] = name, 0, -1
        if new is not None:
            context = new.adapter, new.salt
            if context not in self._context_of:
                self._next_context += 1
                self.contexts[self._next_context], self._context_of[context] = context, self._next_context
            one.context, one.images = self._context_of[context], new.images
        return one

    def _give(self, one: ScheduledRequest, g: int, columns: np.ndarray, step: int) -> np.ndarray:
        """The blocks at ``columns`` of its table are ``one``'s from now on, with nothing in them."""
        blocks = one.tables[g][columns]
        for block in blocks[self.holders[blocks] > 0].tolist():
            self.suspects.update(
                other.name
                for other in self.requests.values()
                if other is not one and any(block in table for table in other.tables)
            )
        self.gen[blocks] += 1
        self.taker[blocks] = one.number
        self.taken[blocks] = step
        self.context[blocks] = one.context
        for content, pictures in zip(self.content, self.pictures, strict=True):
            content[blocks] = pictures[blocks] = 0
        for column in self.column:
            column[blocks] = -1
        self.column[g][blocks] = columns
        return blocks

    def _arrived_columns(self, g: int, start: int, n: int) -> slice:
        """The columns of a table that hold something before a request's first row is computed."""
        group = self.groups[g]
        if not start:
            return slice(0, 0)
        if group.kind == STATE:
            if not group.aligned:
                return slice(0, 0)
            last = (start - 1) // group.block_size
            return slice(last, last + 1)
        return slice(self._lowest(group, start) // group.block_size, -(-start // group.block_size))

    @staticmethod
    def _arrival(one: ScheduledRequest, g: int, event: str, which: np.ndarray) -> list[BlockArrival]:
        return [BlockArrival(one, g, event, np.flatnonzero(which))] if which.any() else []

    def _ours(self, one: ScheduledRequest, g: int, table: np.ndarray) -> np.ndarray:
        """Which blocks hold this prompt's own tokens already; where a connector loads, others are brought."""
        keys, _ = self.prompt_keys(one, g)
        known = np.zeros(len(table), bool)
        n = min(len(keys), len(table))
        known[:n] = self.content[g][table[:n]] == keys[:n]
        return known

    @staticmethod
    def _lowest(group: CacheGroup, start: int) -> int:
        """The first position that the query at ``start`` sees."""
        low = 0
        if group.window:
            low = max(low, start - group.window + 1)
        if group.chunk:
            low = max(low, start // group.chunk * group.chunk)
        return low

    def state_column(self, g: int, one: ScheduledRequest) -> int:
        """Where the current state lies in the request's table."""
        group = self.groups[g]
        return (one.start + one.n - 1) // group.block_size if group.aligned else 0

    def reads(self, g: int, one: ScheduledRequest) -> np.ndarray:
        """Columns of the table whose blocks are read in this step, int64, rising."""
        group, table = self.groups[g], one.tables[g]
        if group.kind == STATE:
            first = self.state_column(g, one)
            return np.arange(first, min(first + 1 + group.extra, len(table))) if one.start else np.empty(0, np.int64)
        first = self._lowest(group, one.start) // group.block_size
        columns = np.arange(first, min(-(-one.start // group.block_size), len(table)))
        return columns[table[columns] != NULL]

    def writes(self, g: int, one: ScheduledRequest) -> np.ndarray:
        """Columns whose blocks are written in this step, int64, rising."""
        group, table = self.groups[g], one.tables[g]
        if group.kind == STATE:
            first = self.state_column(g, one)
            return np.arange(first, min(first + 1 + group.extra, len(table)))
        stop = -(-(one.start + one.n) // group.block_size)
        return np.arange(one.start // group.block_size, min(stop, len(table)))

    def touched(self, g: int, one: ScheduledRequest) -> np.ndarray:
        """Columns of keys and values that are read or written in this step, int64, rising: one run, since what is
        written follows what is read."""
        size, table = self.groups[g].block_size, one.tables[g]
        first = self._lowest(self.groups[g], one.start) // size
        columns = np.arange(first, min(-(-(one.start + one.n) // size), len(table)))
        return columns[table[columns] != NULL]

    def slots(self, g: int, one: ScheduledRequest) -> np.ndarray:
        """Where each row of the request must be written, int64 [n]; -1 beyond its table."""
        size, table = self.groups[g].block_size, one.tables[g]
        positions = np.arange(one.start, one.start + one.n)
        columns = positions // size
        inside = columns < len(table)
        out = np.full(one.n, -1, np.int64)
        out[inside] = table[columns[inside]] * size + positions[inside] % size
        return out

    def lost(self, g: int, one: ScheduledRequest, columns: np.ndarray) -> list[UnexpectedBlock]:
        """Of the columns that are read, those whose block was assigned to another request since."""
        blocks = one.tables[g][columns]
        gone = np.flatnonzero(self.gen[blocks] != one.gens[g][columns])
        found = []
        for i in gone.tolist():
            column, block = int(columns[i]), int(blocks[i])
            found.append(UnexpectedBlock(FREED, g, block, one, column, int(self.taker[block]), int(self.taken[block])))
            one.gens[g][column] = self.gen[block]  # reported once
        return found

    def prompt_keys(self, one: ScheduledRequest, g: int) -> tuple[np.ndarray, np.ndarray]:
        """(keys of the tokens, keys of the images) of each whole block of the prompt, uint64: equal keys, equal tokens
        from the first one on, or the same images at the same places."""
        found = one.keys.get(g)
        if found is None:
            size = self.groups[g].block_size
            prompt = np.asarray(one.prompt if one.prompt is not None else (), np.int64)
            key = seen = 1
            keys, pictures = [], []
            for i in range(len(prompt) // size):
                key = xxhash.xxh3_64_intdigest(prompt[i * size : (i + 1) * size].tobytes(), seed=key) or 1
                for image in one.images:
                    if image.pos < (i + 1) * size and image.pos + image.n > i * size:
                        seen = xxhash.xxh3_64_intdigest(f"{image.hash} {image.pos}".encode(), seed=seen) or 1
                keys.append(key)
                pictures.append(seen)
            found = one.keys[g] = np.array(keys, np.uint64), np.array(pictures, np.uint64)
        return found

    def filled(self, g: int, one: ScheduledRequest) -> None:
        """This step's rows are written: blocks of the prompt that they complete are known by their tokens."""
        if self.groups[g].kind == STATE or one.prompt is None or one.start >= len(one.prompt):
            return
        size, (keys, pictures) = self.groups[g].block_size, self.prompt_keys(one, g)
        columns = slice(one.start // size, min((one.start + one.n) // size, len(keys), len(one.tables[g])))
        blocks = one.tables[g][columns]
        mine = self.taker[blocks] == one.number  # a block of another owner has his name and his tokens
        self.content[g][blocks[mine]] = keys[columns][mine]
        self.pictures[g][blocks[mine]] = pictures[columns][mine]

    def unexpected(self, arrival: BlockArrival) -> list[UnexpectedBlock]:
        """Of blocks that a prefix hit has brought, those that another request filled with something else than this one
        has there: under another adapter or salt, with other images or tokens, for other positions, or not at all. One
        for each run of columns with the same owner and the same reason."""
        one, g = arrival.request, arrival.group
        if self.groups[g].kind == STATE or arrival.event == LOADED or not self.groups[g].watched:
            return []
        found: list[UnexpectedBlock] = []
        for column in arrival.columns.tolist():
            block = int(one.tables[g][column])
            kind, why = self._wrong_owner(one, g, column, block)
            if not kind:
                continue
            owner, step, last = int(self.taker[block]), int(self.taken[block]), found[-1] if found else None
            if last and (last.kind, last.why, last.taken, last.last) == (kind, why, owner, column - 1):
                found[-1] = replace(last, last=column)
            else:
                found.append(UnexpectedBlock(kind, g, block, one, column, owner, step, column, why))
        return found

    def _wrong_owner(self, one: ScheduledRequest, g: int, column: int, block: int) -> tuple[str, str]:
        """(kind, why) of a block that came with something in it; ("", "") where nothing is known to be wrong."""
        number = int(self.taker[block])
        if number < 0 or number == one.number:
            return "", ""
        (adapter, salt), (theirs, other_salt) = self.contexts[one.context], self.contexts[self.context[block]]
        if adapter != theirs:
            return FOREIGN, "another adapter"
        if salt != other_salt:
            return FOREIGN, "another cache salt"
        size, at = self.groups[g].block_size, int(self.column[g][block])
        if at >= 0 and at != column:
            return STRANGE, "other positions"
        keys, pictures = self.prompt_keys(one, g)
        content, picture = self._filled_with(g, block)
        if column < len(keys) and content:
            if content != keys[column]:
                return STRANGE, "other tokens"
            if picture != pictures[column]:
                return FOREIGN, "another image"
        if at >= 0 and self.done[number] < min((at + 1) * size, one.start or (at + 1) * size):
            return STALE, "nothing yet"
        return "", ""

    def _filled_with(self, g: int, block: int) -> tuple[int, int]:
        """The keys of what fills a block, or will when its owner's rows of this step are written; 0 for unknown."""
        if content := int(self.content[g][block]):
            return content, int(self.pictures[g][block])
        number, column = int(self.taker[block]), int(self.column[g][block])
        owner = self.requests.get(self.names[number])
        if owner is None or owner.number != number or column < 0:
            return 0, 0
        keys, pictures = self.prompt_keys(owner, g)
        whole = column < len(keys) and (column + 1) * self.groups[g].block_size <= self.done[number]
        return (int(keys[column]), int(pictures[column])) if whole else (0, 0)

    def owners(self, one: ScheduledRequest, end: int) -> np.ndarray:
        """By position up to ``end``, the number of the request whose rows the cache of keys and values holds there,
        int32 [end]; -1 where it is not known, and where groups of the cache do not agree."""
        found = np.full(end, -2, np.int32)
        for g, group in enumerate(self.groups):
            if group.kind != KV or not group.watched:
                continue
            positions = np.arange(min(end, len(one.tables[g]) * group.block_size))
            blocks = one.tables[g][positions // group.block_size]
            theirs = np.where(blocks == NULL, -2, self.taker[blocks])
            old = found[: len(positions)]
            clash = (old != -2) & (theirs != -2) & (old != theirs)
            found[: len(positions)] = np.where(clash, -1, np.where(old == -2, theirs, old))
        return np.where(found == -2, -1, found).astype(np.int32)

