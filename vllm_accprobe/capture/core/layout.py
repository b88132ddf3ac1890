"""How each tensor is a part of a whole, read from the attributes of the layers.

The problem: with tensor parallelism a tap sees a slice, and which slice is not in the tensor. vLLM's linear, vocabulary
and expert layers, in ten releases and in vendors' subclasses, say how they are cut in attributes of several names and
meanings. The idea: one function per fact, which returns None where the layer has no such attribute; a layer's kind
follows from what it has, never from its class. What lies between parallel layers (activations, rotary embedding,
attention, norms per head) has the layout of the neighbouring linear layer whose size it has. Where this is not known
the layout is ``unknown``, and analysis compares the ranks' copies instead of trusting a guess.

Not here: undoing a layout (align/ranks.py). Sizes are elements of this rank's tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_accprobe.dump.label_files import LABEL_TAP
from vllm_accprobe.dump.schema import REPLICATED, Layout

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
    if hasattr(module, "weight_shard_world"):  # a norm whose channels are distributed to ranks (MiniMax-M2's q and k)
        return ((len(module.weight), int(module.tp_world) // int(module.weight_shard_world)),)
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
    """This rank's place, the number of ranks, and the blocks of its experts, where whole experts are distributed.

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


class Layouts:
    """The layouts of one model on one rank. Answers are cached per (tap, role): a tap's features never change size."""

    def __init__(self, modules: Mapping[str, Any], tp_rank: int, tp_size: int, hidden_size: int | None = None):
        self._modules = modules
        self._rank = tp_rank
        self._size = tp_size
        self._hidden = hidden_size
        self._cache: dict[tuple[str, str], Layout] = {}
        self._known: dict[str, dict[int, Parts]] = {}
        self.alias: dict[str, tuple[str, str]] = {}
        """Taps that are no modules (patches) → the tap and role whose layout they have."""
        self.place = (tp_rank, tp_size)
        self.split = tp_size > 1
        """False where every tensor is whole, and nobody needs to ask."""

    def of(self, tap: str, role: str, shape: tuple[int, ...]) -> Layout:
        """The layout of a tensor of ``shape`` in ``role`` at module path ``tap``."""
        if self._size == 1:
            return REPLICATED
        tap, role = self.alias.get(tap, (tap, role))
        key = (tap, role)
        layout = self._cache.get(key)
        if layout is None:
            layout = self._cache[key] = self._find(tap, role, shape)
        return layout

    def of_param(self, tap: str, name: str, shape: tuple[int, ...]) -> Layout:
        """The layout of parameter ``name`` of module ``tap``."""
        module = self._modules.get(tap)
        if module is None or not shape:
            return REPLICATED
        local = local_experts(module, name)  # also where there is no tensor parallelism
        if local is not None:
            index, size, blocks = local
            known = sum(n for n, _ in blocks) == shape[0]
            return Layout("shard", "ep", index, size, 0, blocks) if known else Layout("unknown", "ep", index, size)
        if self._size == 1 or own_tp_size(module) == 1:
            return REPLICATED
        expert = expert_parts(module, name)
        if expert is not None:
            return self._shard(*expert) if matches(shape, *expert) else self._unknown()
        out = output_parts(module)
        if out is not None:
            total = sum(n for n, _ in out)
            if name == "bias" or len(shape) == 1:
                return self._shard(-1, out) if shape[-1] == total else REPLICATED
            if shape[-2] == total:
                return self._shard(-2, out, vocab(module))
            if shape[-1] == total:  # some kernels keep the weight transposed
                return self._shard(-1, out, vocab(module))
            return self._unknown()
        parts = input_parts(module)
        if parts is not None:
            if len(shape) == 1:
                return REPLICATED
            if shape[-1] == parts[0][0]:
                return self._shard(-1, parts)
            if shape[-2] == parts[0][0]:
                return self._shard(-2, parts)
            return self._unknown()
        return REPLICATED

    def param_event(self, tap: str, name: str, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """What a line says of how the parameter is split; None where it is whole."""
        layout = self.of_param(tap, name, shape)
        return layout.to_event() if layout.size > 1 or layout.kind != "replicated" else None

    def _find(self, tap: str, role: str, shape: tuple[int, ...]) -> Layout:
        module = self._modules.get(tap)
        if tap.startswith(LABEL_TAP):  # taken anywhere in the model: only hidden states are known to be whole
            whole = len(shape) < 2 or shape[-1] == self._hidden
            return REPLICATED if whole else self._unknown()
        if module is None or not shape:  # the sampler: every rank samples for itself, and must agree
            return REPLICATED
        if len(shape) == 1 or type(module).__name__ == "LogitsProcessor":
            return REPLICATED  # positions, ids, gathered logits: there is no feature dimension to cut
        incoming = role.startswith(("input", "inplace"))
        if is_vocab(module):
            if not incoming and shape[-1] == module.num_embeddings_per_partition:  # used as lm_head
                return self._shard(-1, output_parts(module) or (), vocab(module))
            return REPLICATED
        if is_linear(module):
            if own_tp_size(module) == 1:
                return REPLICATED
            out, parts = output_parts(module), input_parts(module)
            if parts is not None:
                if incoming:
                    return self._shard(-1, parts) if shape[-1] == parts[0][0] else REPLICATED
                return (
                    REPLICATED
                    if getattr(module, "reduce_results", True)
                    else Layout("partial", "tp", self._rank, self._size)
                )
            if out is not None and not incoming and not getattr(module, "gather_output", False):
                return self._shard(-1, out) if shape[-1] == sum(n for n, _ in out) else self._unknown()
            return REPLICATED
        if hasattr(module, "weight_shard_world"):
            return self._shard(-1, output_parts(module) or ())
        if not incoming and (
            reduces_later(module) or sums_later(module) or self._inside_experts(tap, shape)
        ):
            # Analysis takes a "partial" tensor that is the same on all ranks for a reduced one, so a block that sums
            # its experts itself is described correctly too.
            return Layout("partial", "tp", self._rank, self._size)
        return self._neighbour(tap, module, role, shape)

    def _inside_experts(self, tap: str, shape: tuple[int, ...]) -> bool:
        """Whether a hidden state comes out somewhere inside a fused-experts runner, which reduces at its very end."""
        return ".experts." in tap and shape[-1] == self._hidden

    def _neighbour(self, tap: str, module: Any, role: str, shape: tuple[int, ...]) -> Layout:
        """The layout of a tensor between parallel linear layers: that of the neighbour whose size it has."""
        # A block as a whole takes and gives hidden states; its inner leaves work on slices. With equal sizes this
        # decides: parents and norms are taken as replicated, leaves as slices.
        whole = self._hidden is not None and shape[-1] == self._hidden
        # vLLM's rotary embeddings have a child and are no blocks: their queries may be as wide as a hidden state.
        name = type(module).__name__.lower()
        if whole and ((has_children(module) and "rotary" not in name) or "norm" in name):
            return REPLICATED
        parent = tap.rpartition(".")[0]
        known = self._neighbours(parent)
        if not known and "." in parent:  # Attention modules sit one level deeper in some models
            known = self._neighbours(parent.rpartition(".")[0])
        qkv = self._qkv(parent) or self._qkv(tap)
        if qkv is not None:
            q, k, v = (int(n) for n in qkv_sizes(qkv))
            replicas = int(getattr(qkv, "num_kv_head_replicas", 1))
            word = role.rpartition(".")[2]
            if shape[-1] == q + k + v:
                return self._shard(-1, ((q, 1), (k, replicas), (v, replicas)))
            if word.startswith(("q", "query")) or (role == "output.0" and shape[-1] == q):
                return self._heads(shape, q, 1, qkv)
            if word.startswith(("k", "v")) or (role == "output.1" and shape[-1] in (k, v)):
                return self._heads(shape, k if word.startswith("k") or role == "output.1" else v, replicas, qkv)
        latent = self._latent(tap)
        if latent is not None:  # latent attention: all heads read one latent vector and one rotated key
            heads, rank = latent
            if len(shape) >= 3 and shape[-2] in (1, heads):
                return REPLICATED if shape[-2] == 1 < heads else self._shard(-2, ((heads, 1),))
            if len(shape) == 2 and shape[-1] == rank:
                return REPLICATED
        if len(shape) >= 3 and shape[-1] * shape[-2] in known:
            parts = known[shape[-1] * shape[-2]]
            if len(parts) == 1:
                return self._shard(-2, ((shape[-2], parts[0][1]),))
        if len(shape) == 2 and shape[-1] in known:  # with heads apart, the last dimension is one head's and never cut
            return self._shard(-1, known[shape[-1]])
        if qkv is not None and len(shape) >= 3:
            heads, kv = int(getattr(qkv, "num_heads", 0)), int(getattr(qkv, "num_kv_heads", 0))
            if shape[-2] == heads:
                return self._shard(-2, ((heads, 1),))
            if shape[-2] == kv:
                return self._shard(-2, ((kv, int(getattr(qkv, "num_kv_head_replicas", 1))),))
        return REPLICATED if whole or not known else self._unknown()

    def _heads(self, shape: tuple[int, ...], size: int, replicas: int, qkv: Any) -> Layout:
        if shape[-1] == size:
            return self._shard(-1, ((size, replicas),))
        head = int(getattr(qkv, "head_size", 0) or 1)
        if len(shape) >= 2 and shape[-1] == head and shape[-2] == size // head:
            return self._shard(-2, ((shape[-2], replicas),))
        return self._unknown()

    def _neighbours(self, parent: str) -> dict[int, Parts]:
        """Local feature size → parts, of the parallel linear layers that are direct children of ``parent``."""
        known = self._known.get(parent)
        if known is None:
            known = {}
            children = getattr(self._modules.get(parent), "_modules", {}) or {}
            for child in children.values():
                if child is None or not is_linear(child) or own_tp_size(child) == 1:
                    continue
                parts = input_parts(child)
                if parts is not None:
                    known.setdefault(parts[0][0], parts)
                    continue
                out = output_parts(child)
                if out is not None and not getattr(child, "gather_output", False):
                    known.setdefault(sum(n for n, _ in out), out)
            self._known[parent] = known
        return known

    def _latent(self, tap: str) -> tuple[int, int] | None:
        """(this rank's heads, width of the latent vector) of the latent attention around ``tap``, or None."""
        for _ in range(3):
            module = self._modules.get(tap)
            heads = getattr(module, "num_local_heads", getattr(module, "num_heads", None))
            rank = getattr(module, "kv_lora_rank", None)
            if isinstance(heads, int) and isinstance(rank, int):
                return heads, rank
            tap = tap.rpartition(".")[0]
        return None

    def _qkv(self, parent: str) -> Any:
        children = getattr(self._modules.get(parent), "_modules", {}) or {}
        return next((c for c in children.values() if c is not None and hasattr(c, "num_kv_head_replicas")), None)

    def _shard(self, dim: int, parts: Parts, valid: int | None = None) -> Layout:
        return Layout("shard", "tp", self._rank, self._size, dim, parts, valid)

    def _unknown(self) -> Layout:
        return Layout("unknown", "tp", self._rank, self._size)
