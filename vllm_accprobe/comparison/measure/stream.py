"""Stretches of rows of a dump's tensors, read into memory that is used again and again.

The problem: a tensor may be larger than the memory that a comparison is given, and memory that is new to the process
costs more than the arithmetic (two microseconds for each 4 KiB page). The idea: only the rows that meet are read, a few
megabytes at a time, into one buffer per side and worker; pieces of several ranks are joined in it. What does not lie
row by row (rows in a later dimension, partial sums, tensors made from others) is loaded whole, as read.py does.
Not here: which rows are wanted (activations.py), whole tensors and their cache (read.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.shards import CAT, ONE
from vllm_accprobe.comparison.measure.read import Loader, RowBlock, unread
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Record

STRETCH = 4 << 20
"""Bytes of one side that are read at a time: fits the second-level caches together with the other side's, nearly."""
_SPARSE = 4
"""A stretch is read in one go only if it has at most so many times the rows that are wanted."""


class RowReader:
    """Rows of one dump. A block that it returns is valid until the next call."""

    def __init__(self, dump: Any, loader: Loader):
        self._dump, self._loader = dump, loader
        self._whole = np.empty(0, np.uint8)
        self._piece = np.empty(0, np.uint8)
        self._read = getattr(dump, "read_rows", None)

    def load(self, group: Group, cut: tuple[int, int] | None, rows: np.ndarray) -> tuple[RowBlock, np.ndarray]:
        """(block, where the wanted ``rows`` of the group, int64 and not empty, lie in it). Raises read.Unread."""
        start, stop = int(rows.min()), int(rows.max()) + 1
        if cut is not None or not self._streams(group) or stop - start > max(_SPARSE * len(rows), 64):
            return self._loader.load(group, cut), rows
        plan = group.merge
        assert plan is not None
        dtype, feature = group.first.dtype, plan.shape[1:]
        shape = (stop - start, *feature)
        itemsize = DTYPES[dtype].storage.itemsize
        if plan.kind == ONE:
            self._whole = data = _room(self._whole, prod(shape) * itemsize)
            found = self._part(group, plan.use[0], start, stop, data)
        else:
            found = self._join(group, start, stop, shape)
        width = prod(feature)
        return RowBlock(found.reshape(stop - start, width), dtype, feature), rows - start

    def _streams(self, group: Group) -> bool:
        plan = group.merge
        if self._read is None or plan is None or group.where is None or group.row_dim != 0 or not plan.shape:
            return False
        used = [group.records[i] for i in plan.use]
        if any(type(r) is not Record or r.row_dim != 0 or r.shape[0] != plan.shape[0] for r in used):
            return False
        return plan.kind == ONE or (plan.kind == CAT and plan.dim != 0)

    def _part(self, group: Group, member: int, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        try:
            found: np.ndarray = self._dump.read_rows(group.records[member], slice(start, stop), out)
        except (DumpError, OSError) as error:
            raise unread(self._dump, error) from None
        return found

    def _join(self, group: Group, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        plan = group.merge
        assert plan is not None
        assert plan.dim is not None
        storage = DTYPES[group.first.dtype].storage
        nbytes = prod(shape) * storage.itemsize
        self._whole = _room(self._whole, nbytes)
        whole = self._whole[:nbytes].view(storage).reshape(shape)
        before = (slice(None),) * plan.dim
        at = 0
        held, part = -1, whole
        for k, first, last in plan.pieces:
            if k != held:
                record = group.records[plan.use[k]]
                rows = prod(record.shape[1:]) * storage.itemsize
                self._piece = _room(self._piece, rows * (stop - start))
                part, held = self._part(group, plan.use[k], start, stop, self._piece), k
            whole[(*before, slice(at, at + last - first))] = part[(*before, slice(first, last))]
            at += last - first
        return whole


def stretches(places: np.ndarray, row_bytes: int) -> Iterator[np.ndarray]:
    """``places`` (int64 [n]) cut into runs whose rows have about STRETCH bytes."""
    step = max(STRETCH // max(row_bytes, 1), 1)
    for start in range(0, len(places), step):
        yield places[start : start + step]


def row_bytes(group: Group) -> int:
    """Bytes of one row of the whole tensor."""
    shape = group.merge.shape if group.merge else ()
    rows = shape[group.row_dim] if shape else 1
    return prod(shape) * DTYPES[group.first.dtype].itemsize // max(rows, 1)


def _room(buffer: np.ndarray, nbytes: int) -> np.ndarray:
    return buffer if len(buffer) >= nbytes else np.empty(max(nbytes, min(2 * len(buffer), STRETCH)), np.uint8)
