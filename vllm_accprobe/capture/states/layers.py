"""The layers of an engine that have a cache, and the moments at which each writes and reads.

The problem: attention writes keys and values through its implementation's ``do_kv_cache_update`` (vLLM 0.12 and
later), or within its forward (before, and some backends still); recurrent layers read and write their states in the
middle of a module; layers of a draft model, of an encoder, or without a cache of their own stand beside them. The idea:
the engine's own table of such layers, by name, and around each of them the narrowest call that there is, on the
instance. What is not watched is counted with its reason. Not here: what is done at those moments (looks.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from vllm_accprobe.capture.core.put_over import put_over
from vllm_accprobe.capture.states.looks import Layer
from vllm_accprobe.capture.states.moved import MOST_TOKENS
from vllm_accprobe.capture.states.pages import Pages, UnknownLayout, tensors_of
from vllm_accprobe.capture.states.schedule import KV, STATE, CacheGroup

_UPDATE = "do_kv_cache_update"
_FORWARDS = ("forward", "forward_mqa", "forward_mha")
"""Where implementations read: attention's, and latent attention's two."""
_UNSEEN = ("cross", "encoder")
Moment = Callable[..., None]
"""Called with a layer; after a write also with what tries it again (looks.Again)."""


def group_of(spec: Any, mode: str) -> CacheGroup | None:
    """What vLLM's specification of a cache group means here; None for one whose rows are no tokens of the request.
    mode: vLLM's mamba_cache_mode."""
    inner = getattr(spec, "kv_cache_specs", None)  # layers of one kind with different sizes
    if isinstance(inner, Mapping) and inner:
        spec = next(iter(inner.values()))
    name = type(spec).__name__
    size = int(spec.block_size)
    if hasattr(spec, "shapes") and hasattr(spec, "dtypes"):  # MambaSpec, and what derives from it
        if mode == "all":
            return None
        extra = int(getattr(spec, "num_speculative_blocks", 0) or 0)
        return CacheGroup(STATE, size, extra=extra, aligned=mode == "align")
    if any(word in name.lower() for word in _UNSEEN):
        return None
    if name not in ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec",
                    "SinkFullAttentionSpec"):  # fmt: skip
        return None
    sliding = name == "SlidingWindowSpec"
    chunk = int(spec.attention_chunk_size or 0) if name == "ChunkedLocalAttentionSpec" else 0
    return CacheGroup(KV, size, window=int(spec.sliding_window or 0) if sliding else 0, chunk=chunk)


def names_of_states(n: int, cls: str) -> list[str]:
    """What the ``n`` states of a recurrent layer of class ``cls`` are called, in vLLM's order: convolutions first."""
    if n == 1:
        return ["conv state" if "conv" in cls.lower() else "state"]
    return ["conv state" if n == 2 else f"conv state {i}" for i in range(n - 1)] + ["SSM state"]


