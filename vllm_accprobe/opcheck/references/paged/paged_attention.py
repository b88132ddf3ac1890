"""Attention over a paged cache, from the blocks that the call touches.

Formula: attention.py's; row r of a request with n rows of s in all stands at position s - n + r, and its keys are
rows 0 to that of the blocks that its row of the block table names [Kwon et al., arXiv 2309.06180, section 4.1].
vLLM's CPU kernels do not say in which of their two layouts the blocks are: both are tried, and the one in which
mine's numbers are nearer counts (a wrong layout is wrong by the size of the values, whatever the kernel does). 8-bit
caches: their codes times their scale. Latent attention reads keys and values from the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.attention import attend
from vllm_accprobe.opcheck.references.paged.layouts import (
    CPU,
    HEADS_TURNED,
    NZ,
    TOKENS,
    BlockLayout,
    numbers,
    split_key,
)
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, place_of, runs

Tensor = Any  # a torch.Tensor
Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def past(rows: Tensor, table: Tensor, length: int) -> Tensor:
    """The first ``length`` rows of one request: rows [blocks, slots, ...], table [blocks of the request]."""
    size = rows.shape[1]
    blocks = table[: -(-length // size)].long()
    if len(blocks) * size < length or (len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= len(rows))):
        raise Declined("a block lies outside of those that were captured")
    return rows[blocks].flatten(0, 1)[:length]


def attended(
    q: Tensor, keys: Tensor, values: Tensor, bounds: Sequence[tuple[int, int]], lengths: Tensor, table: Tensor,
    causal: bool, unit: float, *, scale: Any, **settings: Any,
) -> Rows:  # fmt: skip
    """(value, noise, bound [tokens, heads, width], which rows): q [tokens, heads, width], keys and values [blocks,
    slots, heads, ...], float64."""
    out = torch.zeros(*q.shape[:2], values.shape[-1], dtype=torch.float64)
    parts, known = (out, torch.zeros_like(out), torch.zeros_like(out)), torch.zeros(len(q), dtype=torch.bool)
    for n, (begin, end) in enumerate(bounds):
        total = int(lengths.reshape(-1)[n])
        if end <= begin or total < end - begin:
            continue
        k, v = (past(rows, table[n], total) for rows in (keys, values))
        at = torch.arange(total - (end - begin), total) if causal else None
        found = attend(q[begin:end], k, v, float(scale), at, step=unit, **settings)
        for part, new in zip(parts, found, strict=True):
            part[begin:end] = new
        known[begin:end] = True
    return (*parts, known)


def _expected(found: Rows, like: Tensor, heads: int) -> Expected:
    value, noise, bound, known = found
    count = like.numel() // max(value[0].numel(), 1)
    if count < len(value):
        raise Declined("its output has another shape than its queries")
    if count > len(value):  # rows of padding behind the batch
        value, noise, bound = (torch.cat((t, t.new_zeros(count - len(t), *t.shape[1:]))) for t in (value, noise, bound))
        known = torch.cat((known, known.new_zeros(count - len(known))))
    if not bool(known.all()) and like.shape[0] != len(known):
        raise Declined("some of its rows belong to no request")
    rows = None if bool(known.all()) else known
    value, noise, bound = (t.reshape(like.shape) for t in (value, noise, bound))
    return Expected(value, noise, rows=rows, reason="no row of a request", bound=bound, groups=heads)


def _nearest(found: Sequence[Rows], mine: Tensor) -> Rows:
    """The one whose numbers mine's are nearest to."""

    def far(rows: Rows) -> float:
        known = rows[3]
        error = mine.double().reshape(-1, *rows[0].shape[1:])[: len(known)][known] - rows[0][known]
        return float(torch.nan_to_num(error, nan=1e30).square().sum())

    return min(found, key=far) if len(found) > 1 else found[0]


