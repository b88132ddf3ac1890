"""Caches of ATB: PagedAttention over blocks, ReshapeAndCache, KvCache, BlockCopy.

Formulas: attention: self_attention.py's; a request's keys are the rows 0 to its length of the blocks that its row of
the block table names [Kwon et al., arXiv 2309.06180]; one query for each request, or with CALC_TYPE_SPEC as many as its
length of queries says, the last of them the last key. Blocks are [blocks, slots, kv heads, d], or NZ, [blocks, kv heads
* d / 16, slots, 16]; int8 blocks are (code + offset) * scale of the channel. Inputs, each where the parameters ask for
it: query, key cache, value cache (not with mlaVHeadSize), block tables, lengths, mask, status of requests, scale and
offset of keys, of values, lengths of queries. ReshapeAndCache (key, value, key cache, value cache, slots; with
K_CACHE_V_BYPASS key, key cache, slots): slot s is block s // size, row s % size; below 0: nothing; with compressed
heads, for head h of request r the last wins[r, h] rows of it. KvCache (new, layer, cache, lengths with the past,
lengths). BlockCopy (key cache, value cache, source blocks, target blocks, sums of how many targets a source has).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references.atb import masks
from vllm_accprobe.opcheck.references.atb.linear import scale_of
from vllm_accprobe.opcheck.references.atb.moving import within
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, copied, operator
from vllm_accprobe.opcheck.references.atb.self_attention import BatchRows, attended, lengths, rule_of
from vllm_accprobe.opcheck.references.paged.layouts import NZ, TOKENS
from vllm_accprobe.opcheck.references.paged.paged_attention import past
from vllm_accprobe.opcheck.references.parts import unit_of

Tensor = Any  # a torch.Tensor
_DEQUANT = 1
_NORM, _ALIBI, _SPEC, _FREE, _COMPRESS = range(1, 6)
_MASKS = {0: masks.NONE, _NORM: masks.NORM, _ALIBI: masks.ALIBI, _SPEC: masks.NORM}


def _blocks(cache: Tensor, kv: int, width: int | None = None) -> Tensor:
    """[blocks, slots, kv heads, d]"""
    if cache.dim() != 4:
        raise Declined(f"blocks {list(cache.shape)} are in no layout that is known here")
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
def paged_attention(o: Operands) -> Outputs:
    heads = o.param("headNum", 0)
    kv = o.param("kvHeadNum", 0) or heads
    quant, latent = o.param("quantType", 0), o.param("mlaVHeadSize", 0)
    kind = o.param("maskType", 0)
    for name, what in (("compressType", "compressed heads"), ("scaleType", "a LogN scale"),
                       ("inputLayout", "the layout BNSD")):  # fmt: skip
        if o.param(name, 0):
            raise Declined(f"{what} has no reference")
    if heads <= 0 or kv <= 0 or quant not in (0, _DEQUANT) or kind not in _MASKS:
        raise Declined(f"headNum {heads}, kvHeadNum {kv}, quantType {quant}, maskType {kind}: no reference")
    rest: Iterator[int] = iter(range(2 if latent else 3, 32))
    q = o.wide(0).reshape(len(o.tensor(0)), heads, -1)
    keys = _blocks(o.tensor(1), kv, q.shape[-1])
    values = keys[..., :latent] if latent else _blocks(o.tensor(2), kv)
    table, counts = o.tensor(next(rest)), [int(n) for n in o.tensor(next(rest)).reshape(-1)]
    mask = o.tensor(next(rest)) if kind else None
    status = o.tensor(next(rest)) if o.param("batchRunStatusEnable", False) else None
    if quant == _DEQUANT:
        each = 2 if o.param("hasQuantOffset", False) else 1
        k_scale, *k_off = [o.tensor(next(rest)) for _ in range(each)]
        v_scale, *v_off = [o.tensor(next(rest)) for _ in range(each)]
        keys, values = _dequantised(keys, k_scale, *k_off or [None]), _dequantised(values, v_scale, *v_off or [None])
    many = o.param("calcType", 0) == 1
    own = lengths(o.tensor(next(rest)), len(q)) if many else [1] * min(len(counts), len(q))
    if len(own) > len(counts) or len(table) < len(own):
        raise Declined("as many lengths and rows of the block table as requests were expected")
    return {"output.0": _over_blocks(o, q, (keys, values), table, counts, own, mask, _MASKS[kind], status)}


def _over_blocks(
    o: Operands, q: Tensor, blocks: tuple[Tensor, Tensor], table: Tensor, counts: list[int], own: list[int],
    mask: Tensor | None, kind: int, status: Tensor | None,
) -> Expected:  # fmt: skip
    heads, unit = q.shape[1], unit_of(o.tensor(0))
    out = BatchRows.empty(len(q), heads, blocks[1].shape[-1])
    add = masks.mask_of(o, kind, mask, heads, len(own), 0)
    rule, i = rule_of(o, o.param("qkScale", 1.0) * (o.param("qScale", 0.0) or 1.0)), 0
    for r, (n, m) in enumerate(zip(own, counts, strict=False)):
        on = status is None or bool(status.reshape(-1)[r])
        if n and m and on:
            k, v = (past(t, table[r], m).double() for t in blocks)
            added = add(r, n, m)
            if added is None and n > 1:
                raise Declined("several queries of a request without a mask have no reference")
            out.put(i, attended(q[i : i + n], k, v, rule, added, unit))
        i += n
    return out.expected(o.output(), heads)


@operator("ReshapeAndCacheOperation", "ReshapeAndCacheWithStrideOperation")
def reshape_and_cache(o: Operands) -> Outputs:
    alone, kind = o.param("kvCacheCfg", 0) == 1, o.param("compressType", 0)
    pairs = [(0, 1)] if alone else [(0, 2), (1, 3)]
    slots = o.tensor(2 if alone else 4).reshape(-1).long()
    if kind not in (0, 1):
        raise Declined(f"compressType {kind} has no reference")
    found: dict[str, Expected] = {}
    for place, (new, cache) in enumerate(pairs):
        rows, held = o.tensor(new), o.tensor(cache)
        if rows.dim() != 3:
            raise Declined(f"{list(rows.shape)} is not [tokens, heads, d]")
        y = _compressed(o, rows, held, slots) if kind else _put(rows, held, slots, o.param("kvCacheCfg", 0) == 2)
        found |= dict.fromkeys((f"output.{place}", f"inplace.{cache}"), copied(y))
    return found


def _put(rows: Tensor, cache: Tensor, slots: Tensor, nz: bool) -> Tensor:
    heads, width = rows.shape[1:]
    nz = nz or (cache.shape[-1] in (16, 32) and tuple(cache.shape[-2:]) != (heads, width))
    if nz and (cache.shape[-1] != 16 or heads * width % 16):
        raise Declined(f"blocks {list(cache.shape)} are in no layout that is known here")
    layout, size = (NZ, cache.shape[2]) if nz else (TOKENS, cache.shape[1])
    held = layout.rows(cache, size, heads, width).clone()
    flat = held.reshape(-1, heads, width)
    at = slots[: len(rows)] >= 0
    flat[within(slots[: len(rows)][at], len(flat))] = rows[: len(slots)][at].to(cache.dtype)
    return layout.packed(flat.reshape(held.shape), cache)


def _compressed(o: Operands, rows: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Each head's own rows: slots and wins [requests * heads], blocks [blocks, slots, 1, d]."""
    heads = rows.shape[1]
    wins, ends = o.tensor(5).reshape(-1).long(), o.tensor(6).reshape(-1).long().cumsum(0)
    if len(wins) != len(slots) or len(slots) != len(ends) * heads:
        raise Declined("its windows do not fit its slots")
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


