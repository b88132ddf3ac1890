"""Norms against torch's and by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from reference_calls import drawer, run, same, value

draw = drawer(5)


def test_rms_norm_by_torch_and_with_a_residual() -> None:
    x, r, w = draw(5, 16), draw(5, 16), draw(16)
    attrs = {"variance_epsilon": 1e-3}
    same(value("RMSNorm", {"x": x}, attrs=attrs, params={"weight": w}), F.rms_norm(x, (16,), w, 1e-3))
    both = run("RMSNorm", {"x": x, "residual": r}, attrs=attrs, params={"weight": w})
    same(both["output.0"].value, F.rms_norm(x + r, (16,), w, 1e-3))
    same(both["output.1"].value, x + r)


def test_rms_norm_by_hand() -> None:
    found = value("RMSNorm", {"x": torch.tensor([[3.0, 4.0]])}, attrs={"eps": 0.0}, params={"weight": torch.ones(2)})
    same(found, torch.tensor([[3.0, 4.0]], dtype=torch.float64) / math.sqrt(12.5))


def test_gemma_weighs_with_one_more() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    theirs = GemmaRMSNorm(8, 1e-6).double()
    theirs.weight.data = draw(8)
    x = draw(3, 8)
    mine = value("GemmaRMSNorm", {"x": x}, attrs={"variance_epsilon": 1e-6}, params={"weight": theirs.weight.detach()})
    torch.testing.assert_close(mine, theirs(x).detach().double(), rtol=2e-6, atol=1e-6)  # theirs works in float32


def test_layer_and_group_norm_by_torch() -> None:
    x, w, b = draw(4, 6, 10), draw(10), draw(10)
    params = {"weight": w, "bias": b}
    same(value("LayerNorm", {"input": x}, attrs={"eps": 1e-5, "normalized_shape": [10]}, params=params),
         F.layer_norm(x, (10,), w, b, 1e-5))  # fmt: skip
    params = {"weight": draw(6), "bias": draw(6)}
    same(value("GroupNorm", {"input": x}, attrs={"eps": 1e-5, "num_groups": 3}, params=params),
         F.group_norm(x, 3, params["weight"], params["bias"], 1e-5))  # fmt: skip
