"""Norms: RMSNorm and its gradient, Gemma's, LayerNorm, GroupNorm, with and without a residual that is added first.

Formulas: RMSNorm y = x / sqrt(mean(x*x) + eps) * w [Zhang and Sennrich, arXiv 1910.07467]; Gemma's weighs with 1 + w
[Gemma report, arXiv 2403.08295, and its published code]; LayerNorm [Ba et al., arXiv 1607.06450]; GroupNorm [Wu and He,
arXiv 1803.08494]; gated: norm(x * silu(z)), or norm(x) * silu(z) with the norm first [Dao and Gu, arXiv 2405.21060,
section 7]. A fused add gives the norm of x + residual, before or after that sum is rounded, and the sum. Bound: those
roundings, a reciprocal root off by APPROXIMATE, and half of gamma_n for the mean of n squares. What is rounded before
the norm counts twice: an element is off by u, and the root of the mean of squares by another u where the roundings of
its row go the other way [Cauchy and Schwarz: |sum t dt| <= u sum t t]. A mean and a variance are those of two passes,
or Welford's: E x**2 - (E x)**2 has no such bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.dump.block_code import CODE, GATE_FIRST, MINUS_MEAN, ONE_PLUS_WEIGHT
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, decline_if, device_kernel, reference
from vllm_accprobe.opcheck.references.parts import Arguments, equal, param_if, ranks_of, reshaped, vendor, weight_here
from vllm_accprobe.opcheck.roundings import (
    APPROXIMATE,
    ROUNDED,
    SUM,
    gamma,
    once,
    subnormal,
    sum_of_two,
    within_float32,
)

EPSILONS = ("variance_epsilon", "eps")
_CONFIGURED = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_OF_CONFIG = {
    "RMSNorm": ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"),
    "LayerNorm": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "GroupNorm": ("group_norm_eps", "norm_eps", "norm_epsilon"),
}
"""By what a norm's class ends with, where config.json has its epsilon."""
INPUT, RESIDUAL = ("x", "hidden_states", "input", "0"), ("residual", "1")
_SHARED = 0.5
"""Units: rounding x / rms to the model's dtype, where the rms is near 1, moves all of a row the same way."""


def rms_norm(x: Any, weight: Any | None, eps: float) -> Any:
    """x / sqrt(mean(x*x) + eps) * weight over the last dimension; all float64."""
    y = x * _root(x, eps)
    return y if weight is None else y * weight


def layer_norm(x: Any, weight: Any | None, bias: Any | None, eps: float) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, variance of the population."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * _root(centred, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@dataclass(frozen=True)
class NormParts:
    """A norm as y = scaled / sqrt(power + eps) + bias; float64, rows [..., n] and power [..., 1]. x: what is squared:
    with its residual, and without its mean where the norm takes that off."""

    x: Any
    scaled: Any
    power: Any
    bias: Any


def _ending(cls: str) -> str | None:
    return next((end for end in _OF_CONFIG if cls.removesuffix("Fused").endswith(end)), None)


def kind_of(call: Call) -> str | None:
    """RMSNorm, LayerNorm, GroupNorm: by the module's own source where that decides, else by its class's name; None
    for no norm. T5LayerNorm takes no mean off: it is an RMSNorm."""
    words, named = set(call.attrs.get(CODE) or ()), _ending(call.cls)
    if named not in ("RMSNorm", "LayerNorm"):
        return named
    centred = words & {MINUS_MEAN, "layer_norm"}
    by_squares = "rms_norm" in words or ("mean" in words and words & {"rsqrt", "sqrt"} and not words & {"var", "std"})
    return "LayerNorm" if centred else "RMSNorm" if by_squares else named


OTHER_NAME = "its formula is that of its own source code, which is another than its class's name says"


def known_as(call: Call) -> str:
    """Its class; of a norm whose source decides against the name, the kind that it is."""
    kind = kind_of(call)
    return call.cls if kind is None or kind == _ending(call.cls) else kind


def is_norm(cls: str) -> bool:
    """Whether the epsilon of this class may be fitted: RMSNorm, LayerNorm, GroupNorm and those that end so."""
    return _ending(cls) is not None


