"""Norms and rotary embeddings of ATB.

Norms of ATB: RmsNorm and LayerNorm alone, with an addition before them (PRENORM, POSTNORM), and turned into int8.

Formulas: references/norms.py's. RmsNorm: NORM (x, gamma), Gemma's with 1 + gamma, with rstd its reciprocal root as a
second output; PRENORM and POSTNORM (x, bias where there is one, residual, gamma): the norm of the sum, PRENORM the sum
as well. With int8: NORM (x, gamma, beta, scale, offset), PRENORM (x, residual, gamma, beta, scale, offset), POSTNORM
(x, residual, gamma, scale, offset): round((y + beta) / scale + offset). LayerNorm: NORM (x, gamma, beta) from
beginNormAxis on, PRENORM and POSTNORM (x, residual, gamma, beta): of x + zoomScaleValue * residual; with int8 round(y /
scale + offset) as ATB's published kernels have it, or round(y * scale + offset) as its tests have it: the nearer
counts, for they differ by a factor. Dynamic int8: quantise.py. CohereLayerNorm: x [..., heads, width], no beta.
GatherPreRmsNorm: the residual is gathered by rows.

Rotary embeddings of ATB, whose cosines and sines are inputs: Rope, RopeQConcat.

Formula: y = x cos + turn(x) sin, element by element [Su et al., arXiv 2104.09864]. rotaryCoeff c cuts a head of d
channels (the width of cos) into c parts, and turns part 2 i with part 2 i + 1: 2: halves, 4: halves of halves, d:
neighbours; turn(a, b) = (-b, a). cos and sin have a row for each token, so that the lengths of sequences (input 4) do
not matter. Noise: two rounded products. Any other rotaryCoeff, and cosFormat 1, whose meaning is not public, are
declined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Declined, Expected, combined, gamma, sum_of_two
from vllm_accprobe.opcheck.references.atb.linear import coded, dynamic
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, operator
from vllm_accprobe.opcheck.references.norms import layer_norm, mean_over_deviation, normed, rms_norm
from vllm_accprobe.opcheck.references.parts import once, reshaped, subnormal, unit_of

Tensor = Any  # a torch.Tensor
NORM, PRENORM, POSTNORM = 1, 2, 3
_INT8 = 2
_PARTS = {NORM: "normParam", PRENORM: "preNormParam", POSTNORM: "postNormParam"}


def _kind(o: Operands) -> tuple[int, Operands]:
    """Which norm, and its own parameters. ATB's first release has them at the top, and one norm."""
    if not o.has("layerType") and o.has("epsilon", "rmsNormEps"):
        return NORM, o
    kind = o.param("layerType", 0)
    if kind not in _PARTS:
        raise Declined(f"layerType {kind} is none that is known here")
    return kind, o.part(_PARTS[kind])


def _flat(t: Tensor) -> Tensor:
    """A weight [1, ..., width] as float64 [width]."""
    return t.double().reshape(-1)


def _epsilon(p: Operands) -> float:
    return p.param("rmsNormEps" if p.has("rmsNormEps") and not p.has("epsilon") else "epsilon", 1e-5)


def _sum(*terms: Tensor) -> Tensor:
    found = terms[0]
    for t in terms[1:]:
        found = found + t
    return found


def _total(terms: list[Tensor], unit: float) -> Expected:
    """A sum that is handed on: of two numbers, or of three."""
    value = _sum(*terms)
    if len(terms) == 2:
        return sum_of_two(value, unit)
    size = _sum(*(t.abs() for t in terms))
    return Expected(value, ROUNDED * unit * size, bound=unit * size)


def _rounding(o: Operands) -> float:
    """What a norm may round on the way: the input's dtype, where the output is a code."""
    return unit_of(o.tensor(0))


