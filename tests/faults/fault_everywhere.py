"""Ten faults that are in every layer, as the wrong constants of a new port are.

The problem: a fault that is everywhere looks like a habit of the machine. The idea: each of the ten is planted in all
layers at once; the first layer's is the one to be named.
Not here: faults in one layer (fault_generated.py).
"""

from __future__ import annotations

from typing import Any

from fault_cases import Case
from fault_places import Fault

_L = "model.layers"


def _in_all(path: str, layers: int, kind: str, factor: float, **more: Any) -> list[Fault]:
    return [{"kind": kind, "module": path.format(i), "factor": factor, **more} for i in range(layers)]


def _everywhere(name: str, model: str, faults: list[Fault], golden: str, culprits: tuple[str, ...] = ()) -> Case:
    return Case(f"everywhere-{name}", model, faults, golden, culprits=culprits, group="everywhere")


_MIX0 = f"{_L}.0.block_sparse_moe.experts"
EVERYWHERE = [
    _everywhere("scale", "qwen2", _in_all(f"{_L}.{{}}.mlp.down_proj", 4, "scale", 1.03), "float32"),
    # One rotary embedding is shared by all layers.
    _everywhere("rope-table", "llama", _in_all(f"{_L}.{{}}.self_attn.rotary_emb", 1, "angle", 1.01), "serial"),
    _everywhere(
        "norm-eps",
        "qwen2",
        _in_all(f"{_L}.{{}}.input_layernorm", 4, "eps", 0.05)
        + _in_all(f"{_L}.{{}}.post_attention_layernorm", 4, "eps", 0.05),
        "float32",
    ),
    _everywhere("softmax-scale", "qwen2-moe", _in_all(f"{_L}.{{}}.self_attn.attn", 3, "attn", 1.05), "float32"),
    _everywhere(
        "window",
        "llama",
        _in_all(f"{_L}.{{}}.self_attn.attn", 3, "setting", 100, param="impl.sliding_window"),
        "serial",
    ),
    _everywhere("activation", "trained-qwen2", _in_all(f"{_L}.{{}}.mlp.act_fn", 4, "act", 1.05), "float32"),
    _everywhere("bias-forgotten", "qwen2", _in_all(f"{_L}.{{}}.self_attn.qkv_proj", 4, "bias", 1.0), "serial"),
    _everywhere(
        "soft-cap",
        "trained-llama",
        _in_all(f"{_L}.{{}}.self_attn.attn", 4, "setting", 10.0, param="impl.logits_soft_cap"),
        "float32",
    ),
    _everywhere(
        "column",
        "llama",
        _in_all(f"{_L}.{{}}.mlp.gate_up_proj", 3, "scale", 1.2, features=[300]),
        "serial",
    ),
    _everywhere(
        "expert-scale",
        "mixtral",
        _in_all(
            f"{_L}.{{}}.block_sparse_moe.experts.routed_experts.quant_method",
            2,
            "expert",
            1.05,
            expert=1,
        ),
        "float32",
        (f"{_MIX0}.routed_experts.quant_method", _MIX0),
    ),
]
"""Ten: a scale, table, eps, softmax scale, mask, activation, bias forgotten, wrong constant, one column, one expert."""