def configured(config: Mapping[str, Any], cls: str) -> float | None:
    """A norm's epsilon by config.json; None where it has none."""
    found = (config.get(name) for name in _OF_CONFIG.get(_ending(cls) or "", ()))
    return next((float(v) for v in found if isinstance(v, (int, float)) and not isinstance(v, bool)), None)


def weight_of(call: Call) -> Any | None:
    """What the normalised is multiplied by, float64; None for nothing. Raises Declined where it was packed."""
    weight = param_if(call, "weight")
    return None if weight is None else weight + offset_of(call)


def parts_of(call: Call) -> NormParts | None:
    """A norm's call without its epsilon; None where a tensor is missing or the class is no norm."""
    kind, x = kind_of(call), call.maybe(*INPUT)
    if kind is None or x is None:
        return None
    x, shape, residual = x.double(), x.shape, call.maybe(*RESIDUAL)
    try:
        weight, bias = weight_of(call), param_if(call, "bias")
        if kind == "RMSNorm":
            x, bias = x if residual is None else x + residual.double(), None
        elif kind == "GroupNorm":
            x, along = x.reshape(shape[0], int(call.attr("num_groups")), -1), (1, -1, *[1] * (len(shape) - 2))
            weight, bias = (None if t is None else t.reshape(along).expand(shape).reshape(x.shape)
                            for t in (weight, bias))  # fmt: skip
        x = x if kind == "RMSNorm" else x - x.mean(-1, keepdim=True)
        scaled = x if weight is None else x * weight
        zero = torch.zeros((), dtype=torch.float64)
        return NormParts(x, scaled, (x * x).mean(-1, keepdim=True), zero if bias is None else bias)
    except (Declined, RuntimeError):
        return None


def _own(call: Call) -> float:
    """The epsilon. Raises Declined where it was neither recorded nor found."""
    why = call.extra.get("epsilon", {}).get("said")
    decline_if(why and not any(n in call.attrs for n in EPSILONS), why)
    return float(call.attr(*EPSILONS))


def _with_source(call: Call, y: Expected) -> Expected:
    """``y`` with what is known of an epsilon that was not recorded."""
    found = call.extra.get("epsilon")
    if not found:
        return y
    slack = float(found["slack"])
    bound = None if y.bound is None else y.bound + slack * y.value.abs()
    return replace(y, common=y.common + slack, bound=bound, source=str(found["said"]))


def epsilon(call: Call) -> tuple[float, str]:
    """The epsilon, and a note where the module's own is neither its siblings' nor config.json's: then theirs counts."""
    own = _own(call)
    usual = call.extra.get("usual", {}).get(next((n for n in EPSILONS if n in call.attrs), ""))
    of_config = next((call.config[n] for n in _CONFIGURED if n in call.config), None)
    if usual is None or of_config is None or own == usual or not math.isclose(usual, of_config, rel_tol=1e-6):
        return own, ""
    return float(usual), f"its epsilon is {own:g}, where config.json and its siblings have {usual:g}"


def fused(
    x: Any, residual: Any | None, weight: Any | None, eps: float, unit: float, note: str = ""
) -> tuple[Expected, Expected | None]:
    """RMSNorm of x + residual, and the sum, None where there is no residual; all float64. transformers and vLLM's
    native path round x / rms to the model's dtype before they weigh it."""
    total = x if residual is None else x + residual
    y = rms_normed(total, weight, eps, unit, before=int(residual is not None), note=note)
    return y, None if residual is None else sum_of_two(total, unit)


def offset_of(call: Call) -> float:
    """What is added to the weight, by the source where it was read. By name: Gemma's norms weigh with 1 + w, but for
    the latest, which do as everybody else."""
    words, cls = call.attrs.get(CODE) or (), call.cls.removeprefix("TPAware")  # vLLM's backend for transformers
    if "mean" in words or ONE_PLUS_WEIGHT in words:
        return float(ONE_PLUS_WEIGHT in words)
    gemma = cls.startswith("Gemma") and cls.endswith("RMSNorm") and not cls.startswith(("Gemma3n", "Gemma4"))
    return 1.0 if gemma or cls == "Qwen3NextRMSNorm" else 0.0


