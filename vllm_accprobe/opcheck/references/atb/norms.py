"""Norms and rotary embeddings of ATB: RmsNorm and LayerNorm alone, with an addition before them, in int8; Rope.

Formulas: references/norms.py's. RmsNorm: NORM (x, gamma), Gemma's with 1 + gamma, with rstd its reciprocal root as a
second output; PRENORM and POSTNORM (x, bias where there is one, residual, gamma): the norm of the sum, PRENORM the sum
as well. With int8: NORM (x, gamma, beta, scale, offset), PRENORM (x, residual, gamma, beta, scale, offset), POSTNORM
(x, residual, gamma, scale, offset): round((y + beta) / scale + offset). LayerNorm: NORM (x, gamma, beta) from
beginNormAxis on, PRENORM and POSTNORM (x, residual, gamma, beta): of x + zoomScaleValue * residual; with int8 round(y /
scale + offset) as ATB's published kernels have it, or round(y * scale + offset) as its tests have it: the nearer
counts, for they differ by a factor. Rope: rotary.py's with tables of a row for each token: rotaryCoeff c cuts a head of
d channels (the width of cos) into c parts, and turns part 2 i with part 2 i + 1. Any other, and cosFormat 1,
whose meaning is not public, are declined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected, decline_if
from vllm_accprobe.opcheck.references.atb.linear import coded, dynamic
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, operator
from vllm_accprobe.opcheck.references.norms import layer_normed, rms_and_root, rms_gradient, rms_normed
from vllm_accprobe.opcheck.references.parts import reshaped, unit_of, within
from vllm_accprobe.opcheck.references.rotary import table_rotated, turn
from vllm_accprobe.opcheck.roundings import ROUNDED, SUM, sum_of_two

Tensor = Any  # a torch.Tensor
NORM, PRENORM, POSTNORM = 1, 2, 3
_INT8 = 2
_PARTS = {NORM: "normParam", PRENORM: "preNormParam", POSTNORM: "postNormParam"}


def _kind(o: Operands) -> tuple[int, Operands]:
    """Which norm, and its own parameters. ATB's first release has them at the top, and one norm."""
    if not o.has("layerType") and o.has("epsilon", "rmsNormEps"):
        return NORM, o
    kind = o.param("layerType", 0)
    decline_if(kind not in _PARTS, f"layerType {kind} is none that is known here")
    return kind, o.part(_PARTS[kind])


def _flat(t: Tensor) -> Tensor:
    """A weight [1, ..., width] as float64 [width]."""
    return t.double().reshape(-1)


def _total(terms: list[Tensor], unit: float) -> Expected:
    """A sum that is handed on: of two numbers, or of three."""
    value = sum(terms[1:], terms[0])
    if len(terms) == 2:
        return sum_of_two(value, unit)
    size = sum(t.abs() for t in terms)
    return Expected(value, ROUNDED * unit * size, bound=unit * size)


@operator("RmsNormOperation")
def rms(o: Operands) -> Any:
    kind, p = _kind(o)
    quant, unit = p.param("quantType", 0), o.input_unit
    eps = p.param("rmsNormEps" if p.has("rmsNormEps") and not p.has("epsilon") else "epsilon", 1e-5)
    decline_if(quant not in (0, _INT8), f"quantType {quant} is none that is known here")
    x, at, added = o.wide(0), 1, []
    if kind != NORM:
        count = 2 if not quant and p.param("hasBias", False) else 1
        added = [o.wide(at + k) for k in range(count)]
        at += count
    terms = [x, *(t.expand_as(x) if t.dim() == x.dim() else t for t in added)]
    whole = sum(terms[1:], terms[0])
    weight = o.wide(at)
    if kind == NORM and p.param("rstd", False):
        return rms_and_root(whole, weight, eps, unit)  # the training form: as many dimensions as gamma has
    weight = weight.reshape(-1)
    if weight.numel() != x.shape[-1]:
        raise Declined(f"gamma {list(o.tensor(at).shape)} does not fit an input of width {x.shape[-1]}")
    if kind == NORM and p.param("modelType", 0) == 1:
        weight = weight + 1.0
    half = kind == NORM and p.param("precisionMode", 0) == 1
    y = rms_normed(whole, weight, eps, unit, before=1 if added else 0, behind=3 if half else 1)
    if not quant:
        return [y, _total(terms, unit)] if kind == PRENORM else y
    return _rms_codes(o, kind, p, y, at + 1, terms)


def _rms_codes(o: Operands, kind: int, p: Operands, y: Expected, at: int, terms: list[Tensor]) -> Outputs:
    """The norm in int8; at: the first input behind gamma."""
    bound = y.bound
    if kind != POSTNORM:
        beta = o.maybe(at)
        at += 1
        if beta is not None:
            y = replace(y, value=y.value + _flat(beta))
            bound = bound + SUM * y.value.abs()
    if kind == NORM and (how := p.param("dynamicQuantType", 0)):
        return dynamic(o, replace(y, bound=bound), how)
    scale, offset = _flat(o.tensor(at)), _flat(o.tensor(at + 1))
    codes = coded(y.value / scale + offset, o.output(0), bound / scale.abs() + 2.0**-10, like=y)
    more = _total(terms, unit_of(o.output(1))) if kind == PRENORM else y
    return {"output.0": codes} if kind == NORM else {"output.0": codes, "output.1": more}


