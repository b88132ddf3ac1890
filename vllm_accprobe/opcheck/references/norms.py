"""Norms: RMSNorm, Gemma's, LayerNorm, GroupNorm, with and without a residual that is added first.

Formulas: RMSNorm y = x / sqrt(mean(x*x) + eps) * w [Zhang and Sennrich, arXiv 1910.07467]; Gemma's weighs with 1 + w
[Gemma report, arXiv 2403.08295, and its published code]; LayerNorm [Ba et al., arXiv 1607.06450]; GroupNorm [Wu and He,
arXiv 1803.08494]; gated: norm(x * silu(z)), or norm(x) * silu(z) with the norm first [Dao and Gu, arXiv 2405.21060,
section 7]. A fused add gives the norm of x + residual, and x + residual itself as second output. Some kernels take the
norm of the sum before it is rounded, some after: noise covers both. Bound: those roundings, a reciprocal root that is
off by APPROXIMATE, and half of gamma_n for the mean of n squares [d log x**-1/2 = -1/2 d log x]. What is rounded before
the norm counts twice: an element is off by u, and the root of the mean of squares by another u where the roundings of
its row go the other way [Cauchy and Schwarz: |sum t dt| <= u sum t t]. So a bfloat16 sum and its norm, x / rms rounded
before it is weighed, leave 3 units before the last rounding (tests/opcheck/test_bounds.py has a row that comes near).
A mean and a variance are those of two passes, or Welford's: E x**2 - (E x)**2 has no such bound. q and k norms are
RMSNorms over the last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import (
    APPROXIMATE,
    ROUNDED,
    SUM,
    Call,
    Declined,
    Expected,
    combined,
    device_kernel,
    gamma,
    reference,
    sum_of_two,
)
from vllm_accprobe.opcheck.references.parts import once, param_if, subnormal, vendor, weight_here

EPSILONS = ("variance_epsilon", "eps")
_CONFIGURED = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_OF_CONFIG = {
    "RMSNorm": ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"),
    "LayerNorm": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "GroupNorm": ("group_norm_eps", "norm_eps", "norm_epsilon"),
}
"""By what a norm's class ends with, where config.json has its epsilon."""
_SHARED = 0.5
"""Units: rounding x / rms to the model's dtype, where the rms is near 1, moves all of a row the same way."""


def rms_norm(x: Any, weight: Any | None, eps: float) -> Any:
    """x / sqrt(mean(x*x) + eps) * weight over the last dimension; all float64."""
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def layer_norm(x: Any, weight: Any | None, bias: Any | None, eps: float) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, variance of the population."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@dataclass(frozen=True)
class NormParts:
    """A norm as y = scaled / sqrt(power + eps) + bias; float64, rows [..., n] and power [..., 1]."""

    scaled: Any
    power: Any
    bias: Any


def _ending(cls: str) -> str | None:
    return next((end for end in _OF_CONFIG if cls.removesuffix("Fused").endswith(end)), None)


def is_norm(cls: str) -> bool:
    """Whether the epsilon of this class may be fitted: RMSNorm, LayerNorm, GroupNorm and those that end so."""
    return _ending(cls) is not None


def configured(config: Mapping[str, Any], cls: str) -> float | None:
    """A norm's epsilon by config.json; None where it has none."""
    found = (config.get(name) for name in _OF_CONFIG.get(_ending(cls) or "", ()))
    return next((float(v) for v in found if isinstance(v, (int, float)) and not isinstance(v, bool)), None)


def parts_of(call: Call) -> NormParts | None:
    """A norm's call without its epsilon; None where a tensor is missing or the class is no norm."""
    kind, x = _ending(call.cls), call.maybe("x", "hidden_states", "input", "0")
    if kind is None or x is None:
        return None
    x, bias = x.double(), torch.zeros((), dtype=torch.float64)
    try:
        weight, shift = param_if(call, "weight"), param_if(call, "bias")
        if kind == "RMSNorm":
            residual = call.maybe("residual", "1")
            x = x if residual is None else x + residual.double()
            scaled = x if weight is None else x * (weight + offset_of(call.cls))
            return NormParts(scaled, (x * x).mean(-1, keepdim=True), bias)
        shape = x.shape
        if kind == "GroupNorm":
            x = x.reshape(shape[0], int(call.attr("num_groups")), -1)
        centred = x - x.mean(-1, keepdim=True)
        power = (centred * centred).mean(-1, keepdim=True)
        if kind == "GroupNorm":
            along = (1, -1, *[1] * (len(shape) - 2))
            weight, shift = (None if t is None else t.reshape(along).expand(shape).reshape(x.shape)
                             for t in (weight, shift))  # fmt: skip
        return NormParts(centred if weight is None else centred * weight, power, bias if shift is None else shift)
    except (Declined, RuntimeError):
        return None


def _own(call: Call) -> float:
    """The epsilon. Raises Declined where it was neither recorded nor found."""
    told = call.extra.get("epsilon", {}).get("said")
    if told and not any(n in call.attrs for n in EPSILONS):
        raise Declined(told)
    return float(call.attr(*EPSILONS))


