"""What a parallel layer says of how it is cut: plain functions over its attributes.

The problem: vLLM's linear, vocabulary and expert layers, in ten releases and in vendors' subclasses, carry their
partition in attributes of several names and meanings. The idea: one function per fact, which answers None where the
layer has no such attribute; a layer's kind is told by what it has, never by its class. Sizes are elements of this
rank's tensor. Not here: tensors between such layers, and layouts made of these facts (layout.py).
"""

from __future__ import annotations

from typing import Any

Parts = tuple[tuple[int, int], ...]
"""The blocks along a dimension of this rank's tensor as (size, ranks that hold the same block), see schema.Layout."""


def own_tp_size(module: Any) -> int:
    """Over how many ranks this layer is cut; 1 where it opted out of tensor parallelism, 0 where it does not say."""
    return int(getattr(module, "tp_size", 0) or 0)


def is_linear(module: Any) -> bool:
    """Whether it is one of vLLM's parallel linear layers, column or row."""
    return hasattr(module, "output_partition_sizes") or hasattr(module, "input_size_per_partition")


def is_vocab(module: Any) -> bool:
    """Whether it is cut along the vocabulary: an embedding or a head."""
    return hasattr(module, "num_embeddings_per_partition")


def vocab(module: Any) -> int | None:
    """Entries of the whole vocabulary without its padding, or None."""
    return int(module.org_vocab_size) if is_vocab(module) and hasattr(module, "org_vocab_size") else None


def has_children(module: Any) -> bool:
    """Whether it is a block and not a leaf."""
    return bool(getattr(module, "_modules", None))


def qkv_sizes(module: Any) -> tuple[int, int, int]:
    """Features of q, k and v in this rank's part of a QKV projection."""
    head = int(module.head_size)
    v_head = int(getattr(module, "v_head_size", head))
    return int(module.num_heads) * head, int(module.num_kv_heads) * head, int(module.num_kv_heads) * v_head


def sums_later(module: Any) -> bool:
    """A block around a row-parallel layer that leaves the all-reduce to somebody further out (shared experts)."""
    children = (getattr(module, "_modules", None) or {}).values()
    return any(
        hasattr(c, "input_is_parallel") and getattr(c, "reduce_results", True) is False and own_tp_size(c) > 1
        for c in children
    )


def output_parts(module: Any) -> Parts | None:
    """The blocks of a column-parallel output on this rank, or None if the output is not cut."""
    if hasattr(module, "num_kv_head_replicas"):
        q, k, v = qkv_sizes(module)
        replicas = int(module.num_kv_head_replicas)
        return ((q, 1), (k, replicas), (v, replicas))
    if is_vocab(module):
        return ((int(module.num_embeddings_per_partition), 1),)
    if not hasattr(module, "gather_output"):  # row-parallel and replicated layers
        return None
    sizes = getattr(module, "output_partition_sizes", None)
    return tuple((int(n), 1) for n in sizes) if sizes else None


def input_parts(module: Any) -> Parts | None:
    """The one block of a row-parallel input on this rank, or None."""
    if not hasattr(module, "input_is_parallel"):
        return None
    return ((int(module.input_size_per_partition), 1),)


def expert_parts(module: Any, name: str) -> tuple[int, Parts] | None:
    """Fused experts: w13 holds gate and up of each expert one after the other, w2 is cut along its input."""
    if not (hasattr(module, "local_num_experts") or hasattr(module, "intermediate_size_per_partition")):
        return None
    size = getattr(module, "intermediate_size_per_partition", None)
    if size is None:
        return None
    size = int(size)
    if name.startswith("w13_weight"):
        return -2, ((size, 1), (size, 1))
    if name.startswith("w2_weight"):
        return -1, ((size, 1),)
    return None


def local_experts(module: Any, name: str) -> tuple[int, int, Parts] | None:
    """This rank's place, the number of ranks, and the blocks of its experts, where whole experts are dealt out.

    vLLM gives each rank one run of experts (linear) or every n-th (round robin). A whole is put together block by
    block, so blocks of one expert are right for the second. With load balancing experts move and are stored twice:
    no blocks, which makes the layout unknown.
    """
    parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", module)
    if not getattr(parallel, "use_ep", False) or not name.startswith(("w13_", "w2_")):
        return None
    size, index = int(getattr(parallel, "ep_size", 1) or 1), int(getattr(parallel, "ep_rank", 0) or 0)
    count = int(getattr(module, "local_num_experts", 0) or 0)
    if size == 1 or not count:
        return None
    if getattr(module, "enable_eplb", False) or getattr(parallel, "enable_eplb", False):
        return index, size, ()
    manager = getattr(module, "expert_map_manager", module)
    strategy = getattr(manager, "placement_strategy", getattr(module, "expert_placement_strategy", "linear"))
    return index, size, ((1, 1),) * count if strategy == "round_robin" else ((count, 1),)


def matches(shape: tuple[int, ...], dim: int, parts: Parts) -> bool:
    """Whether ``shape`` has along ``dim`` (from the end) exactly the blocks of ``parts``."""
    return len(shape) >= -dim and shape[dim] == sum(n for n, _ in parts)


def reduces_later(module: Any) -> bool:
    """Fused experts that leave the all-reduce to the model: to 0.19 by ``reduce_results``, from 0.26 on by their
    configuration, which a model may change after it has made them."""
    if getattr(getattr(module, "moe_config", None), "skip_final_all_reduce", False) is True:
        return True
    return hasattr(module, "global_num_experts") and getattr(module, "reduce_results", True) is False
