"""Rotary embeddings of torch_npu: npu_rotary_mul, npu_apply_rotary_pos_emb, and the gradient.

Formula: torch_npu's documents: x * r1 + rotate(x) * r2 with cosines r1 and sines r2 over the whole last dimension;
rotate gives (-x2, x1) of the halves (``half``) or of neighbours (``interleave``), or x times a matrix ``rotate``.
Noise: each product may be rounded before they are added.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, Declined, Expected
from vllm_accprobe.opcheck.references.fused.fused_calls import Given, fused
from vllm_accprobe.opcheck.references.gradients import derived
from vllm_accprobe.opcheck.references.parts import subnormal


def _rotated(x: Any, mode: str, matrix: Any | None = None) -> Any:
    if matrix is not None:
        return x @ matrix
    if x.shape[-1] % 2:
        raise Declined("an odd last dimension has no pairs")
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    if mode in ("interleave", "interleaved"):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    raise Declined(f"rotary_mode {mode!r} is unknown")


def _turned(x: Any, cos: Any, sin: Any, other: Any, unit: float) -> Expected:
    a, b = x * cos, other * sin
    if a.shape != x.shape or b.shape != x.shape:
        raise Declined("its cosines do not fit its input")
    noise = ROUNDED * unit * (a * a + b * b).sqrt()
    return Expected(a + b, noise, bound=2.0 * unit * (a.abs() + b.abs()) + subnormal(unit, 2.0))


@fused("npu_rotary_mul(self/input/x, r1, r2, rotary_mode='half', rotate=None)")
def npu_rotary_mul(g: Given) -> Expected:
    x, matrix = g.tensor("self"), g.maybe("rotate")
    y = _turned(x, g.tensor("r1"), g.tensor("r2"), _rotated(x, str(g["rotary_mode"]), matrix), g.unit("self"))
    return y if matrix is None else Expected(y.value, y.noise)


@fused("npu_rotary_mul_backward(grad/dy_tensor, self/x, r1, r2, rotary_mode='half')", differentiable=False)
def npu_rotary_mul_backward(g: Given) -> dict[str, Expected]:
    """Gradients of x, and of both tables, summed over what they were broadcast to."""
    names = {n: n for n in ("self", "r1", "r2", "rotary_mode")}
    return derived(g, npu_rotary_mul, names, "grad", ("self", "r1", "r2"))


@fused("npu_apply_rotary_pos_emb(query, key, cos, sin, layout='BSND', rotary_mode='half')")
def npu_apply_rotary_pos_emb(g: Given) -> dict[str, Expected]:
    """Both are turned, and written over."""
    cos, sin, mode, unit = g.tensor("cos"), g.tensor("sin"), str(g["rotary_mode"]), g.unit("query")
    found: dict[str, Expected] = {}
    for k, name in enumerate(("query", "key")):
        x = g.tensor(name)
        y = _turned(x, cos, sin, _rotated(x, mode), unit)
        found |= dict.fromkeys((f"output.{k}", f"inplace.input.{k}", f"inplace.input.{name}"), y)
    return found
