"""Attention against torch's and by hand, over rows of several requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer

from vllm_accprobe.dump.schema import RowSpace, Segment
from vllm_accprobe.opcheck.calls.neighbours import INCOMPLETE, Past
from vllm_accprobe.opcheck.references import attention
from vllm_accprobe.opcheck.references.attention import alibi_slopes, attend

draw = drawer(9)


def sdpa(q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    """torch's own, on [rows, heads, d]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **more).transpose(0, 1)


def test_alibi_by_torch_and_slopes_by_hand() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]
    q, k, v = draw(4, 2, 8), draw(4, 2, 8), draw(4, 2, 8)
    slopes, at = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.arange(4)
    bias = slopes[:, None, None] * (at[None] - at[:, None]) + torch.where(at[None] <= at[:, None], 0.0, -math.inf)
    got, *_ = attend(q, k, v, 1.0, at, slopes=slopes)
    torch.testing.assert_close(got, sdpa(q, k, v, bias, scale=1.0), rtol=1e-12, atol=1e-12)


def test_soft_cap_and_sinks_by_hand() -> None:
    q, k = torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([[[1.0]], [[3.0]]], dtype=torch.float64)
    v = torch.tensor([[[1.0]], [[0.0]]], dtype=torch.float64)
    a, b = (2 * math.tanh(x / 2) for x in (1.0, 3.0))
    got, *_ = attend(q, k, v, 1.0, cap=2.0)
    assert got.item() == pytest.approx(math.exp(a) / (math.exp(a) + math.exp(b)), rel=1e-12)
    got, *_ = attend(q, k, v, 1.0, sinks=torch.tensor([2.0], dtype=torch.float64))
    assert got.item() == pytest.approx(math.e / (math.e + math.exp(3) + math.exp(2)), rel=1e-12)


def test_noise_is_what_rounded_probabilities_do() -> None:
    """200 draws of probabilities off by up to step, evenly, and divided by their own sum or by that of the exact ones:
    the larger spread is what attend says."""
    q, k, v = draw(2, 1, 8), draw(12, 1, 8), draw(12, 1, 4)
    exact, noise, _ = attend(q, k, v, 1.0, step=1e-3)
    p = torch.softmax((q[:, 0] @ k[:, 0].T), -1)
    errors: tuple[list[torch.Tensor], ...] = ([], [])
    for _ in range(200):
        w = p * (1 + 1e-3 * (2 * torch.rand(p.shape, dtype=torch.float64) - 1))
        errors[0].append((w / w.sum(-1, keepdim=True)) @ v[:, 0] - exact[:, 0])
        errors[1].append(w @ v[:, 0] - exact[:, 0])
    ratio = torch.maximum(*(torch.stack(e).std(0) for e in errors)) / noise[:, 0]
    assert 0.8 < float(ratio.min()) < float(ratio.max()) < 1.25


def space(*spans: tuple[int, int, int]) -> RowSpace:
    return RowSpace(0, "tokens", 0, tuple(Segment(r, p, n, 0) for r, p, n in spans))


def test_a_cache_is_put_together_and_gaps_are_said() -> None:
    past, x = Past(("key",)), torch.arange(12.0).reshape(12, 1)
    past.write(space((0, 0, 3), (1, 0, 2)), {"key": x[:5]})
    past.write(space((0, 3, 1), (1, 4, 1)), {"key": x[5:7]})
    view = past.view(space((0, 3, 1), (1, 4, 1)))
    found = list(view.requests())
    assert [(at.tolist(), pos.tolist(), held["key"].flatten().tolist()) for at, pos, held in found] == [
        ([0], [3], [0.0, 1.0, 2.0, 5.0])
    ]
    assert view.why == INCOMPLETE
    past.write(space((0, 2, 2)), {"key": x[8:10]})  # computed again
    (_, _, held), *_ = past.view(space((0, 3, 1))).requests()
    assert held["key"].flatten().tolist() == [0.0, 1.0, 8.0, 9.0]


@pytest.mark.parametrize("causal", [True, False])
def test_heads_and_queries_in_blocks_give_the_same(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(n, h, 8, generator=g).double() for n, h in ((7, 6), (20, 3), (20, 3)))
    more = {
        "slopes": alibi_slopes(6), "sinks": torch.randn(6, generator=g).double(), "step": 2.0**-9, "window": 9,
        "score_noise": torch.rand(6, 7, 20, generator=g).double() * 1e-3,
    }  # fmt: skip
    seen = torch.arange(13, 20) if causal else None
    if not causal:
        more = {"hidden": torch.rand(7, 20, generator=g) < 0.3, "step": 2.0**-9}
    whole = attend(q, k, v, 0.3, seen, **more)
    monkeypatch.setattr(attention, "_KEYS", 2 * 20 * 8)
    monkeypatch.setattr(attention, "_SCORES", 2 * 20 * 3)
    for a, b in zip(attend(q, k, v, 0.3, seen, **more), whole, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
