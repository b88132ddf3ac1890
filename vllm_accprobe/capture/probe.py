"""The same capture on any torch model outside vLLM, so that a transformers model can be the golden.

The problem: a plain model has no scheduler; its batch is a rectangle, its decode steps are calls with a cache. The
idea: each call of the root is a step; rows are the (batch, position) pairs of ``input_ids`` that the attention mask
keeps, flattened so that tensors look like vLLM's; a request is a batch row, recognised by the hash of its prompt,
which is what a vLLM dump of the same prompt carries. A model without token ids is captured whole, its calls counted
as token ordinals. Not here: taps and sink, which are shared with vLLM's runner (runner.py).
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import platform
import socket
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe import __version__
from vllm_accprobe.capture.hooks import Taps
from vllm_accprobe.capture.images import Foresight, images_of, language_path, placeholder
from vllm_accprobe.capture.labels import Labels
from vllm_accprobe.capture.layout import Layouts
from vllm_accprobe.capture.params import Parameters
from vllm_accprobe.capture.places import announce
from vllm_accprobe.capture.rows import (
    Item,
    Requests,
    Scheduled,
    Space,
    logits_space,
    token_space,
    vision_space,
    wanted_at_all,
)
from vllm_accprobe.capture.say import say
from vllm_accprobe.capture.session import HEAD, VISION, Session, StepState
from vllm_accprobe.capture.sink import Sink
from vllm_accprobe.config import ConfigError, DumpConfig, ProbeConfig, default_dir, in_ranges
from vllm_accprobe.dump.schema import Step
from vllm_accprobe.dump.writer import write_run_json


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
        if isinstance(config, DumpConfig):
            device_id = config.device_id
            config = config.to_probe()
        else:
            device_id = None
            config = config or (ProbeConfig.from_kwargs(**kwargs) if kwargs else _from_environment())
        self.config = config
        self.model = model
        self.root = Path(os.path.abspath(config.dir or default_dir()))
        self._step = -1
        self._batch: list[Scheduled] = []
        self._grid: tuple[int, int] | None = None
        self._keep: list[int] = []
        self._ids: torch.Tensor | None = None
        self._names: list[str] = []
        self._items: list[Item] = []
        self._begun = False
        self._count = 0
        self._closed = False
        self.paused = False
        """Calls of the model are not steps while this is set."""
        self.next_step: int | None = None
        """The number of the next step, if it is not used yet; else steps are counted."""
        device = next((t.device for t in model.parameters()), torch.device("cpu"))
        rank = _rank()
        self._wanted = in_ranges(config.ranks, rank) and (device_id is None or (device.index or 0) == device_id)
        self.session: Session | None = None
        if self._wanted:
            self._attach(device, rank)

    def _attach(self, device: torch.device, rank: int) -> None:
        model, config = self.model, self.config
        if (self.root / "run.json").exists() and rank == 0:
            raise ConfigError(f"dir={self.root} already holds a dump; name another directory, or remove it")
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_run_json(self.root, self._run_info(device))
            announce(self.root)
        except OSError as error:
            raise ConfigError(
                f"dir={self.root}: {error.strerror or error}; name a directory that can be written"
            ) from None
        start = {
            "schema": 1, "rank": rank, "world_size": _world(), "tp": [0, 1], "pp": [0, 1], "dp": [0, 1], "ep": [0, 1],
            "pid": os.getpid(), "host": socket.gethostname(), "device": str(device), "time": time.time(),
        }  # fmt: skip
        sink = Sink(config, self.root, rank, start, self._stopped, device)
        modules = dict(model.named_modules(remove_duplicate=False))
        self.session = session = Session(config, sink, Layouts(modules, 0, 1), say, self._find_space)
        session.flatten = self._flatten
        self.requests = Requests(config)
        original = model.forward
        self._parameters = list(inspect.signature(original).parameters)
        self._taps = Taps(session)
        self._taps.attach(model, language_path(model))
        parameters = Parameters(session, model, say)
        parameters.rest()
        if config.ops:
            from vllm_accprobe.capture.op_places import of_model

            of_model(session, self._taps, model, parameters.stored)
        self._labels = Labels(
            session, self.root, rank, parts=lambda: {n: tap.part for tap in self._taps.taps for n in tap.names}
        )
        self._labels.open()
        self._patches: Any = None
        if config.patches:
            from vllm_accprobe.capture.patches import apply_named

            self._patches = apply_named(session, model, language_path(model), say)
        self._inner = model.__dict__.get("forward") or model.forward

        @functools.wraps(original)  # transformers' generate asks the forward's signature what the model takes
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        model.__dict__["forward"] = forward
        self._foresight = Foresight(model, self._early)
        atexit.register(self.close, "process exit")

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
        self._foresight.undo()
        self._labels.close()
        if self._patches is not None:
            self._patches.close()
        self.model.__dict__["forward"] = self._inner
        if session.sink.steps:
            for tap, why in self._taps.never_fired():
                session.sink.skip(tap, why)
        self._taps.remove()
        session.dead = session.dead or reason
        session.sink.close(reason)
        if not session.fired:
            say(f"NOTHING was captured in {self._step + 1} calls of the model: check tokens, steps and modules")

    # --- steps -------------------------------------------------------------------------------------------------

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

    def _early(self, asked: dict[str, Any]) -> None:
        """Opens the step that the model is about to compute, because its vision tower runs now."""
        session = self.session
        if session is None or session.dead is not None or session.state is not None or self._begun or self.paused:
            return
        try:
            self._begin(session, (), asked)
            self._begun = True
        except Exception as error:
            session.fail("what generate was given", error)

    def _begin(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step = max(self._step + 1, self.next_step or 0)
        values = dict(zip(self._parameters, args, strict=False)) | kwargs
        ids = values.get("input_ids")
        self._grid = None
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            # No tokens: one call, one token ordinal, as ait counts them.
            if in_ranges(self.config.steps, self._step) and in_ranges(self.config.tokens, self._step):
                session.begin(Step(self._step, {"requests": 1}, time.time()), [], self._step == 0)
            return
        host = ids.detach().cpu()
        batch, length = host.shape
        past = _past_length(values)
        mask = values.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape == (batch, past + length):
            real = mask.detach().cpu().bool()
        else:
            real = torch.ones(batch, past + length, dtype=torch.bool)
        if past == 0 or len(self._names) != batch:
            self._names = []
            token = placeholder(self.model)
            for row in range(batch):
                prompt = host[row][real[row, past:]].tolist()
                name = f"call-{self._count}"
                self._count += 1
                images = images_of(prompt, token) if past == 0 else ()
                self.requests.add(name, prompt, int(real[row, :past].sum()) + len(prompt), images)
                self._names.append(name)
        self._batch, self._keep = [], []
        for row, name in enumerate(self._names):
            columns = torch.nonzero(real[row, past:]).flatten().tolist()
            self._batch.append(Scheduled(name, int(real[row, :past].sum()), len(columns)))
            self._keep += [row * length + column for column in columns]
        self._items = []
        if past == 0:  # later steps have no images to encode
            for name in self._names:
                request = self.requests.get(name)
                for k, image in enumerate(request.images if request else ()):
                    self._items.append(Item(name, k, "image", image.n))
        self._grid = (batch, length)
        self._ids = host.reshape(-1)[self._keep]
        triples = [(part.internal, part.start, part.n) for part in self._batch]
        if in_ranges(self.config.steps, self._step) and wanted_at_all(self.config, self.requests, triples):
            session.begin(
                Step(self._step, {"requests": batch, "tokens": len(self._keep)}, time.time()),
                self.requests.unsent,
                past == 0,
            )

    def _flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] or [B, H, S, ...] → [kept B*S, ...]; the last position only, [B, 1, ...], → [B, ...].

        [1, S, ...] in a larger batch is meant for every row of it (cosines of the positions)."""
        if self._grid is None or tensor.dim() < 2:
            return tensor
        batch, length = self._grid
        if tensor.shape[0] == 1 and batch > 1 and tensor.dim() == 3 and tensor.shape[1] == length:
            tensor = tensor.expand(batch, *tensor.shape[1:])
        if tensor.shape[0] != batch:
            return tensor
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == length:
                rows = tensor.movedim(dim, 1).flatten(0, 1)
                if len(self._keep) != rows.shape[0]:
                    rows = rows[torch.tensor(self._keep, device=rows.device)]
                return rows
        if tensor.shape[1] == 1:
            return tensor.flatten(0, 1)
        return tensor

    def _find_space(self, state: StepState, part: str, rows: int) -> Space | None:
        if self._grid is None:
            return None
        if part == VISION:
            return vision_space(self.config, self.requests, self._items, rows) if self._items else None
        if part == HEAD and rows == len(self._batch) != len(self._keep):
            return logits_space(self.config, self.requests, self._batch)
        space = token_space(self.config, self.requests, self._batch, 0)
        space.ids = self._ids
        if part == HEAD:  # the head saw every position: the same rows under the name of its space
            space.name, space.announced = "logits", False
        return space

    def _run_info(self, device: torch.device) -> dict[str, Any]:
        config = getattr(self.model, "config", None)
        versions = {"accprobe": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
        transformers = sys.modules.get("transformers")
        if transformers is not None:
            versions["transformers"] = str(getattr(transformers, "__version__", "unknown"))
        dtype = next((str(p.dtype).replace("torch.", "") for p in self.model.parameters()), "")
        return {
            "tool": "accprobe",
            "versions": versions,
            "platform": {"system": platform.platform(), "machine": platform.machine()},
            "device": {"type": device.type},
            "model": {
                "path": str(getattr(config, "_name_or_path", "")),
                "class": type(self.model).__name__,
                "dtype": dtype,
            },
            "parallel": {"world_size": _world(), "tp": [0, 1], "pp": [0, 1], "dp": [0, 1], "ep": [0, 1]},
            "engine": {"runner": "accprobe.Probe", "eager": True},
            "probe": self.config.to_json(),
            "start_time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }

    def _stopped(self, reason: str) -> None:
        if self.session is not None:
            self.session.stop(reason)


def register_hook(
    model: torch.nn.Module,
    config: DumpConfig | ProbeConfig | None = None,
    hook_type: str = "dump_data",
    hook_name: str | None = None,
) -> Probe:
    """ait's call of the same name: starts to capture ``model`` and returns the Probe; the dump closes at process exit.
    ``hook_name`` is another spelling of ``hook_type``.

    Raises:
        ConfigError: a setting is wrong, or ``hook_type`` is not "dump_data".
    """
    if (hook_name or hook_type) != "dump_data":
        raise ConfigError(f"hook_type={hook_name or hook_type}: only 'dump_data' exists")
    return Probe(model, config or DumpConfig())


def _from_environment() -> ProbeConfig:
    config = ProbeConfig.from_env()
    return config if config.enabled else ProbeConfig.from_kwargs()


def _past_length(values: dict[str, Any]) -> int:
    """Tokens already in the cache, by the cache's own word."""
    past = values.get("past_key_values")
    length = getattr(past, "get_seq_length", None)
    if callable(length):
        return int(length())
    position = values.get("cache_position")
    if isinstance(position, torch.Tensor) and position.numel():
        return int(position.reshape(-1)[0])
    return 0


def _rank() -> int:
    return (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )


def _world() -> int:
    return (
        torch.distributed.get_world_size()
        if torch.distributed.is_available() and torch.distributed.is_initialized()
        else 1
    )
