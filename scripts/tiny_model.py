"""Tiny language models with random weights, as Hugging Face directories that vLLM loads with nothing to download.

The problem: the demo, the tests and the benchmarks need real models of several architectures on machines without a
network. The idea: every architecture is a config and a list of (tensor name, shape, standard deviation), filled from
one seeded generator, with a tokenizer beside it. The deviations are chosen so that the network is alive: a linear
layer keeps the size of what goes through it (1/sqrt(fan in)), norms have gains about 1 that differ from channel to
channel, attention scores differ, and the output head gives logits with clear winners, so that greedy text varies with
the prompt and rounding alone seldom flips a token.

Used as a module (``make("qwen2", path)``) and as a script (``python scripts/tiny_model.py qwen2 DIR``).
Not here: the tokenizer and the image processor (tiny_tokenizer.py); how the models are served.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 512
Weight = tuple[str, tuple[int, ...], float]
"""A parameter's name, its shape, and its standard deviation (around 1 for the gain of a norm, around 0 otherwise)."""


@dataclass(frozen=True)
class TinyModel:
    """One architecture. ``weights`` lists every tensor of the checkpoint for a given config, in a fixed order."""

    config: dict[str, Any]
    weights: Callable[[dict[str, Any]], Iterator[Weight]]
    extra_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    mean_gain: float = 1.0
    """Of a norm's weights: 0 where the model adds 1 to them itself."""


def _linear(name: str, out: int, in_: int, gain: float = 1.0) -> Weight:
    return f"{name}.weight", (out, in_), gain / in_**0.5


def _norm(name: str, size: int) -> Weight:
    return f"{name}.weight", (size,), 0.1


def _frame(c: dict[str, Any], layer: Callable[[str, int], Iterator[Weight]], prefix: str = "model") -> Iterator[Weight]:
    """Embedding, layers, final norm and an untied head. The head's gain of 4 makes logits of about that deviation."""
    h = c["hidden_size"]
    yield f"{prefix}.embed_tokens.weight", (c["vocab_size"], h), 1.0
    for i in range(c["num_hidden_layers"]):
        yield _norm(f"{prefix}.layers.{i}.input_layernorm", h)
        yield from layer(f"{prefix}.layers.{i}", i)
        yield _norm(f"{prefix}.layers.{i}.post_attention_layernorm", h)
    yield _norm(f"{prefix}.norm", h)
    yield _linear("lm_head", c["vocab_size"], h, gain=4.0)


def _attention(p: str, c: dict[str, Any], bias: bool) -> Iterator[Weight]:
    h, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    d = h // heads
    for name, n in (("q", heads), ("k", kv), ("v", kv)):
        yield _linear(f"{p}.self_attn.{name}_proj", n * d, h)
        if bias:
            yield f"{p}.self_attn.{name}_proj.bias", (n * d,), 0.1
    yield _linear(f"{p}.self_attn.o_proj", h, heads * d)


def _mlp(p: str, h: int, inner: int) -> Iterator[Weight]:
    yield _linear(f"{p}.gate_proj", inner, h)
    yield _linear(f"{p}.up_proj", inner, h)
    yield _linear(f"{p}.down_proj", h, inner, gain=1.5)  # silu(gate) * up is about 0.6 of its inputs' size


def _dense(bias: bool, prefix: str = "model") -> Callable[[dict[str, Any]], Iterator[Weight]]:
    def weights(c: dict[str, Any]) -> Iterator[Weight]:
        def layer(p: str, _: int) -> Iterator[Weight]:
            yield from _attention(p, c, bias)
            yield from _mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])

        return _frame(c, layer, prefix)

    return weights


def _qwen2_moe(c: dict[str, Any]) -> Iterator[Weight]:
    def layer(p: str, _: int) -> Iterator[Weight]:
        h = c["hidden_size"]
        yield from _attention(p, c, bias=True)
        yield _linear(f"{p}.mlp.gate", c["num_experts"], h, gain=2.0)
        for e in range(c["num_experts"]):
            yield from _mlp(f"{p}.mlp.experts.{e}", h, c["moe_intermediate_size"])
        yield from _mlp(f"{p}.mlp.shared_expert", h, c["shared_expert_intermediate_size"])
        yield _linear(f"{p}.mlp.shared_expert_gate", 1, h)

    return _frame(c, layer)


