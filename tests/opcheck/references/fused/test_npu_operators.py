"""Every fused operator: against numpy's definition, its gradients against differences, and wrong kernels of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import family_verdict
import numpy as np
import pytest
import torch
from fused_cases import CASES, drawn, ran
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
@pytest.mark.parametrize("name", ["npu_rms_norm", "npu_swiglu", "fast_gelu", "npu_linear"])
def test_it_is_found_under_every_spelling(name: str, spelling: str) -> None:
    call = call_of(name, 1, torch.bfloat16, spelling)
    np.testing.assert_allclose(
        evaluated(call)["output.0"].value.numpy(), ran(CASES[name].right, call.args, dict(call.kwargs), np.float64)[0]
    )
