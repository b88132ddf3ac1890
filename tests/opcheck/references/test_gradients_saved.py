"""Gradients against what autograd saved of the forward pass."""

from __future__ import annotations

import pytest
import torch

from vllm_accprobe.judge.floor import unit
from vllm_accprobe.opcheck.floors.output_rows import matrix, numbers
from vllm_accprobe.opcheck.floors.rounding import judge
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.gradients import by_torch, exact_gradients


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_torchs_own_softmax_backward_is_right(captured: bool, factor: float) -> None:
    """Of sharp rows it is off by what rounding their probabilities costs; a gradient with a scale is still wrong."""
    generator = torch.Generator().manual_seed(0)
    x = (8 * torch.randn((64, 512), generator=generator)).bfloat16()
    up = torch.randn((64, 512), generator=generator).bfloat16()
    leaf = x.clone().requires_grad_()
    y = torch.softmax(leaf, -1)
    (mine,) = torch.autograd.grad(y, leaf, up)
    saved = {"output.0": y.detach()} if captured else None
    call = Call("m", "aten._softmax", args=(x, -1, False))
    exact = exact_gradients(call, by_torch, {"output.0": up}, saved)["input.0"]
    value, given, noise = (matrix(numbers(t), 0) for t in (exact.value, (factor * mine), exact.noise))
    found = judge(value, given, "bfloat16", noise=noise, common=unit("bfloat16"))
    assert found.passed == (factor == 1.0)
