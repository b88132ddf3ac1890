"""The models of the large laboratory: 16 layers of width 1,024, random weights; a capture has 0.6 GB, or 1 in float32.
One has the shapes of a model of 7 billion parameters in 4 layers: 1.6 GB of weights, or 3.2 in float32.

The problem: a pair of tiny models is replayed whole, so it says nothing about a replay that has to choose. The idea:
the shapes of scripts/tiny_model.py, widened: 16 heads of 64 channels, 4 of keys and values, with the same deviations of
weights, which keep what goes through a network at its size, whatever its width. Not here: what is planted
(large_cases.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_model
from tiny_model import TinyModel, Weight

LAYERS, WIDTH, HEAD, INNER, EXPERT_INNER, EXPERTS = 16, 1024, 64, 2816, 512, 8
SOFT_CAP, WINDOW = 4.0, 128
"""Gemma 2's. Chosen: scores of deviation 2 meet the cap; the longest prompt has two windows."""
_WIDE: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": WIDTH // HEAD,
    "num_key_value_heads": 4,
}  # fmt: skip
_GEMMA2: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "head_dim": HEAD, "query_pre_attn_scalar": HEAD, "attention_bias": False,
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "attn_logit_softcapping": SOFT_CAP, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip


REAL = "llama-7b"
_REAL: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 32,
}  # fmt: skip


def _gemma2(c: dict[str, Any]) -> Iterator[Weight]:
    """Norms in front of and behind attention and MLP; the head is the embedding."""
    h, heads, kv, d = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    yield "model.embed_tokens.weight", (c["vocab_size"], h), 4 / h**0.5
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{p}.{name}_layernorm.weight", (h,), 0.1
        for name, n, gain in (("q", heads, 2.0), ("k", kv, 1.0), ("v", kv, 1.0)):
            yield f"{p}.self_attn.{name}_proj.weight", (n * d, h), gain / h**0.5
        yield f"{p}.self_attn.o_proj.weight", (h, heads * d), 1 / (heads * d) ** 0.5
        inner = c["intermediate_size"]
        for name, out, in_ in (("gate", inner, h), ("up", inner, h), ("down", h, inner)):
            yield f"{p}.mlp.{name}_proj.weight", (out, in_), 1 / in_**0.5
    yield "model.norm.weight", (h,), 0.1


def _wide(name: str, **more: Any) -> TinyModel:
    narrow = tiny_model.MODELS[name]
    return TinyModel(narrow.config | _WIDE | more, narrow.weights, narrow.extra_files, narrow.mean_gain)


MODELS: dict[str, TinyModel] = {
    "llama": _wide("llama"),
    "qwen2": _wide("qwen2"),
    REAL: _wide("llama", **_REAL),
    "mixtral": _wide("mixtral", intermediate_size=EXPERT_INNER, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "gemma2": TinyModel(
        tiny_model.MODELS["llama"].config
        | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
        | _WIDE
        | _GEMMA2,
        _gemma2,
        mean_gain=0.0,  # vLLM adds 1 to them
    ),
}
"""``llama``, ``llama-7b``, ``qwen2`` (biases of q, k and v): dense. ``mixtral``: 8 experts. ``gemma2``: soft cap,
windows."""


def make(name: str, path: Path) -> Path:
    """Writes the checkpoint, unless it is there. Raises KeyError for an unknown name."""
    return tiny_model.write(MODELS[name], path)
