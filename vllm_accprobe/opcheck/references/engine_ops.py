"""vLLM's own operators, as torch.ops._C and torch.ops.vllm have them: the formulas of the modules, by position.

The problem: a captured kernel call has no argument names and writes into its first argument. The idea: each is told to
the formula of its family. Formulas: those of norms.py, activations.py, rotary.py, moe.py, attention.py and linear.py;
slots of a paged cache: block_table[request, position // size] * size + position % size [Kwon et al., arXiv 2309.06180,
section 4]. A product whose weight is behind a handle takes the weight of the module that called it. Kernels that read
the KV cache have none: their module's call is checked, from the request's own rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references import activations, moe, norms
from vllm_accprobe.opcheck.references.attention import full_attention
from vllm_accprobe.opcheck.references.linear import biased, product
from vllm_accprobe.opcheck.references.parts import reshaped
from vllm_accprobe.opcheck.references.quantised import weight_of
from vllm_accprobe.opcheck.references.rotary import turned

_CACHE = "reads the KV cache, which is not kept: its module's call is checked instead"


def _arg(call: Call, place: int, name: str = "") -> Any:
    """An argument by place or by keyword; None where it is missing."""
    if place < len(call.args):
        return call.args[place]
    return call.kwargs.get(name)


def _wide(call: Call, place: int) -> Any:
    found = _arg(call, place)
    if not isinstance(found, torch.Tensor):
        raise Declined(f"argument {place} is no tensor")
    return found.double()


@reference("torch.ops._C.rms_norm")
def rms_norm(call: Call) -> dict[str, Expected]:
    """(out, input, weight, epsilon)"""
    return {"inplace.input.0": norms.fused(_wide(call, 1), None, *_weighed(call), call.unit)[0]}


@reference("torch.ops._C.fused_add_rms_norm")
def fused_add_rms_norm(call: Call) -> dict[str, Expected]:
    """(input, residual, weight, epsilon): both become what the norm and the sum are."""
    normed, total = norms.fused(_wide(call, 0), _wide(call, 1), *_weighed(call), call.unit)
    assert total is not None
    return {"inplace.input.0": normed, "inplace.input.1": total}


def _weighed(call: Call) -> tuple[Any | None, float]:
    """Weight and epsilon."""
    return None if _arg(call, 2) is None else _wide(call, 2), float(_arg(call, 3))


_GATED: dict[str, Callable[[Any], Any]] = {
    "silu_and_mul": activations.silu, "mul_and_silu": activations.silu,
    "gelu_and_mul": activations.gelu, "gelu_tanh_and_mul": activations.gelu_tanh,
}  # fmt: skip
_ALONE: dict[str, Callable[[Any], Any]] = {
    "gelu_new": activations.gelu_tanh, "gelu_fast": activations.gelu_tanh, "gelu_quick": activations.quick_gelu,
}  # fmt: skip


@reference(*(f"torch.ops._C.{name}" for name in (*_GATED, *_ALONE)))
def activation(call: Call) -> dict[str, Expected]:
    """(out, input); a gated one has the gate in the first half, mul_and_silu in the second."""
    name, x = call.cls.removeprefix("torch.ops.").split(".")[1], _wide(call, 1)
    if name in _ALONE:
        return {"inplace.input.0": activations.alone(x, _ALONE[name], call.unit)}
    return {"inplace.input.0": activations.gated(x, _GATED[name], call.unit, gate_first=name != "mul_and_silu")}


@reference("torch.ops._C.rotary_embedding", "torch.ops.vllm.flashinfer_rotary_embedding")
def rotary_embedding(call: Call) -> dict[str, Expected]:
    """(positions, query, key or None, head_size, cos_sin_cache, is_neox, rope_dim_offset, inverse), turned in place."""
    positions, head, cache, neox = _arg(call, 0), int(_arg(call, 3)), _wide(call, 4), bool(_arg(call, 5))
    offset, inverse = int(_arg(call, 6, "rope_dim_offset") or 0), bool(_arg(call, 7, "inverse"))
    cos, sin = cache[positions.flatten().long()].unsqueeze(1).chunk(2, -1)
    sin, still = -sin if inverse else sin, torch.zeros_like(cos)
    found = {}
    for place in (1, 2):
        given = _arg(call, place)
        if isinstance(given, torch.Tensor):
            x = given.double().reshape(positions.numel(), -1, head)
            y = reshaped(turned(x, cos, sin, neox, call.unit, still, offset=offset), given.shape)
            found[f"inplace.input.{place}"] = replace(y, bound=None)
    return found


@reference("torch.ops._C.onednn_mm", "torch.ops._C.weight_packed_linear")
def packed_product(call: Call) -> dict[str, Expected]:
    """onednn_mm (out, input, bias, handle), weight_packed_linear (out, input, packed weight, bias, ...)."""
    x = _wide(call, 1)
    weight = weight_of(call).double()
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise Declined("the weight of the module that called it does not fit")
    bias, out = _arg(call, 2 if "onednn" in call.cls else 3), _arg(call, 0)
    y = biased(product(x, weight), bias.double() if isinstance(bias, torch.Tensor) else None, call.unit)
    if y.value.numel() != out.numel():
        raise Declined("the weight of the module that called it does not fit")
    return {"inplace.input.0": reshaped(y, out.shape)}


@reference("torch.ops._C.cpu_fused_moe")
def fused_experts(call: Call) -> dict[str, Expected]:
    """(out, input, w13, w2, biases, biases, weights, ids, skip_weighted, activation, ...)"""
    x, w13, w2 = _wide(call, 1), call.params.get("w13_weight"), call.params.get("w2_weight")
    if _arg(call, 4) is not None or _arg(call, 5) is not None or _arg(call, 8):
        raise Declined("experts with biases have no reference here; their module's call is checked")
    if w13 is None or w2 is None or w13.shape[-1] != x.shape[-1]:
        raise Declined("the experts' weights were packed by a kernel before they could be captured")
    act = {"silu": activations.silu, "gelu": activations.gelu}.get(str(_arg(call, 9)))
    if act is None:
        raise Declined(f"experts with the activation {_arg(call, 9)} have no reference")
    weights = moe.dense(_wide(call, 6), _arg(call, 7), len(w13))
    return {"inplace.input.0": moe.expert_mlps(x, weights, w13, w2, act, call.unit)}


@reference("torch.ops._C.greedy_argmax")
def greedy_argmax(call: Call) -> Expected:
    """The first largest logit of each row."""
    logits = _wide(call, 0)
    return Expected(logits.argmax(-1).reshape(call.outputs["output.0"].shape))


@reference("torch.ops._C.compute_slot_mapping_kernel_impl")
def slot_mapping(call: Call) -> dict[str, Expected]:
    """(query_start_loc, positions, block_table, slot_mapping, block_size)"""
    starts, positions, table, slots = (_arg(call, k) for k in range(4))
    size = int(_arg(call, 4))
    out = slots.long().clone()
    known = torch.zeros(len(out), dtype=torch.bool)
    for row, (a, b) in enumerate(pairwise(int(s) for s in starts)):
        p = positions[a:b].long()
        out[a:b] = table[row].long()[p // size] * size + p % size
        known[a:b] = True
    return {"inplace.input.3": Expected(out, rows=known, reason="no row of the batch")}


@reference("torch.ops.vllm.torch_sdpa_wrapper")
def sdpa_wrapper(call: Call) -> Expected:
    """(q, k, v [1, tokens, heads, d], scale, cu_seqlens): everything sees everything within each run."""
    q, k, v = (_wide(call, n) for n in range(3))
    given, ends = _arg(call, 3, "scale"), _arg(call, 4, "cu_seqlens")
    scale = float(given) if given is not None else 1.0 / math.sqrt(q.shape[-1])
    return full_attention(q, k, v, ends, scale, call)


@reference("torch.ops._C.get_scheduler_metadata")
def plans(call: Call) -> Expected:
    raise Declined("it plans the work of a kernel and computes nothing")


@reference("torch.ops.vllm.unified_mla_*", "torch.ops._C_cache_ops.*")
def reads_cache(call: Call) -> Expected:
    raise Declined(_CACHE)
