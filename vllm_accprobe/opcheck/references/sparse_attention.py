"""Sparse latent attention: an indexer's scores, its cache, the best keys of each query, attention over those alone.

Formula: score(t, s) = sum over heads of w(t, h) relu(q(t, h) . k(s)), for keys s that query t may see; the k best are
chosen; attention.py's over them [DeepSeek-V3.2, DeepSeek-AI 2025, section 2, equations 1 and 2]. Keys in fp8 have a
scale each. The choice is right if no key that was left out scores above one that was taken: the order of the chosen,
and which of equals is taken, is free. Over a paged cache, query j of n of a request that are its last (speculation)
sees all but the last n - 1 - j keys. A block holds the codes of all its slots, e4m3, and behind them their scales,
float32, one for ``quant_block_size`` numbers of a key: their largest, at least 1e-4, over 448, and rounded up to a
power of two where the format is ue8m0 [vLLM, csrc/cache_kernels.cu, indexer_k_quant_and_cache_kernel; DeepGEMM,
tests/test_attention.py, kv_cache_cast_to_fp8]. The best 512 of a row come as positions and as slots of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if, reference
from vllm_accprobe.opcheck.references.attention import attended
from vllm_accprobe.opcheck.references.caches import coded
from vllm_accprobe.opcheck.references.parts import Arguments, equal, within
from vllm_accprobe.opcheck.roundings import gamma

Tensor = Any  # a torch.Tensor
LARGE = "what lies where a row may not look, where nobody wrote, is larger than its scores"


@reference("torch.ops.*.fp8_mqa_logits", "torch.ops.*.xpu_fp8_mqa_logits", "torch.ops.*.mqa_logits")
def scores(call: Call) -> Expected:
    """(q [queries, heads, d], k [keys, d], scales of keys, w [queries, heads], first and last + 1 key of each query)"""
    f = Arguments(call, "q k k_scale weights cu_seqlen_ks cu_seqlen_ke")
    if isinstance(f["k"], (list, tuple)):  # (codes, scales) as one argument
        f = Arguments(call, "q k weights cu_seqlen_ks cu_seqlen_ke")
        f["k"], f["k_scale"] = f["k"]
    q, k, scale, w = f.wide("q", "k", "k_scale", "weights")
    y, bound = _of_keys(q, k * scale.reshape(-1, 1), w)
    place = torch.arange(len(k))
    seen = (place >= f["cu_seqlen_ks"].reshape(-1, 1)) & (place < f["cu_seqlen_ke"].reshape(-1, 1))
    out = call.outputs["output.0"]
    decline_if(tuple(out.shape) != tuple(y.shape), "its scores have another shape than queries by keys")
    value = unseen_left(y, seen, out)
    bound, rows = bound.masked_fill(~seen, 0.0), rows_to_judge(value, seen)
    return Expected(value, bound / 3.0, bound=bound, rows=rows, reason=LARGE)


def _of_keys(q: Tensor, keys: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [queries, keys] and their bound: q [queries, heads, d], keys [keys, d], w [queries, heads]."""
    dots = torch.einsum("mhd,nd->mhn", q, keys).clamp(min=0)
    sizes = torch.einsum("mhd,nd->mhn", q.abs(), keys.abs())
    y, size = (torch.einsum("mhn,mh->mn", *pair) for pair in ((dots, w), (sizes, w.abs())))
    return y, gamma(q.shape[-1] + q.shape[1] + 4) * size


def unseen_left(y: Tensor, seen: Tensor, out: Tensor) -> Tensor:
    """Scores where a query may look, elsewhere minus infinity, or, if a kernel puts that nowhere, what ``out`` has."""
    clean = bool(seen.all()) or bool((out[~seen] == -torch.inf).any())
    return y.masked_fill(~seen, -torch.inf) if clean else torch.where(seen, y, out.double())


def rows_to_judge(value: Tensor, seen: Tensor) -> Tensor | None:
    """bool [rows], None for all: next to a large number, which was never written, a row's own errors would not be
    seen."""
    size = torch.where(torch.isfinite(value), value.abs(), 0.0)
    rows = size.masked_fill(seen, 0.0).amax(1) <= size.masked_fill(~seen, 0.0).amax(1)
    return None if bool(rows.all()) else rows


