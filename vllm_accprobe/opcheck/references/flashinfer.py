"""FlashInfer's API, by the names and the order of arguments of its functions.

The problem: its flight recorder has a call's arguments as Python was given them, by place or by keyword, with defaults
left out, and nothing of what a function without a result wrote in place. The idea: arguments get their names from the
signature and go to the formulas of their family; functions in place decline with that reason. A softmax is
exp((z - max) / T) over its sum [M. Milakov and N. Gimelshein, arXiv 1805.02867]. Signatures: flashinfer 0.7.2, norm,
activation.py, sampling.py, gemm. Not here: the recorder's files (formats/flashinfer.py).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references import activations, norms
from vllm_accprobe.opcheck.references.linear import biased, product
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given

_NORM = "input weight eps out"
_EPS = 1e-6
_GATED = {
    "flashinfer.silu_and_mul": activations.silu,
    "flashinfer.gelu_and_mul": activations.gelu,
    "flashinfer.gelu_tanh_and_mul": activations.gelu_tanh,
}
_IN_PLACE = (
    "fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "rmsnorm_quant", "fused_add_rmsnorm_quant",
    "fused_add_rmsnorm_fp8_block_quant", "layernorm_quant", "rmsnorm_sigmoid_gate",
    "apply_rope_inplace", "apply_llama31_rope_inplace", "apply_rope_pos_ids_inplace",
    "apply_llama31_rope_pos_ids_inplace", "apply_rope_with_cos_sin_cache_inplace",
    "append_paged_kv_cache", "append_paged_mla_kv_cache",
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


@reference("flashinfer.mm_bf16")
def mm(call: Call) -> Expected:
    """(a [m, k], b [k, n], bias [n] or None, ...)"""
    f = arguments(call, "a b bias")
    a, b = given(f, "a", "b")
    return biased(product(a, b.T), None if f["bias"] is None else f["bias"].double())


@reference(*(f"flashinfer.{name}" for name in _IN_PLACE))
def in_place(call: Call) -> Expected:
    raise Declined("works in place: FlashInfer's recorder keeps what it was given and not what it made of it")
