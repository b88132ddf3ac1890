"""What went into a call and what came out, as named tensors; and what a module says of itself.

The problem: a forward takes and gives tuples, dicts and custom containers, positional here and named there. The
idea: inputs are named by the forward's signature, whatever way they were passed; containers are walked, and the
path is the role. Not here: what happens to the tensors (session.py).
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_PLAIN = frozenset((type(None), bool, int, float, str))
"""Types of arguments that hold no tensor."""
_OUTPUTS = tuple(f"output.{index}" for index in range(32))
_Tensor = torch.Tensor


def argument_names(forward: Callable[..., Any]) -> tuple[list[str], str]:
    """Positional parameter names of ``forward`` and the prefix for what ``*args`` swallows.

    vLLM's CustomOp has ``forward(*args, **kwargs)``; the names are those of the method that it dispatches to.
    """
    owner = getattr(forward, "__self__", None)
    for candidate in (forward, getattr(owner, "_forward_method", None), getattr(owner, "forward_native", None)):
        if candidate is not None:
            names, spread = _signature(candidate)
            if names:
                return names, spread
    return [], ""


def _signature(forward: Callable[..., Any]) -> tuple[list[str], str]:
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return [], ""
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    star = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return positional, f"{star}." if star and star != "args" else ""


_ATTRIBUTES = [
    "eps",
    "variance_epsilon",
    "hidden_size",
    "input_size",
    "output_size",
    "input_size_per_partition",
    "output_size_per_partition",
    "tp_size",
    "tp_rank",
    "num_heads",
    "num_kv_heads",
    "total_num_heads",
    "total_num_kv_heads",
    "head_size",
    "head_dim",
    "num_kv_head_replicas",
    "scale",
    "scaling",
    "sliding_window",
    "rotary_dim",
    "base",
    "is_neox_style",
    "max_position_embeddings",
    "num_embeddings",
    "embedding_dim",
    "org_vocab_size",
    "top_k",
    "global_num_experts",
    "local_num_experts",
    "reduce_results",
    "gather_output",
    "input_is_parallel",
    "skip_bias_add",
    "soft_cap",
    "in_features",
    "out_features",
    "normalized_shape",
    "logits_soft_cap",
    "cap_value",
    "approximate",
    "norm_before_gate",
    "num_groups",
    "alpha",
    "limit",
    "embed_scale",
    # experts and their routing, vLLM's and transformers'
    "renormalize",
    "scoring_func",
    "routed_scaling_factor",
    "use_grouped_topk",
    "num_expert_group",
    "topk_group",
    "num_group",
    "norm_topk_prob",
    "apply_router_weight_on_input",
    "activation",
    "swiglu_limit",
    "swiglu_alpha",
    "swiglu_beta",
    "mrope_section",
    "mrope_interleaved",
    "scaling_factor",
    # attention
    "head_size_v",
    "kv_cache_dtype",
    "_k_scale_float",
    "_v_scale_float",
    "attn_type",
    "has_sink",
    "use_alibi_sqrt",
    "is_causal",
    "softcap",
    "num_key_value_groups",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    # convolutions
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
    "enable_linear",
    # rotary embeddings, vLLM's and transformers'
    "low_freq_factor",
    "high_freq_factor",
    "orig_max_position",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "extrapolation_factor",
    "attn_factor",
    "truncate",
    "scaling_alpha",
    "max_trained_positions",
    "mixed_b",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "use_long_rope",
    "rope_type",
    "attention_scaling",
    "original_max_seq_len",
    "max_seq_len_cached",
]
_IMPL = ("scale", "alibi_slopes", "sinks", "logits_soft_cap", "sliding_window", "kv_cache_dtype")
"""Of the object that computes vLLM's attention: ``impl.scale`` and so on."""
_ROUTER = (
    "top_k", "renormalize", "scoring_func", "routed_scaling_factor",
    "use_grouped_topk", "num_expert_group", "topk_group",
)  # fmt: skip
"""Of the object that chooses experts, which is no module: ``router.scoring_func`` and so on."""
_LONGEST = 256
"""A list of more numbers is no description."""


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Plain numbers, strings and booleans that describe the operator, and lists of them.

    ``impl.<name>`` are those of an attention's kernel; ``router.<name>`` of what chooses experts, ``router.class`` its
    class; ``has_correction_bias``: whether scores are corrected before experts are chosen; ``custom_routing``: the name
    of a function that chooses them; ``rope_parameters`` of a rotary embedding of transformers is the configuration's,
    by name.
    """
    found: dict[str, Any] = {}
    for name in _ATTRIBUTES:
        value = _plain(module.__dict__.get(name))
        if value is not None:
            found[name] = value
    impl = module.__dict__.get("impl")
    if impl is not None:
        for name in _IMPL:
            value = _plain(getattr(impl, name, None))
            if value is not None:
                found[f"impl.{name}"] = value
    _add_routing(module, found)
    if "rope_type" in module.__dict__:
        config = module.__dict__.get("config")
        value = _plain(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
        if value is not None:
            found["rope_parameters"] = value
    return found


def _add_routing(module: torch.nn.Module, found: dict[str, Any]) -> None:
    """How a module's experts are chosen, as far as it is the module's own attributes that say it not yet."""
    router = module.__dict__.get("router")
    holders = [module] if router is None or isinstance(router, torch.nn.Module) else [module, router]
    if len(holders) > 1:
        found["router.class"] = type(router).__name__
        for name in _ROUTER:
            value = _plain(getattr(router, name, None))
            if value is not None:
                found[f"router.{name}"] = value
    for holder in holders:
        if hasattr(holder, "e_score_correction_bias"):
            found["has_correction_bias"] = holder.e_score_correction_bias is not None
        function = getattr(holder, "custom_routing_function", None)
        if function is not None:
            found["custom_routing"] = str(getattr(function, "__qualname__", type(function).__name__))


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` if it is plain, a small tensor's numbers, a list or dict of such; else None."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, _Tensor):
        small = value.device.type != "meta" and value.dim() <= 1 and value.numel() <= _LONGEST
        return value.detach().tolist() if small and value.layout is torch.strided else None
    if isinstance(value, (list, tuple)) and len(value) <= _LONGEST and depth < 3:
        items = [_plain(v, depth + 1) for v in value]
        return None if any(item is None for item in items) else items
    if isinstance(value, Mapping) and depth < 3:
        return {str(k): item for k, v in value.items() if (item := _plain(v, depth + 1)) is not None}
    return None


class Inputs:
    """Names what goes into calls of one callable, whose positional arguments are called ``arguments``; ``spread`` is
    the prefix of what ``*args`` swallows."""

    __slots__ = ("_named", "_positional", "_spread")

    def __init__(self, arguments: list[str], spread: str):
        self._positional = ["input." + name for name in arguments]
        self._spread = f"input.{spread}"
        self._named: dict[str, str] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """All tensors that go into a call, with their roles."""
        found: list[tuple[str, torch.Tensor]] = []
        for position, value in enumerate(args):
            if isinstance(value, _Tensor):
                found.append((self._role(position), value))
            elif type(value) not in _PLAIN:
                found += flatten(self._role(position), value, nested=True)
        for name, value in kwargs.items():
            if type(value) not in _PLAIN:
                role = self._named.get(name)
                if role is None:
                    role = self._named[name] = "input." + name
                if isinstance(value, _Tensor):
                    found.append((role, value))
                else:
                    found += flatten(role, value, nested=True)
        return found

    def _role(self, position: int) -> str:
        if position >= len(self._positional):
            return f"{self._spread}{position - len(self._positional)}"
        return self._positional[position]


def outputs(result: Any) -> list[tuple[str, torch.Tensor]]:
    """All tensors that come out of a call, with their roles."""
    if isinstance(result, _Tensor):
        return [("output.0", result)]
    if type(result) is not tuple or len(result) > len(_OUTPUTS):
        return [] if result is None else list(flatten("output", result))
    found: list[tuple[str, torch.Tensor]] = []
    for role, value in zip(_OUTPUTS, result, strict=False):
        if isinstance(value, _Tensor):
            found.append((role, value))
        elif isinstance(value, (list, tuple, Mapping)):
            found += flatten(role, value, depth=1)
    return found


def flatten(role: str, value: Any, nested: bool = False, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors inside ``value`` with their roles.

    ``output.0`` of a bare tensor or a tuple's first, ``output.key`` of a mapping, ``input.x.0`` inside an argument.
    """
    if isinstance(value, torch.Tensor):
        yield (role if nested or depth else role + ".0"), value
        return
    if depth > 4:
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, (torch.Tensor, list, tuple, Mapping)):
                yield from flatten(f"{role}.{index}", item, nested, depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(f"{role}.{key}", item, nested, depth + 1)
    elif isinstance(getattr(value, "tensors", None), Mapping):  # vLLM's IntermediateTensors
        yield from flatten(role, value.tensors, nested, depth + 1)
