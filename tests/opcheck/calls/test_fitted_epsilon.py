"""An epsilon from a norm's input and output: found, told apart from a wrong kernel's, and its error honest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_accprobe.opcheck.calls.records import EpsilonFit, choose, fit
from vllm_accprobe.opcheck.reference import Call


def draw(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(
    cls: str, eps: float, dtype: torch.dtype, seed: int = 0, rows: int = 12, scale: float = 0.02, less: int = 0
) -> Call:
    """A call whose output a kernel in float32 made. less: terms that its mean leaves out."""
    x = draw(seed, rows, 96, scale=scale).to(dtype)
    w, b = draw(seed + 1, 96).to(dtype), draw(seed + 2, 96).to(dtype)
    wide, params = x.float(), {"weight": w}
    if cls == "LayerNorm":
        wide, params = wide - wide.mean(-1, keepdim=True), {"weight": w, "bias": b}
    power = wide.square().sum(-1, keepdim=True) / (96 - less)
    y = wide * torch.rsqrt(power + eps) * w.float() + (b.float() if cls == "LayerNorm" else 0.0)
    return Call("n", cls, {"0": x}, params=params, outputs={"output.0": y.to(dtype)})


@pytest.mark.parametrize("cls", ["Qwen2RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-4])
def test_in_float32_it_is_found(cls: str, eps: float) -> None:
    found = fit(norm(cls, eps, torch.float32))
    assert found is not None
    assert found.allows(eps)
    assert found.value == pytest.approx(eps, rel=0.05)
    assert choose([found]).value == eps


def test_in_bfloat16_the_error_is_what_it_says() -> None:
    """Of 40 norms all lie within the errors that are allowed for, and not by chance."""
    found = [fit(norm("RMSNorm", 1e-5, torch.bfloat16, seed, scale=0.005)) for seed in range(40)]
    z = [abs(f.value - 1e-5) / f.error for f in found if f is not None]
    assert len(z) == 40
    assert max(z) < 2.0
    assert max(z) > 0.1


def test_a_mean_of_fewer_terms_is_no_epsilon() -> None:
    """Rows of different size give different numbers."""
    call = norm("RMSNorm", 1e-6, torch.float32, less=1)
    call.inputs["0"][::2] *= 3.0
    wide = call.inputs["0"].float()
    y = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) / 95 + 1e-6) * call.params["weight"]
    found = fit(Call("n", "RMSNorm", call.inputs, params=call.params, outputs={"output.0": y}))
    assert found is not None
    assert not found.agree
    assert choose([found]).value is None
    assert "fit no epsilon: rows give different ones" in choose([found]).said


def test_an_unusual_one_is_said_and_not_taken() -> None:
    found = fit(norm("RMSNorm", 3e-5, torch.float32))
    assert found is not None
    chosen = choose([found])
    assert chosen.value is None
    assert chosen.said.startswith("its epsilon was not recorded; input and output fit 3e-05 ±")
    assert chosen.said.endswith("which is no usual one: name it with --attribute eps=VALUE")


def fits(*values: float, error: float = 1e-8, smallest: float = 1.0) -> list[EpsilonFit]:
    return [EpsilonFit(v, error, smallest, 2.0**-8, True) for v in values]


def test_most_modules_decide() -> None:
    assert choose(fits(1e-6, 1.01e-6, 1e-3)).value == 1e-6
    assert choose(fits(1e-6, 1e-5)).value is None
    assert choose([]).value is None


def test_what_cannot_be_told_apart_and_does_not_matter_is_taken_with_what_it_leaves() -> None:
    chosen = choose(fits(1e-6, error=1e-4))
    assert chosen.value is not None
    assert 0 < chosen.slack <= 0.5e-3
    assert "differ by less than a rounding" in chosen.said


def test_what_cannot_be_told_apart_and_matters_is_not() -> None:
    chosen = choose(fits(1e-6, error=1e-4, smallest=1e-5))
    assert chosen.value is None
    assert "fit all from 1e-12 to 0.0001" in chosen.said


@pytest.mark.parametrize("change", [
    {"inputs": {}}, {"params": {"weight": torch.zeros(0)}}, {"outputs": {}}, {"cls": "Linear"},
    {"outputs": {"output.0": torch.full((12, 96), torch.nan)}},
])  # fmt: skip
def test_nothing_to_fit(change: dict[str, Any]) -> None:
    from dataclasses import replace

    assert fit(replace(norm("RMSNorm", 1e-6, torch.float32), **change)) is None
