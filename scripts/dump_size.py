"""How large a dump will be, from a model's config.json, before anything runs.

    python scripts/dump_size.py config.json --tokens 1000 --tp 8

The problem: a capture that fills the disk stops, and one that is too small has to be made again. The idea: what an
eager capture with the default settings stores for each token is a sum over the tensors of a layer, each stored once
(an output that is the next module's input is one tensor). The sums are written out below and were read off captures
of tiny models; tests/e2e/test_dump_size.py compares them with a real dump, byte for byte.
Known: dense decoders with a gated MLP and rotary embeddings (Llama, Qwen2, Mistral); DeepSeek's MLA with experts. Not
here: other architectures, vision towers, what compression of the file system saves.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layer:
    """Numbers that one layer stores for a token. whole: on every rank of tensor parallelism the same; cut: divided over
    the ranks; other: bytes of what is no activation (chosen experts)."""

    whole: int
    cut: int
    other: int = 0


def dense(c: dict[str, Any], intermediate: int | None = None) -> Layer:
    """Two norms with their residuals (4h), o_proj, down_proj (h each); qkv, rotary in and out, value, attention; gate
    and up (2i), activation (i)."""
    h, i = c["hidden_size"], intermediate or c["intermediate_size"]
    heads = c["num_attention_heads"]
    dim = c.get("head_dim") or h // heads
    q, kv = heads * dim, c.get("num_key_value_heads", heads) * dim
    return Layer(6 * h, (q + 2 * kv) + 2 * (q + kv) + kv + q + 3 * i)


def latent(c: dict[str, Any]) -> Layer:
    """DeepSeek's attention, with the norms, without the MLP: kv_a (r + p), its norm in and out (2r), with a low rank of
    q that part in, out and normed; rotary in and out; q_b and attention's q; kv_b (in prefill); attention; o_proj."""
    h, n, r, low = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c.get("q_lora_rank") or 0
    nope, p, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    whole = 5 * h + (r + p) + 2 * r + 3 * low + 2 * p
    return Layer(whole, 2 * n * (nope + p) + 2 * n * p + n * (nope + v) + n * v)


def experts(c: dict[str, Any]) -> Layer:
    """Router, shared experts, the sum of the routed ones, and both together; the choice as float32 and int32."""
    shared = c["moe_intermediate_size"] * c["n_shared_experts"]
    return Layer(3 * c["hidden_size"] + c["n_routed_experts"], 3 * shared, 8 * c["num_experts_per_tok"])


def layers(c: dict[str, Any]) -> list[Layer]:
    n = c["num_hidden_layers"]
    if "kv_lora_rank" not in c:
        return [dense(c)] * n
    found, attention = [], latent(c)
    for k in range(n):
        mlp = Layer(c["hidden_size"], 3 * c["intermediate_size"]) if k < c["first_k_dense_replace"] else experts(c)
        found.append(Layer(attention.whole + mlp.whole, attention.cut + mlp.cut, mlp.other))
    return found


def per_token(c: dict[str, Any], tp: int = 1, size: int = 2) -> tuple[int, int]:
    """(bytes that all ranks together store for a token, bytes for a row of logits more). Outside the layers lie what
    the last norm and its residual give, the id and the position; the embedding is the first layer's residual."""
    total = sum(tp * layer.whole * size + layer.cut * size + tp * layer.other for layer in layers(c))
    return total + tp * (2 * c["hidden_size"] * size + 4 + 8), c["vocab_size"] * size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=int, default=1000, help="of prompts and answers together")
    parser.add_argument("--answers", type=int, default=16, help="of these, how many are generated")
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    try:
        config = json.loads(args.config.read_text())
        config = config.get("text_config", config)
        size = BYTES[str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")]
        token, logits = per_token(config, args.tp, size)
    except (OSError, ValueError, KeyError) as e:
        print(f"dump_size: {args.config}: {e!r}: a config.json of a dense decoder or of DeepSeek's", file=sys.stderr)
        return 2
    parts = token * args.tokens + logits * args.answers
    print(f"{token / 1e6:.3g} MB for a token on {args.tp} ranks; {parts / 1e9:.3g} GB for {args.tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
