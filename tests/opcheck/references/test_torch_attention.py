"""torch's own attention operators, within the roundings of their kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, evaluated

from vllm_accprobe.opcheck.floors.verdict import judge
from vllm_accprobe.opcheck.reference import Call, Declined

draw = drawer(9)
_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def flash(seed: int, n: int = 300, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Call:
    """A call of torch's kernel, two thirds of whose rows lie beyond the first block of keys."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 4, n, 64, generator=g).to(dtype) for _ in range(3))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, **how)
    return Call("a", _FLASH, args=(q, k, v, 0.0, True), kwargs=how, outputs={"output.0": out, "output.1": lse})


def worst(call: Call) -> list[float]:
    """Of both outputs, the worst measure over what it may be."""
    found = evaluated(call)
    verdicts = []
    for role, width in (("output.0", 64), ("output.1", 300)):
        e, mine = found[role], call.outputs[role]
        assert e.noise is not None
        verdicts.append(judge(e.value.reshape(-1, width), mine.double().reshape(-1, width),
                              str(mine.dtype).removeprefix("torch."), noise=e.noise.reshape(-1, width)))  # fmt: skip
    return [v.value / v.limit for v in verdicts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_torchs_own_kernels_are_within_their_roundings(seed: int, dtype: torch.dtype) -> None:
    assert max(worst(flash(seed, dtype=dtype))) < 0.9


@pytest.mark.parametrize(("factor", "least"), [(1.02, 1.5), (0.98, 1.5), (1.1, 8.0)])
def test_a_scale_that_is_off_shows(factor: float, least: float) -> None:
    wrong = flash(1, scale=factor / 8)
    call = Call("a", _FLASH, args=wrong.args, outputs=wrong.outputs)
    assert min(worst(call)) > least


def test_masks_shared_heads_and_overloads_of_torchs_operators() -> None:
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 9, 8), draw(2, 2, 9, 6)
    seen = draw(2, 1, 5, 9) < 0.5
    seen[..., 0] = True
    added = torch.where(seen, 0.25, -math.inf).double()
    for mask in (seen, added, None):
        exact = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
        call = Call("a", "aten.scaled_dot_product_attention.default", args=(q, k, v, mask),
                    kwargs={"scale": 0.3, "enable_gqa": True}, outputs={"output.0": exact})  # fmt: skip
        torch.testing.assert_close(evaluated(call)["output.0"].value, exact, rtol=1e-12, atol=1e-12)
    dropped = Call("a", "aten.scaled_dot_product_attention", args=(q, k, v, None, 0.1), outputs={"output.0": exact})
    with pytest.raises(Declined, match="random"):
        evaluated(dropped)
