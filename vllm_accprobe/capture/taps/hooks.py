"""Module taps: every forward of every chosen module, inputs as they went in, outputs as they came out.

The problem: PyTorch's hooks never fire for classes whose ``__call__`` goes straight to ``forward`` (vLLM's
torch.compile decorator does so even in eager mode), for the lm_head (its quantisation method is called instead),
and one shared instance (rotary embedding) has as many names as layers. The idea: ``forward`` is wrapped on the
instance, which every way of calling a module passes through; names are resolved by the module that is running
around the call. Not here: what is done around a call (calls.py), what happens to a tensor (sink.py), which rows it has
(rows.py), compiled graphs, where nothing is tapped yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from vllm_accprobe.capture.core.put_over import put_over
from vllm_accprobe.capture.core.session import HEAD, LANGUAGE, VISION
from vllm_accprobe.capture.taps.arguments import attributes
from vllm_accprobe.capture.taps.calls import Tap
from vllm_accprobe.capture.taps.selection import chooses, picks
from vllm_accprobe.capture.taps.source import source_of
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import ROOT_TAP, Module


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
