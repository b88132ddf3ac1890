"""Products against torch's, over ranks and behind lm_head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, same

from vllm_accprobe.opcheck.reference import Call, Expected
from vllm_accprobe.opcheck.references import quantised
from vllm_accprobe.opcheck.references.linear import column, in_blocks

draw = drawer(5)


@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (8, 24), (2, 5, 24), (0, 24), (24,)])
def test_rows_of_zeros_that_fill_a_block_are_not_seen(shape: tuple[int, ...]) -> None:
    x, right = draw(*shape), draw(24, 7)
    found = in_blocks(x, right)
    assert found.shape == (x @ right).shape
    torch.testing.assert_close(found, x @ right, rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_that_is_widened_by_columns_gives_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    x, w, b = draw(11, 24).to(dtype), draw(50, 24).to(dtype), draw(50).to(dtype)

    def expected() -> Expected:
        params, outputs = {"weight": w, "bias": b}, {"output.0": F.linear(x, w, b)}
        return column(Call("t", "Linear", {"input": x}, params=params, outputs=outputs))["output.0"]

    whole = expected()
    monkeypatch.setattr(quantised, "WIDE", 1)
    monkeypatch.setattr(quantised, "COLUMNS", 24 * 7)
    parts = expected()
    same(parts.value, whole.value)
    if dtype == torch.float32:
        assert torch.allclose(parts.noise, whole.noise, rtol=1e-5)
        assert torch.allclose(parts.bound, whole.bound, rtol=1e-5)
    else:  # an upper bound of what sums leave, which is far below what the last rounding does
        assert bool((parts.noise >= whole.noise * (1 - 1e-6)).all())
        assert bool((parts.bound >= whole.bound * (1 - 1e-6)).all())
        assert bool((parts.noise <= 2.0 * whole.noise).all())
