"""Latent attention against torch's, made explicit or absorbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, evaluated

from vllm_accprobe.dump.schema import RowSpace, Segment
from vllm_accprobe.opcheck.calls.history import Past
from vllm_accprobe.opcheck.reference import Call

draw = drawer(9)


def sdpa(q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    """torch's own, on [rows, heads, d]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **more).transpose(0, 1)


def space(*spans: tuple[int, int, int]) -> RowSpace:
    return RowSpace(0, "tokens", 0, tuple(Segment(r, p, n, 0) for r, p, n in spans))


@pytest.mark.parametrize("absorbed", [True, False])
def test_latent_attention_by_torch(absorbed: bool) -> None:
    """Explicit keys and values from kv_b_proj, handed to torch's attention."""
    heads, nope, rope, latent, width, n = 2, 6, 4, 10, 5, 8
    w = draw(heads * (nope + width), latent)
    q, c, pe = draw(n, heads, nope + rope), draw(n, latent), draw(n, 1, rope)
    kv = (c @ w.T).reshape(n, heads, nope + width)
    k = torch.cat((kv[..., :nope], pe.expand(-1, heads, -1)), -1)
    theirs = sdpa(q, k, kv[..., nope:], torch.ones(n, n, dtype=torch.bool).tril(), scale=0.2).reshape(n, -1)
    past, here = Past(("kv_c_normed", "k_pe")), space((0, 0, n))
    inputs = {"q": q, "kv_c_normed": c, "k_pe": pe}
    past.write(here, inputs)
    parts = w.reshape(heads, nope + width, latent)
    params = {"W_UK_T": parts[:, :nope], "W_UV": parts[:, nope:].transpose(1, 2)} if absorbed else {}
    call = Call("t", "MLAAttention", inputs, params=params, attrs={"num_heads": heads, "scale": 0.2},
                outputs={"output.0": theirs}, extra={"cache": past.view(here), "kv_b_proj": w})  # fmt: skip
    torch.testing.assert_close(evaluated(call)["output.0"].value, theirs, rtol=1e-12, atol=1e-12)
