"""One wrong kernel per family: an honest bfloat16 kernel passes, the wrong one fails, by the standard's own number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import family_verdict
import pytest
import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.calls.case import CachedRun, StoredCache
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.registry import default_references

TABLE = default_references()
Kernel = Callable[[], tuple[Call, Any, Any]]
"""Gives a call without outputs, and what an honest kernel and a wrong one make of it."""
KERNELS: dict[str, tuple[str, Kernel]] = {}


def kernel(fault: str, role: str = "output.0") -> Callable[[Kernel], Kernel]:
    def add(make: Kernel) -> Kernel:
        KERNELS[f"{make.__name__}: {fault}"] = role, make
        return make

    return add


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def verdict(call: Call, role: str, mine: torch.Tensor) -> Verdict:
    """With ``mine`` for the call's own output, which some references read."""
    return family_verdict.verdict(replace(call, outputs={role: mine}), role, mine)


@kernel("the mean divides by one less than the width")
def norm() -> tuple[Call, Any, Any]:
    x, w = draw(12, 64), draw(64, seed=1)
    call = Call("n", "RMSNorm", {"x": x}, params={"weight": w}, attrs={"variance_epsilon": 1e-6})
    power = x.float().square().sum(-1, keepdim=True)
    right, wrong = (x.float() * torch.rsqrt(power / n + 1e-6) * w.float() for n in (64, 63))
    return call, right.bfloat16(), wrong.bfloat16()


@kernel("the last two of 96 inputs are left out")
def linear() -> tuple[Call, Any, Any]:
    x, w = draw(12, 96), draw(40, 96, seed=1)
    right, wrong = (x.float()[:, :k] @ w.float()[:, :k].T for k in (96, 94))
    return Call("l", "ColumnParallelLinear", {"input_": x}, params={"weight": w}), right.bfloat16(), wrong.bfloat16()


@kernel("one rank's share is added twice, the other's never")
def row_parallel() -> tuple[Call, Any, Any]:
    x, w = draw(12, 32), draw(24, 32, seed=1)
    halves = list(zip(x.chunk(2, 1), w.chunk(2, 1), strict=True))
    calls = [Call("l", "RowParallelLinear", {"input_": a}, params={"weight": b}, attrs={"tp_size": 2, "tp_rank": k})
             for k, (a, b) in enumerate(halves)]  # fmt: skip
    parts = [(a.float() @ b.float().T).bfloat16() for a, b in halves]
    attrs = {"tp_size": 2, "tp_rank": 0, "reduce_results": True}
    call = Call("l", "RowParallelLinear", {"input_": halves[0][0]}, attrs=attrs, extra={"ranks": calls})
    return call, parts[0] + parts[1], parts[0] + parts[0]


@kernel("one output channel has its neighbour's scale")
def quantised() -> tuple[Call, Any, Any]:
    x, w = draw(16, 64), draw(24, 64, seed=1).float()
    scale = w.abs().amax(1, keepdim=True) / 448
    q = (w / scale).to(torch.float8_e4m3fn)
    wrong = scale.clone()
    wrong[5] = scale[6]
    call = Call("l", "ReplicatedLinear", {"x": x}, params={"weight": q, "weight_scale": scale})
    return call, *((x.float() @ (q.float() * s).T).bfloat16() for s in (scale, wrong))


@kernel("quick GELU in SiLU's place")
def activation() -> tuple[Call, Any, Any]:
    x = draw(12, 64)
    gate, up = x.float().chunk(2, -1)
    right, wrong = (gate * torch.sigmoid(a * gate) * up for a in (1.0, 1.702))
    return Call("a", "SiluAndMul", {"x": x}), right.bfloat16(), wrong.bfloat16()


@kernel("the last token is rotated for the position before")
def rotary() -> tuple[Call, Any, Any]:
    q, at = draw(6, 32), torch.tensor([0, 1, 2, 9, 10, 30])
    attrs = {"head_size": 16, "rotary_dim": 16, "base": 1e4, "is_neox_style": True, "max_position_embeddings": 64}
    late = at.clone()
    late[-1] -= 1

    def turned(positions: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None, None].double() * 1e4 ** -(torch.arange(8).double() / 8)
        a, b = q.double().reshape(6, 2, 16).chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).reshape(6, 32).bfloat16()

    return Call("r", "RotaryEmbedding", {"positions": at, "query": q}, attrs=attrs), turned(at), turned(late)


@kernel("one token has the next row of the table")
def embedding() -> tuple[Call, Any, Any]:
    table, ids = draw(50, 16), torch.tensor([3, 9, 0, 44])
    call = Call("e", "VocabParallelEmbedding", {"input_": ids}, params={"weight": table})
    return call, table[ids], table[ids + (ids == 9)]


