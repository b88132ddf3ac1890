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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_accprobe.capture.states.schedule import STATE, Schedule, ScheduledRequest
from vllm_accprobe.capture.vllm.vllm_compat import block_table
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
    """A tensor that must arrive, and what then says what is wrong with it. what: in a word; numbers: how many are
    compared."""

    what: str
    tensor: torch.Tensor
    compare: Callable[[np.ndarray], list[WrongNumber]]
    numbers: int


def _wrong(
    kind: str, row: StepRow, block: int, how: str, last: int | None = None, slot: int | None = None, first: int = 0
) -> WrongNumber:
    """first, last: of the row's positions those that are concerned, counted from its start; None: all behind."""
    high = row.start + (row.n - 1 if last is None else last)
    return WrongNumber(kind, row.number, row.name, block, how, slot, row.start + first, high)


def _other_many(rows: Sequence[StepRow], count: int, what: str) -> WrongNumber:
    how = f"there are {what} for {count} requests; the schedule has {len(rows)}"
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


SLOTS = "slots"
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
        indices = _indices(metadata)
        parts = [] if indices is None else [(indices, np.arange(len(rows)))]
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
        compare = partial(_states, some, demanded[which], holders)
        found.append(MetadataCheck("states", first[: len(which)], compare, len(which)))
    initial = next((t for n in _INITIAL if isinstance(t := getattr(metadata, n, None), torch.Tensor)), None)
    if initial is not None and mask is None and 0 < len(initial) <= len(rows):
        compare = partial(_initial, rows[-len(initial) :], demanded[-len(initial) :])
        found.append(MetadataCheck("initial", initial, compare, len(initial)))
    counts = getattr(metadata, "num_accepted_tokens", None)
    if isinstance(counts, torch.Tensor) and not slack:
        some = rows if mask is None else [row for row, drafts in zip(rows, drafting, strict=True) if drafts]
        if len(counts) >= len(some) > 0:
            compare = partial(_accepted, some, demanded)
            found.append(MetadataCheck("accepted", counts[: len(some)], compare, len(some)))
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


def _states(
    rows: Sequence[StepRow], demanded: np.ndarray, holders: Callable[[int], str], arrived: np.ndarray
) -> list[WrongNumber]:
    """Whose state each row continues."""
    actual = arrived.astype(np.int64)
    if len(actual) != len(demanded):
        return [_other_many(rows, len(actual), "state indices")]
    found = []
    for i in np.flatnonzero(actual != demanded).tolist():
        block = int(actual[i])
        how = f"its state is taken from block {block}, {holders(block)}; the schedule demands block {demanded[i]}"
        found.append(_wrong(OTHER, rows[i], block, how))
    return found


def _initial(rows: Sequence[StepRow], blocks: np.ndarray, arrived: np.ndarray) -> list[WrongNumber]:
    """Whether a row begins with a state, or with none."""
    found = []
    for row, block, actual in zip(rows, blocks, arrived.astype(bool).tolist(), strict=True):
        if actual != (row.start > 0):
            has = "begins with whatever its block holds" if actual else "begins without the state of its prefix"
            how = f"it {has}; the schedule demands {'none' if actual else 'it'} at position {row.start}"
            found.append(_wrong(OTHER, row, int(block), how, 0))
    return found


def _accepted(rows: Sequence[StepRow], blocks: np.ndarray, arrived: np.ndarray) -> list[WrongNumber]:
    """How many of the last step's drafts were accepted, which chooses the state that a row goes on from."""
    return [
        _wrong(OTHER, row, int(block),
               f"{actual} tokens were reported as accepted in its last step; it continued by {row.accepted}", 0)
        for row, block, actual in zip(rows, blocks, arrived.tolist(), strict=False)
        if row.accepted is not None and actual != row.accepted
    ]  # fmt: skip


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
        compare = partial(_slots, rows, demanded, group.block_size, slack, holders)
        found.append(MetadataCheck(SLOTS, slots[: len(demanded)], compare, len(demanded)))
    else:
        missing.append("metadata without a slot mapping")
    for what, name, check, more in (
        ("lengths", "seq_lens", partial(_lengths, rows, slack), 0),
        ("begins", "query_start_loc", partial(_begins, rows), 1),
    ):
        numbers = getattr(metadata, name, None)
        if isinstance(numbers, torch.Tensor) and numbers.dim() == 1:
            found.append(MetadataCheck(what, numbers[: len(rows) + more], check, len(rows)))
    table = block_table(metadata)
    if table is not None:
        columns = [schedule.touched(g, one) for one in requests]
        compare = partial(_tables, rows, columns, split, holders, group.block_size)
        found.append(MetadataCheck("tables", table[: len(rows)], compare, sum(map(len, columns))))
    else:
        missing.append("metadata without a block table")
    return found, missing


