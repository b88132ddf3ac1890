"""errcheck inside vLLM: which steps are watched, whose rows are bad, and what happens then.

The problem: everything that capture has to know of vLLM's runner (what a step is, which row is whose, when a process
ends) errcheck has to know, too, with or without a capture beside it, and for all requests. The idea: a second probe of
the same kind around the same runner, with a Watch instead of a Session; nothing is written until something is bad.
Not here: finding (watch.py), writing (keep.py, dump/findings.py).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.memory import DTYPE_NAMES
from vllm_accprobe.capture.core.rows import Item, Scheduled, Space, logits_space, token_space, vision_space
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.session import HEAD, VISION
from vllm_accprobe.capture.nan_watch.bad_values import parameters
from vllm_accprobe.capture.nan_watch.keep import finding, fingerprint, keep
from vllm_accprobe.capture.nan_watch.step import Alarm, WatchedStep
from vllm_accprobe.capture.nan_watch.watch import Watch
from vllm_accprobe.capture.taps.hooks import Taps
from vllm_accprobe.capture.taps.params import own_tensors
from vllm_accprobe.capture.vllm.attach import on_worker
from vllm_accprobe.capture.vllm.dealing import deals
from vllm_accprobe.capture.vllm.eager import compiles
from vllm_accprobe.capture.vllm.loading import before_packing
from vllm_accprobe.capture.vllm.runner import _WARMUP_IDS, RunnerProbe
from vllm_accprobe.capture.vllm.vllm_compat import hidden_size, images_of, language_prefix, run_info
from vllm_accprobe.config import ConfigError, ProbeConfig
from vllm_accprobe.dump.findings import Finding, RankReport, sentence, write
from vllm_accprobe.dump.schema import ROOT_TAP, Request, hash_tokens

EXIT = "exit"
SUBDIR = "errcheck"
_PLACES = 100
_REPORT_S = 10.0
_LATE_STEPS = 4
"""Steps for which a finished request is remembered, because numbers of a device come late."""


class ErrcheckExit(RuntimeError):
    """Raised into the engine where the user asked for ``--exit``: it ends, and the server with it."""


def attach(wrapper: Any) -> ErrcheckProbe | None:
    """Called in each worker after init_device, after the capture's own attach. Never raises."""
    try:
        return on_worker(wrapper, ErrcheckProbe, "_accprobe_errcheck", "errcheck is off on this rank")
    except ConfigError as error:
        say(str(error))
    except Exception as error:
        say(f"errcheck could not attach ({type(error).__name__}: {error}): it is off on this rank; serving goes on")
    return None


