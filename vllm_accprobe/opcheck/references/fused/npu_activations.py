"""Activations of torch_npu and their gradients: SwiGLU, fast GELU, Mish, GELU, GEGLU, SiLU.

Formulas: torch_npu's documents of npu_swiglu, silu(A) * B of the halves along ``dim``; npu_fast_gelu and fast_gelu,
x exp(0.851 (x - |x|)) / (1 + exp(-1.702 |x|)), which is x * sigmoid(1.702 x) for either sign; npu_mish,
x * tanh(softplus(x)); npu_gelu, exact or by tanh; npu_gelu_mul, gelu(A) * B; npu_geglu, A * gelu(B), or gelu(A) * B
with activate_left, by tanh with approximate 1, and gelu as second output [op-plugin's test_npu_geglu]. Each
``*_backward`` gives the formula's derivative times the gradient, by autograd on the formula.
Noise: as in activations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references.activations import alone, gelu, gelu_tanh, quick_gelu, silu
from vllm_accprobe.opcheck.references.activations import gated as gated_halves
from vllm_accprobe.opcheck.references.fused.fused_calls import Given, fused
from vllm_accprobe.opcheck.references.gradients import derived
from vllm_accprobe.opcheck.references.parts import subnormal


def mish(x: Any) -> Any:
    return x * torch.tanh(torch.nn.functional.softplus(x, threshold=1e9))


def _last(x: Any, dim: float) -> tuple[Any, int]:
    """x with its dimension ``dim`` last. Raises Declined where it cannot be halved."""
    at = int(dim)
    if not -x.dim() <= at < x.dim() or x.shape[at] % 2:
        raise Declined(f"dimension {at} of an input {list(x.shape)} cannot be halved")
    return x.movedim(at, -1), at


def _back(y: Expected, at: int) -> Expected:
    moved = (None if t is None else t.movedim(-1, at) for t in (y.value, y.noise, y.bound))
    value, noise, bound = moved
    return Expected(value, noise, bound=bound)


def _gelu_of(g: Given, name: str) -> Callable[[Any], Any]:
    kind = g[name]
    if kind not in ("none", "tanh"):
        raise Declined(f"approximate {kind!r} is unknown")
    return gelu_tanh if kind == "tanh" else gelu


@fused("npu_swiglu(self/input/x, dim=-1)")
def npu_swiglu(g: Given) -> Expected:
    x, at = _last(g.tensor("self"), g.number("dim"))
    return _back(gated_halves(x, silu, g.unit("self")), at)


@fused("npu_swiglu_backward(grad_output/grad, self/x, dim=-1)", differentiable=False)
def npu_swiglu_backward(g: Given) -> dict[str, Expected]:
    return derived(g, npu_swiglu, {"self": "self", "dim": "dim"}, "grad_output", ("self",))


@fused("npu_fast_gelu(self/input/input0/x)", "fast_gelu")
def npu_fast_gelu(g: Given) -> Expected:
    return alone(g.tensor("self"), quick_gelu, g.unit("self"))


@fused("npu_fast_gelu_backward(grad, self/input_x)", differentiable=False)
def npu_fast_gelu_backward(g: Given) -> dict[str, Expected]:
    return derived(g, npu_fast_gelu, {"self": "self"}, "grad", ("self",))


@fused("npu_mish(self/input)")
def npu_mish(g: Given) -> Expected:
    x, unit = g.tensor("self"), g.unit("self")
    y = alone(x, mish, unit)
    return replace(y, bound=y.bound + subnormal(unit, x.abs()))  # softplus may be subnormal as well as its tanh


@fused("npu_mish_backward(grad, input/self)", differentiable=False)
def npu_mish_backward(g: Given) -> dict[str, Expected]:
    return derived(g, npu_mish, {"self": "input"}, "grad", ("self",))


@fused("npu_silu(self/input)", "npu_silu_")
def npu_silu(g: Given) -> dict[str, Expected]:
    y = alone(g.tensor("self"), silu, g.unit("self"))
    return {"output.0": y, "inplace.input.0": y}


@fused("npu_gelu(self/x/input, approximate='none')")
def npu_gelu(g: Given) -> Expected:
    return alone(g.tensor("self"), _gelu_of(g, "approximate"), g.unit("self"))


@fused("npu_gelu_backward(grad_output, self, approximate='none')", differentiable=False)
def npu_gelu_backward(g: Given) -> dict[str, Expected]:
    return derived(g, npu_gelu, {"self": "self", "approximate": "approximate"}, "grad_output", ("self",))


@fused("npu_gelu_mul(input/self, approximate='none')")
def npu_gelu_mul(g: Given) -> Expected:
    return gated_halves(g.tensor("input"), _gelu_of(g, "approximate"), g.unit("input"))


@fused("npu_geglu(self/input/x, dim=-1, approximate=1, activate_left=False)")
def npu_geglu(g: Given) -> dict[str, Expected]:
    x, at = _last(g.tensor("self"), g.number("dim"))
    f, left = (gelu_tanh if g.number("approximate") else gelu), bool(g["activate_left"])
    y, unit = gated_halves(x, f, g.unit("self"), gate_first=left), g.unit("self")
    return {"output.0": _back(y, at), "output.1": _back(alone(x.chunk(2, -1)[0 if left else 1], f, unit), at)}
