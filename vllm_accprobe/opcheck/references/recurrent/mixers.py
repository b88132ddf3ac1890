"""Blocks around a recurrence: their gated norm, what they hand on, and the opaque operators that name only a layer.

Formula: Mamba 2's norm weighs RMSNorm(x silu(z)) by groups [T. Dao and A. Gu, arXiv 2405.21060, section 7.1; the
published Mamba 2 code]. A block gives what its last projection gave; that its convolution and recurrence are right
does not follow from it, since they are no modules: a block is found wrong here, and never right. vLLM's opaque
operators run the operators that are captured inside them and put their results, first those of single tokens, then
those of prompts, into one buffer: the results must lie there, row by row; whether they are right is judged where they
are made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.norms import gate_first
from vllm_accprobe.opcheck.references.parts import UNSEEN, inside, once, param_if, reshaped, same

_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups", "ssm_n_groups")
_INSIDE = "what it runs inside was not captured"
Tensor = Any  # a torch.Tensor


@reference("Mixer2RMSNormGated")
def gated_norm(call: Call) -> Expected:
    """x, gate [tokens, channels of this rank]; without a weight it only gates."""
    x, gate = call.wide("x", "0"), call.wide("gate", "1")
    y = x * F.silu(gate)
    weight = param_if(call, "weight")
    if weight is None:
        early = once(F.silu(gate).abs(), call.unit, x.abs())
        return Expected(y, ROUNDED * early, bound=early + APPROXIMATE * y.abs())
    groups = next((int(call.config[n]) for n in _GROUPS if n in call.config), 0)
    ranks = int(call.attr("tp_size", default=1))
    if not groups:
        raise Declined("the number of its groups was not recorded")
    if groups % ranks:
        raise Declined("its groups are cut over ranks")
    shape = (len(y), groups // ranks, -1)
    eps, by = float(call.attr("variance_epsilon")), weight.reshape(shape[1:])
    return reshaped(gate_first(y.reshape(shape), x.reshape(shape), by, eps, call.unit), y.shape)


@reference("MambaMixer2", "MambaMixer", "ShortConv", "*Mixer2", "*MambaMixer")
def mixer(call: Call) -> dict[str, Expected]:
    """What ``out_proj`` gave."""
    if inside(call)[-1][0] != "out_proj":
        raise Declined("a block whose parts do not tell what it hands on")
    read = call.extra.get("read")
    found = {}
    for role, out in call.outputs.items():
        held = same(call, role, "out_proj", "output.0")
        records = [r for path, r_role, r in inside(call) if path == "out_proj" and r_role == "output.0"]
        if held is not None:
            found[role] = held
        elif role == "inplace.output" and read is not None and records[-1].shape[1:] == out.shape[1:]:
            rows = torch.arange(len(out)) < len(read(records[-1]))
            value = torch.zeros(out.shape, dtype=torch.float64)
            value[rows] = read(records[-1]).double()
            found[role] = Expected(value, None, 0.0, rows=rows, reason="padding")
    if not found:
        raise Declined("a block whose parts do not tell what it hands on")
    return {role: replace(expected, unseen=UNSEEN) for role, expected in found.items()}


_MADE = {
    "vllm.mamba_mixer2": ("selective_state_update_cpu", "mamba_chunk_scan_fwd_cpu"),
    "vllm.unified_attention_with_output": ("cpu_attention_with_kv_cache",),
    "vllm.cpu_gdn_attention_core": ("fused_sigmoid_gating_delta_rule_update_cpu", "chunk_gated_delta_rule_cpu"),
}
"""By opaque operator: the operators inside that make its rows, in the order of the rows."""
_WRITES = ("cpu_attn_reshape_and_cache", "concat_and_cache_mla", "index_put_")


@reference(*(f"torch.ops.{name}" for name in _MADE))
def opaque(call: Call) -> dict[str, Expected]:
    """The rows that the operators inside it made, in its buffer."""
    roles = [role for role in call.outputs if role.startswith("inplace.")]
    if len(roles) != 1:
        raise Declined(_INSIDE)
    out = call.outputs[roles[0]]
    made = next(names for name, names in _MADE.items() if f"{name}." in f"{call.cls}.")
    rows = [t for name in made for op, t in call.extra.get("inner", ()) if f".{name}." in f".{op}."]
    return {roles[0]: _in_buffer(out, rows)}


def _in_buffer(out: Tensor, rows: list[Tensor | None]) -> Expected:
    """These rows, one after the other, at the front of a buffer of at least as many. Raises Declined."""
    width = max(out[0].numel(), 1) if len(out) else 1
    flat = [None if t is None or t.numel() % width else t.reshape(-1, *out.shape[1:]) for t in rows]
    if not flat or any(f is None or f.dtype != out.dtype for f in flat):
        raise Declined(_INSIDE)
    value = torch.cat(flat).double()
    if len(value) > len(out):
        raise Declined(_INSIDE)
    known = torch.arange(len(out)) < len(value)
    whole = torch.zeros(out.shape, dtype=torch.float64)
    whole[: len(value)] = value
    return Expected(whole, None, 0.0, rows=known, reason="padding")


def _buffer(call: Call) -> tuple[str, Tensor]:
    roles = [role for role in call.outputs if role.startswith("inplace.")]
    if len(roles) != 1 or not len(call.outputs[roles[0]]):
        raise Declined(_INSIDE)
    return roles[0], call.outputs[roles[0]]


@reference("torch.ops.vllm.short_conv")
def opaque_convolution(call: Call) -> dict[str, Expected]:
    """(hidden_states, output, layer): its last act copies the rows of its output projection into ``output``."""
    role, out = _buffer(call)
    copies = [t for op, t in call.extra.get("inner", ()) if op.startswith("aten.copy_")]
    if not copies or copies[-1] is None or copies[-1].shape[1:] != out.shape[1:]:
        raise Declined(_INSIDE)
    return {role: _in_buffer(out, [copies[-1]])}


@reference("torch.ops.vllm.unified_mla_attention_with_output")
def opaque_latent(call: Call) -> dict[str, Expected]:
    """(q, kv_c, k_pe, output, ...): rows of single tokens first, what the second matrix made of the mixed latents
    [heads, rows, width]; then those of prompts, copied."""
    role, out = _buffer(call)
    rows: list[Tensor | None] = []
    decoding, prompt, mixed = False, None, None
    for op, t in call.extra.get("inner", ()):
        if "mla_decode_kvcache" in op:
            decoding = True
        elif op.startswith("aten.bmm") and decoding:
            mixed = t
        elif op.startswith("aten.copy_") and not decoding and t is not None and t.shape[1:] == out.shape[1:]:
            prompt = t
    if decoding:
        if mixed is None or mixed.dim() != 3:
            raise Declined(_INSIDE)
        rows.append(mixed.transpose(0, 1).reshape(mixed.shape[1], -1))
    if prompt is not None:
        rows.append(prompt)
    return {role: _in_buffer(out, rows)}


@reference("torch.ops.vllm.unified_kv_cache_update", "torch.ops.vllm.unified_mla_kv_cache_update")
def opaque_write(call: Call) -> dict[str, Expected]:
    """It gives an empty tensor, and writes by the operator inside it, which must be there."""
    if not any(f".{name}." in f".{op}." for name in _WRITES for op, _ in call.extra.get("inner", ())):
        raise Declined(_INSIDE)
    out = call.outputs["output.0"]
    if out.numel():
        raise Declined("its output has a content that no formula tells")
    return {"output.0": Expected(out.double(), unit=0.0)}