@operator("RmsNormOperation")
def rms(o: Operands) -> Outputs:
    kind, p = _kind(o)
    quant, unit, eps = p.param("quantType", 0), _rounding(o), _epsilon(p)
    if quant not in (0, _INT8):
        raise Declined(f"quantType {quant} is none that is known here")
    x, at, added = o.wide(0), 1, []
    if kind != NORM:
        count = 2 if not quant and p.param("hasBias", False) else 1
        added = [o.wide(at + k) for k in range(count)]
        at += count
    terms = [x, *(t.expand_as(x) if t.dim() == x.dim() else t for t in added)]
    whole = _sum(*terms)
    weight = o.wide(at)
    if kind == NORM and p.param("rstd", False):
        return _with_rstd(o, whole, weight, eps)
    weight = weight.reshape(-1)
    if weight.numel() != x.shape[-1]:
        raise Declined(f"gamma {list(o.tensor(at).shape)} does not fit an input of width {x.shape[-1]}")
    if kind == NORM and p.param("modelType", 0) == 1:
        weight = weight + 1.0
    half = kind == NORM and p.param("precisionMode", 0) == 1
    y = normed(rms_norm(whole, weight, eps), unit, x.shape[-1], before=1 if added else 0, behind=3 if half else 1,
               weight=weight)  # fmt: skip
    if not quant:
        return {"output.0": y} | ({"output.1": _total(terms, unit)} if kind == PRENORM else {})
    return _rms_codes(o, kind, p, y, at + 1, terms)


def _rms_codes(o: Operands, kind: int, p: Operands, y: Expected, at: int, terms: list[Tensor]) -> Outputs:
    """The norm in int8; at: the first input behind gamma."""
    bound = y.bound
    if kind != POSTNORM:
        beta = o.maybe(at)
        at += 1
        if beta is not None:
            y = replace(y, value=y.value + _flat(beta))
            bound = bound + SUM * y.value.abs() if bound is not None else None
    if kind == NORM and (how := p.param("dynamicQuantType", 0)):
        return dynamic(o, replace(y, bound=bound), how)
    scale, offset = _flat(o.tensor(at)), _flat(o.tensor(at + 1))
    codes = coded(y.value / scale + offset, o.output(0), None if bound is None else bound / scale.abs() + 2.0**-10)
    if kind == NORM:
        return {"output.0": codes}
    return {"output.0": codes, "output.1": _total(terms, unit_of(o.output(1))) if kind == PRENORM else y}


def _with_rstd(o: Operands, x: Tensor, weight: Tensor, eps: float) -> Outputs:
    """The training form: over as many last dimensions as gamma has, and the reciprocal root itself."""
    dims = tuple(range(-weight.dim(), 0))
    width = weight.numel()
    rstd = torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)
    y = x * rstd * weight
    off = APPROXIMATE + 0.5 * gamma(width + 4)
    size = rstd.abs()
    return {
        "output.0": normed(y, _rounding(o), width, weight=weight),
        "output.1": Expected(rstd, SUM * width**0.5 * size, bound=off * size),
    }


@operator("RmsNormBackwardOperation")
def rms_backward(o: Operands) -> Outputs:
    """(dy, x, rstd, gamma) → dx = rstd (dy gamma - x rstd**2 mean(dy gamma x)), dgamma = sum dy x rstd."""
    dy, x, rstd, weight = (o.wide(k) for k in range(4))
    dims = tuple(range(-weight.dim(), 0))
    width = weight.numel()
    g = dy * weight
    mean = (g * x).mean(dims, keepdim=True)
    size = rstd * (g.abs() + x.abs() * rstd**2 * (g * x).abs().mean(dims, keepdim=True))
    dx = rstd * (g - x * rstd**2 * mean)
    unit, n = _rounding(o), x.numel() // width
    part = (dy * x * rstd).reshape(n, *weight.shape)
    off, own, least = 3.0 * unit + gamma(width + 8), subnormal(unit, rstd.abs()), n * subnormal(unit)
    found = {"output.0": Expected(dx, ROUNDED * (unit * size + own), bound=off * size + own)}
    total = part.abs().sum(0)
    return found | {"output.1": Expected(part.sum(0), ROUNDED * (unit * (part * part).sum(0).sqrt() + least),
                                         bound=(2.0 * unit + gamma(n + 8)) * total + least)}  # fmt: skip


