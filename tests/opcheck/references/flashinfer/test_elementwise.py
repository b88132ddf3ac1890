"""Norms that add a residual in place, against their definition element by element (others: formats/test_flashinfer)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from family_verdict import verdict
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined


@pytest.mark.parametrize("name", ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm"])
@pytest.mark.parametrize("fault", [False, True])
def test_added_in_place(name: str, fault: bool) -> None:
    g = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(6, 40, generator=g).bfloat16() for _ in range(2))
    weight = torch.rand(40, generator=g).bfloat16() + 0.5
    normed, total = np.zeros((6, 40)), x.double().numpy() + residual.double().numpy()
    for r in range(6):
        mean = sum(v * v for v in total[r]) / (39 if fault else 40)
        for c in range(40):
            w = float(weight[c]) + (1.0 if "gemma" in name else 0.0)
            normed[r, c] = total[r, c] / math.sqrt(mean + 1e-5) * w
    mine = {f"inplace.input.{n}": torch.from_numpy(t).bfloat16() for n, t in enumerate((normed, total))}
    call = Call("x", f"flashinfer.{name}", args=(x, residual, weight, 1e-5), outputs=mine)
    assert verdict(call, "inplace.input.0", mine["inplace.input.0"]).passed == (not fault)
    assert verdict(call, "inplace.input.1", mine["inplace.input.1"]).passed
    alone = Call("x", f"flashinfer.{name}", args=(x, residual, weight), outputs={"output.0": x})
    found = TABLE.evaluate(alone)
    assert isinstance(found, Declined)
    assert "in place" in found.reason
