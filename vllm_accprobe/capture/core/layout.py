"""How each tensor is a part of a whole, read from the layers' own attributes.

The problem: with tensor parallelism a tap sees a slice, and which slice is not in the tensor. The idea: vLLM's parallel
layers carry their partition as plain attributes (also in subclasses of other vendors), so linear and vocabulary layers
are described directly, and what lies between them (activations, rotary embedding, attention, per-head norms) inherits
from the parallel linear layer beside it whose size it has. What cannot be told is ``unknown``: analysis then
compares the ranks' copies instead of trusting a guess.
Not here: what a single layer says of itself (tp_slices.py), undoing a layout (align/shards.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_accprobe.capture.core import tp_slices
from vllm_accprobe.capture.core.tp_slices import Parts
from vllm_accprobe.dump.label_files import LABEL_TAP
from vllm_accprobe.dump.schema import REPLICATED, Layout


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
        local = tp_slices.local_experts(module, name)  # also where there is no tensor parallelism beside it
        if local is not None:
            index, size, held = local
            known = sum(n for n, _ in held) == shape[0]
            return Layout("shard", "ep", index, size, 0, held) if known else Layout("unknown", "ep", index, size)
        if self._size == 1 or tp_slices.own_tp_size(module) == 1:
            return REPLICATED
        expert = tp_slices.expert_parts(module, name)
        if expert is not None:
            return self._shard(*expert) if tp_slices.matches(shape, *expert) else self._unknown()
        out = tp_slices.output_parts(module)
        if out is not None:
            total = sum(n for n, _ in out)
            if name == "bias" or len(shape) == 1:
                return self._shard(-1, out) if shape[-1] == total else REPLICATED
            if shape[-2] == total:
                return self._shard(-2, out, tp_slices.vocab(module))
            if shape[-1] == total:  # some kernels keep the weight transposed
                return self._shard(-1, out, tp_slices.vocab(module))
            return self._unknown()
        parts = tp_slices.input_parts(module)
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
        if tp_slices.is_vocab(module):
            if not incoming and shape[-1] == module.num_embeddings_per_partition:  # used as lm_head
                return self._shard(-1, tp_slices.output_parts(module) or (), tp_slices.vocab(module))
            return REPLICATED
        if tp_slices.is_linear(module):
            if tp_slices.own_tp_size(module) == 1:
                return REPLICATED
            out, parts = tp_slices.output_parts(module), tp_slices.input_parts(module)
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
        if not incoming and (
            tp_slices.reduces_later(module) or tp_slices.sums_later(module) or self._inside_experts(tap, shape)
        ):
            # Analysis takes a "partial" tensor that is the same on all ranks for a reduced one, so a block that sums
            # its experts itself is described correctly too.
            return Layout("partial", "tp", self._rank, self._size)
        return self._beside(tap, module, role, shape)

    def _inside_experts(self, tap: str, shape: tuple[int, ...]) -> bool:
        """Whether a hidden state comes out somewhere inside a fused-experts runner, which reduces at its very end."""
        return ".experts." in tap and shape[-1] == self._hidden

    def _beside(self, tap: str, module: Any, role: str, shape: tuple[int, ...]) -> Layout:
        """The layout of a tensor between parallel linear layers: that of the neighbour whose size it has."""
        # A block as a whole takes and gives hidden states; its inner leaves work on slices. With equal sizes this
        # decides: parents and norms are taken as replicated, leaves as slices.
        whole = self._hidden is not None and shape[-1] == self._hidden
        # vLLM's rotary embeddings have a child and are no blocks: their queries may be as wide as a hidden state.
        name = type(module).__name__.lower()
        if whole and ((tp_slices.has_children(module) and "rotary" not in name) or "norm" in name):
            return REPLICATED
        parent = tap.rpartition(".")[0]
        known = self._neighbours(parent)
        if not known and "." in parent:  # Attention modules sit one level deeper in some models
            known = self._neighbours(parent.rpartition(".")[0])
        qkv = self._qkv(parent) or self._qkv(tap)
        if qkv is not None:
            q, k, v = (int(n) for n in tp_slices.qkv_sizes(qkv))
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
                if child is None or not tp_slices.is_linear(child) or tp_slices.own_tp_size(child) == 1:
                    continue
                parts = tp_slices.input_parts(child)
                if parts is not None:
                    known.setdefault(parts[0][0], parts)
                    continue
                out = tp_slices.output_parts(child)
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
