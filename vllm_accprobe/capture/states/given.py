"""What a kernel is given, held against what the schedule says it must be.

The problem: block tables, slots, lengths and state indices that are a step old make a right kernel compute with wrong
rows, and are seen in no tensor that a module gets. The idea: at each step, before any byte is looked at, the integers
of the attention metadata are compared with the schedule's (schedule.py). In host memory now; those of a device are
copied without waiting, with what the schedule said at that moment, and compared when they have arrived. Each backend
has a metadata class of its own: what it does not have is counted, not guessed. Not here: the schedule, states
(given_states.py), bytes (ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vllm_accprobe.capture.states.given_states import states_looks
from vllm_accprobe.capture.states.metadata import MetadataLook, StepRow, WrongNumber, other_many
from vllm_accprobe.capture.states.schedule import STATE, Held, Schedule
from vllm_accprobe.dump.journal.state_lines import METADATA, STALE

_TABLES = ("block_table", "block_table_tensor", "block_tables")


def looks(
    schedule: Schedule, g: int, held: Sequence[Held], metadata: Any, slots: Any, *, split: int = 1, slack: int = 0,
    holders: Callable[[int], str] = str,
) -> tuple[list[MetadataLook], list[str]]:  # fmt: skip
    """What is to be looked at for one group and step.

    Args:
        held: the step's requests in the order of its rows. metadata: the group's; slots: its slot mapping, or None.
        split: kernel blocks per block of the scheduler. slack: by how many positions the schedule may be ahead, where
            it counts drafts as accepted. holders: says whose a block is.

    Returns the looks, and reasons for what cannot be looked at.
    """
    group = schedule.groups[g]
    rows = [StepRow(one.number, one.name, one.start, one.n, one.tables[g], one.accepted) for one in held]
    if group.kind == STATE:
        return states_looks(schedule, g, held, rows, metadata, holders, slack)
    found, missing = [], []
    slots = slots if isinstance(slots, torch.Tensor) else getattr(metadata, "slot_mapping", None)
    if isinstance(slots, torch.Tensor) and slots.dim() == 1:
        demanded = np.concatenate([schedule.slots(g, one) for one in held])
        compare = SlotsLook(rows, demanded, group.block_size, slack, holders)
        found.append(MetadataLook((slots[: len(demanded)],), compare, len(demanded)))
    else:
        missing.append("metadata without a slot mapping")
    lengths = getattr(metadata, "seq_lens", None)
    if isinstance(lengths, torch.Tensor) and lengths.dim() == 1:
        found.append(MetadataLook((lengths[: len(rows)],), _Lengths(rows, slack), len(rows)))
    begins = getattr(metadata, "query_start_loc", None)
    if isinstance(begins, torch.Tensor) and begins.dim() == 1:
        found.append(MetadataLook((begins[: len(rows) + 1],), _Begins(rows), len(rows)))
    table = next((t for n in _TABLES if isinstance(t := getattr(metadata, n, None), torch.Tensor)), None)
    if table is not None and table.dim() == 2:
        columns = [schedule.touched(g, one) for one in held]
        compare_tables = _Tables(rows, columns, split, holders, group.block_size)
        found.append(MetadataLook((table[: len(rows)],), compare_tables, sum(map(len, columns))))
    else:
        missing.append("metadata without a block table")
    return found, missing


class SlotsLook:
    """Where rows are written."""

    def __init__(self, rows: list[StepRow], demanded: np.ndarray, size: int, slack: int, holders: Callable[[int], str]):
        self.rows, self.demanded, self.size, self.slack, self.holders = rows, demanded, size, slack, holders

    def __call__(self, arrived: Sequence[np.ndarray]) -> list[WrongNumber]:
        given = arrived[0]
        if len(given) == len(self.demanded) and (given == self.demanded).all():
            return []
        if len(given) < len(self.demanded):
            row = self.rows[0]
            how = f"{len(given)} slots are given for {len(self.demanded)} rows"
            return [WrongNumber(METADATA, row.number, row.name, 0, how)]
        return list(self._wrong(given))

    def _wrong(self, given: np.ndarray) -> Iterator[WrongNumber]:
        at = 0
        for row in self.rows:
            mine, demanded = given[at : at + row.n], self.demanded[at : at + row.n]
            at += row.n
            if (mine == demanded).all() or any(
                (mine == self._of(row, row.start - back)).all() for back in range(1, min(self.slack, row.start) + 1)
            ):
                continue
            bad = np.flatnonzero(mine != demanded)
            i = int(bad[0])
            slot, block = int(mine[i]), int(mine[i]) // self.size
            goes = "nowhere" if slot < 0 else f"to slot {slot} of block {block}, {self.holders(block)}"
            more = f" ({len(bad)} rows of this request)" if len(bad) > 1 else ""
            how = f"its row is written {goes}; the schedule demands slot {int(demanded[i])}{more}"
            position = row.start + i
            wanted = int(demanded[i]) // self.size
            yield WrongNumber(
                STALE, row.number, row.name, wanted, how, int(demanded[i]), position, row.start + int(bad[-1])
            )

    def _of(self, row: StepRow, start: int) -> np.ndarray:
        positions = np.arange(start, start + row.n)
        columns = np.minimum(positions // self.size, len(row.table) - 1)
        return np.asarray(row.table[columns] * self.size + positions % self.size)


class _Lengths:
    """How far each request is read."""

    def __init__(self, rows: list[StepRow], slack: int):
        self.rows, self.slack = rows, slack
        self.demanded = np.array([row.start + row.n for row in rows])

    def __call__(self, arrived: Sequence[np.ndarray]) -> list[WrongNumber]:
        given = arrived[0].astype(np.int64)
        if len(given) != len(self.demanded):
            return [other_many(self.rows, len(given), "lengths")]
        short = self.demanded - given
        found = []
        for i in np.flatnonzero((short < 0) | (short > self.slack)).tolist():
            row = self.rows[i]
            how = f"its length is given as {int(given[i])}; the schedule demands {int(self.demanded[i])}"
            block = int(row.table[-1]) if len(row.table) else 0
            found.append(
                WrongNumber(METADATA, row.number, row.name, block, how, None, row.start, row.start + row.n - 1)
            )
        return found


class _Begins:
    """Where each request's rows begin."""

    def __init__(self, rows: list[StepRow]):
        self.rows = rows
        self.demanded = np.cumsum([0, *(row.n for row in rows)])

    def __call__(self, arrived: Sequence[np.ndarray]) -> list[WrongNumber]:
        given = arrived[0]
        if len(given) != len(self.demanded):
            return [other_many(self.rows, len(given) - 1, "first rows")]
        found = []
        for i in np.flatnonzero(given != self.demanded).tolist():
            row = self.rows[min(i, len(self.rows) - 1)]
            how = f"row {int(given[i])} is given as its first; the schedule demands {int(self.demanded[i])}"
            found.append(WrongNumber(METADATA, row.number, row.name, int(row.table[0]) if len(row.table) else 0, how))
        return found[:1]


