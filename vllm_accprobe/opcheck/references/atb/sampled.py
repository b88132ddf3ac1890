"""Draws of ATB: TopkToppSampling and Multinomial.

Formulas: probabilities in falling order, those behind the k-th left out, summed up; P is the last sum that is below
top-p (the first where none is); the token is the first whose sum is above rand * P [ATB's published tests]. rand is the
first number of the C library's generator after srand(seed), divided by 2**31 - 1, which other libraries do not draw:
such a draw is held against all tokens that some rand in 0 .. 1 can give, and its probability must be that token's. With
given exponential noise (input 3): the largest of probability / noise among the tokens whose sum is not above top-p.
Multinomial: no token of probability 0, one of the row's. A row where a sum lies at its limit has no reference.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, operator

Tensor = Any  # a torch.Tensor
SINGLE, MULTINOMIAL, EXPONENTIAL = 0, 1, 2
_BORDER = 2.0**-9
"""Chosen: how near to its limit a sum of float16 probabilities may be to fall on either side, of itself."""
_AT_LIMIT = "a sum of probabilities lies at its limit, or two quotients are tied"


def _sorted(o: Operands) -> tuple[Tensor, Tensor]:
    p = o.wide(0)
    if p.dim() != 2:
        raise Declined(f"probabilities {list(p.shape)} are no rows")
    return torch.sort(p, dim=-1, descending=True, stable=True)


def _column(t: Tensor, rows: int) -> Tensor:
    if t.numel() not in (1, rows):
        raise Declined(f"{t.numel()} limits for {rows} rows")
    return t.reshape(-1, 1).expand(rows, 1)


@operator("TopkToppSamplingOperation")
def sampling(o: Operands) -> Outputs:
    """(probabilities, top-p), or (probabilities, top-k, top-p, noise): → (token, its probability)"""
    kind = o.param("topkToppSamplingType", 0)
    p, places = _sorted(o)
    if kind == SINGLE:
        keep = torch.full((len(p), 1), o.param("topk", 100))
        top = _column(o.wide(1), len(p))
    elif kind in (MULTINOMIAL, EXPONENTIAL):
        keep, top = _column(o.tensor(1).long(), len(p)), _column(o.wide(2), len(p))
        # input 1 counts from 0: numbers below the one at that place are left out
        keep = (p >= p.gather(1, keep.clamp(0, p.shape[1] - 1))).sum(-1, keepdim=True)
    else:
        raise Declined(f"topkToppSamplingType {kind} has no reference")
    inside = torch.arange(p.shape[1]) < keep
    sums = torch.where(inside, p, 0.0).cumsum(-1)
    near = (inside & ((sums - top).abs() <= _BORDER * top.abs())).any(-1)
    if kind == EXPONENTIAL:
        return _by_noise(o, p, places, inside & (sums <= top), near)
    below = ((sums < top) & inside).sum(-1, keepdim=True)
    # the token that some rand gives: its sum before it is below P
    last = sums.gather(1, (below - 1).clamp(min=0))
    return _one_of(o, places, p, (sums - torch.where(inside, p, 0.0) <= last * (1.0 + _BORDER)) & inside)


def _by_noise(o: Operands, p: Tensor, places: Tensor, inside: Tensor, near: Tensor) -> Outputs:
    quotient = torch.where(inside, p, 0.0) / o.wide(3)
    best, at = quotient.sort(dim=-1, descending=True, stable=True)
    tied = best[:, 0] - best[:, 1] <= _BORDER * best[:, 0] if p.shape[1] > 1 else torch.zeros(len(p), dtype=torch.bool)
    known = ~(near | tied | (best[:, 0] <= 0))
    rows = None if bool(known.all()) else known
    at = at[:, :1]
    return {
        "output.0": Expected(places.gather(1, at).reshape(o.output(0).shape), unit=0.0, rows=rows, reason=_AT_LIMIT),
        "output.1": Expected(p.gather(1, at).reshape(o.output(1).shape), rows=rows, reason=_AT_LIMIT),
    }


def _one_of(o: Operands, places: Tensor, p: Tensor, allowed: Tensor) -> Outputs:
    """Mine's token where it is one of those, else the first; and its own probability."""
    mine, rows = o.output(0).reshape(len(p), -1).long(), torch.arange(len(p)).unsqueeze(1)
    size = p.shape[1]
    may = torch.zeros_like(allowed).scatter(1, places, allowed)
    own = torch.zeros_like(p).scatter(1, places, p)
    inside = (mine >= 0) & (mine < size)
    at = mine.clamp(0, size - 1)
    token = torch.where(inside & may[rows, at], mine, places[:, :1].expand_as(mine))
    found = {"output.0": Expected(token.reshape(o.output(0).shape), unit=0.0, note="no rand between 0 and 1 gives it")}
    if "output.1" in o.call.outputs:
        found["output.1"] = Expected(own[rows, token].reshape(o.output(1).shape))
    return found


@operator("MultinomialOperation")
def multinomial(o: Operands) -> Outputs:
    """(probabilities): → [rows, numSamples]"""
    p, places = _sorted(o)
    return _one_of(o, places, p, p > 0)
