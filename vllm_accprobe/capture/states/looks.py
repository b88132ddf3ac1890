"""The bytes that a step touches: hashed after each write, held against the books before each read.

The problem: layers tell of themselves hundreds of times a step, and each time it must be known which of their blocks
are looked at, who reads them and who has written them. The idea: the step's plan is made once (GroupStep); here a
layer's moment becomes a hash of some blocks and what follows from it. Not here: the plan (books.py), what follows from
bytes (ledger.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.capture.states.arrivals import Arrivals
from vllm_accprobe.capture.states.findings import Findings
from vllm_accprobe.capture.states.ledger import GroupBooks, Mismatch, picked
from vllm_accprobe.capture.states.moved import must_change
from vllm_accprobe.capture.states.pages import Pages
from vllm_accprobe.capture.states.schedule import KV, Held, Schedule
from vllm_accprobe.dump.journal.state_lines import UNWRITTEN

OWNERS, EVENTS, FULL = "owners", "events", "full"
SHARE = 16
"""Of blocks that nothing happened to, one in so many is looked at in a step (chosen: each is seen every 16 steps, and
the cost is a sixteenth of the read traffic; benchmarks/bench_states.py)."""
_EMPTY = np.empty(0, np.int64)
Again = Callable[[int, np.ndarray, np.ndarray], "bool | None"]
"""(block, rows, slots within it) → whether the block holds what those rows leave there; None where nobody can tell."""


@dataclass
class GroupStep:
    """What a step does with one group. reads, writes: blocks, each once; always: of the reads those that are all
    looked at; readers: by block, (request's number, column); spans: (blocks, number, first, last position) by
    request. tails: of a group of states, see moved.py, once they are known."""

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


class ByteLooks:
    """See above. now: the step's plan by group, None outside of a step; batch: its requests in the order of rows."""

    def __init__(
        self, schedule: Schedule, books: Sequence[GroupBooks], mode: str, findings: Findings, arrivals: Arrivals
    ):
        self.schedule, self.books, self.mode = schedule, books, mode
        self.findings, self.arrivals = findings, arrivals
        self.hashed = self.checked = 0
        self.memory: dict[int, int] = {}
        """By group of states, how many tokens must be known to tell that one must change; none: nobody can tell."""
        self.unseen: Counter[str] = Counter()
        self.now: list[GroupStep] | None = None
        self.batch: list[Held] = []
        self.step = -1

    def enters(self, layer: Layer) -> None:
        """``layer`` is about to write and to read."""
        now = self.now
        if now is None or self.mode == OWNERS:
            return
        group = now[layer.group]
        if len(group.always) or self.mode != EVENTS:
            self.look(layer, self.chosen(layer, group), group.readers)

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
        block with the same tokens. Where nobody can tell, it is counted.
        """
        now = self.now
        if now is None or self.mode == OWNERS or not len(now[layer.group].writes):
            return
        group = now[layer.group]
        blocks = group.writes
        books, changes = self.books[layer.group], self.schedule.groups[layer.group].kind == KV
        self.hashed += len(blocks)
        step, mine = self.step, group.spans

        def take(numbers: np.ndarray) -> None:
            same = books.wrote(layer.number, blocks, numbers)
            if not changes:
                self._unwritten(layer, group, [one.block for one in same], step)
                return
            for found in same:
                there = again(*self._rows(layer.group, found.block)) if again is not None else None
                if there is None:
                    self.unseen["writes that changed nothing, and could not be tried again"] += 1
                elif not there:
                    self.findings.bytes(layer, found, books, _writer(mine, found.block), step)

        self.arrivals.hashes(layer.pages, blocks, take)

    def _unwritten(self, layer: Layer, group: GroupStep, blocks: Sequence[int], step: int) -> None:
        """States that a step left as they were, of those that it must have changed."""
        books = self.books[layer.group]
        for block in blocks:
            span = next((one for one in group.spans if block in one[0]), None)
            if span is not None and must_change(group.tails, span[1], self.memory.get(layer.group, 0)):
                n = span[3] - span[2] + 1
                chunk = f"{layer.part or 'state'} of step {step} was not written (chunk of {n} token{'s' * (n > 1)})"
                found = Mismatch(UNWRITTEN, layer.number, block, chunk)
                self.findings.bytes(layer, found, books, (span[1], -1), step, rows=(span[2], span[3]))

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
        self.look(layer, np.union1d(group.reads, group.writes), group.readers, how="while it was read: ")

    def look(
        self, layer: Layer, blocks: np.ndarray, readers: Mapping[int, tuple[int, int]], *, known_only: bool = False,
        how: str = "",
    ) -> None:  # fmt: skip
        if not len(blocks) or self.mode == OWNERS:
            return
        books, step = self.books[layer.group], self.step
        if known_only and self.arrivals.direct:
            blocks = blocks[books.known[layer.number, blocks]]
            if not len(blocks):
                return
        self.checked += len(blocks)
        size = self.schedule.groups[layer.group].block_size

        def take(numbers: np.ndarray) -> None:
            for i in books.read(layer.number, blocks, numbers):
                block = int(blocks[i])
                found = books.explain(layer.number, block, int(numbers[i]), step)
                reader = readers.get(block) or self._reader(layer.group, block)
                self.findings.bytes(layer, found, books, reader, step, how, size)

        self.arrivals.hashes(layer.pages, blocks, take)

    def _reader(self, g: int, block: int) -> tuple[int, int] | None:
        """Who reads a block that was looked at as one of many."""
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
