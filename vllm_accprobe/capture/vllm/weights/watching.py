"""The weights' life of one worker: its parts, put together.

The problem: loading begins before there is a journal, and what the calls, the adapters and the fingerprints need is
spread over worker, runner and model. The idea: one object for the capture, with a method for each moment. It says where
an error goes: into the journal, and the looking ends. Not here: events (weight_calls.py), prints (capture/weights/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.taps.selection import chooses
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.weights.adapters import MOST, AdapterSlots
from vllm_accprobe.capture.vllm.weights.weight_calls import WeightCalls
from vllm_accprobe.capture.weights.life import WeightLife
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import ROOT_TAP

_WHERE = "looking at the weights"
MANY_ADAPTERS = f"an adapter in a slot, after the first {MOST}"


class Weights:
    """Never raises. session: asked for when there is something to write."""

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter, session: Callable[[], Session | None]):
        self._adapter, self._session = adapter, session
        self.life = WeightLife(
            self._line,
            lambda path, cls: chooses(config, path, cls),
            lambda: adapter.next_step,
            self._failed,
            adapter.parallel["rank"],
            config.weights,
        )
        self._calls = WeightCalls(self.life, adapter.worker, adapter.runner)
        self._slots: AdapterSlots | None = None

    def loading(self) -> contextlib.AbstractContextManager[Any]:
        return self._calls.loading()

    def look(self, path: str, layer: torch.nn.Module) -> None:
        self.life.look(path, layer)

    def loaded(self, model: torch.nn.Module) -> None:
        """The model is loaded, packed, and has its adapters' layers."""
        if self.life.off:
            return
        with self.life.safely():
            self._calls.watch(model)
            if self._slots is None:
                self._slots = AdapterSlots(self.life, self._adapter.runner, lambda: self._adapter.quiet, self._many)

    def settle(self) -> None:
        self._calls.settle()

    def close(self) -> None:
        with self.life.safely():
            self._calls.settle()
            self._calls.close()

    def _line(self, line: dict[str, Any]) -> None:
        session = self._session()
        if session is not None and session.dead is None:
            session.sink.line(line)

    def _many(self) -> None:
        self._skip(ROOT_TAP, MANY_ADAPTERS)

    def _skip(self, path: str, reason: str) -> None:
        session = self._session()
        if session is not None:
            session.sink.skip(path, reason)

    def _failed(self, error: BaseException) -> None:
        said = f"{type(error).__name__}: {error}"
        say(f"{_WHERE} failed ({said}): their life is not told any further; capture goes on")
        session = self._session()
        if session is not None:
            session.sink.error(_WHERE, said, None)