def _told(call: Call, y: Expected) -> Expected:
    """``y`` with what is known of an epsilon that was not recorded."""
    found = call.extra.get("epsilon")
    if not found:
        return y
    slack, said = float(found["slack"]), str(found["said"])
    bound = None if y.bound is None else y.bound + slack * y.value.abs()
    return replace(y, common=y.common + slack, bound=bound, source=said)


def epsilon(call: Call) -> tuple[float, str]:
    """The epsilon, and a note where the module's own is neither its siblings' nor config.json's: then theirs counts."""
    own = _own(call)
    usual = call.extra.get("usual", {}).get(next((n for n in EPSILONS if n in call.attrs), ""))
    asked = next((call.config[n] for n in _CONFIGURED if n in call.config), None)
    if usual is None or asked is None or own == usual or not math.isclose(usual, asked, rel_tol=1e-6):
        return own, ""
    return float(usual), f"its epsilon is {own:g}, where config.json and its siblings have {usual:g}"


def fused(
    x: Any, residual: Any | None, weight: Any | None, eps: float, unit: float, note: str = ""
) -> tuple[Expected, Expected | None]:
    """RMSNorm of x + residual, and the sum, None where there is no residual; all float64. transformers and vLLM's
    native path round x / rms to the model's dtype before they weigh it."""
    if residual is None:
        return normed(rms_norm(x, weight, eps), unit, x.shape[-1], weight=weight, note=note), None
    total = x + residual
    y = normed(rms_norm(total, weight, eps), unit, x.shape[-1], before=1, weight=weight, note=note)
    return y, sum_of_two(total, unit)


def offset_of(cls: str) -> float:
    """What is added to the weight: Gemma's norms weigh with 1 + w, but for the latest, which do as everybody else."""
    gemma = cls.startswith("Gemma") and cls.endswith("RMSNorm") and not cls.startswith(("Gemma3n", "Gemma4"))
    return 1.0 if gemma or cls == "Qwen3NextRMSNorm" else 0.0


def normed(
    y: Any, unit: float, width: int, *, before: int = 0, behind: int = 1, weight: Any | None = None, note: str = ""
) -> Expected:  # fmt: skip
    """A norm's result, with roundings ``before`` the norm (a sum) and ``behind`` it (x / rms, before it is weighed)."""
    size = y.abs()
    bound = ((behind + 2 * before) * unit + APPROXIMATE + 0.5 * gamma(width + 4)) * size
    least = subnormal(unit, 1.0 if weight is None else weight.abs())
    noise = (ROUNDED * (before + behind) ** 0.5 * unit) * size + ROUNDED * least
    return Expected(y, noise, common=_SHARED * unit, note=note, bound=bound + least)


def gate_first(p: Any, x: Any, weight: Any | None, eps: float, unit: float) -> Expected:
    """The norm over the last dimension of p = x * silu(gate). The gate and p may be rounded, each handed on again by
    the root mean square, and p / rms; silu is off by APPROXIMATE in p and in its mean, and the root itself."""
    root = torch.rsqrt((p * p).mean(-1, keepdim=True) + eps)
    by = root if weight is None else root * weight.abs()
    y = p * root if weight is None else p * root * weight
    size = y.abs()
    # a subnormal gate or product, of an element and of its row's mean
    own = 0.0
    if subnormal(unit):
        least = subnormal(unit, 1.0 + x.abs())
        own = least * by + subnormal(unit, by / root) + least.square().mean(-1, keepdim=True).sqrt() * root * size
    noise = ROUNDED * (2.0**0.5 * unit * size + own)
    most = (5.0 * unit + 3.0 * APPROXIMATE + 0.5 * gamma(p.shape[-1] + 4)) * size + own
    return Expected(y, noise, common=_SHARED * unit, bound=most)


@reference("RMSNorm", "*RMSNorm", "*RMSNormFused", "GemmaRMSNorm", "Gemma*RMSNorm", "Qwen3NextRMSNorm", by_rows=True)
def rms(call: Call) -> dict[str, Expected]:
    x = call.wide("x", "hidden_states", "input", "0")
    eps, note = epsilon(call)
    weight, residual = param_if(call, "weight"), call.maybe("residual", "1")
    weight = None if weight is None else weight + offset_of(call.cls)
    y, total = fused(x, None if residual is None else residual.double(), weight, eps, call.unit, note)
    return {"output.0": _told(call, y)} | ({} if total is None else {"output.1": total})


