"""What is done around one call of a tapped module.

The problem: a kernel may change its inputs in place, a module may have several names or be called twice, the model may
raise, and all of this is asked hundreds of times per step. The idea: inputs are taken before the forward runs, outputs
after; of several names that one counts which lies in the module that is running, and with it the part of the model; the
first calls of each kind are checked by hash for inputs that were changed in place, and from then on only
those that were. Whatever goes wrong here ends the capture and never the call. Not here: which modules (hooks.py), what
happens to a tensor (session.py, fast_path.py, sink.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_accprobe.capture.core.session import HEAD, LANGUAGE, Session
from vllm_accprobe.capture.core.step_state import StepState, Ticket
from vllm_accprobe.capture.taps.arguments import Inputs, argument_names, outputs
from vllm_accprobe.capture.taps.fast_path import Sites

_CHECKS = 2
"""How many calls of a kind are checked for in-place changes before an input is believed to be left alone."""


class Tap:
    """One wrapped callable of one module: its names, its class, the names of its arguments, what was seen of it.

    parts: in which part of the model each name lies (session.py's words): one instance may stand in a vision tower and
    in the language model, as vLLM's activations do. chosen: of the names, those whose tensors are taken now; tapped:
    those that ever are.
    """

    __slots__ = ("checks", "chosen", "cls", "inputs", "is_root", "names", "parts", "sites", "tapped")

    def __init__(
        self,
        names: list[str],
        cls: str,
        forward: Callable[..., Any],
        parts: Mapping[str, str],
        chosen: frozenset[str],
        is_root: bool,
    ):
        self.names = names
        self.cls = cls
        self.parts = parts
        self.chosen = self.tapped = chosen
        self.is_root = is_root
        self.inputs = Inputs(*argument_names(forward))
        self.checks: tuple[dict[str, int], dict[str, int]] = ({}, {})
        """By kind of step (prefill: 1) and role: calls after which an input was found unchanged."""
        self.sites: dict[str, Sites] = {name: {} for name in names}

    def name(self, stack: list[str]) -> str:
        """The tap's path; of a shared instance the one that lies in the innermost running module."""
        if len(self.names) == 1:
            return self.names[0]
        for running in reversed(stack):
            prefix = running + "."
            for name in self.names:
                if name.startswith(prefix):
                    return name
        return self.names[0]


def tapped(session: Session, tap: Tap, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` with inputs taken before and outputs after, in armed steps; otherwise one attribute and a branch.
    While torch.compile traces the call, nothing is taken."""
    is_compiling = torch.compiler.is_compiling

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # first, so that nothing of ours becomes a guard of the compiled graph
            return original(*args, **kwargs)
        state = session.state
        if state is None:
            return original(*args, **kwargs)
        try:
            state.taking += 1
            call = _enter(session, state, tap, args, kwargs)
            state.taking -= 1
        except Exception as error:
            session.fail(tap.names[0], error)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        try:
            state.taking += 1
            _leave(session, state, tap, call, result)
            state.taking -= 1
        except Exception as error:
            session.fail(tap.names[0], error)
        return result

    forward.__accprobe__ = tap  # type: ignore[attr-defined]
    return forward


_Taken = list[tuple[str, torch.Tensor, Ticket]]
_Call = tuple[str, int, str, "str | None", "_Taken | None"]
"""Name, number and part of the running call, the part that was running before, inputs that are to be checked."""


def _enter(session: Session, state: StepState, tap: Tap, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
    name = tap.names[0] if len(tap.names) == 1 else tap.name(state.stack)
    part = tap.parts[name]
    number = state.calls.get(name, 0)
    state.calls[name] = number + 1
    before = state.inside
    if tap.is_root:
        state.inside = LANGUAGE
    elif part == HEAD:
        state.inside = HEAD
    if state.inside == HEAD:
        part = HEAD
    state.stack.append(name)
    taken: _Taken | None = None
    if name in tap.chosen:
        session.fired.add(name)
        if session.takes_inputs:
            checks, sites, cls = tap.checks[state.prefill], tap.sites[name], tap.cls
            short = state.rows > 0 and part is LANGUAGE and session.flatten is None
            take = session.express.take
            for role, tensor in tap.inputs(args, kwargs):
                ticket = None
                if checks.get(role, 0) < _CHECKS:
                    ticket = Ticket()
                    taken = taken or []
                    taken.append((role, tensor, ticket))
                elif short:
                    if take(state, sites, name, cls, role, number, tensor) is None:
                        session.record(state, name, cls, role, number, tensor, part)
                    continue
                session.record(state, name, cls, role, number, tensor, part, ticket, sites)
    return name, number, part, before, taken


def _leave(session: Session, state: StepState, tap: Tap, call: _Call, result: Any) -> None:
    name, number, part, before, taken = call
    if state.stack and state.stack[-1] == name:
        state.stack.pop()
    state.inside = before
    if name not in tap.chosen or session.state is not state:
        return
    if session.takes_outputs:
        sites, cls = tap.sites[name], tap.cls
        short = state.rows > 0 and part is LANGUAGE and session.flatten is None
        take = session.express.take
        for role, tensor in outputs(result):
            if not short:
                session.record(state, name, cls, role, number, tensor, part, None, sites)
            elif take(state, sites, name, cls, role, number, tensor) is None:
                session.record(state, name, cls, role, number, tensor, part)
    for role, tensor, ticket in taken or ():
        after = "inplace." + role.partition(".")[2]
        changed = _verdict(tap.checks[state.prefill], role)
        session.record(state, name, tap.cls, after, number, tensor, part, ticket, tap.sites[name], changed)


def _verdict(checks: dict[str, int], role: str) -> Callable[[bool], None]:
    """Remembers whether an input is changed in place: one that is, is looked at after every call from then on."""

    def changed(different: bool) -> None:
        checks[role] = -1 << 30 if different else checks.get(role, 0) + 1

    return changed
