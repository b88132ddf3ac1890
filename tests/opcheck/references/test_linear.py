"""Products against torch's, over ranks and behind lm_head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, run, same, value

from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references import quantised
from vllm_accprobe.opcheck.references.linear import column, in_blocks

draw = drawer(5)


@pytest.mark.parametrize(
    "cls", ["ColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear", "Linear", "GateLinear"]
)
def test_products_by_torch(cls: str) -> None:
    x, w, b = draw(3, 8), draw(5, 8), draw(5)
    same(value(cls, {"x": x}, params={"weight": w, "bias": b}), F.linear(x, w, b))


def test_a_row_parallel_sum_needs_all_ranks() -> None:
    x, w, b = draw(3, 8), draw(5, 8), draw(5)
    calls = [
        Call("t", "RowParallelLinear", {"input_": x_part}, params={"weight": w_part, "bias": b},
             attrs={"tp_size": 2, "tp_rank": k})
        for k, (x_part, w_part) in enumerate(zip(x.chunk(2, 1), w.chunk(2, 1), strict=True))
    ]  # fmt: skip
    attrs = {"tp_size": 2, "tp_rank": 0, "reduce_results": True}
    same(value("RowParallelLinear", {"input_": x}, attrs=attrs, extra={"ranks": calls}), F.linear(x, w, b))
    with pytest.raises(Declined, match="not all of them"):
        run("RowParallelLinear", {"input_": x}, attrs=attrs, extra={"ranks": calls[:1]})
    alone = value("RowParallelLinear", {"input_": x[:, :4]}, attrs={**attrs, "reduce_results": False, "tp_rank": 1},
                  params={"weight": w[:, :4], "bias": b})  # fmt: skip
    same(alone, x[:, :4] @ w[:, :4].T)


def test_a_weight_of_another_shape_is_declined() -> None:
    with pytest.raises(Declined, match="does not fit"):
        run("Linear", {"input": draw(2, 8)}, params={"weight": draw(5, 7)})


def test_logits_are_capped_and_scaled() -> None:
    z = draw(2, 7) * 30
    found = value("LogitsProcessor", {}, z, attrs={"scale": 0.5}, config={"final_logit_softcapping": 30.0},
                  extra={"lm_head": z})  # fmt: skip
    same(found, 0.5 * 30 * torch.tanh(z / 30))


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
