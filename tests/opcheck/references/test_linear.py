"""Products and shared parameters: what is made once, in blocks or by columns is what is made for each call at once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, evaluated, same

from vllm_accprobe.opcheck.reference import Call, Expected, Params
from vllm_accprobe.opcheck.references import aten, quantised
from vllm_accprobe.opcheck.references.aten import Widened
from vllm_accprobe.opcheck.references.linear import column, in_blocks, looked_up

draw = drawer(5)


@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (8, 24), (2, 5, 24), (0, 24), (24,)])
def test_rows_of_zeros_that_fill_a_block_are_not_seen(shape: tuple[int, ...]) -> None:
    x, right = draw(*shape), draw(24, 7)
    found = in_blocks(x, right)
    assert found.shape == (x @ right).shape
    torch.testing.assert_close(found, x @ right, rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_that_is_widened_by_columns_gives_the_same(dtype, monkeypatch):
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


def _same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for role in a:
        for name in ("value", "noise", "bound"):
            x, y = getattr(a[role], name), getattr(b[role], name)
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x, y)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_products_of_a_shared_weight(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(130, 96, generator=generator).bfloat16()
    params = Params()
    shared = params.share("weight", lambda: weight.T)
    for _ in range(3):  # the second and the third from what is kept
        x = torch.randn(rows, 96, generator=generator).bfloat16()
        y = x @ weight.T
        made = Call("tap", "aten.mm.default", args=(x, shared), outputs={"output.0": y}, params=params)
        _same(evaluated(made), evaluated(Call("tap", "aten.mm.default", args=(x, weight.T), outputs={"output.0": y})))


def test_the_signs_follow_from_all_lengths_before() -> None:
    weight, params = torch.randn(64, 64), Params()
    shared = params.share("weight", lambda: weight)
    moved = []
    for rows in (2, 5, 2):
        widened = Widened(
            Call("tap", "aten.mm.default", args=(), params=params), aten.of("aten.mm.default"), torch.float64, None
        )
        widened.moved(torch.randn(rows, 64))
        moved.append(widened.moved(shared))
    assert moved[0] is moved[2]
    assert not torch.equal(moved[0], moved[1])
    assert (moved[0] / weight - 1.0).abs().max() <= 2.0**-23


def test_what_an_operator_writes_to_is_its_own() -> None:
    total, params = torch.ones(4, 4), Params()
    shared = params.share("total", lambda: total)
    for _ in range(2):
        call = Call("tap", "aten.add_.Tensor", args=(shared, torch.ones(4, 4)), params=params,
                    outputs={"output.0": torch.full((4, 4), 2.0)})  # fmt: skip
        assert torch.equal(evaluated(call)["output.0"].value, torch.full((4, 4), 2.0).double())
    assert torch.equal(total, torch.ones(4, 4))


def test_what_is_too_large_is_made_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_accprobe.opcheck.reference._KEPT", 12)  # bytes
    params, make = Params(), lambda: torch.zeros(2)
    small = params.once("b", make)
    assert params.once("b", make) is small
    assert params.once("a", make) is not params.once("a", make)
    assert params.share("a", make) is not params.share("a", make)
    assert not params.shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_of_a_table_before_they_are_made_wide(dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 8).to(dtype), torch.tensor([3, 49, 0, 60])
    wide = table.double()
    assert torch.equal(looked_up(ids, table), torch.cat((wide[ids[:3]], torch.zeros(1, 8, dtype=torch.float64))))
    assert torch.equal(looked_up(ids, table, 3)[0], wide[0])