class _Tables:
    """Which blocks each request reads and writes."""

    def __init__(
        self, rows: list[StepRow], columns: list[np.ndarray], split: int, holders: Callable[[int], str], size: int
    ):
        self.rows, self.split, self.holders, self.size = rows, split, holders, size
        of = np.repeat(np.arange(len(rows)), [len(c) for c in columns])
        at = np.concatenate(columns)
        blocks = np.concatenate([row.table[c] for row, c in zip(rows, columns, strict=True)])
        inner = np.arange(split)
        self.of = np.repeat(of, split)
        self.at = (at[:, None] * split + inner).ravel()
        self.demanded = (blocks[:, None] * split + inner).ravel()

    def __call__(self, arrived: Sequence[np.ndarray]) -> list[WrongNumber]:
        table = arrived[0]
        if len(table) != len(self.rows) or table.shape[1] <= self.at.max(initial=-1):
            return [other_many(self.rows, len(table), f"block tables of {table.shape[1]} columns")]
        given = table[self.of, self.at]
        wrong = np.flatnonzero(given != self.demanded)
        found: dict[int, WrongNumber] = {}
        for i in wrong.tolist():
            row = self.rows[int(self.of[i])]
            if row.number in found:
                continue
            block, demanded = int(given[i]) // self.split, int(self.demanded[i]) // self.split
            column = int(self.at[i]) // self.split
            how = (
                f"its block table names block {block} in column {column}, {self.holders(block)}; the schedule demands "
                f"block {demanded}"
            )
            low = column * self.size
            found[row.number] = WrongNumber(METADATA, row.number, row.name, block, how, None, low, low + self.size - 1)
        return list(found.values())
