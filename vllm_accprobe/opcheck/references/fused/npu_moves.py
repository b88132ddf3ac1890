"""Operators of torch_npu that move, sort, round or multiply: confusion_transpose, sort_v2, dtype_cast, linear.

Formulas: torch_npu's documents of npu_confusion_transpose, permute then reshape with transpose_first, else reshape then
permute, and its backward, the way back; npu_sort_v2, the sorted values alone; npu_dtype_cast, a rounding;
npu_linear, x Wᵀ + b, and npu_linear_backward, dy W and dyᵀ x. What is moved, sorted or cast must be right to the bit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references.fused.fused_calls import Given, fused
from vllm_accprobe.opcheck.references.linear import biased, product

_EXACT = 0.0
"""Of `Expected.unit`: nothing is rounded."""


def _moved(g: Given, name: str) -> tuple[Any, list[int], list[int]]:
    x = g.stored(name)
    perm, shape = g.integers("perm") or [], g.integers("shape") or []
    if math.prod(shape) != x.numel() or sorted(perm) != list(range(len(perm))):
        raise Declined(f"perm {perm} and shape {shape} do not fit an input {list(x.shape)}")
    return x.to(g.dtype) if x.is_floating_point() else x, perm, shape


def _as_it_is(value: Any) -> Expected:
    return Expected(value, unit=_EXACT) if value.is_floating_point() else Expected(value)


@fused("npu_confusion_transpose(self/data, perm, shape, transpose_first)")
def npu_confusion_transpose(g: Given) -> Expected:
    x, perm, shape = _moved(g, "self")
    if len(perm) != (x.dim() if g["transpose_first"] else len(shape)):
        raise Declined(f"perm {perm} does not fit")
    return _as_it_is(x.permute(perm).reshape(shape) if g["transpose_first"] else x.reshape(shape).permute(perm))


@fused("npu_confusion_transpose_backward(grad, perm, shape, transpose_first)")
def npu_confusion_transpose_backward(g: Given) -> Expected:
    """shape: with transpose_first the input's, else what it was reshaped to [msprobe's benchmark function]."""
    up, perm, shape = _moved(g, "grad")
    if len(perm) != len(shape):
        raise Declined(f"perm {perm} does not fit shape {shape}")
    back = [perm.index(k) for k in range(len(perm))]
    moved = [shape[p] for p in perm]
    return _as_it_is(up.reshape(moved).permute(back))


@fused("npu_sort_v2(self/x, dim=-1, descending=False, out=None)")
def npu_sort_v2(g: Given) -> dict[str, Expected]:
    x = g.stored("self")
    values = torch.sort(x.to(g.dtype) if x.is_floating_point() else x, int(g.number("dim")), bool(g["descending"]))[0]
    return {"output.0": _as_it_is(values), "inplace.input.out": _as_it_is(values)}


@fused("npu_dtype_cast(self/input, dtype, input_dtype=None)", "_npu_dtype_cast")
def npu_dtype_cast(g: Given) -> Expected:
    """The captured output says which dtype; an operator's integer code does not."""
    x, out = g.stored("self"), g.output(0)
    dtype = g.call.outputs["output.0"].dtype if out is not None else g["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise Declined("its dtype was not captured")
    if not x.is_floating_point() or not dtype.is_floating_point:
        return Expected(x.to(dtype).to(g.dtype) if dtype.is_floating_point else x.to(dtype), unit=_EXACT)
    wide = x.to(g.dtype)
    return Expected(wide + (wide.to(dtype).to(g.dtype) - wide).detach(), unit=_EXACT)


@fused("npu_linear(input/x, weight, bias=None)")
def npu_linear(g: Given) -> Expected:
    x, weight = g.tensor("input"), g.tensor("weight")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise Declined(f"weight {list(weight.shape)} does not fit an input of width {x.shape[-1]}")
    return biased(product(x, weight), g.maybe("bias"), g.unit("input"))


@fused("npu_linear_backward(grad, input/input_data, weight)")
def npu_linear_backward(g: Given) -> dict[str, Expected]:
    up, x, weight = g.tensor("grad"), g.tensor("input"), g.tensor("weight")
    rows = up.flatten(0, -2) if up.dim() > 1 else up.unsqueeze(0)
    flat = x.reshape(len(rows), -1)
    if rows.shape[1] != weight.shape[0] or flat.shape[1] != weight.shape[1]:
        raise Declined("its gradient does not fit its input and weight")
    dx = product(up, weight.T)
    return {"output.0": replace(dx, value=dx.value.reshape(x.shape)), "output.1": product(rows.T, flat.T)}
