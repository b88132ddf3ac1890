"""The integers that a kernel is called with (slots, block tables, lengths, state indices), compared with the schedule.

The problem: block tables, slots, lengths and state indices that are a step old make a correct kernel compute with wrong
rows, and are in no tensor that a module gets; a wrong state index or flag makes a request continue from another one's
memory. The idea: at each step the attention's metadata are compared with what follows from the schedule: in host memory
at once; those of a device are copied without waiting and compared when they have arrived. What a backend's metadata do
not have is counted. Whether a recurrent state must have changed follows from token ids: if the last ids before and
after the step differ over as many tokens as a convolution's state holds, it holds other inputs; else nothing is
concluded.

Not here: the schedule (schedule.py), bytes (ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_accprobe.capture.states.schedule import STATE, Schedule, ScheduledRequest
from vllm_accprobe.capture.vllm.vllm_compat import BLOCK_TABLES
from vllm_accprobe.dump.journal import METADATA, OTHER, STALE


@dataclass(frozen=True)
class WrongNumber:
    """One number that is not what it must be. block: the one that is named, or concerned; how: a sentence."""

    kind: str
    request: int
    name: str
    block: int
    how: str
    slot: int | None = None
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class StepRow:
    """A request's part of a step as it is at this moment; table: its blocks in the group, which is never changed."""

    number: int
    name: str
    start: int
    n: int
    table: np.ndarray
    accepted: int | None


@dataclass(frozen=True)
class MetadataCheck:
    """Tensors that must arrive, and what then says what is wrong with them; numbers: how many are compared."""

    tensors: tuple[torch.Tensor, ...]
    compare: Callable[[Sequence[np.ndarray]], list[WrongNumber]]
    numbers: int


def other_many(rows: Sequence[StepRow], given: int, what: str) -> WrongNumber:
    how = f"there are {what} for {given} requests; the schedule has {len(rows)}"
    return WrongNumber(METADATA, rows[0].number if rows else -1, rows[0].name if rows else "", 0, how)


MOST_TOKENS = 8
"""Ids that are kept of a request: convolutions hold three (Mamba's kernel of 4), seldom more."""


