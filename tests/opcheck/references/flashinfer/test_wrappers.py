"""Planned attention against its definition in loops, at random shapes, and against wrong kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict
from flashinfer_loops import attended
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined

PREFILL = "flashinfer.BatchPrefillWithPagedKVCacheWrapper.run"


class Paged:
    """A random batch: lengths, pages in a shuffled order, and both caches as [pages, rows, heads, width]."""

    def __init__(self, seed: int, most: int = 4):
        r = np.random.default_rng(seed)
        self.size, self.kv = int(r.choice([1, 4, 8])), int(r.choice([1, 2]))
        self.heads, self.width = self.kv * int(r.choice([1, 3])), int(r.choice([8, 16]))
        self.lengths = [int(n) for n in r.integers(3, 20, 3)]
        self.rows = [int(r.integers(1, min(n, most) + 1)) for n in self.lengths]
        pages = [-(-n // self.size) for n in self.lengths]
        self.order = r.permutation(sum(pages) + 2)[: sum(pages)]
        self.indptr = np.concatenate(([0], np.cumsum(pages)))
        self.starts = np.concatenate(([0], np.cumsum(self.rows)))
        self.last = [n - (p - 1) * self.size for n, p in zip(self.lengths, pages, strict=True)]
        g = torch.Generator().manual_seed(seed)
        shape = (sum(pages) + 2, self.size, self.kv, self.width)
        self.k, self.v = (torch.randn(*shape, generator=g).bfloat16() for _ in range(2))
        self.q = torch.randn(int(self.starts[-1]), self.heads, self.width, generator=g).bfloat16()

    def past(self, n: int, cache: torch.Tensor) -> np.ndarray:
        """Row by row, each from its page."""
        at = self.order[self.indptr[n] : self.indptr[n + 1]]
        rows = [cache[at[p // self.size], p % self.size] for p in range(self.lengths[n])]
        return torch.stack(rows).double().numpy()

    def defined(self, fault: str = "", **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, parts = self.q.double().numpy(), []
        seen = how.pop("seen", [None] * 3)
        for n in range(3):
            of = (n + 1) % 3 if fault == "another request's pages" else n
            rows = q[self.starts[n] : self.starts[n + 1]]
            k, v = self.past(of, self.k), self.past(of, self.v)
            parts.append(attended(rows, k, v, how.get("scale", self.width**-0.5), seen=seen[n], fault=fault,
                                  **{w: x for w, x in how.items() if w != "scale"}))  # fmt: skip
        out, logs = (torch.from_numpy(np.concatenate(p)) for p in zip(*parts, strict=True))
        return out.bfloat16(), logs.float()

    def call(self, mine: tuple[torch.Tensor, ...], cache: Any = None, **more: Any) -> Call:
        plan = {"qo_indptr": self.starts, "paged_kv_indptr": self.indptr, "paged_kv_indices": self.order,
                "paged_kv_last_page_len": np.array(self.last)}  # fmt: skip
        kwargs = {f"plan.{n}": torch.from_numpy(np.array(x)).int() for n, x in plan.items()} | more
        outputs = {f"output.{n}": t for n, t in enumerate(mine)}
        both = [self.k, self.v] if cache is None else cache
        return Call("x", PREFILL, args=(None, self.q, both), kwargs=kwargs, outputs=outputs)


FAULTS = ["another request's pages", "queries at the front", "heads interleaved"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_paged_prefill(seed: int, fault: str) -> None:
    b = Paged(seed)
    if fault == "heads interleaved" and b.kv == 1:
        return
    out, logs = b.defined(fault)
    call = b.call((out, logs), **{"plan.causal": True, "return_lse": True})
    assert verdict(call, "output.0", out).passed == (not fault)
    if not fault:
        assert verdict(call, "output.1", logs).passed
        wrong = b.defined("natural logarithm")[1]
        assert not verdict(call, "output.1", wrong).passed


@pytest.mark.parametrize("seed", range(3))
def test_window_cap_scale_sinks_and_the_other_layout(seed: int) -> None:
    b = Paged(seed + 10)
    turned = [t.transpose(1, 2).contiguous() for t in (b.k, b.v)]
    sinks = torch.randn(b.heads)
    how = {"left": 3, "cap": 2.0, "scale": 0.7}
    told = {"plan.causal": True, "plan.window_left": 3, "plan.logits_soft_cap": 2.0, "plan.sm_scale": 0.7,
            "init.kv_layout": "HND"}  # fmt: skip
    out, logs = b.defined(**how)
    assert verdict(b.call((out, logs), turned, **told), "output.0", out).passed
    assert verdict(b.call((out, logs), turned, **told), "output.1", logs).passed
    for fault in ("window off by one", "no soft cap"):
        wrong, _ = b.defined(fault, **how)
        assert not verdict(b.call((wrong,), turned, **told), "output.0", wrong).passed, fault
    with_sinks, _ = b.defined(sinks=sinks, **how)
    call = b.call((with_sinks,), turned, sinks=sinks, **told)
    assert verdict(call, "output.0", with_sinks).passed
    assert not verdict(b.call((out,), turned, sinks=sinks, **told), "output.0", out).passed


def test_one_tensor_for_both_scales_and_no_causality() -> None:
    b = Paged(21)
    both = torch.stack((b.k, b.v), 1)
    out, _ = b.defined(causal=False, scale=b.width**-0.5 * 0.5 * 2.0)
    out = (out.double() * 0.25).bfloat16()  # a power of two moves no rounding
    call = b.call((out,), both, q_scale=2.0, k_scale=0.5, v_scale=0.25)
    assert verdict(call, "output.0", out).passed
    assert not verdict(b.call((out,), both), "output.0", out).passed


@pytest.mark.parametrize("fault", [False, True])
def test_custom_mask(fault: bool) -> None:
    b = Paged(5)
    r = np.random.default_rng(6)
    seen = [(r.random((n, m)) < 0.6) | (np.arange(m) == 0) for n, m in zip(b.rows, b.lengths, strict=True)]
    flat = torch.from_numpy(np.concatenate([s.reshape(-1) for s in seen]))
    out, _ = b.defined(seen=[~s | (np.arange(s.shape[1]) == 0) for s in seen] if fault else seen)
    call = b.call((out,), **{"plan.custom_mask": flat, "plan.causal": True})
    assert verdict(call, "output.0", out).passed == (not fault)


@pytest.mark.parametrize("name", ["BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"])
@pytest.mark.parametrize("fault", ["", *FAULTS[:1]])
def test_paged_decode(name: str, fault: str) -> None:
    b = Paged(7, most=1)
    out, logs = b.defined(fault)
    plan = {"plan.indptr": b.indptr, "plan.indices": b.order, "plan.last_page_len": np.array(b.last)}
    kwargs = {n: torch.from_numpy(np.array(x)).int() for n, x in plan.items()}
    call = Call("x", f"flashinfer.{name}.run", args=(None, b.q), kwargs={**kwargs, "paged_kv_cache": [b.k, b.v]},
                outputs={"output.0": out, "output.1": logs})  # fmt: skip
    assert verdict(call, "output.0", out).passed == (not fault)


@pytest.mark.parametrize("fault", ["", "queries at the front", "heads interleaved"])
def test_ragged(fault: str) -> None:
    g = torch.Generator().manual_seed(3)
    rows, keys, heads, kv = [2, 1, 4], [5, 7, 4], 4, 2
    q, k = torch.randn(7, heads, 12, generator=g).bfloat16(), torch.randn(16, kv, 12, generator=g).bfloat16()
    v = torch.randn(16, kv, 8, generator=g).bfloat16()
    parts, a, c = [], 0, 0
    for n, m in zip(rows, keys, strict=True):
        sides = [t.double().numpy() for t in (q[a : a + n], k[c : c + m], v[c : c + m])]
        parts.append(attended(*sides, 12**-0.5, fault=fault)[0])
        a, c = a + n, c + m
    out = torch.from_numpy(np.concatenate(parts)).bfloat16()
    kwargs = {"plan.qo_indptr": torch.tensor([0, 2, 3, 7]), "plan.kv_indptr": torch.tensor([0, 5, 12, 16]),
              "plan.causal": True}  # fmt: skip
    call = Call("x", "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run", args=(None, q, k, v), kwargs=kwargs,
                outputs={"output.0": out})  # fmt: skip
    assert verdict(call, "output.0", out).passed == (not fault)


@pytest.mark.parametrize("base", [2.0, math.e])
@pytest.mark.parametrize("fault", ["", "rope part left out", "queries at the front"])
def test_latent(base: float, fault: str) -> None:
    g = torch.Generator().manual_seed(8)
    heads, width, rope, size = 3, 16, 8, 4
    lengths, rows, pages = [6, 9], [2, 1], [[4, 1], [0, 5, 2]]
    c, pe = (torch.randn(6, size, w, generator=g).bfloat16() for w in (width, rope))
    q, q_pe = (torch.randn(3, heads, w, generator=g).bfloat16() for w in (width, rope))
    parts, a = [], 0
    for n, m, at in zip(rows, lengths, pages, strict=True):
        past = [torch.stack([t[at[p // size], p % size] for p in range(m)]).double().numpy() for t in (c, pe)]
        sides = [t[a : a + n].double().numpy() for t in (q, q_pe)]
        if fault == "rope part left out":
            sides[1] *= 0
        k = np.concatenate(past, -1)[:, None]
        parts.append(attended(np.concatenate(sides, -1), k, past[0][:, None], 0.3, fault=fault))
        a += n
    out, logs = (torch.from_numpy(np.concatenate(p)) for p in zip(*parts, strict=True))
    out, logs = out.bfloat16(), (logs * math.log(2) / math.log(base)).float()
    kwargs = {"plan.qo_indptr": torch.tensor([0, 2, 3]), "plan.kv_indptr": torch.tensor([0, 2, 5]),
              "plan.kv_indices": torch.tensor([4, 1, 0, 5, 2]), "plan.kv_len_arr": torch.tensor(lengths),
              "plan.causal": True, "plan.sm_scale": 0.3, "return_lse_base_on_e": base != 2.0}  # fmt: skip
    call = Call("x", "flashinfer.BatchMLAPagedAttentionWrapper.run", args=(None, q, q_pe, c, pe), kwargs=kwargs,
                outputs={"output.0": out, "output.1": logs})  # fmt: skip
    assert verdict(call, "output.0", out).passed == (not fault)
    if not fault:
        assert verdict(call, "output.1", logs).passed


@pytest.mark.parametrize(
    "more",
    [
        {"plan.pos_encoding_mode": "ALIBI"}, {"init.jit_args": ["x"]}, {"plan.use_fp16_qk_reduction": True},
        {"plan.paged_kv_indices": torch.full((99,), 10**6)}, {"plan.qo_indptr": torch.tensor([0, 5, 2, 9])},
        {"plan.packed_custom_mask": torch.ones(3, dtype=torch.uint8)}, {"lse_base": "log10"},
        {"plan.paged_kv_last_page_len": None}, {"plan.custom_mask": torch.ones(3, dtype=torch.bool)},
    ],
)  # fmt: skip
def test_what_changes_the_formula_or_cannot_be_is_declined(more: dict[str, Any]) -> None:
    b = Paged(2)
    out, _ = b.defined()
    found = TABLE.evaluate(b.call((out,), **more))
    assert isinstance(found, Declined), found
    assert not found.failed, found.reason
