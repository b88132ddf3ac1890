"""W8A8 products whose sums were cut off in 16 bits are named. The formulas: opcheck/samples/scaled.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from family_verdict import verdict
from opcheck.samples.sample import Draw, made, wide
from reference_calls import evaluated

from vllm_accprobe.opcheck.reference import Call


def summed(a: np.ndarray, b: np.ndarray, cut: bool) -> np.ndarray:
    """a [m, k], b [k, n]: two products of (a + 128) b at a time, as a processor without VNNI adds them."""
    pairs = ((a + 128)[:, :, None] * b).reshape(len(a), -1, 2, b.shape[1]).sum(2)
    return (pairs.clip(-32768, 32767) if cut else pairs).sum(1) - 128 * b.sum(0)


@pytest.mark.parametrize("outputs", [9, 64])
@pytest.mark.parametrize("cut", [True, False])
def test_a_processor_that_cuts_sums_off_in_16_bits_is_named(cut: bool, outputs: int) -> None:
    """Another error is not named so."""
    d = Draw(5)
    a, b = d.ints(-127, 128, 6, 64, dtype=torch.int8), d.ints(-127, 128, 64, outputs, dtype=torch.int8)
    mine, right = (torch.from_numpy(summed(wide(a), wide(b), c) * 0.02 * 0.03).bfloat16() for c in (cut, False))
    mine = mine if cut else (mine.double() * 1.2).bfloat16()
    sums = b.double().sum(0, keepdim=True).float() * 0.03  # given to every call, and without a zero point not used
    params = {"weight": b.T.contiguous(), "weight_scale": torch.full((outputs, 1), 0.03)}
    args = (mine, a, torch.full((6, 1), 0.02), None, sums, None, 0)
    call = made("torch.ops._C.onednn_scaled_mm", *args, params=params, outputs={"inplace.input.0": mine}).call
    assert ("16 bits" in evaluated(call)["inplace.input.0"].note) == cut
    assert not verdict(call, "inplace.input.0", mine).passed
    assert verdict(call, "inplace.input.0", right).passed


@pytest.mark.parametrize("cls", ["ColumnParallelLinear", "RowParallelLinear"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cut", [True, False])
def test_a_module_has_the_note_of_its_operator(cut: bool, bias: bool, cls: str) -> None:
    """The module has x and not its codes. Positive weights, so that most sums end at 32,767; right ones pass."""
    d = Draw(7)
    x, extra = d.between(0.2, 1.0, 6, 64, dtype=d.dtype), d.rng.normal(size=9) * bias
    b = d.rng.integers(60, 128, (9, 64))
    step = np.abs(wide(x)).max(1) / 127
    y = summed(np.round(wide(x) / step[:, None]), b.T, cut) * step[:, None] * 0.03 + extra
    params = {"weight": torch.from_numpy(b).to(torch.int8), "weight_scale": torch.full((9, 1), 0.03)}
    params |= {"bias": torch.from_numpy(extra).float()} if bias else {}
    for factor in (1.0, 1.3):  # another error is not named so
        mine = torch.from_numpy(y * factor).bfloat16()
        call = Call("x", cls, {"input_": x}, params=params, outputs={"output.0": mine})
        assert ("16 bits" in evaluated(call)["output.0"].note) == (cut and factor == 1.0)
        assert factor != 1.0 or verdict(call, "output.0", mine).passed != cut
