"""errcheck in a plain script: any torch module that is called, without a line in the script.

The problem: a script's models are made, moved, copied and pickled by code that knows nothing of us, so nothing may be
put on them, and no runner says what a step is. The idea: ``torch.nn.Module.__call__`` is replaced once. A module that
is called from outside of all others is a model, and its calls are its steps, counted from 0 (paths of the second and
later models begin with their class). A table maps each module below the root, by identity, to the same checks as in a
server. Rows have requests and positions where the model takes token ids, as a Probe counts them; padding is ignored.
Where vLLM's worker is, its own observer watches.

Not here: which processes do this (startup/sitecustomize.py, capture/torch_model.py), the checks (watch.py).
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import at_exit, process_rank, root_of, run_facts, unsplit
from vllm_accprobe.capture.core.rows import Requests, Space
from vllm_accprobe.capture.core.session import HEAD, LANGUAGE
from vllm_accprobe.capture.errcheck.findings import RankFindings, finding, keep
from vllm_accprobe.capture.errcheck.watch import Alarm, Input, TapWatch, Watch, WatchedStep, parameters
from vllm_accprobe.capture.padded_batch import Rectangle
from vllm_accprobe.capture.taps.hooks import Tap, attributes, instances
from vllm_accprobe.config import ConfigError, ProbeConfig
from vllm_accprobe.dump.schema import ROOT_TAP, Module

_KNOWN = 64
"""Chosen: requests that are remembered besides those of the call at hand, because numbers of a device come late."""
_ROWS = 1 << 40
"""More rows than any tensor has: in a script no row of a module is known to be padding before it is looked at."""


class WatchedModel:
    """A module and those below it. prefix: before their paths; found: gets this and the alarm of a bad output; said:
    that its watch broke."""

    def __init__(
        self, config: ProbeConfig, root: torch.nn.Module, prefix: str,
        found: Callable[[WatchedModel, Alarm], None],
    ):  # fmt: skip
        self.prefix, self._config = prefix, config
        self.reported = self._reported_padding = False
        self._root = weakref.ref(root)
        devices = {t.device for t in root.parameters()} | {t.device for t in root.buffers()}
        device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")  # of several: read at once
        self.watch = Watch(config.errcheck, lambda alarm: found(self, alarm), say, device)
        self.taps: dict[int, tuple[weakref.ref[torch.nn.Module], TapWatch]] = {}
        self._number = -1
        self._learned_at = -1
        config = replace(config, requests=(), tokens=(), steps=(), modules=())
        self._requests = Requests(config)
        self._rectangle = Rectangle(config, self._requests, root)
        self._named: list[str] = []
        self._arguments = list(inspect.signature(root.forward).parameters)
        self._learn()

    def _learn(self) -> None:
        """Learns the modules below the root; again where one is met that was not there."""
        root = self._root()
        assert root is not None
        for index, (module, paths) in enumerate(instances(root)):
            known = self.taps.get(id(module))
            if known is not None and known[0]() is module:
                continue
            taps, cls = [self._tap(path) for path in paths], type(module).__name__
            parts = {tap: HEAD if tap.rpartition(".")[2] == "lm_head" else LANGUAGE for tap in taps}
            forward = module.forward
            tap = Tap(taps, cls, forward, parts, frozenset(taps), False)
            inner = getattr(forward, "__accprobe__", None)
            if isinstance(inner, Tap):  # a Probe's wrapper takes anything: the names are those of what is inside
                tap.inputs = inner.inputs
            leaf = not any(True for _ in module.children())
            self.taps[id(module)] = weakref.ref(module), TapWatch(self.watch, tap, leaf)
            for name in taps:
                self.watch.module(Module(name, cls, index, attributes(module)))

    def _tap(self, path: str) -> str:
        return ".".join(filter(None, (self.prefix, path))) or ROOT_TAP

    def bad_parameters(self) -> list[tuple[str, str]]:
        """(sentence, tap) of each parameter that holds NaN or Inf."""
        root, found = self._root(), []
        for path, module in root.named_modules() if root is not None else ():
            tap = self._tap(path)
            found += [(f"{tap}.{n}: {bad.nan:,} NaN, {bad.inf:,} Inf", tap) for n, bad in parameters(module)]
        return found

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._number += 1
        try:
            values = dict(zip(self._arguments, args, strict=False)) | kwargs
            tokens = self._rectangle.begin(values)
            self._requests.unsent.clear()
            note = copy.copy(self._rectangle) if tokens else None
            for part in note.batch if note is not None else ():
                if part.internal not in self._named:
                    self._named.append(part.internal)
            while len(self._named) > _KNOWN + (len(note.batch) if note is not None else 0):
                self._requests.forget(self._named.pop(0))
            self.watch.begin(WatchedStep(self._number, _ROWS, note))
        except Exception as error:
            self.watch.fail("the model's arguments", error)

    def call(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """One call of a module during a step."""
        watch = self.watch
        step = watch.now
        if step is None:
            return original(module, *args, **kwargs)
        place = None
        try:
            place = self._place(module)
        except Exception as error:
            watch.fail(type(module).__name__, error)
        if place is None:
            return original(module, *args, **kwargs)
        return place.call(step, MethodType(original, module), args, kwargs)

    def _place(self, module: torch.nn.Module) -> TapWatch | None:
        found = self.taps.get(id(module))
        if found is not None and found[0]() is module:
            return found[1]
        if self._learned_at == self._number:
            return None  # it is none of the model's: made for this call
        self._learned_at = self._number
        self._learn()
        found = self.taps.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def finding_of(self, alarm: Alarm, findings: RankFindings) -> tuple[Any, str]:
        """What is known of an alarm, and where its tensors are; None where only padding is bad."""
        note: Rectangle | None = alarm.step.note
        alarm.step.rows = sum(part.n for part in note.batch) if note is not None else 0
        if note is not None:
            alarm = replace(
                alarm,
                outputs=tuple((role, note.flatten(t)) for role, t in alarm.outputs),
                inputs=tuple(_flat(i, note) for i in alarm.inputs),
            )

        def spaces(part: str, rows: int) -> Space | None:
            return note.space(part, rows) if note is not None else None

        tensor = dict(alarm.outputs).get(alarm.role)
        if tensor is not None and not bool(self.watch.rule.assess(tensor, alarm.part)):
            if not self._reported_padding:
                self._reported_padding = True
                say(f"errcheck: bad values in padding rows of {alarm.tap} alone: no error (reported once)")
            return None, ""
        space = spaces(alarm.part, tensor.shape[0]) if tensor is not None and tensor.dim() else None
        requests = {}
        for part in note.batch if note is not None else ():
            request = self._requests.get(part.internal)
            if request is not None:
                requests[request.req] = request
        found, rows = finding(self.watch, alarm, space, requests, findings.parameters.get(alarm.tap, []))
        root = self._root()
        if tensor is None or root is None:
            return found, "not kept: the step was larger than may be kept; its next bad call will be"
        try:
            modules = dict(root.named_modules(remove_duplicate=False))
            rank, world = process_rank()
            parallel = {**unsplit(world), "rank": rank}
            run = run_facts(
                self._config.to_json(), device={"type": tensor.device.type},
                model={"path": "", "class": type(root).__name__, "dtype": str(tensor.dtype).removeprefix("torch.")},
                parallel=unsplit(world), engine={"runner": "accprobe errcheck", "eager": True},
            )  # fmt: skip
            layouts = Layouts(modules, 0, 1)
            return found, keep(findings.root, run, parallel, self.watch, layouts, alarm, rows, spaces, requests, [])
        except Exception as error:  # a full disk, mostly: the finding itself is worth saying all the same
            return found, f"not kept: {type(error).__name__}: {error}"

    def close(self) -> None:
        try:
            self.watch.close()
        except Exception as error:
            say(f"errcheck: closing failed: {type(error).__name__}: {error}")


def _flat(item: Input, rows: Rectangle) -> Input:
    return item if item.tensor is None else replace(item, tensor=rows.flatten(item.tensor))


_WORKERS = ("vllm.v1.worker.worker_base", "vllm.worker.worker_base")
_now: ScriptWatch | None = None


class ScriptExit(RuntimeError):
    """Raised out of the model's call where the user wants ``--exit``: it ends the script."""


