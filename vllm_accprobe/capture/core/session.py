"""One rank's capture while it runs: the step in progress, and the promise that the probe never hurts the model.

The problem: taps fire deep inside a model and must know, at the cost of one attribute, whether to do anything; and
whatever goes wrong in them must end the capture, not the serving. The idea: a Session holds the current StepState or
None. Taps ask it; a failure anywhere calls ``fail``, which writes it down, says it once, and sets the state to None
for good. Not here: vLLM (runner.py), plain torch models (probe.py), which both drive a Session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.rows import Deal, Space
from vllm_accprobe.capture.core.sink import Sink
from vllm_accprobe.capture.core.step_state import StepState, Ticket
from vllm_accprobe.capture.taps.fast_path import Express, Sites
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.journal.event_lines import STOP
from vllm_accprobe.dump.journal.tensor_lines import TensorHead
from vllm_accprobe.dump.schema import (
    DEALT,
    LOGITS,
    OWN,
    ROOT_TAP,
    TOKENS,
    Layout,
    Module,
    Request,
    Step,
    StepGraph,
    Stop,
)

NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
LANGUAGE, VISION, HEAD = "language", "vision", "head"
"""The three parts of a model as far as rows are concerned: token rows, patch rows, rows that reach the logits."""


class OperatorTap(Protocol):
    """What captures operators in armed steps, as far as a session knows it (ops/dispatch.py)."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: Any) -> Any: ...

    def forget_weights(self) -> None:
        """Memory that held weights may hold others now."""

    def narrow(self, chosen: frozenset[str] | None) -> None:
        """Operators of these modules alone are taken from now on; None: of all that the settings choose."""