@dataclass(frozen=True)
class PagedBatch:
    """A batch of requests whose keys lie in blocks, whatever its operator calls it.

    q: [tokens, heads, width] as captured; caches: keys and values [blocks, slots, kv heads, width] in their own dtype,
    once for each layout that they may be in; kind, scales: of 8-bit caches (layouts.py); bounds: rows of each request;
    lengths: its keys; table: its blocks; settings: of `attend`; roles: where its result stands; like: its shape."""

    q: Tensor
    caches: Sequence[tuple[Tensor, Tensor]]
    bounds: Sequence[tuple[int, int]]
    lengths: Tensor
    table: Tensor
    causal: bool
    settings: Mapping[str, Any]
    roles: tuple[str, ...]
    like: Tensor
    kind: str = "auto"
    scales: tuple[Any, Any] = (None, None)

    def defined(self, cache: tuple[Tensor, Tensor], unit: float) -> Rows:
        keys, values = (numbers(c, self.kind, s) for c, s in zip(cache, self.scales, strict=True))
        return attended(
            self.q.double(), keys, values, self.bounds, self.lengths, self.table, self.causal, unit, **self.settings
        )

    def layout(self, mine: Tensor, unit: float) -> tuple[Tensor, Tensor]:
        """The caches as they are by the layout that mine's numbers are nearest to."""
        if len(self.caches) == 1:
            return self.caches[0]
        found = [self.defined(cache, unit) for cache in self.caches]
        best = _nearest(found, mine)
        return next(cache for cache, rows in zip(self.caches, found, strict=True) if rows is best)

    def expected(self, call: Call) -> dict[str, Expected]:
        found = [self.defined(cache, call.unit) for cache in self.caches]
        mine = call.outputs.get(self.roles[0], self.like)
        y = _expected(_nearest(found, mine), self.like, self.q.shape[1])
        return dict.fromkeys(self.roles, y)


_CPU = (
    "query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes sliding_window_size "
    "block_table softcap scheduler_metadata s_aux dynamic_causal k_scale v_scale kv_cache_dtype"
)


def cpu_batch(call: Call) -> PagedBatch:
    """(query [tokens, heads, width], caches [blocks, kv heads, slots, width], output, query_start_loc, seq_lens, scale,
    causal, alibi_slopes, window, block_table, soft cap, ...)"""
    f = arguments(call, _CPU)
    if f["dynamic_causal"] is not None:
        raise Declined("a mask that differs from request to request has no reference here")
    q, keys, values, kind = f["query"], f["key_cache"], f["value_cache"], str(f["kv_cache_dtype"] or "auto")
    _, kv, size, width = keys.shape
    if keys.dtype.itemsize == 1 and kind.startswith("fp8") and keys.dtype == torch.uint8 and size % 32:
        raise Declined("8-bit blocks of this size have no reference")
    window = int(f["sliding_window_size"] if f["sliding_window_size"] is not None else -1)
    settings = {
        "scale": f["scale"], "window": window if window > 0 else None, "cap": float(f["softcap"] or 0.0) or None,
        "slopes": None if f["alibi_slopes"] is None else f["alibi_slopes"].double(),
        "sinks": None if f["s_aux"] is None else f["s_aux"].double(),
    }  # fmt: skip
    caches = []
    for key_layout, value_layout in dict.fromkeys(CPU.values()):
        try:
            both = key_layout.rows(keys, size, kv, width), value_layout.rows(values, size, kv, width)
        except (Declined, RuntimeError):
            continue  # a size that this layout cannot have
        caches.append(both)
    if not caches:
        raise Declined("its blocks are in no known layout")
    return PagedBatch(
        q, caches, runs(f["query_start_loc"], len(q)), f["seq_lens"], f["block_table"], bool(f["causal"]), settings,
        (place_of(call, _CPU, "output"),), f["output"], kind, (f["k_scale"], f["v_scale"]),
    )  # fmt: skip


_PAGED = (
    "out query key_cache value_cache num_kv_heads scale block_tables seq_lens block_size max_seq_len alibi_slopes "
    "kv_cache_dtype k_scale v_scale"
)


def first_batch(call: Call) -> PagedBatch:
    """(out, query [requests, heads, width], key_cache [blocks, kv heads, width / x, slots, x], value_cache [blocks, kv
    heads, width, slots], ...): one row of each request; v2 has scratch space behind ``out``."""
    names = _PAGED.replace("out ", "out exp_sums max_logits tmp_out ") if "_v2" in call.cls else _PAGED
    f = arguments(call, names)
    q, keys, values = f["query"], f["key_cache"], f["value_cache"]
    kv, size, width = int(f["num_kv_heads"]), int(f["block_size"]), q.shape[-1]
    both = split_key(keys.shape[-1]).rows(keys, size, kv, width), HEADS_TURNED.rows(values, size, kv, width)
    settings = {"scale": f["scale"], "slopes": None if f["alibi_slopes"] is None else f["alibi_slopes"].double()}
    return PagedBatch(
        q, [both], [(n, n + 1) for n in range(len(q))], f["seq_lens"], f["block_tables"], True, settings,
        (place_of(call, names, "out"),), f["out"], str(f["kv_cache_dtype"] or "auto"), (f["k_scale"], f["v_scale"]),
    )  # fmt: skip


