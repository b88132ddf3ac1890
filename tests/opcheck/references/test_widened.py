"""What is made once of a shared parameter is, to the bit, what is made for each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_accprobe.opcheck.reference import _KEPT, Call, Params
from vllm_accprobe.opcheck.references import aten
from vllm_accprobe.opcheck.references.aten import Widened
from vllm_accprobe.opcheck.references.linear import column, looked_up
from vllm_accprobe.opcheck.registry import default_references


def _expected(call: Call) -> dict[str, Any]:
    found = default_references().evaluate(call)
    assert isinstance(found, dict), found
    return found


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
        _same(_expected(made), _expected(Call("tap", "aten.mm.default", args=(x, weight.T), outputs={"output.0": y})))


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
        assert torch.equal(_expected(call)["output.0"].value, torch.full((4, 4), 2.0).double())
    assert torch.equal(total, torch.ones(4, 4))


def test_a_modules_weight_is_made_once_and_is_the_same() -> None:
    weight = torch.randn(40, 32).bfloat16()
    params = Params({"weight": weight})
    for _ in range(2):
        x = torch.randn(3, 32).bfloat16()
        outputs = {"output.0": x @ weight.T}
        kept = column(Call("tap", "Linear", {"input": x}, params=params, outputs=outputs))
        _same(kept, column(Call("tap", "Linear", {"input": x}, params={"weight": weight}, outputs=outputs)))
    call = Call("tap", "Linear", params=params)
    assert call.param("weight") is call.param("weight")


def test_what_is_too_large_is_made_for_each_call() -> None:
    class Huge(torch.Tensor):
        def numel(self) -> int:
            return _KEPT

    params, made = Params(), []

    def make() -> Any:
        made.append(torch.zeros(2).as_subclass(Huge))
        return made[-1]

    assert params.once("a", make) is not params.once("a", make)
    assert params.share("a", make) is not params.share("a", make)
    assert not params.shared
    small = params.once("b", lambda: torch.zeros(2))
    assert params.once("b", make) is small


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_of_a_table_before_they_are_made_wide(dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 8).to(dtype), torch.tensor([3, 49, 0, 60])
    wide = table.double()
    assert torch.equal(looked_up(ids, table), torch.cat((wide[ids[:3]], torch.zeros(1, 8, dtype=torch.float64))))
    assert torch.equal(looked_up(ids, table, 3)[0], wide[0])
