"""The indexer of sparse attention over its paged cache: keys written and gathered, scores over blocks, the best keys.

Formulas: sparse.py's score over the keys that a block table names; for query j of n of a request that are its last
(speculation) all but the last n - 1 - j keys. A block of the cache holds the codes of all its slots, e4m3, and behind
them their scales, float32, one for ``quant_block_size`` numbers of a key: their largest, at least 1e-4, over 448, and
rounded up to a power of two where the format is ue8m0 [vLLM, csrc/cache_kernels.cu, indexer_k_quant_and_cache_kernel;
DeepGEMM, tests/test_attention.py, kv_cache_cast_to_fp8]. The best 512 of a row come as positions and as slots of the
cache, position p as table[p // size] * size + p % size. vLLM's CPU kernels do the same (their tests run them). Not
here: scores over gathered keys, attention over the best (sparse.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, gamma, reference
from vllm_accprobe.opcheck.references.paged.layouts import coded
from vllm_accprobe.opcheck.references.paged.sparse import LARGE, chosen, rows_to_judge, unseen_left
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given, place_of

Tensor = Any  # a torch.Tensor
_LARGEST, _LEAST = 448.0, 1e-4
_NEAR = 2.0**-20
"""Chosen: relative error of a scale: a kernel may multiply by 1 / 448 in float32 instead of dividing."""


def parts(cache: Tensor, size: int, width: int) -> tuple[Tensor, Tensor]:
    """(codes [blocks, size, width], scales float32 [blocks, size, width / quant]) of a cache of bytes. Raises
    Declined."""
    flat = cache.contiguous().view(torch.uint8).reshape(len(cache), -1)
    more = flat.shape[1] - size * width
    if more < 4 * size:
        raise Declined(f"a block of {flat.shape[1]} bytes has no codes and scales of {size} keys, {width} wide")
    codes = flat[:, : size * width].contiguous().view(torch.float8_e4m3fn).reshape(-1, size, width)
    each = min(more // (4 * size), width)
    held = flat[:, size * width : size * (width + 4 * each)].contiguous()
    return codes, held.view(torch.float32).reshape(-1, size, each)


def _scored(
    call: Call, q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, size: int,
    cleans: bool = True,
) -> Expected:  # fmt: skip
    """q [requests, n, heads, d], weights [requests * n, heads], lengths [requests] or [requests, n]; cleans: whether
    the kernel may have been told to put minus infinity behind a row's keys."""
    requests, many, heads, width = q.shape
    out = call.outputs["output.0"]
    if len(out) != requests * many:
        raise Declined("its scores have another shape than queries by keys")
    codes, scales = parts(cache, size, width)
    if scales.shape[-1] != 1:
        raise Declined("keys with several scales each have no scores here")
    lengths = lengths.reshape(requests, -1)
    value, bound = (torch.zeros(out.shape, dtype=torch.float64) for _ in range(2))
    seen = torch.zeros(out.shape, dtype=torch.bool)
    for r in range(requests):
        for j in range(many):
            row = r * many + j
            own = lengths.shape[1] == many
            stop = int(lengths[r, j]) if own else int(lengths[r, 0]) - many + j + 1
            if stop <= 0:
                continue
            at = table[r, : -(-stop // size)].long()
            if stop > out.shape[1] or len(at) * size < stop or int(at.min()) < 0 or int(at.max()) >= len(codes):
                raise Declined("a row's keys lie outside of its scores, or of the blocks that were captured")
            keys = codes[at].double().reshape(-1, width)[:stop]
            by = scales[at].double().reshape(-1)[:stop]
            dots, sizes = q[r, j] @ keys.T, q[r, j].abs() @ keys.abs().T
            w = weights[row].reshape(-1, 1)
            value[row, :stop] = (dots.clamp(min=0) * w).sum(0) * by
            bound[row, :stop] = gamma(width + heads + 4) * (sizes * w.abs()).sum(0) * by.abs()
            seen[row, :stop] = True
    value = unseen_left(value, seen, out) if cleans else torch.where(seen, value, out.double())
    return Expected(value, bound / 3.0, bound=bound, rows=rows_to_judge(value, seen), reason=LARGE)


@reference("torch.ops.*.fp8_paged_mqa_logits", "torch.ops.*.xpu_fp8_paged_mqa_logits")
def scores(call: Call) -> Expected:
    """(q [requests, n, heads, d], cache [blocks, size, 1, d + 4], weights [requests * n, heads], lengths, block_tables,
    schedule, longest)"""
    f = arguments(call, "q kv_cache weights context_lens block_tables schedule_metadata max_model_len")
    q, weights = given(f, "q", "weights")
    return _scored(call, q, f["kv_cache"], weights, f["context_lens"], f["block_tables"], f["kv_cache"].shape[1])


@reference("torch.ops._C.fp8_paged_mqa_logits_cpu")
def scores_on_cpu(call: Call) -> Expected:
    """(q [tokens, heads, d], cache [blocks, bytes], weights [tokens, heads], lengths, page_table, size, longest): each
    token has its own length and row of the table; behind a row's keys lies whatever lay there."""
    f = arguments(call, "q_fp8 kvcache_fp8 weight seq_lens page_table block_size max_seq_len")
    q, weights = given(f, "q_fp8", "weight")
    size = int(f["block_size"])
    return _scored(call, q.unsqueeze(1), f["kvcache_fp8"], weights, f["seq_lens"], f["page_table"], size, cleans=False)


_BEST = "scores seq_lens page_tables out_page_indices page_size out_raw_indices"


@reference("torch.ops._C.topk_transform_512_cpu", "torch.ops.*.topk_transform_512")
def best(call: Call) -> dict[str, Expected]:
    """(scores [rows, keys], lengths, page_tables [rows, pages], slots [rows, k], size, positions [rows, k] or none)"""
    f = arguments(call, _BEST)
    size, table, lengths = int(f["page_size"]), f["page_tables"].long(), f["seq_lens"].reshape(-1)
    role = place_of(call, _BEST, "out_page_indices")
    mine = call.outputs[role].long()
    told = place_of(call, _BEST, "out_raw_indices")
    held = call.outputs.get(told)
    positions = _positions(mine, table, lengths, size) if held is None else held.long()
    right = chosen(f["scores"], torch.zeros(len(mine)), lengths, positions).value
    found = torch.gather(table, 1, (right.clamp(min=0) // size).clamp(max=table.shape[1] - 1)) * size + right % size
    slots = Expected(torch.where(right < 0, -1, found))
    return {role: slots} if held is None else {role: slots, told: Expected(right)}


def _positions(slots: Tensor, table: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Which position of its request each slot is: -1 for none, beyond the length for a strange one."""
    found = torch.full_like(slots, -1)
    for row in range(len(slots)):
        pages = {int(p): n for n, p in enumerate(table[row, : -(-int(lengths[row]) // size)])}
        for k, slot in enumerate(slots[row].tolist()):
            if slot >= 0:
                page = pages.get(slot // size)
                found[row, k] = int(lengths[row]) if page is None else page * size + slot % size
    return found


_WRITE = "k kv_cache slot_mapping quant_block_size scale_fmt"


@reference("torch.ops._C_cache_ops.indexer_k_quant_and_cache", "torch.ops.*.indexer_k_quant_and_cache")
def written(call: Call) -> dict[str, Expected]:
    """(k [tokens, d], kv_cache [blocks, size, d + 4 d / quant] of bytes, slot_mapping, quant, "ue8m0" or another): a
    code is judged by the scale that was written, and the scale by the key."""
    f = arguments(call, _WRITE)
    role = place_of(call, _WRITE, "kv_cache")
    cache, (k,), quant = f["kv_cache"], given(f, "k"), int(f["quant_block_size"])
    size, width = cache.shape[1], k.shape[-1]
    codes, scales = (x.clone().flatten(0, 1) for x in parts(cache, size, width))
    mine, now = (x.flatten(0, 1) for x in parts(call.outputs.get(role, cache), size, width))
    slots = f["slot_mapping"].reshape(-1)[: len(k)].long()
    at = slots[slots >= 0]
    if width % quant or scales.shape[-1] != width // quant or (len(at) and int(at.max()) >= len(codes)):
        raise Declined("its keys do not fit the blocks that were captured")
    blocks = k[: len(slots)][slots >= 0].reshape(-1, width // quant, quant)
    exact = blocks.abs().amax(-1).clamp(min=_LEAST) / _LARGEST
    held = now[at].double()
    if str(f["scale_fmt"]) == "ue8m0":
        low, high = (torch.exp2(torch.ceil(torch.log2(exact * (1 + e)))) for e in (-_NEAR, _NEAR))
        good = (held == low) | (held == high)
    else:
        high, good = exact, (held - exact).abs() <= _NEAR * exact
    scales[at] = torch.where(good, now[at], high.float())
    by = torch.where(good, held, high).unsqueeze(-1)
    codes[at] = coded((blocks / by).reshape(len(at), width), mine[at], torch.float8_e4m3fn)
    value = cache.contiguous().view(torch.uint8).reshape(len(cache), -1).clone()
    sides = (codes.view(torch.uint8).reshape(len(cache), -1), scales.reshape(len(cache), -1).view(torch.uint8))
    joined = torch.cat(sides, 1)
    value[:, : joined.shape[1]] = joined
    return {role: Expected(value.view(cache.dtype).reshape(cache.shape).long())}


_GATHER = "kv_cache dst_k dst_scale block_table cu_seq_lens"


@reference("torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache", "torch.ops.*.cp_gather_indexer_k_quant_cache")
def gathered(call: Call) -> dict[str, Expected]:
    """(kv_cache, keys [tokens, d], scales [tokens, bytes or numbers], block_table, bounds of the sequences): bytes as
    they lie in the cache."""
    f = arguments(call, _GATHER)
    roles = [place_of(call, _GATHER, name) for name in ("dst_k", "dst_scale")]
    keys, by = (call.outputs.get(role, f[name]) for role, name in zip(roles, ("dst_k", "dst_scale"), strict=True))
    size = f["kv_cache"].shape[1]
    ends = f["cu_seq_lens"].reshape(-1).tolist()
    codes, scales = (x.flatten(0, 1) for x in parts(f["kv_cache"], size, keys.shape[-1]))
    values = [x.contiguous().view(torch.uint8).reshape(len(x), -1).clone() for x in (keys, by)]
    for row, (first, stop) in enumerate(pairwise(ends)):
        place = torch.arange(stop - first)
        at = f["block_table"][row].long()[place // size] * size + place % size
        if len(at) and (int(at.min()) < 0 or int(at.max()) >= len(codes) or stop > len(keys)):
            raise Declined("a sequence lies outside of the blocks that were captured")
        for value, source in zip(values, (codes, scales), strict=True):
            value[first:stop] = source[at].contiguous().view(torch.uint8).reshape(stop - first, -1)
    found = zip(roles, values, (keys, by), strict=True)
    return {role: Expected(_typed(value, like), unit=0.0) for role, value, like in found}


def _typed(value: Tensor, like: Tensor) -> Tensor:
    y = value.view(like.dtype).reshape(like.shape)
    return y.double() if like.dtype.is_floating_point else y.long()
