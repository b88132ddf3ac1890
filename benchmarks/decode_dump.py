"""A dump of many small calls: a decoder's steps of a few rows, of modules that are named as vLLM names them.

Most calls of a real dump are decode steps, and what a check spends on one of them is what it spends on reading, on the
weight, and on beginning, not on the numbers. `written` makes such a dump without an engine: embedding, norms with a
residual, fused projections, rotary embedding and gated activation of a decoder of made-up bfloat16 weights (attention,
which looks back at earlier steps, is left out), captured by `Probe`. bench_opcheck.py measures with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_accprobe import Probe

ROWS = (4, 8, 4, 1, 3)
"""Rows of a step, in turn: a few requests that come and go."""


class VocabParallelEmbedding(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, width))

    def forward(self, input_: Any) -> Any:
        return self.weight[input_]


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1.0 + 0.1 * torch.randn(width)), 1e-6

    def forward(self, x: Any, residual: Any = None) -> Any:
        total = x if residual is None else x + residual
        wide = total.float()
        y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype) * self.weight
        return y if residual is None else (y, total)


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x: Any) -> Any:
        return x @ self.weight.T


class QKVParallelLinear(_Linear):
    pass


class MergedColumnParallelLinear(_Linear):
    pass


class RowParallelLinear(_Linear):
    pass


class SiluAndMul(nn.Module):
    def forward(self, x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class RotaryEmbedding(nn.Module):
    def __init__(self, head: int):
        super().__init__()
        self.head_size = self.rotary_dim = head
        self.base, self.is_neox_style, self.max_position_embeddings = 10000.0, True, 4096

    def forward(self, positions: Any, query: Any, key: Any) -> Any:
        half = torch.arange(0, self.head_size, 2, dtype=torch.float64) / self.head_size
        angle = positions.unsqueeze(-1) * self.base**-half
        cos, sin = (t.to(query.dtype).unsqueeze(1) for t in (angle.cos(), angle.sin()))

        def turned(x: Any) -> Any:
            a, b = x.reshape(len(x), -1, self.head_size).chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)

        return turned(query), turned(key)


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.qkv_proj, self.o_proj = QKVParallelLinear(width, 2 * width), RowParallelLinear(width, width)
        self.rotary_emb = RotaryEmbedding(64)
        wide = width * 11 // 4
        self.gate_up_proj, self.down_proj = MergedColumnParallelLinear(width, 2 * wide), RowParallelLinear(wide, width)
        self.act_fn, self.width = SiluAndMul(), width

    def forward(self, positions: Any, x: Any, residual: Any) -> Any:
        x, residual = self.input_layernorm(x, residual)
        q, k, _ = self.qkv_proj(x).split([self.width, self.width // 2, self.width // 2], -1)
        q, _ = self.rotary_emb(positions, q, k)
        x, residual = self.post_attention_layernorm(self.o_proj(q), residual)
        return self.down_proj(self.act_fn(self.gate_up_proj(x))), residual


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = RMSNorm(width)

    def forward(self, ids: Any, positions: Any) -> Any:
        x = self.embed_tokens(ids)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]


def written(root: Path, calls: int, width: int, rows: tuple[int, ...] = ROWS, layers: int = 4) -> Path:
    """A dump of at least so many calls of operators' modules (eight a layer and step)."""
    torch.manual_seed(0)
    model = Decoder(layers, width, 4096).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), Probe(model, dir=str(root), max_gb=50):
        for step in range(-(-calls // (8 * layers + 2))):
            n = rows[step % len(rows)]
            model(torch.randint(0, 4096, (n,), generator=generator), 100 + step + 17 * torch.arange(n))
    return root
