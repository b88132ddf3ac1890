"""The calls by which vLLM loads, packs, reloads and syncs weights, as events of a weights' history.

The problem: weights are changed by reload_weights, by a weight transfer's session of three calls, by a trainer that
calls load_weights on the live model, by sleep and wake, and by an adapter's activation; quantisation methods pack them
and may leave nothing of the original. In each release some of these calls are missing. The idea: whichever of the named
methods a worker, a runner or a model has is wrapped on the instance; calls of load_weights between two steps are one
sync. While a model is loaded each layer's method is wrapped, so that its parameters are seen just before it packs them.
When an adapter is activated, its own tensors and the slot that was filled are compared, layer by layer: zeros around a
tensor of lower rank add nothing to the sum without order.

Not here: what is recorded (taps/params.py), what is examined (capture/weights/history.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_accprobe.capture.core.attribute_override import wrap_method
from vllm_accprobe.capture.weights.history import WeightLife, tap_path
from vllm_accprobe.dump.journal import GIVEN, LOAD, RELOAD, SLOT, SYNC, WAKE

MOST = 256
"""Activations that are examined: a server with more adapters than slots exchanges some in every step."""
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
        wrap_method(worker, "_load_adapter", self._load)
        wrap_method(self._manager, "activate_adapter", self._activate)

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
                self._record_slot(number)
            else:
                self._skipped()
        return result

    def _record_slot(self, number: int) -> None:
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
            as_loaded = None if adapter is None else manager._get_lora_layer_weights(adapter, path)
            for name in ("lora_a", "lora_b"):
                stacked = getattr(module, f"{name}_stacked", None)
                if not isinstance(stacked, (tuple, list)):
                    continue
                whole = _whole(as_loaded, name, len(stacked), int(getattr(module, "tp_size", 1) or 1))
                for i, tensor in enumerate(stacked):
                    where = tap_path(path), type(module).__name__, f"{name}.{i}"
                    if whole is not None:
                        source = whole[i]
                        say(*where, GIVEN, torch.zeros(1, dtype=tensor.dtype) if source is None
                            else source.detach().to(tensor.dtype))  # fmt: skip
                    say(*where, SLOT, tensor[slot])


def _whole(as_loaded: Any, name: str, count: int, tp_size: int) -> list[torch.Tensor | None] | None:
    """The adapter's tensors for each of the layer's ``count`` slices, None in it for a slice that it leaves alone;
    None where they are cut over ranks, or not known."""
    if tp_size > 1:
        return None
    if not as_loaded:
        return [None] * count
    found = getattr(as_loaded, name, None)
    found = [found] if isinstance(found, torch.Tensor) else found
    if not isinstance(found, list) or len(found) != count:
        return None
    return found if all(one is None or isinstance(one, torch.Tensor) for one in found) else None


Layer = Callable[[torch.nn.Module, torch.nn.Module], None]
"""Called with the model and one of its modules, before that module's weights are packed. Must not raise."""

_METHOD = "process_weights_after_loading"


@contextmanager
def before_packing(examine: Layer, examine_draft: Layer) -> Iterator[None]:
    """While the context lasts, ``examine`` sees each layer of the first model that is loaded, before it is packed, and
    ``examine_draft`` those of any later one: a draft model is loaded after the one that is captured."""
    try:
        from vllm.model_executor.model_loader import base_loader

        original = getattr(base_loader, _METHOD)
    except (ImportError, AttributeError):
        yield
        return
    seen: list[torch.nn.Module] = []

    def process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        undo = wrap_packing(model, examine_draft if seen else examine)
        seen.append(model)
        try:
            return original(model, *args, **kwargs)
        finally:
            undo()

    setattr(base_loader, _METHOD, process)
    try:
        yield
    finally:
        if getattr(base_loader, _METHOD) is process:
            setattr(base_loader, _METHOD, original)


def wrap_packing(model: torch.nn.Module, examine: Layer) -> Callable[[], None]:
    """Wraps the packing of every quantisation method in ``model``, on its instance; returns what undoes it."""
    wrapped: list[Any] = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if not hasattr(method, _METHOD) or not hasattr(method, "__dict__"):
            continue
        pack = getattr(method, _METHOD)
        if examine in getattr(pack, "__accprobe__", ()):  # one method of several layers
            continue

        def packed(layer: Any, *args: Any, _pack: Callable[..., Any] = pack, **kwargs: Any) -> Any:
            if isinstance(layer, torch.nn.Module):
                examine(model, layer)
            return _pack(layer, *args, **kwargs)

        packed.__accprobe__ = (examine, *getattr(pack, "__accprobe__", ()))  # type: ignore[attr-defined]
        method.__dict__[_METHOD] = packed
        wrapped.append(method)

    def undo() -> None:
        for method in wrapped:
            method.__dict__.pop(_METHOD, None)

    return undo


