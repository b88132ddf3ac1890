"""The same capture on any torch model outside vLLM, so that a transformers model can be the golden.

The problem: a plain model has no scheduler that says what a step is and who asked. The idea: each call of the root is a
step; its rows and requests are those of a rectangle of token ids, and have the same keys as in a vLLM dump of the same
prompt. A model without token ids is captured whole, and its calls count as token ordinals.

Not here: rows of a rectangle (padded_batch.py), taps and sink, which vLLM's runner shares (taps/, core/).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from typing import Any

import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, at_exit, process_rank, root_of, run_facts, unsplit
from vllm_accprobe.capture.core.rows import Requests, wanted_at_all
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.errcheck import plain_script
from vllm_accprobe.capture.padded_batch import Rectangle, TowerCalls, language_path
from vllm_accprobe.capture.taps.hooks import Taps, tapped
from vllm_accprobe.capture.taps.params import ParameterLines
from vllm_accprobe.capture.taps.patches import put_on
from vllm_accprobe.config import PREFIX, ConfigError, DumpConfig, ProbeConfig, in_ranges
from vllm_accprobe.dump.schema import Step


class Probe:
    """Captures a torch model: ``with Probe(model, dir="golden"): model.generate(...)``.

    Args:
        model: any ``torch.nn.Module``; taps are put on it and all its modules until ``close``.
        config: a ProbeConfig or DumpConfig, or None and keyword arguments: the fields of ProbeConfig. With neither,
            the environment's settings where it has VLLM_ACCPROBE=1 (`accprobe run -- python script.py`).

    Raises:
        ConfigError: a setting is wrong, or the directory already holds a dump.
    """

    def __init__(self, model: torch.nn.Module, config: ProbeConfig | DumpConfig | None = None, **kwargs: Any):
        if config is not None and kwargs:
            raise ConfigError(f"give a configuration or keyword arguments, not both: {sorted(kwargs)[0]} had no effect")
        if config is not None and not isinstance(config, (DumpConfig, ProbeConfig)):
            raise ConfigError(f"the configuration is a {type(config).__name__}, not a DumpConfig or ProbeConfig: write "
                              "DumpConfig(dump_path=...)")  # fmt: skip
        if isinstance(config, DumpConfig):
            device_id = config.device_id
            config = config.to_probe()
        else:
            device_id = None
            config = config or (ProbeConfig.from_kwargs(**kwargs) if kwargs else _from_environment())
        if not config.armed:
            raise ConfigError("armed=0 is for a served engine: a Probe captures inside its `with`, and never before")
        self.config = config
        self.model = model
        if os.environ.get(PREFIX + "ERRCHECK"):
            plain_script.from_environment()
        self.root = root_of(config)
        self._step = -1
        self._begun = False
        self._closed = False
        self.paused = False
        """Calls of the model are not steps while this is set."""
        self.next_step: int | None = None
        """The number of the next step, if it is not used yet; else steps are counted."""
        device = next((t.device for t in model.parameters()), torch.device("cpu"))
        rank, world = process_rank()
        self._wanted = in_ranges(config.ranks, rank) and (device_id is None or (device.index or 0) == device_id)
        self.session: Session | None = None
        if self._wanted:
            self._attach(device, rank, world)

    def _attach(self, device: torch.device, rank: int, world: int) -> None:
        model, config = self.model, self.config
        if (self.root / "run.json").exists() and rank == 0:
            raise ConfigError(f"dir={self.root} already holds a dump; name another directory, or remove it")
        modules = dict(model.named_modules(remove_duplicate=False))
        self.requests = Requests(config)
        self._rectangle = rectangle = Rectangle(config, self.requests, model)
        self._recording = Recording(
            config, self.root, self._run_info(device, world), Layouts(modules, 0, 1), rectangle.space,
            rank=rank, parallel=unsplit(world), device=device, setting="dir=", announced=True,
        )  # fmt: skip
        self.session = session = self._recording.session
        session.flatten = rectangle.flatten
        original = model.forward
        self._parameters = list(inspect.signature(original).parameters)
        self._taps = Taps(session, functools.partial(tapped, session))
        self._taps.attach(model, language_path(model))
        parameters = ParameterLines(session, model, say)
        parameters.rest()
        prefix = language_path(model)
        self._attachments = put_on(session, self._taps, model, prefix, self.root, rank, stored=parameters.stored)
        self._inner = model.__dict__.get("forward") or model.forward

        @functools.wraps(original)  # transformers' generate asks the forward's signature what the model takes
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        model.__dict__["forward"] = forward
        self._towers = TowerCalls(model, self._early)
        at_exit(self.close, "process exit")

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self, reason: str = "closed") -> None:
        """Takes all taps off the model and closes the dump. Safe to call twice."""
        if self._closed or self.session is None:
            return
        self._closed = True
        session = self.session
        session.end()
        self._towers.undo()
        self._attachments.close()
        self.model.__dict__["forward"] = self._inner
        if session.sink.steps:
            for tap, why in self._taps.never_fired():
                session.sink.skip(tap, why)
        self._taps.remove()
        self._recording.close(reason)
        if not session.fired:
            say(f"NOTHING was captured in {self._step + 1} calls of the model: check tokens, steps and modules")

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        begun, self._begun = self._begun, False
        if session is None or session.dead is not None or self.paused or (session.state is not None and not begun):
            return self._inner(*args, **kwargs)
        if not begun:
            try:
                self._begin(session, args, kwargs)
            except Exception as error:
                session.fail("the model's arguments", error)
        try:
            with session.operators():
                return self._inner(*args, **kwargs)
        finally:
            session.end()

    def _early(self, arguments: dict[str, Any]) -> None:
        """Opens the step that the model is about to compute, because its vision tower runs now."""
        session = self.session
        if session is None or session.dead is not None or session.state is not None or self._begun or self.paused:
            return
        try:
            self._begin(session, (), arguments)
            self._begun = True
        except Exception as error:
            session.fail("what generate got", error)

    def _begin(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step = max(self._step + 1, self.next_step or 0)
        values = dict(zip(self._parameters, args, strict=False)) | kwargs
        chosen = in_ranges(self.config.steps, self._step)
        if not self._rectangle.begin(values):
            # No tokens: one call, one token ordinal, as ait counts them.
            if chosen and in_ranges(self.config.tokens, self._step):
                session.begin(Step(self._step, {"requests": 1}, time.time()), [], self._step == 0)
            return
        batch = self._rectangle.batch
        triples = [(part.internal, part.start, part.n) for part in batch]
        if chosen and wanted_at_all(self.config, self.requests, triples):
            size = {"requests": len(batch), "tokens": sum(part.n for part in batch)}
            session.begin(Step(self._step, size, time.time()), self.requests.unsent, self._rectangle.prompts)

    def _run_info(self, device: torch.device, world: int) -> dict[str, Any]:
        config = getattr(self.model, "config", None)
        transformers = sys.modules.get("transformers")
        also = {"transformers": str(getattr(transformers, "__version__", "unknown"))} if transformers else {}
        return run_facts(
            self.config.to_json(),
            versions=also,
            device={"type": device.type},
            model={
                "path": str(getattr(config, "_name_or_path", "")),
                "class": type(self.model).__name__,
                "dtype": next((str(p.dtype).replace("torch.", "") for p in self.model.parameters()), ""),
            },
            parallel=unsplit(world),
            engine={"runner": "accprobe.Probe", "eager": True},
        )


def register_hook(
    model: torch.nn.Module,
    config: DumpConfig | ProbeConfig | None = None,
    hook_type: str = "dump_data",
    hook_name: str | None = None,
) -> Probe:
    """ait's call of the same name: starts to capture ``model`` and returns the Probe; the dump closes at process exit.
    ``hook_name`` is another spelling of ``hook_type``.

    Raises:
        ConfigError: a setting is wrong, ``model`` is no module, or ``hook_type`` is not "dump_data".
    """
    if (hook_name or hook_type) != "dump_data":
        raise ConfigError(f"hook_type={hook_name or hook_type}: only 'dump_data' exists")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"register_hook: the first argument is a {type(model).__name__}, not a torch.nn.Module")
    probe = Probe(model, config or DumpConfig())
    if probe.session is not None:
        say(f"register_hook: the dump goes to {probe.root}")
    else:
        say("register_hook: this device or rank is not selected (device_id, ranks): nothing is captured here")
    return probe


def _from_environment() -> ProbeConfig:
    config = ProbeConfig.from_env()
    return config if config.enabled else ProbeConfig.from_kwargs()