class Session:
    """Ties configuration, sink and layouts of one rank together.

    find_space(part, rows): asked for the Space of a tensor with ``rows`` rows in a part of the model when the step has
    none yet; may return None. See batch.py and padded_batch.py.
    """

    def __init__(
        self,
        config: ProbeConfig,
        sink: Sink,
        layouts: Layouts,
        say: Callable[[str], None],
        find_space: Callable[[str, int], Space | None],
    ):
        self.config = config
        self.takes_inputs, self.takes_outputs = config.capture_inputs, config.capture_outputs
        self.sink = sink
        self.layouts = layouts
        self.say = say
        self.state: StepState | None = None
        self.everybodys = not config.requests and not config.tokens
        """Whether all rows of all requests are wanted now."""
        self._step = Step(-1)
        self.dead: str | None = None
        self.fired: set[str] = set()
        self.ops: OperatorTap | None = None
        self._find_space = find_space
        self.deal: Callable[[], Deal | None] = lambda: None
        """What this rank's encoder computes at the moment, where images are dealt out to ranks (dealing.py)."""
        self.flatten: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Brings a batched tensor into rows (probe.py); None where tensors already are rows of tokens."""
        self.express = Express(sink, self.layout_event, self._token_rows)

    def begin(self, step: Step, requests: list[Request], prefill: bool) -> StepState | None:
        """Opens an armed step; None when the capture has ended."""
        if self.dead is not None:
            return None
        for request in requests:
            self.sink.request(request)
        requests.clear()
        self._step = step
        self.sink.step(step)
        self.state = StepState(step.step, prefill)
        return self.state

    def end(self) -> None:
        """The step is over: taps let everything pass until the next one begins."""
        self.state = None

    def computed_by(self, graph: StepGraph) -> None:
        """A captured graph computes the step that runs."""
        if self.state is not None and self._step.graph != graph:
            self._step = dataclasses.replace(self._step, graph=graph)
            self.sink.step_again(self._step)

    def module(self, module: Module) -> None:
        """A module is tapped (hooks.py)."""
        self.sink.module(module)

    def skip(self, tap: str, reason: str) -> None:
        """A module is not captured; see Sink.skip."""
        self.sink.skip(tap, reason)

    def operators(self) -> contextlib.AbstractContextManager[Any]:
        """What an armed forward runs in: the operator tap, where there is one."""
        return NOTHING if self.ops is None or self.state is None else self.ops

    def stop(self, reason: str) -> None:
        """Ends the capture in good order (budget, full disk); called from any thread."""
        if self.dead is None:
            self.dead = reason
            self.say(f"capture stopped: {reason}; serving goes on")
        self.state = None

    def fail(self, where: str, error: BaseException) -> None:
        """Ends the capture because the probe itself failed. Never raises."""
        state = self.state
        self.state = None
        try:
            text = f"{type(error).__name__}: {error}"
            last = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
            place = f" ({last[0].filename.rpartition('/')[2]}:{last[0].lineno})" if last else ""
            first = self.dead is None
            self.dead = self.dead or f"the tap at {where} failed: {text}"
            if first:
                self.sink.error(where, text + place, state.number if state else None)
                self.sink.line(STOP.to_line(Stop(self.dead, state.number if state else None)))
                self.say(f"the probe failed at {where}: {text}{place}; capture is off, serving goes on")
        except Exception as again:
            sys.stderr.write(f"accprobe: the probe failed at {where} and could not say so: {again!r}\n")

    # --- used by taps, per tensor ------------------------------------------------------------------------------

    def record(
        self,
        state: StepState,
        tap: str,
        cls: str,
        role: str,
        call: int,
        tensor: torch.Tensor,
        part: str,
        ticket: Ticket | None = None,
        sites: Sites | None = None,
        changed: Callable[[bool], None] | None = None,
    ) -> None:
        """Takes one tensor; ``ticket`` gets its hash. ``sites``: what is known of this tap's tensors. With ``changed``:
        takes it again, in role ``inplace.*``, if it is no longer what ``ticket`` saw, and tells which."""
        if self.flatten is not None:
            tensor = self.flatten(tensor)
        before = ticket.digest if ticket is not None and changed is not None else None
        if sites is not None and state.rows > 0 and part == LANGUAGE and (changed is None or before is not None):
            digest = self.express.take(state, sites, tap, cls, role, call, tensor, before)
            if digest is not None:
                if changed is not None:
                    changed(digest != before)
                elif ticket is not None:
                    ticket.digest = digest
                return
        found = self._head(state, tap, cls, role, call, tensor, part, changed is not None)
        if found is None:
            return
        head, space = found
        if changed is not None and ticket is not None:
            self.sink.after(head, tensor, space, ticket, changed)
        else:
            self.sink.tensor(head, tensor, space, ticket)

    def _head(
        self,
        state: StepState,
        tap: str,
        cls: str,
        role: str,
        call: int,
        tensor: torch.Tensor,
        part: str,
        mutated: bool,
    ) -> tuple[TensorHead, Space | None] | None:
        """What is known of a tensor by its place, and its rows; None if nothing of it is wanted."""
        shape = tensor.shape
        space: Space | None = None
        dim = 0
        if shape:
            space, dim = self._rows(state, part, role, shape)
        if space is not None:
            if not space.n:
                return None
            if not space.announced:
                space.announced = True
                self.sink.rows(state.number, space)
                if space.name == TOKENS and space.whole and space.padded == space.src and self.sink.direct:
                    state.rows = space.src
        elif not self.whole_step(state):
            # Not all rows of this step are wanted, and nobody can say which of this tensor's are: leave it.
            self.sink.skip(tap, "its rows cannot be told apart, and not all requests are selected", role)
            return None
        seq = state.seq
        state.seq = seq + 1
        dealt = part == VISION and self.deal() is not None
        layout = self.own_layout() if dealt else self.layout_event(tap, role, shape)
        rows = None if space is None else space.name
        return TensorHead(state.number, tap, cls, role, call, seq, rows, dim, layout, mutated), space

    def own_layout(self) -> dict[str, Any]:
        """What a line says of a tensor of images that were dealt to this rank."""
        return Layout(OWN, "tp", *self.layouts.place).to_event()

    def layout_event(self, tap: str, role: str, shape: torch.Size) -> dict[str, Any] | None:
        """What a line says of how the tensor is split; None where it is whole."""
        if not self.layouts.split:
            return None
        layout = self.layouts.of("" if tap == ROOT_TAP else tap, role, tuple(shape))
        return layout.to_event() if layout.kind != "replicated" else None

    def _token_rows(self, state: StepState, role: str, shape: torch.Size) -> tuple[Space | None, int]:
        return self._rows(state, LANGUAGE, role, shape)

    def _rows(self, state: StepState, part: str, role: str, shape: torch.Size) -> tuple[Space | None, int]:
        """The space of a tensor and its row dimension, by its shape and its role."""
        space, dim = self._space(state, part, shape)
        if space is not None and len(shape) == 2 and role.endswith("positions"):
            dim = 1  # M-RoPE: (3, rows), also in the step that has three rows
        return space, dim

    def _space(self, state: StepState, part: str, shape: torch.Size) -> tuple[Space | None, int]:
        """The space of a tensor and its row dimension. Spaces are made once per step and kind."""
        if part == VISION:
            return self._vision_space(state, shape)
        name = LOGITS if part == HEAD else TOKENS
        space = state.spaces.get(name)
        if space is None:
            space = self._find_space(part, shape[0])
            if space is None:
                return None, 0
            state.spaces[name] = space
        src, padded = space.src, space.padded
        for dim, size in enumerate(shape):
            if size in (src, padded):
                return space, dim
        return None, 0

    def _vision_space(self, state: StepState, shape: torch.Size) -> tuple[Space | None, int]:
        """Patches lie along the first or second dimension; fewer rows than patches only where neither can be patches.

        (q and k stacked in front of the patches, as the vision rotary embedding gets them, are 2 rows of something.)
        """
        few: tuple[Space | None, int] = (None, 0)
        deal = self.deal()
        for dim in range(min(2, len(shape))):
            rows = shape[dim]
            key = f"{VISION}:{'' if deal is None else deal.number}:{rows}"
            found = state.spaces.get(key) or self._find_space(VISION, rows)
            if found is None:
                continue
            # several row counts can be the same kind of row; the journal knows each kind once
            same = next((s for s in state.spaces.values() if s.name == found.name and s.src == found.src), found)
            state.spaces[key] = same
            kind = same.name.partition(DEALT)[0]
            if kind not in ("vision/image", "vision/class") and not kind.startswith("vision/1:"):
                return same, dim
            if dim == 0 and len(shape) > 1:  # a short vector (cu_seqlens) has no rows
                few = (same, dim)
        return few

    def whole_step(self, state: StepState) -> bool:
        """Whether all rows of the step are wanted."""
        space = state.spaces.get(TOKENS) or self._find_space(LANGUAGE, 0)
        if space is not None:
            state.spaces.setdefault(TOKENS, space)
        return space is None or space.whole