@kernel("the third best is taken for the second", "output.top_logits")
def sampling() -> tuple[Call, Any, Any]:
    logits = draw(5, 32).float()
    best = logits.topk(3).values
    return Call("s", "Sampler", extra={"logits": logits}), best[:, :2], best[:, [0, 2]]


@kernel("a softmax scale 2 % too large")
def attention() -> tuple[Call, Any, Any]:
    n, heads, width = 24, 4, 16
    q, k, v = draw(n, heads * width), draw(n, 2 * width, seed=1), draw(n, 2 * width, seed=2)
    rows = torch.arange(n)
    cache = StoredCache([CachedRun(rows, rows, {"key": k.reshape(n, 2, width), "value": v.reshape(n, 2, width)})], "")
    attrs = {"num_heads": heads, "num_kv_heads": 2, "head_size": width, "scale": 0.25}
    call = Call("x", "Attention", {"query": 3 * q, "key": k, "value": v}, attrs=attrs, extra={"cache": cache})

    def attended(scale: float) -> torch.Tensor:
        sides = (t.float().reshape(n, -1, width).transpose(0, 1) for t in (3 * q, k, v))
        a, b, c = (t if len(t) == heads else t.repeat_interleave(2, 0) for t in sides)
        out = F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale)
        return out.transpose(0, 1).reshape(n, -1).bfloat16()

    return call, attended(0.25), attended(0.255)


@kernel("weights are not renormalised", "input.topk_weights")
def routing() -> tuple[Call, Any, Any]:
    logits, x = draw(16, 6).float(), draw(16, 8)
    p = logits.softmax(-1)
    best = p.topk(2)
    right = best.values / best.values.sum(-1, keepdim=True)
    call = Call("m.experts", "UnquantizedFusedMoEMethod", {"x": x, "topk_weights": right, "topk_ids": best.indices},
                params={"w13_weight": draw(6, 12, 8), "w2_weight": draw(6, 8, 6)},
                config={"hidden_act": "silu", "model_type": "mixtral"}, extra={"router_logits": logits})  # fmt: skip
    return call, right, best.values


@kernel("one expert's second product is 3 % too large")
def experts() -> tuple[Call, Any, Any]:
    x, w13, w2 = draw(12, 32), draw(3, 48, 32, seed=1), draw(3, 32, 24, seed=2)
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 0]] * 4), draw(12, 2).float().abs()

    def mixed(factor: float) -> torch.Tensor:
        out = torch.zeros(12, 32)
        for t in range(12):
            for w, e in zip(weights[t], ids[t].tolist(), strict=True):
                gate, up = (w13[e].float() @ x[t].float()).chunk(2)
                inner = (F.silu(gate) * up).bfloat16().float()
                out[t] += w * (w2[e].float() @ inner) * (factor if e == 1 else 1.0)
        return out.bfloat16()

    call = Call("m.experts", "UnquantizedFusedMoEMethod", {"x": x, "topk_weights": weights, "topk_ids": ids},
                params={"w13_weight": w13, "w2_weight": w2}, config={"hidden_act": "silu"})  # fmt: skip
    return call, mixed(1.0), mixed(1.03)


@kernel("one channel without its bias")
def patches() -> tuple[Call, Any, Any]:
    x, w, b = draw(8, 3, 8, 8), draw(16, 3, 4, 4, seed=1), draw(16, seed=2)
    lost = b.clone()
    lost[7] = 0
    sides = (F.conv2d(x.float(), w.float(), bias.float(), stride=4).bfloat16() for bias in (b, lost))
    return Call("v", "Conv2dLayer", {"x": x}, params={"weight": w, "bias": b}), *sides


@kernel("the last of 64 terms is left out")
def operator() -> tuple[Call, Any, Any]:
    a, b = draw(16, 64), draw(64, 24, seed=1)
    right, wrong = ((a.float()[:, :k] @ b.float()[:k]).bfloat16() for k in (64, 63))
    return Call("o", "aten.mm.default", args=(a, b)), right, wrong


@pytest.mark.parametrize("name", KERNELS)
def test_an_honest_kernel_passes_and_a_wrong_one_fails(name: str) -> None:
    role, make = KERNELS[name]
    call, right, wrong = make()
    honest, faulty = verdict(call, role, right), verdict(call, role, wrong)
    assert honest.passed, honest
    assert honest.severity < 0.9
    assert not faulty.passed
    assert faulty.severity > 1.05, faulty
    likely = ("norm", "quantised", "experts", "operator")  # small, or without a bound
    assert faulty.tier == "proved" or any(word in name for word in likely), (name, faulty)