def from_environment() -> None:
    """Watches this process's modules where VLLM_ACCPROBE_ERRCHECK asks for it; once. Never raises."""
    global _now
    if _now is not None and _now.pid == os.getpid():
        return
    try:
        config = ProbeConfig.from_env()
        if not config.errcheck:
            return
        if _now is not None:  # of the process that this one was forked from
            _now.forget()
        _now = ScriptWatch(config)
        _now.begin()
    except ConfigError as error:
        say(f"errcheck: {error}: this script is not watched")


class ScriptWatch:
    """The watch of one process."""

    def __init__(self, config: ProbeConfig):
        self.pid = os.getpid()
        self.config = config
        self.findings: RankFindings | None = None
        self.models: weakref.WeakKeyDictionary[torch.nn.Module, WatchedModel] = weakref.WeakKeyDictionary()
        self._thread = threading.local()
        self._original: Callable[..., Any] | None = None
        self._closed = False
        self.stopping: ScriptExit | None = None
        self._root = root_of(config)

    def begin(self) -> None:
        """Puts itself between every call of a module and the module."""
        call: Any = torch.nn.Module.__call__
        self._original = original = getattr(call, "__accprobe_original__", call)  # not what waits for a first call
        is_compiling, thread, tracing = torch.compiler.is_compiling, self._thread, torch._C._get_tracing_state

        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or tracing():
                return original(module, *args, **kwargs)
            model: WatchedModel | None = getattr(thread, "model", None)
            if model is None:
                model = self._model(module)
                if model is None:
                    return original(module, *args, **kwargs)
                return self._step(model, original, module, args, kwargs)
            return model.call(original, module, args, kwargs)

        __call__.__accprobe_original__ = original  # type: ignore[attr-defined]
        torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]
        at_exit(self.close)

    def forget(self) -> None:
        """Takes itself off."""
        if self._original is not None:
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
            self._original = None

    def _model(self, module: torch.nn.Module) -> WatchedModel | None:
        """The model that a call from outside belongs to; None where it is not watched."""
        if self._closed or os.getpid() != self.pid or any(name in sys.modules for name in _WORKERS):
            return None
        try:
            found = self.models.get(module)
            if found is None:
                if isinstance(module, torch.jit.ScriptModule):
                    return None
                prefix = self._prefix(module) if self.models or self.findings else ""
                found = WatchedModel(self.config, module, prefix, self.alarm)
                self.models[module] = found
                self._report(found)
            return None if found.watch.dead is not None or found.watch.now is not None else found
        except Exception as error:
            say(f"errcheck: {type(module).__name__} cannot be watched ({type(error).__name__}: {error})")
            return None

    def _prefix(self, module: torch.nn.Module) -> str:
        cls = type(module).__name__
        taken = {m.prefix for m in self.models.values()}
        return next(name for k in range(1, 1 << 20) if (name := cls if k == 1 else f"{cls}_{k}") not in taken)

    def _report(self, model: WatchedModel) -> None:
        if self.findings is None:
            rank, world = process_rank()
            self.findings = RankFindings(self._root, self.config, {**unsplit(world), "rank": rank})
            self.findings.settle()
        self.findings.taps += len(model.taps)
        for text, tap in model.bad_parameters():
            self.findings.parameters.setdefault(tap, []).append(text)
            say(f"errcheck: parameter {text}, when the model was first called")
        self.findings.write("watching")

    def _step(
        self, model: WatchedModel, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        findings = self.findings
        assert findings is not None
        self._thread.model = model
        try:
            model.begin(args, kwargs)
            findings.steps += 1
            return model.call(original, module, args, kwargs)
        finally:
            self._thread.model = None
            model.watch.end()
            if model.watch.dead is not None and not model.reported:
                model.reported = True
                findings.write("off", model.watch.dead)
            elif findings.old() or findings.steps == 1:
                findings.write("watching")
            stopping, self.stopping = self.stopping, None
            if stopping is not None and sys.exc_info()[0] is None:
                raise stopping

    def alarm(self, model: WatchedModel, alarm: Alarm) -> None:
        """Tells of a bad output, and keeps its call where it is the first."""
        findings = self.findings
        assert findings is not None
        if not findings.counts(alarm.tap, bool(alarm.outputs)):
            return
        found, kept = model.finding_of(alarm, findings)
        if found is None:
            return
        line = findings.tell(found, kept, "the script is stopped" if findings.exits else "the script goes on")
        if findings.exits:
            self.stopping = ScriptExit(f"accprobe errcheck stops this script: {line}")

    def close(self) -> None:
        """Reads what is still on its way, and writes the last report. Never raises."""
        if self._closed or os.getpid() != self.pid:
            return
        self._closed = True
        self.forget()
        dead = ""
        for model in list(self.models.values()):
            model.close()
            dead = dead or model.watch.dead or ""
        if self.findings is not None:
            self.findings.write("off" if dead else "closed", dead)
