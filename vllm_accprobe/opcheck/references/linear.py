"""Products with a weight matrix: y = x Wᵀ + b, whatever vLLM calls the module.

Formula: torch.nn.Linear's definition. Noise: float32 sums of K products, sqrt(K) roundings of size 2**-24 of |x| |W|
[Higham and Mary, SIAM J. Sci. Comput. 41 (2019) A2815, theorem 2.4; a partial sum is at most |x| |W|, so that this is
the standard error at most]. Bound: gamma_K |x| |W| [Higham, ASNA, (3.5)]. A row-parallel module whose ranks'
partial sums are added afterwards gets them from all ranks (``extra["ranks"]``: the other ranks' calls). Bias: added
on one rank, or once after the sum. Quantised weights are turned into numbers first (quantised.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import (
    APPROXIMATE,
    ROUNDED,
    SUM,
    Call,
    Declined,
    Expected,
    combined,
    device_kernel,
    gamma,
    reference,
)
from vllm_accprobe.opcheck.references.activations import soft_cap
from vllm_accprobe.opcheck.references.kernels_common import weight_here
from vllm_accprobe.opcheck.references.parts import once, param_if, ranks_of, subnormal
from vllm_accprobe.opcheck.references.quantised import activation_noise, activation_step, weight_of, widened
from vllm_accprobe.opcheck.references.scaled.sixteen_bits import cut_off

_INPUT = ("input_", "x", "input", "hidden_states", "0")
_BLOCK = 8
"""Chosen: rows of whole blocks. Measured: MKL on AVX-512 takes 4 at a time, of float64 and of float32."""
_COARSE = 2.0**-12
"""Units of 16-bit outputs lie above this, that of float32 below."""
_TINY = 2.0**-126
"""Least normal number of float32: a row of zeros has codes of zero."""


def product(x: Any, weight: Any, x_noise: Any | None = None, sizes: Any | None = None) -> Expected:
    """x @ weight.T in float64 with the noise of a float32 sum, and of x where that was rounded. sizes: float32, of the
    weight, where they are known."""
    sizes = weight.abs().float() if sizes is None else sizes
    size = in_blocks(x.abs().float(), sizes.T).double()  # how large an error may be need not be known exactly
    if not bool(torch.isfinite(size).all()):
        size = x.abs() @ weight.abs().T
    if x_noise is not None:  # a step's size follows from the kernel's own scale: no bound
        noise = SUM * x.shape[-1] ** 0.5 * size
        return Expected(x @ weight.T, combined(noise, ((x_noise * x_noise) @ (weight * weight).T).sqrt()))
    return _summed(in_blocks(x, weight.T), size, x.shape[-1])


def _summed(value: Any, size: Any, terms: int) -> Expected:
    return Expected(value, SUM * terms**0.5 * size, bound=gamma(terms + 1) * size)


def by_columns(x: Any, weight: Any, unit: float) -> Expected:
    """`product` with a weight that is too large to be widened whole (quantised.WIDE). unit: of the output. Where that
    is one of 16 bits, |x| |W| is taken to be as large as the norms' product [Cauchy and Schwarz], 1.6 times too large
    for normal numbers: what sums leave is far below the last rounding, and a third of the time is saved."""
    flat = x.reshape(-1, x.shape[-1])
    rest = -len(flat) % _BLOCK
    flat = torch.cat((flat, flat.new_zeros(rest, flat.shape[1]))) if rest else flat
    coarse = unit >= _COARSE
    sizes, norms = flat.abs().float(), flat.norm(dim=1, keepdim=True)
    value, size = (torch.empty(len(flat), len(weight), dtype=torch.float64) for _ in range(2))
    for some, part in widened(weight):
        value[:, some] = flat @ part.T
        size[:, some] = norms * part.norm(dim=1) if coarse else sizes @ part.abs_().float().T
    if not bool(torch.isfinite(size).all()):
        return product(x, weight.double())
    shape = *x.shape[:-1], len(weight)
    return _summed(value[: len(flat) - rest].reshape(shape), size[: len(flat) - rest].reshape(shape), x.shape[-1])


def in_blocks(x: Any, right: Any) -> Any:
    """x @ right, whose rows come out the same to the bit whoever else is in the batch, where x is filled up with rows
    of zeros to what a library multiplies at a time: the rest would be added up in another order."""
    rest = -math.prod(x.shape[:-1]) % _BLOCK
    if not rest or x.dim() < 2 or right.dim() != 2:
        return x @ right
    flat = x.reshape(-1, x.shape[-1])
    y = torch.cat((flat, flat.new_zeros(rest, flat.shape[1]))) @ right
    return y[: len(flat)].reshape(*x.shape[:-1], right.shape[1])


def partial(call: Call) -> Expected:
    """This rank's product, without a bias."""
    x = call.wide(*_INPUT, *(["1"] if call.cls == "ParallelLMHead" else []))  # apply(layer, x)
    weight = weight_of(call)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise Declined(f"weight {list(weight.shape)} does not fit an input of width {x.shape[-1]}")
    if weight.dtype != torch.float64:
        return by_columns(x, weight, call.unit)
    return product(x, weight, activation_noise(call, x), call.once(product, lambda: weight.abs().float()))


