"""errcheck in a plain script: any torch module that is called, without a line in the script.

The problem: a script's models are made, moved, copied and pickled by code that knows nothing of us, and there is no
runner that says what a step is. The idea: ``torch.nn.Module.__call__`` is replaced once; nothing is put on any model. A
module that is called from outside of all others is a model, and its calls are its steps, counted from 0 (the paths of
the second and later models begin with their class). Where vLLM's worker is, its own observer watches.
Not here: what is done in a call (watched_model.py), which processes do this (startup/sitecustomize.py,
torch_model/probe.py).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.capture.core.recording import at_exit, process_rank, root_of, unsplit
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.nan_watch.rank_findings import RankFindings
from vllm_accprobe.capture.nan_watch.step import Alarm
from vllm_accprobe.capture.nan_watch.watched_model import WatchedModel
from vllm_accprobe.config import ConfigError, ProbeConfig
from vllm_accprobe.dump.findings import sentence

EXIT = "exit"
SUBDIR = "errcheck"
_WORKERS = ("vllm.v1.worker.worker_base", "vllm.worker.worker_base")
_now: ScriptWatch | None = None


class ScriptExit(RuntimeError):
    """Raised out of the model's call where the user asked for ``--exit``: it ends the script."""


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
        self.kinds = tuple(kind for kind in config.errcheck if kind != EXIT)
        self.exits = EXIT in config.errcheck
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
                found = WatchedModel(self.config, self.kinds, module, prefix, self.alarm)
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
            root = self._root / SUBDIR if self.config.enabled else self._root
            self.findings = RankFindings(root, self.kinds, {**unsplit(world), "rank": rank})
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
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
            model.end()
            if model.watch.dead is not None and not model.said:
                model.said = True
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
        found, kept = model.told(alarm, findings)
        if found is None:
            return
        findings.first = first = replace(found, tensors=kept)
        findings.write("watching")
        ends = "the script is stopped" if self.exits else "the script goes on"
        say(f"errcheck: {sentence(first)}; tensors {kept}; {ends}")
        if self.exits:
            self.stopping = ScriptExit(f"accprobe errcheck stops this script: {sentence(first)}")

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
