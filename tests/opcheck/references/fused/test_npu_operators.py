"""Fused operators' arguments, spellings and gradients, against differences and what a tool recorded."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from opcheck.samples.fused import CASES, LISTED, UNDIFFERENTIATED, fused_call as call_of, ran
from reference_calls import TABLE, evaluated, verdict

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import gradients
from vllm_accprobe.opcheck.references.fused.fused_calls import FusedArguments, fused_kernel, parsed, spelled


def differentiated(call: Call, up: torch.Tensor) -> Any:
    return gradients.exact_gradients(call, lambda wide: gradients.differentiated(TABLE, wide), {"output.0": up})


def test_each_operator_of_msprobe_s_list_has_all_three() -> None:
    """A definition, a wrong kernel, and gradients; of attention in test_npu_attention.py."""
    assert len(set(LISTED)) == 15
    assert set(LISTED) - set(CASES) == {"npu_fusion_attention"}
    for name in set(LISTED) & set(CASES):
        assert CASES[name].wrong, name
        assert bool(CASES[name].gradients) != (name in UNDIFFERENTIATED), name


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.gradients])
def test_gradients_by_differences(name: str) -> None:
    """<gradient, direction> against a central difference of numpy's definition, in float64."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(5)
    call = call_of(name, 3, torch.float64)
    exact = ran(case.right, call.args, dict(call.kwargs))
    up = torch.randn(exact[0].shape, generator=generator, dtype=torch.float64)

    found = differentiated(call, up)
    assert set(found) >= set(case.gradients)
    step = 1e-6
    for role in case.gradients:
        at = int(role.removeprefix("input."))
        along = torch.randn(call.args[at].shape, generator=generator, dtype=torch.float64)

        def moved(size: float, at: int = at, along: Any = along) -> float:
            args = list(call.args)
            args[at] = args[at] + size * along
            return float((ran(case.right, tuple(args), dict(call.kwargs))[0] * up.numpy()).sum())

        difference = (moved(step) - moved(-step)) / (2 * step)
        assert float((found[role].value * along).sum()) == pytest.approx(difference, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.gradients])
def test_a_recorded_gradient_passes_and_a_wrong_one_fails(name: str) -> None:
    """As msprobe records it: the exact one rounded passes; a quarter more, and columns in another order, do not."""
    dtype = CASES[name].dtypes[0]
    call = call_of(name, 3, dtype, "backward.NPU.{}")
    first = ran(CASES[name].right, call.args, dict(call.kwargs))[0]
    up = torch.randn(first.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    call = replace(call, extra={"up": {"output.0": up}})
    roles = {role.replace("input", "output"): call.args[int(role.removeprefix("input."))] for role in
             CASES[name].gradients}  # fmt: skip
    exact = evaluated(replace(call, outputs={r: torch.zeros_like(t) for r, t in roles.items()}))
    for role in roles:
        mine = exact[role].value.to(dtype)

        def passes(given: torch.Tensor, role: str = role) -> bool:
            return verdict(replace(call, outputs={role: given}), role, given).passed

        assert passes(mine)
        assert not passes((1.25 * mine.double()).to(dtype))
        assert not passes(mine.roll(1, -1))


BACKWARDS = {
    "npu_swiglu_backward": ("npu_swiglu", 1), "npu_fast_gelu_backward": ("npu_fast_gelu", 1),
    "npu_mish_backward": ("npu_mish", 1), "npu_gelu_backward": ("npu_gelu", 1),
    "npu_rotary_mul_backward": ("npu_rotary_mul", 3),
}  # fmt: skip
"""Operator → the forward that it belongs to, and how many gradients it gives."""


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_operator_gives_the_gradients_of_its_forward(name: str) -> None:
    """Which `test_gradients_by_differences` holds against numpy."""
    forward, count = BACKWARDS[name]
    call = call_of(forward, 2, torch.bfloat16)
    up = torch.randn(evaluated(call)["output.0"].value.shape, generator=torch.Generator().manual_seed(6)).bfloat16()
    exact = differentiated(call, up)
    found = evaluated(replace(call, cls=f"npu.{name}.default", args=(up, *call.args)))
    assert set(found) == {f"output.{k}" for k in range(count)}
    for k in range(count):
        torch.testing.assert_close(found[f"output.{k}"].value, exact[f"input.{k}"].value)
    wrong = (1.25 * found["output.0"].value).bfloat16()
    given = replace(call, cls=f"npu.{name}", args=(up, *call.args), outputs={"output.0": wrong})
    assert not verdict(given, "output.0", wrong).passed


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_cross_entropy_s_backward_by_autograd(reduction: str) -> None:
    call = call_of("npu_cross_entropy_loss", 4, torch.float64)
    x, target, weight, _, ignored, smooth = call.args
    loss = replace(call, args=(x, target, weight, reduction, ignored, smooth))
    found = evaluated(loss)
    up = torch.randn(found["output.0"].value.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    exact = differentiated(loss, up)
    own = Call("t", "NPU.npu_cross_entropy_loss_backward", args=(up, found["output.1"].value, target, weight),
               kwargs={"reduction": reduction, "ignore_index": ignored, "label_smoothing": smooth})  # fmt: skip
    torch.testing.assert_close(evaluated(own)["output.0"].value, exact["input.0"].value)


def test_casts_pairs_of_rotations_and_the_second_router() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    cast = evaluated(Call("t", "NPU.npu_dtype_cast", args=(x, torch.bfloat16), outputs={"output.0": x.bfloat16()}))
    assert torch.equal(cast["output.0"].value, x.bfloat16().double())
    rotary = call_of("npu_rotary_mul", 2, torch.float32)
    q, cos, sin = rotary.args
    both = evaluated(Call("t", "NPU.npu_apply_rotary_pos_emb", args=(q, 2 * q, cos, sin)))
    torch.testing.assert_close(both["output.0"].value, evaluated(rotary)["output.0"].value)
    torch.testing.assert_close(both["output.1"].value, 2 * both["output.0"].value)
    routed = evaluated(Call("t", "NPU.npu_moe_gating_top_k_softmax_v2", args=(x,), kwargs={"k": 3, "renorm": 1}))
    top = x.double().topk(3)
    torch.testing.assert_close(routed["output.0"].value, torch.softmax(top[0], -1))
    assert torch.equal(routed["output.1"].value, top[1])
    whole = evaluated(Call("t", "NPU.npu_moe_gating_top_k_softmax_v2", args=(x,), kwargs={"output_softmax": True}))
    torch.testing.assert_close(whole["output.2"].value, torch.softmax(x.double(), -1))


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
