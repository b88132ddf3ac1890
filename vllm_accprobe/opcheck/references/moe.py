"""Mixtures of experts: which experts a token goes to, and what they make of it.

Formulas: softmax or sigmoid scores, the k largest, renormalised to a sum of 1 [Shazeer et al., arXiv 1701.06538; Jiang
et al., arXiv 2401.04088]; groups of experts, the best by their two largest scores with a correction bias or else by
their largest, the bias choosing but not weighing [DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437, section
2.1.2]; an expert is a gated MLP down(act(gate x) * up x) [arXiv 2002.05202]. A token whose k-th and next score are
closer than rounding has no reference. Noise: gate, up, their product, each expert's result and the sum may be rounded;
a rounded gate is handed on as g act'(g) / act(g) says, taken from a difference. Weights: a probability, the sum of
those chosen, and their quotient may be rounded. The outputs of an expert share its hidden numbers' errors (`groups`).
Elsewhere: shared experts, which are modules of their own (composite.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if, device_kernel, reference, required
from vllm_accprobe.opcheck.references.activations import gelu, silu
from vllm_accprobe.opcheck.references.linear import biased, product
from vllm_accprobe.opcheck.references.parts import Arguments, param_if, unit_of
from vllm_accprobe.opcheck.roundings import APPROXIMATE, ROUNDED, gamma, once, subnormal

_SOFTMAX, _SIGMOID, _MIXER = "softmax", "sigmoid", "sparse mixer"
_FUNCTIONS = {"phimoe_routing_function": _MIXER}
"""Functions of models by which vLLM chooses experts, and the scores of `route` that these are."""
_WITHIN = 0.02
"""Twice the default of vLLM's ``sparsemixer``, 0.01, which its router never changes."""
_OF_TYPE = {
    "mixtral": (_SOFTMAX, True), "qwen2_moe": (_SOFTMAX, False), "qwen3_moe": (_SOFTMAX, False),
    "olmoe": (_SOFTMAX, False), "deepseek_v2": (_SOFTMAX, False), "deepseek_v3": (_SIGMOID, True),
    "deepseek_v32": (_SIGMOID, True), "glm4_moe": (_SIGMOID, True), "glm4_moe_lite": (_SIGMOID, True),
    "glm4v_moe": (_SIGMOID, True), "glm4v_moe_text": (_SIGMOID, True), "glm_moe_dsa": (_SIGMOID, True),
    "dots1": (_SIGMOID, False), "exaone_moe": (_SIGMOID, True), "phimoe": (_MIXER, False),
}  # fmt: skip
"""model_type → (the scores that transformers' model of this type makes in its code, its default of norm_topk_prob).
Those with sigmoid correct their scores and choose among groups whatever config.json says of a method."""
_ROUTERS = ("GroupedTopKRouter", "FusedTopKBiasRouter", "FusedTopKRouter", "CPURouter")
"""vLLM's objects that choose experts as `route` does."""


TIED = "two experts are tied"
_NEAR = 2.0**-20
"""Chosen: a step for which a difference in float64 is exact to 2**-32 and right to first order."""
_SLOPE = 1.13
"""Derived: the largest slopes of SiLU (1.0998 at 2.4) and GELU (1.1290 at 1.41)."""


def route(
    logits: Any, top_k: int, *, scoring: str = "softmax", renormalize: bool = True, bias: Any | None = None,
    groups: int = 1, top_groups: int = 1, factor: float = 1.0, tie: float = 2.0**-20,
) -> tuple[Any, Any]:  # fmt: skip
    """(weights [tokens, experts], zero where not chosen; clear [tokens] bool: no tie decided) from float64 logits.

    tie: two scores nearer than this, relatively, are a tie."""
    if scoring == _MIXER:
        return _sparse_mixer(logits, top_k, tie)
    decline_if(scoring not in (_SOFTMAX, _SIGMOID), f"scoring function {scoring} is not known")
    scores = torch.softmax(logits, -1) if scoring == _SOFTMAX else torch.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    clear = torch.ones(len(logits), dtype=torch.bool)
    if groups > 1:
        grouped = choice.reshape(len(logits), groups, -1)
        strength = grouped.topk(2, -1).values.sum(-1) if bias is not None else grouped.amax(-1)
        chosen, gap = _top(strength, top_groups, tie)
        clear &= gap
        keep = torch.zeros_like(strength, dtype=torch.bool).scatter(1, chosen, True)
        choice = choice.masked_fill(~keep.repeat_interleave(grouped.shape[-1], 1), float("-inf"))
    chosen, gap = _top(choice, top_k, tie)
    clear &= gap
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * factor, clear


