"""errcheck inside vLLM: which steps are watched, whose rows are bad, and what follows.

The problem: errcheck needs what a capture needs of vLLM's runner (what a step is, which row belongs to whom, when a
process ends), with or without a capture in the same worker, and for all requests. The idea: a second observer of the
same runner, with a Watch instead of a Session; nothing is written until something is bad.

Not here: the runner (vllm/runner.py), detection (watch.py), the report and the tensors (findings.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from typing import Any

import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import root_of
from vllm_accprobe.capture.core.rows import EncoderItem, Requests, Scheduled, Space
from vllm_accprobe.capture.core.session import DTYPE_NAMES, HEAD, VISION, is_plain
from vllm_accprobe.capture.errcheck.findings import Fingerprint, RankFindings, finding, keep
from vllm_accprobe.capture.errcheck.watch import Alarm, Watch, WatchedStep, parameters, watched
from vllm_accprobe.capture.taps.hooks import Taps
from vllm_accprobe.capture.taps.params import own_tensors, sample_hash
from vllm_accprobe.capture.vllm.batch import ChosenRows, distributes_encoder
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.step_observer import EngineStep, StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import compiles, hidden_size, language_prefix, run_info
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import ROOT_TAP, Request, hash_tokens

_LATE_STEPS = 4
"""Steps for which a finished request is remembered, because numbers of a device come late."""


class ErrcheckExit(RuntimeError):
    """Raised into the engine where the user wants ``--exit``: it ends, and the server with it."""


class ErrcheckObserver(StepObserver):
    """The watch of one worker. All requests and steps are watched, whatever a capture of the same worker selects."""

    without = "errcheck is off on this rank"
    unattached = "errcheck could not attach ({}): it is off on this rank; serving goes on"

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self.watch: Watch | None = None
        self.taps: Taps | None = None
        self.config = dataclasses.replace(config, requests=(), tokens=(), steps=(), modules=())
        self._adapter = adapter
        self._batch = adapter.batch
        self._parallel = adapter.parallel
        self._requests = Requests(self.config)
        self._rows = ChosenRows(adapter.batch, self.config, self._requests)
        self.findings = RankFindings(root_of(config), config, self._parallel)
        self._loaded: dict[str, list[Fingerprint]] = {}
        self._prompts: dict[str, Any] = {}
        self._leaving: deque[list[str]] = deque()
        self._reported_off = self._reported_unplaced = self._closed = False
        self._layouts: Layouts | None = None
        self._run: dict[str, Any] = {}

    @property
    def awake(self) -> bool:
        return self.watch is not None and self.watch.dead is None

    def layer(self, model: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
        self._examine(path, layer)

    def _examine(self, path: str, module: torch.nn.Module) -> None:
        if path in self._loaded:
            return
        self._loaded[path] = [
            (name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), sample_hash(tensor))
            for name, tensor in own_tensors(module)
            if is_plain(tensor)
        ]
        for name, bad in parameters(module):
            text = f"{path or ROOT_TAP}.{name}: {bad.nan:,} NaN, {bad.inf:,} Inf"
            self.findings.parameters.setdefault(path or ROOT_TAP, []).append(text)
            say(f"errcheck: parameter {text}, rank {self._parallel['rank']}, as loaded")

    def loaded(self) -> None:
        if self.watch is not None:
            return
        runner, model = self._adapter.runner, self._adapter.model()
        device = torch.device(getattr(runner, "device", "cpu"))
        for path, module in model.named_modules():
            self._examine(path, module)
        modules = dict(model.named_modules(remove_duplicate=False))
        tp_rank, tp_size = self._parallel["tp"]
        self._layouts = Layouts(modules, tp_rank, tp_size, hidden_size(runner.vllm_config))
        self._run = run_info(runner, model, device, self._parallel, self.config.to_json())
        self.findings.settle()
        watch = Watch(self.config.errcheck, self._alarm, say, device, keep_bytes=1 << 28)
        self.taps = Taps(watch, functools.partial(watched, watch))
        self.taps.attach(model, language_prefix(model))
        self.watch = watch
        findings = self.findings
        findings.taps = len(self.taps.taps)
        findings.write("watching")
        unseen = compiles(runner.vllm_config, model)
        seen = "; modules inside compiled or captured graphs are not seen" if unseen else ""
        say(f"errcheck: {', '.join(findings.kinds)} in {findings.taps} modules{seen}; findings go to {findings.root}")

    def begin_step(self, step: EngineStep) -> None:
        watch = self.watch
        assert watch is not None
        for new in step.new:
            # Without a hash of the prompt, which costs more than all checks of a step: made when it is needed.
            self._requests.add(new.name, None, new.length, new.images)
            self._prompts[new.name] = new.prompt
        self._requests.unsent.clear()
        if step.unplaced and not self._reported_unplaced:
            self._reported_unplaced = True
            say(f"errcheck: {step.unplaced}: such steps are not watched (reported once)")
        if step.number is not None and not step.unplaced:
            self.findings.steps += 1
            if self.findings.steps == 1:  # the KV cache has its memory by now
                watch.keep_bytes = keep_bytes(torch.device(getattr(self._adapter.runner, "device", "cpu")))
            watch.begin(WatchedStep(step.number, step.tokens))
        self._leaving.append(list(step.finished))
        if len(self._leaving) > _LATE_STEPS:
            for name in self._leaving.popleft():
                if name not in step.counts:
                    self._requests.forget(name)
                    self._prompts.pop(name, None)

    def computed(self) -> None:
        watch = self.watch
        if watch is not None and watch.deferred and watch.now is not None:
            try:
                watch.now.note = (list(self._batch.rows()), self._images())
            except Exception as error:
                watch.fail("the order of the rows", error)

    def end_step(self) -> None:
        watch = self.watch
        if watch is None:
            return
        watch.end()
        if watch.dead is not None:
            if not self._reported_off:
                self._reported_off = True
                self.findings.write("off", watch.dead)
        elif self.findings.old():
            self.findings.write("watching")

    def _images(self) -> list[EncoderItem]:
        """The images of the step; none where they are distributed to ranks, and rows of the encoder are one rank's."""
        return [] if distributes_encoder(self._adapter.runner.vllm_config) else list(self._batch.items())

    def _alarm(self, alarm: Alarm) -> None:
        watch = self.watch
        assert watch is not None
        if not self.findings.counts(alarm.tap, bool(alarm.outputs)):
            return
        note = alarm.step.note
        batch: list[Scheduled] = note[0] if note else self._batch.rows()
        items: list[EncoderItem] = note[1] if note else self._images() if alarm.part == VISION else []

        def spaces(part: str, rows: int) -> Space | None:
            if part == VISION:
                return self._rows.images(items, rows)
            if part == HEAD:
                return self._rows.logits(batch)
            space = self._rows.tokens(batch, alarm.step.padded)
            if note is None:
                space.ids, space.positions = self._batch.buffers(space.src)
            return space

        requests = self._named(batch)
        tensor = dict(alarm.outputs).get(alarm.role)
        space = spaces(alarm.part, tensor.shape[0]) if tensor is not None and tensor.dim() else None
        found, rows = finding(watch, alarm, space, requests, self.findings.parameters.get(alarm.tap, []))
        if tensor is None:
            most = watch.keep_bytes / 1e6
            kept = f"not kept: the step was larger than the {most:.0f} MB that may be kept; its next bad call will be"
        else:
            assert self._layouts is not None
            try:
                params = self._loaded.get("" if alarm.tap == ROOT_TAP else alarm.tap, [])
                kept = keep(
                    self.findings.root, self._run, self._parallel, watch, self._layouts, alarm, rows, spaces, requests,
                    params,
                )  # fmt: skip
            except Exception as error:  # a full disk, mostly: the finding itself is worth saying all the same
                kept = f"not kept: {type(error).__name__}: {error}"
        ends = "the engine is stopped" if self.findings.exits else "serving goes on"
        line = self.findings.tell(found, kept, ends, f", rank {self._parallel['rank']}")
        if self.findings.exits:
            self.stopping = ErrcheckExit(f"accprobe errcheck stops this engine: {line}")

    def _named(self, batch: list[Scheduled]) -> dict[int, Request]:
        found = {}
        for part in batch:
            request = self._requests.get(part.internal)
            if request is not None:
                ids = self._prompts.get(part.internal)
                prompt = hash_tokens(ids) if ids is not None else ""
                found[request.req] = dataclasses.replace(request, prompt=prompt, ordinal=0)
        return found

    def failed(self, where: str, error: BaseException) -> None:
        if self.watch is not None:
            self.watch.fail(where, error)
        else:
            say(f"errcheck: {where} failed ({type(error).__name__}: {error}): it is off on this rank; serving goes on")

    def close(self, reason: str) -> None:
        """Reads what is still on its way and writes the last report, once. Never raises."""
        if self._closed:
            return
        self._closed = True
        watch = self.watch
        if watch is None:
            return
        try:
            watch.close()
            if self.taps is not None:
                self.taps.remove()
            self.findings.write("closed" if watch.dead is None else "off", watch.dead or "")
            if self.findings.first is None and watch.dead is None:
                say(f"errcheck: rank {self._parallel['rank']}: nothing bad in {self.findings.steps} steps")
        except Exception as error:
            say(f"errcheck: closing failed: {type(error).__name__}: {error}")


def keep_bytes(device: torch.device) -> int:
    """How much of a step may be kept by reference: an eighth of the device's free memory, at most 1 GiB. Two steps, or
    three, may be waiting for their numbers at a time."""
    if device.type == "cpu":
        return 1 << 28
    try:
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(min(free // 8, 1 << 30))
    except Exception as error:
        say(f"errcheck: free memory of {device} unknown ({type(error).__name__}: {error}): it holds 256 MB of a step")
        return 1 << 28
