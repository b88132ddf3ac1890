"""Module taps: every forward of every chosen module, inputs as they went in, outputs as they came out.

The problem: PyTorch's hooks never fire for classes whose ``__call__`` goes straight to ``forward`` (vLLM's
torch.compile decorator does so even in eager mode), for the lm_head (its quantisation method is called instead),
and one shared instance (rotary embedding) has as many names as layers. The idea: ``forward`` is wrapped on the
instance, which every way of calling a module passes through; names are resolved by the module that is running
around the call. Inputs are taken before the forward runs, so in-place kernels cannot falsify them; what a forward
changed in place is noticed by its hash. Not here: what happens to a tensor (sink.py), which rows it has (rows.py),
compiled graphs (graph.py, later).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vllm_accprobe.capture.arguments import argument_names, attributes, flatten, inputs
from vllm_accprobe.capture.selection import chooses
from vllm_accprobe.capture.session import HEAD, LANGUAGE, VISION, Session, StepState
from vllm_accprobe.capture.sink import Ticket
from vllm_accprobe.dump.schema import ROOT_TAP, Module

_CHECKS = 2
"""How many calls of a kind are checked for in-place changes before an input is believed to be left alone."""


class Tap:
    """One wrapped callable of one module: its names, its class, the names of its arguments, what was seen of it."""

    __slots__ = ("arguments", "checks", "chosen", "cls", "is_root", "names", "part", "spread")

    def __init__(
        self, names: list[str], cls: str, forward: Callable[..., Any], part: str, chosen: frozenset[str], is_root: bool
    ):
        self.names = names
        self.cls = cls
        self.part = part
        self.chosen = chosen
        self.is_root = is_root
        self.arguments, self.spread = argument_names(forward)
        self.checks: dict[tuple[str, bool], int] = {}

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


class Taps:
    """All taps of one model. ``remove`` puts every forward back."""

    def __init__(self, session: Session):
        self._session = session
        self._undo: list[Callable[[], None]] = []
        self.taps: list[Tap] = []

    def attach(self, model: torch.nn.Module, language_prefix: str = "") -> None:
        """Wraps the forwards of all chosen modules of ``model``.

        language_prefix: path of the language model inside a multi-modal one; what lies outside it, except the root,
        is the vision part. "" for a language model.
        """
        names: dict[int, list[str]] = {}
        modules: dict[int, torch.nn.Module] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(path)
            modules[id(module)] = module
        shared_parents = {name.rpartition(".")[0] for paths in names.values() if len(paths) > 1 for name in paths}
        for index, (key, module) in enumerate(modules.items()):
            paths = names[key]
            cls = type(module).__name__
            chosen = frozenset(path or ROOT_TAP for path in paths if chooses(self._session.config, path, cls))
            needed = bool(chosen) or paths[0] == "" or any(path in shared_parents for path in paths)
            taps = [path or ROOT_TAP for path in paths]
            for tap in taps:
                if tap in chosen:
                    self._session.sink.module(Module(tap, cls, index, attributes(module)))
                else:
                    self._session.sink.skip(tap, "not selected by VLLM_ACCPROBE_MODULES")
            if not needed:
                continue
            part = self._part(paths[0], cls, language_prefix)
            self._wrap_forward(module, taps, cls, part, chosen)
            if chosen and part != VISION and _is_head(paths, cls, module):
                self._wrap_apply(module, [t for t in taps if "lm_head" in t] or taps, cls)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def never_fired(self) -> Iterator[tuple[str, str]]:
        """(tap, reason) of all chosen taps that no call of an armed step has reached."""
        for tap in self.taps:
            known = any(name in self._session.fired for name in tap.names)
            for name in tap.names:
                if name in tap.chosen and name not in self._session.fired:
                    yield name, "another name of a captured module" if known else "never called in a captured step"

    def _part(self, path: str, cls: str, language_prefix: str) -> str:
        leaf = path.rpartition(".")[2]
        if leaf in ("lm_head", "logits_processor") or cls == "LogitsProcessor":
            return HEAD
        if path == "" or not language_prefix or (path + ".").startswith(language_prefix + "."):
            return LANGUAGE
        # wrappers around the language model, e.g. "model" above "model.language_model", see tokens too
        return LANGUAGE if language_prefix.startswith(path + ".") else VISION

    def _wrap_forward(
        self, module: torch.nn.Module, taps: list[str], cls: str, part: str, chosen: frozenset[str]
    ) -> None:
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)):
            if chosen:
                self._session.sink.skip(taps[0], "a container, never called")
            return
        if getattr(module, "do_not_compile", True) is False:
            self._session.sink.skip(taps[0], "compiled by torch.compile: what is inside cannot be seen")
            return
        if isinstance(module, torch.jit.ScriptModule):
            self._session.sink.skip(taps[0], "a TorchScript module, its forward cannot be wrapped")
            return
        original = module.forward
        tap = Tap(taps, cls, original, part, chosen, taps[0] == ROOT_TAP)
        before = module.__dict__.get("forward")
        module.__dict__["forward"] = _tapped(self._session, tap, original)
        self.taps.append(tap)

        def undo() -> None:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before

        self._undo.append(undo)

    def _wrap_apply(self, module: torch.nn.Module, taps: list[str], cls: str) -> None:
        """The lm_head is never called: the logits processor calls ``quant_method.apply(lm_head, x, bias)``."""
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(method, "apply"):
            return
        original = method.apply
        tap = Tap(taps[:1], cls, original, HEAD, frozenset(taps[:1]), False)
        tapped = _tapped(self._session, tap, original)

        def apply(*args: Any, **kwargs: Any) -> Any:
            return tapped(*args, **kwargs) if not args or args[0] is module else original(*args, **kwargs)

        try:
            method.apply = apply
        except AttributeError:
            self._session.sink.skip(taps[0], "its quantisation method cannot be wrapped")
            return
        self.taps.append(tap)
        self._undo.append(lambda: method.__dict__.pop("apply", None))


def _is_head(paths: list[str], cls: str, module: torch.nn.Module) -> bool:
    named = any(path.rpartition(".")[2] == "lm_head" for path in paths)
    return named or cls == "ParallelLMHead" or (cls == "VocabParallelEmbedding" and hasattr(module, "quant_method"))


def _tapped(session: Session, tap: Tap, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` with inputs taken before and outputs after, in armed steps; otherwise one attribute and a branch."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        state = session.state
        if state is None or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        try:
            call = _enter(session, state, tap, args, kwargs)
        except Exception as error:
            session.fail(tap.names[0], error)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        try:
            _leave(session, state, tap, call, result)
        except Exception as error:
            session.fail(tap.names[0], error)
        return result

    forward.__accprobe__ = tap  # type: ignore[attr-defined]
    return forward


class _Call:
    __slots__ = ("name", "number", "part", "taken", "was_inside")

    def __init__(self, name: str, number: int, part: str, was_inside: str | None):
        self.name = name
        self.number = number
        self.part = part
        self.was_inside = was_inside
        self.taken: list[tuple[str, torch.Tensor, Ticket]] = []


def _enter(session: Session, state: StepState, tap: Tap, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
    name = tap.name(state.stack)
    number = state.calls.get(name, 0)
    state.calls[name] = number + 1
    was_inside = state.inside
    if tap.is_root:
        state.inside = LANGUAGE
    elif tap.part == HEAD:
        state.inside = HEAD
    part = HEAD if state.inside == HEAD else tap.part
    call = _Call(name, number, part, was_inside)
    state.stack.append(name)
    if name not in tap.chosen:
        return call
    session.fired.add(name)
    if session.config.capture_inputs:
        for role, tensor in inputs(tap.arguments, tap.spread, args, kwargs):
            if tap.checks.get((role, state.prefill), 0) < _CHECKS:
                ticket = Ticket()
                call.taken.append((role, tensor, ticket))
                session.record(state, name, tap.cls, role, number, tensor, part, ticket)
            else:
                session.record(state, name, tap.cls, role, number, tensor, part)
    return call


def _leave(session: Session, state: StepState, tap: Tap, call: _Call, result: Any) -> None:
    if state.stack and state.stack[-1] == call.name:
        state.stack.pop()
    state.inside = call.was_inside
    if call.name not in tap.chosen or session.state is not state:
        return
    if session.config.capture_outputs:
        for role, tensor in flatten("output", result):
            session.record(state, call.name, tap.cls, role, call.number, tensor, call.part)
    for role, tensor, ticket in call.taken:
        after = "inplace." + role.partition(".")[2]
        session.record_if_changed(
            state,
            call.name,
            tap.cls,
            after,
            call.number,
            tensor,
            call.part,
            ticket,
            _verdict(tap, (role, state.prefill)),
        )


def _verdict(tap: Tap, key: tuple[str, bool]) -> Callable[[bool], None]:
    """Remembers whether an input is changed in place: one that is, is looked at after every call from then on."""

    def changed(different: bool) -> None:
        tap.checks[key] = -1 << 30 if different else tap.checks.get(key, 0) + 1

    return changed
