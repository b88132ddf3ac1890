"""vLLM's own short convolutions, whose weight is packed. Their formula: opcheck/samples/recurrent.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict
from opcheck.samples.sample import Draw, made

from vllm_accprobe.opcheck.references.recurrent import in_order


def conv_kernels() -> Any:
    """vLLM's CPU kernels."""
    pytest.importorskip("vllm")
    import vllm._custom_ops  # noqa: F401
    from vllm.platforms import current_platform  # noqa: F401

    if not hasattr(torch.ops._C, "causal_conv1d_weight_pack") or not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's kernels for packed weights are not here")
    return torch.ops._C


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_a_packed_weight_is_put_in_order(blocks: int) -> None:
    w = torch.from_numpy(np.random.default_rng(blocks).normal(size=(64 * blocks, 4))).bfloat16()
    packed = conv_kernels().causal_conv1d_weight_pack(w)
    assert not torch.equal(packed, w)
    assert torch.equal(in_order(packed), w)


@pytest.mark.parametrize("seed", range(2))
def test_vllms_own_kernels_with_a_packed_weight(seed: int) -> None:
    """Forward and update as they are, and with the weight as it was before it was packed, which is a wrong kernel's."""
    kernels, draw = conv_kernels(), Draw(seed)
    d, lengths = 64 * draw.below(1, 4), draw.rng.integers(1, 9, 3)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    x, w, bias, token = draw(int(ends[-1]), d).T, draw(d, 4), draw(d), draw(3, d)
    states, packed = draw(6, 3, d).transpose(1, 2), kernels.causal_conv1d_weight_pack(w)
    places, begun = torch.tensor([4, 1, 3], dtype=torch.int32), torch.tensor([True, False, True])
    after = states.clone(memory_format=torch.preserve_format)
    mine = kernels.causal_conv1d_fwd_cpu(x, packed, bias, after, ends, places, begun, True, -1, True)
    later = states.clone(memory_format=torch.preserve_format)
    update = kernels.causal_conv1d_update_cpu(token.clone(), later, packed, bias, True, None, places, -1, True)
    for name, args, outputs in (
        ("fwd", (x, packed, bias, states, ends, places, begun, True, -1), {"output.0": mine, "inplace.input.3": after}),
        ("update", (token, states, packed, bias, True, None, places, -1),
         {"output.0": update, "inplace.input.1": later}),
    ):  # fmt: skip
        op = f"torch.ops._C.causal_conv1d_{name}_cpu.default"
        right, wrong = (made(op, *args, is_packed, outputs=outputs).call for is_packed in (True, False))
        assert [verdict(right, role, y).passed for role, y in outputs.items()] == [True, True]
        assert not verdict(wrong, "output.0", outputs["output.0"]).passed
