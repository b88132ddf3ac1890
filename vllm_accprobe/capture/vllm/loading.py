"""The moment between loading and packing: weights as the checkpoint gave them.

The problem: after loading, vLLM's quantisation methods turn weights into the form that a machine's kernels want,
and may leave nothing of the original (the CPU's linear layers keep an empty tensor); such forms cannot be compared
between machines, and a wrong checkpoint would go unseen. The idea: while the runner's load_model runs, each layer's
method is wrapped so that the layer's parameters are looked at just before it packs them. Where a release has no
such place, nothing happens, and parameters are recorded after loading, as they then are. Not here: what is recorded
(params.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Layer = Callable[[torch.nn.Module, torch.nn.Module], None]
"""Called with the model and one of its modules, before that module's weights are packed. Must not raise."""

_METHOD = "process_weights_after_loading"


@contextmanager
def before_packing(look: Layer, look_at_draft: Layer) -> Iterator[None]:
    """While the context lasts, ``look`` sees each layer of the first model that is loaded, before it is packed, and
    ``look_at_draft`` those of any later one: a draft model is loaded after the one that is captured."""
    try:
        from vllm.model_executor.model_loader import base_loader

        original = getattr(base_loader, _METHOD)
    except (ImportError, AttributeError):
        yield
        return
    seen: list[torch.nn.Module] = []

    def process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        undo = wrap_packing(model, look_at_draft if seen else look)
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


def wrap_packing(model: torch.nn.Module, look: Layer) -> Callable[[], None]:
    """Wraps the packing of every quantisation method in ``model``, on its instance; returns what undoes it."""
    wrapped: list[Any] = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if not hasattr(method, _METHOD) or not hasattr(method, "__dict__"):
            continue
        pack = getattr(method, _METHOD)
        if look in getattr(pack, "__accprobe__", ()):  # one method of several layers
            continue

        def packed(layer: Any, *args: Any, _pack: Callable[..., Any] = pack, **kwargs: Any) -> Any:
            if isinstance(layer, torch.nn.Module):
                look(model, layer)
            return _pack(layer, *args, **kwargs)

        packed.__accprobe__ = (look, *getattr(pack, "__accprobe__", ()))  # type: ignore[attr-defined]
        method.__dict__[_METHOD] = packed
        wrapped.append(method)

    def undo() -> None:
        for method in wrapped:
            method.__dict__.pop(_METHOD, None)

    return undo