def rms_normed(
    x: Any, weight: Any | None, eps: float, unit: float, *, before: int = 0, behind: int = 1, note: str = ""
) -> Expected:  # fmt: skip
    """RMSNorm with roundings ``before`` the norm (x is a sum) and ``behind`` it (x / rms, before it is weighed)."""
    y, least = rms_norm(x, weight, eps), subnormal(unit, 1.0 if weight is None else weight.abs())
    return _off(y, x, unit, before + behind, behind + 2 * before, 1, least, note)


def _off(
    y: Any, squared: Any, unit: float, roundings: int, most: int, functions: int, own: Any, note: str = ""
) -> Expected:  # fmt: skip
    """A norm ``y`` by the mean of the squares of ``squared``, with independent roundings of y, ``most`` in its bound;
    functions: how many are off by APPROXIMATE; own: what subnormal numbers leave."""
    size = y.abs()
    bound = (most * unit + functions * APPROXIMATE + 0.5 * gamma(squared.shape[-1] + 4)) * size + own
    noise = (ROUNDED * roundings**0.5 * unit) * size + ROUNDED * own
    return within_float32(Expected(y, noise, common=_SHARED * unit, note=note, bound=bound), squared)


def rms_and_root(x: Any, weight: Any, eps: float, unit: float, before: int = 0) -> tuple[Expected, Expected]:
    """RMSNorm over the dimensions that the weight has; and 1 / sqrt(mean(x*x) + eps), [..., 1, ...], a float32 number.
    before: roundings of x, which are independent of n terms, or of the few largest. Raises Declined."""
    flat = flat_last(x, weight)
    y, root = rms_normed(flat, weight.flatten(), eps, unit, before=before), _root(flat, eps)
    squares = flat.detach().square()
    size, width = root.detach().abs(), flat.shape[-1]
    share = squares.square().sum(-1, keepdim=True).sqrt() / squares.sum(-1, keepdim=True).clamp(min=1e-300)
    early = before * unit  # of all the same way, where they are toward zero
    noise = combined(_ROOT * size, SUM * width**0.5 * size, early * ROUNDED * share * size)
    r = Expected(root, noise, common=early, bound=(early + APPROXIMATE + gamma(width + 4)) * size)
    return reshaped(y, x.shape), reshaped(within_float32(r, flat), kept_shape(x, weight))


_ROOT = 2.0**-20
"""Chosen: relative error of a reciprocal root in float32: some units, for the sum below it and the root itself."""


def flat_last(x: Any, weight: Any) -> Any:
    """x with the weight's dimensions, its last, as one. Raises Declined."""
    dims = weight.dim()
    if not dims or tuple(x.shape[x.dim() - dims :]) != tuple(weight.shape):
        raise Declined(f"a weight {list(weight.shape)} does not fit an input {list(x.shape)}")
    return x.flatten(-dims) if dims > 1 else x


def kept_shape(x: Any, weight: Any) -> tuple[int, ...]:
    """The shape of a number for each row of x."""
    return (*x.shape[: x.dim() - weight.dim()], *[1] * weight.dim())


def _root(x: Any, eps: float) -> Any:
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def gate_first(p: Any, x: Any, weight: Any | None, eps: float, unit: float) -> Expected:
    """The norm over the last dimension of p = x * silu(gate). The gate and p may be rounded, each handed on again by
    the root mean square, and p / rms; silu is off by APPROXIMATE in p and in its mean, and the root itself."""
    root, y = _root(p, eps), rms_norm(p, weight, eps)
    by = root if weight is None else root * weight.abs()
    # a subnormal gate or product, of an element and of its row's mean
    own = 0.0
    if subnormal(unit):
        least = subnormal(unit, 1.0 + x.abs())
        own = least * by + subnormal(unit, by / root) + least.square().mean(-1, keepdim=True).sqrt() * root * y.abs()
    return _off(y, p, unit, 2, 5, 3, own)


