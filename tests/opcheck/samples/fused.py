"""Samples of torch_npu's fused operators as numpy defines them, and wrong kernels of each.

Every definition is written out here or in definitions.py, in float64; none uses the package. A wrong kernel is the same
definition with a fault.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from opcheck.samples.definitions import fast_gelu, gelu, gelu_tanh, layer, silu, softmax, turned
from opcheck.samples.dtypes import BRAIN, HALF, LONG, SINGLE
from opcheck.samples.sample import Array, Draw, Made, made, sample, wide

from vllm_accprobe.opcheck.reference import Call

Kernel = Callable[..., Any]
"""The arrays that an operator gives, or the only one."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class FusedCase:
    """args: draws (args, kwargs), tensors among them; right: the definition; wrong: by fault, a kernel with it;
    gradients: the inputs that have one; dtypes: of the tensors that are drawn."""

    args: Callable[[Draw], Arguments]
    right: Kernel
    wrong: Mapping[str, Kernel]
    gradients: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (BRAIN, HALF, SINGLE)


def bools(d: Draw, *shape: int) -> torch.Tensor:
    return torch.from_numpy(d.rng.random(shape) < 0.3)


# --- norms --------------------------------------------------------------------------------------------------------


def rms(x: Array, w: Array, epsilon: float = 1e-6, less: int = 0) -> tuple[Array, ...]:
    """less: what the mean divides by less than the width."""
    r = 1.0 / np.sqrt((x * x).sum(-1, keepdims=True) / (x.shape[-1] - less) + epsilon)
    return x * r * w, r


def _rms_case(d: Draw) -> Arguments:
    n, width = d.below(6, 12), d.below(90, 130)
    return (d(n, 3, width, scale=0.05), 1 + d(width, scale=0.2)), {"epsilon": 1e-4}


def add_rms(a: Array, b: Array, w: Array, epsilon: float = 1e-6) -> tuple[Array, ...]:
    return (*rms(a + b, w, epsilon), a + b)


def rms_backward(dy: Array, x: Array, w: Array, r: Array) -> tuple[Array, ...]:
    dx = np.empty_like(x)
    for i in np.ndindex(x.shape[:-1]):
        g = dy[i] * w
        dx[i] = (g - x[i] * r[i] * (g * x[i] * r[i]).mean()) * r[i]
    return dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(0)


def _rms_backward_case(d: Draw) -> Arguments:
    x, w = d(9, 64), 1 + d(64, scale=0.2)
    root = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
    return (d(9, 64), x, w, root), {}


def _layer_case(d: Draw) -> Arguments:
    width = d.below(60, 90)
    return (d(7, 3, width) + 1, [width], 1 + d(width, scale=0.3), d(width), 0.05), {}


def _normed(t: Array, eps: float) -> tuple[Array, Array, Array]:
    """The centred over its deviation, mean and reciprocal deviation over the last dimension."""
    m = t.mean(-1, keepdims=True)
    r = 1 / np.sqrt(((t - m) ** 2).mean(-1, keepdims=True) + eps)
    return (t - m) * r, m, r


def deep(x: Array, gx: Array, beta: Array, gamma: Array, alpha: float = 0.3, eps: float = 1e-6) -> tuple[Array, ...]:
    y, m, r = _normed(alpha * x + gx, eps)
    return m, r, y * gamma + beta


def group_norm(x: Array, w: Array, b: Array, group: int, eps: float = 1e-5) -> tuple[Array, ...]:
    y, m, r = _normed(x.reshape(len(x), group, -1), eps)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return y.reshape(x.shape) * w.reshape(shape) + b.reshape(shape), m[..., 0], r[..., 0]


def group_silu(x: Array, w: Array, b: Array, group: int, eps: float = 1e-5) -> tuple[Array, ...]:
    y, m, r = group_norm(x, w, b, group, eps)
    return silu(y), m, r


def _group_case(d: Draw) -> Arguments:
    return (d(5, 12, 4, d.below(4, 8)), 1 + d(12, scale=0.3), d(12), 3, 1e-3), {}


# --- activations ----------------------------------------------------------------------------------------------------


def gated(f: Callable[[Array], Array], first: bool = True) -> Kernel:
    """first: the half that goes through ``f``."""
    return lambda x: f(np.split(x, 2, -1)[not first]) * np.split(x, 2, -1)[first]