def _sparse_mixer(logits: Any, top_k: int, tie: float) -> tuple[Any, Any]:
    """As `route`: one expert after the other, the best that is left, weighed by a softmax of those that are left and
    near it [L. Liu et al., arXiv 2409.12136, as vLLM's phimoe.py has it]. A logit at the edge of what is near has no
    reference, for the weight jumps there."""
    left, weights = logits, torch.zeros_like(logits)
    clear = torch.ones(len(logits), dtype=torch.bool)
    for _ in range(top_k):
        at, gap = _top(left, 1, 0.0)  # logits are compared as they are
        best = left.gather(1, at)
        apart = (best - logits) / logits.abs().clamp(min=best)
        clear &= gap & ((apart - _WITHIN).abs() > tie * _WITHIN).all(-1)
        shares = torch.softmax(left.masked_fill(apart > _WITHIN, float("-inf")), -1)
        weights = weights.scatter(1, at, shares.gather(1, at))
        left = left.scatter(1, at, float("-inf"))
    return weights, clear


def _top(values: Any, k: int, tie: float) -> tuple[Any, Any]:
    """Indices of the k largest, and whether the k-th stands clear of the next."""
    n = min(k + 1, values.shape[-1])
    top = values.topk(n, -1)
    if n <= k:
        return top.indices[:, :k], torch.ones(len(values), dtype=torch.bool)
    last, after = top.values[:, k - 1], top.values[:, k]
    return top.indices[:, :k], (last - after) > tie * last.abs()


def dense(weights: Any, ids: Any, experts: int) -> Any:
    """[tokens, k] weights and expert ids → [tokens, experts]; an id below 0 is no expert."""
    out = torch.zeros(len(ids), experts, dtype=torch.float64)
    return out.scatter_add(1, ids.long().clamp(min=0), torch.where(ids >= 0, weights.double(), 0.0))


def expert_mlps(x: Any, weights: Any, w13: Any, w2: Any, act: Any, step: float, *, apart: bool = False) -> Expected:
    """The sum: x [tokens, h], weights [tokens, experts], w13 [experts, 2 i, h] gates first, w2 [experts, h, i].
    apart: each step is an operator of its own and rounds: the activation, and the product with a row's weight, too."""
    more = 1 if apart else 0
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float64)
    square, most = torch.zeros_like(out), torch.zeros_like(out)
    first, second = gamma(x.shape[1] + 8), gamma(w2.shape[2] + 8)
    for e in range(len(w13)):
        at = weights[:, e].nonzero().flatten()
        if not len(at):
            continue
        gate, up = (x[at] @ w13[e].double().T).chunk(2, -1)
        active = act(gate)
        hidden = active * up
        handed = ((act(gate * (1.0 + _NEAR)) - active) / _NEAR * up).abs()
        size = hidden.abs()
        # gate, up and their product as subnormal numbers, and the activation's
        least = subnormal(step, 1.0 + active.abs() + (_SLOPE + more) * up.abs())
        before = out[at]
        w = w2[e].double()
        y, scale = hidden @ w.T, weights[at, e].unsqueeze(-1)
        out[at] += scale * y
        inner = (2 + more) * size * size + handed * handed
        if step:
            inner += (least / step) ** 2
        square[at] += scale**2 * (inner @ (w * w).T + (1 + more) * y * y)
        # gate and up are sums themselves, |x||w| of which is at most the product of norms [Cauchy and Schwarz]
        a, b = (x[at].norm(dim=1, keepdim=True) * w13[e].double().norm(dim=1)).chunk(2, -1)
        off = first * (_SLOPE * a * up.abs() + b * active.abs()) + step * handed
        off += ((2 + more) * step + APPROXIMATE + second) * size + least
        most[at] += scale.abs() * (off @ w.abs().T + once(y.abs(), step)) + more * once((scale * y).abs(), step)
        if apart:
            square[at] += before**2
            most[at] += once(before.abs(), step)
    noise = ROUNDED * step * (square + out * out).sqrt()
    return Expected(out, noise, bound=most + (step + gamma(len(w13) + 8)) * out.abs(), groups=w2.shape[2])