class ErrcheckProbe(RunnerProbe):
    """The watch of one worker. All requests and steps are watched, whatever a capture beside it selects."""

    def __init__(self, config: ProbeConfig, worker: Any, runner: Any, parallel: dict[str, Any]):
        self.watch: Watch | None = None
        self.kinds = tuple(kind for kind in config.errcheck if kind != EXIT)
        self.exits = EXIT in config.errcheck
        self.stop: Finding | None = None
        self.first: Finding | None = None
        self.bad_parameters: dict[str, list[str]] = {}
        self._loaded: dict[str, list[dict[str, Any]]] = {}
        self._written = time.monotonic()
        self._later = 0
        self._places: Counter[str] = Counter()
        self._prompts: dict[str, Any] = {}
        self._leaving: deque[list[str]] = deque()
        self._report_fails = self._said_off = False
        self._layouts: Layouts | None = None
        self._run: dict[str, Any] = {}
        everything = dataclasses.replace(config, requests=(), tokens=(), steps=(), modules=())
        super().__init__(everything, worker, runner, parallel)
        self.root = self.root / SUBDIR if config.enabled else self.root

    # --- the model ---------------------------------------------------------------------------------------------

    def _load_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._refuses("errcheck is off on this rank"):
            return original(*args, **kwargs)
        with before_packing(self._look_at_layer):
            result = original(*args, **kwargs)
        try:
            if self.watch is None:
                self._attach_model()
        except Exception as error:
            self._off("attaching to the model", error)
        return result

    def _look_at_layer(self, model: torch.nn.Module, layer: torch.nn.Module) -> None:
        """A layer whose weights are loaded and not yet packed."""
        try:
            if not self._paths:
                self._paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
            if id(layer) in self._paths:
                self._look(self._paths[id(layer)], layer)
        except Exception as error:
            self._off("the loaded weights", error)

    def _look(self, path: str, module: torch.nn.Module) -> None:
        if path in self._loaded:
            return
        self._loaded[path] = [
            fingerprint(name, tensor)
            for name, tensor in own_tensors(module)
            if tensor.dtype in DTYPE_NAMES and tensor.layout is torch.strided and not tensor.is_quantized
        ]
        for name, bad in parameters(module):
            text = f"{path or ROOT_TAP}.{name}: {bad.nan:,} NaN, {bad.inf:,} Inf"
            self.bad_parameters.setdefault(path or ROOT_TAP, []).append(text)
            say(f"errcheck: parameter {text}, rank {self.parallel['rank']}, as loaded")

    def _attach_model(self) -> None:
        runner = self.runner
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        device = torch.device(getattr(runner, "device", "cpu"))
        for path, module in model.named_modules():
            self._look(path, module)
        modules = dict(model.named_modules(remove_duplicate=False))
        self._layouts = Layouts(
            modules, self.parallel["tp"][0], self.parallel["tp"][1], hidden_size(runner.vllm_config)
        )
        self._run = run_info(runner, model, device, self.parallel, self.config.to_json())
        self._settle_place()
        watch = Watch(self.kinds, self._alarm, say, device, hold_bytes=1 << 28)
        self.taps = Taps(watch, watch.around)  # type: ignore[arg-type]
        self.taps.attach(model, language_prefix(model))
        self.watch = watch
        self._write("watching")
        seen = (
            ""
            if not compiles(runner.vllm_config, model)
            else "; modules inside compiled or captured graphs are not seen"
        )
        say(f"errcheck: {', '.join(self.kinds)} in {len(self.taps.taps)} modules{seen}; findings go to {self.root}")

    def _settle_place(self) -> None:
        """A second engine of one process writes beside the first one's."""
        root = self.root
        for number in range(1, 1000):
            place = root if number == 1 else root.with_name(f"{root.name}.{number}")
            if not (place / f"errcheck-rank{self.parallel['rank']:04d}.json").exists():
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.root = place
                return

    # --- steps -------------------------------------------------------------------------------------------------

    def _execute_model(self, original: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        watch = self.watch
        self._end_step()
        if watch is None or watch.dead is not None or self._quiet or kwargs.get("dummy_run"):
            return original(scheduler_output, *args, **kwargs)
        try:
            self._begin_step(watch, scheduler_output)
        except Exception as error:
            watch.fail("reading the scheduler's output", error)
        result = original(scheduler_output, *args, **kwargs)
        if watch.deferred and watch.now is not None:
            try:
                watch.now.note = (list(self.batch.rows()), self._images())
            except Exception as error:
                watch.fail("the order of the rows", error)
        if result is not None or getattr(self.runner, "sample_tokens", None) is None:
            self._finish(watch)
        self._stop_if_asked()
        return result

    def _sample_tokens(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if self.watch is not None:
                self._finish(self.watch)
                self._stop_if_asked()

    def _end_step(self) -> None:
        if self.watch is not None:
            self._finish(self.watch)

    def _finish(self, watch: Watch) -> None:
        watch.end()
        if watch.dead is not None:
            if not self._said_off:
                self._said_off = True
                self._write("off", watch.dead)
        elif time.monotonic() - self._written > _REPORT_S:  # so that a killed rank has left how far it came
            self._write("watching")

    def _begin_step(self, watch: Watch, out: Any) -> None:
        counts: dict[str, int] = out.num_scheduled_tokens
        total = int(out.total_num_scheduled_tokens)
        self.batch.begin(out)
        for new in out.scheduled_new_reqs:
            self._register(new)
        self.requests.unsent.clear()
        if total and not any(name.startswith(_WARMUP_IDS) for name in counts):
            self._step += 1
            self._seen_steps += 1
            if self._seen_steps == 1:  # the KV cache has its memory by now
                watch.hold_bytes = hold_bytes(torch.device(getattr(self.runner, "device", "cpu")))
            watch.begin(WatchedStep(self._step, total))
        self._leaving.append([name for name in out.finished_req_ids if name not in counts])
        if len(self._leaving) > _LATE_STEPS:
            for name in self._leaving.popleft():
                if name not in counts:
                    self.requests.forget(name)
                    self._prompts.pop(name, None)

    def _register(self, new: Any) -> None:
        """Without a hash of the prompt, which costs more than all checks of a step: made when it is needed."""
        ids = new.prompt_token_ids
        length = len(ids) if ids is not None else int(getattr(getattr(new, "prompt_embeds", None), "shape", (0,))[0])
        self.requests.add(new.req_id, None, length, images_of(new))
        self._prompts[new.req_id] = ids

    def _images(self) -> list[Item]:
        """The images of the step; none where they are dealt out to ranks, and rows of the encoder are one rank's."""
        return [] if deals(self.runner.vllm_config) else list(self.batch.items())

    # --- findings ----------------------------------------------------------------------------------------------

    def _alarm(self, alarm: Alarm) -> None:
        watch = self.watch
        assert watch is not None
        first = self.first
        again = first is not None and not first.dtype and bool(alarm.outputs) and alarm.tap == first.tap
        if first is not None:
            self._later += 1
            if len(self._places) < _PLACES or alarm.tap in self._places:
                self._places[alarm.tap] += 1
            if not again:
                return
        note = alarm.step.note
        batch: list[Scheduled] = note[0] if note else self.batch.rows()
        items: list[Item] = note[1] if note else self._images() if alarm.part == VISION else []

        def spaces(part: str, rows: int) -> Space | None:
            if part == VISION:
                return vision_space(self.config, self.requests, items, rows)
            if part == HEAD:
                space = logits_space(self.config, self.requests, batch)
            else:
                space = token_space(self.config, self.requests, batch, alarm.step.padded)
                if note is None:
                    space.ids, space.positions = self.batch.buffers(space.src)
            space.floors = self.batch.floors(batch)
            return space

        requests = self._requests(batch)
        tensor = dict(alarm.outputs).get(alarm.role)
        space = spaces(alarm.part, tensor.shape[0]) if tensor is not None and tensor.dim() else None
        bad = self.bad_parameters.get(alarm.tap, [])
        found, rows = finding(watch, alarm, space, requests, bad)
        if tensor is None:
            held = watch.hold_bytes / 1e6
            kept = f"not kept: the step was larger than the {held:.0f} MB that may be held; its next bad call will be"
        else:
            assert self._layouts is not None
            try:
                params = self._loaded.get("" if alarm.tap == ROOT_TAP else alarm.tap, [])
                kept = keep(
                    self.root, self._run, self.parallel, watch, self._layouts, alarm, rows, spaces, requests, params,
                    say,
                )  # fmt: skip
            except Exception as error:  # a full disk, mostly: the finding itself is worth saying all the same
                kept = f"not kept: {type(error).__name__}: {error}"
        self.first = dataclasses.replace(found, tensors=kept)
        self._write("watching")
        ends = "the engine is stopped" if self.exits else "serving goes on"
        say(f"errcheck: {sentence(self.first)}, rank {self.parallel['rank']}; tensors {kept}; {ends}")
        if self.exits:
            self.stop = self.first

    def _requests(self, batch: list[Scheduled]) -> dict[int, Request]:
        found = {}
        for part in batch:
            request = self.requests.get(part.internal)
            if request is not None:
                ids = self._prompts.get(part.internal)
                prompt = hash_tokens(ids) if ids is not None else ""
                found[request.req] = dataclasses.replace(request, prompt=prompt, ordinal=0)
        return found

    def _stop_if_asked(self) -> None:
        if self.stop is not None:
            found, self.stop = self.stop, None
            raise ErrcheckExit(f"accprobe errcheck stops this engine: {sentence(found)}")

    def _off(self, where: str, error: BaseException) -> None:
        say(f"errcheck: {where} failed ({type(error).__name__}: {error}): it is off on this rank; serving goes on")

    def _write(self, state: str, why: str = "") -> None:
        self._written = time.monotonic()
        try:
            write(
                self.root,
                RankReport(
                    rank=self.parallel["rank"],
                    pid=os.getpid(),
                    pp=self.parallel["pp"][0],
                    dp=self.parallel["dp"][0] if self.parallel["dp"][1] > 1 else 0,
                    state=state,
                    why=why,
                    kinds=self.kinds,
                    taps=len(self.taps.taps) if self.taps is not None else 0,
                    steps=self._seen_steps,
                    later=self._later,
                    places=dict(self._places),
                    first=self.first,
                    parameters=tuple(text for texts in self.bad_parameters.values() for text in texts),
                ),
            )
        except OSError as error:
            if not self._report_fails:
                self._report_fails = True
                say(f"errcheck: its findings cannot be written to {self.root}: {error.strerror or error}")

    def close(self, reason: str) -> None:
        """Reads what is still on its way and writes the last report, once. Never raises."""
        if self._closed:
            return
        self._closed = True
        watch = self.watch
        if watch is None:
            return
        try:
            watch.end()
            if watch.dead is None:
                watch.poll(wait=True)
            if self.taps is not None:
                self.taps.remove()
            self._write("closed" if watch.dead is None else "off", watch.dead or "")
            if self.first is None and watch.dead is None:
                say(f"errcheck: rank {self.parallel['rank']}: nothing bad in {self._seen_steps} steps")
        except Exception as error:
            say(f"errcheck: closing failed: {type(error).__name__}: {error}")


def hold_bytes(device: torch.device) -> int:
    """How much of a step may be held by reference: an eighth of the device's free memory, at most 1 GiB. Two steps, or
    three, may be waiting for their numbers at a time."""
    if device.type == "cpu":
        return 1 << 28
    try:
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(min(free // 8, 1 << 30))
    except Exception:
        return 1 << 28
