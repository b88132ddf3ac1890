"""How large a dump will be, from a model's config.json, before anything runs.

The problem: a capture that fills the disk stops, and one that is too small has to be made again. The idea: what an
eager capture stores for each token is a sum over the tensors of a layer, each stored once (an output that is the next
module's input is one tensor); a tensor is there when one of the modules that have it is chosen. The sums are written
out below and were read off captures of tiny models; tests/e2e/test_dump_size.py compares them with real dumps, byte
for byte.
Known: dense decoders with a gated MLP and rotary embeddings (Llama, Qwen2, Mistral), whole or some modules of them;
DeepSeek's MLA with experts, whole. Not here: other architectures, vision towers, parameters, what compression of the
file system saves; the command (cli/size.py), which modules a word chooses (capture/taps/selection.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Chooses = Callable[[str, str], bool]
"""(path of a module, its class) → whether it is captured."""
_CLASSES = {
    "qkv_proj": "QKVParallelLinear", "o_proj": "RowParallelLinear", "down_proj": "RowParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear", "act_fn": "SiluAndMul", "attn": "Attention", "norm": "RMSNorm",
    "input_layernorm": "RMSNorm", "post_attention_layernorm": "RMSNorm", "rotary_emb": "RotaryEmbedding",
    "lm_head": "ParallelLMHead",
}  # fmt: skip
"""Last name of a module → vLLM's class, so that presets and class names choose as in a capture."""


class SizeError(ValueError):
    """The model is not known, or not so; the message is one line."""


@dataclass(frozen=True)
class LayerSize:
    """Numbers that one layer stores for a token. whole: on every rank of tensor parallelism the same; cut: divided over
    the ranks; other: bytes of what is no activation (chosen experts)."""

    whole: int
    cut: int
    other: int = 0


@dataclass(frozen=True)
class StoredTensor:
    """numbers: of a token; makers, takers: the modules that have it as an output and as an input; cut: divided over the
    ranks."""

    numbers: int
    makers: tuple[str, ...]
    takers: tuple[str, ...] = ()
    cut: bool = False


def dense(c: Mapping[str, Any]) -> Iterator[StoredTensor]:
    """A dense decoder's tensors, from the first layer to the last norm: of each layer two norms with their residuals
    (4h), o_proj, down_proj (h each); qkv, rotary in and out, value, attention; gate and up (2i), activation (i)."""
    h, i, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    heads = c["num_attention_heads"]
    dim = c.get("head_dim") or h // heads
    q, kv = heads * dim, c.get("num_key_value_heads", heads) * dim
    for k in range(layers):
        here, after = f"model.layers.{k}", f"model.layers.{k + 1}"
        norm, post = f"{here}.input_layernorm", f"{here}.post_attention_layernorm"
        attn, mlp = f"{here}.self_attn", f"{here}.mlp"
        heirs = (after, f"{after}.input_layernorm") if k + 1 < layers else ("model.norm",)
        qkv, rotary, inner, o = (f"{attn}.{n}" for n in ("qkv_proj", "rotary_emb", "attn", "o_proj"))
        up, act, down = (f"{mlp}.{n}" for n in ("gate_up_proj", "act_fn", "down_proj"))
        yield StoredTensor(h, (norm,), (attn, qkv))
        if k:
            yield StoredTensor(h, (norm,), (post,))
        else:  # nothing was added yet: it is the embedding itself
            yield StoredTensor(h, (norm, "model.embed_tokens"), (norm, here, post))
        yield StoredTensor(q + 2 * kv, (qkv,), cut=True)
        yield StoredTensor(q + kv, (), (rotary,), cut=True)
        yield StoredTensor(q + kv, (rotary,), (inner,), cut=True)
        yield StoredTensor(kv, (), (inner,), cut=True)
        yield StoredTensor(q, (inner,), (o,), cut=True)
        yield StoredTensor(h, (o, attn), (post,))
        yield StoredTensor(h, (post,), (mlp, up))
        yield StoredTensor(h, (post, here), heirs)
        yield StoredTensor(2 * i, (up,), (act,), cut=True)
        yield StoredTensor(i, (act,), (down,), cut=True)
        yield StoredTensor(h, (down, mlp, here), heirs)
    yield StoredTensor(h, ("model.norm", "model", "<root>"), ("logits_processor",))
    yield StoredTensor(h, ("model.norm",))