@reference("RMSNormGated", "*RMSNormGated")
def gated_rms(call: Call) -> Expected:
    x = call.wide("x", "hidden_states", "0")
    eps, weight = float(call.attr(*EPSILONS)), param_if(call, "weight")
    z = call.inputs.get("z", call.inputs.get("gate"))
    if z is None:
        return Expected(rms_norm(x, weight, eps))
    if "norm_before_gate" not in call.attrs and call.cls == "RMSNormGated":
        raise Declined("attribute norm_before_gate was not recorded")
    gate = torch.nn.functional.silu(z.double())
    if not call.attr("norm_before_gate", default=True):
        return gate_first(x * gate, x, weight, eps, call.unit)
    normal = rms_norm(x, weight, eps)
    y = normal * gate
    # the gate, x / rms and the normed may be rounded
    least = subnormal(call.unit, (1.0 if weight is None else 1.0 + weight.abs()) * gate.abs() + normal.abs())
    noise = ROUNDED * (2.0**0.5 * call.unit * y.abs() + least)
    bound = (3.0 * call.unit + 2.0 * APPROXIMATE + 0.5 * gamma(x.shape[-1] + 4)) * y.abs() + least
    return Expected(y, noise, common=_SHARED * call.unit, bound=bound)


def mean_over_deviation(flat: Any, eps: float) -> Any:
    """mean |x| / sqrt(variance + eps) [..., 1]: what a float32 mean's error is taken times of in a LayerNorm."""
    return flat.abs().mean(-1, keepdim=True) / (flat.var(-1, correction=0, keepdim=True) + eps).sqrt()


@reference("LayerNorm", "*LayerNorm", by_rows=True)
def layer(call: Call) -> Expected:
    x = call.wide("input", "x", "hidden_states", "0")
    bias = param_if(call, "bias")
    shape = call.attr("normalized_shape", default=[x.shape[-1]])
    dims = len(shape) if isinstance(shape, (list, tuple)) else 1
    eps = _own(call)
    weight = param_if(call, "weight")
    flat = x.flatten(-dims) if dims > 1 else x
    y = layer_norm(flat, None, None, eps).reshape(x.shape)
    scaled = y if weight is None else y * weight
    # a mean of n numbers is off by gamma_n of their mean size, and so is every centred one, by that over the deviation
    width = flat.shape[-1]
    size = mean_over_deviation(flat, eps).reshape(*x.shape[: x.dim() - dims], *[1] * dims)
    size = size if weight is None else size * weight.abs()
    early = once(y.abs(), call.unit, 1.0 if weight is None else weight.abs())
    bound = early + (APPROXIMATE + gamma(width + 4)) * scaled.abs() + 2.0 * gamma(width + 4) * size
    noise = combined(ROUNDED * early, SUM * width**0.5 * size)
    return _told(call, Expected(scaled if bias is None else scaled + bias, noise, bound=bound))


@reference("GroupNorm")
def group(call: Call) -> Expected:
    x = call.wide("input", "x", "0")
    groups = int(call.attr("num_groups"))
    if x.shape[1] % groups:
        raise Declined("its channels are no multiple of its groups")
    y = layer_norm(x.reshape(x.shape[0], groups, -1), None, None, _own(call)).reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    weight, bias = param_if(call, "weight"), param_if(call, "bias")
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    return _told(call, Expected(y))


# --- on a device --------------------------------------------------------------------------------------------------


def _rms_here(x: Any, weight: Any | None, eps: float) -> Any:
    """F.rms_norm, or its formula in float32 where torch is older than 2.4."""
    if hasattr(F, "rms_norm"):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    y = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


@device_kernel("RMSNorm", "*RMSNorm", "*RMSNormFused", "GemmaRMSNorm", "Gemma*RMSNorm", "Qwen3NextRMSNorm")
def rms_kernel(call: Call) -> dict[str, Any]:
    x, eps = call.tensor("x", "hidden_states", "input", "0"), float(call.attr(*EPSILONS))
    w, residual, kernel = call.params.get("weight"), call.maybe("residual", "1"), vendor("rms_norm")
    total = x if residual is None else x + residual
    more = {} if residual is None else {"output.1": total}
    if offset_of(call.cls):
        return {"output.0": _rms_here(total.float(), 1.0 + weight_here(call).float(), eps).to(x.dtype)} | more
    if residual is None and kernel is not None and w is not None and x.dim() == 2 and x.device.type != "cpu":
        out = torch.empty_like(x)
        kernel(out, x.contiguous(), w, eps)
        return {"output.0": out}
    return {"output.0": _rms_here(total, w, eps)} | more


@device_kernel("LayerNorm", "*LayerNorm")
def layer_kernel(call: Call) -> Any:
    x = call.tensor("input", "x", "hidden_states", "0")
    w, b = call.params.get("weight"), call.params.get("bias")
    shape = call.attr("normalized_shape", default=[x.shape[-1]])
    shape = list(shape) if isinstance(shape, (list, tuple)) else [int(shape)]
    return F.layer_norm(x, shape, w, b, float(call.attr(*EPSILONS)))


@device_kernel("GroupNorm")
def group_kernel(call: Call) -> Any:
    w, b = call.params.get("weight"), call.params.get("bias")
    return F.group_norm(call.tensor("input", "x", "0"), int(call.attr("num_groups")), w, b, float(call.attr("eps")))