def _qwen3(c: dict[str, Any]) -> Iterator[Weight]:
    """Norms of each head's queries and keys; a dense MLP, or experts without a shared one."""

    def layer(p: str, _: int) -> Iterator[Weight]:
        h = c["hidden_size"]
        yield from _attention(p, c, bias=False)
        yield from (_norm(f"{p}.self_attn.{name}_norm", c["head_dim"]) for name in ("q", "k"))
        if "num_experts" not in c:
            yield from _mlp(f"{p}.mlp", h, c["intermediate_size"])
            return
        yield _linear(f"{p}.mlp.gate", c["num_experts"], h, gain=2.0)
        for e in range(c["num_experts"]):
            yield from _mlp(f"{p}.mlp.experts.{e}", h, c["moe_intermediate_size"])

    return _frame(c, layer)


def _gemma3(c: dict[str, Any]) -> Iterator[Weight]:
    """Norms of queries and keys, and one behind attention and MLP as well. The embedding is multiplied by the square
    root of its width; here the head is not tied to it, so that a token is not its own likeliest successor."""
    h, heads, kv, d = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    yield "model.embed_tokens.weight", (c["vocab_size"], h), 1 / h**0.5
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        yield _norm(f"{p}.input_layernorm", h)
        for name, n in (("q", heads), ("k", kv), ("v", kv)):
            yield _linear(f"{p}.self_attn.{name}_proj", n * d, h)
        yield from (_norm(f"{p}.self_attn.{name}_norm", d) for name in ("q", "k"))
        yield _linear(f"{p}.self_attn.o_proj", h, heads * d)
        yield from (_norm(f"{p}.{name}_layernorm", h) for name in ("post_attention", "pre_feedforward"))
        yield from _mlp(f"{p}.mlp", h, c["intermediate_size"])
        yield _norm(f"{p}.post_feedforward_layernorm", h)
    yield _norm("model.norm", h)
    yield _linear("lm_head", c["vocab_size"], h, gain=4.0)


def _mixtral(c: dict[str, Any]) -> Iterator[Weight]:
    def layer(p: str, _: int) -> Iterator[Weight]:
        h, inner = c["hidden_size"], c["intermediate_size"]
        yield from _attention(p, c, bias=False)
        yield _linear(f"{p}.block_sparse_moe.gate", c["num_local_experts"], h, gain=2.0)
        for e in range(c["num_local_experts"]):
            q = f"{p}.block_sparse_moe.experts.{e}"
            yield _linear(f"{q}.w1", inner, h)
            yield _linear(f"{q}.w3", inner, h)
            yield _linear(f"{q}.w2", h, inner, gain=1.5)

    return _frame(c, layer)


def _deepseek_v2(c: dict[str, Any]) -> Iterator[Weight]:
    def layer(p: str, i: int) -> Iterator[Weight]:
        h, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
        nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        yield _linear(f"{p}.self_attn.q_proj", heads * (nope + rope), h)
        yield _linear(f"{p}.self_attn.kv_a_proj_with_mqa", rank + rope, h)
        yield _norm(f"{p}.self_attn.kv_a_layernorm", rank)
        yield _linear(f"{p}.self_attn.kv_b_proj", heads * (nope + v), rank)
        yield _linear(f"{p}.self_attn.o_proj", h, heads * v)
        if i < c["first_k_dense_replace"]:
            yield from _mlp(f"{p}.mlp", h, c["intermediate_size"])
            return
        yield _linear(f"{p}.mlp.gate", c["n_routed_experts"], h, gain=2.0)
        for e in range(c["n_routed_experts"]):
            yield from _mlp(f"{p}.mlp.experts.{e}", h, c["moe_intermediate_size"])
        yield from _mlp(f"{p}.mlp.shared_experts", h, c["moe_intermediate_size"] * c["n_shared_experts"])

    return _frame(c, layer)


