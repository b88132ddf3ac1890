"""Sparse latent attention: an indexer's scores, the best keys of each query, attention over those alone.

Formula: score(t, s) = sum over heads of w(t, h) relu(q(t, h) . k(s)), for keys s that query t may see; the k best are
chosen; attention.py's over them [DeepSeek-V3.2, DeepSeek-AI 2025, section 2, equations 1 and 2]. Keys in fp8 have a
scale each. The choice is right if no key that was left out scores above one that was taken: the order of the chosen,
and which of equals is taken, is free.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, gamma, reference
from vllm_accprobe.opcheck.references.attention import attend
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given, place_of

Tensor = Any  # a torch.Tensor
LARGE = "what lies where a row may not look, where nobody wrote, is larger than its scores"


@reference("torch.ops.*.fp8_mqa_logits", "torch.ops.*.xpu_fp8_mqa_logits", "torch.ops.*.mqa_logits")
def scores(call: Call) -> Expected:
    """(q [queries, heads, d], k [keys, d], scale of each key, w [queries, heads], first and last + 1 key of each
    query): minus infinity where a query may not look."""
    f = dict(arguments(call, "q k k_scale weights cu_seqlen_ks cu_seqlen_ke"))
    if isinstance(f["k"], (list, tuple)):  # (codes, scales) as one argument
        f = dict(arguments(call, "q k weights cu_seqlen_ks cu_seqlen_ke"))
        f["k"], f["k_scale"] = f["k"]
    q, k, scale, w = given(f, "q", "k", "k_scale", "weights")
    k = k * scale.reshape(-1, 1)
    raw = torch.einsum("mhd,nd->mhn", q, k)
    size = torch.einsum("mhd,nd->mhn", q.abs(), k.abs())
    y = torch.einsum("mhn,mh->mn", raw.clamp(min=0), w)
    bound = gamma(q.shape[-1] + q.shape[1] + 4) * torch.einsum("mhn,mh->mn", size, w.abs())
    place = torch.arange(len(k))
    seen = (place >= f["cu_seqlen_ks"].reshape(-1, 1)) & (place < f["cu_seqlen_ke"].reshape(-1, 1))
    out = call.outputs["output.0"]
    if tuple(out.shape) != tuple(y.shape):
        raise Declined("its scores have another shape than queries by keys")
    value = unseen_left(y, seen, out)
    bound, rows = bound.masked_fill(~seen, 0.0), rows_to_judge(value, seen)
    return Expected(value, bound / 3.0, bound=bound, rows=rows, reason=LARGE)


def unseen_left(y: Tensor, seen: Tensor, out: Tensor) -> Tensor:
    """Scores where a query may look, elsewhere minus infinity, or, of a kernel that was not told to clean and puts it
    nowhere, what ``out`` has: memory as it was found."""
    clean = bool(seen.all()) or bool((out[~seen] == -torch.inf).any())
    return y.masked_fill(~seen, -torch.inf) if clean else torch.where(seen, y, out.double())


def rows_to_judge(value: Tensor, seen: Tensor) -> Tensor | None:
    """bool [rows], None for all: beside a large number, which nobody wrote, a row's own errors would not be seen."""
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


_PREFILL = "logits first stop indices num_rows stride0 stride1 k"
_DECODE = "logits next_n seq_lens indices num_rows stride0 stride1 k"


@reference("torch.ops._C.top_k_per_row_prefill", "torch.ops.*.top_k_per_row_prefill")
def best_of_prompts(call: Call) -> dict[str, Expected]:
    """(logits [rows, keys], first and last + 1 key of each row, indices [rows, k], ...)"""
    f = arguments(call, _PREFILL)
    role = place_of(call, _PREFILL, "indices")
    return {role: chosen(f["logits"], f["first"], f["stop"], call.outputs[role])}