@operator("RmsNormBackwardOperation")
def rms_backward(o: Operands) -> Any:
    """(dy, x, rstd, gamma) → (dx, dgamma)"""
    dy, x, rstd, weight = (o.wide(k) for k in range(4))
    return rms_gradient(dy, x, weight, rstd, o.input_unit)


@operator("GatherPreRmsNormOperation")
def gathered_rms(o: Operands) -> list[Expected]:
    """(x, rows, which of them, gamma) → (norm of x + rows[which], that sum)."""
    x, rows = o.wide(0), o.wide(1)
    at = within(o.tensor(2).reshape(-1), len(rows))
    decline_if(len(at) != len(x), "its indices are not one for each row")
    terms = [x, rows[at]]
    y = rms_normed(x + rows[at], _flat(o.tensor(3)), o.param("epsilon", 1e-5), o.input_unit, before=1)
    return [y, _total(terms, unit_of(o.output(1)))]


@operator("LayerNormOperation")
def layer(o: Operands) -> Any:
    kind, p = _kind(o)
    quant, unit, eps, x = p.param("quantType", 0), o.input_unit, p.param("epsilon", 1e-5), o.wide(0)
    decline_if(quant not in (0, _INT8), f"quantType {quant} is none that is known here")
    at, terms = 1, [x]
    if kind != NORM:
        terms.append(o.wide(1) if quant else p.param("zoomScaleValue", 1.0) * o.wide(1))
        at = 2
    whole, weight, bias = sum(terms[1:], terms[0]), o.wide(at), o.wide(at + 1)
    dims = 1
    if kind == NORM and not quant:
        axis = p.param("beginNormAxis", 0)
        dims = x.dim() - axis if axis >= 0 else -axis
    if not 0 < dims <= x.dim() or weight.numel() != x.shape[x.dim() - dims :].numel() or bias.numel() != weight.numel():
        raise Declined(f"gamma {list(weight.shape)} does not fit an input {list(x.shape)}")
    y = layer_normed(whole, weight, bias, eps, unit, dims, before=0 if kind == NORM else 1)
    if not quant:
        return [y, _total(terms, unit)] if kind == PRENORM else y
    if kind == NORM and (how := p.param("dynamicQuantType", 0)):
        return dynamic(o, replace(y, bound=y.bound + unit * y.value.abs()), how)
    scale, offset = _flat(o.tensor(at + 2)), _flat(o.tensor(at + 3))
    place = 0 if kind == NORM else 1
    mine = o.output(place)
    factor = min((1.0 / scale, scale), key=lambda f: _distance(y.value * f + offset, mine))
    error = (y.bound + unit * y.value.abs()) * factor.abs() + unit * (y.value * factor).abs() + 2.0**-10
    codes = coded(y.value * factor + offset, mine, error, like=y)
    return {f"output.{place}": codes} | ({} if kind == NORM else {"output.0": y})


def _distance(y: Tensor, mine: Tensor) -> float:
    decline_if(y.numel() != mine.numel(), f"codes for {list(y.shape)} where {list(mine.shape)} was captured")
    return float((y.clamp(-128, 127).reshape(-1) - mine.double().reshape(-1)).square().sum())


@operator("CohereLayerNormOperation")
def cohere(o: Operands) -> Expected:
    """(x [..., heads, width], gamma [heads, width])"""
    x, weight = o.wide(0), o.wide(1)
    y = layer_normed(x, None, None, o.param("epsilon", 1e-5), o.input_unit)
    return replace(y.map(lambda t: t * weight.abs()), value=y.value * weight)


@operator("RopeOperation")
def rope(o: Operands) -> list[Expected]:
    """(q, k [tokens, heads * d] or [batch, tokens, heads, d], cos, sin [tokens, d], lengths)"""
    cos, sin = (o.wide(k).reshape(-1, o.tensor(k).shape[-1]) for k in (2, 3))
    d, parts = cos.shape[-1], o.param("rotaryCoeff", 4)
    if parts not in (2, 4, d) or d % parts or sin.shape != cos.shape:
        raise Declined(f"rotaryCoeff {parts} for cosines {list(cos.shape)} has no reference")
    decline_if(o.param("cosFormat", 0), "cosFormat 1 has no public definition")
    found = []
    for k in range(2):
        q = o.tensor(k)
        tokens = q.shape[:2].numel() if q.dim() == 4 else q.shape[0]
        if tokens != len(cos) or q.numel() % (tokens * d or 1):
            raise Declined(f"cosines {list(cos.shape)} are not one row for each of {tokens} tokens")
        x = q.double().reshape(tokens, -1, d)
        y = table_rotated(x, cos.unsqueeze(1), sin.unsqueeze(1), turn(x, parts), unit_of(q))
        found.append(reshaped(y, o.output(k).shape))
    return found


@operator("RopeQConcatOperation")
def rope_concat(o: Operands) -> Expected:
    """(q [tokens, heads * d], cos, sin [tokens, d], other [tokens, heads, n]) → turned halves with other."""
    cos, sin, other, out = o.wide(1), o.wide(2), o.wide(3), o.output()
    d, heads = cos.shape[-1], other.shape[1]
    x = o.wide(0).reshape(len(cos), heads, d)
    y = table_rotated(x, cos.unsqueeze(1), sin.unsqueeze(1), turn(x, 2), o.input_unit)
    none = torch.zeros_like(other)
    value, noise, bound = (torch.cat(pair, 2) for pair in ((y.value, other), (y.noise, none), (y.bound, none)))
    return reshaped(Expected(value, noise, bound=bound), out.shape)
