"""The tensors that a decoder's layers have for each token, and which modules have them.

The problem: the size of a capture is known only from what the modules of a model pass to one another, which no
config.json says. The idea: a layer is two norms around two parts, attention and feed-forward, and each part is one of
two kinds: heads (with norms of their own or without) or a latent vector; dense or experts. Each lists its tensors once,
with all modules that have them as an output or an input, as captures of tiny models with vLLM 0.32 have them.
Not here: bytes, and which modules are chosen (dump_size.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CLASSES = {
    "qkv_proj": "QKVParallelLinear", "o_proj": "RowParallelLinear", "down_proj": "RowParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear", "act_fn": "SiluAndMul", "attn": "Attention", "norm": "RMSNorm",
    "input_layernorm": "RMSNorm", "post_attention_layernorm": "RMSNorm", "rotary_emb": "RotaryEmbedding",
    "lm_head": "ParallelLMHead", "q_norm": "RMSNorm", "k_norm": "RMSNorm", "q_a_layernorm": "RMSNorm",
    "kv_a_layernorm": "RMSNorm", "q_proj": "ColumnParallelLinear", "q_b_proj": "ColumnParallelLinear",
    "kv_b_proj": "ColumnParallelLinear", "kv_a_proj_with_mqa": "ReplicatedLinear", "gate": "GateLinear",
    "fused_qkv_a_proj": "MergedColumnParallelLinear", "expert_gate": "ReplicatedLinear", "experts": "MoERunner",
    "_shared_experts": "SharedExperts", "quant_method": "UnquantizedFusedMoEMethod",
}  # fmt: skip
"""Last name of a module → vLLM's class, so that presets and class names choose as in a capture."""


@dataclass(frozen=True)
class StoredTensor:
    """numbers: of a token; makers, takers: the modules that have it as an output and as an input; cut: divided over the
    ranks; width: bytes of a number where they are not the model's."""

    numbers: int
    makers: tuple[str, ...]
    takers: tuple[str, ...] = ()
    cut: bool = False
    width: int = 0


@dataclass(frozen=True)
class LayerPart:
    """takers: the modules that get what the norm before it gives; inner: its tensors; makers: the modules whose output
    is the part's."""

    takers: tuple[str, ...]
    inner: tuple[StoredTensor, ...]
    makers: tuple[str, ...]


def decoder(c: Mapping[str, Any], tp: int = 1) -> Iterator[StoredTensor]:
    """Of each layer two norms with their residuals (4 hidden sizes), two parts and what they give; and the last norm's.
    Raises KeyError where ``c`` lacks a field."""
    h, layers = c["hidden_size"], c["num_hidden_layers"]
    for k in range(layers):
        here, after = f"model.layers.{k}", f"model.layers.{k + 1}"
        norm, post = f"{here}.input_layernorm", f"{here}.post_attention_layernorm"
        heirs = (after, f"{after}.input_layernorm") if k + 1 < layers else ("model.norm",)
        attention = latent(c, f"{here}.self_attn") if c.get("kv_lora_rank") else heads(c, f"{here}.self_attn", tp)
        forward = experts(c, here, tp) if _has_experts(c, k) else dense(c["intermediate_size"], f"{here}.mlp")
        yield StoredTensor(h, (norm,), attention.takers)
        if k:
            yield StoredTensor(h, (norm,), (post,))
        else:  # nothing was added yet: it is the embedding itself
            yield StoredTensor(h, (norm, "model.embed_tokens"), (norm, here, post))
        yield from attention.inner
        yield StoredTensor(h, attention.makers, (post,))
        yield StoredTensor(h, (post,), forward.takers)
        yield StoredTensor(h, (post, here), heirs)
        yield from forward.inner
        yield StoredTensor(h, (*forward.makers, here), heirs)
    yield StoredTensor(h, ("model.norm", "model", "<root>"), ("logits_processor",))
    yield StoredTensor(h, ("model.norm",))


def heads(c: Mapping[str, Any], at: str, tp: int) -> LayerPart:
    """qkv; with norms of each head q and k before and behind them; rotary in and out, value, attention. Key and value
    heads that are fewer than the ranks are there several times."""
    n = c["num_attention_heads"]
    dim = c.get("head_dim") or c["hidden_size"] // n
    q, kv = n * dim, max(c.get("num_key_value_heads") or n, tp) * dim
    qkv, rotary, inner, o = (f"{at}.{name}" for name in ("qkv_proj", "rotary_emb", "attn", "o_proj"))
    found = [StoredTensor(q + 2 * kv, (qkv,), cut=True)]
    if "qwen3" in str(c.get("model_type")) or c.get("use_qk_norm"):
        for numbers, name in ((q, f"{at}.q_norm"), (kv, f"{at}.k_norm")):
            found.append(StoredTensor(numbers, (), (name,), cut=True))
            found.append(StoredTensor(numbers, (name,), (rotary,), cut=True))
    else:
        found.append(StoredTensor(q + kv, (), (rotary,), cut=True))
    found += [
        StoredTensor(q + kv, (rotary,), (inner,), cut=True),
        StoredTensor(kv, (), (inner,), cut=True),
        StoredTensor(q, (inner,), (o,), cut=True),
    ]
    return LayerPart((at, qkv), tuple(found), (o, at))