def chosen(logits: Tensor, first: Tensor, stop: Tensor, mine: Tensor) -> Expected:
    """mine [rows, k], numbers counted from ``first``, -1 behind the last: mine's own row where it is right."""
    value = mine.long().clone()
    k = mine.shape[1]
    for row in range(len(mine)):
        z = logits[row, int(first[row]) : int(stop[row])].double()
        count = min(k, len(z))
        taken = mine[row][mine[row] >= 0].long()
        whole = len(taken) == count == len(taken.unique()) and (not count or int(taken.max()) < len(z))
        if whole:
            left = torch.ones(len(z), dtype=torch.bool)
            left[taken] = False
            whole = not bool(left.any()) or not count or float(z[left].max()) <= float(z[taken].min())
        if not whole:
            value[row] = -1
            value[row, :count] = z.topk(count).indices
    return Expected(value)


@reference("torch.ops._C.top_k_per_row_prefill", "torch.ops.*.top_k_per_row_prefill")
def best_of_prompts(call: Call) -> dict[str, Expected]:
    """(logits [rows, keys], first and last + 1 key of each row, indices [rows, k], ...)"""
    f = Arguments(call, "logits first stop indices num_rows stride0 stride1 k")
    role = f.role("indices")
    return {role: chosen(f["logits"], f["first"], f["stop"], call.outputs[role])}


@reference("torch.ops._C.top_k_per_row_decode", "torch.ops.*.top_k_per_row_decode")
def best_of_tokens(call: Call) -> dict[str, Expected]:
    """(logits, rows of each request, seq_lens, indices, ...): row j of a request sees all but its later rows."""
    f = Arguments(call, "logits next_n seq_lens indices num_rows stride0 stride1 k")
    role, many = f.role("indices"), int(f["next_n"])
    mine = call.outputs[role]
    row = torch.arange(len(mine))
    lengths = f["seq_lens"].reshape(-1)
    # either one length for each request, or one for each of its rows
    stop = lengths[row] if len(lengths) == len(mine) and many > 1 else lengths[row // many] - many + row % many + 1
    return {role: chosen(f["logits"], torch.zeros(len(mine)), stop, mine)}


@reference("torch.ops._flashmla_C.sparse_prefill_fwd", "torch.ops.*.flash_mla_sparse_fwd")
def of_chosen_keys(call: Call) -> dict[str, Expected]:
    """(q [tokens, heads, d], kv [rows, 1, d], indices [tokens, 1, k], scale, width of values): below 0 is no key."""
    f = Arguments(call, "q kv indices sm_scale d_v")
    q, kv = f.wide("q", "kv")
    width, places = int(f["d_v"] or 512), (at.reshape(-1).long() for at in f["indices"])
    keys = (kv[at[(at >= 0) & (at < len(kv))]] for at in places)
    one_each: Iterable[Any] = ((slice(n, n + 1), rows, rows[..., :width], {}) for n, rows in enumerate(keys))
    found = attended(q, one_each, width, scale=float(f["sm_scale"]), step=call.unit)
    return {"output.0": found.expected(call.outputs["output.0"], q.shape[1], "")}


@reference("torch.ops._C.flash_mla_with_kvcache_cpu")
def attended_in_pages(call: Call) -> dict[str, Expected]:
    """(out [tokens, heads, 512], q, cache of single keys [blocks, bytes], slots [tokens, n], keys of a block, the same
    of compressed keys, sinks [heads], scale): below 0 there is no key. A key is its value, too."""
    f = Arguments(call, "out q window_cache window_slots window_block_size compressed_cache compressed_slots "
                        "compressed_block_size attn_sink scale")  # fmt: skip
    q, sinks = f.wide("q", "attn_sink")
    caches = {of: keys_of_bytes(f[f"{of}_cache"], int(f[f"{of}_block_size"])) for of in ("window", "compressed")}

    def one_each() -> Iterator[tuple[Any, ...]]:
        for row in range(len(q)):
            rows = []
            for of, cache in caches.items():
                at = f[f"{of}_slots"][row].reshape(-1)
                why = "a slot lies outside of the blocks that were captured"
                rows.append(cache[within(at[at >= 0], len(cache), why)])
            keys = torch.cat(rows).unsqueeze(1)
            yield slice(row, row + 1), keys, keys, {}

    found = attended(q, one_each(), q.shape[-1], scale=float(f["scale"]), sinks=sinks, step=call.unit)
    return {f.role("out"): found.expected(f["out"], q.shape[1], "")}


def keys_of_bytes(cache: Tensor, size: int) -> Tensor:
    """float64 [slots, 512] of a cache of bytes: a block has of each slot 448 codes in e4m3 and 64 numbers in bfloat16,
    then, of each slot, eight exponents, of which the first seven count, for 64 codes each [vLLM,
    deepseek_v4/common/ops/cache_utils.py]. Raises Declined."""
    flat = cache.contiguous().view(torch.uint8).reshape(len(cache), -1)
    decline_if(flat.shape[1] < size * 584, f"a block of {flat.shape[1]} bytes does not hold {size} keys of 584")
    data = flat[:, : size * 576].reshape(-1, 576)
    exponents = flat[:, size * 576 : size * 584].reshape(-1, 8)[:, :7].int() - 127
    codes = data[:, :448].contiguous().view(torch.float8_e4m3fn).double()
    by = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents).repeat_interleave(64, -1)
    return torch.cat((codes * by, data[:, 448:].contiguous().view(torch.bfloat16).double()), -1)