_FLASH = (
    "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes max_seqlen_q max_seqlen_k "
    "dropout softmax_scale zero_tensors causal window_left window_right softcap"
)


def flash_batch(call: Call) -> PagedBatch:
    """Flash attention 2 with a block table: q [tokens, heads, width], k and v [blocks, slots, kv heads, width]."""
    f = arguments(call, _FLASH)
    if f["block_table"] is None or f["seqused_k"] is None or f["leftpad_k"] is not None:
        raise Declined("flash attention without a block table has no reference here")
    if float(f["dropout"] or 0.0) or int(f["window_right"] if f["window_right"] is not None else -1) > 0:
        raise Declined("dropout, or a window to the right, has no reference here")
    left = int(f["window_left"] if f["window_left"] is not None else -1)
    settings = {
        "scale": f["softmax_scale"], "window": left + 1 if left >= 0 else None,
        "cap": float(f["softcap"] or 0.0) or None,
        "slopes": None if f["alibi_slopes"] is None else f["alibi_slopes"].double(),
    }  # fmt: skip
    roles = tuple(role for role in ("output.0", place_of(call, _FLASH, "out")) if role in call.outputs)
    return PagedBatch(
        f["q"], [(f["k"], f["v"])], runs(f["cu_seqlens_q"], len(f["q"])), f["seqused_k"], f["block_table"],
        bool(f["causal"]), settings, roles or ("output.0",), call.outputs.get("output.0", f["q"]),
    )  # fmt: skip


_NPU = "query key_cache value_cache num_kv_heads num_heads scale_value block_table context_lens out"


def npu_batch(call: Call) -> PagedBatch:
    """(query [requests, heads, width], caches [blocks, slots, kv heads, width] or NZ, ..., block_table, context_lens,
    out): one row of each request."""
    f = arguments(call, _NPU)
    kv = int(f["num_kv_heads"])
    q = f["query"].reshape(len(f["query"]), int(f["num_heads"]), -1)
    nz = f["key_cache"].shape[-1] == 16 and f["key_cache"].shape[2] != kv
    layout: BlockLayout = NZ if nz else TOKENS
    size = f["key_cache"].shape[2 if nz else 1]
    both = layout.rows(f["key_cache"], size, kv, q.shape[-1]), layout.rows(f["value_cache"], size, kv, q.shape[-1])
    return PagedBatch(
        q, [both], [(n, n + 1) for n in range(len(q))], f["context_lens"], f["block_table"], True,
        {"scale": f["scale_value"]}, (place_of(call, _NPU, "out"),), f["out"],
    )  # fmt: skip


BATCHES: dict[str, Callable[[Call], PagedBatch]] = {
    "torch.ops._C.cpu_attention_with_kv_cache": cpu_batch, "torch.ops._C.paged_attention_v1": first_batch,
    "torch.ops._C.paged_attention_v2": first_batch, "torch.ops._vllm_fa2_C.varlen_fwd": flash_batch,
    "torch.ops.*._npu_paged_attention": npu_batch,
}  # fmt: skip
"""By operator; a name with ``*`` is that of many vendors."""


def batch_of(call: Call) -> PagedBatch | None:
    """The batch of a call of one of BATCHES; None for others. Raises Declined."""
    bare = ".".join(call.cls.removeprefix("torch.ops.").split(".")[:2])
    for name, make in BATCHES.items():
        if fnmatchcase(f"torch.ops.{bare}", name):
            return make(call)
    return None


@reference(*BATCHES)
def in_blocks(call: Call) -> dict[str, Expected]:
    """Attention of any of BATCHES."""
    batch = batch_of(call)
    assert batch is not None
    return batch.expected(call)


_LATENT = "out query kv_cache scale block_tables seq_lens"


@reference("torch.ops._C.mla_decode_kvcache", "torch.ops._C.mla_decode_kvcache_cpu")
def latent(call: Call) -> dict[str, Expected]:
    """(out [requests, heads, latent], query [requests, heads, latent + rope], kv_cache [blocks, slots, latent + rope],
    scale, block_tables, seq_lens): the first part of a row is its value as well."""
    f = arguments(call, _LATENT)
    q, cache, out = f["query"].double(), f["kv_cache"].double(), f["out"]
    rows = cache.reshape(len(cache), -1, 1, cache.shape[-1])
    bounds = [(n, n + 1) for n in range(len(q))]
    found = attended(q, rows, rows[..., : out.shape[-1]], bounds, f["seq_lens"], f["block_tables"], True, call.unit,
                     scale=f["scale"])  # fmt: skip
    return {place_of(call, _LATENT, "out"): _expected(found, out, q.shape[1])}
