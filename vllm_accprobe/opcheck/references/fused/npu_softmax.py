"""Softmaxes of torch_npu: scaled and masked, and the cross entropy, with their gradients.

Formulas: npu_scaled_masked_softmax, softmax of x * scale with -10000 in the place of what is masked, or of the upper
triangle with fixed_triu_mask [msprobe's and Ascend/pytorch's benchmark functions]; its backward is given the softmax y:
(dy - sum dy y) y scale, 0 where masked. npu_cross_entropy_loss, loss and log-probabilities
[op-plugin's test_npu_cross_entropy_loss, torch.nn.CrossEntropyLoss' documents].
A row that is masked whole is not defined by a fill value: some kernels give equal shares, some zeros; the captured one
is held against the nearer of the two. Noise: scores may be rounded once they are scaled; the sums are float32's.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, SUM, Declined, Expected, combined, gamma
from vllm_accprobe.opcheck.references.fused.fused_calls import Given, fused
from vllm_accprobe.opcheck.references.parts import subnormal

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
