"""The calls by which vLLM changes weights, told to a WeightLife as events.

The problem: weights are changed by reload_weights, by a weight transfer's session of three calls, by a trainer that
calls load_weights on the live model as often as it has buckets, by sleep and wake, and by an adapter's activation; in
each release some of these are missing. The idea: whichever of the named methods a worker, a runner or a model has is
wrapped on the instance; calls of load_weights between two steps are one sync, which is looked at before the next step
begins. Not here: what is looked at (capture/weights/life.py), adapters (adapters.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_accprobe.capture.vllm.around import wrap
from vllm_accprobe.capture.vllm.loading import wrap_packing
from vllm_accprobe.capture.weights.life import WeightLife, tap_path
from vllm_accprobe.dump.weights.weight_life import LOAD, RELOAD, SYNC, WAKE


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
        self.life.finish(model, given=True)
        for owner, name, around in (
            (self._runner, "reload_weights", self._reload),
            (self._worker, "start_weight_update", self._start),
            (self._worker, "update_weights", self._update),
            (self._worker, "finish_weight_update", self._end),
            (self._worker, "sleep", self._sleep),
            (self._worker, "wake_up", self._wake),
            (model, "load_weights", self._load_weights),
        ):
            self._wrap(owner, name, around)

    def settle(self) -> None:
        """A step is about to begin, or the run to end: what was written since the last one is looked at."""
        if self._pending and self._model is not None:
            self._pending = False
            self.life.finish(self._model, given=False)

    def close(self) -> None:
        """Takes the wrappers off."""
        for owner, name, ours in self._wrapped:
            if owner.__dict__.get(name) is ours:
                with contextlib.suppress(AttributeError):
                    delattr(owner, name)
        self._wrapped.clear()
        if self._undo is not None:
            self._undo()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        wrapped = wrap(owner, name, around)
        if wrapped is not None:
            self._wrapped.append((owner, name, wrapped))

    # --- events ------------------------------------------------------------------------------------------------

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
        self._undo = wrap_packing(self._model, lambda _, layer: life.look(self._path(layer), layer))
        return True

    def _finish(self, *, given: bool) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
        assert self._model is not None
        self.life.finish(self._model, given=given)

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
            self._finish(given=True)

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
            self._finish(given=True)

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
            self._finish(given=False)
        return result
