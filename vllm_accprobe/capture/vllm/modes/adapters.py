"""LoRA adapters: their weights in the dump, once each, as their files have them.

The problem: an adapter is no part of the model when the model is loaded; vLLM reads it when the first request asks for
it, scales it, merges it and copies it into a slot that another adapter gets later. A wrong adapter looks like a wrong
projection. The idea: the runner's adapter manager has one method that reads an adapter's files; what it gives is
recorded as parameters of the modules that they belong to, under the adapter's name, before anything is merged. Every
rank reads the whole adapter, so that it is the same on all. Not here: which request has which adapter (runner.py),
what becomes of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_accprobe.capture.core.put_over import put_over
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.taps.params import ParameterLines, sample_hash
from vllm_accprobe.dump.schema import ADAPTER_ANEW, ADAPTER_ROLE

_READS = "_load_adapter"
"""The method of vLLM's WorkerLoRAManager (0.11 to 0.33) that reads an adapter's files."""


def adapter_name(new: Any) -> str:
    """The adapter of a request that the scheduler names for the first time; "" where it has none."""
    request = getattr(new, "lora_request", None)
    return "" if request is None else str(getattr(request, "lora_name", "") or getattr(request, "lora_int_id", "?"))


class Adapters:
    """Looks at each adapter that ``runner`` loads. A runner without a manager has none, and nothing happens."""

    def __init__(self, session: Session, parameters: ParameterLines, runner: Any):
        self._session = session
        self._parameters = parameters
        self._seen: dict[tuple[str, str, str], str] = {}
        self._undo: Callable[[], None] | None = None
        manager = getattr(runner, "lora_manager", None)
        if manager is None:
            return
        original = getattr(manager, _READS, None)
        if not callable(original):
            session.sink.skip("lora", f"{type(manager).__name__} has no {_READS}: adapters' weights are not seen")
            return

        def read(request: Any, *args: Any, **kwargs: Any) -> Any:
            loaded = original(request, *args, **kwargs)
            self._look(request, loaded)
            return loaded

        self._undo = put_over(manager, _READS, read)

    def close(self) -> None:
        """The manager is as it was."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _look(self, request: Any, loaded: Any) -> None:
        if self._session.dead is not None:
            return
        try:
            name = str(request.lora_name)
            for module, weights in loaded.loras.items():
                for part, tensor in _tensors(weights):
                    self._record(name, str(module), part, tensor)
        except Exception as error:  # another release's or a vendor's adapters
            self._session.sink.skip("lora", f"an adapter's weights cannot be read ({type(error).__name__}: {error})")

    def _record(self, name: str, module: str, part: str, tensor: torch.Tensor) -> None:
        key, now = (name, module, part), sample_hash(tensor)
        before = self._seen.setdefault(key, now)
        role = f"{ADAPTER_ROLE}{name}.{part}"
        if before != now:
            self._session.sink.skip(module, ADAPTER_ANEW, f"param.{role}")
        else:
            self._parameters.whole(module, role, tensor)


def _tensors(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(which, tensor) of one module's LoRALayerWeights; experts have a list of each."""
    for part in ("lora_a", "lora_b"):
        value = getattr(weights, part, None)
        several = value if isinstance(value, (list, tuple)) else [value]
        for i, tensor in enumerate(several):
            if isinstance(tensor, torch.Tensor):
                yield part if len(several) == 1 else f"{part}.{i}", tensor
    scaling = getattr(weights, "scaling", None)
    if isinstance(scaling, (int, float)):
        yield "scaling", torch.tensor(float(scaling))