_LARGEST, _LEAST = 448.0, 1e-4
_NEAR = 2.0**-20
"""Chosen: relative error of a scale: a kernel may multiply by 1 / 448 in float32 instead of dividing."""


def parts(cache: Tensor, size: int, width: int) -> tuple[Tensor, Tensor]:
    """(codes [blocks, size, width], scales float32 [blocks, size, width / quant]) of a cache of bytes, or Declined."""
    flat = cache.contiguous().view(torch.uint8).reshape(len(cache), -1)
    more = flat.shape[1] - size * width
    if more < 4 * size:
        raise Declined(f"a block of {flat.shape[1]} bytes has no codes and scales of {size} keys, {width} wide")
    codes = flat[:, : size * width].contiguous().view(torch.float8_e4m3fn).reshape(-1, size, width)
    each = min(more // (4 * size), width)
    stored = flat[:, size * width : size * (width + 4 * each)].contiguous()
    return codes, stored.view(torch.float32).reshape(-1, size, each)


def _scored(
    call: Call, q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, size: int,
    cleans: bool = True,
) -> Expected:  # fmt: skip
    """q [requests, n, heads, d], weights [requests * n, heads], lengths [requests] or [requests, n]; cleans: whether
    the kernel may put minus infinity behind a row's keys."""
    requests, many, _, width = q.shape
    out = call.outputs["output.0"]
    decline_if(len(out) != requests * many, "its scores have another shape than queries by keys")
    codes, scales = parts(cache, size, width)
    decline_if(scales.shape[-1] != 1, "keys with several scales each have no scores here")
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
            keys = (codes[at].double() * scales[at].double()).reshape(-1, width)[:stop]
            value[row, :stop], bound[row, :stop] = _of_keys(q[r, j : j + 1], keys, weights[row : row + 1])
            seen[row, :stop] = True
    value = unseen_left(value, seen, out) if cleans else torch.where(seen, value, out.double())
    return Expected(value, bound / 3.0, bound=bound, rows=rows_to_judge(value, seen), reason=LARGE)


@reference("torch.ops.*.fp8_paged_mqa_logits", "torch.ops.*.xpu_fp8_paged_mqa_logits")
def indexer_scores(call: Call) -> Expected:
    """(q [requests, n, heads, d], cache [blocks, size, 1, d + 4], weights [requests * n, heads], lengths, tables)"""
    f = Arguments(call, "q kv_cache weights context_lens block_tables schedule_metadata max_model_len")
    q, weights = f.wide("q", "weights")
    return _scored(call, q, f["kv_cache"], weights, f["context_lens"], f["block_tables"], f["kv_cache"].shape[1])


@reference("torch.ops._C.fp8_paged_mqa_logits_cpu")
def scores_on_cpu(call: Call) -> Expected:
    """(q [tokens, heads, d], cache [blocks, bytes], weights [tokens, heads], lengths, page_table, size, longest): each
    token has its own length and row of the table; behind a row's keys lies whatever lay there."""
    f = Arguments(call, "q_fp8 kvcache_fp8 weight seq_lens page_table block_size max_seq_len")
    q, weights = f.wide("q_fp8", "weight")
    size = int(f["block_size"])
    return _scored(call, q.unsqueeze(1), f["kvcache_fp8"], weights, f["seq_lens"], f["page_table"], size, cleans=False)


@reference("torch.ops._C.topk_transform_512_cpu", "torch.ops.*.topk_transform_512")
def best(call: Call) -> dict[str, Expected]:
    """(scores [rows, keys], lengths, page_tables [rows, pages], slots [rows, k], size, positions [rows, k] or none)"""
    f = Arguments(call, "scores seq_lens page_tables out_page_indices page_size out_raw_indices")
    size, table, lengths = int(f["page_size"]), f["page_tables"].long(), f["seq_lens"].reshape(-1)
    role = f.role("out_page_indices")
    mine = call.outputs[role].long()
    raw_role = f.role("out_raw_indices")
    raw = call.outputs.get(raw_role)
    positions = _positions(mine, table, lengths, size) if raw is None else raw.long()
    right = chosen(f["scores"], torch.zeros(len(mine)), lengths, positions).value
    found = torch.gather(table, 1, (right.clamp(min=0) // size).clamp(max=table.shape[1] - 1)) * size + right % size
    slots = Expected(torch.where(right < 0, -1, found))
    return {role: slots} if raw is None else {role: slots, raw_role: Expected(right)}


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


@reference("torch.ops._C_cache_ops.indexer_k_quant_and_cache", "torch.ops.*.indexer_k_quant_and_cache")
def written(call: Call) -> dict[str, Expected]:
    """(k [tokens, d], kv_cache [blocks, size, d + 4 d / quant] of bytes, slot_mapping, quant, "ue8m0" or another): a
    code is judged by the scale that was written, and the scale by the key."""
    f = Arguments(call, "k kv_cache slot_mapping quant_block_size scale_fmt")
    role = f.role("kv_cache")
    cache, (k,), quant = f["kv_cache"], f.wide("k"), int(f["quant_block_size"])
    size, width = cache.shape[1], k.shape[-1]
    codes, scales = (x.clone().flatten(0, 1) for x in parts(cache, size, width))
    mine, now = (x.flatten(0, 1) for x in parts(call.outputs.get(role, cache), size, width))
    slots = f["slot_mapping"].reshape(-1)[: len(k)].long()
    at = slots[slots >= 0]
    if width % quant or scales.shape[-1] != width // quant or (len(at) and int(at.max()) >= len(codes)):
        raise Declined("its keys do not fit the blocks that were captured")
    blocks = k[: len(slots)][slots >= 0].reshape(-1, width // quant, quant)
    exact = blocks.abs().amax(-1).clamp(min=_LEAST) / _LARGEST
    stored = now[at].double()
    if str(f["scale_fmt"]) == "ue8m0":
        low, high = (torch.exp2(torch.ceil(torch.log2(exact * (1 + e)))) for e in (-_NEAR, _NEAR))
        good = (stored == low) | (stored == high)
    else:
        high, good = exact, (stored - exact).abs() <= _NEAR * exact
    scales[at] = torch.where(good, now[at], high.float())
    by = torch.where(good, stored, high).unsqueeze(-1)
    codes[at] = coded((blocks / by).reshape(len(at), width), mine[at], torch.float8_e4m3fn)
    value = cache.contiguous().view(torch.uint8).reshape(len(cache), -1).clone()
    sides = (codes.view(torch.uint8).reshape(len(cache), -1), scales.reshape(len(cache), -1).view(torch.uint8))
    joined = torch.cat(sides, 1)
    value[:, : joined.shape[1]] = joined
    return {role: Expected(value.view(cache.dtype).reshape(cache.shape).long())}


@reference("torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache", "torch.ops.*.cp_gather_indexer_k_quant_cache")
def gathered(call: Call) -> dict[str, Expected]:
    """(kv_cache, keys [tokens, d], scales [tokens, bytes or numbers], block_table, bounds): bytes as they lie there."""
    f = Arguments(call, "kv_cache dst_k dst_scale block_table cu_seq_lens")
    roles = [f.role(name) for name in ("dst_k", "dst_scale")]
    keys, by = (call.outputs.get(role, f[name]) for role, name in zip(roles, ("dst_k", "dst_scale"), strict=True))
    size = f["kv_cache"].shape[1]
    ends = f["cu_seq_lens"].reshape(-1).tolist()
    codes, scales = (x.flatten(0, 1) for x in parts(f["kv_cache"], size, keys.shape[-1]))
    values = [x.contiguous().view(torch.uint8).reshape(len(x), -1).clone() for x in (keys, by)]
    why = "a sequence lies outside of the blocks that were captured"
    for row, (first, stop) in enumerate(pairwise(ends)):
        place = torch.arange(stop - first)
        at = within(f["block_table"][row].long()[place // size] * size + place % size, len(codes), why)
        decline_if(stop > len(keys), why)
        for value, source in zip(values, (codes, scales), strict=True):
            value[first:stop] = source[at].contiguous().view(torch.uint8).reshape(stop - first, -1)
    found = zip(roles, values, (keys, by), strict=True)
    return {role: equal(value.view(like.dtype).reshape(like.shape)) for role, value, like in found}
