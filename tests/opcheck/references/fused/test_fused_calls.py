"""Arguments of fused operators by place and by keyword, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.fused.fused_calls import FusedArguments, fused_kernel, parsed, spelled

SCHEMA = "npu_x(self/input, dim=-1, mode='half', out=None)"


def given(*args: object, **kwargs: object) -> FusedArguments:
    return FusedArguments(parsed(SCHEMA)[1], Call("t", "NPU.npu_x", args=args, kwargs=kwargs))


def test_by_place_and_by_either_name() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    for g in (given(x, 3), given(input=x, dim=3), given(x, dim=torch.tensor(3))):
        assert g.tensor("self").dtype == torch.float64
        assert (g.number("dim"), g["mode"], g.maybe("out")) == (3.0, "half", None)
    assert g.unit("self") == 2.0**-8
    assert spelled("npu_x")[:3] == ("npu_x", "NPU.npu_x", "torch.ops.npu.npu_x")


@pytest.mark.parametrize(("args", "kwargs", "why"), [
    ((), {}, "argument self was not captured"),
    ((1, 2, 3, 4, 5), {}, "5 arguments, where its schema has 4"),
    ((1,), {"other": 2}, "argument other is not in its schema"),
])  # fmt: skip
def test_what_does_not_fit_is_declined(args: tuple[int, ...], kwargs: dict[str, int], why: str) -> None:
    with pytest.raises(Declined, match=why):
        given(*args, **kwargs)


def test_values_of_another_kind_are_declined() -> None:
    g = given(torch.ones(2).int(), "x", mode=[1.5])
    for ask in (lambda: g.tensor("self"), lambda: g.stored("dim"), lambda: g.number("dim"), lambda: g.integers("mode")):
        with pytest.raises(Declined):
            ask()


def test_a_device_without_torch_npu_has_the_formula_in_float32() -> None:
    x = torch.randn(4, 8).bfloat16()
    made = fused_kernel(Call("t", "NPU.npu_swiglu", args=(x,)))["output.0"]
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made, (torch.nn.functional.silu(x[:, :4].float()) * x[:, 4:].float()).bfloat16())
    with pytest.raises(Declined, match="torch_npu is not installed"):
        fused_kernel(Call("t", "NPU.npu_unheard_of", args=(x,)))
