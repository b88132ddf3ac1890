"""Attention of one request, TensorRT-LLM's calls and merged halves, against loops and against wrong kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict
from flashinfer_loops import attended

from vllm_accprobe.opcheck.reference import Call


def drawn(seed: int, n: int, m: int, heads: int, kv: int, width: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*s, width, generator=g).bfloat16() for s in ((n, heads), (m, kv), (m, kv)))


def wide(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [t.double().numpy() for t in tensors]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", ["", "queries at the front", "window off by one"])
def test_single_prefill(seed: int, fault: str) -> None:
    r = np.random.default_rng(seed)
    n, m = int(r.integers(2, 5)), int(r.integers(6, 12))
    q, k, v = drawn(seed, n, m, 4, 2, 8)
    out, logs = (torch.from_numpy(t) for t in attended(*wide(q, k, v), 8**-0.5, left=2, fault=fault))
    outputs = {"output.0": out.bfloat16(), "output.1": logs.float()}
    kwargs = {"causal": True, "window_left": 2, "kv_layout": "HND", "return_lse": True}
    turned = (t.transpose(0, 1).contiguous() for t in (k, v))
    call = Call("x", "flashinfer.single_prefill_with_kv_cache", args=(q, *turned), kwargs=kwargs, outputs=outputs)
    assert verdict(call, "output.0", outputs["output.0"]).passed == (not fault)
    assert fault or verdict(call, "output.1", outputs["output.1"]).passed


@pytest.mark.parametrize("fault", ["", "heads interleaved", "a key left out"])
def test_single_decode(fault: str) -> None:
    q, k, v = drawn(4, 1, 9, 6, 2, 16)
    used = wide(q, k[:-1], v[:-1]) if fault == "a key left out" else wide(q, k, v)
    out, logs = (torch.from_numpy(t[0]) for t in attended(*used, 0.3, fault=fault))
    outputs = {"output.0": out.half(), "output.1": logs.float()}
    call = Call("x", "flashinfer.single_decode_with_kv_cache", args=(q[0], k, v), kwargs={"sm_scale": 0.3},
                outputs=outputs)  # fmt: skip
    assert verdict(call, "output.0", outputs["output.0"]).passed == (not fault)


LENGTHS, SIZE = [7, 4, 10], 4
TABLE_OF = [[3, 8, 0], [5, 0, 0], [1, 7, 2]]


def past(n: int, cache: torch.Tensor) -> np.ndarray:
    """cache [pages, rows, heads, width]"""
    return torch.stack([cache[TABLE_OF[n][p // SIZE], p % SIZE] for p in range(LENGTHS[n])]).double().numpy()


@pytest.mark.parametrize("name", ["trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"])
@pytest.mark.parametrize("fault", ["", "scale of values left out", "window off by one", "no sink"])
def test_trtllm(name: str, fault: str) -> None:
    g = torch.Generator().manual_seed(2)
    rows = [1, 1, 1] if "decode" in name else [2, 1, 3]
    k, v = (torch.randn(9, SIZE, 2, 8, generator=g).bfloat16() for _ in range(2))
    q, sinks = torch.randn(sum(rows), 4, 8, generator=g).bfloat16(), torch.randn(4, generator=g)
    starts = np.concatenate(([0], np.cumsum(rows)))
    parts = [
        attended(q[starts[n] : starts[n + 1]].double().numpy(), past(n, k), past(n, v), 0.4, left=3, sinks=sinks,
                 fault=fault)[0]
        for n in range(3)
    ]  # fmt: skip
    factor = 1.0 if fault == "scale of values left out" else 0.7
    out = (factor * torch.from_numpy(np.concatenate(parts))).bfloat16()
    both = torch.stack((k, v), 1).transpose(2, 3).contiguous()  # HND is the default here
    table, lengths = torch.tensor(TABLE_OF), torch.tensor(LENGTHS, dtype=torch.int32)
    more: dict[str, Any] = {"window_left": 3, "sinks": [sinks]}
    if "decode" in name:
        args: tuple[Any, ...] = (q, both, torch.zeros(4), table, lengths, 12, 0.4, 0.7)
    else:
        args = (q, both, torch.zeros(4), table, lengths, 3, 12, 0.4, 0.7, 3, torch.from_numpy(starts), None)
    call = Call("x", f"flashinfer.{name}", args=args, kwargs=more, outputs={"output.0": out})
    assert verdict(call, "output.0", out).passed == (not fault)


@pytest.mark.parametrize("fault", ["", "latent of another page", "rows see later ones"])
def test_trtllm_latent(fault: str) -> None:
    g = torch.Generator().manual_seed(12)
    cache = torch.randn(9, SIZE, 24, generator=g).bfloat16()
    q = torch.randn(3, 2, 4, 24, generator=g).bfloat16()
    parts = []
    for n in range(3):
        rows = past((n + 1) % 3 if fault == "latent of another page" else n, cache)[:, None]
        parts.append(attended(q[n].double().numpy(), rows, rows[..., :16], 0.25,
                              causal=fault != "rows see later ones")[0])  # fmt: skip
    out = torch.from_numpy(np.stack(parts)).bfloat16()
    args = (q, cache.unsqueeze(1), torch.zeros(4), 8, 16, 8, torch.tensor(TABLE_OF), torch.tensor(LENGTHS), 12)
    call = Call("x", "flashinfer.trtllm_batch_decode_with_kv_cache_mla", args=args, kwargs={"bmm1_scale": 0.25},
                outputs={"output.0": out})  # fmt: skip
    assert verdict(call, "output.0", out).passed == (not fault)


@pytest.mark.parametrize("fault", [False, True])
def test_merged_halves_are_the_whole(fault: bool) -> None:
    q, k, v = drawn(6, 3, 11, 4, 2, 8)
    (va, sa), (vb, sb) = (
        (torch.from_numpy(t).float() for t in attended(*wide(q, k[a:b], v[a:b]), 0.5, causal=False))
        for a, b in ((0, 4), (4, 11))
    )
    out, logs = (torch.from_numpy(t).float() for t in attended(*wide(q, k, v), 0.5, causal=False))
    mine = 0.5 * (va + vb) if fault else out
    call = Call("x", "flashinfer.merge_state", args=(va, sa, vb, sb), outputs={"output.0": mine, "output.1": logs})
    assert verdict(call, "output.0", mine).passed == (not fault)
    natural = logs * math.log(2)
    assert verdict(call, "output.1", logs).passed
    assert not verdict(call, "output.1", natural).passed
    states = torch.stack((va, vb), 1), torch.stack((sa, sb), 1)
    call = Call("x", "flashinfer.merge_states", args=states, outputs={"output.0": mine, "output.1": logs})
    assert verdict(call, "output.0", mine).passed == (not fault)
