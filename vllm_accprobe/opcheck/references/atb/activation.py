"""Activations of ATB by activationType, and SwigluQuant.

Formulas: RELU; GELU by tanh, exact with geluMode 1, which ATB's json does not tell: the nearer counts; FAST_GELU and
FASTER_GELU x sigmoid(1.702 x) [Hendrycks and Gimpel, arXiv 1606.08415], which ATB writes as x exp(0.851 (x - |x|)) / (1
+ exp(-1.702 |x|)), the same function; SWISH x sigmoid(scale x); LOG; SWIGLU silu(a) b of the halves along dim [Shazeer,
arXiv 2002.05202], backward from (dy, x): da = dy b silu'(a), db = dy silu(a); SIGMOID. SwigluQuant: SWIGLU of the last
dimension, each row turned into int8 with its own scale. Errors: references/activations.py. Where mine's numbers are
those of another of these functions, a failure says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Declined, Expected, combined
from vllm_accprobe.opcheck.references.activations import alone, gelu, gelu_tanh, quick_gelu, sigmoid_argument, silu
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, operator
from vllm_accprobe.opcheck.references.atb.quantise import SYMMETRIC, dynamic
from vllm_accprobe.opcheck.references.parts import once, subnormal, unit_of

Tensor = Any  # a torch.Tensor
RELU, GELU, FAST_GELU, SWISH, LOG, SWIGLU, SWIGLU_BACKWARD, SIGMOID, FASTER_GELU = range(1, 10)
_NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "RELU": torch.relu, "GELU": gelu_tanh, "FAST_GELU": quick_gelu, "SWISH": silu, "SIGMOID": torch.sigmoid,
}  # fmt: skip
_NEAR = 2.0**-6
"""Chosen: how near mine's numbers must be to another function's, of their size, to be called that one's."""


@operator("ActivationOperation", by_rows=False)
def activation(o: Operands) -> Outputs:
    kind = o.param("activationType", 0)
    if kind == SWIGLU_BACKWARD:
        return {"output.0": _backward(o)}
    x = o.wide(0)
    if kind == SWIGLU:
        return {"output.0": _gated(o, x)}
    y = _single(o, kind, x)
    return {"output.0": replace(y, note=_other(o, x, y.value))}


def _single(o: Operands, kind: int, x: Tensor) -> Expected:
    if kind == RELU:
        return Expected(torch.relu(x), bound=torch.zeros((), dtype=torch.float64))
    if kind == GELU:
        return alone(x, _gelu(o, x), o.unit)
    if kind in (FAST_GELU, FASTER_GELU):
        return alone(x, quick_gelu, o.unit)
    if kind == SWISH:
        scale = o.param("scale", 1.0)
        y = alone(x, lambda t: t * torch.sigmoid(scale * t), o.unit)
        if scale == 1.0:
            return y
        more = o.unit * sigmoid_argument(x, scale).abs()  # scale x may be rounded
        return replace(y, noise=combined(y.noise, ROUNDED * more), bound=y.bound + more)
    if kind == LOG:
        y = torch.log(x)
        return Expected(y, 2.0 * SUM * (1.0 + y.abs()), bound=APPROXIMATE * (y.abs() + 2.0**-6))
    if kind == SIGMOID:
        y = torch.sigmoid(x)
        return Expected(y, bound=APPROXIMATE * y)
    raise Declined(f"activationType {kind} is none that is known here")


def _gelu(o: Operands, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Where nothing tells which, as in ATB's own json, the one that mine's numbers are nearer to."""
    if o.has("geluMode"):
        return gelu if o.param("geluMode", 0) == 1 else gelu_tanh
    mine = torch.nan_to_num(o.output().double())
    return min((gelu_tanh, gelu), key=lambda f: float((f(x) - mine).norm()))


def _other(o: Operands, x: Tensor, y: Tensor) -> str:
    """A note for a failure: the other function whose numbers mine's are."""
    mine = o.output().double()
    if mine.shape != y.shape or not bool(torch.isfinite(mine).all()):
        return ""
    size = float(mine.norm())
    if float((mine - y).norm()) <= _NEAR * size:
        return ""
    for name, f in _NAMED.items():
        if float((mine - f(x)).norm()) <= _NEAR * size:
            return f"its numbers are those of {name}"
    return ""


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if not -x.dim() <= dim < x.dim() or x.shape[dim] % 2:
        raise Declined(f"dim {dim} of {list(x.shape)} has no halves")
    a, b = x.chunk(2, dim)
    return a, b


def _gated(o: Operands, x: Tensor) -> Expected:
    a, b = _halves(x, o.param("dim", -1))
    y = silu(a) * b
    early = once(silu(a).abs(), unit_of(o.tensor(0)), b.abs())
    return Expected(y, ROUNDED * early, bound=early + APPROXIMATE * y.abs())


def _backward(o: Operands) -> Expected:
    """(dy, x)"""
    dim, unit = o.param("dim", -1), unit_of(o.tensor(0))
    dy, (a, b) = o.wide(0), _halves(o.wide(1), dim)
    if dy.shape != a.shape:
        raise Declined(f"a gradient {list(dy.shape)} does not fit halves {list(a.shape)}")
    s = torch.sigmoid(a)
    slope = s + a * s * (1.0 - s)
    y = torch.cat((dy * b * slope, dy * silu(a)), dim)
    steep = s + (a * s * (1.0 - s)).abs()
    size = torch.cat(((dy * b).abs() * steep, (dy * silu(a)).abs()), dim)
    least = subnormal(unit, torch.cat((steep + (dy * b).abs(), dy.abs()), dim))
    noise = ROUNDED * (2.0**0.5 * unit * size + least)
    return Expected(y, noise, bound=(3.0 * unit + 3.0 * APPROXIMATE) * size + least)


@operator("SwigluQuantOperation")
def swiglu_quant(o: Operands) -> Outputs:
    a, b = _halves(o.wide(0), -1)
    y = silu(a) * b
    bound = (unit_of(o.tensor(0)) + APPROXIMATE) * y.abs()
    return dynamic(o, Expected(y, bound=bound), SYMMETRIC)