def mish(x: Array) -> Array:
    return x * np.tanh(np.log1p(np.exp(x)))


def geglu(x: Array, approximate: int, first: bool = False) -> tuple[Array, ...]:
    return gated(gelu, first)(x), gelu(np.split(x, 2, -1)[not first])


# --- what moves and multiplies --------------------------------------------------------------------------------------


def transpose(x: Array, perm: tuple[int, ...], shape: list[int], transpose_first: bool) -> Array:
    return x.reshape(shape).transpose(perm)


def transpose_back(up: Array, perm: tuple[int, ...], shape: list[int], transpose_first: bool) -> Array:
    """The input whose transposition is ``up``."""
    back = np.empty(up.size, up.dtype)
    back[transpose(np.arange(up.size), perm, shape, False).ravel()] = up.ravel()
    return back.reshape(shape)


def linear(x: Array, w: Array, b: Array = 0.0) -> Array:
    return np.einsum("...k,nk->...n", x, w) + b


def linear_backward(up: Array, x: Array, w: Array) -> tuple[Array, ...]:
    return np.einsum("tn,nk->tk", up, w), np.einsum("tn,tk->nk", up, x)


def rotary(x: Array, cos: Array, sin: Array, parts: int = 2) -> Array:
    return turned(x, cos, sin, parts)


def _rotary_case(d: Draw) -> Arguments:
    angle = d(1, 9, 1, 16, dtype=SINGLE)
    both = torch.cat((angle, angle), -1)
    return (d(4, 9, 5, 32), both.cos().to(d.dtype), both.sin().to(d.dtype)), {}


# --- softmax, routers -----------------------------------------------------------------------------------------------


def masked_softmax(x: Array, mask: Array, scale: float, fixed_triu_mask: bool) -> Array:
    return softmax(np.where(mask, -10000, x * scale))


def _masked_case(d: Draw) -> Arguments:
    return (d(4, 3, 8, d.below(20, 30)), None, 0.7, False), {}


def masked_softmax_backward(up: Array, y: Array, mask: Array, scale: float, triu: bool) -> Array:
    dx = np.empty_like(up)
    for i in np.ndindex(up.shape[:-1]):
        jacobian = np.diag(y[i]) - np.outer(y[i], y[i])
        dx[i] = jacobian @ up[i] * scale
    return np.where(np.broadcast_to(mask, up.shape), 0.0, dx)


