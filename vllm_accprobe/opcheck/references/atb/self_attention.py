"""SelfAttention of ATB: requests one after the other in a batch, with and without a cache of keys and values.

Formula: softmax(clamp(qkScale q' k) + mask) v [Vaswani et al., arXiv 1706.03762], q' = qScale q, heads shared as in GQA
[Ainslie et al., arXiv 2305.13245]; the error as references/attention.py has it. Inputs, in this order, each where the
parameters ask for it: PA_ENCODER: query, key, value, mask, lengths, slopes; value is the first mlaVHeadSize channels of
key where that is set. PREFIX_ENCODER: query, key and value caches in blocks, block tables, mask, lengths of queries, of
keys, slopes. Else: query, key, value, key cache, value cache, mask, lengths with the past (tokenOffset), lengths,
layer: caches [layers, requests, most, heads * d]; key and value are written to them behind the past, and then looked
back at; with kvcacheCfg K_BYPASS_V_BYPASS there are no key and value, and the caches hold all. batchRunStatusEnable:
requests whose status is 0 have no rows. Declined: LogN scales, int8 inputs, BNSD, caches of a window's length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Declined, Expected, gamma
from vllm_accprobe.opcheck.references.atb import masks
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, copied, operator
from vllm_accprobe.opcheck.references.paged.paged_attention import past
from vllm_accprobe.opcheck.references.parts import unit_of

Tensor = Any  # a torch.Tensor
ENCODER, DECODER, PA_ENCODER, PREFIX = 1, 2, 3, 4
_BYPASS = 1


@dataclass(frozen=True)
class ScoreRule:
    """What is done to scores. scale; rounded: that a kernel may round them to, 0.0 for float32; low, high: that they
    are clamped to, None for not at all."""

    scale: float
    rounded: float = 0.0
    low: float | None = None
    high: float | None = None

    def scores(self, q: Tensor, k: Tensor, added: Tensor | None) -> Tensor:
        """float64 [heads, n, m] of q [n, heads, d] and k [m, heads, d]."""
        found = torch.einsum("nhd,mhd->hnm", q, k) * self.scale
        if self.low is not None and self.high is not None:
            found = found.clamp(self.low, self.high)
        return found if added is None else found + added


def attended(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, added: Tensor | None, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, noise, bound), float64 [n, heads, e], as references/attention.py's attend has them: q [n, heads, d], k
    [m, kv heads, d], v [m, kv heads, e]."""
    heads, kv = q.shape[1], k.shape[1]
    if not kv or heads % kv:
        raise Declined("query heads are no multiple of key heads")
    k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
    s = rule.scores(q, k, added)
    p = torch.nan_to_num(torch.softmax(s, -1))
    by_head = v.transpose(0, 1)
    out, sizes = (p @ by_head).transpose(0, 1), (p @ by_head.abs()).transpose(0, 1)
    own = ROUNDED * unit
    # a score off by e moves a probability by e of itself
    moved = ROUNDED * rule.rounded * torch.where(p > 0, s, 0.0).abs()
    noise = (p * p * (own * own + 2.0 * moved * moved) @ (by_head * by_head)).sqrt().transpose(0, 1)
    largest = abs(rule.scale) * q.norm(dim=-1) * k.norm(dim=-1).amax(0)
    if added is not None:
        largest = largest + torch.where(p > 0, added.expand_as(p), 0.0).abs().amax(-1).T
    score = (gamma(q.shape[-1] + 8) + 4.0 * SUM + 2.0 * rule.rounded) * largest.unsqueeze(-1)
    relative = unit + APPROXIMATE + 2.0 * score
    return out, noise, relative * (sizes + out.abs()) + gamma(k.shape[0] + 8) * sizes


@dataclass
class BatchRows:
    """Outputs of requests, put together: [tokens, heads, e] each."""

    value: Tensor
    noise: Tensor
    bound: Tensor
    known: Tensor

    @classmethod
    def empty(cls, tokens: int, heads: int, width: int) -> BatchRows:
        value, noise, bound = (torch.zeros(tokens, heads, width, dtype=torch.float64) for _ in range(3))
        return cls(value, noise, bound, torch.zeros(tokens, dtype=torch.bool))

    def put(self, begin: int, found: tuple[Tensor, Tensor, Tensor]) -> None:
        end = begin + len(found[0])
        for whole, part in zip((self.value, self.noise, self.bound), found, strict=True):
            whole[begin:end] = part
        self.known[begin:end] = True

    def expected(self, like: Tensor, heads: int) -> Expected:
        """Raises Declined where that is not what was captured."""
        if like.numel() != self.value.numel() or (like.dim() and len(like) != len(self.known) and not self.known.all()):
            raise Declined(f"an output {list(self.value.shape)} where {list(like.shape)} was captured")
        value, noise, bound = (t.reshape(like.shape) for t in (self.value, self.noise, self.bound))
        rows = None if bool(self.known.all()) else self.known
        return Expected(value, noise, rows=rows, reason="no row of a request", bound=bound, groups=heads)