@operator("GatherPreRmsNormOperation")
def gathered_rms(o: Operands) -> Outputs:
    """(x, rows, which of them, gamma) → (norm of x + rows[which], that sum)."""
    x, rows, at = o.wide(0), o.wide(1), o.tensor(2).long().reshape(-1)
    if len(at) != len(x) or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(rows)):
        raise Declined("its indices lie outside of its rows")
    terms = [x, rows[at]]
    weight = _flat(o.tensor(3))
    y = normed(rms_norm(_sum(*terms), weight, o.param("epsilon", 1e-5)), _rounding(o), x.shape[-1], before=1,
               weight=weight)  # fmt: skip
    return {"output.0": y, "output.1": _total(terms, unit_of(o.output(1)))}


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, unit: float, dims: int = 1) -> Expected:
    """Over the last ``dims`` dimensions; the error as references/norms.py has it."""
    flat = x.flatten(-dims) if dims > 1 else x
    y = layer_norm(flat, None, None, eps)
    scaled = (y * weight.reshape(-1)).reshape(x.shape)
    width = flat.shape[-1]
    size = (mean_over_deviation(flat, eps) * weight.reshape(-1).abs()).reshape(x.shape)
    early = once(y.abs(), unit, weight.reshape(-1).abs()).reshape(x.shape)
    bound = early + (APPROXIMATE + gamma(width + 4)) * scaled.abs() + 2.0 * gamma(width + 4) * size
    value = scaled if bias is None else scaled + bias.reshape(-1).reshape(x.shape[x.dim() - dims :])
    return Expected(value, combined(ROUNDED * early, SUM * width**0.5 * size), bound=bound)


@operator("LayerNormOperation")
def layer(o: Operands) -> Outputs:
    kind, p = _kind(o)
    quant, unit, eps, x = p.param("quantType", 0), _rounding(o), p.param("epsilon", 1e-5), o.wide(0)
    if quant not in (0, _INT8):
        raise Declined(f"quantType {quant} is none that is known here")
    at, terms = 1, [x]
    if kind != NORM:
        terms.append(o.wide(1) if quant else p.param("zoomScaleValue", 1.0) * o.wide(1))
        at = 2
    whole, weight, bias = _sum(*terms), o.wide(at), o.wide(at + 1)
    dims = 1
    if kind == NORM and not quant:
        axis = p.param("beginNormAxis", 0)
        dims = x.dim() - axis if axis >= 0 else -axis
    if not 0 < dims <= x.dim() or weight.numel() != x.shape[x.dim() - dims :].numel() or bias.numel() != weight.numel():
        raise Declined(f"gamma {list(weight.shape)} does not fit an input {list(x.shape)}")
    y = _layer(whole, weight, bias, eps, unit, dims)
    if kind != NORM:
        y = replace(y, bound=y.bound + 2.0 * unit * y.value.abs(), noise=y.noise + ROUNDED * unit * y.value.abs())
    if not quant:
        return {"output.0": y} | ({"output.1": _total(terms, unit)} if kind == PRENORM else {})
    if kind == NORM and (how := p.param("dynamicQuantType", 0)):
        return dynamic(o, replace(y, bound=y.bound + unit * y.value.abs()), how)
    scale, offset = _flat(o.tensor(at + 2)), _flat(o.tensor(at + 3))
    place = 0 if kind == NORM else 1
    mine = o.output(place)
    factor = min((1.0 / scale, scale), key=lambda f: _distance(y.value * f + offset, mine))
    error = (y.bound + unit * y.value.abs()) * factor.abs() + unit * (y.value * factor).abs() + 2.0**-10
    codes = coded(y.value * factor + offset, mine, error)
    return {f"output.{place}": codes} | ({} if kind == NORM else {"output.0": y})


def _distance(y: Tensor, mine: Tensor) -> float:
    if y.numel() != mine.numel():
        raise Declined(f"codes for {list(y.shape)} where {list(mine.shape)} was captured")
    return float((y.clamp(-128, 127).reshape(-1) - mine.double().reshape(-1)).square().sum())


@operator("CohereLayerNormOperation")
def cohere(o: Operands) -> Outputs:
    """(x [..., heads, width], gamma [heads, width])"""
    x, weight = o.wide(0), o.wide(1)
    y = _layer(x, torch.ones(x.shape[-1], dtype=torch.float64), None, o.param("epsilon", 1e-5), _rounding(o))
    size = weight.abs()
    return {"output.0": Expected(y.value * weight, y.noise * size, bound=y.bound * size)}


  # a torch.Tensor


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