class WeightCalls:
    """Watches one worker's model. ``loading`` is entered before there is one; ``watch`` is called when it is loaded."""

    def __init__(self, life: WeightLife, worker: Any, runner: Any):
        self.life = life
        self._worker, self._runner = worker, runner
        self._model: torch.nn.Module | None = None
        self._pending = self._slept = False
        self._undo: Callable[[], None] | None = None
        self._wrapped: list[tuple[Any, str, Any]] = []

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While the runner loads its model."""
        if self.life.off or self._model is not None:
            yield
            return
        self.life.begin(LOAD)
        with self.life.watch:
            yield

    def watch(self, model: torch.nn.Module) -> None:
        """The model is loaded and packed."""
        if self._model is not None:
            return
        self._model = model
        self.life.finish(model, as_loaded=True)
        for owner, name, replacement in (
            (self._runner, "reload_weights", self._reload),
            (self._worker, "start_weight_update", self._start),
            (self._worker, "update_weights", self._update),
            (self._worker, "finish_weight_update", self._end),
            (self._worker, "sleep", self._sleep),
            (self._worker, "wake_up", self._wake),
            (model, "load_weights", self._load_weights),
        ):
            if (ours := wrap_method(owner, name, replacement)) is not None:
                self._wrapped.append((owner, name, ours))

    def settle(self) -> None:
        """A step is about to begin, or the run to end: what was written since the last one is examined."""
        if self._pending and self._model is not None:
            self._pending = False
            self.life.finish(self._model, as_loaded=False)

    def close(self) -> None:
        """Takes the wrappers off."""
        for owner, name, ours in self._wrapped:
            if owner.__dict__.get(name) is ours:
                with contextlib.suppress(AttributeError):
                    delattr(owner, name)
        self._wrapped.clear()
        if self._undo is not None:
            self._undo()

    def _begin(self, kind: str, **about: Any) -> bool:
        """Whether an event was begun: within another one, or after a failure, none is."""
        life = self.life
        if life.off or self._model is None or (life.open is not None and not self._pending):
            return False
        self.settle()
        if self._slept:
            self._slept = False
            about["detail"] = "after sleep that discards weights"
        life.begin(kind, **about)
        self._undo = wrap_packing(self._model, lambda _, layer: life.examine(self._path(layer), layer))
        return True

    def _finish(self, *, as_loaded: bool) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
        assert self._model is not None
        self.life.finish(self._model, as_loaded=as_loaded)

    def _path(self, layer: torch.nn.Module) -> str:
        assert self._model is not None
        return next((tap_path(path) for path, module in self._model.named_modules() if module is layer), "?")

    def _reload(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._begin(RELOAD):
            return original(*args, **kwargs)
        try:
            with self.life.watch:
                return original(*args, **kwargs)
        finally:
            self._finish(as_loaded=True)

    def _start(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._begin(SYNC):
            return original(*args, **kwargs)
        with self.life.watch:
            return original(*args, **kwargs)

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.life.off or self.life.open is None:
            return original(*args, **kwargs)
        with self.life.watch:
            return original(*args, **kwargs)

    def _end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.life.open is None:
            return original(*args, **kwargs)
        try:
            return self._update(original, *args, **kwargs)
        finally:
            self._finish(as_loaded=True)

    def _load_weights(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.life.open is None and self._begin(SYNC):
            self._pending = True
        if not self._pending:
            return original(*args, **kwargs)
        with self.life.watch:
            return original(*args, **kwargs)

    def _sleep(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.settle()
        level = args[0] if args else kwargs.get("level", 1)
        self._slept = self._slept or level != 1
        return original(*args, **kwargs)

    def _wake(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tags = args[0] if args else kwargs.get("tags")
        result = original(*args, **kwargs)
        # After a sleep that discards the weights they are nothing until somebody writes them.
        if (tags is None or "weights" in tags) and not self._slept and self._begin(WAKE):
            self._finish(as_loaded=False)
        return result
