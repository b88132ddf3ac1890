"""Operators of torch_npu besides attention: activations, norms, rotary, softmax, routers, moves, optimisers.

Activations of torch_npu and their gradients: SwiGLU, fast GELU, Mish, GELU, GEGLU, SiLU.

Formulas: torch_npu's documents of npu_swiglu, silu(A) * B of the halves along ``dim``; npu_fast_gelu and fast_gelu,
x exp(0.851 (x - |x|)) / (1 + exp(-1.702 |x|)), which is x * sigmoid(1.702 x) for either sign; npu_mish,
x * tanh(softplus(x)); npu_gelu, exact or by tanh; npu_gelu_mul, gelu(A) * B; npu_geglu, A * gelu(B), or gelu(A) * B
with activate_left, by tanh with approximate 1, and gelu as second output [op-plugin's test_npu_geglu]. Each
``*_backward`` gives the formula's derivative times the gradient, by autograd on the formula.
Noise: as in activations.py.

Operators of torch_npu that move, sort, round or multiply: confusion_transpose, sort_v2, dtype_cast, linear.

Formulas: torch_npu's documents of npu_confusion_transpose, permute then reshape with transpose_first, else reshape then
permute, and its backward, the way back; npu_sort_v2, the sorted values alone; npu_dtype_cast, a rounding;
npu_linear, x Wᵀ + b, and npu_linear_backward, dy W and dyᵀ x. What is moved, sorted or cast must be right to the bit.

Norms of torch_npu: RMSNorm, with a residual and its gradient, LayerNorm, DeepNorm, GroupNorm with SiLU.

Formulas: torch_npu's documents of npu_rms_norm, y = x / sqrt(mean(x*x) + eps) * gamma over gamma's dimensions, and the
reciprocal root as second output; npu_add_rms_norm, the norm of x1 + x2, and the sum as third output;
npu_layer_norm_eval, LayerNorm with weight and bias (msprobe's benchmark function leaves both out);
npu_group_norm_silu, out = silu(GroupNorm(x)), and each group's mean and reciprocal deviation; npu_deep_norm, the
LayerNorm of alpha x + gx, with mean and reciprocal deviation before it [op-plugin's test_npu_deep_norm].
npu_rms_norm_backward is given the root r instead of eps: dx = (dy g - x r mean(dy g x r)) r, dgamma = sum dy x r.
Noise: as in norms.py; mean and root are float32 sums of n terms.

Optimisers of torch_npu: one step of Adam and AdamW.

Formulas: npu_apply_adam, m + (1 - beta1) (g - m), v + (1 - beta2) (g*g - v),
var - lr sqrt(1 - beta2_power) / (1 - beta1_power) * m / (eps + sqrt(v)), with Nesterov beta1 m + (1 - beta1) g in m's
place [torch_npu's document; TensorFlow's ApplyAdam, which it is named after]. npu_apply_adam_w, which multiplies both
powers by their beta first, takes lr * weight_decay of var away, and with amsgrad has max(max_grad_norm, v) in the place
of v [op-plugin's test_npu_apply_adam_w, whose maximize negates the gradient; msprobe's benchmark function draws
max_grad_norm at random, which no kernel can meet]. The old values must have been captured before the call.
Noise: each of some ten float32 operations, or those of the tensors' dtype, rounds what it adds.

Rotary embeddings of torch_npu: npu_rotary_mul, npu_apply_rotary_pos_emb, and the gradient.

Formula: torch_npu's documents: x * r1 + rotate(x) * r2 with cosines r1 and sines r2 over the whole last dimension;
rotate gives (-x2, x1) of the halves (``half``) or of neighbours (``interleave``), or x times a matrix ``rotate``.
Noise: each product may be rounded before they are added.

Softmaxes of torch_npu: scaled and masked, and the cross entropy, with their gradients.

Formulas: npu_scaled_masked_softmax, softmax of x * scale with -10000 in the place of what is masked, or of the upper
triangle with fixed_triu_mask [msprobe's and Ascend/pytorch's benchmark functions]; its backward is given the softmax y:
(dy - sum dy y) y scale, 0 where masked. npu_cross_entropy_loss, loss and log-probabilities
[op-plugin's test_npu_cross_entropy_loss, torch.nn.CrossEntropyLoss' documents].
A row that is masked whole is not defined by a fill value: some kernels give equal shares, some zeros; the captured one
is held against the nearer of the two. Noise: scores may be rounded once they are scaled; the sums are float32's.

Routers of torch_npu: npu_moe_gating_top_k_softmax and its second version.

Formula: torch_npu's document: y, experts = topk(softmax(x), k), and row numbers arange(n k) as [k, n] transposed; a row
that is ``finished`` names the expert that there is not (their number). The second version takes the softmax of the
chosen logits with renorm 1, and has no row numbers but the whole softmax.
An expert is right if its weight is within rounding of the k-th largest, and no expert is named twice: of two that are
nearly equal either may be taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Declined, Expected, combined, gamma, sum_of_two
from vllm_accprobe.opcheck.references.activations import alone, gelu, gelu_tanh, quick_gelu, silu
from vllm_accprobe.opcheck.references.activations import gated as gated_halves
from vllm_accprobe.opcheck.references.fused.fused_calls import Given, fused
from vllm_accprobe.opcheck.references.gradients import derived
from vllm_accprobe.opcheck.references.linear import biased, product
from vllm_accprobe.opcheck.references.norms import mean_over_deviation, normed
from vllm_accprobe.opcheck.references.parts import reshaped, subnormal


def mish(x: Any) -> Any:
    return x * torch.tanh(torch.nn.functional.softplus(x, threshold=1e9))


def _last(x: Any, dim: float) -> tuple[Any, int]:
    """x with its dimension ``dim`` last. Raises Declined where it cannot be halved."""
    at = int(dim)
    if not -x.dim() <= at < x.dim() or x.shape[at] % 2:
        raise Declined(f"dimension {at} of an input {list(x.shape)} cannot be halved")
    return x.movedim(at, -1), at


def _back(y: Expected, at: int) -> Expected:
    moved = (None if t is None else t.movedim(-1, at) for t in (y.value, y.noise, y.bound))
    value, noise, bound = moved
    return Expected(value, noise, bound=bound)


def _gelu_of(g: Given, name: str) -> Callable[[Any], Any]:
    kind = g[name]
    if kind not in ("none", "tanh"):
        raise Declined(f"approximate {kind!r} is unknown")
    return gelu_tanh if kind == "tanh" else gelu


@fused("npu_swiglu(self/input/x, dim=-1)")
def npu_swiglu(g: Given) -> Expected:
    x, at = _last(g.tensor("self"), g.number("dim"))
    return _back(gated_halves(x, silu, g.unit("self")), at)


@fused("npu_swiglu_backward(grad_output/grad, self/x, dim=-1)", differentiable=False)
def npu_swiglu_backward(g: Given) -> dict[str, Expected]:
    return derived(g, npu_swiglu, {"self": "self", "dim": "dim"}, "grad_output", ("self",))


@fused("npu_fast_gelu(self/input/input0/x)", "fast_gelu")
def npu_fast_gelu(g: Given) -> Expected:
    return alone(g.tensor("self"), quick_gelu, g.unit("self"))


@fused("npu_fast_gelu_backward(grad, self/input_x)", differentiable=False)
def npu_fast_gelu_backward(g: Given) -> dict[str, Expected]:
    return derived(g, npu_fast_gelu, {"self": "self"}, "grad", ("self",))


@fused("npu_mish(self/input)")
def npu_mish(g: Given) -> Expected:
    x, unit = g.tensor("self"), g.unit("self")
    y = alone(x, mish, unit)
    return replace(y, bound=y.bound + subnormal(unit, x.abs()))  # softplus may be subnormal as well as its tanh


@fused("npu_mish_backward(grad, input/self)", differentiable=False)
def npu_mish_backward(g: Given) -> dict[str, Expected]:
    return derived(g, npu_mish, {"self": "input"}, "grad", ("self",))


@fused("npu_silu(self/input)", "npu_silu_")
def npu_silu(g: Given) -> dict[str, Expected]:
    y = alone(g.tensor("self"), silu, g.unit("self"))
    return {"output.0": y, "inplace.input.0": y}


@fused("npu_gelu(self/x/input, approximate='none')")
def npu_gelu(g: Given) -> Expected:
    return alone(g.tensor("self"), _gelu_of(g, "approximate"), g.unit("self"))


@fused("npu_gelu_backward(grad_output, self, approximate='none')", differentiable=False)
def npu_gelu_backward(g: Given) -> dict[str, Expected]:
    return derived(g, npu_gelu, {"self": "self", "approximate": "approximate"}, "grad_output", ("self",))


@fused("npu_gelu_mul(input/self, approximate='none')")
def npu_gelu_mul(g: Given) -> Expected:
    return gated_halves(g.tensor("input"), _gelu_of(g, "approximate"), g.unit("input"))


@fused("npu_geglu(self/input/x, dim=-1, approximate=1, activate_left=False)")
def npu_geglu(g: Given) -> dict[str, Expected]:
    x, at = _last(g.tensor("self"), g.number("dim"))
    f, left = (gelu_tanh if g.number("approximate") else gelu), bool(g["activate_left"])
    y, unit = gated_halves(x, f, g.unit("self"), gate_first=left), g.unit("self")
    return {"output.0": _back(y, at), "output.1": _back(alone(x.chunk(2, -1)[0 if left else 1], f, unit), at)}


_EXACT = 0.0
"""Of `Expected.unit`: nothing is rounded."""


def _moved(g: Given, name: str) -> tuple[Any, list[int], list[int]]:
    x = g.stored(name)
    perm, shape = g.integers("perm") or [], g.integers("shape") or []
    if math.prod(shape) != x.numel() or sorted(perm) != list(range(len(perm))):
        raise Declined(f"perm {perm} and shape {shape} do not fit an input {list(x.shape)}")
    return x.to(g.dtype) if x.is_floating_point() else x, perm, shape


def _as_it_is(value: Any) -> Expected:
    return Expected(value, unit=_EXACT) if value.is_floating_point() else Expected(value)


@fused("npu_confusion_transpose(self/data, perm, shape, transpose_first)")
def npu_confusion_transpose(g: Given) -> Expected:
    x, perm, shape = _moved(g, "self")
    if len(perm) != (x.dim() if g["transpose_first"] else len(shape)):
        raise Declined(f"perm {perm} does not fit")
    return _as_it_is(x.permute(perm).reshape(shape) if g["transpose_first"] else x.reshape(shape).permute(perm))


@fused("npu_confusion_transpose_backward(grad, perm, shape, transpose_first)")
def npu_confusion_transpose_backward(g: Given) -> Expected:
    """shape: with transpose_first the input's, else what it was reshaped to [msprobe's benchmark function]."""
    up, perm, shape = _moved(g, "grad")
    if len(perm) != len(shape):
        raise Declined(f"perm {perm} does not fit shape {shape}")
    back = [perm.index(k) for k in range(len(perm))]
    moved = [shape[p] for p in perm]
    return _as_it_is(up.reshape(moved).permute(back))


@fused("npu_sort_v2(self/x, dim=-1, descending=False, out=None)")
def npu_sort_v2(g: Given) -> dict[str, Expected]:
    x = g.stored("self")
    values = torch.sort(x.to(g.dtype) if x.is_floating_point() else x, int(g.number("dim")), bool(g["descending"]))[0]
    return {"output.0": _as_it_is(values), "inplace.input.out": _as_it_is(values)}


@fused("npu_dtype_cast(self/input, dtype, input_dtype=None)", "_npu_dtype_cast")
def npu_dtype_cast(g: Given) -> Expected:
    """The captured output says which dtype; an operator's integer code does not."""
    x, out = g.stored("self"), g.output(0)
    dtype = g.call.outputs["output.0"].dtype if out is not None else g["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise Declined("its dtype was not captured")
    if not x.is_floating_point() or not dtype.is_floating_point:
        return Expected(x.to(dtype).to(g.dtype) if dtype.is_floating_point else x.to(dtype), unit=_EXACT)
    wide = x.to(g.dtype)
    return Expected(wide + (wide.to(dtype).to(g.dtype) - wide).detach(), unit=_EXACT)


@fused("npu_linear(input/x, weight, bias=None)")
def npu_linear(g: Given) -> Expected:
    x, weight = g.tensor("input"), g.tensor("weight")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise Declined(f"weight {list(weight.shape)} does not fit an input of width {x.shape[-1]}")
    return biased(product(x, weight), g.maybe("bias"), g.unit("input"))


@fused("npu_linear_backward(grad, input/input_data, weight)")
def npu_linear_backward(g: Given) -> dict[str, Expected]:
    up, x, weight = g.tensor("grad"), g.tensor("input"), g.tensor("weight")
    rows = up.flatten(0, -2) if up.dim() > 1 else up.unsqueeze(0)
    flat = x.reshape(len(rows), -1)
    if rows.shape[1] != weight.shape[0] or flat.shape[1] != weight.shape[1]:
        raise Declined("its gradient does not fit its input and weight")
    dx = product(up, weight.T)
    return {"output.0": replace(dx, value=dx.value.reshape(x.shape)), "output.1": product(rows.T, flat.T)}


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


_NAMES = ("var", "m", "v")


def _old(g: Given) -> tuple[Any, Any, Any, float]:
    """var, m, v before the step, and one rounding of theirs. Raises Declined."""
    held = g["out"] if g["out"] is not None else [g[n] for n in _NAMES]
    if not isinstance(held, (list, tuple)) or len(held) != 3 or not all(isinstance(t, torch.Tensor) for t in held):
        raise Declined("its variable and moments were not captured")
    new = [g.call.outputs.get(f"output.{k}") for k in range(3)]
    # what is noted after an operator that writes over its arguments is no argument any more
    if all(b is not None and a.shape == b.shape and torch.equal(a, b) for a, b in zip(held, new, strict=True)):
        raise Declined("its variable and moments were captured after they were written over")
    var, m, v = (t.to(g.dtype) for t in held)
    unit = max(float(torch.finfo(t.dtype).eps) / 2 for t in held)
    return var, m, v, unit


def _step(
    var: Any, change: tuple[Any, Any], m: tuple[Any, Any], v: tuple[Any, Any], beta: tuple[float, float],
    powers: tuple[float, float], unit: float,
) -> dict[str, Expected]:  # fmt: skip
    """var - change, and the moments; of each its value, and the size of what was added up. What 1 - beta and 1 - power
    lose in float32 all elements share."""
    lost = [SUM / (1.0 - b) for b in beta]
    rate = sum(SUM / (1.0 - p) for p in powers)
    total = var - change[0]
    shared = (rate + sum(lost)) * float(change[1].detach().norm() / total.detach().norm().clamp(min=1e-300))
    noise = combined((4.0 * unit + rate + sum(lost)) * change[1], ROUNDED * unit * var.abs())
    made = [Expected(total, noise, common=shared)]
    made += [Expected(new, 2.0 * unit * size, common=part) for (new, size), part in zip((m, v), lost, strict=True)]
    return {role: e for k, e in enumerate(made) for role in (f"output.{k}", f"inplace.input.{_NAMES[k]}",
                                                             f"inplace.input.out.{k}")}  # fmt: skip


def _powers(*values: float) -> tuple[float, float]:
    if not all(0.0 <= p < 1.0 for p in values):
        raise Declined("its betas or their powers are not below 1: nothing is defined")
    return values[0], values[1]


@fused(
    "npu_apply_adam(beta1_power, beta2_power, lr, beta1, beta2, epsilon, grad, use_locking=None, use_nesterov=None,"
    "out=None, var=None, m=None, v=None)"
)
def npu_apply_adam(g: Given) -> dict[str, Expected]:
    var, m, v, unit = _old(g)
    up, b1, b2 = g.tensor("grad"), g.number("beta1"), g.number("beta2")
    beta, (p1, p2) = _powers(b1, b2), _powers(g.number("beta1_power"), g.number("beta2_power"))
    new_m, new_v = m + (1.0 - b1) * (up - m), v + (1.0 - b2) * (up * up - v)
    rate = g.number("lr") * (1.0 - p2) ** 0.5 / (1.0 - p1)
    along = b1 * new_m + (1.0 - b1) * up if g["use_nesterov"] else new_m
    sizes = m.abs() + (1.0 - b1) * (up.abs() + m.abs()), v.abs() + (1.0 - b2) * (up * up + v.abs())
    # an error of a moment that nearly cancels is that of its parts
    change, size = (rate * s / (g.number("epsilon") + new_v.sqrt()) for s in (along, sizes[0] + up.abs() * (1.0 - b1)))
    return _step(var, (change, size.abs()), (new_m, sizes[0]), (new_v, sizes[1]), beta, (p1, p2), unit)


@fused(
    "npu_apply_adam_w(beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon/eps, grad, max_grad_norm=None,"
    "amsgrad=None, maximize=None, out=None, var=None, m=None, v=None)"
)
def npu_apply_adam_w(g: Given) -> dict[str, Expected]:
    var, m, v, unit = _old(g)
    b1, b2, lr = g.number("beta1"), g.number("beta2"), g.number("lr")
    up = -g.tensor("grad") if g["maximize"] else g.tensor("grad")
    new_m, new_v = b1 * m + (1.0 - b1) * up, b2 * v + (1.0 - b2) * up * up
    largest = new_v
    if g["amsgrad"]:
        if g["max_grad_norm"] is None:
            raise Declined("max_grad_norm was not captured, and amsgrad needs it")
        largest = torch.maximum(g.tensor("max_grad_norm"), new_v)
    beta = _powers(b1, b2)
    p1, p2 = _powers(g.number("beta1_power") * b1, g.number("beta2_power") * b2)
    deviation = (largest / (1.0 - p2)).sqrt() + g.number("epsilon")
    sizes = b1 * m.abs() + (1.0 - b1) * up.abs(), new_v
    change, size = (lr * s / (1.0 - p1) / deviation for s in (new_m, sizes[0]))
    kept = var * (1.0 - lr * g.number("weight_decay"))
    return _step(kept, (change, size.abs()), (new_m, sizes[0]), (new_v, sizes[1]), beta, (p1, p2), unit)


def _rotated(x: Any, mode: str, matrix: Any | None = None) -> Any:
    if matrix is not None:
        return x @ matrix
    if x.shape[-1] % 2:
        raise Declined("an odd last dimension has no pairs")
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    if mode in ("interleave", "interleaved"):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    raise Declined(f"rotary_mode {mode!r} is unknown")


def _turned(x: Any, cos: Any, sin: Any, other: Any, unit: float) -> Expected:
    a, b = x * cos, other * sin
    if a.shape != x.shape or b.shape != x.shape:
        raise Declined("its cosines do not fit its input")
    noise = ROUNDED * unit * (a * a + b * b).sqrt()
    return Expected(a + b, noise, bound=2.0 * unit * (a.abs() + b.abs()) + subnormal(unit, 2.0))


@fused("npu_rotary_mul(self/input/x, r1, r2, rotary_mode='half', rotate=None)")
def npu_rotary_mul(g: Given) -> Expected:
    x, matrix = g.tensor("self"), g.maybe("rotate")
    y = _turned(x, g.tensor("r1"), g.tensor("r2"), _rotated(x, str(g["rotary_mode"]), matrix), g.unit("self"))
    return y if matrix is None else Expected(y.value, y.noise)


@fused("npu_rotary_mul_backward(grad/dy_tensor, self/x, r1, r2, rotary_mode='half')", differentiable=False)
def npu_rotary_mul_backward(g: Given) -> dict[str, Expected]:
    """Gradients of x, and of both tables, summed over what they were broadcast to."""
    names = {n: n for n in ("self", "r1", "r2", "rotary_mode")}
    return derived(g, npu_rotary_mul, names, "grad", ("self", "r1", "r2"))


@fused("npu_apply_rotary_pos_emb(query, key, cos, sin, layout='BSND', rotary_mode='half')")
def npu_apply_rotary_pos_emb(g: Given) -> dict[str, Expected]:
    """Both are turned, and written over."""
    cos, sin, mode, unit = g.tensor("cos"), g.tensor("sin"), str(g["rotary_mode"]), g.unit("query")
    found: dict[str, Expected] = {}
    for k, name in enumerate(("query", "key")):
        x = g.tensor(name)
        y = _turned(x, cos, sin, _rotated(x, mode), unit)
        found |= dict.fromkeys((f"output.{k}", f"inplace.input.{k}", f"inplace.input.{name}"), y)
    return found


FILL = -10000.0
_EXP = 2.0**-20
"""Relative error of an exponential and of its sum in float32: some units (chosen; torch's own are within)."""


def _mask(g: Given, shape: Any) -> Any:
    """bool of ``shape``, True where masked."""
    mask = g.stored("mask")
    if bool(g["fixed_triu_mask"]):
        mask = torch.ones(tuple(mask.shape), dtype=torch.bool, device=mask.device).triu(1)
    try:
        return mask.bool().expand(tuple(shape))
    except RuntimeError:
        raise Declined(f"a mask {list(mask.shape)} does not fit an input {list(shape)}") from None


@fused("npu_scaled_masked_softmax(x, mask, scale=1, fixed_triu_mask=False)")
def npu_scaled_masked_softmax(g: Given) -> Expected:
    x, unit = g.tensor("x"), g.unit("x")
    mask = _mask(g, x.shape)
    scores = (x * g.number("scale")).masked_fill(mask, FILL)
    p = torch.softmax(scores, -1)
    mine = g.output(0)
    whole = mask.all(-1, keepdim=True)
    if mine is not None and mine.shape == p.shape and bool(whole.any()):
        p = torch.where(whole & (mine.sum(-1, keepdim=True) < 0.5), 0.0, p)
    step = (ROUNDED * unit * scores).masked_fill(mask, 0.0).square()
    # d p_i = p_i (e_i - sum p_j e_j)
    spread = (step + (p * p * step).sum(-1, keepdim=True)).sqrt()
    return Expected(p, p * (spread + _EXP))


@fused("npu_scaled_masked_softmax_backward(y_grad, y, mask, scale, fixed_triu_mask)")
def npu_scaled_masked_softmax_backward(g: Given) -> Expected:
    up, y, scale = g.tensor("y_grad"), g.tensor("y"), g.number("scale")
    products = up * y
    total, n = products.sum(-1, keepdim=True), y.shape[-1]
    dx = ((up - total) * y * scale).masked_fill(_mask(g, y.shape), 0.0)
    sums = SUM * n**0.5 * products.abs().sum(-1, keepdim=True)
    unit = g.unit("y_grad")
    noise = combined((sums + 2.0 * SUM * (up.abs() + total.abs())) * (y * scale).abs(), ROUNDED * unit * dx.abs())
    size = gamma(n + 8) * products.abs().sum(-1, keepdim=True) + 4 * SUM * (up.abs() + total.abs())
    least = subnormal(unit, abs(scale))
    return Expected(dx, noise + ROUNDED * least, bound=size * (y * scale).abs() + 2.0 * unit * dx.abs() + least)


def _class_weights(g: Given, logits: Any, target: Any) -> tuple[Any, Any]:
    """(weights of classes, weight of each row: 0 where its target is ignored)."""
    classes = logits.shape[1]
    weight = g.maybe("weight")
    weight = torch.ones(classes, dtype=g.dtype, device=logits.device) if weight is None else weight
    ignored = target == int(g.number("ignore_index"))
    if not bool(((target >= 0) & (target < classes) | ignored).all()):
        raise Declined("its targets are no classes")
    rows = weight[torch.where(ignored, 0, target)] * ~ignored
    return weight, rows


def _check_loss(g: Given, logits: Any, target: Any) -> None:
    if logits.dim() != 2 or tuple(target.shape) != (len(logits),):
        raise Declined("its logits and targets have an unknown form")
    if g["reduction"] not in ("mean", "sum", "none"):
        raise Declined(f"reduction {g['reduction']!r} is unknown")
    if g.number("lse_square_scale_for_zloss"):
        raise Declined("its z loss is not in the documents")


@fused(
    "npu_cross_entropy_loss(input, target, weight=None, reduction='mean', ignore_index=-100, label_smoothing=0.0,"
    "lse_square_scale_for_zloss=0.0, return_zloss=False)"
)
def npu_cross_entropy_loss(g: Given) -> dict[str, Expected]:
    logits, target = g.tensor("input"), g.stored("target").long()
    _check_loss(g, logits, target)
    weight, rows = _class_weights(g, logits, target)
    log_p = torch.log_softmax(logits, -1)
    smooth = g.number("label_smoothing")
    picked = -log_p.gather(1, torch.where(rows > 0, target, 0).unsqueeze(1)).squeeze(1) * rows
    spread = -(log_p * weight).sum(-1) * (target != int(g.number("ignore_index")))
    each = (1.0 - smooth) * picked + smooth / logits.shape[1] * spread
    size = _EXP * (logits.detach().abs().amax(-1) + log_p.detach().abs().amax(-1) + 1.0)
    noise = size * torch.where(rows > 0, weight.abs().amax(), 0.0)
    if g["reduction"] != "none":
        total = rows.sum() if g["reduction"] == "mean" else torch.ones((), dtype=g.dtype)
        each, noise = (each.sum() / total).reshape(1), (noise.sum() / total).reshape(1)
    # a loss may be summed from log-probabilities that were rounded
    noise = combined(noise, g.unit("input") * each.detach().abs())
    return {"output.0": Expected(each, noise), "output.1": Expected(log_p, size.unsqueeze(1).expand_as(log_p))}


@fused(
    "npu_cross_entropy_loss_backward(grad_loss, log_prob, target, weight=None, grad_zloss=None, lse_for_zloss=None,"
    "reduction='mean', ignore_index=-100, label_smoothing=0.0, lse_square_scale_for_zloss=0.0)"
)
def npu_cross_entropy_loss_backward(g: Given) -> Expected:
    """dL/dz = p sum(q) - q with q what each class of a row counts: (1 - s) w_t at the target and s w_c / C."""
    log_p, target, up = g.tensor("log_prob"), g.stored("target").long(), g.tensor("grad_loss")
    _check_loss(g, log_p, target)
    weight, rows = _class_weights(g, log_p, target)
    smooth, classes = g.number("label_smoothing"), log_p.shape[1]
    counts = torch.zeros_like(log_p).scatter(1, torch.where(rows > 0, target, 0).unsqueeze(1),
                                             ((1.0 - smooth) * rows).unsqueeze(1))  # fmt: skip
    counts = counts + smooth / classes * weight * (target != int(g.number("ignore_index"))).unsqueeze(1)
    if g["reduction"] == "mean":
        up = up / rows.sum()
    p = log_p.exp()
    total = counts.sum(-1, keepdim=True)
    dz = (p * total - counts) * up.reshape(-1, 1)
    size = (p * total * (log_p.abs() + 1.0) + counts) * up.reshape(-1, 1).abs()
    return Expected(dz, combined(_EXP * size, ROUNDED * g.unit("log_prob") * size))


def _chosen(g: Given, weights: Any, order: Any, k: int, unit: float) -> Any:
    """The captured experts where they may be chosen, else those of the exact order."""
    mine = g.call.outputs.get("output.1")
    if mine is None or mine.shape != order.shape:
        return order
    ids = mine.long()
    inside = (ids >= 0) & (ids < weights.shape[-1])
    theirs = weights.gather(-1, torch.where(inside, ids, 0))
    exact = weights.gather(-1, order)
    near = (theirs - exact).abs() <= (2.0 * unit + 4.0 * _EXP) * exact
    ordered = ids.sort(-1)[0]
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1, keepdim=True) if k > 1 else torch.zeros_like(inside)
    return torch.where(inside & near & ~twice, ids, order)