def _noted(call: Call, y: Expected) -> Expected:
    """y with what there is to say of a W8A8 product that ends in 16 bits: the kernel turned x into codes itself, each
    row by its largest number, or all by ``input_scale``; one that does otherwise is not told."""
    weight, scale = call.params.get("weight"), param_if(call, "weight_scale")
    mine = call.outputs.get("output.0")
    if mine is None or weight is None or weight.dtype != torch.int8 or scale is None:
        return y
    x = call.wide(*_INPUT).reshape(-1, weight.shape[1])
    if scale.numel() not in (1, len(weight)) or y.value.shape[-1] != len(weight):
        return y
    step = activation_step(call, x).expand(len(x), 1).reshape(-1)
    codes = (x / step.clamp(min=_TINY).unsqueeze(1)).round().clamp(-128, 127)
    right = scale.reshape(-1).expand(len(weight))
    coded = y.value.reshape(len(x), -1) + (codes * step.unsqueeze(1) - x) @ (weight.double() * right.unsqueeze(1)).T
    said = cut_off(codes.to(torch.int8), weight.T, step, right, coded, mine.reshape(len(x), -1))
    return replace(y, note=said) if said else y


def _bias(call: Call) -> Any | None:
    return None if call.attr("skip_bias_add", default=False) else param_if(call, "bias")


def biased(y: Expected, bias: Any | None, unit: float | None = None) -> Expected:
    """y + bias, with y rounded before to ``unit``, None for not at all; None: y."""
    if bias is None:
        return y
    return replace(y if unit is None else rounded(y, unit), value=y.value + bias)


def rounded(y: Expected, unit: float) -> Expected:
    """``y`` rounded once."""
    size = once(y.value.abs(), unit)
    return replace(y, noise=combined(y.noise, ROUNDED * size), bound=None if y.bound is None else y.bound + size)


def added(a: Expected, b: Expected) -> Expected:
    """The sum of two values with independent errors."""
    bound = None if a.bound is None or b.bound is None else a.bound + b.bound
    return Expected(a.value + b.value, combined(a.noise, b.noise), bound=bound)


@reference(
    "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear", "GateLinear",
    "MergedReplicatedLinear", "QKVCrossParallelLinear", "*ParallelLinear", "Linear", "*Linear", "ParallelLMHead",
    by_rows=True,
)  # fmt: skip
def column(call: Call) -> dict[str, Expected]:
    """Its columns, on this rank. Some kernels round before they add the bias, so noise allows it."""
    if call.attr("gather_output", default=False) and int(call.attr("tp_size", default=1)) > 1:
        raise Declined("gathers its output over ranks")
    found = {"output.0": _noted(call, biased(partial(call), _bias(call), call.unit))}
    if call.attr("skip_bias_add", default=False) and "bias" in call.params:
        found["output.1"] = Expected(call.param("bias"))
    return found


@reference("RowParallelLinear", by_rows=True)
def row(call: Call) -> dict[str, Expected]:
    """This rank's partial sum, or with reduce_results the sum over the ranks, each of which may be rounded, and each
    sum on the way."""
    if call.extra.get("apart"):
        raise Declined("whether it adds up over ranks was not recorded")
    size = int(call.attr("tp_size", default=1))
    if size == 1 or not call.attr("reduce_results", default=True):
        bias = _bias(call) if int(call.attr("tp_rank", default=0)) == 0 else None
        return {"output.0": _noted(call, biased(partial(call), bias, call.unit))}
    parts = (biased(partial(r), _bias(r) if r.attr("tp_rank", default=0) == 0 else None) for r in ranks_of(call, size))
    each = (rounded(y, call.unit) for y in parts)
    return {"output.0": reduce(lambda total, y: added(rounded(total, call.unit), y), each)}


@reference("LogitsProcessor")
def logits(call: Call) -> Expected:
    """lm_head's own output, scaled and capped: scale * z, or cap * tanh(scale * z / cap) [Gemma 2, arXiv
    2408.00118]."""
    z = call.extra.get("lm_head")
    if z is None:
        raise Declined("the output of lm_head was not captured beside it")
    z = z.double()
    out = call.outputs["output.0"]
    if z.shape[-1] < out.shape[-1] or z.shape[0] != out.shape[0]:
        raise Declined("the output of lm_head has another shape")
    z = z[..., : out.shape[-1]]
    cap = float(call.attrs.get("soft_cap") or call.config.get("final_logit_softcapping") or 0.0)
    scale = float(call.attr("scale", default=1.0))
    z = scale * (soft_cap(z, cap) if cap else z)
    size = z.abs()
    if not cap:
        return Expected(z, bound=gamma(2) * size)
    # z / cap, which tanh hands on at most, and tanh itself; with a scale their product with the cap as well
    more, least = float(scale != 1.0), subnormal(call.unit, (2.0 * cap + 1.0) * abs(scale))
    noise = ROUNDED * (2.0 + more) ** 0.5 * call.unit * size + ROUNDED * least
    return Expected(z, noise, bound=(2.0 + more) * call.unit * size + 2.0 * APPROXIMATE * size + least)


# --- on a device --------------------------------------------------------------------------------------------------


@device_kernel(
    "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear", "GateLinear",
    "MergedReplicatedLinear", "*ParallelLinear", "Linear", "*Linear", "RowParallelLinear", "ParallelLMHead",
)  # fmt: skip
def linear_kernel(call: Call) -> dict[str, Any]:
    size = int(call.attr("tp_size", default=1))
    if size > 1 and (call.attrs.get("reduce_results") or call.attrs.get("gather_output")):
        raise Declined("adds up or gathers over ranks")
    x = call.tensor(*_INPUT, *(["1"] if call.cls == "ParallelLMHead" else []))
    held = bool(call.attr("skip_bias_add", default=False))
    bias = call.params.get("bias") if int(call.attr("tp_rank", default=0)) == 0 or call.cls[:3] != "Row" else None
    y = F.linear(x, weight_here(call), None if held else bias)
    found = {"output.0": y.to(call.outputs["output.0"].dtype)}
    return found | ({"output.1": bias} if held and bias is not None else {})