@operator("KvCacheOperation")
def kv_cache(o: Operands) -> Outputs:
    new, layer, cache = o.tensor(0), int(o.tensor(1).reshape(-1)[0]), o.tensor(2).clone()
    offsets, own = ([int(n) for n in o.tensor(k).reshape(-1)] for k in (3, 4))
    if cache.dim() != 4 or not 0 <= layer < len(cache) or len(own) > cache.shape[1] or len(offsets) < len(own):
        raise Declined(f"a cache {list(cache.shape)} has no reference")
    i = 0
    for r, n in enumerate(own):
        begin = offsets[r] - n
        if n < 0 or begin < 0 or offsets[r] > cache.shape[2] or i + n > len(new):
            raise Declined("a request is longer than its cache")
        cache[layer, r, begin : begin + n] = new[i : i + n].reshape(n, -1).to(cache.dtype)
        i += n
    return dict.fromkeys(("inplace.2", "output.0"), copied(cache))


@operator("BlockCopyOperation")
def block_copy(o: Operands) -> Outputs:
    """In place: blocks of both caches."""
    keys, values = (o.tensor(k).clone() for k in (0, 1))
    source, target = (within(o.tensor(k).reshape(-1), len(keys)) for k in (2, 3))
    ends = o.tensor(4).reshape(-1).long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    if len(counts) != len(source) or bool((counts < 0).any()) or int(counts.sum()) != len(target):
        raise Declined("its sums do not fit its blocks")
    own = source.repeat_interleave(counts)
    for cache in (keys, values):
        cache[target] = cache[own]
    return {"inplace.0": copied(keys), "inplace.1": copied(values)}
