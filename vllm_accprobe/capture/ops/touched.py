"""Which blocks of a cache one call of an operator touches, and those blocks alone.

The problem: a paged operator takes the whole cache, gigabytes of it, and reads or writes a few blocks; without them
nobody can run the call again. The idea: the call's other arguments name them. Block tables hold numbers of blocks,
slot mappings numbers of slots, state indices numbers of states, and operators of all vendors call them so; each is
taken as it is, cut at the sequences' lengths where those are given. The blocks are gathered into one small tensor, in
front of them block 0, which stands for none; the call's line says by which argument, in which unit, they are found
again. On a device nothing is counted or sorted, which would wait for it: the blocks are as many as the tables have
entries. A view that is itself small (the state of one request) is taken whole. Not here: what is stored
(op_tensors.py), how the call is put together again (opcheck/calls/op_blocks.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

SMALL = 1 << 18
"""Bytes of a view into a cache that is taken as any other tensor (chosen)."""
TOO_MANY = "the KV cache, of which it touches more than VLLM_ACCPROBE_OPS_MAX_MB"
_TABLES = frozenset(("block_table", "block_tables", "page_table", "page_tables", "blocktable", "block_tables_lst"))
_SLOTS = frozenset(("slot_mapping", "slots", "slot_indices", "slot_mappings"))
_STATES = frozenset((
    "state_batch_indices", "dst_state_batch_indices", "conv_state_indices", "cache_indices", "initial_state_indices",
    "spec_state_indices", "ssm_state_indices", "state_indices", "block_mapping",
))  # fmt: skip
_LENGTHS = ("seq_lens", "context_lens", "seqused_k", "cache_seqlens", "actual_seq_lengths_kv", "context_lens_tensor")
_ATEN = {"aten.index_put_.": "indices.0", "aten.index.Tensor": "indices.0", "aten.index_copy_.": "index",
         "aten.index_select.": "index", "aten._index_put_impl_.": "indices.0"}  # fmt: skip
_BLOCK_DIM = {"_C.cpu_": 2, "_C_cache_ops.reshape_and_cache.": 3, "_C.paged_attention": 3, "_rocm_C.paged": 3}
"""By operator, where a block's slots are counted in the shape of (the last of) its caches; dimension 1 else."""
_OWN = {"_C.flash_mla_with_kvcache_cpu.": {
    "window_cache_2d": ("window_slots", "window_block_size"),
    "compressed_cache_2d": ("compressed_slots", "compressed_block_size"),
}}  # fmt: skip
"""By operator, where each cache has slots of its own: which argument names them, and which how many a block has."""
_UNSAID = ("_C.chunk_gated_delta_rule_cpu.", "_C.causal_conv1d_fwd_cpu.")
"""Operators that write to a cache although their schema says that they do not."""
_INTEGERS = (torch.int32, torch.int64)

Tensors = Sequence[tuple[str, torch.Tensor]]


class Touched:
    """The blocks ``ids`` of the cache ``source``. by: (role of an argument, unit) whose numbers name them."""

    __slots__ = ("by", "ids", "source")

    def __init__(self, source: torch.Tensor, ids: torch.Tensor, by: list[list[Any]]) -> None:
        self.source = source
        self.ids = ids
        self.by = by

    def now(self) -> torch.Tensor:
        """The blocks as they are, [blocks, ...]."""
        return self.source.index_select(0, self.ids)

    def is_it(self, other: torch.Tensor) -> bool:
        """Whether ``other`` is the cache that these blocks were taken from."""
        return other.data_ptr() == self.source.data_ptr() and other.shape == self.source.shape


def writes_unsaid(op: str) -> bool:
    """Whether ``op`` writes to its caches, though its schema is silent."""
    return op.startswith(_UNSAID)