@reference("torch.ops._C.top_k_per_row_decode", "torch.ops.*.top_k_per_row_decode")
def best_of_tokens(call: Call) -> dict[str, Expected]:
    """(logits, rows of each request, seq_lens, indices, ...): row j of a request sees all but its later rows."""
    f = arguments(call, _DECODE)
    role, many = place_of(call, _DECODE, "indices"), int(f["next_n"])
    mine = call.outputs[role]
    row = torch.arange(len(mine))
    lengths = f["seq_lens"].reshape(-1)
    # either one length for each request, or one for each of its rows
    stop = lengths[row] if len(lengths) == len(mine) and many > 1 else lengths[row // many] - many + row % many + 1
    return {role: chosen(f["logits"], torch.zeros(len(mine)), stop, mine)}


@reference("torch.ops._flashmla_C.sparse_prefill_fwd", "torch.ops.*.flash_mla_sparse_fwd")
def attended(call: Call) -> dict[str, Expected]:
    """(q [tokens, heads, d], kv [rows, 1, d], indices [tokens, 1, k], scale, width of values): below 0 and beyond the
    rows there is no key."""
    f = arguments(call, "q kv indices sm_scale d_v")
    q, kv = given(f, "q", "kv")
    width = int(f["d_v"] or 512)
    parts: list[list[Tensor]] = [[], [], []]
    for row in range(len(q)):
        at = f["indices"][row].reshape(-1).long()
        rows = kv[at[(at >= 0) & (at < len(kv))]]
        found = attend(q[row : row + 1], rows, rows[..., :width], float(f["sm_scale"]), step=call.unit)
        for part, new in zip(parts, found, strict=True):
            part.append(new)
    value, noise, bound = (torch.cat(p) for p in parts)
    return {"output.0": Expected(value, noise, bound=bound, groups=q.shape[1])}


_PAGED = "out q window_cache window_slots window_block_size compressed_cache compressed_slots compressed_block_size"


@reference("torch.ops._C.flash_mla_with_kvcache_cpu")
def attended_in_pages(call: Call) -> dict[str, Expected]:
    """(out [tokens, heads, 512], q, cache of single keys [blocks, bytes], slots [tokens, n], keys of a block, the same
    of compressed keys, sinks [heads], scale): below 0 there is no key. A key is its value, too."""
    names = f"{_PAGED} attn_sink scale"
    f = arguments(call, names)
    q, sinks = given(f, "q", "attn_sink")
    caches = [keys_of_bytes(f[f"{of}_cache"], int(f[f"{of}_block_size"])) for of in ("window", "compressed")]
    found: list[tuple[Tensor, ...]] = []
    for row in range(len(q)):
        rows = []
        for of, cache in zip(("window", "compressed"), caches, strict=True):
            at = f[f"{of}_slots"][row].reshape(-1).long()
            at = at[at >= 0]
            if len(at) and int(at.max()) >= len(cache):
                raise Declined("a slot lies outside of the blocks that were captured")
            rows.append(cache[at])
        keys = torch.cat(rows).unsqueeze(1)
        found.append(attend(q[row : row + 1], keys, keys, float(f["scale"]), sinks=sinks, step=call.unit))
    value, noise, bound = (torch.cat(p) for p in zip(*found, strict=True))
    return {place_of(call, names, "out"): Expected(value, noise, bound=bound, groups=q.shape[1])}


def keys_of_bytes(cache: Tensor, size: int) -> Tensor:
    """float64 [slots, 512] of a cache of bytes: a block has of each slot 448 codes in e4m3 and 64 numbers in bfloat16,
    then, of each slot, eight exponents, of which the first seven count, for 64 codes each [vLLM,
    deepseek_v4/common/ops/cache_utils.py]. Raises Declined."""
    flat = cache.contiguous().view(torch.uint8).reshape(len(cache), -1)
    if flat.shape[1] < size * 584:
        raise Declined(f"a block of {flat.shape[1]} bytes does not hold {size} keys of 584")
    data = flat[:, : size * 576].reshape(-1, 576)
    exponents = flat[:, size * 576 : size * 584].reshape(-1, 8)[:, :7].int() - 127
    codes = data[:, :448].contiguous().view(torch.float8_e4m3fn).double()
    by = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents).repeat_interleave(64, -1)
    return torch.cat((codes * by, data[:, 448:].contiguous().view(torch.bfloat16).double()), -1)
