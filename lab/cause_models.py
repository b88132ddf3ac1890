"""More architectures for the laboratory of causes, as tiny random models: scripts/tiny_model.py has the others.

The problem: a cause that is a setting shows only where an architecture has that setting: a soft cap, a window, sinks,
a correction bias, a multiplier, a LayerNorm, a partial rotary embedding. The idea: one small model of each, with the
weights' deviations of tiny_model.py, so that all of them are alive. Not here: what is planted (cause_cases.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_model
from tiny_model import TinyModel, Weight

from lab.large_models import MODELS as WIDE

_LLAMA = tiny_model.MODELS["llama"]
_DENSE: dict[str, Any] = {
    k: v for k, v in _LLAMA.config.items() if k not in ("architectures", "model_type", "num_hidden_layers")
} | {"num_hidden_layers": 3}


def _config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return _DENSE | {"architectures": [architecture], "model_type": model_type} | more


def _linear(name: str, out: int, in_: int, gain: float = 1.0) -> Weight:
    return f"{name}.weight", (out, in_), gain / in_**0.5


def _norm(name: str, size: int, bias: bool = False) -> Iterator[Weight]:
    yield f"{name}.weight", (size,), 0.1
    if bias:
        yield f"{name}.bias", (size,), 0.3


def _attention(p: str, c: dict[str, Any], bias: float = 0.0, o_bias: float = 0.0) -> Iterator[Weight]:
    h, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim", h // heads)
    for name, n in (("q", heads), ("k", kv), ("v", kv)):
        yield _linear(f"{p}.{name}_proj", n * d, h)
        if bias:
            yield f"{p}.{name}_proj.bias", (n * d,), bias
    yield _linear(f"{p}.o_proj", h, heads * d)
    if o_bias:
        yield f"{p}.o_proj.bias", (h,), o_bias


def _mlp(p: str, h: int, inner: int) -> Iterator[Weight]:
    yield _linear(f"{p}.gate_proj", inner, h)
    yield _linear(f"{p}.up_proj", inner, h)
    yield _linear(f"{p}.down_proj", h, inner, 1.5)


def _layers(c: dict[str, Any]) -> list[str]:
    return [f"model.layers.{i}" for i in range(c["num_hidden_layers"])]


def _phi3(c: dict[str, Any]) -> Iterator[Weight]:
    """The checkpoint has q, k and v, and gate and up, in one tensor each."""
    h, inner = c["hidden_size"], c["intermediate_size"]
    d = h // c["num_attention_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], h), 1.0
    for p in _layers(c):
        yield from _norm(f"{p}.input_layernorm", h)
        yield _linear(f"{p}.self_attn.qkv_proj", (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * d, h)
        yield _linear(f"{p}.self_attn.o_proj", h, h)
        yield from _norm(f"{p}.post_attention_layernorm", h)
        yield _linear(f"{p}.mlp.gate_up_proj", 2 * inner, h)
        yield _linear(f"{p}.mlp.down_proj", h, inner, 1.5)
    yield from _norm("model.norm", h)
    yield _linear("lm_head", c["vocab_size"], h, 4.0)


def _cohere(c: dict[str, Any]) -> Iterator[Weight]:
    """One norm before attention and MLP, which are added up; the head is the embedding."""
    h = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], h), 4 / h**0.5
    for p in _layers(c):
        yield from _norm(f"{p}.input_layernorm", h)
        yield from _attention(f"{p}.self_attn", c)
        yield from _mlp(f"{p}.mlp", h, c["intermediate_size"])
    yield from _norm("model.norm", h)


def _stablelm(c: dict[str, Any]) -> Iterator[Weight]:
    h = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], h), 1.0
    for p in _layers(c):
        yield from _norm(f"{p}.input_layernorm", h, bias=True)
        yield from _attention(f"{p}.self_attn", c, bias=0.3)
        yield from _norm(f"{p}.post_attention_layernorm", h, bias=True)
        yield from _mlp(f"{p}.mlp", h, c["intermediate_size"])
    yield from _norm("model.norm", h, bias=True)
    yield _linear("lm_head", c["vocab_size"], h, 4.0)


def _glm4_moe(c: dict[str, Any]) -> Iterator[Weight]:
    """A dense layer, then experts that are chosen with a correction of their scores, and a shared one."""
    h = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], h), 1.0
    for i, p in enumerate(_layers(c)):
        yield from _norm(f"{p}.input_layernorm", h)
        yield from _attention(f"{p}.self_attn", c, bias=0.3)
        for name in ("q", "k"):
            yield from _norm(f"{p}.self_attn.{name}_norm", c["head_dim"])
        yield from _norm(f"{p}.post_attention_layernorm", h)
        if i < c["first_k_dense_replace"]:
            yield from _mlp(f"{p}.mlp", h, c["intermediate_size"])
            continue
        yield _linear(f"{p}.mlp.gate", c["n_routed_experts"], h, 2.0)
        yield f"{p}.mlp.gate.e_score_correction_bias", (c["n_routed_experts"],), 0.2
        for e in range(c["n_routed_experts"]):
            yield from _mlp(f"{p}.mlp.experts.{e}", h, c["moe_intermediate_size"])
        yield from _mlp(f"{p}.mlp.shared_experts", h, c["moe_intermediate_size"] * c["n_shared_experts"])
    yield from _norm("model.norm", h)
    yield _linear("lm_head", c["vocab_size"], h, 4.0)


def _gpt_oss(c: dict[str, Any]) -> Iterator[Weight]:
    """Sinks of each head, windows in every other layer, biases everywhere; experts in tensors of three dimensions."""
    h, inner, n = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    yield "model.embed_tokens.weight", (c["vocab_size"], h), 1.0
    for p in _layers(c):
        yield from _norm(f"{p}.input_layernorm", h)
        yield from _attention(f"{p}.self_attn", c, bias=0.3, o_bias=0.1)
        yield f"{p}.self_attn.sinks", (c["num_attention_heads"],), 1.0
        yield from _norm(f"{p}.post_attention_layernorm", h)
        yield _linear(f"{p}.mlp.router", n, h, 2.0)
        yield f"{p}.mlp.router.bias", (n,), 0.1
        yield f"{p}.mlp.experts.gate_up_proj", (n, h, 2 * inner), 1 / h**0.5
        yield f"{p}.mlp.experts.gate_up_proj_bias", (n, 2 * inner), 0.1
        yield f"{p}.mlp.experts.down_proj", (n, inner, h), 1.5 / inner**0.5
        yield f"{p}.mlp.experts.down_proj_bias", (n, h), 0.1
    yield from _norm("model.norm", h)
    yield _linear("lm_head", c["vocab_size"], h, 4.0)


_NARROW = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_GLM4_MOE = {
    "head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
}  # fmt: skip
_GPT_OSS = {
    "num_hidden_layers": 2, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64,
    "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
    "swiglu_limit": 7.0, "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 2.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip

MODELS: dict[str, TinyModel] = {
    "gemma2": TinyModel(WIDE["gemma2"].config | _NARROW, WIDE["gemma2"].weights, mean_gain=0.0),
    "mistral": TinyModel(_config("MistralForCausalLM", "mistral", sliding_window=40, head_dim=32), _LLAMA.weights),
    "llama3": TinyModel(_config("LlamaForCausalLM", "llama", rope_scaling=_LLAMA3), _LLAMA.weights),
    "granite": TinyModel(_config("GraniteForCausalLM", "granite", **_GRANITE), _LLAMA.weights),
    "phi3": TinyModel(_config("Phi3ForCausalLM", "phi3", partial_rotary_factor=0.5), _phi3),
    "cohere": TinyModel(
        _config("CohereForCausalLM", "cohere", logit_scale=0.25, layer_norm_eps=1e-5, rms_norm_eps=None,
                use_qk_norm=False, tie_word_embeddings=True), _cohere,
    ),
    "stablelm": TinyModel(
        _config("StableLmForCausalLM", "stablelm", partial_rotary_factor=0.5, use_qkv_bias=True, layer_norm_eps=1e-5),
        _stablelm,
    ),
    "glm4-moe": TinyModel(_config("Glm4MoeForCausalLM", "glm4_moe", **_GLM4_MOE), _glm4_moe),
    "gpt-oss": TinyModel(_config("GptOssForCausalLM", "gpt_oss", **_GPT_OSS), _gpt_oss),
}  # fmt: skip
"""``gemma2``: soft caps, windows. ``mistral``: a window. ``llama3``: scaled frequencies. ``granite``: multipliers.
``phi3``, ``stablelm``: partial rotary embeddings, the latter with LayerNorms and biases. ``cohere``: neighbouring
channels turned, a scale of the logits. ``glm4-moe``: a router that is corrected. ``gpt-oss``: sinks."""


def make(name: str, path: Path) -> Path:
    """Writes the checkpoint, unless it is there. Raises KeyError for a name that is here and in tiny_model.py not."""
    return tiny_model.write(MODELS.get(name) or tiny_model.MODELS[name], path)