_NAMES = ("RMSNorm", "*RMSNorm", "*RMSNormFused", "GemmaRMSNorm", "Gemma*RMSNorm", "Qwen3NextRMSNorm", "LayerNorm",
          "*LayerNorm")  # fmt: skip


@reference(*_NAMES, by_rows=True)
def norm(call: Call) -> dict[str, Expected]:
    """RMSNorm or LayerNorm."""
    x, weight = call.wide(*INPUT), weight_of(call)
    if kind_of(call) == "RMSNorm":
        (eps, note), residual = epsilon(call), call.maybe(*RESIDUAL)
        y, total = fused(x, None if residual is None else residual.double(), weight, eps, call.unit, note)
        more = {} if total is None else {"output.1": total}
    else:
        shape = call.attr("normalized_shape", default=[x.shape[-1]])
        dims = len(shape) if isinstance(shape, (list, tuple)) else 1
        y = layer_normed(x, weight, param_if(call, "bias"), _own(call), call.unit, dims)
        residual = call.maybe("residuals", "residual") if "output.1" in call.outputs else None
        more = {} if residual is None else {"output.1": equal(residual)}  # Cohere's hands them on
    y = _with_source(call, y)
    y = replace(y, source=y.source or OTHER_NAME) if known_as(call) != call.cls else y
    return {"output.0": y} | more


@reference("MiniMaxText01RMSNormTP")
def rms_over_ranks(call: Call) -> dict[str, Expected]:
    """A rank's channels by the mean square of all ranks' channels, which the ranks average in float32."""
    x, (eps, note), size = call.wide("x"), epsilon(call), int(call.attr("tp_world", default=1))
    y, _ = fused(x, None, param_if(call, "weight"), eps, call.unit, note)
    if size == 1:
        return {"output.0": _with_source(call, y)}
    squares = [one.wide("x").square().mean(-1, keepdim=True) for one in ranks_of(call, size)]
    factor = ((x.square().mean(-1, keepdim=True) + eps) / (sum(squares) / size + eps)).sqrt()
    noise, bound = (None if e is None else e * factor for e in (y.noise, y.bound))
    value = y.value * factor
    least = None if bound is None else bound + gamma(size + 2) * value.abs()
    whole = replace(y, value=value, noise=noise, bound=least, exact=None)
    return {"output.0": within_float32(whole, *(one.wide("x") for one in ranks_of(call, size)))}


@reference("torch.ops._C.rms_norm", "torch.ops._C.fused_add_rms_norm")
def rms_operator(call: Call) -> dict[str, Expected]:
    """(out, input, weight, epsilon), or (input, residual, weight, epsilon), which become the norm and the sum."""
    add = "fused_add" in call.cls
    f = Arguments(call, "input residual weight epsilon" if add else "out input weight epsilon")
    x, residual = f.wide("input")[0], f.wide("residual")[0] if add else None
    y, total = fused(x, residual, f.wide_or_none("weight"), float(f["epsilon"]), call.unit)
    return {"inplace.input.0": y} | ({} if total is None else {"inplace.input.1": total})


_GATES = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


@reference("RMSNormGated", "*RMSNormGated")
def gated_rms(call: Call) -> Expected:
    """Over groups of ``group_size`` channels where it has them."""
    x, z = call.wide("x", "hidden_states", "0"), call.maybe("z", "gate", "g", "1")
    eps, weight, words = float(call.attr(*EPSILONS)), param_if(call, "weight"), set(call.attrs.get(CODE) or ())
    grouped, width = call.attrs.get("group_size"), x.shape[-1]
    decline_if(not grouped and bool(words & {"view", "reshape"}), "its source norms groups of channels")
    size = int(grouped or width)
    decline_if(size < 1 or width % size, "its channels are no multiple of its groups")
    x, weight = (None if t is None else t.unflatten(-1, (-1, size)) for t in (x, weight))
    if z is None:
        return rms_normed(x, weight, eps, call.unit).map(lambda t: t.flatten(-2))
    if "norm_before_gate" not in call.attrs and call.cls == "RMSNormGated":
        raise Declined("attribute norm_before_gate was not recorded")
    named = words or {str(call.attrs.get("activation", "silu"))}
    gates = {_GATES[name] for name in named & _GATES.keys()}
    decline_if(len(gates) != 1, "its source has another gate than silu or sigmoid")
    # z * sigmoid(z), in whatever words, is silu
    spelled = bool(words) and torch.sigmoid in gates and call.attrs.get("activation") != "sigmoid"
    decline_if(spelled, "its source takes a sigmoid, alone or as a part of silu")
    gate = gates.pop()(z.double()).unflatten(-1, (-1, size))
    if GATE_FIRST in words or not call.attr("norm_before_gate", default=True):
        decline_if(not named & {"silu", "swish"}, "its source norms behind another gate than silu")
        return gate_first(x * gate, x, weight, eps, call.unit).map(lambda t: t.flatten(-2))
    normal = rms_norm(x, weight, eps)
    # the gate, x / rms and the normed may be rounded
    least = subnormal(call.unit, (1.0 if weight is None else 1.0 + weight.abs()) * gate.abs() + normal.abs())
    return _off(normal * gate, x, call.unit, 2, 3, 2, least).map(lambda t: t.flatten(-2))


