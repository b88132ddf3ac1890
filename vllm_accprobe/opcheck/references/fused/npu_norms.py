"""Norms of torch_npu: RMSNorm, with a residual and its gradient, LayerNorm, DeepNorm, GroupNorm with SiLU.

Formulas: torch_npu's documents of npu_rms_norm, y = x / sqrt(mean(x*x) + eps) * gamma over gamma's dimensions, and the
reciprocal root as second output; npu_add_rms_norm, the norm of x1 + x2, and the sum as third output;
npu_layer_norm_eval, LayerNorm with weight and bias (msprobe's benchmark function leaves both out);
npu_group_norm_silu, out = silu(GroupNorm(x)), and each group's mean and reciprocal deviation; npu_deep_norm, the
LayerNorm of alpha x + gx, with mean and reciprocal deviation before it [op-plugin's test_npu_deep_norm].
npu_rms_norm_backward is given the root r instead of eps: dx = (dy g - x r mean(dy g x r)) r, dgamma = sum dy x r.
Noise: as in norms.py; mean and root are float32 sums of n terms.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Declined, Expected, combined, gamma, sum_of_two
from vllm_accprobe.opcheck.references.fused.fused_calls import Given, fused
from vllm_accprobe.opcheck.references.norms import mean_over_deviation, normed
from vllm_accprobe.opcheck.references.parts import reshaped, subnormal

_ROOT = 2.0**-20
"""Relative error of a reciprocal root in float32: some units, for the sum below it and the approximation itself."""


def _flat(x: Any, weight: Any) -> Any:
    """x with the weight's dimensions as one, which is last. Raises Declined."""
    dims = weight.dim()
    if not dims or tuple(x.shape[x.dim() - dims :]) != tuple(weight.shape):
        raise Declined(f"a weight {list(weight.shape)} does not fit an input {list(x.shape)}")
    return x.flatten(-dims) if dims > 1 else x


def _root(x: Any, eps: float) -> Any:
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def _weighed(x: Any, weight: Any, eps: float, unit: float, roundings: int = 1) -> tuple[Expected, Expected]:
    """The norm of x over the weight's dimensions, in x's shape; and its reciprocal root, [..., 1, ...]."""
    flat = _flat(x, weight)
    root = _root(flat, eps)
    w = weight.flatten()
    y = normed(flat * root * w, unit, flat.shape[-1], before=roundings - 1, weight=w)
    size = root.detach().abs()
    # roundings of the sum before it, where there is one, are independent: of n terms, or of the few largest
    squares = flat.detach().square()
    share = squares.square().sum(-1, keepdim=True).sqrt() / squares.sum(-1, keepdim=True).clamp(min=1e-300)
    noise = combined(_ROOT * size, (roundings - 1) * ROUNDED * unit * share * size)
    early = (roundings - 1) * unit  # of all the same way, where they are toward zero
    r = Expected(root, noise, common=early, bound=(early + APPROXIMATE + gamma(flat.shape[-1] + 4)) * size)
    kept = (*x.shape[: x.dim() - weight.dim()], *[1] * weight.dim())
    return reshaped(y, x.shape), reshaped(r, kept)


@fused("npu_rms_norm(self/input/x, gamma/weight, epsilon/eps=1e-06)")
def npu_rms_norm(g: Given) -> dict[str, Expected]:
    y, root = _weighed(g.tensor("self"), g.tensor("gamma"), g.number("epsilon"), g.unit("self"))
    return {"output.0": y, "output.1": root}


@fused("npu_add_rms_norm(x1, x2, gamma, epsilon=1e-06)")
def npu_add_rms_norm(g: Given) -> dict[str, Expected]:
    total, unit = g.tensor("x1") + g.tensor("x2"), g.unit("x1")
    y, root = _weighed(total, g.tensor("gamma"), g.number("epsilon"), unit, 2)
    return {"output.0": y, "output.1": root, "output.2": sum_of_two(total, unit)}


@fused("npu_rms_norm_backward(dy, self/x, gamma, rstd)")
def npu_rms_norm_backward(g: Given) -> dict[str, Expected]:
    """dgamma is a float32 sum over all rows."""
    dy, x, weight, unit = g.tensor("dy"), g.tensor("self"), g.tensor("gamma"), g.unit("dy", "self")
    up, flat, w = _flat(dy, weight), _flat(x, weight), weight.flatten()
    root = g.tensor("rstd").reshape(*flat.shape[:-1], 1)
    scaled, normal = up * w, flat * root
    mean = (scaled * normal).mean(-1, keepdim=True)
    dx = (scaled - normal * mean) * root
    size = (scaled.abs() + normal.abs() * (scaled * normal).abs().mean(-1, keepdim=True)) * root.abs()
    terms = (up * normal).flatten(0, -2)
    count = len(terms)
    dw, sizes = terms.sum(0), terms.abs().sum(0)
    spread = combined(ROUNDED * unit * terms.square().sum(0).sqrt(), SUM * count**0.5 * sizes)
    width = flat.shape[-1]
    own, least = subnormal(unit, root.abs()), count * subnormal(unit)  # of differences, and of terms of the sum
    return {
        "output.0": reshaped(
            Expected(dx, ROUNDED * (unit * size + own), bound=(2 * unit + gamma(width + 8)) * size + own), x.shape
        ),
        "output.1": reshaped(
            Expected(dw, spread + ROUNDED * least, bound=(2 * unit + gamma(count + 8)) * sizes + least), weight.shape
        ),
    }


