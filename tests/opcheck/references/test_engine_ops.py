"""vLLM's operators give what the modules of their family give: values, noise and bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_calls import drawer, evaluated

from vllm_accprobe.opcheck.reference import Call, Declined, Expected

draw = drawer(13)
X, W = draw(4, 8).bfloat16(), draw(8).bfloat16()
OUT = torch.empty_like(X)


def op(name: str, *args: Any, **roles: torch.Tensor) -> dict[str, Expected]:
    outputs = {f"inplace.input.{k}": a for k, a in enumerate(args) if isinstance(a, torch.Tensor)}
    return evaluated(Call("o", f"torch.ops._C.{name}", args=args, outputs=outputs | roles))


def module(cls: str, inputs: dict[str, torch.Tensor], out: torch.Tensor, **more: Any) -> dict[str, Expected]:
    return evaluated(Call("m", cls, inputs, outputs={"output.0": out}, **more))


def alike(a: Expected, b: Expected, *, bound: bool = True) -> None:
    assert a.value.equal(b.value)
    assert a.noise.equal(b.noise)
    assert (a.bound is None) if not bound else a.bound.equal(b.bound)
    assert (a.common, a.groups, a.shared) == (b.common, b.groups, b.shared)


def test_norms() -> None:
    how = {"params": {"weight": W}, "attrs": {"variance_epsilon": 1e-5}}
    alike(op("rms_norm", OUT, X, W, 1e-5)["inplace.input.0"], module("RMSNorm", {"x": X}, OUT, **how)["output.0"])
    both = module("RMSNorm", {"x": X, "residual": X + 1}, OUT, **how)
    fused = op("fused_add_rms_norm", X, X + 1, W, 1e-5)
    alike(fused["inplace.input.0"], both["output.0"])
    alike(fused["inplace.input.1"], both["output.1"])


@pytest.mark.parametrize(
    ("name", "cls", "attrs"),
    [
        ("silu_and_mul", "SiluAndMul", {}), ("mul_and_silu", "MulAndSilu", {}),
        ("gelu_and_mul", "GeluAndMul", {"approximate": "none"}),
        ("gelu_tanh_and_mul", "GeluAndMul", {"approximate": "tanh"}),
        ("gelu_new", "NewGELU", {}), ("gelu_fast", "FastGELU", {}), ("gelu_quick", "QuickGELU", {}),
    ],
)  # fmt: skip
def test_activations(name: str, cls: str, attrs: dict[str, str]) -> None:
    out = OUT if name.startswith("gelu_") and "mul" not in name else OUT[:, :4]
    alike(op(name, out, X)["inplace.input.0"], module(cls, {"x": X}, out, attrs=attrs)["output.0"])


@pytest.mark.parametrize(("offset", "inverse"), [(0, False), (2, False), (0, True)])
def test_rotation_of_some_channels(offset: int, inverse: bool) -> None:
    angle = draw(6, 2)
    cache, places = torch.cat((angle.cos(), angle.sin()), 1), torch.tensor([5, 0, 3, 1])
    found = op("rotary_embedding", places, X, None, 8, cache, True, offset, inverse)["inplace.input.1"]
    cos, sin = angle[places].cos(), angle[places].sin() * (-1 if inverse else 1)
    x = X[:, offset : offset + 4].unsqueeze(1)
    given = module("ApplyRotaryEmb", {"x": x, "cos": cos, "sin": sin}, x, attrs={"is_neox_style": True})["output.0"]
    assert found.value[:, offset : offset + 4].equal(given.value[:, 0])
    assert found.noise[:, offset : offset + 4].equal(given.noise[:, 0])
    rest = [c for c in range(8) if not offset <= c < offset + 4]
    assert found.value[:, rest].equal(X[:, rest].double())
    assert not found.noise[:, rest].any()
    assert (found.bound, found.groups, found.shared) == (None, 4, True)


def test_a_product_takes_the_weight_of_its_module() -> None:
    w, b = draw(5, 8), draw(5).bfloat16()
    out = torch.empty(4, 5, dtype=torch.bfloat16)
    call = Call(
        "o", "torch.ops._C.onednn_mm", args=(out, X, b, 7), params={"weight": w}, outputs={"inplace.input.0": out}
    )
    given = module("Linear", {"x": X}, out, params={"weight": w, "bias": b})["output.0"]
    alike(evaluated(call)["inplace.input.0"], given)


def test_an_operator_of_the_cache_without_a_formula_is_declined() -> None:
    call = Call("o", "torch.ops._C_cache_ops.some_new_kernel", args=(X,), outputs={"output.0": X})
    with pytest.raises(Declined, match="reads the KV cache"):
        evaluated(call)
