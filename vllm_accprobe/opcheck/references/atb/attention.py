"""Attention and caches of ATB: SelfAttention, PagedAttention, ReshapeAndCache, KvCache, BlockCopy, and their masks.

Formula: references/attention.py's, with scores clamp(qkScale qScale q k) + mask. Inputs come in this order, each where
the parameters require it. PA_ENCODER: query, key, value, mask, lengths, slopes; value is the first mlaVHeadSize
channels of key where that is set. PREFIX_ENCODER: query, key and value caches in blocks, block tables, mask, lengths of
queries, of keys, slopes. Else: query, key, value, key cache, value cache, mask, lengths with the past (tokenOffset),
lengths, layer: caches [layers, requests, most, heads * d], to which key and value are written behind the past; with
kvcacheCfg K_BYPASS_V_BYPASS there are no key and value. batchRunStatusEnable: requests whose status is 0 have no rows.
Paged: query, key cache, value cache (not with mlaVHeadSize), block tables, lengths, mask, status of requests, scale and
offset of keys, of values, lengths of queries (with CALC_TYPE_SPEC; else one query for each request). Blocks are
[blocks, slots, kv heads, d], or NZ, [blocks, kv heads * d / 16, slots, 16]; of int8 (code + offset) * channel's scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected, decline_if
from vllm_accprobe.opcheck.references.atb.linear import from_nz, scale_of
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, operator
from vllm_accprobe.opcheck.references.attention import attended
from vllm_accprobe.opcheck.references.caches import NZ, TOKENS
from vllm_accprobe.opcheck.references.paged_attention import past
from vllm_accprobe.opcheck.references.parts import equal, within

Tensor = Any  # a torch.Tensor
(NONE, NORM, ALIBI, NORM_COMPRESS, ALIBI_COMPRESS, ALIBI_SQRT, ALIBI_LEFT, WINDOW, WINDOW_COMPRESS, CAUSAL) = range(10)
Mask = Callable[[int, int, int], "Tensor | None"]
"""(request, queries, keys) → what is added, None for nothing."""


def causal(queries: int, keys: int, window: int = 0) -> Tensor:
    """0 where a query sees a key, the last query being the last key; else minus infinity."""
    at = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
    hidden = (at < 0) | (at >= window) if window else at < 0
    return torch.zeros(queries, keys, dtype=torch.float64).masked_fill(hidden, -math.inf)


def mask_of(o: Operands, kind: int, tensor: Tensor | None, heads: int, batch: int, window: int) -> Mask:
    """What is added to scores, float64 [heads or 1, queries, keys]. NORM: the tensor; where it has ones in place of
    negative numbers (bfloat16's convention) a one hides; 2 dimensions for all requests, 3 and 4 with a request or a
    head first. A NORM mask that is smaller than the request, NORM_COMPRESS and CAUSAL are the lower triangle. ALIBI:
    the tensor, biases and hidden keys together. WINDOW: keys at distance < windowSize. Raises Declined for another kind
    (the compressed forms of alibi are a kernel's own tiles), or for a shape that does not fit."""
    if kind == NONE:
        return lambda i, n, m: None
    if kind in (NORM_COMPRESS, CAUSAL):
        return lambda i, n, m: causal(n, m)
    if kind in (WINDOW, WINDOW_COMPRESS):
        decline_if(window <= 0, "windowSize was not recorded")
        return lambda i, n, m: causal(n, m, window)
    decline_if(kind not in (NORM, ALIBI), f"maskType {kind} has no reference")
    if tensor is None:
        raise Declined("its mask was not captured")
    added = tensor.double()
    if added.dim() == 4 and added.shape[-1] == 16 and added.shape[1] * 16 >= added.shape[2] > 16:
        added = from_nz(added)
    if kind == NORM and bool((added > 0).any()):
        decline_if(bool((added < 0).any()), "its mask both adds and takes away")
        added = torch.where(added > 0, -math.inf, 0.0)
    return lambda i, n, m: _cut(added, kind, heads, batch, i, n, m)


def _cut(added: Tensor, kind: int, heads: int, batch: int, i: int, n: int, m: int) -> Tensor:
    """The part of request i: its first n rows and m columns; one row for all where it has one."""
    if added.dim() == 4:
        part = added[i if len(added) == batch else 0] if len(added) in (1, batch) else None
    elif added.dim() == 3:
        by_head = kind == ALIBI and len(added) == heads
        if by_head and heads == batch > 1 and added.shape[1] == 1:
            raise Declined("whether its mask is one of heads or of requests is not known")
        part = added if by_head else added[i : i + 1] if len(added) == batch else added if len(added) == 1 else None
    else:
        part = added.unsqueeze(0) if added.dim() == 2 else None
    if part is None or len(part) not in (1, heads):
        raise Declined(f"a mask {list(added.shape)} does not fit {batch} requests of {heads} heads")
    if kind == NORM and n > part.shape[1] > 1:
        return causal(n, m)
    if part.shape[2] < m or (part.shape[1] < n and part.shape[1] != 1):
        raise Declined(f"a mask {list(added.shape)} is smaller than {n} queries and {m} keys")
    return part[:, :n, :m]


ENCODER, DECODER, PA_ENCODER, PREFIX = 1, 2, 3, 4
_BYPASS = 1


def _by_request(
    o: Operands, q: Tensor, width: int, own: list[int], one: Callable[[int, int], tuple[Any, ...] | None], scale: float
) -> Expected:
    """Attention of requests that follow one another in q [tokens, heads, d]. own: their queries; one(r, n): (keys,
    values [m, kv heads, d], what is added to scores) of request r with n queries, None where it has no rows."""
    # with kernelType 0 products of float16 are float16 [ATB's declaration of KernelType]
    rounded = o.input_unit if o.tensor(0).dtype == torch.float16 and not o.param("kernelType", 0) else 0.0
    clamp = (o.param("clampMin", 0.0), o.param("clampMax", 0.0)) if o.param("clampType", 0) else None
    ends = [*accumulate(own)]

    def requests() -> Iterator[tuple[Any, ...]]:
        for r, (n, end) in enumerate(zip(own, ends, strict=True)):
            if n and (found := one(r, n)) is not None:
                yield slice(end - n, end), *found[:2], {"added": found[2]}

    y = attended(q, requests(), width, scale=scale, step=o.input_unit, score_step=rounded, clamp=clamp)
    return y.expected(o.output(), q.shape[1])


def lengths(t: Tensor, rows: int) -> list[int]:
    """Of requests in a batch of ``rows`` rows; raises Declined."""
    found = [int(n) for n in t.reshape(-1)]
    decline_if(any(n < 0 for n in found) or sum(found) > rows, f"lengths of {sum(found)} rows where there are {rows}")
    return found


def _decline(o: Operands, **whats: str) -> None:
    """Raises Declined where one of these parameters is set."""
    for name, what in whats.items():
        decline_if(o.param(name, 0), f"{what} has no reference")


def _calc(o: Operands) -> int:
    """calcType; where it is not recorded, the only one that has so many inputs."""
    if o.has("calcType"):
        return o.param("calcType", 0)
    return PA_ENCODER if o.param("kvcacheCfg", 0) != _BYPASS and len(o) <= 5 else 0


@operator("SelfAttentionOperation")
def self_attention(o: Operands) -> Outputs:
    _decline(o, scaleType="a LogN scale", quantType="int8 queries, keys and values", inputLayout="the layout BNSD",
             cacheType="a cache of a window's length")  # fmt: skip
    calc = _calc(o)
    if calc in (PREFIX, PA_ENCODER):
        return {"output.0": _prefix(o) if calc == PREFIX else _pa_encoder(o)}
    return _with_cache(o, calc)


def _heads(o: Operands) -> tuple[int, int]:
    heads = o.param("headNum", 0)
    kv = o.param("kvHeadNum", 0) or heads
    decline_if(heads <= 0 or kv <= 0, f"headNum {heads}, kvHeadNum {kv}")
    return heads, kv


def _split(t: Tensor, heads: int) -> Tensor:
    """[tokens, heads * d], [tokens, heads, d] or [batch, tokens, heads, d] as float64 [tokens, heads, d]."""
    tokens = t.shape[:2].numel() if t.dim() == 4 else len(t)
    decline_if(t.numel() % (tokens * heads or 1), f"{list(t.shape)} is not cut by {heads} heads")
    return t.double().reshape(tokens, heads, -1)


def _pa_encoder(o: Operands) -> Expected:
    heads, kv = _heads(o)
    latent = o.param("mlaVHeadSize", 0)
    at = 2 if latent else 3
    q, k = _split(o.tensor(0), heads), _split(o.tensor(1), kv)
    v = k[..., :latent] if latent else _split(o.tensor(2), kv)
    known = o.has("maskType") or o.maybe(at) is None
    kind = o.param("maskType", 0) if known else NORM if o.tensor(at).is_floating_point() else NONE
    mask = o.tensor(at) if kind != NONE else None
    sizes = o.tensor(at + (kind != NONE))
    o.exactly(at + (kind != NONE) + 1)
    # [2, batch]: of queries and of keys
    pair = sizes.dim() == 2 and len(sizes) == 2
    own, theirs = (lengths(sizes[j], len(t)) for j, t in enumerate((q, k))) if pair else (lengths(sizes, len(q)),) * 2
    decline_if(sum(theirs) > len(k), f"lengths of {sum(theirs)} keys where there are {len(k)}")
    add, starts = mask_of(o, kind, mask, heads, len(own), o.param("windowSize", 0)), [0, *accumulate(theirs)]

    def one(r: int, n: int) -> tuple[Any, ...]:
        keys = slice(starts[r], starts[r + 1])
        return k[keys], v[keys], add(r, n, theirs[r])

    return _by_request(o, q, v.shape[-1], own, one, o.param("qkScale", 1.0))  # qScale is not the encoder's


def _prefix(o: Operands) -> Expected:
    """Keys and values [blocks, slots, kv heads, d]."""
    heads, kv = _heads(o)
    kind = o.param("maskType", 0)
    at = 4 if kind == CAUSAL else 5
    q, keys, values, table = _split(o.tensor(0), heads), o.wide(1), o.wide(2), o.tensor(3)
    own, theirs = lengths(o.tensor(at), len(q)), o.counts(at + 1)
    if len(theirs) != len(own) or kind not in (CAUSAL, NORM_COMPRESS):
        raise Declined(f"maskType {kind} of a prefix has no reference")

    def one(r: int, n: int) -> tuple[Any, ...]:
        decline_if(n > theirs[r], "more queries than keys")
        k, v = (past(t, table[r], theirs[r]).reshape(theirs[r], kv, -1) for t in (keys, values))
        return k, v, causal(n, theirs[r])

    return _by_request(o, q, values.shape[-1], own, one, o.param("qkScale", 1.0))


def _with_cache(o: Operands, calc: int) -> Outputs:
    heads, kv = _heads(o)
    bypass = o.param("kvcacheCfg", 0) == _BYPASS
    kind = o.param("maskType", 0)
    masked = kind != NONE and not (calc == DECODER and kind == WINDOW)
    at = 1 if bypass else 3
    keys, values = o.tensor(at), o.tensor(at + 1)
    mask = o.tensor(at + 2) if masked else None
    at += 2 + masked
    offsets, q = o.counts(at), _split(o.tensor(0), heads)
    own, layer = lengths(o.tensor(at + 1), len(q)), int(o.tensor(at + 2).reshape(-1)[0])
    o.exactly(at + 3 + o.param("batchRunStatusEnable", False))
    decline_if(len(offsets) != len(own), "as many lengths with the past as without were expected")
    active = o.counts(at + 3)[: len(own)] if o.param("batchRunStatusEnable", False) else [1] * len(own)
    if not bypass:
        keys, values = (_written(c, o.tensor(k), layer, offsets, own, active) for k, c in ((1, keys), (2, values)))
    add = mask_of(o, kind, mask, heads, len(own), o.param("windowSize", 0))
    if keys.shape[-1] != kv * q.shape[-1] or values.shape[-1] % kv:
        raise Declined(f"caches {list(keys.shape)} do not fit {kv} key heads and queries of width {q.shape[-1]}")

    def one(r: int, n: int) -> tuple[Any, ...] | None:
        if not active[r]:
            return None
        decline_if(offsets[r] < n, "fewer keys than queries")
        return (*(_rows_of(c, layer, r, offsets[r], kv) for c in (keys, values)), add(r, n, offsets[r]))

    scale = o.param("qkScale", 1.0) * (o.param("qScale", 1.0) or 1.0)
    found = {"output.0": _by_request(o, q, values.shape[-1] // kv, own, one, scale)}
    return found if bypass else {**found, "inplace.3": keys, "inplace.4": values}


def _rows_of(cache: Tensor, layer: int, r: int, m: int, kv: int) -> Tensor:
    """The first m rows of request r, float64 [m, kv heads, d]; cache [layers or none, requests, most, kv * d]."""
    if (cache.dim() == 4 and layer >= len(cache)) or cache.dim() not in (3, 4):
        raise Declined(f"layer {layer} of a cache {list(cache.shape)} has no reference")
    rows = cache[layer] if cache.dim() == 4 else cache
    decline_if(r >= len(rows) or m > rows.shape[1] or rows.shape[2] % kv, "a request is longer than its cache")
    return rows[r, :m].double().reshape(m, kv, -1)


def _written(cache: Tensor, new: Tensor, layer: int, offsets: list[int], own: list[int], active: list[int]) -> Tensor:
    """The cache with the requests' new rows behind their past."""
    if cache.dim() != 4 or layer >= len(cache) or len(own) > cache.shape[1]:
        raise Declined(f"a cache {list(cache.shape)} has no reference")
    rows = new.reshape(-1, cache.shape[-1])
    found, i = cache.clone(), 0
    for r, (m, n) in enumerate(zip(offsets, own, strict=True)):
        decline_if(n < 0 or m < n or m > cache.shape[2] or i + n > len(rows), "a request is longer than its cache")
        if active[r]:
            found[layer, r, m - n : m] = rows[i : i + n].to(cache.dtype)
        i += n
    return found


_DEQUANT = 1
_NORM, _ALIBI, _SPEC, _FREE, _COMPRESS = range(1, 6)
_MASKS = {0: NONE, _NORM: NORM, _ALIBI: ALIBI, _SPEC: NORM}


def _blocks(cache: Tensor, kv: int, width: int | None = None) -> Tensor:
    """[blocks, slots, kv heads, d]"""
    decline_if(cache.dim() != 4, f"blocks {list(cache.shape)} are in no layout that is known here")
    if cache.shape[2] == kv and (width is None or cache.shape[3] == width):
        return cache
    if cache.shape[3] != 16 or (cache.shape[1] * 16) % kv:
        raise Declined(f"blocks {list(cache.shape)} are in no layout that is known here")
    return NZ.rows(cache, cache.shape[2], kv, cache.shape[1] * 16 // kv)


def _dequantised(cache: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """(code + offset) * scale of the channel, float64."""
    shape = (1, 1, *cache.shape[2:])
    wide = cache.double()
    wide = wide if offset is None else wide + offset.double().reshape(shape)
    return wide * scale_of(scale).reshape(shape)


@operator("PagedAttentionOperation")
def paged_attention(o: Operands) -> Expected:
    heads = o.param("headNum", 0)
    kv = o.param("kvHeadNum", 0) or heads
    quant, latent = o.param("quantType", 0), o.param("mlaVHeadSize", 0)
    kind = o.param("maskType", 0)
    _decline(o, compressType="compressed heads", scaleType="a LogN scale", inputLayout="the layout BNSD")
    if heads <= 0 or kv <= 0 or quant not in (0, _DEQUANT) or kind not in _MASKS:
        raise Declined(f"headNum {heads}, kvHeadNum {kv}, quantType {quant}, maskType {kind}: no reference")
    rest: Iterator[int] = iter(range(2 if latent else 3, 32))
    q = o.wide(0).reshape(len(o.tensor(0)), heads, -1)
    keys = _blocks(o.tensor(1), kv, q.shape[-1])
    values = keys[..., :latent] if latent else _blocks(o.tensor(2), kv)
    table, counts = o.tensor(next(rest)), o.counts(next(rest))
    mask = o.tensor(next(rest)) if kind else None
    status = o.counts(next(rest)) if o.param("batchRunStatusEnable", False) else None
    if quant == _DEQUANT:
        each = 2 if o.param("hasQuantOffset", False) else 1
        k_scale, *k_off = [o.tensor(next(rest)) for _ in range(each)]
        v_scale, *v_off = [o.tensor(next(rest)) for _ in range(each)]
        keys, values = _dequantised(keys, k_scale, *k_off or [None]), _dequantised(values, v_scale, *v_off or [None])
    many = o.param("calcType", 0) == 1
    own = lengths(o.tensor(next(rest)), len(q)) if many else [1] * min(len(counts), len(q))
    o.exactly(next(rest))
    if len(own) > len(counts) or len(table) < len(own):
        raise Declined("as many lengths and rows of the block table as requests were expected")
    add = mask_of(o, _MASKS[kind], mask, heads, len(own), 0)

    def one(r: int, n: int) -> tuple[Any, ...] | None:
        if not counts[r] or (status and not status[r]):
            return None
        added = add(r, n, counts[r])
        decline_if(added is None and n > 1, "several queries of a request without a mask have no reference")
        return (*(past(t, table[r], counts[r]).double() for t in (keys, values)), added)

    scale = o.param("qkScale", 1.0) * (o.param("qScale", 0.0) or 1.0)
    return _by_request(o, q, values.shape[-1], own, one, scale)


@operator("ReshapeAndCacheOperation")
def reshape_and_cache(o: Operands) -> Outputs:
    """(key, value, key cache, value cache, slots), with K_CACHE_V_BYPASS (key, key cache, slots): slot s is block s //
    size, row s % size; below 0: nothing; with compressed heads, for head h of request r the last wins[r, h] rows."""
    alone, kind = o.param("kvCacheCfg", 0) == 1, o.param("compressType", 0)
    pairs = [(0, 1)] if alone else [(0, 2), (1, 3)]
    slots = o.tensor(2 if alone else 4).reshape(-1).long()
    decline_if(kind not in (0, 1), f"compressType {kind} has no reference")
    found: dict[str, Expected] = {}
    for place, (new, cache) in enumerate(pairs):
        rows, blocks = o.tensor(new), o.tensor(cache)
        decline_if(rows.dim() != 3, f"{list(rows.shape)} is not [tokens, heads, d]")
        y = _compressed(o, rows, blocks, slots) if kind else _put(rows, blocks, slots, o.param("kvCacheCfg", 0) == 2)
        found |= dict.fromkeys((f"output.{place}", f"inplace.{cache}"), equal(y))
    return found


def _put(rows: Tensor, cache: Tensor, slots: Tensor, nz: bool) -> Tensor:
    heads, width = rows.shape[1:]
    nz = nz or (cache.shape[-1] in (16, 32) and tuple(cache.shape[-2:]) != (heads, width))
    if nz and (cache.shape[-1] != 16 or heads * width % 16):
        raise Declined(f"blocks {list(cache.shape)} are in no layout that is known here")
    layout, size = (NZ, cache.shape[2]) if nz else (TOKENS, cache.shape[1])
    blocks = layout.rows(cache, size, heads, width).clone()
    flat = blocks.reshape(-1, heads, width)
    at = slots[: len(rows)] >= 0
    flat[within(slots[: len(rows)][at], len(flat))] = rows[: len(slots)][at].to(cache.dtype)
    return layout.packed(flat.reshape(blocks.shape), cache)


def _compressed(o: Operands, rows: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Each head's own rows: slots and wins [requests * heads], blocks [blocks, slots, 1, d]."""
    heads = rows.shape[1]
    wins, ends = o.tensor(5).reshape(-1).long(), o.tensor(6).reshape(-1).long().cumsum(0)
    decline_if(len(wins) != len(slots) or len(slots) != len(ends) * heads, "its windows do not fit its slots")
    found = cache.clone()
    flat = found.reshape(-1, *cache.shape[2:])
    for i, (slot, win) in enumerate(zip(slots.tolist(), wins.tolist(), strict=True)):
        if slot < 0:
            continue
        end = int(ends[i // heads])
        if win < 0 or end - win < 0 or end > len(rows) or slot + win > len(flat):
            raise Declined("a window lies outside of its rows or blocks")
        flat[slot : slot + win] = rows[end - win : end, i % heads].reshape(win, *flat.shape[1:]).to(cache.dtype)
    return found


@operator("KvCacheOperation", writes=2)
def kv_cache(o: Operands) -> Tensor:
    """(new, layer, cache, lengths with the past, lengths), in place."""
    offsets, own, layer, cache = o.counts(3), o.counts(4), o.counts(1)[0], o.tensor(2)
    decline_if(layer < 0 or len(offsets) < len(own), f"a cache {list(cache.shape)} has no reference")
    return _written(cache, o.tensor(0), layer, offsets[: len(own)], own, [1] * len(own))


@operator("BlockCopyOperation")
def block_copy(o: Operands) -> Outputs:
    """(key cache, value cache, source blocks, target blocks, sums of how many targets a source has), in place."""
    keys, values = (o.tensor(k).clone() for k in (0, 1))
    source, target = (within(o.tensor(k).reshape(-1), len(keys)) for k in (2, 3))
    ends = o.tensor(4).reshape(-1).long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    if len(counts) != len(source) or bool((counts < 0).any()) or int(counts.sum()) != len(target):
        raise Declined("its sums do not fit its blocks")
    own = source.repeat_interleave(counts)
    for cache in (keys, values):
        cache[target] = cache[own]
    return {"inplace.0": keys, "inplace.1": values}
