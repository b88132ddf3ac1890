"""Operators of torch_npu besides attention: activations, norms, rotary, softmax, routers, moves, optimisers.

Formulas: torch_npu's documents and op-plugin's tests of each operator, on the formulas of activations.py, norms.py,
rotary.py and linear.py. npu_fast_gelu is x exp(0.851 (x - |x|)) / (1 + exp(-1.702 |x|)), which is x * sigmoid(1.702 x).
npu_deep_norm: the LayerNorm of alpha x + gx, with mean and reciprocal deviation before it. npu_apply_adam: m + (1 -
beta1) (g - m), v + (1 - beta2) (g*g - v), var - lr sqrt(1 - beta2_power) / (1 - beta1_power) * m / (eps + sqrt(v)),
with Nesterov beta1 m + (1 - beta1) g in m's place; npu_apply_adam_w multiplies both powers by their beta first, takes
lr * weight_decay of var away, and with amsgrad has max(max_grad_norm, v) in the place of v. npu_scaled_masked_softmax:
-10000 in the place of what is masked; a row that is masked whole has equal shares or zeros, and the nearer counts.
Routers: y, experts = topk(softmax(x), k); an expert is right if its weight is within rounding of the k-th largest, and
no expert is named twice. Gradients: by autograd on the forward's formula (`backward`) where no formula is written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected, combined, decline_if
from vllm_accprobe.opcheck.references.activations import (
    alone,
    gated,
    gated_along,
    gelu,
    gelu_tanh,
    mish,
    quick_gelu,
    silu,
)
from vllm_accprobe.opcheck.references.fused.fused_calls import FusedArguments, backward, fused
from vllm_accprobe.opcheck.references.linear import biased, product
from vllm_accprobe.opcheck.references.norms import (
    flat_last,
    group_normed,
    kept_shape,
    layer_normed,
    rms_and_root,
    rms_gradient,
)
from vllm_accprobe.opcheck.references.parts import reshaped
from vllm_accprobe.opcheck.references.rotary import table_rotated, turn
from vllm_accprobe.opcheck.roundings import APPROXIMATE, ROUNDED, SUM, gamma, subnormal, sum_of_two, within_float32


def _by_place(*outputs: Expected) -> dict[str, Expected]:
    return {f"output.{k}": y for k, y in enumerate(outputs)}


def _gelu_of(g: FusedArguments) -> Callable[[Any], Any]:
    kind = g["approximate"]
    decline_if(kind not in ("none", "tanh"), f"approximate {kind!r} is unknown")
    return gelu_tanh if kind == "tanh" else gelu


def _alone(f: Callable[[Any], Any]) -> Callable[[FusedArguments], Expected]:
    return lambda g: alone(g.tensor("self"), f, g.unit("self"))


npu_swiglu = fused("npu_swiglu(self/input/x, dim=-1)")(
    lambda g: gated_along(g.tensor("self"), int(g.number("dim")), silu, g.unit("self"))
)
npu_fast_gelu = fused("npu_fast_gelu(self/input/input0/x)", "fast_gelu")(_alone(quick_gelu))
npu_mish = fused("npu_mish(self/input)")(_alone(mish))
npu_silu = fused("npu_silu(self/input)", "npu_silu_")(
    lambda g: dict.fromkeys(("output.0", "inplace.input.0"), _alone(silu)(g))
)
npu_gelu = fused("npu_gelu(self/x/input, approximate='none')")(lambda g: _alone(_gelu_of(g))(g))
npu_gelu_mul = fused("npu_gelu_mul(input/self, approximate='none')")(
    lambda g: gated(g.tensor("input"), _gelu_of(g), g.unit("input"))
)


@fused("npu_geglu(self/input/x, dim=-1, approximate=1, activate_left=False)")
def npu_geglu(g: FusedArguments) -> dict[str, Expected]:
    """A * gelu(B), or gelu(A) * B with activate_left; and gelu as second output [op-plugin's test_npu_geglu]."""
    x, dim, unit = g.tensor("self"), int(g.number("dim")), g.unit("self")
    f, left = (gelu_tanh if g.number("approximate") else gelu), bool(g["activate_left"])
    y = gated_along(x, dim, f, unit, gate_first=left)
    return _by_place(y, alone(x.chunk(2, dim)[0 if left else 1], f, unit))


npu_swiglu_backward = backward(
    "npu_swiglu_backward(grad_output/grad, self/x, dim=-1)", npu_swiglu, "grad_output", ("self",)
)
npu_fast_gelu_backward = backward("npu_fast_gelu_backward(grad, self/input_x)", npu_fast_gelu, "grad", ("self",))
npu_mish_backward = backward("npu_mish_backward(grad, self/input)", npu_mish, "grad", ("self",))
npu_gelu_backward = backward(
    "npu_gelu_backward(grad_output, self, approximate='none')", npu_gelu, "grad_output", ("self",)
)


def _moved(g: FusedArguments, name: str) -> tuple[Any, list[int], list[int]]:
    x = _stored(g, name)
    perm, shape = g.integers("perm") or [], g.integers("shape") or []
    if math.prod(shape) != x.numel() or sorted(perm) != list(range(len(perm))):
        raise Declined(f"perm {perm} and shape {shape} do not fit an input {list(x.shape)}")
    return x, perm, shape


def _stored(g: FusedArguments, name: str) -> Any:
    x = g.stored(name)
    return x.to(g.dtype) if x.is_floating_point() else x


def _as_it_is(value: Any) -> Expected:
    """Nothing is rounded. The value stays in its dtype, and differentiable."""
    return Expected(value, unit=0.0) if value.is_floating_point() else Expected(value)


@fused("npu_confusion_transpose(self/data, perm, shape, transpose_first)")
def npu_confusion_transpose(g: FusedArguments) -> Expected:
    x, perm, shape = _moved(g, "self")
    decline_if(len(perm) != (x.dim() if g["transpose_first"] else len(shape)), f"perm {perm} does not fit")
    return _as_it_is(x.permute(perm).reshape(shape) if g["transpose_first"] else x.reshape(shape).permute(perm))


@fused("npu_confusion_transpose_backward(grad, perm, shape, transpose_first)")
def npu_confusion_transpose_backward(g: FusedArguments) -> Expected:
    """shape: with transpose_first the input's, else what it was reshaped to [msprobe's benchmark function]."""
    up, perm, shape = _moved(g, "grad")
    decline_if(len(perm) != len(shape), f"perm {perm} does not fit shape {shape}")
    moved = up.reshape([shape[p] for p in perm])
    return _as_it_is(moved.permute([perm.index(k) for k in range(len(perm))]))


@fused("npu_sort_v2(self/x, dim=-1, descending=False, out=None)")
def npu_sort_v2(g: FusedArguments) -> dict[str, Expected]:
    values = torch.sort(_stored(g, "self"), int(g.number("dim")), bool(g["descending"]))[0]
    return dict.fromkeys(("output.0", "inplace.input.out"), _as_it_is(values))


@fused("npu_dtype_cast(self/input, dtype, input_dtype=None)", "_npu_dtype_cast")
def npu_dtype_cast(g: FusedArguments) -> Expected:
    """The captured output says which dtype; an operator's integer code does not."""
    x, out = g.stored("self"), g.output(0)
    dtype = g.call.outputs["output.0"].dtype if out is not None else g["dtype"]
    decline_if(not isinstance(dtype, torch.dtype), "its dtype was not captured")
    if not x.is_floating_point() or not dtype.is_floating_point:
        return Expected(x.to(dtype).to(g.dtype) if dtype.is_floating_point else x.to(dtype), unit=0.0)
    wide = x.to(g.dtype)
    return Expected(wide + (wide.to(dtype).to(g.dtype) - wide).detach(), unit=0.0)


@fused("npu_linear(input/x, weight, bias=None)")
def npu_linear(g: FusedArguments) -> Expected:
    x, weight = g.tensor("input"), g.tensor("weight")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise Declined(f"weight {list(weight.shape)} does not fit an input of width {x.shape[-1]}")
    return biased(product(x, weight), g.maybe("bias"), g.unit("input"))


@fused("npu_linear_backward(grad, input/input_data, weight)")
def npu_linear_backward(g: FusedArguments) -> dict[str, Expected]:
    up, x, weight = g.tensor("grad"), g.tensor("input"), g.tensor("weight")
    rows = up.flatten(0, -2) if up.dim() > 1 else up.unsqueeze(0)
    flat = x.reshape(len(rows), -1)
    if rows.shape[1] != weight.shape[0] or flat.shape[1] != weight.shape[1]:
        raise Declined("its gradient does not fit its input and weight")
    dx = product(up, weight.T)
    return _by_place(replace(dx, value=dx.value.reshape(x.shape)), product(rows.T, flat.T))


@fused("npu_rms_norm(self/input/x, gamma/weight, epsilon/eps=1e-06)")
def npu_rms_norm(g: FusedArguments) -> dict[str, Expected]:
    return _by_place(*rms_and_root(g.tensor("self"), g.tensor("gamma"), g.number("epsilon"), g.unit("self")))


@fused("npu_add_rms_norm(x1, x2, gamma, epsilon=1e-06)")
def npu_add_rms_norm(g: FusedArguments) -> dict[str, Expected]:
    total, unit = g.tensor("x1") + g.tensor("x2"), g.unit("x1")
    normed = rms_and_root(total, g.tensor("gamma"), g.number("epsilon"), unit, before=1)
    return _by_place(*normed, sum_of_two(total, unit))


@fused("npu_rms_norm_backward(dy, self/x, gamma, rstd)")
def npu_rms_norm_backward(g: FusedArguments) -> dict[str, Expected]:
    up, x, weight, rstd = (g.tensor(n) for n in ("dy", "self", "gamma", "rstd"))
    return _by_place(*rms_gradient(up, x, weight, rstd, g.unit("dy", "self")))


def _moments(x: Any, eps: float) -> tuple[Expected, Expected]:
    """Mean and reciprocal deviation over the last dimension [..., 1], as a kernel sums them in float32."""
    mean = x.mean(-1, keepdim=True)
    root = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    n, size = x.shape[-1], x.detach().abs().mean(-1, keepdim=True)
    shift = SUM * n**0.5 * size
    # d log root = -centred dmean / variance, which is 0 in sum: of second order
    r = Expected(root, combined(2.0**-20 * root.abs(), (shift * root).square() * root),
                 bound=(APPROXIMATE + gamma(n + 8) + (gamma(n + 4) * size * root).square()) * root.abs())  # fmt: skip
    return Expected(mean, shift, bound=gamma(n + 4) * size), within_float32(r, x)


@fused("npu_layer_norm_eval(input/data/self, normalized_shape, weight=None, bias=None, eps=1e-05)")
def npu_layer_norm_eval(g: FusedArguments) -> Expected:
    """msprobe's benchmark function leaves weight and bias out."""
    x, shape = g.tensor("input"), g.integers("normalized_shape") or []
    if not shape or tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
        raise Declined(f"normalized_shape {shape} does not fit an input {list(x.shape)}")
    return layer_normed(x, g.maybe("weight"), g.maybe("bias"), g.number("eps"), g.unit("input"), len(shape))


@fused("npu_deep_norm(x, gx, beta, gamma, alpha=0.3, epsilon=1e-06)")
def npu_deep_norm(g: FusedArguments) -> dict[str, Expected]:
    x, weight, eps = g.tensor("x"), g.tensor("gamma"), g.number("epsilon")
    total = g.number("alpha") * x + g.tensor("gx")
    m, r = (reshaped(y, kept_shape(x, weight)) for y in _moments(flat_last(total, weight), eps))
    y = layer_normed(total, weight, g.tensor("beta"), eps, g.unit("x"), weight.dim(), before=1)
    return _by_place(m, r, y)


@fused("npu_group_norm_silu(input/x/self, weight, bias, group/num_groups, eps=1e-05)")
def npu_group_norm_silu(g: FusedArguments) -> dict[str, Expected]:
    """SiLU moves an error of the norm by at most 1.1 times [its derivative's largest value]."""
    x, groups, unit, eps = g.tensor("input"), int(g.number("group")), g.unit("input"), g.number("eps")
    z = group_normed(x, groups, g.maybe("weight"), g.maybe("bias"), eps, unit)
    gate = torch.sigmoid(z.value)
    slope = (gate * (1.0 + z.value * (1.0 - gate))).abs()
    y = z.value * gate
    out = replace(z, value=y, noise=combined(slope * z.noise, ROUNDED * unit * y.abs()), bound=None)
    # they have the input's dtype, which a kernel may round to
    m, r = (reshaped(y, y.value.shape[:-1]) for y in _moments(x.reshape(x.shape[0], groups, -1), eps))
    return _by_place(out, m, r)


_NAMES = ("var", "m", "v")


def _old(g: FusedArguments) -> tuple[Any, Any, Any, float]:
    """var, m, v before the step, and one rounding of theirs. Raises Declined."""
    old = g["out"] if g["out"] is not None else [g[n] for n in _NAMES]
    if not isinstance(old, (list, tuple)) or len(old) != 3 or not all(isinstance(t, torch.Tensor) for t in old):
        raise Declined("its variable and moments were not captured")
    new = [g.call.outputs.get(f"output.{k}") for k in range(3)]
    # what is noted after an operator that writes over its arguments is no argument any more
    if all(b is not None and a.shape == b.shape and torch.equal(a, b) for a, b in zip(old, new, strict=True)):
        raise Declined("its variable and moments were captured after they were written over")
    var, m, v = (t.to(g.dtype) for t in old)
    unit = max(float(torch.finfo(t.dtype).eps) / 2 for t in old)
    return var, m, v, unit


def _step(
    var: Any, change: tuple[Any, Any], m: tuple[Any, Any], v: tuple[Any, Any], beta: tuple[float, float],
    powers: tuple[float, float], unit: float,
) -> dict[str, Expected]:  # fmt: skip
    """var - change, and the moments; of each its value, and the size of its terms. All elements share what 1 - beta
    loses."""
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
    decline_if(not all(0.0 <= p < 1.0 for p in values), "its betas or their powers are not below 1: nothing is defined")
    return values[0], values[1]


@fused(
    "npu_apply_adam(beta1_power, beta2_power, lr, beta1, beta2, epsilon, grad, use_locking=None, use_nesterov=None,"
    "out=None, var=None, m=None, v=None)"
)
def npu_apply_adam(g: FusedArguments) -> dict[str, Expected]:
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
def npu_apply_adam_w(g: FusedArguments) -> dict[str, Expected]:
    var, m, v, unit = _old(g)
    b1, b2, lr = g.number("beta1"), g.number("beta2"), g.number("lr")
    up = -g.tensor("grad") if g["maximize"] else g.tensor("grad")
    new_m, new_v = b1 * m + (1.0 - b1) * up, b2 * v + (1.0 - b2) * up * up
    largest = new_v
    if g["amsgrad"]:
        decline_if(g["max_grad_norm"] is None, "max_grad_norm was not captured, and amsgrad needs it")
        largest = torch.maximum(g.tensor("max_grad_norm"), new_v)
    beta = _powers(b1, b2)
    p1, p2 = _powers(g.number("beta1_power") * b1, g.number("beta2_power") * b2)
    deviation = (largest / (1.0 - p2)).sqrt() + g.number("epsilon")
    sizes = b1 * m.abs() + (1.0 - b1) * up.abs(), new_v
    change, size = (lr * s / (1.0 - p1) / deviation for s in (new_m, sizes[0]))
    kept = var * (1.0 - lr * g.number("weight_decay"))
    return _step(kept, (change, size.abs()), (new_m, sizes[0]), (new_v, sizes[1]), beta, (p1, p2), unit)


def _rotated(g: FusedArguments, x: Any, cos: Any, sin: Any, unit: float) -> Expected:
    """x cos + rotate(x) sin: (-x2, x1) of the halves (``half``) or of adjacent channels (``interleave``)."""
    mode, parts = str(g["rotary_mode"]), {"half": 2, "interleave": x.shape[-1], "interleaved": x.shape[-1]}
    decline_if(x.shape[-1] % 2, "an odd last dimension has no pairs")
    decline_if(mode not in parts, f"rotary_mode {mode!r} is unknown")
    return table_rotated(x, cos, sin, turn(x, parts[mode]), unit)


@fused("npu_rotary_mul(self/input/x, r1, r2, rotary_mode='half', rotate=None)")
def npu_rotary_mul(g: FusedArguments) -> Expected:
    x, cos, sin, matrix, unit = g.tensor("self"), g.tensor("r1"), g.tensor("r2"), g.maybe("rotate"), g.unit("self")
    if matrix is None:
        return _rotated(g, x, cos, sin, unit)
    return replace(table_rotated(x, cos, sin, x @ matrix, unit), bound=None)


npu_rotary_mul_backward = backward(
    "npu_rotary_mul_backward(grad/dy_tensor, self/x, r1, r2, rotary_mode='half')", npu_rotary_mul, "grad",
    ("self", "r1", "r2"),
)  # fmt: skip
"""Gradients of x, and of both tables, summed over what they were broadcast to."""


@fused("npu_apply_rotary_pos_emb(query, key, cos, sin, layout='BSND', rotary_mode='half')")
def npu_apply_rotary_pos_emb(g: FusedArguments) -> dict[str, Expected]:
    """Both are turned, and written over."""
    found: dict[str, Expected] = {}
    for k, name in enumerate(("query", "key")):
        y = _rotated(g, g.tensor(name), g.tensor("cos"), g.tensor("sin"), g.unit("query"))
        found |= dict.fromkeys((f"output.{k}", f"inplace.input.{k}", f"inplace.input.{name}"), y)
    return found


FILL = -10000.0
_EXP = 2.0**-20
"""Relative error of an exponential and of its sum in float32: some units (chosen; torch's own are within)."""


def _mask(g: FusedArguments, shape: Any) -> Any:
    """bool of ``shape``, True where masked."""
    mask = g.stored("mask")
    if bool(g["fixed_triu_mask"]):
        mask = torch.ones(tuple(mask.shape), dtype=torch.bool, device=mask.device).triu(1)
    try:
        return mask.bool().expand(tuple(shape))
    except RuntimeError:
        raise Declined(f"a mask {list(mask.shape)} does not fit an input {list(shape)}") from None


@fused("npu_scaled_masked_softmax(x, mask, scale=1, fixed_triu_mask=False)")
def npu_scaled_masked_softmax(g: FusedArguments) -> Expected:
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
def npu_scaled_masked_softmax_backward(g: FusedArguments) -> Expected:
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


def _class_weights(g: FusedArguments, logits: Any, target: Any) -> tuple[Any, Any]:
    """(weights of classes, weight of each row: 0 where its target is ignored)."""
    classes = logits.shape[1]
    weight = g.maybe("weight")
    weight = torch.ones(classes, dtype=g.dtype, device=logits.device) if weight is None else weight
    ignored = target == int(g.number("ignore_index"))
    decline_if(not bool(((target >= 0) & (target < classes) | ignored).all()), "its targets are no classes")
    rows = weight[torch.where(ignored, 0, target)] * ~ignored
    return weight, rows


def _check_loss(g: FusedArguments, logits: Any, target: Any) -> None:
    if logits.dim() != 2 or tuple(target.shape) != (len(logits),):
        raise Declined("its logits and targets have an unknown form")
    decline_if(g["reduction"] not in ("mean", "sum", "none"), f"reduction {g['reduction']!r} is unknown")
    decline_if(g.number("lse_square_scale_for_zloss"), "its z loss is not in the documents")


@fused(
    "npu_cross_entropy_loss(input, target, weight=None, reduction='mean', ignore_index=-100, label_smoothing=0.0,"
    "lse_square_scale_for_zloss=0.0, return_zloss=False)"
)
def npu_cross_entropy_loss(g: FusedArguments) -> dict[str, Expected]:
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
    return _by_place(Expected(each, noise), Expected(log_p, size.unsqueeze(1).expand_as(log_p)))


@fused(
    "npu_cross_entropy_loss_backward(grad_loss, log_prob, target, weight=None, grad_zloss=None, lse_for_zloss=None,"
    "reduction='mean', ignore_index=-100, label_smoothing=0.0, lse_square_scale_for_zloss=0.0)"
)
def npu_cross_entropy_loss_backward(g: FusedArguments) -> Expected:
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


def _chosen(g: FusedArguments, weights: Any, order: Any, k: int, unit: float) -> Any:
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


def _routed(g: FusedArguments, renorm: bool) -> tuple[Any, Any, Any, Any, int]:
    """(exact weights of the chosen, chosen experts, rows that are not finished, the whole softmax, k)"""
    x, k = g.tensor("x"), int(g.number("k"))
    decline_if(x.dim() not in (2, 3) or not 0 < k <= x.shape[-1], f"k {k} does not fit an input {list(x.shape)}")
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
    known = rows if rows.dim() == 1 else rows.all(-1)
    return Expected(y, _EXP * y, **({} if bool(known.all()) else {"rows": known, "reason": "rows that are finished"}))


@fused("npu_moe_gating_top_k_softmax(x, finished/finished_optional=None, k=1)")
def npu_moe_gating_top_k_softmax(g: FusedArguments) -> dict[str, Expected]:
    y, chosen, rows, _, k = _routed(g, renorm=False)
    n = rows.numel()
    numbers = torch.arange(n * k).reshape(k, n).T.reshape(chosen.shape)
    return _by_place(_weights(y, rows), Expected(chosen), Expected(numbers))


@fused("npu_moe_gating_top_k_softmax_v2(x, k=1, finished=None, renorm=0, output_softmax=False)")
def npu_moe_gating_top_k_softmax_v2(g: FusedArguments) -> dict[str, Expected]:
    y, chosen, rows, p, _ = _routed(g, renorm=bool(g["renorm"]))
    whole = [Expected(p, _EXP * p)] if g["output_softmax"] and not g["renorm"] else []
    return _by_place(_weights(y, rows), Expected(chosen), *whole)
