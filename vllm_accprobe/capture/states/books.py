"""The ledger of one engine: schedule, books and bytes, step by step.

The problem: four kinds of facts (what the scheduler says, what a kernel is given, what was written, what is there)
become known at different moments of a step, and each is only a finding in the light of the others. The idea: one object
is told of those moments (a step begins, a forward begins, a layer begins, has written, ends; a step ends) and asks its
parts in their order. It knows tensors and integers, and neither hooks nor a runner. Not here: who calls it
(observer.py, layers.py), what a layer's moments mean (looks.py), lines (findings.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from vllm_accprobe.capture.states.arrivals import Arrivals
from vllm_accprobe.capture.states.findings import Findings
from vllm_accprobe.capture.states.given import looks
from vllm_accprobe.capture.states.ledger import GroupBooks
from vllm_accprobe.capture.states.looks import FULL, ByteLooks, GroupStep, Layer
from vllm_accprobe.capture.states.schedule import (
    COPIED,
    ENDED,
    LOADED,
    REUSED,
    STATE,
    Held,
    Schedule,
    Strange,
)
from vllm_accprobe.capture.vllm.step_observer import EngineStep
from vllm_accprobe.dump.journal.state_lines import FREED

_AGAIN = 2
"""Steps in which blocks that came from elsewhere are looked at once more after their first read: a copy that ends after
the read ends within them (chosen: asynchronous copies of one step are waited for in the next)."""
_EMPTY = np.empty(0, np.int64)


class Books:
    """See above. layers: by group. slack: see given.looks. inside: layers tell of themselves; else (graphs) what they
    read is looked at before the forward, and what they wrote after it."""

    def __init__(
        self, schedule: Schedule, layers: Sequence[Sequence[Layer]], mode: str, findings: Findings, arrivals: Arrivals,
        *, slack: int = 0, inside: bool = True,
    ):  # fmt: skip
        self.schedule, self.layers, self.mode, self.findings = schedule, layers, mode, findings
        self.arrivals, self.slack, self.inside = arrivals, slack, inside
        blocks = len(schedule.gen)
        self.groups = [GroupBooks(len(of), blocks) for of in layers]
        self.bytes = ByteLooks(schedule, self.groups, mode, findings, arrivals)
        self.steps = self.held = 0
        self.events: Counter[str] = Counter()
        self._due: list[set[int]] = [set() for _ in layers]
        self._again: list[dict[int, int]] = [{} for _ in layers]

    # --- a step begins -----------------------------------------------------------------------------------------------

    def begin(self, step: EngineStep) -> None:
        """The scheduler has made ``step``; nothing of it has been done."""
        assert step.blocks is not None
        assert step.number is not None
        moves = step.blocks()
        self.bytes.step, self.bytes.now = step.number, None
        self.steps += 1
        self.findings.step = step.number
        self.ended(step.finished)
        prompts = {new.name: new.prompt for new in step.new}
        starts = step.starts()
        before = self.schedule.gen.copy() if moves.tables or moves.more else self.schedule.gen
        arrivals, fresh = self.schedule.begin(step.number, moves, step.counts, starts, prompts)
        if len(fresh):
            self._reused(np.unique(fresh[before[fresh] > 0]))
            for books in self.groups:
                self.arrivals.do(partial(books.given_out, fresh, self.bytes.step))
        for source, block in moves.copies:
            for g, books in enumerate(self.groups):
                self.arrivals.do(partial(books.copied, source, block, self.bytes.step))
                self._due[g].add(block)
                self._again[g][block] = self.bytes.step + _AGAIN
            self.events[COPIED] += 1
        for arrival in arrivals:
            self._arrives(arrival)
        self.bytes.batch = []

    def ended(self, names: Sequence[str]) -> None:
        """Requests get no more rows; the last step's are computed."""
        for one in self.schedule.ended(names):
            self._ended(one)

    def _ended(self, one: Held) -> None:
        """All that it held is looked at a last time, before others get it."""
        self.events[ENDED] += 1
        for g, table in enumerate(one.tables):
            columns = np.flatnonzero((table != 0) & (self.schedule.gen[table] == one.gens[g]))
            if self.schedule.groups[g].kind == STATE:
                columns = columns[-1 - self.schedule.groups[g].extra :]
            readers = {int(table[c]): (one.number, int(c)) for c in columns.tolist()}
            for layer in self.layers[g]:
                self.bytes.look(layer, table[columns], readers, known_only=True)

    def _reused(self, blocks: np.ndarray) -> None:
        """Blocks get another owner: has anybody written there since the last one did?"""
        if not len(blocks):
            return
        self.events[REUSED] += len(blocks)
        for layers in self.layers:
            for layer in layers:
                self.bytes.look(layer, blocks, {}, known_only=True)

    def _arrives(self, arrival: Any) -> None:
        one, g = arrival.request, arrival.group
        blocks = one.tables[g][arrival.columns]
        self.events[arrival.event] += 1
        books, step = self.groups[g], self.bytes.step
        if arrival.event == LOADED:
            self.arrivals.do(partial(books.loaded, blocks, step))
            self._again[g].update(dict.fromkeys(blocks.tolist(), step + _AGAIN))
        else:
            event = f"{arrival.event} of request '{self.findings.name(one.name)}'"
            self.arrivals.do(partial(books.happened, blocks.tolist(), step, event))
        self._due[g].update(blocks.tolist())
        for strange in self.schedule.strangers(arrival):
            self._strange(strange, "it was filled with other tokens than this request's prompt has there")

    # --- a forward begins --------------------------------------------------------------------------------------------

    def forward(self, names: Sequence[str], given: Callable[[int], tuple[Any, Any]]) -> None:
        """The runner has prepared the step. names: its requests in the order of its rows. given: by group, the
        attention's metadata and slot mapping, None where there are none."""
        if self.bytes.now is not None:
            return
        self.bytes.batch = [self.schedule.held[name] for name in names]
        self.bytes.now = []
        for g in range(len(self.groups)):
            self._moved_states(g)
            self.bytes.now.append(self._plan(g))
            if self.layers[g]:
                metadata, slots = given(g)
                self._hold(g, metadata, slots)
        if not self.inside:
            for layer in (one for layers in self.layers for one in layers):
                self.bytes.enters(layer)

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
        if group.kind != STATE or not group.aligned:
            return
        books, step = self.groups[g], self.bytes.step
        for one in self.bytes.batch:
            column = self.schedule.state_column(g, one)
            last = one.wrote.get(g, (one.start - 1) // group.block_size if one.start else -1)
            if last not in (-1, column) and not group.extra and max(last, column) < len(one.tables[g]):
                source, block = int(one.tables[g][last]), int(one.tables[g][column])
                self.arrivals.do(partial(books.copied, source, block, step))
                self._due[g].add(block)
                self.events[COPIED] += 1
            elif last not in (-1, column) and column < len(one.tables[g]):
                block = int(one.tables[g][column])
                self.arrivals.do(partial(books.given_out, np.array([block]), step))
            one.wrote[g] = column

    def _hold(self, g: int, metadata: Any, slots: Any) -> None:
        if metadata is None or not self.bytes.batch:
            self.bytes.unseen["steps without attention metadata"] += 1
            return
        split = self.layers[g][0].pages.split
        found, missing = looks(
            self.schedule, g, self.bytes.batch, metadata, slots, split=split, slack=self.slack, holders=self._holder
        )
        for reason in missing:
            self.bytes.unseen[reason] += 1
        for look in found:
            self.held += look.numbers

            def compare(arrived: Sequence[np.ndarray], look: Any = look, step: int = self.bytes.step) -> None:
                for wrong in look.compare(arrived):
                    self.findings.given(g, wrong, self.groups[g], len(self.layers[g]), step)

            self.arrivals.bring(look.tensors, compare)

    def _holder(self, block: int) -> str:
        """Whose a block is, for a sentence."""
        if not 0 <= block < len(self.schedule.taker):
            return "which is none of the cache"
        taker = int(self.schedule.taker[block])
        return f"given to request '{self.findings.number(taker)}'" if taker >= 0 else "given to nobody"

    def _strange(self, strange: Strange, how: str) -> None:
        if strange.kind == FREED:
            who = f"request '{self.findings.number(strange.taken)}'" if strange.taken >= 0 else "somebody"
            how = f"the block was given to {who} in step {strange.taken_step} and is read here all the same"
        books, layers = self.groups[strange.group], len(self.layers[strange.group])
        size, step = self.schedule.groups[strange.group].block_size, self.bytes.step
        self.arrivals.do(lambda: self.findings.strange(strange, how, books, layers, size, step))

    # --- a step ends -------------------------------------------------------------------------------------------------

    def computed(self) -> None:
        """The forward is over: who wrote what is entered."""
        if self.bytes.now is None:
            return
        for g, group in enumerate(self.bytes.now):
            if not self.inside:
                for layer in self.layers[g]:
                    self.bytes.wrote(layer)
            books, step = self.groups[g], self.bytes.step
            for blocks, number, low, high in group.spans:
                self.arrivals.do(partial(books.written_by, blocks, number, step, low, high))
            for one in self.bytes.batch:
                self.schedule.filled(g, one)
        self.bytes.now = None

    def end_step(self) -> None:
        """What the step has found is said."""
        self.arrivals.end_step()
        self.findings.flush()
