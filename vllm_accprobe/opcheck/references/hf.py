"""What is different in transformers' modules, which a golden made by `Probe` holds.

Formulas: transformers' published model files. A decoder layer adds its residual itself, x + attention + MLP; a rotary
module gives cosines and sines of position * frequency (or both as one complex number), which the attention applies; a
router gives logits, weights and choices of its own weight; experts hold both halves of a gated MLP in one tensor; a
mixture adds its shared experts, gated by a sigmoid where there is such a gate. Attention blocks are those of
composite.py: what the kernel between the projections did is not a module there, so it has no call.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references import moe
from vllm_accprobe.opcheck.references.linear import product
from vllm_accprobe.opcheck.references.parts import all_seen, first, held, unit_of


def residual_layer(call: Call) -> dict[str, Expected]:
    """x + attention + MLP, rounded twice."""
    all_seen(call)
    attention, last = first(call, "self_attn", "attn"), first(call, "mlp")
    if attention is None or last is None or _has_other_parts(call):
        raise Declined("a layer that adds its residual itself")
    middle = call.wide("hidden_states", "0").reshape(last.value.shape) + attention.value
    size = call.unit * middle.abs()
    return {"output.0": Expected(middle + last.value, ROUNDED * size, bound=size)}


def _has_other_parts(call: Call) -> bool:
    """Norms behind the attention or the MLP, as Gemma has them, are in the sum and would have to be known."""
    return any(path in ("pre_feedforward_layernorm", "post_feedforward_layernorm", "residual_layernorm")
               for path, _, _ in call.extra.get("children", ()))  # fmt: skip


def angles(call: Call) -> Any:
    """float64 [..., d / 2] and the magnitude, from the module's own frequencies."""
    positions = call.maybe("position_ids", "positions", "1")
    if positions is None or "inv_freq" not in call.params:
        raise Declined("its frequencies were not captured")
    scale = float(call.attr("attention_scaling", default=1.0))
    return positions.double().unsqueeze(-1) * call.param("inv_freq"), scale


def rotary_tables(call: Call) -> dict[str, Expected]:
    """Cosines and sines of both halves, or one complex number a channel pair."""
    angle, scale = angles(call)
    out = call.outputs["output.0"]
    if angle.dim() != out.dim():
        raise Declined("its positions have an unknown form")
    noise = scale * angle.abs() * 2.0**-23 + 2.0**-23
    if out.is_complex():
        return {"output.0": Expected(torch.polar(torch.full_like(angle, scale), angle))}
    both = torch.cat((angle, angle), -1)
    spread = torch.cat((noise, noise), -1)
    return {"output.0": Expected(scale * both.cos(), spread), "output.1": Expected(scale * both.sin(), spread)}


@reference("*TopKRouter", "*TopkRouter")
def router(call: Call) -> dict[str, Expected]:
    """Logits; and, from the captured logits, the weights of the experts that it names."""
    logits = call.outputs.get("output.0")
    if logits is None or logits.dim() != 2:
        raise Declined("its logits were not captured")
    found = {"output.0": product(call.wide("hidden_states", "0").reshape(len(logits), -1), call.param("weight"))}
    weights, ids = call.outputs.get("output.1"), call.outputs.get("output.2")
    if weights is None or ids is None or weights.shape != ids.shape:
        return found
    try:
        settings = moe.of_router(call)
    except Declined as why:  # its logits are checked, what follows from them is not
        none = torch.zeros(len(weights), dtype=torch.bool)
        return found | {f"output.{k}": Expected(t, rows=none, reason=why.reason) for k, t in ((1, weights), (2, ids))}
    if call.cls.startswith("DeepseekV2"):  # transformers' own never renormalises, whatever config.json says
        settings = {**settings, "renormalize": False}
    step = unit_of(logits, weights)
    said = moe.routed(logits, ids, step, settings)
    chosen = torch.where(said.value > 0, ids.long(), -1)  # an expert that should not have been chosen
    found |= {"output.1": said, "output.2": Expected(chosen, rows=said.rows, reason=said.reason)}
    return found


@reference("*Experts")
def experts(call: Call) -> Expected:
    if "gate_up_proj" not in call.params or "down_proj" not in call.params:
        raise Declined(f"no reference for {call.cls}")
    x, w13, w2 = call.wide("hidden_states", "0"), call.params["gate_up_proj"], call.params["down_proj"]
    if w13.dim() != 3 or w13.shape[2] != x.shape[-1] or w13.shape[1] != 2 * w2.shape[2]:
        raise Declined("the experts' weights have an unknown form")
    weights = moe.dense(call.tensor("top_k_weights", "2"), call.tensor("top_k_index", "1"), len(w13))
    return moe.expert_mlps(x, weights, w13, w2, moe.activation_of(call), call.unit, apart=True)


def mixture(call: Call) -> dict[str, Expected]:
    """Experts' sum, with the shared ones', gated or not."""
    routed = held(call, "experts")
    shared = first(call, "shared_expert", "shared_experts")
    if shared is None:
        return {"output.0": routed}
    y = shared.value
    gate = [r for path, role, r in call.extra["children"] if (path, role) == ("shared_expert_gate", "output.0")]
    if gate:
        y = y * call.extra["read"](gate[-1]).double().sigmoid().reshape(len(y), 1)
    total = routed.value + y
    size = y.abs() + 0.5 * total.abs()
    # the gate is rounded for all of a row's shared part, which is at most a row's
    return {"output.0": Expected(total, ROUNDED * call.unit * size, common=call.unit, bound=3.0 * call.unit * size)}