def _centred(x: Any, eps: float) -> tuple[Any, Any, Any]:
    """(x - mean) / deviation over the last dimension, the mean and the reciprocal deviation."""
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    root = _root(centred, eps)
    return centred * root, mean, root


def _moments(x: Any, mean: Any, root: Any) -> tuple[Expected, Expected]:
    """A mean and a reciprocal deviation as a kernel sums them in float32."""
    n, size = x.shape[-1], x.detach().abs().mean(-1, keepdim=True)
    shift = SUM * n**0.5 * size
    # d log root = -centred dmean / variance, which is 0 in sum: of second order
    r = Expected(root, combined(_ROOT * root.abs(), (shift * root).square() * root),
                 bound=(APPROXIMATE + gamma(n + 8) + (gamma(n + 4) * size * root).square()) * root.abs())  # fmt: skip
    return Expected(mean, shift, bound=gamma(n + 4) * size), r


def _shift(x: Any, eps: float) -> Any:
    """Standard error of x / deviation by that of a float32 mean over the last dimension, [..., 1]."""
    return SUM * x.shape[-1] ** 0.5 * mean_over_deviation(x.detach(), eps)


def _affine(normal: Any, shift: Any, weight: Any | None, bias: Any | None, unit: float) -> Expected:
    """shift: as above, which is broadcast."""
    scaled = normal if weight is None else normal * weight
    noise = combined(ROUNDED * unit * scaled.abs(), shift if weight is None else shift * weight.abs())
    return Expected(scaled if bias is None else scaled + bias, noise)


@fused("npu_layer_norm_eval(input/data/self, normalized_shape, weight=None, bias=None, eps=1e-05)")
def npu_layer_norm_eval(g: Given) -> Expected:
    x, shape = g.tensor("input"), g.integers("normalized_shape") or []
    if not shape or tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
        raise Declined(f"normalized_shape {shape} does not fit an input {list(x.shape)}")
    flat, eps = x.flatten(-len(shape)), g.number("eps")
    weight, bias = (None if t is None else t.flatten() for t in (g.maybe("weight"), g.maybe("bias")))
    return reshaped(_affine(_centred(flat, eps)[0], _shift(flat, eps), weight, bias, g.unit("input")), x.shape)


@fused("npu_deep_norm(x, gx, beta, gamma, alpha=0.3, epsilon=1e-06)")
def npu_deep_norm(g: Given) -> dict[str, Expected]:
    x, weight, bias, unit = g.tensor("x"), g.tensor("gamma"), g.tensor("beta"), g.unit("x")
    total = g.number("alpha") * x + g.tensor("gx")
    flat = _flat(total, weight)
    normal, mean, root = _centred(flat, g.number("epsilon"))
    y = _affine(normal, _shift(flat, g.number("epsilon")), weight.flatten(), bias.flatten(), 2.0**0.5 * unit)
    kept = (*x.shape[: x.dim() - weight.dim()], *[1] * weight.dim())
    m, r = _moments(flat, mean, root)
    return {"output.0": reshaped(m, kept), "output.1": reshaped(r, kept), "output.2": reshaped(y, x.shape)}


@fused("npu_group_norm_silu(input/x/self, weight, bias, group/num_groups, eps=1e-05)")
def npu_group_norm_silu(g: Given) -> dict[str, Expected]:
    """SiLU moves an error of the norm by at most 1.1 times [its derivative's largest value]."""
    x, groups, unit = g.tensor("input"), int(g.number("group")), g.unit("input")
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups:
        raise Declined("its channels are no multiple of its groups")
    grouped = x.reshape(x.shape[0], groups, -1)
    normal, mean, root = _centred(grouped, g.number("eps"))
    shape = (1, -1, *[1] * (x.dim() - 2))
    weight, bias = (None if t is None else t.reshape(shape) for t in (g.maybe("weight"), g.maybe("bias")))
    shift = _shift(grouped, g.number("eps")).expand_as(grouped).reshape(x.shape)
    z = _affine(normal.reshape(x.shape), shift, weight, bias, unit)
    gate = torch.sigmoid(z.value)
    slope = (gate * (1.0 + z.value * (1.0 - gate))).abs()
    out = Expected(z.value * gate, combined(slope * z.noise, ROUNDED * unit * (z.value * gate).abs()))
    m, r = _moments(grouped, mean, root)
    # they have the input's dtype, which a kernel may round to
    return {"output.0": out, "output.1": reshaped(m, mean.shape[:-1]), "output.2": reshaped(r, root.shape[:-1])}
