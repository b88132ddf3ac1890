"""Operators that put keys and values into a cache, copy its blocks, or gather rows from it.

Formula: slot s of a slot mapping is block s // size, row s % size; below 0: nothing is written [Kwon et al., arXiv
2309.06180, section 4]. Numbers of the model are copied, and must be equal to the bit; 8-bit caches: layouts.py. All
blocks that were captured are compared, so that a row beside the right one is found as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.paged.layouts import (
    CPU,
    HEADS_TURNED,
    NZ,
    TOKENS,
    BlockLayout,
    code_dtype,
    coded,
    split_key,
)
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, place_of

Tensor = Any  # a torch.Tensor


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


_FLASH = "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"


@reference("torch.ops._C_cache_ops.reshape_and_cache_flash", "torch.ops.*.reshape_and_cache_flash")
def flash(call: Call) -> dict[str, Expected]:
    """(key [tokens, heads, width], value, key_cache [blocks, slots, heads, width], value_cache, slot_mapping, kind,
    scales)"""
    f = arguments(call, _FLASH)
    return _both(call, _FLASH, f, (TOKENS, TOKENS), f["key_cache"].shape[1])


@reference("torch.ops._C_cache_ops.reshape_and_cache", "torch.ops.*.reshape_and_cache")
def first_layout(call: Call) -> dict[str, Expected]:
    """The same with key_cache [blocks, heads, width / x, slots, x] and value_cache [blocks, heads, width, slots]."""
    f = arguments(call, _FLASH)
    keys = f["key_cache"]
    if keys.dim() != 5:
        return _both(call, _FLASH, f, (TOKENS, TOKENS), keys.shape[1])
    return _both(call, _FLASH, f, (split_key(keys.shape[-1]), HEADS_TURNED), keys.shape[3])


_CPU = "key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype"


@reference("torch.ops._C.cpu_attn_reshape_and_cache")
def on_cpu(call: Call) -> dict[str, Expected]:
    """(key, value, caches [blocks, heads, slots, width], slot_mapping, isa, scales, kind): packed as ``isa`` has it."""
    f = arguments(call, _CPU)
    if str(f["isa"]) not in CPU:
        raise Declined(f"how kernels for {f['isa']} pack their blocks is not known here")
    if f["key_cache"].dtype.itemsize == 1 and str(f["isa"]) == "amx":
        raise Declined("how kernels for AMX pack 8-bit blocks is not known here")
    return _both(call, _CPU, f, CPU[str(f["isa"])], f["key_cache"].shape[2])


_NPU = "key value key_cache value_cache slot_mapping"


@reference("torch.ops.*._npu_reshape_and_cache", "torch.ops.*.npu_reshape_and_cache")
def on_npu(call: Call) -> dict[str, Expected]:
    """(key, value, key_cache, value_cache, slot_indices): [blocks, slots, heads, width], or NZ [blocks, heads * width /
    16, slots, 16]."""
    f = dict(arguments(call, _NPU))
    f["slot_mapping"] = f["slot_mapping"] if f["slot_mapping"] is not None else call.kwargs.get("slot_indices")
    keys, heads = f["key_cache"], f["key"].shape[-2]
    nz = keys.dim() == 4 and keys.shape[-1] == 16 and keys.shape[2] != heads
    return _both(call, _NPU, f, (NZ, NZ) if nz else (TOKENS, TOKENS), keys.shape[2] if nz else keys.shape[1])


_LATENT = "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale"


@reference("torch.ops._C_cache_ops.concat_and_cache_mla", "torch.ops.*.concat_and_cache_mla")
def latent(call: Call) -> dict[str, Expected]:
    """(kv_c [tokens, latent], k_pe [tokens, rope], kv_cache [blocks, slots, latent + rope], slot_mapping, kind,
    scale)"""
    f = arguments(call, _LATENT)
    cache, kind = f["kv_cache"], str(f["kv_cache_dtype"] or "auto")
    parts = [t.reshape(len(t), -1) for t in (f["kv_c"], f["k_pe"])]
    if sum(t.shape[-1] for t in parts) != cache.shape[-1]:
        raise Declined(f"a cache of kind {kind} has no reference")
    role = place_of(call, _LATENT, "kv_cache")
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
