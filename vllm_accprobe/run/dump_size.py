"""How large a dump will be, from a model's config.json, before anything runs.

The problem: a capture that fills the disk stops, and its size is known only from what a model's modules pass to one
another, which no config.json says. The idea: a layer is two norms around attention (heads or a latent vector) and
feed-forward (dense or experts). Each part lists its tensors once, with all modules that have them as an output or an
input; a tensor is stored when one of these is chosen (measured: tiny models with vLLM 0.32; tests/e2e/test_dump_size.py
compares sums with dumps, byte for byte). Another decoder is counted by what its config.json has in common with these.

Not here: vision towers, parameters, the command (cli/inspect.py), which modules a word chooses (capture/taps/hooks.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.refusals import CommandError

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


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Chooses = Callable[[str, str], bool]
"""(path of a module, its class) → whether it is captured."""
MEASURED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""model_type of the architectures that were compared with captures of vLLM 0.32 (Mistral is Llama there, and
DeepSeek-V3 is V2)."""


def per_token(
    c: Mapping[str, Any], tp: int = 1, size: int = 2, chooses: Chooses | None = None, parts: Sequence[str] = ()
) -> tuple[int, int]:
    """(bytes that all ranks together store for a token, bytes more for a row of logits with what it is built from).
    size: of a number; chooses: None for every module; parts: as ProbeConfig's. Outside the layers lie what the last
    norm and its residual give, the id and the position. Raises KeyError for a config that lacks what a decoder
    needs."""
    outputs, inputs = (not parts or part in parts for part in ("output", "input"))

    def chosen(*paths: str) -> bool:
        return any(chooses is None or chooses(p, CLASSES.get(p.rpartition(".")[2], "")) for p in paths)

    kept = [t for t in decoder(c, tp) if (outputs and chosen(*t.makers)) or (inputs and chosen(*t.takers))]
    total = sum(t.numbers * (t.width or size) * (1 if t.cut else tp) for t in kept)
    if inputs:
        total += tp * 4 * chosen("<root>", "model", "model.embed_tokens")
        total += tp * 8 * chosen("<root>", "model", "model.layers.0", *_rotary(c))
    return total, size * (
        outputs * c["vocab_size"] * _heads_of_logits(chosen("lm_head"), chosen("logits_processor"), tp)
        + inputs * c["hidden_size"] * tp * chosen("lm_head", "logits_processor")
    )


def _heads_of_logits(head: bool, processor: bool, tp: int) -> int:
    """How often a row of logits is stored: on one rank as one tensor; else the head's pieces once, and what is gathered
    of them on every rank."""
    return int(head or processor) if tp == 1 else head + tp * processor


def _rotary(c: Mapping[str, Any]) -> Iterator[str]:
    for k in range(c["num_hidden_layers"]):
        yield from (f"model.layers.{k}", f"model.layers.{k}.self_attn", f"model.layers.{k}.self_attn.rotary_emb")


def read_config(path: Path) -> tuple[dict[str, Any], int]:
    """(a config.json's text model, bytes of a number). path: the file, or the model's folder. Raises CommandError."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        dtype = next((c[name] for c in (text, config) for name in ("torch_dtype", "dtype") if c.get(name)), "bfloat16")
        return text, BYTES[str(dtype)]
    except OSError as why:
        what = why.strerror or str(why)
    except KeyError as why:
        what = f"its dtype is {why}"
    except (ValueError, AttributeError, TypeError, RecursionError):
        what = "not the JSON object it should be"
    raise CommandError(f"{path}: {what}: the config.json of a model is needed")
