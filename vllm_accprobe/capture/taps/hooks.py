"""Module taps: every forward of every chosen module, inputs as they went in, outputs as they came out.

Which modules are captured: globs over module paths, class names, and presets for the kinds people ask for.

Where a module's forward is written: ``vllm/model_executor/layers/linear.py:1391``.

The problem: a verdict names a module, and a person looks for the code. The idea: the code that Python runs knows its
file and first line, and its module's dotted name is the end of the file's path, so that no path of this machine is
written down. An operator that chooses one of several implementations when it is built (vLLM's CustomOp) has the one
that it chose. It is asked once for each module, when taps are put on, and reads no file.

What is done around one call of a tapped module.

The problem: a kernel may change its inputs in place, a module may have several names or be called twice, the model may
raise, and all of this is asked hundreds of times per step. The idea: inputs are taken before the forward runs, outputs
after; of several names that one counts which lies in the module that is running, and with it the part of the model; the
first calls of each kind are checked by hash for inputs that were changed in place, and from then on only
those that were. Whatever goes wrong here ends the capture and never the call.

Module taps: every forward of every chosen module, inputs as they went in, outputs as they came out.

The problem: PyTorch's hooks never fire for classes whose ``__call__`` goes straight to ``forward`` (vLLM's
torch.compile decorator does so even in eager mode), for the lm_head (its quantisation method is called instead),
and one shared instance (rotary embedding) has as many names as layers. The idea: ``forward`` is wrapped on the
instance, which every way of calling a module passes through; names are resolved by the module that is running
around the call.

Not here: which requests and tokens (rows.py), the line that it is written in (taps/hooks.py, dump/schema.py), what
happens to a tensor (session.py, session.py, session.py), what happens to a tensor (session.py), which rows it has
(rows.py), compiled graphs, where nothing is tapped yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import CodeType
from typing import Any, Protocol

import torch

from vllm_accprobe.capture.core.attribute_override import put_over
from vllm_accprobe.capture.core.session import HEAD, LANGUAGE, VISION, Session, Sites, StepState, Ticket
from vllm_accprobe.capture.taps.arguments import Inputs, argument_names, attributes, outputs
from vllm_accprobe.config import ProbeConfig, words_choose
from vllm_accprobe.dump.schema import ROOT_TAP, Module


def chooses(config: ProbeConfig, path: str, cls: str) -> bool:
    """Whether VLLM_ACCPROBE_MODULES (globs over paths, presets, class names) selects the module at ``path``."""
    return not config.modules_left or picks(config.modules, path, cls)


def picks(words: Sequence[str], path: str, cls: str) -> bool:
    """Whether such globs, presets and class names choose the module at ``path``."""
    return words_choose(words, path or ROOT_TAP, path, cls)


_LONGEST = 300


def source_of(module: torch.nn.Module) -> str | None:
    """``package/file.py:line`` of the forward of ``module``, or None for one that is not written in Python."""
    for forward in (module.__dict__.get("_forward_method"), getattr(type(module), "forward", None)):
        found = _place(forward)
        if found is not None:
            return found
    return None


def _place(forward: Any) -> str | None:
    try:
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        code = getattr(function, "__code__", None)
    except ValueError:  # wrapped in itself
        return None
    if not isinstance(code, CodeType):
        return None
    path = PurePath(code.co_filename)
    parts = str(getattr(function, "__module__", "")).split(".")
    own = path.with_suffix("").parts
    whole = next((p for p in (parts, [*parts, "__init__"]) if own[-len(p) :] == tuple(p)), None)
    name = "/".join(whole) + path.suffix if whole is not None else path.name
    return f"{name}:{code.co_firstlineno}"[-_LONGEST:]


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


class TapOwner(Protocol):
    """For whom a model is tapped: a capture's Session, errcheck's Watch. ``fired``: taps that were called in a step."""

    config: ProbeConfig
    fired: set[str]

    def module(self, module: Module) -> None:
        """A module is tapped."""

    def skip(self, tap: str, reason: str) -> None:
        """A module cannot be tapped, or is not wanted, or was never called."""


class Taps:
    """All taps of one model. ``remove`` puts every forward back.

    around: what is put around each forward; calls.tapped of a session, module_call.watched of a Watch.
    """

    def __init__(self, owner: TapOwner, around: Callable[[Tap, Callable[..., Any]], Callable[..., Any]]):
        self._owner = owner
        self._around = around
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
            chosen = frozenset(path or ROOT_TAP for path in paths if chooses(self._owner.config, path, cls))
            needed = bool(chosen) or paths[0] == "" or any(path in shared_parents for path in paths)
            taps = [path or ROOT_TAP for path in paths]
            source = source_of(module) if chosen else None
            for tap in taps:
                if tap in chosen:
                    self._owner.module(Module(tap, cls, index, attributes(module), source))
                else:
                    self._owner.skip(tap, "not selected by VLLM_ACCPROBE_MODULES")
            if not needed:
                continue
            parts = {path or ROOT_TAP: self._part(path, cls, language_prefix) for path in paths}
            self._wrap_forward(module, taps, cls, parts, chosen)
            if chosen and any(part != VISION for part in parts.values()) and _is_head(paths, cls, module):
                self._wrap_apply(module, [t for t in taps if "lm_head" in t] or taps, cls)

    def remove(self) -> None:
        """Takes all taps off the model, the last one first."""
        while self._undo:
            self._undo.pop()()

    def narrow(self, words: tuple[str, ...] | None) -> frozenset[str] | None:
        """Of the tapped modules only those are taken from now on that ``words`` pick (selection.picks); None: all. What
        is taken, None for all."""
        for tap in self.taps:
            picked = (n for n in tap.tapped if words is None or picks(words, "" if n == ROOT_TAP else n, tap.cls))
            tap.chosen = frozenset(picked)
        return None if words is None else frozenset().union(*(tap.chosen for tap in self.taps))

    def never_fired(self) -> Iterator[tuple[str, str]]:
        """(tap, reason) of all chosen taps that no call of an armed step has reached."""
        for tap in self.taps:
            known = any(name in self._owner.fired for name in tap.names)
            for name in tap.names:
                if name in tap.tapped and name not in self._owner.fired:
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
        self, module: torch.nn.Module, taps: list[str], cls: str, parts: dict[str, str], chosen: frozenset[str]
    ) -> None:
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)):
            if chosen:
                self._owner.skip(taps[0], "a container, never called")
            return
        if getattr(module, "do_not_compile", True) is False:
            self._owner.skip(taps[0], "compiled by torch.compile, which calls past its own tap")
            return
        if isinstance(module, torch.jit.ScriptModule):
            self._owner.skip(taps[0], "a TorchScript module, its forward cannot be wrapped")
            return
        original = module.forward
        tap = Tap(taps, cls, original, parts, chosen, taps[0] == ROOT_TAP)
        self._undo.append(put_over(module, "forward", self._around(tap, original)))
        self.taps.append(tap)

    def _wrap_apply(self, module: torch.nn.Module, taps: list[str], cls: str) -> None:
        """The lm_head is never called: the logits processor calls ``quant_method.apply(lm_head, x, bias)``."""
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(method, "apply"):
            return
        original = method.apply
        tap = Tap(taps[:1], cls, original, {taps[0]: HEAD}, frozenset(taps[:1]), False)
        around = self._around(tap, original)

        def apply(*args: Any, **kwargs: Any) -> Any:
            return around(*args, **kwargs) if not args or args[0] is module else original(*args, **kwargs)

        try:
            method.apply = apply
        except AttributeError:
            self._owner.skip(taps[0], "its quantisation method cannot be wrapped")
            return
        self.taps.append(tap)
        self._undo.append(lambda: method.__dict__.pop("apply", None))


def _is_head(paths: list[str], cls: str, module: torch.nn.Module) -> bool:
    named = any(path.rpartition(".")[2] == "lm_head" for path in paths)
    return named or cls == "ParallelLMHead" or (cls == "VocabParallelEmbedding" and hasattr(module, "quant_method"))