class CacheLayers:
    """The layers of ``runner``'s ``model``, by group; wrapped while the ledger lives.

    groups: in the engine's order, None for those that are not watched. skipped: layers by reason.
    """

    def __init__(self, runner: Any, model: torch.nn.Module):
        config = runner.kv_cache_config
        self.blocks = int(config.num_blocks)
        self.mode = str(getattr(runner.vllm_config.cache_config, "mamba_cache_mode", "none"))
        self.skipped: Counter[str] = Counter()
        self.groups: list[CacheGroup] = []
        self.layers: list[list[Layer]] = []
        self._undo: list[Callable[[], None]] = []
        self._modules: dict[str, Any] = {}
        self.memory: dict[int, int] = {}
        """By group of states, how many tokens a convolution's state holds; see moved.py."""
        table = runner.vllm_config.compilation_config.static_forward_context
        own = {id(module): path for path, module in reversed(list(model.named_modules()))}
        for g, group in enumerate(config.kv_cache_groups):
            made = group_of(group.kv_cache_spec, self.mode)
            found: list[Layer] = []
            for name in group.layer_names:
                module = table.get(name)
                path = own.get(id(module))
                if made is None:
                    self.skipped[f"a cache of {type(group.kv_cache_spec).__name__} is not known"] += 1
                elif path is None:
                    self.skipped["a layer of a draft model"] += 1
                else:
                    found += self._layers(path, g, len(found), module)
            size = max(int(getattr(group.kv_cache_spec, "block_size", 1)), 1)
            self.groups.append(made or CacheGroup(KV, size, watched=False))
            self.layers.append(found)

    def _layers(self, path: str, group: int, number: int, module: Any) -> list[Layer]:
        """The layer; each state of a recurrent one by itself: what writes one of them may leave out another."""
        caches = tensors_of(getattr(module, "kv_cache", None))
        if getattr(module, "kv_sharing_target_layer_name", None):
            self.skipped["a layer that reads another one's cache"] += 1
            return []
        if not caches:
            self.skipped["a layer without a cache"] += 1
            return []
        parts = [("", caches)]
        if not hasattr(module, "impl"):
            parts = list(zip(names_of_states(len(caches), type(module).__name__), ([c] for c in caches), strict=True))
        try:
            found = [Layer(path, group, number + i, Pages(p, self.blocks), n) for i, (n, p) in enumerate(parts)]
        except UnknownLayout as why:
            self.skipped[str(why)] += 1
            return []
        if not hasattr(module, "impl"):
            self.memory[group] = min(int(min(caches[0].shape[1:], default=1)), MOST_TOKENS)
        self._modules[path] = module
        return found

    @property
    def count(self) -> int:
        """How many layers are watched; the states of one are one."""
        return sum(len({layer.path for layer in of}) for of in self.layers)

    def name_in_engine(self, group: int, runner: Any) -> str:
        """Any layer's name of a group, by which the attention's metadata is found."""
        return str(runner.kv_cache_config.kv_cache_groups[group].layer_names[0])

    def watch(self, enters: Moment, wrote: Moment, leaves: Moment) -> None:
        """Calls these around each layer's use of its cache; they must not raise."""
        for layers in self.layers:
            for layer in list(layers):
                module = self._modules[layer.path]
                impl = getattr(module, "impl", None)
                if impl is None:
                    self._around_module(module, layer, enters, wrote, leaves)
                elif callable(getattr(impl, _UPDATE, None)) and not _within(module):
                    self._undo.append(put_over(impl, _UPDATE, _updating(getattr(impl, _UPDATE), layer, enters, wrote)))
                    for name in _FORWARDS:
                        if callable(reads := getattr(impl, name, None)):
                            self._undo.append(put_over(impl, name, _leaving(reads, layer, leaves)))
                elif callable(getattr(impl, "forward", None)):
                    self._undo.append(put_over(impl, "forward", _whole(impl.forward, layer, enters, wrote, leaves)))
                else:
                    self.skipped["attention without a forward of its own"] += 1
                    layers.remove(layer)

    def _around_module(
        self, module: torch.nn.Module, layer: Layer, enters: Moment, wrote: Moment, leaves: Moment
    ) -> None:
        def before(*_: Any) -> None:
            enters(layer)

        def after(*_: Any) -> None:
            wrote(layer)
            leaves(layer)

        handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        self._undo += [handle.remove for handle in handles]

    def close(self) -> None:
        """All of them are as they were."""
        while self._undo:
            self._undo.pop()()


def _within(module: Any) -> bool:
    """Whether the backend writes within its forward, whatever methods it has. Latent attention never does."""
    if hasattr(module.impl, "forward_mqa"):
        return False
    backend = getattr(module, "attn_backend", None)
    return bool(getattr(backend, "forward_includes_kv_cache_update", False))


def _updating(original: Any, layer: Layer, enters: Moment, wrote: Moment) -> Any:
    def do_kv_cache_update(*args: Any, **kwargs: Any) -> Any:
        enters(layer)
        result = original(*args, **kwargs)
        wrote(layer, lambda *of: written_again(original, args, kwargs, layer.pages.split, *of))
        return result

    return do_kv_cache_update


def written_again(
    original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], split: int, block: int, rows: np.ndarray,
    slots: np.ndarray,
) -> bool | None:  # fmt: skip
    """Whether ``block`` holds what writing ``rows`` leaves there: they are written into a block of other bytes by the
    same call, and what it has changed is held against the cache.

    args: (module, key, value, cache, slot mapping), as vLLM calls it; None is returned for others.
    """
    if kwargs or len(args) != 5 or not len(rows):
        return None
    module, key, value, cache, mapping = args
    tensors = (key, value, cache, mapping)
    if not all(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in tensors):
        return None
    mine = cache[block * split : (block + 1) * split]
    others = mine.clone(memory_format=torch.preserve_format)
    flat = others.view(torch.uint8)
    flat.bitwise_not_()
    before = flat.clone()
    at = torch.from_numpy(rows)
    original(module, key[at], value[at], others, torch.from_numpy(slots).to(mapping.dtype))
    changed = flat != before
    return bool(changed.any()) and bool((flat[changed] == mine.view(torch.uint8)[changed]).all())


def _leaving(original: Any, layer: Layer, leaves: Moment) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        leaves(layer)
        return result

    return forward


def _whole(original: Any, layer: Layer, enters: Moment, wrote: Moment, leaves: Moment) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        enters(layer)
        result = original(*args, **kwargs)
        wrote(layer)
        leaves(layer)
        return result

    return forward