def touched(
    op: str, named: Mapping[str, str], tensors: Tensors, caches: Tensors, most: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Touched | None]:  # fmt: skip
    """By role, what ``op`` touches of its caches; None where that is more than ``most`` bytes; no entry where nothing
    tells. named: the arguments' names by role (those of a list with its number behind a dot); tensors: all that went
    in, caches: those of them that lie in one; sizes: its integers, by name."""
    of_cache = {role for role, _ in caches}
    by_name = {
        named[role]: (role, t) for role, t in tensors if role in named and role not in of_cache and t.dtype in _INTEGERS
    }
    found: dict[str, Touched | None] = {}
    dim = next((d for prefix, d in _BLOCK_DIM.items() if op.startswith(prefix)), 1)
    # a cache of two dimensions has blocks of bytes: nothing tells how many slots they are
    slots = next((c.shape[dim] for _, c in reversed(caches) if c.dim() > max(dim, 2)), 0)
    own = next((by for prefix, by in _OWN.items() if op.startswith(prefix)), {})
    gathered: dict[int, tuple[torch.Tensor, list[list[Any]]] | None] = {}
    for role, cache in caches:
        if not cache.dim() or not cache.numel():
            continue
        if own:
            ids = _own_ids(own.get(named.get(role, "")), by_name, sizes, cache.shape[0])
        else:
            if cache.shape[0] not in gathered:
                gathered[cache.shape[0]] = _ids(op, by_name, cache.shape[0], slots)
            ids = gathered[cache.shape[0]]
        if ids is None:
            continue
        row = cache.element_size() * math.prod(cache.shape[1:])
        found[role] = Touched(cache, *ids) if len(ids[0]) * row <= most else None
    return found


def _ids(
    op: str, by_name: Mapping[str, tuple[str, torch.Tensor]], blocks: int, slots: int
) -> tuple[torch.Tensor, list[list[Any]]] | None:
    """The numbers of the touched blocks, and by which arguments; None where none tells."""
    parts, by = [], []
    wanted = next((name for prefix, name in _ATEN.items() if op.startswith(prefix)), None)
    for name, (role, t) in by_name.items():
        if op.startswith("aten."):
            unit = 1 if name == wanted else 0
        else:
            unit = 1 if name in _TABLES or name in _STATES else slots if name in _SLOTS else 0
        if not unit:
            continue
        numbers = _within(t, by_name, slots) if name in _TABLES else t.reshape(-1)
        parts.append(numbers if unit == 1 else numbers.div(unit, rounding_mode="floor"))
        by.append([role, unit])
    return _gathered(parts, by, blocks) if parts else None


def _own_ids(
    told: tuple[str, str] | None, by_name: Mapping[str, tuple[str, torch.Tensor]], sizes: Mapping[str, int], blocks: int
) -> tuple[torch.Tensor, list[list[Any]]] | None:
    """The same where an operator's cache has slots of its own."""
    slots, size = told or ("", "")
    if slots not in by_name or sizes.get(size, 0) < 1:
        return None
    role, t = by_name[slots]
    return _gathered([t.reshape(-1).div(sizes[size], rounding_mode="floor")], [[role, sizes[size]]], blocks)


def _gathered(
    parts: Sequence[torch.Tensor], by: list[list[Any]], blocks: int
) -> tuple[torch.Tensor, list[list[Any]]]:
    ids = torch.cat([p.long() for p in parts])
    if ids.device.type == "cpu":
        ids = ids[(ids > 0) & (ids < blocks)].unique()
    else:
        ids = ids.clamp(0, blocks - 1)
    return torch.cat((ids.new_zeros(1), ids)), by


def _within(table: torch.Tensor, by_name: Mapping[str, tuple[str, torch.Tensor]], slots: int) -> torch.Tensor:
    """The entries of a block table [requests, blocks] that the sequences' lengths reach; all where they are unknown."""
    lengths = next((by_name[name][1] for name in _LENGTHS if name in by_name), None)
    if lengths is None or table.device.type != "cpu" or table.dim() != 2 or not slots:
        return table.reshape(-1)
    reached = torch.arange(table.shape[1]) * slots < lengths.reshape(-1)[: len(table), None]
    return table[: len(reached)][reached]
