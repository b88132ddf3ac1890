"""What the scheduler has said: which request holds which blocks, and what a step must read and write in them.

The problem: a kernel is given block tables, slots and lengths that a runner keeps up to date in buffers of its own,
over many steps; one that is stale is a wrong answer of a right kernel. The idea: a second set of books, made of
nothing but the scheduler's words (new blocks, whole tables, finished requests), from which follows for each step, group
of the cache and request what is read and where each row is written. Each block has a generation, which changes when the
block is given out again: whoever reads a block in another generation than the one that it was given reads what
somebody else may have written. Not here: what the kernel was given (given.py), bytes (ledger.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from vllm_accprobe.capture.vllm.step_observer import BlockMoves
from vllm_accprobe.dump.journal.state_lines import FREED, STRANGE

KV, STATE = "kv", "state"
NULL = 0
"""The block that stands for none: rows outside of a window, padding."""
HIT, RESUMED, LOADED, COPIED, REUSED, ENDED = (
    "prefix hit", "resume after preemption", "transfer", "copy", "reuse", "end of the request",
)  # fmt: skip
"""Events, as they are said and counted."""


@dataclass(frozen=True)
class CacheGroup:
    """One group of the cache. kind: KV or STATE. block_size: tokens. window: positions that a query sees, 0 for all;
    chunk: positions are seen back to a multiple of it, 0 for all. extra: blocks of a state beside the current one
    (drafts). aligned: a state moves on to another block at each multiple of block_size, else it stays in the first."""

    kind: str
    block_size: int
    window: int = 0
    chunk: int = 0
    extra: int = 0
    aligned: bool = False


@dataclass
class Held:
    """A request and what it holds. number: in the ledger; tables: by group, int64 [blocks]; gens: the generation of
    each block when it was given. keys: of the prompt's whole blocks, by group; wrote: by group, the column of the state
    that it wrote last, -1 for none. away: it was left out of a step and may have lost its blocks."""

    name: str
    number: int
    prompt: Sequence[int] | None
    tables: list[np.ndarray]
    gens: list[np.ndarray]
    keys: dict[int, np.ndarray] = field(default_factory=dict)
    wrote: dict[int, int] = field(default_factory=dict)
    start: int = 0
    n: int = 0
    accepted: int | None = None


@dataclass(frozen=True)
class Strange:
    """A block that the schedule itself cannot mean. kind: FREED or STRANGE; taken: by whom (a number, -1 for nobody),
    in which step."""

    kind: str
    group: int
    block: int
    request: Held
    column: int
    taken: int = -1
    taken_step: int = -1


@dataclass(frozen=True)
class BlockArrival:
    """Blocks that come to a request with something in them. event: HIT, RESUMED or LOADED; columns of its table."""

    request: Held
    group: int
    event: str
    columns: np.ndarray


class Schedule:
    """The books of one engine. groups: of the cache; blocks: in all; loads: a connector may bring blocks from outside
    the engine."""

    def __init__(self, groups: Sequence[CacheGroup], blocks: int, loads: bool = False):
        self.groups = list(groups)
        self.loads = loads
        self.held: dict[str, Held] = {}
        self.names: list[str] = []
        self.gen = np.zeros(blocks, np.int64)
        self.taker = np.full(blocks, -1, np.int64)
        self.taken = np.full(blocks, -1, np.int64)
        self.content = [np.zeros(blocks, np.uint64) for _ in groups]
        """By group, the key of the prompt's tokens up to the end of the block that was filled with them; 0: unknown."""

    # --- the scheduler's words -----------------------------------------------------------------------------------

    def ended(self, names: Sequence[str]) -> list[Held]:
        """These requests get no more rows: what they held, which others may be given from now on."""
        return [self.held.pop(name) for name in names if name in self.held]

    def begin(
        self,
        step: int,
        moves: BlockMoves,
        counts: Mapping[str, int],
        starts: Mapping[str, int],
        prompts: Mapping[str, Sequence[int] | None],
    ) -> tuple[list[BlockArrival], np.ndarray]:
        """Takes a step's words. Returns what arrived with something in it, and the blocks that were given out anew,
        int64, which had other owners. Raises KeyError for a request that nobody has named."""
        fresh: list[np.ndarray] = []
        arrivals: list[BlockArrival] = []
        copied = {dst for _, dst in moves.copies}
        for name, tables in moves.tables.items():
            resumed = name in self.held
            one = self.held.get(name) or self._new(name, prompts.get(name))
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
                anew = table[~came & (table != NULL)]
                fresh.append(self._give(one, anew, step))
            one.gens = [self.gen[table].copy() for table in one.tables]  # once all of it is given
        for name, tables in moves.more.items():
            one = self.held[name]
            for g, ids in enumerate(tables):
                more = np.asarray(ids, np.int64)
                fresh.append(self._give(one, more[more != NULL], step))
                one.tables[g] = np.concatenate([one.tables[g], more])
                one.gens[g] = np.concatenate([one.gens[g], self.gen[more]])
        for name, n in counts.items():
            one = self.held[name]
            start, length = starts.get(name, 0), len(one.prompt) if one.prompt is not None else one.start + one.n + 1
            generated = name not in moves.tables and one.n and one.start >= length
            one.accepted = start - one.start if generated else None
            one.start, one.n = start, n
        return arrivals, np.concatenate(fresh) if fresh else np.empty(0, np.int64)

    def _new(self, name: str, prompt: Sequence[int] | None) -> Held:
        one = self.held[name] = Held(name, len(self.names), prompt, [], [])
        self.names.append(name)
        return one

    def _give(self, one: Held, blocks: np.ndarray, step: int) -> np.ndarray:
        """``blocks`` are ``one``'s from now on, with nothing in them."""
        self.gen[blocks] += 1
        self.taker[blocks] = one.number
        self.taken[blocks] = step
        for content in self.content:
            content[blocks] = 0
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
    def _arrival(one: Held, g: int, event: str, which: np.ndarray) -> list[BlockArrival]:
        return [BlockArrival(one, g, event, np.flatnonzero(which))] if which.any() else []

    def _ours(self, one: Held, g: int, table: np.ndarray) -> np.ndarray:
        """Which blocks hold this prompt's own tokens already; where a connector loads, others are brought."""
        keys = self.prompt_keys(one, g)
        known = np.zeros(len(table), bool)
        n = min(len(keys), len(table))
        known[:n] = self.content[g][table[:n]] == keys[:n]
        return known

    # --- what a step must do -------------------------------------------------------------------------------------

    @staticmethod
    def _lowest(group: CacheGroup, start: int) -> int:
        """The first position that the query at ``start`` sees."""
        low = 0
        if group.window:
            low = max(low, start - group.window + 1)
        if group.chunk:
            low = max(low, start // group.chunk * group.chunk)
        return low

    def state_column(self, g: int, one: Held) -> int:
        """Where the current state lies in the request's table."""
        group = self.groups[g]
        return (one.start + one.n - 1) // group.block_size if group.aligned else 0

    def reads(self, g: int, one: Held) -> np.ndarray:
        """Columns of the table whose blocks are read in this step, int64, rising."""
        group, table = self.groups[g], one.tables[g]
        if group.kind == STATE:
            first = self.state_column(g, one)
            return np.arange(first, min(first + 1 + group.extra, len(table))) if one.start else np.empty(0, np.int64)
        first = self._lowest(group, one.start) // group.block_size
        columns = np.arange(first, min(-(-one.start // group.block_size), len(table)))
        return columns[table[columns] != NULL]

    def writes(self, g: int, one: Held) -> np.ndarray:
        """Columns whose blocks are written in this step, int64, rising."""
        group, table = self.groups[g], one.tables[g]
        if group.kind == STATE:
            first = self.state_column(g, one)
            return np.arange(first, min(first + 1 + group.extra, len(table)))
        stop = -(-(one.start + one.n) // group.block_size)
        return np.arange(one.start // group.block_size, min(stop, len(table)))

    def touched(self, g: int, one: Held) -> np.ndarray:
        """Columns of keys and values that are read or written in this step, int64, rising: one run, since what is
        written follows what is read."""
        size, table = self.groups[g].block_size, one.tables[g]
        first = self._lowest(self.groups[g], one.start) // size
        columns = np.arange(first, min(-(-(one.start + one.n) // size), len(table)))
        return columns[table[columns] != NULL]

    def slots(self, g: int, one: Held) -> np.ndarray:
        """Where each row of the request must be written, int64 [n]; -1 beyond its table."""
        size, table = self.groups[g].block_size, one.tables[g]
        positions = np.arange(one.start, one.start + one.n)
        columns = positions // size
        inside = columns < len(table)
        out = np.full(one.n, -1, np.int64)
        out[inside] = table[columns[inside]] * size + positions[inside] % size
        return out

    def lost(self, g: int, one: Held, columns: np.ndarray) -> list[Strange]:
        """Of the columns that are read, those whose block was given to somebody else since."""
        blocks = one.tables[g][columns]
        gone = np.flatnonzero(self.gen[blocks] != one.gens[g][columns])
        found = []
        for i in gone.tolist():
            column, block = int(columns[i]), int(blocks[i])
            found.append(Strange(FREED, g, block, one, column, int(self.taker[block]), int(self.taken[block])))
            one.gens[g][column] = self.gen[block]  # said once
        return found

    # --- what blocks hold ----------------------------------------------------------------------------------------

    def prompt_keys(self, one: Held, g: int) -> np.ndarray:
        """The key of each whole block of the prompt, uint64: equal keys, equal tokens from the first one on."""
        found = one.keys.get(g)
        if found is None:
            size = self.groups[g].block_size
            prompt = np.asarray(one.prompt if one.prompt is not None else (), np.int64)
            key, keys = 1, []
            for i in range(len(prompt) // size):
                key = xxhash.xxh3_64_intdigest(prompt[i * size : (i + 1) * size].tobytes(), seed=key)
                keys.append(key or 1)
            found = one.keys[g] = np.array(keys, np.uint64)
        return found

    def filled(self, g: int, one: Held) -> None:
        """This step's rows are written: blocks of the prompt that they complete are known by their tokens."""
        if self.groups[g].kind == STATE:
            return
        size, keys = self.groups[g].block_size, self.prompt_keys(one, g)
        for column in range(one.start // size, min((one.start + one.n) // size, len(keys), len(one.tables[g]))):
            self.content[g][one.tables[g][column]] = keys[column]

    def strangers(self, arrival: BlockArrival) -> list[Strange]:
        """Of blocks that a prefix hit has brought, those that were filled with other tokens than the prompt's."""
        one, g = arrival.request, arrival.group
        if self.groups[g].kind == STATE:
            return []
        keys = self.prompt_keys(one, g)
        columns = arrival.columns[arrival.columns < len(keys)]
        blocks = one.tables[g][columns]
        held = self.content[g][blocks]
        wrong = np.flatnonzero((held != 0) & (held != keys[columns]))
        return [
            Strange(STRANGE, g, int(blocks[i]), one, int(columns[i]), int(self.taker[blocks[i]]),
                    int(self.taken[blocks[i]]))
            for i in wrong.tolist()
        ]  # fmt: skip