def activation_of(call: Call) -> Any:
    name = call.parent.get("activation") or (call.config.get("hidden_act", "silu") if call.config else None)
    why = "which activation the experts have is neither recorded nor in config.json"
    return required({"silu": silu, "swish": silu, "gelu": gelu}.get(str(name)), why)


@reference("UnquantizedFusedMoEMethod")
def routed_experts(call: Call) -> dict[str, Expected]:
    """The experts of this rank, with the captured weights; and the weights themselves, from the router's logits."""
    x = call.wide("x")
    w13, w2 = (call.params.get(n) for n in ("w13_weight", "w2_weight"))
    if w13 is None or w2 is None:
        raise Declined("the experts' weights were packed by a kernel before they could be captured")
    decline_if("w13_bias" in call.params, "experts with biases have no reference")
    if call.parent.get("apply_router_weight_on_input"):
        raise Declined("experts whose inputs are weighed, and not their outputs, have no reference")
    if any(call.parent.get(f"swiglu_{name}") is not None for name in ("limit", "alpha", "beta")):
        raise Declined("experts with another gate than their activation have no reference")
    if int(call.parent.get("local_num_experts", len(w13))) != int(call.parent.get("global_num_experts", len(w13))):
        raise Declined("which experts this rank holds was not recorded")
    if w13.shape[-1] != x.shape[-1] or w2.shape[1] != x.shape[-1] or w13.shape[1] != 2 * w2.shape[2]:
        raise Declined("the experts' weights have an unknown form")
    if call.maybe("topk_ids") is None and call.maybe("router_logits") is not None:
        return {"output.0": _routing_inside(call, x, w13, w2)}
    weights = dense(call.tensor("topk_weights"), call.tensor("topk_ids"), len(w13))
    found = {"output.0": expert_mlps(x, weights, w13, w2, activation_of(call), call.unit)}
    try:
        found["input.topk_weights"] = _routing(call, len(w13))
    except Declined as why:  # its experts are checked, what chose them is not
        captured = call.tensor("topk_weights")
        none = torch.zeros(len(captured), dtype=torch.bool)
        found["input.topk_weights"] = Expected(captured, rows=none, reason=why.reason)
    return found


def _routing_inside(call: Call, x: Any, w13: Any, w2: Any) -> Expected:
    """Experts that a kernel chooses, from ``router_logits`` (vLLM up to 0.11): a row with a tie has no reference."""
    logits, top_k = call.wide("router_logits"), call.parent.get("top_k", call.config.get("num_experts_per_tok"))
    decline_if(not top_k or logits.shape != (len(x), len(w13)), "how its experts are chosen was not recorded")
    weights, clear = route(logits, int(top_k), tie=4 * unit_of(call.tensor("router_logits")), **choosing(call))
    found = expert_mlps(x, weights, w13, w2, activation_of(call), call.unit)
    # Their weights may be numbers of the model's dtype, and are then off by a rounding for a whole row.
    return replace(found, rows=clear, reason=TIED, common=call.unit)


def choosing(call: Call) -> dict[str, Any]:
    """How vLLM's experts are chosen and weighed, as keyword arguments of `route`: what the objects that do it say, the
    router before the layer; then config.json. Raises Declined where none of them says."""
    router = call.extra.get("router", {})
    if router.get("class", _ROUTERS[0]) not in _ROUTERS:
        raise Declined(f"how {router['class']} chooses experts has no reference")
    says = {**call.parent, **router}
    if (function := says.get("custom_routing")) in _FUNCTIONS:
        return {"scoring": _FUNCTIONS[function], "renormalize": False, "groups": 1, "top_groups": 1, "factor": 1.0,
                "bias": None}  # fmt: skip
    decline_if(function, f"its experts are chosen by a function of the model, {function}")
    found, bias = routing_settings(call.config), call.extra.get("gate", {}).get("e_score_correction_bias")
    found |= {name: kind(says[word]) for name, word, kind in _RECORDED if says.get(word) is not None}
    corrected = bool(says.get("has_correction_bias", found.pop("corrected") or bias is not None))
    grouped = found["groups"] > 1
    if "top_k" in says:  # the layer was captured: what it does not say, it does not do
        groups, factor = int(says.get("num_expert_group") or 1), (router or says).get("routed_scaling_factor")
        grouped = bool(says.get("use_grouped_topk", groups > 1))
        top_groups = int(says.get("topk_group") or 1)
        found |= {"groups": groups if grouped else 1, "top_groups": top_groups if grouped else 1}
        found["factor"] = 1.0 if factor is None else float(factor)
    elif "routed_scaling_factor" in says:
        found["factor"] = float(says["routed_scaling_factor"])
    if found["factor"] != 1.0 and not ("top_k" in says and (grouped or corrected)):  # vLLM's other routers ignore it
        raise Declined("where the routed scaling factor is applied was not recorded")
    return _complete(found, bias, corrected)