def rms_gradient(up: Any, x: Any, weight: Any, rstd: Any, unit: float) -> tuple[Expected, Expected]:
    """(dx, dweight) of y = x root weight over the weight's dimensions: dx = root (g - x root mean(g x root)) with g =
    up weight, dweight = sum up x root, a float32 sum over all rows. rstd: each row's root. Raises Declined."""
    flat, flat_up = flat_last(x, weight), flat_last(up, weight)
    root = rstd.reshape(*flat.shape[:-1], 1)
    g, normal, width = flat_up * weight.flatten(), flat * root, flat.shape[-1]
    dx = (g - normal * (g * normal).mean(-1, keepdim=True)) * root
    size = (g.abs() + normal.abs() * (g * normal).abs().mean(-1, keepdim=True)) * root.abs()
    terms = (flat_up * normal).flatten(0, -2)
    count, sizes = len(terms), terms.abs().sum(0)
    spread = combined(ROUNDED * unit * terms.square().sum(0).sqrt(), SUM * count**0.5 * sizes)
    own, least = subnormal(unit, root.abs()), count * subnormal(unit)  # of differences, and of terms of the sum
    dw = Expected(terms.sum(0), spread + ROUNDED * least, bound=(2.0 * unit + gamma(count + 8)) * sizes + least)
    down = Expected(dx, ROUNDED * (unit * size + own), bound=(3.0 * unit + gamma(width + 8)) * size + own)
    return reshaped(down, x.shape), reshaped(dw, weight.shape)


def layer_normed(
    x: Any, weight: Any | None, bias: Any | None, eps: float, unit: float, dims: int = 1, before: int = 0
) -> Expected:  # fmt: skip
    """LayerNorm over the last ``dims`` dimensions, which weight and bias have; float64. before: roundings of x.

    A mean of n numbers is off by gamma_n of their mean size, and so is every centred one, by that over the
    deviation."""
    flat, shape = x.flatten(-dims) if dims > 1 else x, x.shape[x.dim() - dims :]
    weight, bias = (None if t is None else t.reshape(shape) for t in (weight, bias))
    y, width = layer_norm(flat, None, None, eps).reshape(x.shape), flat.shape[-1]
    mean, variance = flat.detach().abs().mean(-1, keepdim=True), flat.detach().var(-1, correction=0, keepdim=True)
    size = (mean / (variance + eps).sqrt()).reshape(*x.shape[: x.dim() - dims], *[1] * dims)
    by = 1.0 if weight is None else weight.abs()
    scaled = y if weight is None else y * weight
    value = scaled if bias is None else scaled + bias
    early, size = once(y.abs(), unit, by), size * by
    bound = early + (APPROXIMATE + gamma(width + 4)) * scaled.abs() + 2.0 * gamma(width + 4) * size
    noise = combined(ROUNDED * early, SUM * width**0.5 * size)
    if before:
        more = before * unit * torch.maximum(scaled.abs(), value.abs())
        noise, bound = noise + ROUNDED * more, bound + 2.0 * more
    return within_float32(Expected(value, noise, bound=bound), flat)


