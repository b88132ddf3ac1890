"""FlashInfer's norms, gated activations and softmax.

The problem: its flight recorder has a call's arguments as Python was given them, by place or by keyword, with defaults
left out, and nothing of what a function without a result wrote in place. The idea: arguments get their names from the
signature and go to the formulas of their family; functions in place are judged where somebody else kept what they left
(formats/flashinfer.py, INPLACE), and decline otherwise. A softmax is exp((z - max) / T) over its sum [M. Milakov and N.
Gimelshein, arXiv 1805.02867]. Signatures: flashinfer 0.7.2, norm, activation.py, sampling.py.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references import activations, norms
from vllm_accprobe.opcheck.references.flashinfer.ropes import IN_PLACE
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given, place_of

_NORM = "input weight eps out"
_EPS = 1e-6
_GATED = {
    "flashinfer.silu_and_mul": activations.silu,
    "flashinfer.gelu_and_mul": activations.gelu,
    "flashinfer.gelu_tanh_and_mul": activations.gelu_tanh,
}
_IN_PLACE = (
    "rmsnorm_quant", "fused_add_rmsnorm_quant", "fused_add_rmsnorm_fp8_block_quant", "layernorm_quant",
    "rmsnorm_sigmoid_gate", "append_paged_kv_cache", "append_paged_mla_kv_cache",
)  # fmt: skip


def _eps(value: Any) -> float:
    return _EPS if value is None else float(value)


@reference("flashinfer.rmsnorm", "flashinfer.gemma_rmsnorm")
def rmsnorm(call: Call) -> Expected:
    """(input, weight, eps=1e-6, out=None, ...); Gemma's weighs with 1 + weight."""
    f = arguments(call, _NORM)
    x, weight = given(f, "input", "weight")
    weight = weight + 1.0 if call.cls.endswith("gemma_rmsnorm") else weight
    return norms.fused(x, None, weight, _eps(f["eps"]), call.unit)[0]


@reference("flashinfer.layernorm")
def layernorm(call: Call) -> Expected:
    """(input, gemma, beta, eps=1e-6): float32 weight and bias; the last rounding is the result's."""
    f = arguments(call, "input gemma beta eps")
    x, weight, bias = given(f, "input", "gemma", "beta")
    return Expected(norms.layer_norm(x, weight, bias, _eps(f["eps"])))


@reference(*_GATED)
def gated(call: Call) -> Expected:
    """(input [..., 2 * d], out=None, ...): the gate is the first half."""
    (x,) = given(arguments(call, "input out"), "input")
    return activations.gated(x, _GATED[call.cls], call.unit)


@reference("flashinfer.softmax")
def softmax(call: Call) -> Expected:
    """(logits [rows, vocabulary], temperature [rows], a number or None)"""
    f = arguments(call, "logits temperature")
    (z,) = given(f, "logits")
    t = f["temperature"]
    if isinstance(t, torch.Tensor):
        t = t.double().reshape(-1, 1)
    if t is not None and bool((torch.as_tensor(t) == 0).any()):
        raise Declined("a temperature of 0")
    return Expected(torch.softmax(z if t is None else z / t, -1))


_ADDED = "input residual weight eps"


@reference("flashinfer.fused_add_rmsnorm", "flashinfer.gemma_fused_add_rmsnorm")
def added(call: Call) -> dict[str, Expected]:
    """(input, residual, weight, eps), both changed in place."""
    f = arguments(call, _ADDED)
    roles = [place_of(call, _ADDED, n) for n in ("input", "residual")]
    if not all(role in call.outputs for role in roles):
        raise Declined(IN_PLACE)
    x, residual, weight = given(f, "input", "residual", "weight")
    weight = weight + 1.0 if "gemma" in call.cls else weight
    y, total = norms.fused(x, residual, weight, _eps(f["eps"]), call.unit)
    assert total is not None
    return dict(zip(roles, (y, total), strict=True))


@reference(*(f"flashinfer.{name}" for name in _IN_PLACE))
def in_place(call: Call) -> Expected:
    raise Declined(IN_PLACE)