def _complete(found: dict[str, Any], bias: Any | None, corrected: bool) -> dict[str, Any]:
    """Settings of `route`, ``bias`` among them. Raises Declined where one is missing."""
    if "scoring" not in found or "renormalize" not in found:
        raise Declined("how its experts are chosen and weighed was not recorded")
    decline_if(corrected and bias is None, "what corrects the scores of its experts was not captured")
    return {**found, "bias": bias.double() if corrected and bias is not None else None}


_RECORDED = (("renormalize", "renormalize", bool), ("scoring", "scoring_func", str))
"""Settings of `route`, the attributes that say them, and their types."""


def routing_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of routing, as keyword arguments of `route` and ``corrected``, whether a bias chooses; what
    neither it nor its model's type says is missing."""
    scoring, renormalize = _OF_TYPE.get(str(config.get("model_type")), (None, None))
    scoring, renormalize = config.get("scoring_func") or scoring, config.get("norm_topk_prob", renormalize)
    by_type = _OF_TYPE.get(str(config.get("model_type")), ("",))[0] == _SIGMOID
    method = config.get("topk_method")
    grouped = by_type if method is None else method != "greedy"
    found = {
        "groups": int(config.get("n_group") or 1) if grouped else 1,
        "top_groups": int(config.get("topk_group") or 1) if grouped else 1,
        "factor": float(config.get("routed_scaling_factor") or 1.0),
        "corrected": by_type or method == "noaux_tc",
    }
    named = {"scoring": scoring and str(scoring), "renormalize": None if renormalize is None else bool(renormalize)}
    return found | {name: value for name, value in named.items() if value is not None}


def routed(logits: Any, ids: Any, step: float, settings: Mapping[str, Any]) -> Expected:
    """What a router should return for the experts ``ids`` [tokens, k], in their order: one that should not be chosen
    has 0. step: one rounding of what it computes in; settings: of `route`."""
    weights, clear = route(logits.double(), ids.shape[1], tie=4 * step, **settings)
    at = ids.long().clamp(min=0)
    value = torch.where(ids >= 0, weights.gather(1, at), 0.0)
    size, groups = torch.full_like(value, 2.0 * step), None
    if settings.get("scoring") == _SOFTMAX and not settings.get("renormalize"):  # perhaps e**(x - log sum e**x)
        total = logits.double().logsumexp(-1, keepdim=True)
        size = size + ROUNDED * step * ((logits.double().gather(1, at) - total).abs() + total.abs())
        groups = 1.0  # a row's weights share the error of the sum; two rows share none
    return Expected(value, size * value, unit=step, common=2.0 * step, rows=clear, reason=TIED, groups=groups,
                    bound=(step + size / ROUNDED + 2.0 * APPROXIMATE) * value + subnormal(step))  # fmt: skip


def _routing(call: Call, experts: int) -> Expected:
    """What the router should return. Raises Declined where what it did was not recorded."""
    logits = required(call.extra.get("router_logits"), "its router's logits were not captured")
    ids = call.tensor("topk_ids")
    decline_if(logits.shape != (len(ids), experts), "its router's logits are not those of its rows")
    return routed(logits, ids, unit_of(logits), choosing(call))  # some routers work in the dtype of their logits


