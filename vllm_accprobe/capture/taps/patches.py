"""What is captured besides modules: values inside patched functions, labels and operators, put on a model together.

The problem: a value inside a function belongs to no module boundary, yet analysis wants a tap, rows and a layout; and a
model runner of vLLM and a Probe put the same things on a model and must take them off in the same order. The idea: the
tap is ``<module path>::<name>``, by the ``self`` of the function, else by the running module; rows come from the same
session; the layout is that of a tap which the patch names as similar. A patch that does not fit the installed source is
refused and counted, and serving goes on. `put_on` applies what the settings ask for.

Not here: how a function gets its taps (patching/), labels (capture/labels.py), operators (ops/dispatch.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vllm_accprobe.capture.core.session import HEAD, LANGUAGE, VISION, Session, Sites, StepState
from vllm_accprobe.capture.labels import Labels, set_label
from vllm_accprobe.capture.taps.hooks import Taps, chooses, innermost, instances, outputs
from vllm_accprobe.dump.schema import ROOT_TAP, Module
from vllm_accprobe.patching.install import insertions, install, loaded, package_root, package_version, remove
from vllm_accprobe.patching.schema import Patch, PatchError, TapSpec, Target, choose, in_range, numbers
from vllm_accprobe.patching.source import NotThere

_MOST = 400


@dataclass
class _Spec:
    """A tap of a patch, and how often it was reached."""

    patch: str
    target: Target
    tap: TapSpec
    fired: int = 0


class Patches:
    """The patches of one session, from ``apply`` to ``close``; the listener of patching.install.Hook."""

    def __init__(self, session: Session, model: torch.nn.Module, language_prefix: str, say: Callable[[str], None]):
        self._session = session
        self._say = say
        self._prefix = language_prefix
        self._paths = {id(module): paths for module, paths in instances(model)}
        self._specs: dict[str, _Spec] = {}
        self._sites: dict[str, Sites] = {}
        self._unchosen: set[str] = set()
        self._modules: list[ModuleType] = []
        self._failures: Counter[tuple[str, str]] = Counter()
        self.applied: list[str] = []
        self.refused: list[str] = []

    def apply(self, patches: Iterable[Patch]) -> None:
        """Installs what fits. Raises nothing: a refusal is reported and counted."""
        for patch in patches:
            for target in patch.targets:
                self._apply(patch, target)
        if self.applied:
            self._say(f"patches: {', '.join(dict.fromkeys(self.applied))}")

    def _apply(self, patch: Patch, target: Target) -> None:
        package = target.module.partition(".")[0]
        root = package_root(package)
        version = package_version(root, package) if root is not None else ""
        if not in_range(numbers(version), target.versions):
            self._skip(patch, target, f"not for {package} {version}")
            return
        module = loaded(target.module)
        if module is None:
            self._skip(patch, target, "this model does not use it")
            return
        wanted = insertions(patch, target)
        try:
            install(module, target.function, wanted, self, torch.compiler.is_compiling, target.hashes)
        except Exception as error:
            missing = isinstance(error, NotThere)
            text = str(error) if missing else f"{type(error).__name__}: {error}"
            if missing and target.optional and "has no" in text:
                self._skip(patch, target, "this version does not have it")
                return
            self.refused.append(f"{patch.name}: {target.name}: {text}")
            self._say(f"patch {patch.name} is refused at {target.name}: {text}; serving goes on without it")
            self._skip(patch, target, f"refused: {text}"[:_MOST])
            return
        self.applied.append(patch.name)
        if module not in self._modules:
            self._modules.append(module)
        for item in wanted:
            self._specs[item.key] = _Spec(patch.name, target, item.tap)

    def _skip(self, patch: Patch, target: Target, why: str) -> None:
        self._session.sink.skip(f"patch:{patch.name}:{target.function}", why, count=len(target.taps))

    def value(self, key: str, owner: Any, value: Any) -> None:
        """Called by patched functions. Never raises."""
        session = self._session
        state = session.state
        if state is None:
            return
        spec = self._specs.get(key)
        if spec is None:
            return
        state.taking += 1  # copies that are made here are none of the model's operators
        try:
            self._take(session, state, spec, owner, value)
        except Exception as error:
            session.fail(f"the patched place {key}", error)
        finally:
            state.taking -= 1

    def failed(self, key: str, error: BaseException) -> None:
        """The value could not be read. Counted; the model does not notice."""
        if self._session.state is not None:
            self._failures[key, f"its value could not be read: {type(error).__name__}: {error}"[:_MOST]] += 1

    def _take(self, session: Session, state: StepState, spec: _Spec, owner: Any, value: Any) -> None:
        path, part = self._place(state, spec.target, owner)
        spec.fired += 1
        if spec.tap.label is not None:
            side, name = spec.tap.label
            set_label(side, f"{path}.{name}", value)
            return
        name = f"{path}::{spec.tap.name}"
        if name in self._unchosen:
            return
        cls = f"patch:{spec.patch}"
        sites = self._sites.get(name)
        if sites is None:
            if not (chooses(session.config, name, cls) or (path and chooses(session.config, path, ""))):
                self._unchosen.add(name)
                session.sink.skip(name, "not selected by VLLM_ACCPROBE_MODULES")
                return
            sites = self._sites[name] = {}
            index = (1 << 20) + len(self._sites)
            session.module(Module(name, cls, index, {"value": spec.tap.value, "in": spec.target.function}))
            if spec.tap.like is not None:
                tap, role = spec.tap.like
                session.layouts.alias[name] = (path if tap == "." else f"{path}.{tap}", role)
        number = state.calls.get(name, 0)
        state.calls[name] = number + 1
        session.fired.add(name)
        if not session.takes_outputs:
            return
        found = outputs(value)
        if not found:
            self._failures[f"{name}", "no tensor here" if value is not None else "None here"] += 1
        for role, tensor in found:
            session.take(state, sites, name, cls, role, number, tensor, part)

    def _place(self, state: StepState, target: Target, owner: Any) -> tuple[str, str]:
        """The module path of a value and the part of the model that it belongs to."""
        paths = self._paths.get(id(owner)) if isinstance(owner, torch.nn.Module) else None
        if paths:
            path = innermost(paths, state.stack)
        elif state.stack:
            path = "" if state.stack[-1] == ROOT_TAP else state.stack[-1]
        else:  # after the forward: sampling
            return target.place or target.function, HEAD
        if state.inside == HEAD:
            return path or ROOT_TAP, HEAD
        dotted = path + "."
        prefix = self._prefix
        language = not path or not prefix or dotted.startswith(prefix + ".") or prefix.startswith(dotted)
        return path or ROOT_TAP, LANGUAGE if language else VISION

    def close(self) -> None:
        """Takes the taps out and counts what was never reached."""
        for module in self._modules:
            remove(module, self)
        for (tap, why), count in self._failures.items():
            self._session.sink.skip(tap, why, count=count)
        reached = {(spec.patch, spec.target) for spec in self._specs.values() if spec.fired}
        for spec in self._specs.values():
            place = f"patch:{spec.patch}:{spec.target.function}"
            if (spec.patch, spec.target) not in reached:  # one line, counted by its taps
                self._session.sink.skip(place, "never reached in a captured step")
            elif not spec.fired:
                self._session.sink.skip(f"{place}:{spec.tap.name}", "never reached in a captured step")


def put_on(
    session: Session,
    taps: Taps,
    model: torch.nn.Module,
    prefix: str,
    root: Path,
    rank: int,
    *,
    stored: bool,
    runner: Any = None,
    compiled: bool = False,
) -> ExitStack:
    """Puts on ``model`` what ``session.config`` asks for besides ``taps``, which are attached. What is returned is to
    be closed before the sink is: it puts patched functions back and collects the files that labels named.

    Args:
        prefix: path of the language model inside a multi-modal one, or "".
        root: the dump's directory; rank: the global rank that writes to it.
        stored: parameters' payloads are in the dump.
        runner: vLLM's model runner, or None for a model outside vLLM.
        compiled: the engine compiles or captures graphs.
    """
    config = session.config
    if config.ops:
        from vllm_accprobe.capture.ops.dispatch import of_model, of_runner

        if runner is not None:
            of_runner(session, taps, model, runner, stored, compiled)
        else:
            of_model(session, taps, model, stored)
    labels = Labels(
        session,
        Path(os.path.abspath(root)),
        rank,
        parts=lambda: {name: part for tap in taps.taps for name, part in tap.parts.items()},
        whole_graphs=compiled,
        outside=runner is None,  # an engine's warm-up makes many, which nobody misses
    )
    labels.open()
    attached = ExitStack()
    if config.patches:
        patches = Patches(session, model, prefix, session.say)
        try:
            patches.apply(choose(config.patches))
        except PatchError as error:  # the front end has refused it already, unless the file has changed since
            session.say(f"patches: {error}; serving goes on without them")
            session.sink.skip("patch:", f"refused: {error}"[:_MOST])
        attached.callback(patches.close)
    attached.callback(labels.close)
    return attached