def _routed(g: Given, renorm: bool) -> tuple[Any, Any, Any, Any, int]:
    """(exact weights of the chosen, chosen experts, rows that are not finished, the whole softmax, k)"""
    x, k = g.tensor("x"), int(g.number("k"))
    if x.dim() not in (2, 3) or not 0 < k <= x.shape[-1]:
        raise Declined(f"k {k} does not fit an input {list(x.shape)}")
    p = torch.softmax(x, -1)
    y, order = torch.topk(p, k, -1)
    chosen = _chosen(g, p.detach(), order, k, g.unit("x"))
    if renorm:
        y = torch.softmax(x.gather(-1, order), -1)
    finished = g["finished"]
    rows = torch.ones(x.shape[:-1], dtype=torch.bool) if finished is None else ~finished.bool().reshape(x.shape[:-1])
    return y, torch.where(rows.unsqueeze(-1), chosen, x.shape[-1]), rows, p, k


def _weights(y: Any, rows: Any) -> Expected:
    """Rows that are finished take no part, and what stands there is not in the document."""
    told = rows if rows.dim() == 1 else rows.all(-1)
    why = "" if bool(told.all()) else "rows that are finished"
    return Expected(y, _EXP * y, rows=None if bool(told.all()) else told, reason=why)


@fused("npu_moe_gating_top_k_softmax(x, finished/finished_optional=None, k=1)")
def npu_moe_gating_top_k_softmax(g: Given) -> dict[str, Expected]:
    y, chosen, rows, _, k = _routed(g, renorm=False)
    n = rows.numel()
    numbers = torch.arange(n * k).reshape(k, n).T.reshape(chosen.shape)
    return {"output.0": _weights(y, rows), "output.1": Expected(chosen), "output.2": Expected(numbers)}


@fused("npu_moe_gating_top_k_softmax_v2(x, k=1, finished=None, renorm=0, output_softmax=False)")
def npu_moe_gating_top_k_softmax_v2(g: Given) -> dict[str, Expected]:
    y, chosen, rows, p, _ = _routed(g, renorm=bool(g["renorm"]))
    found = {"output.0": _weights(y, rows), "output.1": Expected(chosen)}
    return found | ({"output.2": Expected(p, _EXP * p)} if g["output_softmax"] and not g["renorm"] else {})
