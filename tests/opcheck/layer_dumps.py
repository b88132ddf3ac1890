"""A dump of one decoder layer in bfloat16, as an engine leaves it: honest, or with one tap that goes wrong."""

from pathlib import Path

import torch
from opcheck.opcheck_dumps import Maker

HEADS, KV, HEAD, WIDTH = 4, 2, 8, 32
SPANS = ([(0, 0, 9), (1, 0, 6)], [(0, 9, 5), (1, 6, 1)], [(0, 14, 1), (1, 7, 1)])
"""Chunked prefill of request 0 beside a whole prompt, then decode steps."""


def honest(seed: int = 0) -> dict[str, torch.Tensor]:
    """One layer's tensors for all positions of both requests, bfloat16."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).bfloat16()

    return {
        "x": draw(2, 20, WIDTH), "norm": draw(WIDTH).abs() + 0.5,
        "qkv": draw(HEADS * HEAD + 2 * KV * HEAD, WIDTH) * 0.2, "o": draw(WIDTH, HEADS * HEAD) * 0.2,
    }  # fmt: skip


def build(
    root: Path, fault: str = "", first: int = 0, weights: bool = True, spans: tuple = SPANS
) -> Path:  # fmt: skip
    """A norm, a qkv projection, attention and an output projection over SPANS. fault: a tap that goes wrong."""
    made, m = honest(), Maker(root)
    weight, wide = made["norm"], {k: v.double() for k, v in made.items()}
    m.module("<root>", "TinyForCausalLM")
    m.module("layers.0.self_attn", "TinyAttention", scaling=HEAD**-0.5)
    m.module("layers.0.norm", "RMSNorm", variance_epsilon=1e-5)
    m.module("layers.0.self_attn.qkv_proj", "QKVParallelLinear", tp_size=1)
    m.module("layers.0.self_attn.attn", "Attention", num_heads=HEADS, num_kv_heads=KV, head_size=HEAD)
    m.module("layers.0.self_attn.o_proj", "RowParallelLinear", tp_size=1, reduce_results=True)
    m.module("layers.0.odd", "NobodyKnows")
    m.request(0, 14)
    m.request(1, 7)
    empty = torch.zeros(0, dtype=torch.bfloat16)
    m.param("layers.0.norm", "RMSNorm", weight=weight)
    m.param("layers.0.self_attn.qkv_proj", "QKVParallelLinear", weight=made["qkv"] if weights else empty)
    m.param("layers.0.self_attn.o_proj", "RowParallelLinear", weight=made["o"])
    normed = (wide["x"] / (wide["x"].pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * wide["norm"]).bfloat16()
    q, k, v = (normed.double() @ wide["qkv"].T).bfloat16().split([HEADS * HEAD, KV * HEAD, KV * HEAD], -1)
    for step, span in enumerate(spans):
        if step < first:
            continue
        m.step(step, span)

        def rows(t: torch.Tensor, span: list = span) -> torch.Tensor:
            return torch.cat([t[r, p : p + n] for r, p, n in span]).clone()

        out = []
        for r, p, n in span:
            qh = q[r, p : p + n].double().reshape(n, HEADS, HEAD).transpose(0, 1)
            kh, vh = (t[r, : p + n].double().reshape(p + n, KV, HEAD).transpose(0, 1) for t in (k, v))
            if fault == "layers.0.self_attn.attn" and p + n > 12:
                vh = vh.clone()
                vh[0, 3] = 0  # a zeroed slot of the cache
            mask = torch.ones(n, p + n, dtype=torch.bool).tril(p)
            y = torch.nn.functional.scaled_dot_product_attention(qh, kh, vh, mask, enable_gqa=True)
            out.append(y.transpose(0, 1).reshape(n, -1))
        attended = torch.cat(out).bfloat16()
        projected = (attended.double() @ wide["o"].T).bfloat16()
        first_output = rows(normed)
        if fault == "layers.0.norm":
            first_output[:, 7] *= 1.06
        if fault == "layers.0.self_attn.o_proj":
            projected = (projected.double() * 1.02).bfloat16()
        if fault == "nan":
            projected[0, 0] = float("nan")
        m.call("layers.0.norm", "RMSNorm", {"x": rows(made["x"])}, first_output)
        m.call("layers.0.self_attn.qkv_proj", "QKVParallelLinear", {"input_": rows(normed)},
               torch.cat([rows(t) for t in (q, k, v)], -1))  # fmt: skip
        m.call("layers.0.self_attn.attn", "Attention", {"query": rows(q), "key": rows(k), "value": rows(v)}, attended)
        m.call("layers.0.self_attn.o_proj", "RowParallelLinear", {"input_": attended}, projected)
        m.call("layers.0.odd", "NobodyKnows", {"x": rows(normed)}, rows(normed))
    return m.close()
