"""Ranks' copies of a tensor without rows: whether they are copies at all, and which of them is worst.

The problem: other tools write neither hashes, so that a wrong copy on one rank would go unseen, nor what a rank's
tensor is, so that a partial sum looks like a copy. The idea: the copies are read; where they differ and nobody wrote
down that they are copies, their sum is tried, and taken if it is much nearer to the other side; else the copy of mine
that is furthest off is what is compared, because that rank goes on with it.
Not here: rows (activations.py), layouts that are known (align/shards.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_accprobe.align.shards import ONE, TAKEN_FOR_COPIES
from vllm_accprobe.comparison.measure.read import Loader, RowBlock, Stretch
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.kernels import definition, wide

NEARER = 1 / 16
"""How much of one rank's squared error the sum over ranks may have, to be taken in its place."""
SUMMED = "the sum over ranks is compared"


def settle(
    loaders: tuple[Loader, Loader], groups: tuple[Group, Group], flat: list[RowBlock], table: np.ndarray
) -> tuple[np.ndarray, list[RowBlock], str]:
    """(row table, blocks, what to say) of what is to be compared; golden first. flat: the ranks that were read, data
    [1, elements]; table: float64 [1, fields], theirs."""
    said = ""
    for side, (loader, group) in enumerate(zip(loaders, groups, strict=True)):
        copies = list(_copies(loader, group))
        odd = [(rank, block) for rank, block in copies if not _equal(block, flat[side])]
        if not odd:
            continue
        if group.merge is not None and group.merge.note == TAKEN_FOR_COPIES:
            trial = _with(flat, side, _sum([flat[side], *(block for _, block in copies)]))
            found = _table(trial)
            if trial[side].data.dtype == np.float64 and found[0, definition.DD] < NEARER * table[0, definition.DD]:
                table, flat, said = found, trial, SUMMED
                continue
        for rank, block in odd if side else ():
            trial = _with(flat, side, block)
            found = _table(trial)
            said = said or f"ranks differ (rank {rank} from rank {group.first.rank})"
            if _error(found) > _error(table):
                table, flat, said = found, trial, f"ranks differ (rank {rank} from rank {group.first.rank})"
    return table, flat, said


def _copies(loader: Loader, group: Group) -> Iterator[tuple[int, RowBlock]]:
    """(rank, copy) of the ranks that were not read, unless hashes say that they are equal."""
    plan = group.merge
    for copies in plan.copies if plan is not None and plan.kind == ONE else ():
        digest = group.records[copies[0]].hash
        for i in copies[1:]:
            record = group.records[i]
            if record.payload is not None and (digest is None or record.hash != digest):
                block = loader.replica(group, i)
                yield record.rank, RowBlock(block.data.reshape(1, -1), block.dtype, block.feature)


def _equal(a: RowBlock, b: RowBlock) -> bool:
    """By their bits, so that NaN equals NaN."""
    return a.data.shape == b.data.shape and a.data.tobytes() == b.data.tobytes()


def _sum(blocks: list[RowBlock]) -> RowBlock:
    first = blocks[0]
    if DTYPES[first.dtype].kind != "float":
        return first
    total = np.sum([widen(b.data, b.dtype, as_float=True).astype(np.float64) for b in blocks], axis=0)
    return RowBlock(total, "float64", first.feature)


def _with(flat: list[RowBlock], side: int, block: RowBlock) -> list[RowBlock]:
    return [block if i == side else b for i, b in enumerate(flat)]


def _table(flat: list[RowBlock]) -> np.ndarray:
    one = np.zeros(1, np.int64)
    return wide.rows(*Stretch(flat[0], one, flat[1], one).bits, widen)


def _error(table: np.ndarray) -> tuple[float, float]:
    return float(table[0, definition.MISMATCH]), float(table[0, definition.DD])