def _slots(
    rows: list[StepRow], demanded: np.ndarray, size: int, slack: int, holders: Callable[[int], str], actual: np.ndarray
) -> list[WrongNumber]:
    """Where rows are written."""
    if len(actual) == len(demanded) and (actual == demanded).all():
        return []
    if len(actual) < len(demanded):
        how = f"{len(actual)} slots for {len(demanded)} rows"
        return [WrongNumber(METADATA, rows[0].number, rows[0].name, 0, how)]
    found, at = [], 0
    for row in rows:
        mine, wanted = actual[at : at + row.n], demanded[at : at + row.n]
        at += row.n
        if (mine == wanted).all() or any(
            (mine == _slots_of(row, row.start - back, size)).all() for back in range(1, min(slack, row.start) + 1)
        ):
            continue
        bad = np.flatnonzero(mine != wanted)
        i = int(bad[0])
        slot, block = int(mine[i]), int(mine[i]) // size
        goes = "nowhere" if slot < 0 else f"to slot {slot} of block {block}, {holders(block)}"
        more = f" ({len(bad)} rows of this request)" if len(bad) > 1 else ""
        how = f"its row is written {goes}; the schedule demands slot {int(wanted[i])}{more}"
        found.append(_wrong(STALE, row, int(wanted[i]) // size, how, int(bad[-1]), int(wanted[i]), i))
    return found


def _slots_of(row: StepRow, start: int, size: int) -> np.ndarray:
    positions = np.arange(start, start + row.n)
    columns = np.minimum(positions // size, len(row.table) - 1)
    return np.asarray(row.table[columns] * size + positions % size)


def _lengths(rows: list[StepRow], slack: int, arrived: np.ndarray) -> list[WrongNumber]:
    """How far each request is read."""
    actual, demanded = arrived.astype(np.int64), np.array([row.start + row.n for row in rows])
    if len(actual) != len(demanded):
        return [_other_many(rows, len(actual), "lengths")]
    short = demanded - actual
    return [
        _wrong(METADATA, rows[i], int(rows[i].table[-1]) if len(rows[i].table) else 0,
               f"its length is {actual[i]}; the schedule demands {demanded[i]}")
        for i in np.flatnonzero((short < 0) | (short > slack)).tolist()
    ]  # fmt: skip


def _begins(rows: list[StepRow], actual: np.ndarray) -> list[WrongNumber]:
    """Where each request's rows begin."""
    demanded = np.cumsum([0, *(row.n for row in rows)])
    if len(actual) != len(demanded):
        return [_other_many(rows, len(actual) - 1, "first rows")]
    for i in np.flatnonzero(actual != demanded).tolist():
        row = rows[min(i, len(rows) - 1)]
        how = f"row {actual[i]} is its first; the schedule demands {demanded[i]}"
        return [WrongNumber(METADATA, row.number, row.name, int(row.table[0]) if len(row.table) else 0, how)]
    return []


def _tables(
    rows: list[StepRow], columns: list[np.ndarray], split: int, holders: Callable[[int], str], size: int,
    table: np.ndarray,
) -> list[WrongNumber]:  # fmt: skip
    """Which blocks each request reads and writes."""
    inner = np.arange(split)
    of = np.repeat(np.repeat(np.arange(len(rows)), [len(c) for c in columns]), split)
    at = (np.concatenate(columns)[:, None] * split + inner).ravel()
    blocks = np.concatenate([row.table[c] for row, c in zip(rows, columns, strict=True)])
    demanded = (blocks[:, None] * split + inner).ravel()
    if len(table) != len(rows) or table.shape[1] <= at.max(initial=-1):
        return [_other_many(rows, len(table), f"block tables of {table.shape[1]} columns")]
    actual = table[of, at]
    found: dict[int, WrongNumber] = {}
    for i in np.flatnonzero(actual != demanded).tolist():
        row, block, column = rows[int(of[i])], int(actual[i]) // split, int(at[i]) // split
        if row.number not in found:
            how = (
                f"its block table names block {block} in column {column}, {holders(block)}; the schedule demands "
                f"block {int(demanded[i]) // split}"
            )
            low = column * size
            found[row.number] = WrongNumber(METADATA, row.number, row.name, block, how, None, low, low + size - 1)
    return list(found.values())