def token_tails(
    parts: Sequence[tuple[ScheduledRequest, int, int]], ids: np.ndarray
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By request's number, (the last ids before the step, the last behind it), and keeps the latter.

    parts: (request, its first position in the step, how many rows), in the order of ``ids``, the step's token ids.
    """
    found = {}
    at = 0
    for one, start, n in parts:
        tail, own = one.tail, ids[at : at + n].astype(np.int64)
        at += n
        if one.tail_end != start or tail is None:
            prompt = one.prompt if one.prompt is not None and start <= len(one.prompt) else None
            tail = None if prompt is None else np.asarray(prompt[max(start - MOST_TOKENS, 0) : start], np.int64)
        one.tail = None
        if tail is not None and len(own) == n:
            one.tail, one.tail_end = np.concatenate([tail, own])[-MOST_TOKENS:], start + n
            found[one.number] = tail, one.tail
    return found


def must_change(tails: Mapping[int, tuple[np.ndarray, np.ndarray]], number: int, tokens: int) -> bool:
    """Whether a state that remembers ``tokens`` tokens cannot be as it was."""
    before, behind = tails.get(number, (None, None))
    if before is None or behind is None or min(len(before), len(behind)) < tokens or tokens < 1:
        return False
    return bool((before[-tokens:] != behind[-tokens:]).any())


_STATES = ("state_indices_tensor", "non_spec_state_indices_tensor")
_INITIAL = ("has_initial_states_p", "has_initial_states", "has_initial_state")


def state_checks(
    schedule: Schedule, g: int, requests: Sequence[ScheduledRequest], rows: list[StepRow], metadata: Any,
    holders: Callable[[int], str], slack: int,
) -> tuple[list[MetadataCheck], list[str]]:  # fmt: skip
    columns = [schedule.state_column(g, one) for one in requests]
    demanded = np.array([row.table[c] if c < len(row.table) else -1 for row, c in zip(rows, columns, strict=True)])
    mask = getattr(metadata, "spec_sequence_masks_cpu", None)
    if mask is None:  # before 0.32 there is the device's only
        mask = getattr(metadata, "spec_sequence_masks", None)
    if isinstance(mask, torch.Tensor) and mask.device.type != "cpu":
        return [], ["states of a step whose drafts only the device knows"]
    if mask is None:
        given = _indices(metadata)
        parts = [] if given is None else [(given, np.arange(len(rows)))]
    else:
        drafting = mask.numpy()[: len(rows)].astype(bool)
        parts = [
            (tensor, which)
            for tensor, which in (
                (getattr(metadata, "non_spec_state_indices_tensor", None), np.flatnonzero(~drafting)),
                (getattr(metadata, "spec_state_indices_tensor", None), np.flatnonzero(drafting)),
            )
            if isinstance(tensor, torch.Tensor) and len(which)
        ]
    if not parts or (slack and schedule.groups[g].aligned):
        return [], ["metadata without state indices"]
    found = []
    for tensor, which in parts:
        first = tensor if tensor.dim() == 1 else tensor[:, 0]
        some = [rows[i] for i in which]
        found.append(MetadataCheck((first[: len(which)],), _States(some, demanded[which], holders), len(which)))
    initial = next((t for n in _INITIAL if isinstance(t := getattr(metadata, n, None), torch.Tensor)), None)
    if initial is not None and mask is None and 0 < len(initial) <= len(rows):
        last = _Initial(rows[-len(initial) :], demanded[-len(initial) :])
        found.append(MetadataCheck((initial,), last, len(initial)))
    counts = getattr(metadata, "num_accepted_tokens", None)
    if isinstance(counts, torch.Tensor) and not slack:
        some = rows if mask is None else [row for row, drafts in zip(rows, drafting, strict=True) if drafts]
        if len(counts) >= len(some) > 0:
            found.append(MetadataCheck((counts[: len(some)],), _Accepted(some, demanded), len(some)))
    return found, []


def _indices(metadata: Any) -> torch.Tensor | None:
    """One state per row of a step without drafts."""
    parts = [
        tensor if tensor.dim() == 1 else tensor[:, 0]
        for name in ("state_indices_tensor_d", "state_indices_tensor_p")
        if isinstance(tensor := getattr(metadata, name, None), torch.Tensor)
    ]
    if parts:
        return torch.cat([part.to(torch.int64) for part in parts])
    return next((t for n in _STATES if isinstance(t := getattr(metadata, n, None), torch.Tensor)), None)


class _States:
    """Whose state each row continues."""

    def __init__(self, rows: Sequence[StepRow], demanded: np.ndarray, holders: Callable[[int], str]):
        self.rows, self.demanded, self.holders = rows, demanded, holders

    def __call__(self, arrived: Sequence[np.ndarray]) -> list[WrongNumber]:
        given = arrived[0].astype(np.int64)
        if len(given) != len(self.demanded):
            return [other_many(self.rows, len(given), "state indices")]
        found = []
        for i in np.flatnonzero(given != self.demanded).tolist():
            row, block = self.rows[i], int(given[i])
            how = f"its state is taken from block {block}, {self.holders(block)}; the schedule demands block "
            how += str(int(self.demanded[i]))
            found.append(WrongNumber(OTHER, row.number, row.name, block, how, None, row.start, row.start + row.n - 1))
        return found


class _Initial:
    """Whether a row begins with a state, or with none."""

    def __init__(self, rows: Sequence[StepRow], blocks: np.ndarray):
        self.rows, self.blocks = rows, blocks

    def __call__(self, arrived: Sequence[np.ndarray]) -> list[WrongNumber]:
        found = []
        for row, block, given in zip(self.rows, self.blocks, arrived[0].astype(bool).tolist(), strict=True):
            if given != (row.start > 0):
                has = "begins with whatever its block holds" if given else "begins without the state of its prefix"
                how = f"it {has}; the schedule demands {'none' if given else 'it'} at position {row.start}"
                found.append(WrongNumber(OTHER, row.number, row.name, int(block), how, None, row.start, row.start))
        return found


class _Accepted:
    """How many of the last step's drafts were accepted, which chooses the state that a row goes on from."""

    def __init__(self, rows: Sequence[StepRow], blocks: np.ndarray):
        self.rows, self.blocks = rows, blocks

    def __call__(self, arrived: Sequence[np.ndarray]) -> list[WrongNumber]:
        found = []
        for row, block, given in zip(self.rows, self.blocks, arrived[0].tolist(), strict=False):
            if row.accepted is not None and given != row.accepted:
                how = f"{given} tokens were reported as accepted in its last step; it continued by {row.accepted}"
                found.append(WrongNumber(OTHER, row.number, row.name, int(block), how, None, row.start, row.start))
        return found


def metadata_checks(
    schedule: Schedule, g: int, requests: Sequence[ScheduledRequest], metadata: Any, slots: Any, *,
    split: int = 1, slack: int = 0, holders: Callable[[int], str] = str,
) -> tuple[list[MetadataCheck], list[str]]:  # fmt: skip
    """What is to be checked for one group and step.

    Args:
        requests: the step's in the order of its rows. metadata: the group's; slots: its slot mapping, or None.
        split: kernel blocks per block of the scheduler. slack: by how many positions the schedule may be ahead, where
            it counts drafts as accepted. holders: says whose a block is.

    Returns the metadata_checks, and reasons for what cannot be looked at.
    """
    group = schedule.groups[g]
    rows = [StepRow(one.number, one.name, one.start, one.n, one.tables[g], one.accepted) for one in requests]
    if group.kind == STATE:
        return state_checks(schedule, g, requests, rows, metadata, holders, slack)
    found, missing = [], []
    slots = slots if isinstance(slots, torch.Tensor) else getattr(metadata, "slot_mapping", None)
    if isinstance(slots, torch.Tensor) and slots.dim() == 1:
        demanded = np.concatenate([schedule.slots(g, one) for one in requests])
        compare = SlotsCheck(rows, demanded, group.block_size, slack, holders)
        found.append(MetadataCheck((slots[: len(demanded)],), compare, len(demanded)))
    else:
        missing.append("metadata without a slot mapping")
    lengths = getattr(metadata, "seq_lens", None)
    if isinstance(lengths, torch.Tensor) and lengths.dim() == 1:
        found.append(MetadataCheck((lengths[: len(rows)],), _Lengths(rows, slack), len(rows)))
    begins = getattr(metadata, "query_start_loc", None)
    if isinstance(begins, torch.Tensor) and begins.dim() == 1:
        found.append(MetadataCheck((begins[: len(rows) + 1],), _Begins(rows), len(rows)))
    table = next((t for n in BLOCK_TABLES if isinstance(t := getattr(metadata, n, None), torch.Tensor)), None)
    if table is not None and table.dim() == 2:
        columns = [schedule.touched(g, one) for one in requests]
        compare_tables = _Tables(rows, columns, split, holders, group.block_size)
        found.append(MetadataCheck((table[: len(rows)],), compare_tables, sum(map(len, columns))))
    else:
        missing.append("metadata without a block table")
    return found, missing


class SlotsCheck:
    """Where rows are written."""

    def __init__(self, rows: list[StepRow], demanded: np.ndarray, size: int, slack: int, holders: Callable[[int], str]):
        self.rows, self.demanded, self.size, self.slack, self.holders = rows, demanded, size, slack, holders

    def __call__(self, arrived: Sequence[np.ndarray]) -> list[WrongNumber]:
        given = arrived[0]
        if len(given) == len(self.demanded) and (given == self.demanded).all():
            return []
        if len(given) < len(self.demanded):
            row = self.rows[0]
            how = f"{len(given)} slots for {len(self.demanded)} rows"
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
            how = f"its length is {int(given[i])}; the schedule demands {int(self.demanded[i])}"
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
            how = f"row {int(given[i])} is its first; the schedule demands {int(self.demanded[i])}"
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
