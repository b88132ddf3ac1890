"""A cache of which only some blocks were kept, and arguments that name blocks, put together again.

The problem: a block table says 4711, and of the cache only the few blocks are in the dump that the call touches. The
idea: the blocks that there are become the whole cache, and the call's block tables, slots and indices are written anew
for it, so that the call is complete in itself: references, kernels of this machine and generated tests run it without
knowing of any of this. Block 0 stays block 0; what is below 0 stays as it is; what names a block that was not touched
(the unused end of a table) becomes -1. Not here: which blocks a call touches (capture/ops/touched.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_accprobe.dump.opcalls import inputs
from vllm_accprobe.dump.schema import OpCall, Record


class Renumbered:
    """Numbers of blocks times ``unit``, for the cache that blocks ``ids`` [n] make."""

    def __init__(self, ids: Any, unit: int):
        self._sorted, self._places = torch.sort(ids.long().reshape(-1), stable=True)
        self._unit = unit

    def __call__(self, numbers: Any) -> Any:
        """An integer tensor's values anew, its dtype as it is."""
        if numbers.dtype not in (torch.int32, torch.int64) or not len(self._sorted):
            return numbers
        wide = numbers.long()
        blocks = wide.div(self._unit, rounding_mode="floor")
        at = torch.searchsorted(self._sorted, blocks).clamp(max=len(self._sorted) - 1)
        there = self._sorted[at] == blocks
        found = self._places[at] * self._unit + wide % self._unit
        return torch.where(wide < 0, wide, torch.where(there, found, -1)).to(numbers.dtype)


def numbered(op: OpCall, records: Mapping[str, Record], read: Callable[[Record], Any]) -> dict[str, Renumbered]:
    """By role, how the arguments of ``op`` that name blocks are to be written; {} for nearly every call."""
    found: dict[str, Renumbered] = {}
    for t in inputs(op):
        blocks = t.get("blocks")
        if not blocks:
            continue
        record = records.get(blocks["ids"])
        if record is None or record.payload is None:
            continue
        for role, unit in blocks["by"]:
            found.setdefault(role, Renumbered(read(record), unit))
    return found
