"""Attention over a paged cache, from the blocks that the call touches, and the operators that write it.

Attention over a paged cache, from the blocks that the call touches.

Formula: attention.py's; row r of a request with n rows of s in all stands at position s - n + r, and its keys are
rows 0 to that of the blocks that its row of the block table names [Kwon et al., arXiv 2309.06180, section 4.1].
vLLM's CPU kernels do not say in which of their two layouts the blocks are: both are tried, and the one in which
mine's numbers are nearer counts (a wrong layout is wrong by the size of the values, whatever the kernel does). 8-bit
caches: their codes times their scale. Latent attention reads keys and values from the same rows.

Ascend's fused attention over rows of several requests, from blocks or side by side.

Formula: attention.py's. ``actual_seq_lengths`` are the ends of the requests' queries; ``actual_seq_lengths_kv`` their
keys' numbers where there are blocks, and the ends of their keys where there are none; ``sparse_mode`` 3 lets a query
see keys up to its own, counted from the end, and 0 without a mask all of them [torch_npu's documentation,
npu_fused_infer_attention_score]. Other layouts, masks and modes are declined.

Operators that put keys and values into a cache, copy its blocks, or gather rows from it.

Formula: slot s of a slot mapping is block s // size, row s % size; below 0: nothing is written [Kwon et al., arXiv
2309.06180, section 4]. Numbers of the model are copied, and must be equal to the bit; 8-bit caches: layouts.py. All
blocks that were captured are compared, so that a row beside the right one is found as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.attention import attend
from vllm_accprobe.opcheck.references.paged.caches import (
    CPU,
    HEADS_TURNED,
    NZ,
    TOKENS,
    BlockLayout,
    code_dtype,
    coded,
    numbers,
    split_key,
)
from vllm_accprobe.opcheck.references.recurrent import arguments, place_of, runs

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
    once for each layout that they may be in; kind, scales: of 8-bit caches (caches.py); bounds: rows of each request;
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


_CAUSAL, _ALL = 3, 0
_OTHERWISE = ("pse_shift", "dequant_scale1", "quant_scale1", "antiquant_scale", "key_antiquant_scale", "query_rope",
              "query_padding_size", "key_shared_prefix")  # fmt: skip


def _numbers(values: Any) -> list[int]:
    if values is None:
        raise Declined("the lengths of its requests were not captured")
    return [int(v) for v in (values.reshape(-1) if isinstance(values, torch.Tensor) else values)]


@reference("torch.ops.*.npu_fused_infer_attention_score")
def scored(call: Call) -> dict[str, Expected]:
    """(query [tokens, heads, width], key, value: [tokens, kv heads, width], or blocks [blocks, slots, kv heads *
    width])"""
    f: dict[str, Any] = {**dict(zip(("query", "key", "value"), call.args, strict=False)), **call.kwargs}
    mode = int(f.get("sparse_mode") or 0)
    if f.get("input_layout") != "TND" or any(f.get(n) is not None for n in _OTHERWISE):
        raise Declined("fused attention in another layout than TND, or with scales, has no reference")
    if mode not in (_CAUSAL, _ALL) or (mode == _ALL and f.get("atten_mask") is not None):
        raise Declined(f"fused attention of the mode {mode} with this mask has no reference")
    q, keys, values = f["query"], *(t[0] if isinstance(t, (list, tuple)) else t for t in (f["key"], f["value"]))
    kv = int(f.get("num_key_value_heads") or 0) or int(f["num_heads"])
    bounds = list(pairwise([0, *_numbers(f.get("actual_seq_lengths"))]))
    told, table = _numbers(f.get("actual_seq_lengths_kv")), f.get("block_table")
    if table is None:  # requests side by side: a block of one row each
        rows = [t.reshape(len(t), 1, kv, -1) for t in (keys, values)]
        runs = list(pairwise([0, *told]))
        lengths = [b - a for a, b in runs]
        table = torch.full((len(runs), max([*lengths, 1])), -1)
        for n, (a, b) in enumerate(runs):
            table[n, : b - a] = torch.arange(a, b)
    else:
        rows, lengths = [t.reshape(len(t), t.shape[1], kv, -1) for t in (keys, values)], told
    if len(lengths) != len(bounds) or bounds[-1][1] > len(q):
        raise Declined("its requests are not as many everywhere")
    batch = PagedBatch(
        q, [(rows[0], rows[1])], bounds, torch.tensor(lengths), table, mode == _CAUSAL,
        {"scale": 1.0 if f.get("scale") is None else float(f["scale"])}, ("output.0",),
        call.outputs.get("output.0", q),
    )  # fmt: skip
    return batch.expected(call)


  # a torch.Tensor


def written(
    call: Call,
    role: str,
    cache: Tensor,
    rows: Tensor,
    slots: Tensor,
    layout: BlockLayout,
    size: int,
    kind: str,
    scale: Any,
) -> Expected:
    """``cache`` [blocks, ...] after rows [tokens, heads, width] were put into ``slots``; against ``role``."""
    rows = rows.reshape(len(rows), -1, rows.shape[-1])
    held = layout.rows(cache, size, rows.shape[1], rows.shape[2]).clone()
    flat = held.reshape(-1, *held.shape[2:])
    slots = slots.reshape(-1)[: len(rows)].long()
    at = slots >= 0
    if len(slots) and int(slots.max()) >= len(flat):
        raise Declined("a slot lies outside of the blocks that were captured")
    dtype = code_dtype(cache, kind)
    if dtype is None:
        flat[slots[at]] = rows[: len(slots)][at].to(cache.dtype)
    else:
        mine = call.outputs.get(role, cache)
        now = layout.rows(mine, size, rows.shape[1], rows.shape[2]).reshape(flat.shape)
        wide = rows[: len(slots)][at].double() / _scale(scale)
        flat[slots[at]] = coded(wide, now[slots[at]], dtype)
    value = layout.packed(flat.reshape(held.shape), cache)
    floats = value.dtype.is_floating_point
    return Expected(value.double() if floats else value.long(), unit=0.0)


def _scale(scale: Any) -> Any:
    return scale.double().reshape(-1)[0] if isinstance(scale, torch.Tensor) else float(scale or 1.0)


def _both(call: Call, names: str, f: Any, layouts: Sequence[BlockLayout], size: int) -> dict[str, Expected]:
    found = {}
    for what, layout in zip(("key", "value"), layouts, strict=True):
        if not isinstance(f[f"{what}_cache"], torch.Tensor) or f[what] is None:
            continue
        role = place_of(call, names, f"{what}_cache")
        found[role] = written(
            call, role, f[f"{what}_cache"], f[what], f["slot_mapping"], layout, size,
            str(f.get("kv_cache_dtype") or "auto"), f.get(f"{what[0]}_scale"),
        )  # fmt: skip
    return found


_CACHE_WRITES_FLASH = "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"


@reference("torch.ops._C_cache_ops.reshape_and_cache_flash", "torch.ops.*.reshape_and_cache_flash")
def flash(call: Call) -> dict[str, Expected]:
    """(key [tokens, heads, width], value, key_cache [blocks, slots, heads, width], value_cache, slot_mapping, kind,
    scales)"""
    f = arguments(call, _CACHE_WRITES_FLASH)
    return _both(call, _CACHE_WRITES_FLASH, f, (TOKENS, TOKENS), f["key_cache"].shape[1])


@reference("torch.ops._C_cache_ops.reshape_and_cache", "torch.ops.*.reshape_and_cache")
def first_layout(call: Call) -> dict[str, Expected]:
    """The same with key_cache [blocks, heads, width / x, slots, x] and value_cache [blocks, heads, width, slots]."""
    f = arguments(call, _CACHE_WRITES_FLASH)
    keys = f["key_cache"]
    if keys.dim() != 5:
        return _both(call, _CACHE_WRITES_FLASH, f, (TOKENS, TOKENS), keys.shape[1])
    return _both(call, _CACHE_WRITES_FLASH, f, (split_key(keys.shape[-1]), HEADS_TURNED), keys.shape[3])


_CACHE_WRITES_CPU = "key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype"


@reference("torch.ops._C.cpu_attn_reshape_and_cache")
def on_cpu(call: Call) -> dict[str, Expected]:
    """(key, value, caches [blocks, heads, slots, width], slot_mapping, isa, scales, kind): packed as ``isa`` has it."""
    f = arguments(call, _CACHE_WRITES_CPU)
    if str(f["isa"]) not in CPU:
        raise Declined(f"how kernels for {f['isa']} pack their blocks is not known here")
    if f["key_cache"].dtype.itemsize == 1 and str(f["isa"]) == "amx":
        raise Declined("how kernels for AMX pack 8-bit blocks is not known here")
    return _both(call, _CACHE_WRITES_CPU, f, CPU[str(f["isa"])], f["key_cache"].shape[2])


_CACHE_WRITES_NPU = "key value key_cache value_cache slot_mapping"


@reference("torch.ops.*._npu_reshape_and_cache", "torch.ops.*.npu_reshape_and_cache")
def on_npu(call: Call) -> dict[str, Expected]:
    """(key, value, key_cache, value_cache, slot_indices): [blocks, slots, heads, width], or NZ [blocks, heads * width /
    16, slots, 16]."""
    f = dict(arguments(call, _CACHE_WRITES_NPU))
    f["slot_mapping"] = f["slot_mapping"] if f["slot_mapping"] is not None else call.kwargs.get("slot_indices")
    keys, heads = f["key_cache"], f["key"].shape[-2]
    nz = keys.dim() == 4 and keys.shape[-1] == 16 and keys.shape[2] != heads
    layouts = (NZ, NZ) if nz else (TOKENS, TOKENS)
    return _both(call, _CACHE_WRITES_NPU, f, layouts, keys.shape[2] if nz else keys.shape[1])


_CACHE_WRITES_LATENT = "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale"


@reference("torch.ops._C_cache_ops.concat_and_cache_mla", "torch.ops.*.concat_and_cache_mla")
def write_latent(call: Call) -> dict[str, Expected]:
    """(kv_c [tokens, latent], k_pe [tokens, rope], kv_cache [blocks, slots, latent + rope], slot_mapping, kind,
    scale)"""
    f = arguments(call, _CACHE_WRITES_LATENT)
    cache, kind = f["kv_cache"], str(f["kv_cache_dtype"] or "auto")
    parts = [t.reshape(len(t), -1) for t in (f["kv_c"], f["k_pe"])]
    if sum(t.shape[-1] for t in parts) != cache.shape[-1]:
        raise Declined(f"a cache of kind {kind} has no reference")
    role = place_of(call, _CACHE_WRITES_LATENT, "kv_cache")
    rows = torch.cat(parts, -1).unsqueeze(1)
    size = cache.shape[1]
    return {role: written(call, role, cache, rows, f["slot_mapping"], TOKENS, size, kind, f["scale"])}


_SWAP = "src dst block_size_in_bytes block_mapping"


@reference("torch.ops._C_cache_ops.swap_blocks", "torch.ops.*.swap_blocks")
def swapped(call: Call) -> dict[str, Expected]:
    """(src, dst, bytes of a block, pairs): block a of src becomes block b of dst."""
    f = dict(arguments(call, _SWAP))
    if f["block_mapping"] is None and isinstance(f["block_size_in_bytes"], torch.Tensor):
        f["block_mapping"] = f["block_size_in_bytes"]  # as it was before 0.12
    return {place_of(call, _SWAP, "dst"): _copied(f["src"], f["dst"], f["block_mapping"])}


def _copied(source: Tensor, to: Tensor, pairs: Tensor) -> Expected:
    if not all(isinstance(t, torch.Tensor) for t in (source, to, pairs)):
        raise Declined("an argument is no tensor")
    pairs, value = pairs.reshape(-1, 2).long(), to.clone()
    if pairs.numel() and (int(pairs.min()) < 0 or int(pairs.max()) >= min(len(source), len(to))):
        raise Declined("a block lies outside of those that were captured")
    value[pairs[:, 1]] = source[pairs[:, 0]].to(to.dtype)
    return Expected(value.double() if value.is_floating_point() else value.long(), unit=0.0)


@reference("torch.ops._C_cache_ops.copy_blocks", "torch.ops._C_cache_ops.copy_blocks_mla")
def copied(call: Call) -> dict[str, Expected]:
    """(lists of caches, pairs): block a becomes block b of each."""
    *lists, pairs = call.args
    found = {}
    for place, caches in enumerate(lists):
        for n, cache in enumerate(caches):
            found[f"inplace.input.{place}.{n}"] = _copied(cache, cache, pairs)
    return found


_GATHER = "src_cache dst block_table cu_seq_lens batch_size seq_starts"
_DEQUANT = "src_cache dst block_table cu_seq_lens token_to_seq num_tokens kv_cache_dtype scale seq_starts"


@reference("torch.ops._C_cache_ops.cp_gather_cache", "torch.ops._C_cache_ops.gather_and_maybe_dequant_cache")
def gathered(call: Call) -> dict[str, Expected]:
    """(cache [blocks, slots, width], dst [tokens, width], block_table, cu_seq_lens, ...): the rows of each request, one
    after the other, from ``seq_starts`` on."""
    names = _GATHER if "cp_gather" in call.cls else _DEQUANT
    f = arguments(call, names)
    cache, out, table, kind = f["src_cache"], f["dst"], f["block_table"], str(f.get("kv_cache_dtype") or "auto")
    dtype, size = code_dtype(cache, kind), cache.shape[1]
    held = cache if dtype is None else cache.view(dtype)
    wide = held.double() * (1.0 if dtype is None else _scale(f.get("scale")))
    value, known = torch.zeros(out.shape, dtype=torch.float64), torch.zeros(len(out), dtype=torch.bool)
    for n, (begin, end) in enumerate(pairwise(int(e) for e in f["cu_seq_lens"])):
        first = 0 if f["seq_starts"] is None else int(f["seq_starts"][n])
        at = torch.arange(first, first + min(end, len(out)) - begin)
        blocks = table[n].long()[at // size]
        if blocks.numel() and (int(blocks.min()) < 0 or int(blocks.max()) >= len(cache)):
            raise Declined("a block lies outside of those that were captured")
        value[begin : begin + len(at)] = wide[blocks, at % size].reshape(len(at), *out.shape[1:])
        known[begin : begin + len(at)] = True
    unit = 0.0 if dtype is None and out.dtype == cache.dtype else None
    return {place_of(call, names, "dst"): Expected(value, unit=unit, rows=known, reason="no row of a request")}
