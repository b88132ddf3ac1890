"""What observes a runner, and what it hears of a step: `StepObserver`, `EngineStep`, in words of no release.

The problem: tensors, states and error checks listen to one runner, each to some of its moments. The idea: a listener
overrides what it cares for; a step is a plain value whose dear parts are made when somebody wants them. Not here: who
calls it (runner.py), vLLM's names (vllm_compat.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.capture.core.session import NOTHING
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import Image, SamplingParameters


@dataclass(frozen=True)
class NewRequest:
    """A request that the scheduler names for the first time. prompt: its token ids, None where it came as embeddings;
    length: how many rows it has. extra: what its client gave for extensions of vLLM. adapter: the name of its LoRA
    adapter, "" for none. embedded: makes the hash of a prompt that came as embeddings; None for tokens. salt: a hash of
    its cache salt, "" for none, or where the scheduler's process does not say. sampling: makes what it asks of the
    sampler, None for a pooling request."""

    name: str
    prompt: Sequence[int] | None
    length: int
    images: tuple[Image, ...]
    extra: Mapping[str, Any] | None = None
    adapter: str = ""
    embedded: Callable[[], str] | None = None
    salt: str = ""
    sampling: Callable[[], SamplingParameters | None] | None = None


@dataclass(frozen=True)
class BlockMoves:
    """What the scheduler did with the cache's blocks before a step, by request, one sequence per group of the cache.

    tables: the whole tables of requests that are new or resumed; more: what was added to the tables of others.
    copies: (from, to), block by block, before the forward.
    """

    tables: Mapping[str, Sequence[Sequence[int]]]
    more: Mapping[str, Sequence[Sequence[int]]]
    copies: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class EngineStep:
    """One batch that the scheduler has made.

    number: of the steps from 0 on; None for a batch that is no step (nothing scheduled, or the engine's own warm-up).
    counts: tokens by request; tokens: all of them. starts: gives the tokens computed before, by request. finished:
    requests of earlier steps that get no more rows. arming: the control file's words (capture/arming.py), None where
    the scheduler does not read it. unplaced: why its rows are not known, "" where they are. blocks: gives what was
    done with the cache's blocks.
    """

    number: int | None
    counts: Mapping[str, int]
    tokens: int
    new: Sequence[NewRequest]
    finished: Sequence[str]
    starts: Callable[[], dict[str, int]]
    arming: bytes | None = None
    unplaced: str = ""
    blocks: Callable[[], BlockMoves] | None = None


class StepObserver:
    """One listener of a runner. What it does not care for it leaves as it is here.

    An exception from a method never reaches the model: the adapter gives it to ``failed``. The one that an observer
    WANTS raised into the engine, it leaves in ``stopping``: it is raised when the step is over.
    """

    without = "nothing is observed on this rank"
    """What follows where the runner cannot be observed, for the line that says so."""
    unattached: str = "the probe could not attach ({}); serving goes on"
    """The line for a failure while it attaches, with ``{}`` for the error."""
    stopping: Exception | None = None

    def __init__(self, config: ProbeConfig, adapter: Any):
        """adapter: runner.RunnerAdapter, which will call this observer."""

    @classmethod
    def left_out(cls, config: ProbeConfig, adapter: Any) -> StepObserver | None:
        """What a rank has that the settings do not choose."""
        return None

    @property
    def awake(self) -> bool:
        """Whether it wants to hear of steps."""
        return False

    def layer(self, model: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
        """The module at ``path`` has its weights as the checkpoint gave them; they are packed next."""

    def draft_layer(self, path: str, layer: torch.nn.Module) -> None:
        """The same of a draft model's module. The model that is captured is loaded by then."""

    def loading(self) -> contextlib.AbstractContextManager[Any]:
        """What the runner makes and loads its model in."""
        return NOTHING

    def loaded(self) -> None:
        """The runner's model is complete; called again when weights are loaded anew."""

    def begin_step(self, step: EngineStep) -> None:
        """The runner is about to compute ``step``. Only while awake."""

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """What the runner's own work of a step is done in: its forward, and its sampling."""
        return NOTHING

    def drafting(self) -> contextlib.AbstractContextManager[Any]:
        """What a draft model works in, which shares modules with the model and is none of it."""
        return NOTHING

    def computed(self) -> None:
        """The forward of the step that ``begin_step`` announced has returned; sampling may follow."""

    def end_step(self) -> None:
        """Whatever runs next is not of the step that may still be open. Also called when none is."""

    def failed(self, where: str, error: BaseException) -> None:
        """A method of this observer, or the runner's own objects, failed at ``where``. Must not raise."""

    def close(self, reason: str) -> None:
        """The process ends, or the engine is shut down. Called again by each way to end. Must not raise."""