def lengths(t: Tensor, rows: int) -> list[int]:
    """Of requests in a batch of ``rows`` rows; raises Declined."""
    found = [int(n) for n in t.reshape(-1)]
    if any(n < 0 for n in found) or sum(found) > rows:
        raise Declined(f"lengths of {sum(found)} rows where there are {rows}")
    return found


def _plain(o: Operands) -> None:
    """Raises Declined for what has no reference."""
    for name, what in (("scaleType", "a LogN scale"), ("quantType", "int8 queries, keys and values"),
                       ("inputLayout", "the layout BNSD"), ("cacheType", "a cache of a window's length")):  # fmt: skip
        if o.param(name, 0):
            raise Declined(f"{what} has no reference")


def rule_of(o: Operands, scale: float) -> ScoreRule:
    """With kernelType 0 products of float16 are float16 [ATB's declaration of KernelType]."""
    rounded = unit_of(o.tensor(0)) if o.tensor(0).dtype == torch.float16 and not o.param("kernelType", 0) else 0.0
    if o.param("clampType", 0):
        return ScoreRule(scale, rounded, o.param("clampMin", 0.0), o.param("clampMax", 0.0))
    return ScoreRule(scale, rounded)


def _calc(o: Operands) -> int:
    """calcType; where nothing tells it, what so many inputs can only be."""
    if o.has("calcType"):
        return o.param("calcType", 0)
    return PA_ENCODER if o.param("kvcacheCfg", 0) != _BYPASS and len(o) <= 5 else 0


def _mask_kind(o: Operands, at: int) -> int:
    if o.has("maskType") or o.maybe(at) is None:
        return o.param("maskType", 0)
    return masks.NORM if o.tensor(at).is_floating_point() else masks.NONE


@operator("SelfAttentionOperation")
def self_attention(o: Operands) -> Outputs:
    _plain(o)
    calc = _calc(o)
    if calc == PREFIX:
        return {"output.0": _prefix(o)}
    if calc == PA_ENCODER:
        return {"output.0": _pa_encoder(o)}
    return _with_cache(o, calc)


def _heads(o: Operands) -> tuple[int, int]:
    heads = o.param("headNum", 0)
    kv = o.param("kvHeadNum", 0) or heads
    if heads <= 0 or kv <= 0:
        raise Declined(f"headNum {heads}, kvHeadNum {kv}")
    return heads, kv


def _split(t: Tensor, heads: int) -> Tensor:
    """[tokens, heads * d], [tokens, heads, d] or [batch, tokens, heads, d] as float64 [tokens, heads, d]."""
    tokens = t.shape[:2].numel() if t.dim() == 4 else len(t)
    if t.numel() % (tokens * heads or 1):
        raise Declined(f"{list(t.shape)} is not cut by {heads} heads")
    return t.double().reshape(tokens, heads, -1)


def _pa_encoder(o: Operands) -> Expected:
    heads, kv = _heads(o)
    latent = o.param("mlaVHeadSize", 0)
    at = 2 if latent else 3
    q, k = _split(o.tensor(0), heads), _split(o.tensor(1), kv)
    v = k[..., :latent] if latent else _split(o.tensor(2), kv)
    kind = _mask_kind(o, at)
    mask = o.tensor(at) if kind != masks.NONE else None
    given = o.tensor(at + (kind != masks.NONE))
    # [2, batch]: of queries and of keys
    pair = given.dim() == 2 and len(given) == 2
    own, theirs = (lengths(given[j], len(t)) for j, t in enumerate((q, k))) if pair else (lengths(given, len(q)),) * 2
    if sum(theirs) > len(k):
        raise Declined(f"lengths of {sum(theirs)} keys where there are {len(k)}")
    add = masks.mask_of(o, kind, mask, heads, len(own), o.param("windowSize", 0))
    out = BatchRows.empty(len(q), heads, v.shape[-1])
    # qScale is not the encoder's [ATB's published runner]
    rule, unit, i, j = rule_of(o, o.param("qkScale", 1.0)), unit_of(o.tensor(0)), 0, 0
    for r, (n, m) in enumerate(zip(own, theirs, strict=True)):
        if n:
            out.put(i, attended(q[i : i + n], k[j : j + m], v[j : j + m], rule, add(r, n, m), unit))
        i, j = i + n, j + m
    return out.expected(o.output(), heads)


