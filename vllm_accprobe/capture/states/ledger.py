"""What was written where, by whom, and whether it is still there.

The problem: a block that was written right may be read wrong: overwritten by another request, not written at all,
replaced by an older copy, changed by nobody. The idea: for each layer and block one number of its bytes as they were
after the last write (pages.py), and for each group and block who wrote it, when, which positions, and what happened to
it since. Whoever reads holds the bytes against that number; where they differ, the books tell the cases apart.
Not here: which blocks are read, written and looked at (schedule.py, plan.py), bytes (pages.py), what is said
(findings.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.capture.states.schedule import COPIED, LOADED, REUSED
from vllm_accprobe.dump.journal.state_lines import CHANGED, LATE, OTHER, STALE

_LATE = 4
"""Steps after which a copy is no longer expected (chosen: asynchronous copies of a step are waited for in the next)."""
_EVENTS = 6
"""Events that are remembered of a block between two writes: the last ones."""


@dataclass(frozen=True)
class Mismatch:
    """Bytes that are not what was written. kind: in the words of dump/journal/state_lines.py; layer: its number;
    other: a block of the same layer that has just these bytes, -1 for none; how: what is known of them."""

    kind: str
    layer: int
    block: int
    how: str
    other: int = -1


class GroupBooks:
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

    # --- what happens to blocks ------------------------------------------------------------------------------------

    def given_out(self, blocks: np.ndarray, step: int) -> None:
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
        for books in (self.writer, self.step, self.low, self.high):
            books[block] = books[source]
        self.source[block] = source, step
        self.events[block] = [(step, f"{COPIED} from block {source}")]

    def written_by(self, blocks: np.ndarray, request: int, step: int, low: int, high: int) -> None:
        """A request writes positions ``low`` to ``high`` into ``blocks``."""
        self.writer[blocks], self.step[blocks] = request, step
        self.low[blocks], self.high[blocks] = low, high
        for block in blocks.tolist():
            self.events.pop(block, None)

    # --- bytes -------------------------------------------------------------------------------------------------------

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
        """Indices of those whose bytes are not what was written. What nobody knew is known from now on."""
        known = self.known[layer, blocks]
        if known.all():
            return np.flatnonzero(self.now[layer, blocks] != numbers).tolist()
        unknown = blocks[~known]
        self.now[layer, unknown] = numbers[~known]
        self.known[layer, unknown] = True
        return np.flatnonzero(known & (self.now[layer, blocks] != numbers)).tolist()

    def explain(self, layer: int, block: int, number: int, step: int = 0) -> Mismatch:
        """Why ``block`` has the bytes of ``number`` in ``step``; they are believed from now on, so that this is said
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
            kind, how = CHANGED, "nobody's: no write is known that left them"
        self.before[layer, block] = self.now[layer, block]
        self.now[layer, block] = found
        return Mismatch(kind, layer, block, f"the bytes are {how}", other)


def picked(blocks: np.ndarray, step: int, layer: int, share: int) -> np.ndarray:
    """Of ``blocks`` those that are looked at in this step and layer: one in ``share``, another one each step, so that
    after ``share`` steps all were; layers take different ones, so that steps cost the same."""
    return blocks[(blocks + step + layer) % share == 0]
