"""The states that a recurrent layer is given, held against the schedule.

The problem: a state has no positions; a wrong index, a wrong flag or a wrong count of accepted drafts makes a request
go on from another one's memory, and every value looks likely. The idea: which block a request's state lies in, whether
it has one yet, and by how many tokens its last step took it further follow from the schedule alone; each family's
metadata name them differently. Not here: keys and values (given.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_accprobe.capture.states.metadata import MetadataLook, StepRow, WrongNumber, other_many
from vllm_accprobe.capture.states.schedule import Held, Schedule
from vllm_accprobe.dump.journal.state_lines import OTHER

_STATES = ("state_indices_tensor", "non_spec_state_indices_tensor")
_INITIAL = ("has_initial_states_p", "has_initial_states", "has_initial_state")


def states_looks(
    schedule: Schedule, g: int, held: Sequence[Held], rows: list[StepRow], metadata: Any, holders: Callable[[int], str],
    slack: int,
) -> tuple[list[MetadataLook], list[str]]:  # fmt: skip
    columns = [schedule.state_column(g, one) for one in held]
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
        found.append(MetadataLook((first[: len(which)],), _States(some, demanded[which], holders), len(which)))
    initial = next((t for n in _INITIAL if isinstance(t := getattr(metadata, n, None), torch.Tensor)), None)
    if initial is not None and mask is None and 0 < len(initial) <= len(rows):
        found.append(MetadataLook((initial,), _Initial(rows[-len(initial) :], demanded[-len(initial) :]), len(initial)))
    counts = getattr(metadata, "num_accepted_tokens", None)
    if isinstance(counts, torch.Tensor) and not slack:
        some = rows if mask is None else [row for row, drafts in zip(rows, drafting, strict=True) if drafts]
        if len(counts) >= len(some) > 0:
            found.append(MetadataLook((counts[: len(some)],), _Accepted(some, demanded), len(some)))
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
                how = f"{given} tokens are said to be accepted of its last step; it went on by {row.accepted}"
                found.append(WrongNumber(OTHER, row.number, row.name, int(block), how, None, row.start, row.start))
        return found
