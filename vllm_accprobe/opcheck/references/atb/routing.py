"""Routing to experts and draws of ATB: Gating, GroupTopk, FusedAddTopkDiv, TopkToppSampling, Multinomial.

Formulas: Gating: a stable sort by expert, places divided by topkExpertNum, sums of counts; with deviceExpert only those
of these experts, zeros behind. GroupTopk: scores of groups whose sum of the n largest (largest, without groupMultiFlag)
is not among the k largest become 0, in place. FusedAddTopkDiv: sigmoid(x) + bias chooses groups so, then experts;
weights are the sigmoids of these, with isNorm divided by their sum and times scale [DeepSeek-V3, arXiv 2412.19437,
section 2.1.2]. Sampling: probabilities in falling order, those behind the k-th left out, summed up; P is the last sum
below top-p (the first where none is); the token is the first whose sum is above rand * P [ATB's published tests]. rand
is drawn by the C library after srand(seed), which other libraries do not repeat: any token that some rand in 0 .. 1
gives is right, and its probability must be that token's. With exponential noise (input 3): the largest of probability /
noise among the tokens whose sum is not above top-p. Rows with a tie, or a sum at its limit, have no reference.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected, decline_if
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, operator
from vllm_accprobe.opcheck.references.parts import equal
from vllm_accprobe.opcheck.roundings import APPROXIMATE

Tensor = Any  # a torch.Tensor
_TIED = "two of its groups or experts are tied"
_NEAR = 2.0**-18
"""Chosen: how near two float32 scores may be for a kernel's sigmoid or sum to turn them round."""


@operator("GatingOperation")
def gating(o: Operands) -> list[Tensor]:
    """(expert of each place, 0 .. places - 1) → (tokens, sums of counts, places, how many are valid)"""
    experts, places = o.tensor(0).reshape(-1).long(), o.tensor(1).reshape(-1).long()
    each, count, own = o.param("topkExpertNum", 1), o.param("cumSumNum", 0), sorted(o.numbers("deviceExpert", []))
    if each < 1 or count < 1 or len(places) != len(experts):
        raise Declined("topkExpertNum or cumSumNum does not fit its inputs")
    if len(experts) and not 0 <= int(experts.min()) <= int(experts.max()) < count:
        raise Declined("an expert is none of cumSumNum")
    decline_if(any(not isinstance(e, int) or not 0 <= e < count for e in own), "deviceExpert holds none of cumSumNum")
    order = torch.argsort(experts, stable=True)
    kept, counts = places[order], torch.bincount(experts, minlength=count)
    valid = []
    if own:
        kept, counts = kept[torch.isin(experts[order], torch.tensor(own))], counts[torch.tensor(own)]
        valid = [torch.tensor([len(kept)])]
    padded = [torch.cat((t, t.new_zeros(len(places) - len(kept)))) for t in (kept // each, kept)]
    found = [padded[0], counts.cumsum(0), padded[1], *valid]
    return [t.reshape(o.output(k).shape) for k, t in enumerate(found)]


def _left_out(x: Tensor, groups: int, keep: int, n: int) -> tuple[Tensor, Tensor]:
    """bool [tokens, experts] of groups that are not kept, bool [tokens] of rows without a tie; x float64."""
    if groups < 1 or x.shape[-1] % groups or not 0 <= keep <= groups or not 1 <= n <= x.shape[-1] // groups:
        raise Declined("its numbers of groups and experts do not fit its input")
    score = x.reshape(len(x), groups, -1).topk(n).values.sum(-1)
    order = torch.argsort(score, descending=True, stable=True)
    sorted_ = score.gather(1, order)
    clear = torch.ones(len(x), dtype=torch.bool)
    if 0 < keep < groups:
        clear = (sorted_[:, keep - 1] - sorted_[:, keep]) > _NEAR * sorted_[:, keep - 1].abs()
    out = torch.zeros(len(x), groups, dtype=torch.bool).scatter(1, order[:, keep:], True)
    return out.repeat_interleave(x.shape[-1] // groups, 1), clear


@operator("GroupTopkOperation", writes=0)
def group_topk(o: Operands) -> Expected:
    """(x, numbers), x in place."""
    x = o.tensor(0)
    n = o.param("n", 1) if o.param("groupMultiFlag", 0) else 1
    out, clear = _left_out(x.double(), o.param("groupNum", 1), o.param("k", 0), n)
    rows, why = (None, "") if bool(clear.all()) else (clear, _TIED)
    return equal(x.masked_fill(out, 0.0), rows=rows, reason=why)


@operator("FusedAddTopkDivOperation")
def fused_topk(o: Operands) -> list[Expected]:
    """(x, bias, copies of each expert, where they are) → (weights, experts)"""
    x, k = torch.sigmoid(o.wide(0)), o.param("k", 0)
    decline_if(o.param("activationType", 8) != 8, "an activation that is no SIGMOID has no reference")
    total = x + o.wide(1)
    out, clear = _left_out(total, o.param("groupNum", 1), o.param("groupTopk", 0), o.param("n", 1))
    kept = total.masked_fill(out, 0.0)
    decline_if(not 0 < k <= kept.shape[-1], f"{k} of {kept.shape[-1]} experts cannot be chosen")
    order = torch.argsort(kept, descending=True, stable=True)
    sorted_ = kept.gather(1, order)[:, : k + 1]
    gaps = sorted_[:, :-1] - sorted_[:, 1:]
    clear = clear & (gaps > _NEAR * sorted_[:, :-1].abs()).all(-1)
    experts = order[:, :k]
    y = x.gather(1, experts)
    if o.param("isNorm", True):
        y = y / y.sum(-1, keepdim=True) * o.param("scale", 1.0)
    if o.param("enableExpertMapping", False):
        copies, where = o.tensor(2).reshape(-1).long(), o.tensor(3).long()
        turn = torch.arange(len(x)).unsqueeze(1) % copies[experts].clamp(min=1)
        experts = where[experts, turn]
    rows, why = (None, "") if bool(clear.all()) else (clear, _TIED)
    weights = Expected(y, 2.0**-22 * y, bound=2.0 * APPROXIMATE * y.abs(), rows=rows, reason=why)
    return [weights, equal(experts, rows=rows, reason=why)]


SINGLE, MULTINOMIAL, EXPONENTIAL = 0, 1, 2
_BORDER = 2.0**-9
"""Chosen: how near to its limit a sum of float16 probabilities may be to fall on either side, of itself."""
_AT_LIMIT = "a sum of probabilities lies at its limit, or two quotients are tied"


def _sorted(o: Operands) -> tuple[Tensor, Tensor]:
    p = o.wide(0)
    decline_if(p.dim() != 2, f"probabilities {list(p.shape)} are no rows")
    return torch.sort(p, dim=-1, descending=True, stable=True)


def _column(t: Tensor, rows: int) -> Tensor:
    decline_if(t.numel() not in (1, rows), f"{t.numel()} limits for {rows} rows")
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
