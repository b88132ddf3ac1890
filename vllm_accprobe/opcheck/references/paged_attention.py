"""Attention over a paged cache, from the blocks that the call touches, and the operators that write it.

Formula: attention.py's; row r of a request with n rows of s in all stands at position s - n + r, and its keys are rows
0 to that of the blocks that its row of the block table names; slot s of a slot mapping is block s // size, row s %
size; below 0: nothing is written [Kwon et al., arXiv 2309.06180, sections 4 and 4.1]. Each operator's signature becomes
a `PagedBatch`, and the formula is applied once. vLLM's CPU kernels do not say in which of their two layouts the blocks
are: both are tried, and the one in which mine's numbers are nearer counts (a wrong layout is wrong by the size of the
values, whatever the kernel does). Numbers of the model that are written must be equal to the bit. All blocks that were
captured are compared, so that a row next to the right one is found as well.
Elsewhere: layouts, and the numbers of 8-bit caches (caches.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if, reference
from vllm_accprobe.opcheck.references.attention import attended
from vllm_accprobe.opcheck.references.caches import (
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
from vllm_accprobe.opcheck.references.parts import Arguments, RowResults, equal, runs, within

Tensor = Any  # a torch.Tensor
Bounds = Sequence[tuple[int, int]]


_OUTSIDE = "a block lies outside of those that were captured"


def past(rows: Tensor, table: Tensor, length: int) -> Tensor:
    """The first ``length`` rows of one request: rows [blocks, slots, ...], table [blocks of the request]."""
    size = rows.shape[1]
    blocks = within(table[: -(-length // size)], len(rows), _OUTSIDE)
    decline_if(len(blocks) * size < length, _OUTSIDE)
    return rows[blocks].flatten(0, 1)[:length]


@dataclass(frozen=True)
class PagedBatch:
    """A batch of requests whose keys lie in blocks, whatever its operator calls it.

    q: [tokens, heads, width] as captured; caches: keys and values [blocks, slots, kv heads, width] in their own dtype,
    once for each layout that they may be in; bounds: rows of each request; lengths: its keys; table: its blocks;
    settings: of `attend`; roles: of its result; like: its shape; kind, scales: of 8-bit caches (caches.py)."""

    q: Tensor
    caches: Sequence[tuple[Tensor, Tensor]]
    bounds: Bounds
    lengths: Tensor
    table: Tensor
    causal: bool
    settings: Mapping[str, Any]
    roles: tuple[str, ...]
    like: Tensor
    kind: str = "auto"
    scales: tuple[Any, Any] = (None, None)

    def expected(self, call: Call) -> dict[str, Expected]:
        mine, q = call.outputs.get(self.roles[0], self.like), self.q.double()
        found = []
        for cache in self.caches:
            keys, values = (numbers(c, self.kind, s) for c, s in zip(cache, self.scales, strict=True))
            settings = {**self.settings, "scale": float(self.settings["scale"]), "step": call.unit}
            found.append(attended(q, self._requests(keys, values), values.shape[-1], **settings))

        def distance(rows: RowResults) -> float:
            value = rows.parts[0]
            error = mine.double().reshape(-1, *value.shape[1:])[: len(value)][rows.known] - value[rows.known]
            return float(torch.nan_to_num(error, nan=1e30).square().sum())

        nearest = min(found, key=distance) if len(found) > 1 else found[0]
        return dict.fromkeys(self.roles, nearest.expected(self.like, groups=self.q.shape[1]))

    def _requests(self, keys: Tensor, values: Tensor) -> Iterator[tuple[Any, ...]]:
        for n, (begin, end) in enumerate(self.bounds):
            total = int(self.lengths.reshape(-1)[n])
            if begin < end <= begin + total:
                at = torch.arange(total - (end - begin), total) if self.causal else None
                past_ = (past(rows, self.table[n], total) for rows in (keys, values))
                yield slice(begin, end), *past_, {"query_positions": at}


def _one_row_each(q: Tensor) -> Bounds:
    return [(n, n + 1) for n in range(len(q))]


_CPU = (
    "query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes sliding_window_size "
    "block_table softcap scheduler_metadata s_aux dynamic_causal k_scale v_scale kv_cache_dtype"
)


def _cpu_batch(call: Call) -> PagedBatch:
    """query [tokens, heads, width], caches [blocks, kv heads, slots, width]."""
    f = Arguments(call, _CPU)
    decline_if(f["dynamic_causal"] is not None, "a mask that differs from request to request has no reference here")
    q, keys, values, kind = f["query"], f["key_cache"], f["value_cache"], str(f["kv_cache_dtype"] or "auto")
    _, kv, size, width = keys.shape
    if keys.dtype.itemsize == 1 and kind.startswith("fp8") and keys.dtype == torch.uint8 and size % 32:
        raise Declined("8-bit blocks of this size have no reference")
    window = int(f["sliding_window_size"] if f["sliding_window_size"] is not None else -1)
    settings = {"scale": f["scale"], "window": window if window > 0 else None,
                "cap": float(f["softcap"] or 0.0) or None, "slopes": f.wide_or_none("alibi_slopes"),
                "sinks": f.wide_or_none("s_aux")}  # fmt: skip
    caches = []
    for key_layout, value_layout in dict.fromkeys(CPU.values()):
        try:
            both = key_layout.rows(keys, size, kv, width), value_layout.rows(values, size, kv, width)
        except (Declined, RuntimeError):
            continue  # a size that this layout cannot have
        caches.append(both)
    decline_if(not caches, "its blocks are in no known layout")
    return PagedBatch(
        q, caches, runs(f["query_start_loc"], len(q)), f["seq_lens"], f["block_table"], bool(f["causal"]), settings,
        (f.role("output"),), f["output"], kind, (f["k_scale"], f["v_scale"]),
    )  # fmt: skip


_PAGED = (
    "out query key_cache value_cache num_kv_heads scale block_tables seq_lens block_size max_seq_len alibi_slopes "
    "kv_cache_dtype k_scale v_scale"
)


def _first_batch(call: Call) -> PagedBatch:
    """query [requests, heads, width], key_cache [blocks, kv heads, width / x, slots, x], value_cache [blocks, kv heads,
    width, slots]: one row of each request; v2 has scratch space behind ``out``."""
    f = Arguments(call, _PAGED.replace("out ", "out exp_sums max_logits tmp_out ") if "_v2" in call.cls else _PAGED)
    q, keys, values = f["query"], f["key_cache"], f["value_cache"]
    kv, size, width = int(f["num_kv_heads"]), int(f["block_size"]), q.shape[-1]
    both = split_key(keys.shape[-1]).rows(keys, size, kv, width), HEADS_TURNED.rows(values, size, kv, width)
    settings = {"scale": f["scale"], "slopes": f.wide_or_none("alibi_slopes")}
    return PagedBatch(
        q, [both], _one_row_each(q), f["seq_lens"], f["block_tables"], True, settings, (f.role("out"),), f["out"],
        str(f["kv_cache_dtype"] or "auto"), (f["k_scale"], f["v_scale"]),
    )  # fmt: skip


_FLASH = (
    "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes max_seqlen_q max_seqlen_k "
    "dropout softmax_scale zero_tensors causal window_left window_right softcap"
)


def _flash_batch(call: Call) -> PagedBatch:
    """Flash attention 2 with a block table: q [tokens, heads, width], k and v [blocks, slots, kv heads, width]."""
    f = Arguments(call, _FLASH)
    if f["block_table"] is None or f["seqused_k"] is None or f["leftpad_k"] is not None:
        raise Declined("flash attention without a block table has no reference here")
    left, right = (int(f[n] if f[n] is not None else -1) for n in ("window_left", "window_right"))
    decline_if(float(f["dropout"] or 0.0) or right > 0, "dropout, or a window to the right, has no reference here")
    settings = {"scale": f["softmax_scale"], "window": left + 1 if left >= 0 else None,
                "cap": float(f["softcap"] or 0.0) or None, "slopes": f.wide_or_none("alibi_slopes")}  # fmt: skip
    roles = tuple(role for role in ("output.0", f.role("out")) if role in call.outputs)
    return PagedBatch(
        f["q"], [(f["k"], f["v"])], runs(f["cu_seqlens_q"], len(f["q"])), f["seqused_k"], f["block_table"],
        bool(f["causal"]), settings, roles or ("output.0",), call.outputs.get("output.0", f["q"]),
    )  # fmt: skip


def _npu_batch(call: Call) -> PagedBatch:
    """query [requests, heads, width], caches [blocks, slots, kv heads, width] or NZ: one row of each request."""
    f = Arguments(call, "query key_cache value_cache num_kv_heads num_heads scale_value block_table context_lens out")
    kv, keys = int(f["num_kv_heads"]), f["key_cache"]
    q = f["query"].reshape(len(f["query"]), int(f["num_heads"]), -1)
    nz = keys.shape[-1] == 16 and keys.shape[2] != kv
    layout, size = (NZ, keys.shape[2]) if nz else (TOKENS, keys.shape[1])
    both = layout.rows(keys, size, kv, q.shape[-1]), layout.rows(f["value_cache"], size, kv, q.shape[-1])
    return PagedBatch(
        q, [both], _one_row_each(q), f["context_lens"], f["block_table"], True, {"scale": f["scale_value"]},
        (f.role("out"),), f["out"],
    )  # fmt: skip


def _latent_batch(call: Call) -> PagedBatch:
    """query [requests, heads, latent + rope], kv_cache [blocks, slots, latent + rope]: its first part is the value."""
    f = Arguments(call, "out query kv_cache scale block_tables seq_lens")
    q, cache, out = f["query"], f["kv_cache"], f["out"]
    rows = cache.reshape(len(cache), -1, 1, cache.shape[-1])
    return PagedBatch(
        q, [(rows, rows[..., : out.shape[-1]])], _one_row_each(q), f["seq_lens"], f["block_tables"], True,
        {"scale": f["scale"]}, (f.role("out"),), out,
    )  # fmt: skip


_CAUSAL, _ALL = 3, 0
_OTHERWISE = ("pse_shift", "dequant_scale1", "quant_scale1", "antiquant_scale", "key_antiquant_scale", "query_rope",
              "query_padding_size", "key_shared_prefix")  # fmt: skip


def _fused_batch(call: Call) -> PagedBatch:
    """query [tokens, heads, width], key, value: [tokens, kv heads, width], or blocks [blocks, slots, kv heads * width].
    ``actual_seq_lengths`` are the ends of the requests' queries; ``actual_seq_lengths_kv`` their keys' numbers where
    there are blocks, and the ends of their keys where there are none; ``sparse_mode`` 3 lets a query see keys up to its
    own, counted from the end, and 0 without a mask all [torch_npu's documentation, npu_fused_infer_attention_score]."""
    f: dict[str, Any] = {**dict(zip(("query", "key", "value"), call.args, strict=False)), **call.kwargs}
    mode = int(f.get("sparse_mode") or 0)
    if f.get("input_layout") != "TND" or any(f.get(n) is not None for n in _OTHERWISE):
        raise Declined("fused attention in another layout than TND, or with scales, has no reference")
    if mode not in (_CAUSAL, _ALL) or (mode == _ALL and f.get("atten_mask") is not None):
        raise Declined(f"fused attention of the mode {mode} with this mask has no reference")
    ends, numbers_of_keys = (f.get(n) for n in ("actual_seq_lengths", "actual_seq_lengths_kv"))
    if ends is None or numbers_of_keys is None:
        raise Declined("the lengths of its requests were not captured")
    q, keys, values = f["query"], *(t[0] if isinstance(t, (list, tuple)) else t for t in (f["key"], f["value"]))
    kv = int(f.get("num_key_value_heads") or 0) or int(f["num_heads"])
    bounds, lengths, table = list(pairwise([0, *map(int, ends)])), [*map(int, numbers_of_keys)], f.get("block_table")
    if table is None:  # requests side by side: a block of one row each
        rows = [t.reshape(len(t), 1, kv, -1) for t in (keys, values)]
        of_keys = list(pairwise([0, *lengths]))
        lengths = [b - a for a, b in of_keys]
        table = torch.full((len(of_keys), max([*lengths, 1])), -1)
        for n, (a, b) in enumerate(of_keys):
            table[n, : b - a] = torch.arange(a, b)
    else:
        rows = [t.reshape(len(t), t.shape[1], kv, -1) for t in (keys, values)]
    decline_if(len(lengths) != len(bounds) or bounds[-1][1] > len(q), "its requests are not as many everywhere")
    return PagedBatch(
        q, [(rows[0], rows[1])], bounds, torch.tensor(lengths), table, mode == _CAUSAL,
        {"scale": 1.0 if f.get("scale") is None else float(f["scale"])}, ("output.0",),
        call.outputs.get("output.0", q),
    )  # fmt: skip


BATCHES: dict[str, Callable[[Call], PagedBatch]] = {
    "torch.ops._C.cpu_attention_with_kv_cache": _cpu_batch, "torch.ops._C.paged_attention_v1": _first_batch,
    "torch.ops._C.paged_attention_v2": _first_batch, "torch.ops._vllm_fa2_C.varlen_fwd": _flash_batch,
    "torch.ops.*._npu_paged_attention": _npu_batch, "torch.ops._C.mla_decode_kvcache": _latent_batch,
    "torch.ops._C.mla_decode_kvcache_cpu": _latent_batch, "torch.ops.*.npu_fused_infer_attention_score": _fused_batch,
}  # fmt: skip
"""By operator; a name with ``*`` is that of many vendors."""


@reference(*BATCHES)
def in_blocks(call: Call) -> dict[str, Expected]:
    """Attention of any of BATCHES."""
    bare = ".".join(call.cls.replace("::", ".").removeprefix("torch.ops.").split(".")[:2])
    make = next(make for name, make in BATCHES.items() if fnmatchcase(f"torch.ops.{bare}", name))
    return make(call).expected(call)


def _scale(scale: Any) -> Any:
    return scale.double().reshape(-1)[0] if isinstance(scale, torch.Tensor) else float(scale or 1.0)


def _written(
    call: Call, role: str, cache: Tensor, rows: Tensor, slots: Tensor, layout: BlockLayout, size: int, kind: str,
    scale: Any,
) -> Expected:  # fmt: skip
    """``cache`` [blocks, ...] after rows [tokens, heads, width] were put into ``slots``; against ``role``."""
    rows = rows.reshape(len(rows), -1, rows.shape[-1])
    blocks = layout.rows(cache, size, rows.shape[1], rows.shape[2]).clone()
    flat = blocks.reshape(-1, *blocks.shape[2:])
    slots = slots.reshape(-1)[: len(rows)].long()
    at = slots >= 0
    decline_if(len(slots) and int(slots.max()) >= len(flat), "a slot lies outside of the blocks that were captured")
    dtype = code_dtype(cache, kind)
    if dtype is None:
        flat[slots[at]] = rows[: len(slots)][at].to(cache.dtype)
    else:
        mine = call.outputs.get(role, cache)
        now = layout.rows(mine, size, rows.shape[1], rows.shape[2]).reshape(flat.shape)
        wide = rows[: len(slots)][at].double() / _scale(scale)
        flat[slots[at]] = coded(wide, now[slots[at]], dtype)
    return equal(layout.packed(flat.reshape(blocks.shape), cache))


def _both(call: Call, f: Arguments, layouts: Sequence[BlockLayout], size: int) -> dict[str, Expected]:
    found = {}
    for what, layout in zip(("key", "value"), layouts, strict=True):
        if not isinstance(f[f"{what}_cache"], torch.Tensor) or f[what] is None:
            continue
        role, kind, scale = f.role(f"{what}_cache"), str(f.get("kv_cache_dtype") or "auto"), f.get(f"{what[0]}_scale")
        found[role] = _written(
            call, role, f[f"{what}_cache"], f[what], f["slot_mapping"], layout, size, kind, scale
        )  # fmt: skip
    return found


_WRITES = "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"


@reference(*(f"torch.ops.{home}.reshape_and_cache{more}" for home in ("_C_cache_ops", "*") for more in ("", "_flash")))
def written(call: Call) -> dict[str, Expected]:
    """key [tokens, heads, width], key_cache [blocks, slots, heads, width]; or, of the first layout, key_cache [blocks,
    heads, width / x, slots, x] and value_cache [blocks, heads, width, slots]."""
    f = Arguments(call, _WRITES)
    keys = f["key_cache"]
    if keys.dim() != 5:
        return _both(call, f, (TOKENS, TOKENS), keys.shape[1])
    return _both(call, f, (split_key(keys.shape[-1]), HEADS_TURNED), keys.shape[3])


@reference("torch.ops._C.cpu_attn_reshape_and_cache")
def on_cpu(call: Call) -> dict[str, Expected]:
    """Caches [blocks, heads, slots, width], packed as ``isa`` has it."""
    f = Arguments(call, "key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype")
    decline_if(str(f["isa"]) not in CPU, f"how kernels for {f['isa']} pack their blocks is not known here")
    if f["key_cache"].dtype.itemsize == 1 and str(f["isa"]) == "amx":
        raise Declined("how kernels for AMX pack 8-bit blocks is not known here")
    return _both(call, f, CPU[str(f["isa"])], f["key_cache"].shape[2])


@reference("torch.ops.*._npu_reshape_and_cache", "torch.ops.*.npu_reshape_and_cache")
def on_npu(call: Call) -> dict[str, Expected]:
    """[blocks, slots, heads, width], or NZ [blocks, heads * width / 16, slots, 16]; slots by keyword: slot_indices."""
    f = Arguments(call, "key value key_cache value_cache slot_mapping")
    f["slot_mapping"] = f["slot_mapping"] if f["slot_mapping"] is not None else call.kwargs.get("slot_indices")
    keys, heads = f["key_cache"], f["key"].shape[-2]
    if keys.dim() == 4 and keys.shape[-1] == 16 and keys.shape[2] != heads:
        return _both(call, f, (NZ, NZ), keys.shape[2])
    return _both(call, f, (TOKENS, TOKENS), keys.shape[1])


@reference("torch.ops._C_cache_ops.concat_and_cache_mla", "torch.ops.*.concat_and_cache_mla")
def write_latent(call: Call) -> dict[str, Expected]:
    """kv_c [tokens, latent], k_pe [tokens, rope], kv_cache [blocks, slots, latent + rope]."""
    f = Arguments(call, "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale")
    cache, kind = f["kv_cache"], str(f["kv_cache_dtype"] or "auto")
    parts = [t.reshape(len(t), -1) for t in (f["kv_c"], f["k_pe"])]
    decline_if(sum(t.shape[-1] for t in parts) != cache.shape[-1], f"a cache of kind {kind} has no reference")
    role, rows = f.role("kv_cache"), torch.cat(parts, -1).unsqueeze(1)
    return {role: _written(call, role, cache, rows, f["slot_mapping"], TOKENS, cache.shape[1], kind, f["scale"])}


@reference("torch.ops._C_cache_ops.swap_blocks", "torch.ops.*.swap_blocks")
def swapped(call: Call) -> dict[str, Expected]:
    """(src, dst, bytes of a block, pairs): block a of src becomes block b of dst."""
    f = Arguments(call, "src dst block_size_in_bytes block_mapping")
    if f["block_mapping"] is None and isinstance(f["block_size_in_bytes"], torch.Tensor):
        f["block_mapping"] = f["block_size_in_bytes"]  # as it was before 0.12
    return {f.role("dst"): _copied(f["src"], f["dst"], f["block_mapping"])}


def _copied(source: Tensor, to: Tensor, pairs: Tensor) -> Expected:
    decline_if(not all(isinstance(t, torch.Tensor) for t in (source, to, pairs)), "an argument is no tensor")
    pairs, value = within(pairs.reshape(-1, 2), min(len(source), len(to)), _OUTSIDE), to.clone()
    value[pairs[:, 1]] = source[pairs[:, 0]].to(to.dtype)
    return equal(value)


@reference("torch.ops._C_cache_ops.copy_blocks", "torch.ops._C_cache_ops.copy_blocks_mla")
def copied(call: Call) -> dict[str, Expected]:
    """(lists of caches, pairs): block a becomes block b of each."""
    *lists, pairs = call.args
    return {f"inplace.input.{place}.{n}": _copied(cache, cache, pairs)
            for place, caches in enumerate(lists) for n, cache in enumerate(caches)}  # fmt: skip


_GATHER = "src_cache dst block_table cu_seq_lens batch_size seq_starts"
_DEQUANT = "src_cache dst block_table cu_seq_lens token_to_seq num_tokens kv_cache_dtype scale seq_starts"


@reference("torch.ops._C_cache_ops.cp_gather_cache", "torch.ops._C_cache_ops.gather_and_maybe_dequant_cache")
def gathered(call: Call) -> dict[str, Expected]:
    """(cache [blocks, slots, width], dst [tokens, width], block_table, ...): each request's rows from seq_starts on."""
    f = Arguments(call, _GATHER if "cp_gather" in call.cls else _DEQUANT)
    cache, out, table, kind = f["src_cache"], f["dst"], f["block_table"], str(f.get("kv_cache_dtype") or "auto")
    dtype, size = code_dtype(cache, kind), cache.shape[1]
    wide = cache.double() if dtype is None else cache.view(dtype).double() * _scale(f.get("scale"))
    value, known = torch.zeros(out.shape, dtype=torch.float64), torch.zeros(len(out), dtype=torch.bool)
    for n, (begin, end) in enumerate(pairwise(int(e) for e in f["cu_seq_lens"])):
        first = 0 if f["seq_starts"] is None else int(f["seq_starts"][n])
        at = torch.arange(first, first + min(end, len(out)) - begin)
        blocks = within(table[n].long()[at // size], len(cache), _OUTSIDE)
        value[begin : begin + len(at)] = wide[blocks, at % size].reshape(len(at), *out.shape[1:])
        known[begin : begin + len(at)] = True
    unit = 0.0 if dtype is None and out.dtype == cache.dtype else None
    return {f.role("dst"): Expected(value, unit=unit, rows=known, reason="no row of a request")}
