"""LoRA adapters in their slots: what was to be put there, and what lies there.

The problem: an adapter is copied into one of a few slots of each layer's stacked tensors; a layer that is passed over
keeps the adapter that was there before. The idea: when the manager has activated one, its own tensors and the slot are
looked at, layer by layer; zeros around a tensor of lower rank add nothing to the sum without order, so that both must
be equal. Only the slot that was filled is read. Not here: which of two adapters a request wants (the rows' own
identity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.capture.weights.life import WeightLife, tap_path
from vllm_accprobe.dump.weights.weight_life import GIVEN, SLOT

MOST = 256
"""Activations that are looked at: a server with more adapters than slots exchanges some in every step."""
Say = Callable[..., None]


class AdapterSlots:
    """Wraps the managers of ``runner``'s adapters, where it has any."""

    def __init__(self, life: WeightLife, runner: Any, quiet: Callable[[], bool], skipped: Callable[[], None]):
        self._life, self._quiet, self._skipped = life, quiet, skipped
        self._names: dict[int, str] = {}
        self._left = MOST
        worker = getattr(runner, "lora_manager", None)
        self._manager = getattr(worker, "_adapter_manager", None)
        if self._manager is None:
            return
        self._wrap(worker, "_load_adapter", self._load)
        self._wrap(self._manager, "activate_adapter", self._activate)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if callable(original):
            setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def _load(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        number, name = getattr(request, "lora_int_id", None), getattr(request, "lora_name", "")
        if isinstance(number, int):
            self._names[number] = str(name)
        return original(request, *args, **kwargs)

    def _activate(self, original: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
        result = original(number, *args, **kwargs)
        if result and not self._quiet() and not self._life.off:
            if self._left:
                self._left -= 1
                self._look(number)
            else:
                self._skipped()
        return result

    def _look(self, number: int) -> None:
        manager: Any = self._manager
        with self._life.safely():
            slot = manager.lora_index_to_id.index(number)
            name = self._names.get(number, str(number))
            self._life.adapter(lambda say: self._prints(number, slot, say), name=name, slot=slot)

    def _prints(self, number: int, slot: int, say: Say) -> None:
        manager: Any = self._manager
        registered = manager._registered_adapters
        adapter = registered[number] if number in registered else None  # noqa: SIM401  (a cache: get() counts)
        for path, module in manager.modules.items():
            given = None if adapter is None else manager._get_lora_layer_weights(adapter, path)
            for name in ("lora_a", "lora_b"):
                stacked = getattr(module, f"{name}_stacked", None)
                if not isinstance(stacked, (tuple, list)):
                    continue
                whole = _whole(given, name, len(stacked), int(getattr(module, "tp_size", 1) or 1))
                for i, tensor in enumerate(stacked):
                    where = tap_path(path), type(module).__name__, f"{name}.{i}"
                    if whole is not None:
                        source = whole[i]
                        say(*where, GIVEN, torch.zeros(1, dtype=tensor.dtype) if source is None
                            else source.detach().to(tensor.dtype))  # fmt: skip
                    say(*where, SLOT, tensor[slot])


def _whole(given: Any, name: str, count: int, tp_size: int) -> list[torch.Tensor | None] | None:
    """The adapter's tensors for each of the layer's ``count`` slices, None in it for a slice that it leaves alone;
    None where they are cut over ranks, or cannot be told."""
    if tp_size > 1:
        return None
    if not given:
        return [None] * count
    found = getattr(given, name, None)
    found = [found] if isinstance(found, torch.Tensor) else found
    if not isinstance(found, list) or len(found) != count:
        return None
    return found if all(one is None or isinstance(one, torch.Tensor) for one in found) else None
