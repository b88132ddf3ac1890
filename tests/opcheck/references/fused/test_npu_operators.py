"""Every fused operator: against numpy's definition, its gradients against differences, and wrong kernels of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import family_verdict
import numpy as np
import pytest
import torch
from fused_cases import CASES, LISTED, UNDIFFERENTIATED, drawn, ran
from reference_calls import TABLE, evaluated

from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references import gradients

SPELLINGS = ("NPU.{}", "torch.ops.npu.{}", "npu.{}.default", "npu::{}", "torch_npu.{}", "aten.{}", "VF.{}", "{}")
FLOAT32 = ("output.1", "output.2")
"""Outputs that kernels give in float32 where they are a norm's root or mean."""


def call_of(name: str, seed: int, dtype: torch.dtype, spelling: str = "NPU.{}") -> Call:
    args, kwargs = drawn(name, seed, dtype)
    return Call("tap", spelling.format(name), args=args, kwargs=kwargs)


def stored(name: str, role: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A kernel's result in the dtype that the operator has there."""
    if value.dtype.kind in "iub":
        return torch.from_numpy(np.ascontiguousarray(value))
    wide = ("norm" in name and role in FLOAT32) or (name == "npu_deep_norm" and role == "output.0")
    back = name.endswith("backward") or name == "npu_deep_norm"
    keeps = wide and not (back and role == FLOAT32["rms" not in name and "linear" not in name])
    return torch.from_numpy(np.ascontiguousarray(value)).to(torch.float32 if keeps else dtype)


def pairs() -> Iterator[Any]:
    for name, case in CASES.items():
        for dtype in case.dtypes:
            yield pytest.param(name, dtype, id=f"{name}-{dtype}")


def test_each_operator_of_msprobe_s_list_has_all_three() -> None:
    """A definition, a wrong kernel, and gradients; of attention in test_npu_attention.py."""
    assert len(set(LISTED)) == 15
    assert set(LISTED) - set(CASES) == {"npu_fusion_attention"}
    for name in set(LISTED) & set(CASES):
        assert CASES[name].wrong, name
        assert bool(CASES[name].gradients) != (name in UNDIFFERENTIATED), name


@pytest.mark.parametrize(("name", "dtype"), list(pairs()))
def test_it_is_what_numpy_defines(name: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        call = call_of(name, seed, dtype)
        exact = ran(CASES[name].right, call.args, dict(call.kwargs), np.float64)
        made = tuple(stored(name, f"output.{k}", y, dtype) for k, y in enumerate(exact))
        found = evaluated(replace(call, outputs={f"output.{k}": t for k, t in enumerate(made)}))
        for k, y in enumerate(exact):
            expected = found[f"output.{k}"]
            rows = slice(None) if expected.rows is None else expected.rows.numpy()
            got = expected.value.numpy()
            assert got.shape == y.shape
            np.testing.assert_allclose(got[rows], y[rows], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "dtype"), list(pairs()))
def test_an_honest_kernel_passes_and_wrong_ones_fail(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    call = call_of(name, 7, dtype)

    def verdicts(kernel: Any) -> dict[str, bool]:
        made = ran(kernel, call.args, dict(call.kwargs), np.float32)
        outputs = {f"output.{k}": stored(name, f"output.{k}", y, dtype) for k, y in enumerate(made)}
        found = evaluated(replace(call, outputs=outputs))
        assert set(found) >= set(outputs)
        return {role: family_verdict.verdict(replace(call, outputs=outputs), role, outputs[role]).passed
                for role in outputs}  # fmt: skip

    assert set(verdicts(case.right).values()) == {True}
    for fault, kernel in case.wrong.items():
        found = verdicts(kernel)
        assert not any(found[role] for role in case.only), f"{fault} is not seen: {found}"


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.gradients])
def test_gradients_by_differences(name: str) -> None:
    """<gradient, direction> against a central difference of numpy's definition, in float64."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(5)
    call = call_of(name, 3, torch.float64)
    exact = ran(case.right, call.args, dict(call.kwargs), np.float64)
    up = torch.randn(exact[0].shape, generator=generator, dtype=torch.float64)

    found = gradients.exact_gradients(call, lambda wide: gradients.differentiated(TABLE, wide), {"output.0": up})
    assert set(found) >= set(case.gradients)
    step = 1e-6
    for role in case.gradients:
        at = int(role.removeprefix("input."))
        along = torch.randn(call.args[at].shape, generator=generator, dtype=torch.float64)

        def moved(size: float, at: int = at, along: Any = along) -> float:
            args = list(call.args)
            args[at] = args[at] + size * along
            return float((ran(case.right, tuple(args), dict(call.kwargs), np.float64)[0] * up.numpy()).sum())

        difference = (moved(step) - moved(-step)) / (2 * step)
        assert float((found[role].value * along).sum()) == pytest.approx(difference, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", [name for name in LISTED if name in CASES])
def test_it_is_found_under_every_spelling(name: str, spelling: str) -> None:
    call = call_of(name, 1, torch.bfloat16, spelling)
    np.testing.assert_allclose(
        evaluated(call)["output.0"].value.numpy(), ran(CASES[name].right, call.args, dict(call.kwargs), np.float64)[0]
    )


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.gradients])
def test_a_recorded_gradient_passes_and_a_wrong_one_fails(name: str) -> None:
    """As msprobe records it: the exact one rounded passes; a quarter more, and columns in another order, do not."""
    dtype = CASES[name].dtypes[0]
    call = call_of(name, 3, dtype, "backward.NPU.{}")
    first = ran(CASES[name].right, call.args, dict(call.kwargs), np.float64)[0]
    up = torch.randn(first.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    call = replace(call, extra={"up": {"output.0": up}})
    roles = {role.replace("input", "output"): call.args[int(role.removeprefix("input."))] for role in
             CASES[name].gradients}  # fmt: skip
    exact = evaluated(replace(call, outputs={r: torch.zeros_like(t) for r, t in roles.items()}))
    for role in roles:
        mine = exact[role].value.to(dtype)

        def passes(given: torch.Tensor, role: str = role) -> bool:
            return family_verdict.verdict(replace(call, outputs={role: given}), role, given).passed

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
    exact = gradients.exact_gradients(call, lambda wide: gradients.differentiated(TABLE, wide), {"output.0": up})
    found = evaluated(replace(call, cls=f"npu.{name}.default", args=(up, *call.args)))
    assert set(found) == {f"output.{k}" for k in range(count)}
    for k in range(count):
        torch.testing.assert_close(found[f"output.{k}"].value, exact[f"input.{k}"].value)
    wrong = (1.25 * found["output.0"].value).bfloat16()
    given = replace(call, cls=f"npu.{name}", args=(up, *call.args), outputs={"output.0": wrong})
    assert not family_verdict.verdict(given, "output.0", wrong).passed


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_cross_entropy_s_backward_by_autograd(reduction: str) -> None:
    call = call_of("npu_cross_entropy_loss", 4, torch.float64)
    x, target, weight, _, ignored, smooth = call.args
    loss = replace(call, args=(x, target, weight, reduction, ignored, smooth))
    found = evaluated(loss)
    up = torch.randn(found["output.0"].value.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    exact = gradients.exact_gradients(loss, lambda wide: gradients.differentiated(TABLE, wide), {"output.0": up})
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