def cross_entropy(
    x: Array, target: Array, weight: Array = None, reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Array, ...]:  # fmt: skip
    n, c = x.shape
    weight = np.ones(c) if weight is None else weight
    log_p = x - x.max(-1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
    losses, total = np.zeros(n), 0.0
    for i in range(n):
        if target[i] == ignore_index:
            continue
        losses[i] = -(1 - label_smoothing) * weight[target[i]] * log_p[i, target[i]]
        losses[i] -= label_smoothing / c * (weight * log_p[i]).sum()
        total += weight[target[i]]
    if reduction == "none":
        return losses, log_p
    return np.array([losses.sum() / (total if reduction == "mean" else 1)]), log_p


def _entropy_case(d: Draw) -> Arguments:
    target = d.ints(0, 37, 12, dtype=LONG)
    target[3] = 5
    return (d(12, 37), target, (1 + d(37, scale=0.2)).abs().float(), "none", 5, 0.1), {}


def gating(x: Array, finished: Array = None, k: int = 1) -> tuple[Array, ...]:
    p = softmax(x)
    ids = np.argsort(-p, -1, kind="stable")[..., :k]
    y = np.take_along_axis(p, ids, -1)
    if finished is not None:
        ids = np.where(finished[..., None], x.shape[-1], ids)
    n = ids.size // k
    return y, ids.astype(np.int32), np.arange(n * k, dtype=np.int32).reshape(k, n).T.reshape(ids.shape)


def _gating_wrong(x: Array, finished: Array = None, k: int = 1) -> tuple[Array, ...]:
    y, ids, rows = gating(x, None, k)
    return y, np.flip(ids, -1), rows


# --- optimisers -----------------------------------------------------------------------------------------------------


def adam(
    b1p: float, b2p: float, lr: float, b1: float, b2: float, eps: float, grad: Array, locking: Any, nesterov: Any,
    out: Any, power: float = 1.0,
) -> tuple[Array, ...]:  # fmt: skip
    var, m, v = out
    m = m + (1 - b1) * (grad - m)
    v = v + (1 - b2) * (grad * grad - v)
    rate = lr * math.sqrt(1 - power * b2p) / (1 - b1p)
    along = b1 * m + (1 - b1) * grad if nesterov else m
    return var - rate * along / (eps + np.sqrt(v)), m, v


def _adam_case(d: Draw) -> Arguments:
    out = [d(8, 40, scale=0.1), d(8, 40, scale=0.1), d(8, 40, scale=0.1).square()]
    return (0.729, 0.997, 0.05, 0.9, 0.999, 1e-3, d(8, 40), False, True), {"out": out}


def adam_w(
    b1p: float, b2p: float, lr: float, decay: float, b1: float, b2: float, eps: float, grad: Array, largest: Array,
    amsgrad: Any, maximize: Any, out: Any,
) -> tuple[Array, ...]:  # fmt: skip
    var, m, v = out
    g = -grad if maximize else grad
    m, v = m * b1 + (1 - b1) * g, v * b2 + (1 - b2) * g * g
    top = np.maximum(largest, v) if amsgrad else v
    deviation = np.sqrt(top / (1 - b2p * b2)) + eps
    return var * (1 - lr * decay) - lr * m / (1 - b1p * b1) / deviation, m, v


def _adam_w_case(d: Draw) -> Arguments:
    out = [d(8, 40, scale=0.1), d(8, 40, scale=0.1), d(8, 40, scale=0.1).square()]
    top = d(8, 40).square()
    return (0.729, 0.97, 0.05, 0.1, 0.9, 0.99, 1e-3, d(8, 40), top, True, True), {"out": out}


LISTED = (
    "npu_apply_adam_w", "npu_confusion_transpose", "fast_gelu", "npu_layer_norm_eval", "npu_linear",
    "npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul", "npu_scaled_masked_softmax", "npu_swiglu",
    "npu_apply_adam", "npu_group_norm_silu", "npu_mish", "npu_moe_gating_top_k_softmax", "npu_sort_v2",
)  # fmt: skip
"""msprobe's document, "List of Supported Fused Operators", in its order."""
UNDIFFERENTIATED = {"npu_apply_adam", "npu_apply_adam_w"}
"""An optimiser's step is written into its parameters: torch_npu has no gradient of it, and nobody records one."""
CASES: dict[str, FusedCase] = {
    "npu_rms_norm": FusedCase(_rms_case, rms, {
        "another epsilon": lambda x, w, epsilon: rms(x, w, 2 * epsilon),
        "a mean of fewer terms": lambda x, w, epsilon: rms(x, w, epsilon, 4),
        "the weight is left out": lambda x, w, epsilon: rms(x, np.ones_like(w), epsilon),
    }, ("input.0", "input.1")),
    "npu_add_rms_norm": FusedCase(lambda d: ((d(9, 70), d(9, 70), 1 + d(70, scale=0.2)), {"epsilon": 1e-3}), add_rms, {
        "the residual is left out": lambda a, b, w, epsilon: (*rms(a, w, epsilon), a),
    }, ("input.0", "input.1", "input.2")),
    "npu_rms_norm_backward": FusedCase(_rms_backward_case, rms_backward, {
        "the mean is left out": lambda dy, x, w, r: (dy * w * r, rms_backward(dy, x, w, r)[1]),
    }),
    "npu_layer_norm_eval": FusedCase(_layer_case, lambda x, s, w, b, eps: layer(x, w, b, eps), {
        "weight and bias are left out": lambda x, s, w, b, eps: layer(x, eps=eps),
        "another epsilon": lambda x, s, w, b, eps: layer(x, w, b, 0.0),
    }, ("input.0", "input.2", "input.3")),
    "npu_deep_norm": FusedCase(lambda d: ((d(9, 60), d(9, 60), d(60), 1 + d(60, scale=0.2)), {"alpha": 0.4}), deep, {
        "alpha is left out": lambda x, gx, b, w, alpha: deep(x, gx, b, w, 1.0),
    }, (), (SINGLE, BRAIN)),
    "npu_group_norm_silu": FusedCase(_group_case, group_silu, {
        "SiLU is left out": group_norm,
        "one group more": lambda x, w, b, g, eps: (
            group_silu(x, w, b, g + 1, eps)[0], *group_silu(x, w, b, g, eps)[1:]),
    }, ("input.0", "input.1", "input.2")),
    "npu_swiglu": FusedCase(lambda d: ((d(8, 2 * d.below(20, 30)),), {}), gated(silu), {
        "halves are swapped": gated(silu, False)}, ("input.0",)),
    **{name: FusedCase(lambda d: ((d(8, 33),), {}), right, {f"{other.__name__} instead": other}, ("input.0",))
       for name, right, other in (("npu_fast_gelu", fast_gelu, gelu), ("fast_gelu", fast_gelu, silu),
                                  ("npu_mish", mish, silu), ("npu_silu", silu, mish))},
    "npu_gelu": FusedCase(lambda d: ((d(8, 33),), {"approximate": "tanh"}), lambda x, approximate: gelu_tanh(x), {
        "fast GELU instead": lambda x, approximate: fast_gelu(x)}, ("input.0",)),
    "npu_gelu_mul": FusedCase(lambda d: ((d(8, 44),), {}), gated(gelu), {
        "halves are swapped": gated(gelu, False)}, ("input.0",)),
    "npu_geglu": FusedCase(lambda d: ((d(8, 44),), {"approximate": 0}), geglu, {
        "the other half is activated": lambda x, approximate: geglu(x, 0, True)}, ("input.0",)),
    "npu_confusion_transpose": FusedCase(
        lambda d: ((d(6, 4, 30), (0, 2, 1, 3), [6, 4, 5, 6], False), {}), transpose, {
            "another order": lambda x, perm, shape, first: (
                transpose(x, (0, 2, 3, 1), shape, first).reshape(6, 5, 4, 6)),
        }, ("input.0",)),
    "npu_confusion_transpose_backward": FusedCase(
        lambda d: ((d(6, 5, 4, 6), (0, 2, 1, 3), [6, 4, 5, 6], False), {}), transpose_back, {
            "it is reshaped only": lambda up, perm, shape, first: up.reshape(shape),
        }),
    "npu_sort_v2": FusedCase(lambda d: ((d(7, 30),), {"dim": -1, "descending": True}),
                             lambda x, dim, descending: np.sort(x, dim)[..., ::-1].copy(), {
        "ascending": lambda x, dim, descending: np.sort(x, dim),
    }, ("input.0",)),
    "npu_linear": FusedCase(lambda d: ((d(9, 50), d(31, 50, scale=0.2), d(31)), {}), linear, {
        "the bias is left out": lambda x, w, b: linear(x, w),
        "the last two inputs are left out": lambda x, w, b: linear(x[:, :-2], w[:, :-2], b),
    }, ("input.0", "input.1", "input.2")),
    "npu_linear_backward": FusedCase(lambda d: ((d(9, 31), d(9, 50), d(31, 50, scale=0.2)), {}), linear_backward, {
        "a row is left out": lambda up, x, w: (linear_backward(up, x, w)[0], linear_backward(up[1:], x[1:], w)[1]),
    }, (), (BRAIN, SINGLE)),
    "npu_rotary_mul": FusedCase(_rotary_case, rotary, {
        "halves are swapped": lambda x, c, s: rotary(np.roll(x, 16, -1), c, s),
        "neighbours instead of halves": lambda x, c, s: rotary(x, c, s, 32),
        "the sign is lost": lambda x, c, s: rotary(x, c, -s),
    }, ("input.0", "input.1", "input.2")),
    "npu_scaled_masked_softmax": FusedCase(_masked_case, masked_softmax, {
        "the mask is ignored": lambda x, m, scale, t: masked_softmax(x, np.zeros_like(m), scale, t),
        "the scale is left out": lambda x, m, scale, t: masked_softmax(x, m, 1, t),
    }, ("input.0",)),
    "npu_scaled_masked_softmax_backward": FusedCase(
        lambda d: ((d(3, 2, 8, 24), torch.softmax(d(3, 2, 8, 24).float(), -1).to(d.dtype), None, 0.7, False), {}),
        masked_softmax_backward, {
            "the scale is left out": lambda up, y, m, s, t: masked_softmax_backward(up, y, m, 1.0, t),
            "the mask is ignored": lambda up, y, m, s, t: masked_softmax_backward(up, y, np.zeros_like(m), s, t),
        }),
    "npu_cross_entropy_loss": FusedCase(_entropy_case, cross_entropy, {
        "ignored rows count": lambda x, t, w, r, i, s: cross_entropy(x, t, w, r, -100, s),
        "no smoothing": lambda x, t, w, r, i, s: cross_entropy(x, t, w, r, i, 0.0),
    }, ("input.0",)),
    "npu_moe_gating_top_k_softmax": FusedCase(
        lambda d: ((d(9, 24), bools(d, 9)), {"k": 3}), gating, {"experts in the other order": _gating_wrong},
        ("input.0",), (SINGLE, HALF)),
    "npu_apply_adam": FusedCase(_adam_case, adam, {
        "one power more": lambda *a, out: adam(*a, out=out, power=0.999),
        "no Nesterov": lambda *a, out: adam(*a[:-1], False, out=out),
    }, (), (SINGLE,)),
    "npu_apply_adam_w": FusedCase(_adam_w_case, adam_w, {
        "the decay is left out": lambda *a, out: adam_w(*a[:3], 0.0, *a[4:], out=out),
        "amsgrad is left out": lambda *a, out: adam_w(*a[:-2], False, a[-1], out=out),
        "it goes down where it should go up": lambda *a, out: adam_w(*a[:-1], False, out=out),
    }, (), (SINGLE,)),
}  # fmt: skip


def drawn(name: str, seed: int, dtype: torch.dtype) -> Arguments:
    """The arguments of one call; a mask is drawn to fit."""
    d = Draw(seed, dtype)
    args, kwargs = CASES[name].args(d)
    if "softmax" in name and "scaled" in name:
        at = 2 if "backward" in name else 1
        mask = bools(d, args[0].shape[0], 1, *args[0].shape[2:])
        mask[..., 0] = False  # a row that is masked whole is not defined
        args = (*args[:at], mask, *args[at + 1 :])
    return args, kwargs


def in_numpy(value: Any) -> Any:
    """Tensors as arrays, floating ones in float64."""
    if isinstance(value, torch.Tensor):
        return wide(value) if value.is_floating_point() else value.numpy()
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return [in_numpy(v) for v in value]
    return value


def ran(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Array, ...]:
    """What a definition makes of the call."""
    y = kernel(*(in_numpy(a) for a in args), **{k: in_numpy(v) for k, v in kwargs.items()})
    return y if isinstance(y, tuple) else (y,)


FLOAT32 = ("output.1", "output.2")
"""Outputs that kernels give in float32 where they are a norm's root or mean."""


def fused_call(name: str, seed: int, dtype: torch.dtype, spelling: str = "NPU.{}") -> Call:
    args, kwargs = drawn(name, seed, dtype)
    return Call("tap", spelling.format(name), args=args, kwargs=kwargs)


def _stored(name: str, role: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that the operator's result has."""
    single = ("norm" in name and role in FLOAT32) or (name == "npu_deep_norm" and role == "output.0")
    back = name.endswith("backward") or name == "npu_deep_norm"
    return SINGLE if single and not (back and role == FLOAT32["rms" not in name]) else dtype


def _maker(name: str) -> Any:
    def make(d: Draw, fault: str) -> Made:
        call = fused_call(name, d.seed, d.dtype)
        kernel = CASES[name].wrong[fault] if fault else CASES[name].right
        found = {f"output.{k}": y for k, y in enumerate(ran(kernel, call.args, dict(call.kwargs)))}
        numbers = {r: (y, _stored(name, r, d.dtype)) for r, y in found.items() if y.dtype.kind == "f"}
        codes = {r: torch.from_numpy(y.copy()) for r, y in found.items() if y.dtype.kind != "f"}
        outputs = numbers | codes
        return made(call.cls, *call.args, kwargs=call.kwargs, outputs=outputs)

    make.__name__, make.__module__ = name, __name__
    return make


for _name, _case in CASES.items():
    sample(*_case.wrong, seeds=2, dtypes=_case.dtypes)(_maker(_name))
