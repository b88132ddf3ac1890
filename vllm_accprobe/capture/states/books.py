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
from vllm_accprobe.capture.states.given import SlotsLook, looks
from vllm_accprobe.capture.states.ledger import GroupBooks
from vllm_accprobe.capture.states.looks import FULL, OWNERS, ByteLooks, GroupStep, Layer
from vllm_accprobe.capture.states.moved import kept_tails
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
from vllm_accprobe.dump.journal.state_lines import FREED, STALE

_AGAIN = 2
"""Steps in which blocks that came from elsewhere are looked at once more after their first read: a copy that ends after
the read ends within them (chosen: asynchronous copies of one step are waited for in the next)."""
_BACKENDS = frozenset((
    "cpu_attn", "flash_attn", "triton_attn", "mamba_attn", "mamba1_attn", "mamba2_attn", "gdn_attn", "linear_attn",
    "short_conv_attn",
))  # fmt: skip
"""vLLM's backends whose metadata mean what the scheduler has said, row by row and request by request (read in 0.32)."""
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
        watched = mode != OWNERS
        self.groups = [GroupBooks(len(of) if watched else 0, blocks) for of in layers]
        self.bytes = ByteLooks(schedule, self.groups, mode, findings, arrivals)
        self.prefixes: list[tuple[Held, tuple[tuple[int, int, int], ...], str]] = []
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
        starts = step.starts()
        before = self.schedule.gen.copy() if moves.tables or moves.more else self.schedule.gen
        new = {one.name: one for one in step.new}
        arrivals, fresh = self.schedule.begin(step.number, moves, step.counts, starts, new)
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
        wrong: dict[str, str] = {}
        for arrival in arrivals:
            if said := self._arrives(arrival):
                wrong.setdefault(arrival.request.name, said)
        for one in dict.fromkeys(a.request.name for a in arrivals if a.event != LOADED):
            self._prefix(self.schedule.held[one], wrong.get(one, ""))
        self.bytes.batch = [self.schedule.held[name] for name in step.counts]

    def _prefix(self, one: Held, why: str) -> None:
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

    def _ended(self, one: Held) -> None:
        """All that it held is looked at a last time, before others get it."""
        self.events[ENDED] += 1
        for g, table in enumerate(one.tables if self.mode != OWNERS else ()):
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

    def _arrives(self, arrival: Any) -> str:
        """What is wrong with it, "" for nothing."""
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
        said = ""
        for strange in self.schedule.strangers(arrival):
            how = self._hit(strange)
            said = said or how
            self._strange(strange, how)
        return said

    def _hit(self, strange: Strange) -> str:
        """``request 'b' (adapter a2) reads blocks 0-1 (positions 0 to 63), which request 'a' (adapter a1) wrote``."""
        size = self.schedule.groups[strange.group].block_size
        last = max(strange.column, strange.last)
        contexts, owner = self.schedule.contexts, self.findings.owner
        reader = owner(strange.request.number, contexts[strange.request.context])
        writer = owner(strange.taken, contexts[int(self.schedule.context[strange.block])])
        which = f"block {strange.column}" if last == strange.column else f"blocks {strange.column}-{last}"
        positions = f"positions {strange.column * size} to {min((last + 1) * size, strange.request.start) - 1}"
        did = "was given and has not filled" if strange.kind == STALE else "wrote"
        why = f" {'for' if strange.why == 'other positions' else 'with'} {strange.why}"
        more = "" if strange.kind == STALE or strange.why == "another adapter" else why
        return f"{reader} reads {which} ({positions}), which {writer} {did}{more}"

    # --- a forward begins --------------------------------------------------------------------------------------------

    def forward(self, names: Sequence[str], given: Callable[[int], tuple[Any, Any]], ids: Any = None) -> None:
        """The runner has prepared the step. names: its requests in the order of its rows. given: by group, the
        attention's metadata and slot mapping, None where there are none. ids: the step's token ids, a tensor, where
        the runner has them."""
        if self.bytes.now is not None:
            return
        self.bytes.batch = [self.schedule.held[name] for name in names]
        self.bytes.now = []
        tails: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        if ids is not None and self.bytes.memory and self.mode != OWNERS:
            parts = [(one, one.start, one.n) for one in self.bytes.batch]
            ids = ids[: sum(one.n for one in self.bytes.batch)]
            self.arrivals.bring([ids], lambda hosts: tails.update(kept_tails(parts, hosts[0])))
        for g in range(len(self.groups)):
            self._moved_states(g)
            self.bytes.now.append(self._plan(g) if self.mode != OWNERS else GroupStep())
            self.bytes.now[-1].tails = tails
            if self.mode == OWNERS:
                self._lost(g)
            if self.layers[g]:
                metadata, slots = given(g)
                self._hold(g, metadata, slots)
        if not self.inside:
            for layer in (one for layers in self.layers for one in layers):
                self.bytes.enters(layer)

    def _lost(self, g: int) -> None:
        """Blocks that were given to somebody else, of those requests that may have lost some."""
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
        known = _known(metadata)
        if self.mode == OWNERS and self.schedule.groups[g].chunk:  # backends cut such requests into several
            found = [look for look in found if isinstance(look.compare, SlotsLook)]
        for look in found:
            self.held += look.numbers
            kind = g, type(look.compare).__name__

            def compare(
                arrived: Sequence[np.ndarray], look: Any = look, step: int = self.bytes.step, kind: Any = kind
            ) -> None:
                wrong = look.compare(arrived)
                if not wrong:
                    self._right.add(kind)
                elif self.mode == OWNERS and not known and kind not in self._right:
                    self.strange_metadata.add(kind)
                    return
                for one in wrong:
                    self.findings.given(g, one, self.groups[g], self._names[g], step)

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
        books, layers = self.groups[strange.group], self._names[strange.group]
        size, step = self.schedule.groups[strange.group].block_size, self.bytes.step
        self.arrivals.do(lambda: self.findings.strange(strange, how, books, layers, size, step))

    # --- a step ends -------------------------------------------------------------------------------------------------

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


def _known(metadata: Any) -> bool:
    """Whether these metadata are of a backend whose words are known; others must have been right once."""
    package, _, module = type(metadata).__module__.rpartition(".")
    return package == "vllm.v1.attention.backends" and module in _BACKENDS