def latent(c: Mapping[str, Any], at: str) -> LayerPart:
    """DeepSeek's: the latent vector with the rotary part, cut out and normed; with a low rank of q that, too, and
    both from one product; q; rotary in and out; q and k as attention gets them; kv (in prefill); attention."""
    n, r, low = c["num_attention_heads"], c["kv_lora_rank"], c.get("q_lora_rank") or 0
    nope, p, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    mla, inner = f"{at}.mla_attn", f"{at}.mla_attn.mla_attn"
    first = f"{mla}.fused_qkv_a_proj" if low else f"{mla}.kv_a_proj_with_mqa"
    q = f"{mla}.q_b_proj" if low else f"{mla}.q_proj"
    norm, rotary, kv_b, o = (
        f"{mla}.kv_a_layernorm", f"{mla}.rotary_emb", f"{inner}.kv_b_proj", f"{mla}.o_proj"
    )  # fmt: skip
    found = [
        StoredTensor(low + r + p, (first,)),
        StoredTensor(r, (), (norm,)),
        StoredTensor(r, (norm,), (inner, kv_b)),
        StoredTensor(n * (nope + p), (q,), cut=True),
        StoredTensor(n * p, (), (rotary,), cut=True),
        StoredTensor(p, (), (rotary,)),
        StoredTensor(n * p, (rotary,), cut=True),
        StoredTensor(p, (rotary,), (inner,)),
        StoredTensor(n * (nope + p), (), (inner,), cut=True),
        StoredTensor(n * (nope + v), (kv_b,), cut=True),
        StoredTensor(n * v, (inner,), (o,), cut=True),
    ]
    if low:
        found.append(StoredTensor(low, (), (f"{mla}.q_a_layernorm",)))
        found.append(StoredTensor(low, (f"{mla}.q_a_layernorm",), (q,)))
    return LayerPart((at, mla, first, *(() if low else (q,))), tuple(found), (o, mla, at))


def dense(width: int, at: str) -> LayerPart:
    """gate and up as one (2 widths), the activation (1)."""
    up, act, down = (f"{at}.{name}" for name in ("gate_up_proj", "act_fn", "down_proj"))
    inner = (StoredTensor(2 * width, (up,), (act,), cut=True), StoredTensor(width, (act,), (down,), cut=True))
    return LayerPart((at, up), inner, (down, at))


def experts(c: Mapping[str, Any], layer: str, tp: int) -> LayerPart:
    """The router's logits; the choice as float32 and int32; the sum of the routed ones, which is the block's result
    where nothing is added to it; shared ones, and their gate, where there are any."""
    h = c["hidden_size"]
    at = f"{layer}.block_sparse_moe" if c.get("model_type") == "mixtral" else f"{layer}.mlp"
    all_of_them, method = f"{at}.experts", f"{at}.experts.routed_experts.quant_method"
    own_gate = bool(c.get("n_routed_experts")) or c.get("model_type") == "qwen3_moe"  # their router stands inside
    gate = f"{all_of_them}.gate" if own_gate else f"{at}.gate"
    takers: tuple[str, ...] = (at, gate, all_of_them, method)
    found = [
        StoredTensor(_experts(c), (gate,), () if own_gate else (all_of_them,)),
        StoredTensor(c["num_experts_per_tok"], (), (method,), width=4),
        StoredTensor(c["num_experts_per_tok"], (), (method,), width=4),
    ]
    gated = c.get("shared_expert_intermediate_size") or 0
    shared = gated or (c.get("n_shared_experts") or 0) * c.get("moe_intermediate_size", 0)
    if not shared and tp == 1:
        return LayerPart(takers, tuple(found), (method, all_of_them, at))
    found.append(StoredTensor(h, (method,)))
    if shared:
        both = f"{all_of_them}._shared_experts"
        part = dense(shared, f"{both}._layer")
        takers += (both, *part.takers)
        found += part.inner
        if gated:
            takers += (f"{both}._layer.expert_gate",)
            found.append(StoredTensor(1, (f"{both}._layer.expert_gate",)))
            found.append(StoredTensor(h, (f"{both}._layer.down_proj",)))
            found.append(StoredTensor(h, (f"{both}._layer",)))
        else:
            found.append(StoredTensor(h, part.makers))
    return LayerPart(takers, tuple(found), (all_of_them, at))


def _experts(c: Mapping[str, Any]) -> int:
    """How many routed ones; 0 for a dense model."""
    return next((c[n] for n in ("n_routed_experts", "num_experts", "num_local_experts") if c.get(n)), 0)


def _has_experts(c: Mapping[str, Any], layer: int) -> bool:
    """Whether this layer's feed-forward is a mixture: DeepSeek's first ones are not, Qwen's may be every other."""
    if not _experts(c) or layer < (c.get("first_k_dense_replace") or 0) or layer in (c.get("mlp_only_layers") or ()):
        return False
    every = c.get("decoder_sparse_step") or 1
    return (layer + 1) % every == 0 and layer % (c.get("moe_layer_freq") or 1) == 0
