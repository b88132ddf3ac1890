"""Rotary embeddings of ATB, whose cosines and sines are inputs: Rope, RopeQConcat.

Formula: y = x cos + turn(x) sin, element by element [Su et al., arXiv 2104.09864]. rotaryCoeff c cuts a head of d
channels (the width of cos) into c parts, and turns part 2 i with part 2 i + 1: 2: halves, 4: halves of halves, d:
neighbours; turn(a, b) = (-b, a). cos and sin have a row for each token, so that the lengths of sequences (input 4) do
not matter. Noise: two rounded products. Any other rotaryCoeff, and cosFormat 1, whose meaning is not public, are
declined.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, Declined, Expected
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, operator
from vllm_accprobe.opcheck.references.parts import reshaped, subnormal, unit_of

Tensor = Any  # a torch.Tensor


def turn(x: Tensor, parts: int) -> Tensor:
    """x [..., d] with each two neighbouring parts (a, b) as (-b, a)."""
    pairs = x.reshape(*x.shape[:-1], parts // 2, 2, x.shape[-1] // parts)
    a, b = pairs.unbind(-2)
    return torch.stack((-b, a), -2).reshape(x.shape)


def turned(x: Tensor, cos: Tensor, sin: Tensor, parts: int, unit: float) -> Expected:
    """x [tokens, heads, d], cos and sin [tokens, d], float64."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x * cos, turn(x, parts) * sin
    noise = ROUNDED * unit * (a * a + b * b).sqrt()
    return Expected(a + b, noise, bound=2.0 * unit * (a.abs() + b.abs()) + subnormal(unit, 2.0))


@operator("RopeOperation")
def rope(o: Operands) -> Outputs:
    """(q, k [tokens, heads * d] or [batch, tokens, heads, d], cos, sin [tokens, d], lengths)"""
    cos, sin = (o.wide(k).reshape(-1, o.tensor(k).shape[-1]) for k in (2, 3))
    d, parts = cos.shape[-1], o.param("rotaryCoeff", 4)
    if parts not in (2, 4, d) or d % parts or sin.shape != cos.shape:
        raise Declined(f"rotaryCoeff {parts} for cosines {list(cos.shape)} has no reference")
    if o.param("cosFormat", 0):
        raise Declined("cosFormat 1 has no public definition")
    found = {}
    for k in range(2):
        given = o.tensor(k)
        tokens = given.shape[:2].numel() if given.dim() == 4 else given.shape[0]
        if tokens != len(cos) or given.numel() % (tokens * d or 1):
            raise Declined(f"cosines {list(cos.shape)} are not one row for each of {tokens} tokens")
        y = turned(given.double().reshape(tokens, -1, d), cos, sin, parts, unit_of(given))
        found[f"output.{k}"] = reshaped(y, o.output(k).shape)
    return found


@operator("RopeQConcatOperation")
def rope_concat(o: Operands) -> Outputs:
    """(q [tokens, heads * d], cos, sin [tokens, d], other [tokens, heads, n]) → turned halves beside other."""
    cos, sin, other, out = o.wide(1), o.wide(2), o.wide(3), o.output()
    d, heads = cos.shape[-1], other.shape[1]
    x = o.wide(0).reshape(len(cos), heads, d)
    y = turned(x, cos, sin, 2, unit_of(o.tensor(0)))
    assert y.noise is not None
    assert y.bound is not None
    none = torch.zeros_like(other)
    value, noise, bound = (torch.cat(pair, 2) for pair in ((y.value, other), (y.noise, none), (y.bound, none)))
    return {"output.0": reshaped(Expected(value, noise, bound=bound), out.shape)}
