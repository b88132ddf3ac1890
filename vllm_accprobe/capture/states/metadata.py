"""What is held against the schedule, and what came of it: words that the checks of metadata share.

The problem: each number of a step's metadata is compared when it has arrived, with what the schedule said when it was
given. The idea: a `MetadataLook` has both, and gives `WrongNumber`s. Not here: the checks (given.py, given_states.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_accprobe.dump.journal.state_lines import METADATA


@dataclass(frozen=True)
class WrongNumber:
    """One number that is not what it must be. block: the one that is given, or that is concerned; how: a sentence."""

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
class MetadataLook:
    """Tensors that must arrive, and what then says what is wrong with them; numbers: how many are compared."""

    tensors: tuple[torch.Tensor, ...]
    compare: Callable[[Sequence[np.ndarray]], list[WrongNumber]]
    numbers: int


def other_many(rows: Sequence[StepRow], given: int, what: str) -> WrongNumber:
    how = f"{what} are given for {given} requests; the schedule has {len(rows)}"
    return WrongNumber(METADATA, rows[0].number if rows else -1, rows[0].name if rows else "", 0, how)
