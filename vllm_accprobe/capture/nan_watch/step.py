"""What errcheck knows of a step while it runs, of a call that it holds, and of a call that is bad.

Not here: what is done with it (watch.py).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_accprobe.capture.nan_watch.bad_values import Badness
from vllm_accprobe.capture.taps.calls import Tap

GOOD, BAD, UNKNOWN, UNCHECKED = "good", "bad", "unknown", "not checked"
"""States of an input: ``unknown``: changed in place by the call before anybody looked; ``not checked``: no
floating-point numbers."""


@dataclass(frozen=True)
class Input:
    """One input of a bad call. tensor: as it went in, None where that is not known any more."""

    role: str
    tensor: torch.Tensor | None
    state: str
    bad: Badness = field(default_factory=Badness)


@dataclass(frozen=True)
class Alarm:
    """The first bad output of a step. outputs: (role, tensor) of the call, empty where it was not held."""

    step: WatchedStep
    order: int
    tap: str
    cls: str
    part: str
    call: int
    role: str
    bad: Badness | None
    outputs: tuple[tuple[str, torch.Tensor], ...]
    inputs: tuple[Input, ...]
    before: str
    """The tap whose output was checked before this one, "" at the step's start."""


class WatchedStep:
    """What is known of a step while it runs. rows: real token rows; padded: rows of the root's input."""

    __slots__ = (
        "calls", "checks", "held", "inside", "last", "note", "number", "order", "padded", "rows", "seen",
        "stack",
    )  # fmt: skip

    def __init__(self, number: int, rows: int, note: Any = None):
        self.number = number
        self.rows = rows
        self.note = note
        self.padded = rows
        self.order = 0
        self.held = 0
        self.last = ""
        self.inside: str | None = None
        self.stack: list[str] = []
        self.calls: dict[str, int] = {}
        self.seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        """Checked outputs by identity: the object, and when it was checked first and last."""
        self.checks: dict[torch.dtype, list[Check]] = {}


class HeldCall(NamedTuple):
    """References to what went in and out of one call. copies: inputs that it changes in place, as they were; begun: the
    step's order when it began."""

    tap: Tap
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    copies: dict[str, torch.Tensor] | None
    begun: int


class Check(NamedTuple):
    """One reduction. call: None where the step's memory for references was spent."""

    order: int
    name: str
    number: int
    role: str
    part: str
    cls: str
    before: str
    call: HeldCall | None


@dataclass
class PendingStep:
    step: WatchedStep
    hosts: dict[torch.dtype, torch.Tensor]
    event: Any


def real_rows(step: WatchedStep, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the padding rows at its end, where its first dimension has them."""
    if step.padded > step.rows and tensor.dim() and tensor.shape[0] == step.padded:
        return tensor[: step.rows]
    return tensor


def padded_rows(rows: int, inputs: list[tuple[str, torch.Tensor]]) -> int:
    """The rows that the root is called with: those of its token ids or embeddings, or of its positions' last axis."""
    for role, tensor in inputs:
        if role in ("input.input_ids", "input.inputs_embeds") and tensor.dim():
            return max(rows, tensor.shape[0])
    for role, tensor in inputs:
        if role == "input.positions" and tensor.dim():
            return max(rows, tensor.shape[-1])
    return rows


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