def latent(c: Mapping[str, Any]) -> LayerSize:
    """DeepSeek's attention, with the norms, without the MLP: kv_a (r + p), its norm in and out (2r), with a low rank of
    q that part in, out and normed; rotary in and out; q_b and attention's q; kv_b (in prefill); attention; o_proj."""
    h, n, r, low = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c.get("q_lora_rank") or 0
    nope, p, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    whole = 5 * h + (r + p) + 2 * r + 3 * low + 2 * p
    return LayerSize(whole, 2 * n * (nope + p) + 2 * n * p + n * (nope + v) + n * v)


def experts(c: Mapping[str, Any]) -> LayerSize:
    """Router, shared experts, the sum of the routed ones, and both together; the choice as float32 and int32."""
    shared = c["moe_intermediate_size"] * c["n_shared_experts"]
    return LayerSize(3 * c["hidden_size"] + c["n_routed_experts"], 3 * shared, 8 * c["num_experts_per_tok"])


def layers_of_deepseek(c: Mapping[str, Any]) -> list[LayerSize]:
    found, attention = [], latent(c)
    for k in range(c["num_hidden_layers"]):
        first = k < c["first_k_dense_replace"]
        mlp = LayerSize(c["hidden_size"], 3 * c["intermediate_size"]) if first else experts(c)
        found.append(LayerSize(attention.whole + mlp.whole, attention.cut + mlp.cut, mlp.other))
    return found


def per_token(
    c: Mapping[str, Any], tp: int = 1, size: int = 2, chooses: Chooses | None = None, parts: Sequence[str] = ()
) -> tuple[int, int]:  # fmt: skip
    """(bytes that all ranks together store for a token, bytes more for a row of logits with what it is made of). size:
    of a number; chooses: None for every module; parts: as ProbeConfig's. Outside the layers lie what the last norm and
    its residual give, the id and the position. Raises SizeError, KeyError for a config that is not of these models."""
    outputs, inputs = (not parts or part in parts for part in ("output", "input"))
    if "kv_lora_rank" in c:
        if chooses is not None or not (outputs and inputs):
            raise SizeError("of this architecture the size is known only for inputs and outputs of all modules")
        total = sum(tp * layer.whole * size + layer.cut * size + tp * layer.other for layer in layers_of_deepseek(c))
        return total + tp * (2 * c["hidden_size"] * size + 4 + 8), (c["vocab_size"] + c["hidden_size"]) * size
    if any(name in c for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise SizeError("a mixture of experts that is not DeepSeek's: not known")

    def chosen(*paths: str) -> bool:
        return any(chooses is None or chooses(p, _CLASSES.get(p.rpartition(".")[2], "")) for p in paths)

    kept = [t for t in dense(c) if (outputs and chosen(*t.makers)) or (inputs and chosen(*t.takers))]
    total = sum(t.numbers * size * (1 if t.cut else tp) for t in kept)
    if inputs:
        total += tp * 4 * chosen("<root>", "model", "model.embed_tokens")
        total += tp * 8 * chosen("<root>", "model", "model.layers.0", *_rotary(c))
    logits = chosen("lm_head", "logits_processor") * (c["vocab_size"] * outputs + c["hidden_size"] * inputs)
    return total, logits * size


def _rotary(c: Mapping[str, Any]) -> Iterator[str]:
    for k in range(c["num_hidden_layers"]):
        yield from (f"model.layers.{k}", f"model.layers.{k}.self_attn", f"model.layers.{k}.self_attn.rotary_emb")


def read_config(path: Path) -> tuple[dict[str, Any], int]:
    """(a config.json's text model, bytes of a number). path: the file, or the model's folder. Raises SizeError."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        return config, BYTES[str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")]
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as why:
        what = why.strerror or why if isinstance(why, OSError) else repr(why)
        raise SizeError(f"{path}: {what}: the config.json of a model is needed") from None