@reference("torch.ops._C.cpu_fused_moe")
def fused_experts(call: Call) -> dict[str, Expected]:
    """(out, input, w13, w2, biases, biases, weights, ids, skip_weighted, activation, ...)"""
    f = Arguments(call, "out input w13 w2 w13_bias w2_bias topk_weights topk_ids skip_weighted act")
    (x,), w13, w2 = f.wide("input"), call.params.get("w13_weight"), call.params.get("w2_weight")
    if f["w13_bias"] is not None or f["w2_bias"] is not None or f["skip_weighted"]:
        raise Declined("experts with biases have no reference here; their module's call is checked")
    if w13 is None or w2 is None or w13.shape[-1] != x.shape[-1]:
        raise Declined("the experts' weights were packed by a kernel before they could be captured")
    why = f"experts with the activation {f['act']} have no reference"
    act = required({"silu": silu, "gelu": gelu}.get(str(f["act"])), why)
    weights = dense(f.wide("topk_weights")[0], f["topk_ids"], len(w13))
    return {"inplace.input.0": expert_mlps(x, weights, w13, w2, act, call.unit)}


@reference("*TopKRouter", "*TopkRouter")
def router(call: Call) -> dict[str, Expected]:
    """transformers' router: logits; and, from the captured logits, the weights of the experts that it chose."""
    weight = call.param("weight")
    fits = (role for role, t in call.outputs.items() if t.is_floating_point() and t.shape[1:] == weight.shape[:1])
    role = next(fits, "")  # Granite's gives the chosen experts first
    logits = required(call.outputs.get(role), "its logits were not captured")
    y = product(call.wide("hidden_states", "0").reshape(len(logits), -1), weight)
    found = {role: biased(y, param_if(call, "bias"), call.unit)}
    if role != "output.0":
        return found
    weights, ids = call.outputs.get("output.1"), call.outputs.get("output.2")
    if weights is None or ids is None or weights.shape != ids.shape:
        return found
    try:
        settings, bias = routing_settings(call.config), call.params.get("e_score_correction_bias")
        corrected = call.attrs.get("has_correction_bias", settings.pop("corrected") or bias is not None)
        settings = _complete(settings, bias, bool(corrected))
    except Declined as why:  # its logits are checked, what follows from them is not
        none = torch.zeros(len(weights), dtype=torch.bool)
        return found | {f"output.{k}": Expected(t, rows=none, reason=why.reason) for k, t in ((1, weights), (2, ids))}
    if call.cls.startswith("DeepseekV2"):  # transformers' own never renormalises, whatever config.json says
        settings = {**settings, "renormalize": False}
    step = unit_of(logits, weights)
    right = routed(logits, ids, step, settings)
    chosen = torch.where(right.value > 0, ids.long(), -1)  # an expert that should not have been chosen
    found |= {"output.1": right, "output.2": Expected(chosen, rows=right.rows, reason=right.reason)}
    return found


@reference("*Experts")
def experts(call: Call) -> Expected:
    """transformers' experts, which have both halves of a gated MLP in one tensor."""
    decline_if("gate_up_proj" not in call.params or "down_proj" not in call.params, f"no reference for {call.cls}")
    x, w13, w2 = call.wide("hidden_states", "0"), call.params["gate_up_proj"], call.params["down_proj"]
    if w13.dim() != 3 or w13.shape[2] != x.shape[-1] or w13.shape[1] != 2 * w2.shape[2]:
        raise Declined("the experts' weights have an unknown form")
    weights = dense(call.tensor("top_k_weights", "2"), call.tensor("top_k_index", "1"), len(w13))
    return expert_mlps(x, weights, w13, w2, activation_of(call), call.unit, apart=True)


@device_kernel("UnquantizedFusedMoEMethod")
def experts_kernel(call: Call) -> Any:
    x, ids, weights = call.tensor("x"), call.tensor("topk_ids"), call.tensor("topk_weights")
    w13, w2 = (call.params.get(n) for n in ("w13_weight", "w2_weight"))
    if w13 is None or w2 is None or "w13_bias" in call.params or not w13.is_floating_point():
        raise Declined("experts in a form that torch has no kernel for")
    act = activation_of(call)
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float32, device=x.device)
    for e in range(len(w13)):
        row, place = (ids == e).nonzero(as_tuple=True)
        if len(row):
            gate, up = F.linear(x[row], w13[e]).chunk(2, -1)
            y = F.linear(act(gate) * up, w2[e])
            out.index_add_(0, row, y.float() * weights[row, place].float().unsqueeze(-1))
    return out.to(x.dtype)
