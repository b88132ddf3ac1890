"""Attention against torch's and by hand, over rows of several requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, evaluated

from vllm_accprobe.dump.schema import RowSpace, Segment
from vllm_accprobe.opcheck.calls.history import INCOMPLETE, Past
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import attention
from vllm_accprobe.opcheck.references.attention import alibi_slopes, attend

draw = drawer(9)


def sdpa(q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    """torch's own, on [rows, heads, d]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **more).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (4, 1)])
def test_causal_heads_and_windows_by_torch(heads: int, kv: int, window: int | None) -> None:
    q, k, v = draw(3, heads, 8), draw(10, kv, 8), draw(10, kv, 5)
    positions = torch.tensor([2, 7, 9])
    mask = torch.arange(10)[None] <= positions[:, None]
    if window:
        mask &= torch.arange(10)[None] > positions[:, None] - window
    got, *_ = attend(q, k, v, 0.3, positions, window=window)
    torch.testing.assert_close(got, sdpa(q, k, v, mask, scale=0.3), rtol=1e-12, atol=1e-12)


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


def attention_call(**attrs: Any) -> tuple[Call, torch.Tensor]:
    """Request 0: positions 4 and 5 of 6; request 1: all 3. Two heads of 4, one key head; and what torch makes of it."""
    k, v, q = {0: draw(6, 1, 4), 1: draw(3, 1, 4)}, {0: draw(6, 1, 4), 1: draw(3, 1, 4)}, draw(5, 2, 4)
    past = Past(("key", "value"))
    past.write(space((0, 0, 4)), {"key": k[0][:4], "value": v[0][:4]})
    here = space((0, 4, 2), (1, 0, 3))
    inputs = {"key": torch.cat((k[0][4:], k[1])), "value": torch.cat((v[0][4:], v[1])), "query": q}
    past.write(here, inputs)
    window = attrs.get("sliding_window", 99)
    out = []
    for r, rows, positions in ((0, q[:2], [4, 5]), (1, q[2:], [0, 1, 2])):
        at, keys = torch.tensor(positions)[:, None], torch.arange(len(k[r]))[None]
        out.append(sdpa(rows, k[r], v[r], (keys <= at) & (keys > at - window), scale=0.7))
    theirs = torch.cat(out).reshape(5, 8)
    attrs = {"num_heads": 2, "num_kv_heads": 1, "head_size": 4, **attrs}
    inputs = {n: t.reshape(5, -1) for n, t in inputs.items()}
    call = Call("t.attn", "Attention", inputs, attrs=attrs, parent={"scaling": 0.7}, outputs={"output.0": theirs},
                extra={"cache": past.view(here)})  # fmt: skip
    return call, theirs


@pytest.mark.parametrize("attrs", [{}, {"sliding_window": 3}, {"sliding_window": [2, -1]}])
def test_requests_in_one_batch_do_not_see_each_other(attrs: dict[str, Any]) -> None:
    call, _ = attention_call(**({} if not attrs else {"sliding_window": 3}))
    call = Call(**{**call.__dict__, "attrs": {**call.attrs, **attrs}})
    found = evaluated(call)["output.0"]
    torch.testing.assert_close(found.value, call.outputs["output.0"], rtol=1e-12, atol=1e-12)
    assert bool(found.rows.all())


def test_encoders_keep_to_their_runs() -> None:
    q, k, v = draw(1, 7, 2, 4), draw(1, 7, 2, 4), draw(1, 7, 2, 4)
    theirs = torch.cat([sdpa(q[0, a:b], k[0, a:b], v[0, a:b], None) for a, b in ((0, 3), (3, 7))])[None]
    inputs = {"query": q, "key": k, "value": v, "cu_seqlens": torch.tensor([0, 3, 7])}
    attrs = {"num_heads": 2, "num_kv_heads": 2, "head_size": 4, "scale": 0.5}
    call = Call("t", "MMEncoderAttention", inputs, attrs=attrs, outputs={"output.0": theirs})
    torch.testing.assert_close(evaluated(call)["output.0"].value, theirs, rtol=1e-12, atol=1e-12)
    short = Call("t", "MMEncoderAttention", {**inputs, "cu_seqlens": torch.tensor([0, 3])}, attrs=attrs,
                 outputs={"output.0": theirs})  # fmt: skip
    with pytest.raises(Declined, match="not all rows"):
        evaluated(short)


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
