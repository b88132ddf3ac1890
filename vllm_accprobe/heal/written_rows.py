"""The keys and values of an attention layer as they went into it, by the slots of its cache.

The problem: attention looks back at rows of earlier steps and, after a prefix hit, of other requests; the cache has
them in a layout of its kernel, and as a faulty kernel wrote them. The idea: what goes into the layer is kept on the
host by the slot that the engine assigns, from the server's first step on, and a request's rows are those of its block
table, so that prefix hits and preempted requests need no rule of their own. The size of a block follows from slots,
positions and the table. It takes as much host memory as the healed layers' cache.
Not here: reading the engine's tables (capture/vllm/vllm_compat.py), attention itself (opcheck/references/attention.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_accprobe.capture.vllm.vllm_compat import LayerBatch
from vllm_accprobe.opcheck.reference import Declined

UNWRITTEN = "earlier rows that it reads were not written while healing ran"
_SIZES = tuple(1 << n for n in range(12))
"""Slots of a block that are tried after the configured number."""
Tensor = Any  # a torch.Tensor


class WrittenRows:
    """names: of the layer's inputs that its cache holds. size: slots of a block as configured, 0 if unknown."""

    def __init__(self, names: Sequence[str], size: int):
        self.names = tuple(names)
        self._sizes = (*([size] if size else []), *_SIZES)
        self._size = 0
        self._blocks: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        self._known: dict[int, Tensor] = {}

    def write(self, batch: LayerBatch, tensors: Mapping[str, Tensor]) -> None:
        """The rows of one step, in the order of the batch: by name [rows, ...]. Raises Declined."""
        n = int(batch.begins[-1])
        if any(name not in tensors or len(tensors[name]) < n for name in self.names) or len(batch.slots) < n:
            raise Declined("its keys and values are not rows of its batch")
        slots = batch.slots[:n]
        size = self._size_of(batch, slots)
        block, offset = slots.div(size, rounding_mode="floor"), slots % size
        for b in block[slots >= 0].unique().tolist():
            at = block == b
            self._known.setdefault(b, torch.zeros(size, dtype=torch.bool))[offset[at]] = True
            for name in self.names:
                rows = tensors[name][:n][at]
                kept = self._blocks[name].get(b)
                if kept is None:
                    kept = self._blocks[name][b] = rows.new_zeros((size, *rows.shape[1:]))
                kept[offset[at]] = rows

    def copy(self, moves: Iterable[tuple[int, int]]) -> None:
        """The engine has copied blocks: (from, to), one after the other."""
        for source, to in moves:
            for kept in (self._known, *self._blocks.values()):
                if source in kept:
                    kept[to] = kept[source].clone()
                else:
                    kept.pop(to, None)

    def view(self, batch: LayerBatch, window: int = 0) -> StepRows:
        """What the step's rows look back at. window: how many rows, 0 for all."""
        return StepRows(self, batch, window)

    def of(self, blocks: Sequence[int], n: int) -> tuple[dict[str, Tensor], Tensor]:
        """(the first ``n`` rows of these blocks by name, which of them are known); zeros where none is."""
        known = [self._known.get(b, torch.zeros(self._size, dtype=torch.bool)) for b in blocks]
        rows = {}
        for name, kept in self._blocks.items():
            some = next(iter(kept.values()))
            none = torch.zeros_like(some)
            rows[name] = torch.cat([kept.get(b, none) for b in blocks])[:n]
        return rows, torch.cat(known)[:n]

    def _size_of(self, batch: LayerBatch, slots: Tensor) -> int:
        """Raises Declined where the table does not lead to the slots."""
        if self._size:
            return self._size
        requests, positions = batch.rows()
        real = slots >= 0
        requests, positions, slots = requests[real], positions[real], slots[real]
        for size in self._sizes:
            column = positions.div(size, rounding_mode="floor")
            if len(slots) and int(column.max()) < batch.table.shape[1]:
                block = batch.table[requests, column]
                if bool((block * size + positions % size == slots).all()):
                    self._size = size
                    return size
        raise Declined("its block table does not lead to its slots")

    @property
    def size(self) -> int:
        """Slots of a block; 0 before the first step."""
        return self._size


class StepRows:
    """``Call.extra["cache"]`` of one step, as calls/neighbours.Cache of a dump. why: the reason if some request's
    history is not known, else ""."""

    def __init__(self, written: WrittenRows, batch: LayerBatch, window: int):
        self._written, self._batch, self._window = written, batch, window
        self.why = ""

    def requests(self, causal: bool = True) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Per request: its rows' places in the step's tensors and their positions, int64 [n], and by name what it
        wrote from position 0 to the last of them."""
        if not causal:
            self.why = "attention that is not causal has no cache to look back at"
            return
        batch = self._batch
        for r, total in enumerate(batch.lengths.tolist()):
            begin, end = int(batch.begins[r]), int(batch.begins[r + 1])
            if end <= begin or total < end - begin:
                continue
            first = total - (end - begin)
            blocks = batch.table[r, : -(-total // self._written.size)].tolist()
            rows, known = self._written.of(blocks, total)
            if not bool(known[max(0, first - self._window + 1) if self._window else 0 :].all()):
                self.why = UNWRITTEN
                continue
            yield torch.arange(begin, end), torch.arange(first, total), rows
