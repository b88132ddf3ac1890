"""Optimisers of torch_npu: one step of Adam and AdamW.

Formulas: npu_apply_adam, m + (1 - beta1) (g - m), v + (1 - beta2) (g*g - v),
var - lr sqrt(1 - beta2_power) / (1 - beta1_power) * m / (eps + sqrt(v)), with Nesterov beta1 m + (1 - beta1) g in m's
place [torch_npu's document; TensorFlow's ApplyAdam, which it is named after]. npu_apply_adam_w, which multiplies both
powers by their beta first, takes lr * weight_decay of var away, and with amsgrad has max(max_grad_norm, v) in the place
of v [op-plugin's test_npu_apply_adam_w, whose maximize negates the gradient; msprobe's benchmark function draws
max_grad_norm at random, which no kernel can meet]. The old values must have been captured before the call.
Noise: each of some ten float32 operations, or those of the tensors' dtype, rounds what it adds.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, SUM, Declined, Expected, combined
from vllm_accprobe.opcheck.references.fused.fused_calls import Given, fused

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
    shared = (rate + sum(lost)) * float(change[1].norm() / total.norm().clamp(min=1e-300))
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