def _prefix(o: Operands) -> Expected:
    """Keys and values [blocks, slots, kv heads, d]."""
    heads, kv = _heads(o)
    kind = o.param("maskType", 0)
    at = 4 if kind == masks.CAUSAL else 5
    q, keys, values, table = _split(o.tensor(0), heads), o.wide(1), o.wide(2), o.tensor(3)
    own, theirs = lengths(o.tensor(at), len(q)), [int(n) for n in o.tensor(at + 1).reshape(-1)]
    if len(theirs) != len(own) or kind not in (masks.CAUSAL, masks.NORM_COMPRESS):
        raise Declined(f"maskType {kind} of a prefix has no reference")
    out, rule, unit, i = (
        BatchRows.empty(len(q), heads, values.shape[-1]),
        rule_of(o, o.param("qkScale", 1.0)),
        unit_of(o.tensor(0)),
        0,
    )
    for r, (n, m) in enumerate(zip(own, theirs, strict=True)):
        if n > m:
            raise Declined("more queries than keys")
        if n:
            k, v = (past(t, table[r], m).reshape(m, kv, -1) for t in (keys, values))
            out.put(i, attended(q[i : i + n], k, v, rule, masks.causal(n, m), unit))
        i += n
    return out.expected(o.output(), heads)


def _with_cache(o: Operands, calc: int) -> Outputs:
    heads, kv = _heads(o)
    bypass = o.param("kvcacheCfg", 0) == _BYPASS
    kind = o.param("maskType", 0)
    masked = kind != masks.NONE and not (calc == DECODER and kind == masks.WINDOW)
    at = 1 if bypass else 3
    keys, values = o.tensor(at), o.tensor(at + 1)
    mask = o.tensor(at + 2) if masked else None
    at += 2 + masked
    offsets, q = [int(n) for n in o.tensor(at).reshape(-1)], _split(o.tensor(0), heads)
    own, layer = lengths(o.tensor(at + 1), len(q)), int(o.tensor(at + 2).reshape(-1)[0])
    if len(offsets) != len(own):
        raise Declined("as many lengths with the past as without were expected")
    active = [True] * len(own)
    if o.param("batchRunStatusEnable", False):
        active = [bool(n) for n in o.tensor(at + 3).reshape(-1)][: len(own)]
    if not bypass:
        keys, values = (_written(c, o.tensor(k), layer, offsets, own, active) for k, c in ((1, keys), (2, values)))
    add = masks.mask_of(o, kind, mask, heads, len(own), o.param("windowSize", 0))
    rule = rule_of(o, o.param("qkScale", 1.0) * (o.param("qScale", 1.0) or 1.0))
    if keys.shape[-1] != kv * q.shape[-1] or values.shape[-1] % kv:
        raise Declined(f"caches {list(keys.shape)} do not fit {kv} key heads and queries of width {q.shape[-1]}")
    out, unit, i = BatchRows.empty(len(q), heads, values.shape[-1] // kv), unit_of(o.tensor(0)), 0
    for r, (n, m) in enumerate(zip(own, offsets, strict=True)):
        if n and active[r]:
            if m < n:
                raise Declined("fewer keys than queries")
            k, v = (_rows_of(c, layer, r, m, kv) for c in (keys, values))
            out.put(i, attended(q[i : i + n], k, v, rule, add(r, n, m), unit))
        i += n
    found = {"output.0": out.expected(o.output(), heads)}
    return found if bypass else {**found, "inplace.3": copied(keys), "inplace.4": copied(values)}


def _rows_of(cache: Tensor, layer: int, r: int, m: int, kv: int) -> Tensor:
    """The first m rows of request r, float64 [m, kv heads, d]; cache [layers, requests, most, kv * d], or without
    layers."""
    if (cache.dim() == 4 and layer >= len(cache)) or cache.dim() not in (3, 4):
        raise Declined(f"layer {layer} of a cache {list(cache.shape)} has no reference")
    rows = cache[layer] if cache.dim() == 4 else cache
    if r >= len(rows) or m > rows.shape[1] or rows.shape[2] % kv:
        raise Declined("a request is longer than its cache")
    return rows[r, :m].double().reshape(m, kv, -1)


def _written(cache: Tensor, new: Tensor, layer: int, offsets: list[int], own: list[int], active: list[bool]) -> Tensor:
    """The cache with the requests' new rows behind their past."""
    if cache.dim() != 4 or layer >= len(cache) or len(own) > cache.shape[1]:
        raise Declined(f"a cache {list(cache.shape)} has no reference")
    rows = new.reshape(-1, cache.shape[-1])
    found, i = cache.clone(), 0
    for r, (m, n) in enumerate(zip(offsets, own, strict=True)):
        if m < n or m > cache.shape[2] or i + n > len(rows):
            raise Declined("a request is longer than its cache")
        if active[r]:
            found[layer, r, m - n : m] = rows[i : i + n].to(cache.dtype)
        i += n
    return found