def group_normed(x: Any, groups: int, weight: Any | None, bias: Any | None, eps: float, unit: float) -> Expected:
    """x [n, channels, ...], weight and bias [channels]; float64. Raises Declined."""
    decline_if(x.dim() < 2 or groups < 1 or x.shape[1] % groups, "its channels are no multiple of its groups")
    grouped = x.reshape(x.shape[0], groups, -1)
    y = layer_normed(grouped, None, None, eps, unit).map(lambda t: t.expand(grouped.shape).reshape(x.shape))
    shape = (1, -1, *[1] * (x.dim() - 2))
    value = y.value if weight is None else y.value * weight.reshape(shape)
    by = 1.0 if weight is None else weight.abs().reshape(shape)
    return replace(y.map(lambda t: t * by), value=value if bias is None else value + bias.reshape(shape))


@reference("GroupNorm")
def group(call: Call) -> Expected:
    x, weight, bias = call.wide("input", "x", "0"), param_if(call, "weight"), param_if(call, "bias")
    return _with_source(call, group_normed(x, int(call.attr("num_groups")), weight, bias, _own(call), call.unit))


_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups", "ssm_n_groups")


@reference("Mixer2RMSNormGated")
def mamba_norm(call: Call) -> Expected:
    """RMSNorm(x silu(gate)) by groups [Mamba 2's published code], [tokens, channels of this rank]; no weight: x
    silu(gate)."""
    x, gate = call.wide("x", "0"), call.wide("gate", "1")
    y = x * F.silu(gate)
    weight = param_if(call, "weight")
    if weight is None:
        early = once(F.silu(gate).abs(), call.unit, x.abs())
        return Expected(y, ROUNDED * early, bound=early + APPROXIMATE * y.abs())
    groups = next((int(call.config[n]) for n in _GROUPS if n in call.config), 0)
    ranks = int(call.attr("tp_size", default=1))
    decline_if(not groups, "the number of its groups was not recorded")
    decline_if(groups % ranks, "its groups are cut over ranks")
    shape = (len(y), groups // ranks, -1)
    eps, by = float(call.attr("variance_epsilon")), weight.reshape(shape[1:])
    return reshaped(gate_first(y.reshape(shape), x.reshape(shape), by, eps, call.unit), y.shape)


def _rms_here(x: Any, weight: Any | None, eps: float) -> Any:
    """F.rms_norm, or its formula in float32 where torch is older than 2.4."""
    if hasattr(F, "rms_norm"):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    y = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


@device_kernel(*_NAMES)
def norm_kernel(call: Call) -> dict[str, Any]:
    x, w, eps = call.tensor(*INPUT), call.params.get("weight"), float(call.attr(*EPSILONS))
    w = w if w is None or not offset_of(call) else 1.0 + weight_here(call).float()
    if kind_of(call) != "RMSNorm":
        shape = call.attr("normalized_shape", default=[x.shape[-1]])
        shape = list(shape) if isinstance(shape, (list, tuple)) else [int(shape)]
        w = None if w is None else w.to(call.params["weight"].dtype)  # of a float32 weight the bias is, too
        return {"output.0": F.layer_norm(x, shape, w, call.params.get("bias"), eps)}
    residual, kernel = call.maybe(*RESIDUAL), vendor("rms_norm")
    total = x if residual is None else x + residual
    more = {} if residual is None else {"output.1": total}
    if offset_of(call):
        return {"output.0": _rms_here(total.float(), w, eps).to(x.dtype)} | more
    if residual is None and kernel is not None and w is not None and x.dim() == 2 and x.device.type != "cpu":
        out = torch.empty_like(x)
        kernel(out, x.contiguous(), w, eps)
        return {"output.0": out}
    return {"output.0": _rms_here(total, w, eps)} | more


@device_kernel("GroupNorm")
def group_kernel(call: Call) -> Any:
    w, b = call.params.get("weight"), call.params.get("bias")
    return F.group_norm(call.tensor("input", "x", "0"), int(call.attr("num_groups")), w, b, float(call.attr("eps")))