def _qwen2_5_vl(c: dict[str, Any]) -> Iterator[Weight]:
    v = c["vision_config"]
    h, inner = v["hidden_size"], v["intermediate_size"]
    fan_in = v["in_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2
    shape = (h, v["in_channels"], v["temporal_patch_size"], v["patch_size"], v["patch_size"])
    yield "visual.patch_embed.proj.weight", shape, 1 / fan_in**0.5
    for i in range(v["depth"]):
        p = f"visual.blocks.{i}"
        yield _norm(f"{p}.norm1", h)
        yield _linear(f"{p}.attn.qkv", 3 * h, h)
        yield f"{p}.attn.qkv.bias", (3 * h,), 0.1
        yield _linear(f"{p}.attn.proj", h, h)
        yield f"{p}.attn.proj.bias", (h,), 0.1
        yield _norm(f"{p}.norm2", h)
        for name, out, in_ in (("gate_proj", inner, h), ("up_proj", inner, h), ("down_proj", h, inner)):
            yield _linear(f"{p}.mlp.{name}", out, in_)
            yield f"{p}.mlp.{name}.bias", (out,), 0.1
    merged = h * v["spatial_merge_size"] ** 2
    yield _norm("visual.merger.ln_q", h)
    for name, out in (("0", merged), ("2", v["out_hidden_size"])):
        yield _linear(f"visual.merger.mlp.{name}", out, merged)
        yield f"visual.merger.mlp.{name}.bias", (out,), 0.1
    yield from _dense(bias=True)(c)


def _whisper(c: dict[str, Any]) -> Iterator[Weight]:
    """As checkpoints have it: no bias of k_proj, and no head, which is the decoder's embedding."""
    h = c["d_model"]

    def attention(p: str) -> Iterator[Weight]:
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield _linear(f"{p}.{name}", h, h)
            if name != "k_proj":
                yield f"{p}.{name}.bias", (h,), 0.1
        yield from norm(f"{p}_layer_norm")

    def norm(p: str) -> Iterator[Weight]:
        yield _norm(p, h)
        yield f"{p}.bias", (h,), 0.1

    def mlp(p: str, inner: int) -> Iterator[Weight]:
        for name, out, in_ in (("fc1", inner, h), ("fc2", h, inner)):
            yield _linear(f"{p}.{name}", out, in_, gain=1.5)
            yield f"{p}.{name}.bias", (out,), 0.1
        yield from norm(f"{p}.final_layer_norm")

    for name, in_ in (("conv1", c["num_mel_bins"]), ("conv2", h)):
        yield f"model.encoder.{name}.weight", (h, in_, 3), 1 / (3 * in_) ** 0.5
        yield f"model.encoder.{name}.bias", (h,), 0.1
    yield "model.encoder.embed_positions.weight", (c["max_source_positions"], h), 1.0
    for i in range(c["encoder_layers"]):
        yield from attention(f"model.encoder.layers.{i}.self_attn")
        yield from mlp(f"model.encoder.layers.{i}", c["encoder_ffn_dim"])
    yield from norm("model.encoder.layer_norm")
    yield "model.decoder.embed_tokens.weight", (c["vocab_size"], h), 0.2  # the head, too: logits of about 2
    yield "model.decoder.embed_positions.weight", (c["max_target_positions"], h), 0.5
    for i in range(c["decoder_layers"]):
        yield from attention(f"model.decoder.layers.{i}.self_attn")
        yield from attention(f"model.decoder.layers.{i}.encoder_attn")
        yield from mlp(f"model.decoder.layers.{i}", c["decoder_ffn_dim"])
    yield from norm("model.decoder.layer_norm")


def _base(arch: str, model_type: str, **more: Any) -> dict[str, Any]:
    config = {
        "architectures": [arch],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 128,  # 4 heads of 32, the smallest that vLLM's CPU attention has
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    return config | more


_MOE = {
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "attention_bias": False,
    "sliding_window": 24,  # shorter than the prompts of most tests
    "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        _FULL: {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
_MLA = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,  # with the rotary part 576, the one head size of vLLM's MLA kernels
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    # As in DeepSeek's own models. Without it, vLLM 0.32's CPU kernel gets 3-D tensors, which it rotates wrongly and
    # differently in every batch (accprobe named rotary_emb).
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
_VISION = {
    "model_type": "qwen2_5_vl",
    "depth": 3,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "in_channels": 3,
    "in_chans": 3,
    "out_hidden_size": 128,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
VISION_TOKENS = {"vision_start_token_id": 4, "vision_end_token_id": 5, "image_token_id": 6, "video_token_id": 7}

_WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": VOCAB,
    "d_model": 128,
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 256,
    "max_source_positions": 100,  # two seconds, where the real one has 1500 for thirty
    "max_target_positions": 128,
    "activation_function": "gelu",
    "decoder_start_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "torch_dtype": "bfloat16",
}

MODELS: dict[str, TinyModel] = {
    "qwen2": TinyModel(_base("Qwen2ForCausalLM", "qwen2"), _dense(bias=True)),
    "llama": TinyModel(_base("LlamaForCausalLM", "llama", num_hidden_layers=3), _dense(bias=False)),
    "gemma3": TinyModel(_base("Gemma3ForCausalLM", "gemma3_text", **_GEMMA), _gemma3, mean_gain=0.0),
    "qwen2-moe": TinyModel(_base("Qwen2MoeForCausalLM", "qwen2_moe", **_MOE), _qwen2_moe),
    "qwen3": TinyModel(_base("Qwen3ForCausalLM", "qwen3", head_dim=32, num_hidden_layers=3), _qwen3),
    "qwen3-moe": TinyModel(
        _base("Qwen3MoeForCausalLM", "qwen3_moe", head_dim=32, **(_MOE | {"shared_expert_intermediate_size": 0})),
        _qwen3,
    ),
    "mixtral": TinyModel(
        _base("MixtralForCausalLM", "mixtral", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2),
        _mixtral,
    ),
    "deepseek-v2": TinyModel(_base("DeepseekV2ForCausalLM", "deepseek_v2", **_MLA), _deepseek_v2),
    "qwen2.5-vl": TinyModel(
        _base(
            "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_vl",
            num_hidden_layers=3,
            vision_config=_VISION,
            rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]},
            **VISION_TOKENS,
        ),
        _qwen2_5_vl,
    ),
    "whisper": TinyModel(_WHISPER, _whisper),
    "bench-h1024": TinyModel(
        _base(
            "Qwen2ForCausalLM",
            "qwen2",
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=4096,
        ),
        _dense(bias=True),
    ),
}
"""``qwen2``: dense, GQA. ``gemma3``: windowed and full attention, norms of q and k and behind each part.
``qwen3``: norms of q and k. ``qwen2-moe``, ``qwen3-moe``, ``mixtral``: experts.
``deepseek-v2``: MLA, one dense and two expert layers.
``qwen2.5-vl``: vision tower and M-RoPE. ``whisper``: audio encoder and decoder.
``bench-h1024``: 8 layers of hidden size 1024, for the benchmarks."""


def make(name: str, path: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write model ``name`` to the directory ``path`` (done already: nothing happens) and return it.

    ``overrides`` replace entries of config.json. Weights are bfloat16; the same name, seed and overrides give the same
    bytes on every machine. Raises KeyError for an unknown name.
    """
    return write(MODELS[name], path, seed=seed, **overrides)


def write(model: TinyModel, path: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """As `make`, for a model that is none of `MODELS`."""
    import torch
    from safetensors.torch import save_file
    from tiny_tokenizer import write_audio_processor, write_image_processor, write_tokenizer

    path = Path(path)
    config = model.config | overrides
    text = json.dumps(config, indent=2)
    if (path / "model.safetensors").exists() and (path / "config.json").read_text() == text:
        return path
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for tensor, shape, std in model.weights(config):
        is_gain = len(shape) == 1 and tensor.endswith(".weight")
        values = torch.randn(shape, generator=generator, dtype=torch.float32) * std
        if is_gain:
            values += model.mean_gain
        tensors[tensor] = values.to(torch.bfloat16)
    write_tokenizer(path, vocab_size=config["vocab_size"])
    if "vision_config" in config:
        write_image_processor(path, config["vision_config"])
    if "num_mel_bins" in config:
        write_audio_processor(path, mels=config["num_mel_bins"], frames=config["max_source_positions"])
    greedy = {"do_sample": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    (path / "generation_config.json").write_text(json.dumps(greedy))
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    (path / "config.json").write_text(text)  # last: a directory with its config is a finished one
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random model as a Hugging Face directory.")
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make(args.name, args.path, seed=args.seed))


if __name__ == "__main__":
    main()
