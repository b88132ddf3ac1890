"""Elementwise operators, activations and reductions of ATB.

Formulas: the names'. GELU is by tanh, exact with geluMode 1, which ATB's json does not have: the nearer counts;
FAST_GELU and FASTER_GELU x sigmoid(1.702 x), which ATB writes as x exp(0.851 (x - |x|)) / (1 + exp(-1.702 |x|)), the
same function; SWISH x sigmoid(scale x); SWIGLU silu(a) b of the halves along dim, backward from (dy, x): da = dy b
silu'(a), db = dy silu(a). CAST is right to the bit where it goes to a float, and truncates or rounds to an integer,
either of which is accepted; QUANT is round(x * inputScale + inputOffset), the scale as float16 [ATB's published quant
kernel]; QUANT_PER_CHANNEL round(x / scale + offset); DEQUANT_PER_CHANNEL (x - offset) * scale. FastSoftMax: of each
request's square of scores, headNum times qSeqLen**2 numbers in a flat tensor; its gradient y (dy - sum y dy); FaUpdate:
parts of one attention, each with the logarithm of its sum, put together [Dao et al., arXiv 2205.14135, section 3.1].
Noise of a function: APPROXIMATE; of a sum: sum_of_two; errors of activations: references/activations.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected, combined, decline_if, required
from vllm_accprobe.opcheck.references.activations import (
    alone,
    gated_along,
    gelu,
    gelu_tanh,
    quick_gelu,
    sigmoid_argument,
    silu,
)
from vllm_accprobe.opcheck.references.atb.linear import ASYMMETRIC, SYMMETRIC, coded, dynamic
from vllm_accprobe.opcheck.references.atb.operands import ACL, UNDEFINED, Operands, Outputs, axis_of, operator
from vllm_accprobe.opcheck.references.parts import RowResults, as_captured, equal, reshaped
from vllm_accprobe.opcheck.roundings import APPROXIMATE, ROUNDED, SUM, gamma, subnormal, sum_of_two

Tensor = Any  # a torch.Tensor
RELU, GELU, FAST_GELU, SWISH, LOG, SWIGLU, SWIGLU_BACKWARD, SIGMOID, FASTER_GELU = range(1, 10)
_NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "RELU": torch.relu, "GELU": gelu_tanh, "FAST_GELU": quick_gelu, "SWISH": silu, "SIGMOID": torch.sigmoid,
}  # fmt: skip
_NEAR = 2.0**-6
"""Chosen: how near mine's numbers must be to another function's, of their size, to be called that one's."""


@operator("ActivationOperation")
def activation(o: Operands) -> Expected:
    kind = o.param("activationType", 0)
    if kind == SWIGLU_BACKWARD:
        return _backward(o)
    x = o.wide(0)
    if kind == SWIGLU:
        return gated_along(x, o.param("dim", -1), silu, o.input_unit)
    y = _single(o, kind, x)
    return replace(y, note=_other(o, x, y.value))


def _single(o: Operands, kind: int, x: Tensor) -> Expected:
    if kind == RELU:
        return Expected(torch.relu(x), bound=torch.zeros((), dtype=torch.float64))
    if kind == GELU:
        if o.has("geluMode"):
            return alone(x, gelu if o.param("geluMode", 0) == 1 else gelu_tanh, o.unit)
        mine = torch.nan_to_num(o.output().double())  # not recorded, as in ATB's own json: the nearer counts
        return alone(x, min((gelu_tanh, gelu), key=lambda f: float((f(x) - mine).norm())), o.unit)
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
    decline_if(not -x.dim() <= dim < x.dim() or x.shape[dim] % 2, f"dim {dim} of {list(x.shape)} has no halves")
    a, b = x.chunk(2, dim)
    return a, b


def _backward(o: Operands) -> Expected:
    """(dy, x)"""
    dim, unit = o.param("dim", -1), o.input_unit
    dy, (a, b) = o.wide(0), _halves(o.wide(1), dim)
    decline_if(dy.shape != a.shape, f"a gradient {list(dy.shape)} does not fit halves {list(a.shape)}")
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
    bound = (o.input_unit + APPROXIMATE) * y.abs()
    return dynamic(o, Expected(y, bound=bound), SYMMETRIC)


(CAST, MULS, COS, SIN, NEG, QUANT, NOT, ADD, MUL, DIV, AND, OR, LESS, GREATER, SUB, EQUAL, QUANT_CHANNEL,
 DEQUANT_CHANNEL, DYNAMIC_QUANT, TANH) = range(1, 21)  # fmt: skip
_COMPARED: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    LESS: torch.lt, GREATER: torch.gt, EQUAL: torch.eq,
    AND: lambda a, b: a.bool() & b.bool(), OR: lambda a, b: a.bool() | b.bool(),
}  # fmt: skip
_FUNCTIONS: dict[int, Callable[[Tensor], Tensor]] = {COS: torch.cos, SIN: torch.sin, TANH: torch.tanh}


def _floats(o: Operands, what: str) -> None:
    if not o.output().is_floating_point():
        raise Declined(f"{what} gives floats, and {str(o.output().dtype).removeprefix('torch.')} was captured")


@operator("ElewiseOperation")
def elewise(o: Operands) -> Any:
    kind = o.param("elewiseType", 0)
    made = next((make for kinds, make in _KINDS if kind in kinds), None)
    return required(made, f"elewiseType {kind} is none that is known here")(o, kind)


def _function(o: Operands, kind: int) -> Expected:
    _floats(o, f"elewiseType {kind}")
    x = o.wide(0)
    y = _FUNCTIONS[kind](x)
    if kind == TANH:
        return Expected(y, bound=APPROXIMATE * y.abs())
    # the angle is reduced in float32 at best, and its cosine is off by what the angle is
    return Expected(y, SUM * (1.0 + x.abs()), bound=APPROXIMATE * (1.0 + y.abs()) + 4.0 * SUM * x.abs())


def _of_two(o: Operands, kind: int) -> Any:
    a, b = o.tensor(0), o.tensor(1)
    if not o.output().is_floating_point():
        decline_if(kind == DIV, "a division of integers has no reference")
        a, b = a.long(), b.long()
        return a + b if kind == ADD else a - b if kind == SUB else a * b
    a, b = a.double(), b.double()
    if kind in (ADD, SUB):
        return sum_of_two(a + b if kind == ADD else a - b, o.unit)
    y = a * b if kind == MUL else a / b
    return Expected(y, common=0.5 * o.unit if min(a.numel(), b.numel()) == 1 else 0.0, bound=2.0 * SUM * y.abs())


def _cast(o: Operands, kind: int) -> Tensor:
    x, out = o.tensor(0), o.output()
    out_type = o.param("outTensorType", UNDEFINED)
    # a float's numbers may lie on a coarser grid, and be taken for that (calls/grid.py)
    if out_type in ACL and ACL[out_type].is_floating_point != out.is_floating_point():
        raise Declined(f"outTensorType {out_type} is {ACL[out_type]}, and {out.dtype} was captured")
    if out.is_floating_point() or not x.is_floating_point():
        return x.to(out.dtype)
    wide, mine = x.double(), out.long()
    near = (mine == wide.trunc().long()) | (mine == wide.round().long())
    return torch.where(near, mine, wide.trunc().long())


def _scaled(o: Operands, kind: int) -> Expected:
    factor = (o.part("mulsParam") if o.has("mulsParam") else o).param("varAttr", 0.0)
    y = o.wide(0) * factor
    # the factor may be rounded to the tensor's dtype first
    return Expected(y, common=o.unit, bound=(o.unit + SUM) * y.abs())


def _codes(o: Operands, kind: int) -> Any:
    x = o.wide(0)
    if kind == DYNAMIC_QUANT:
        skewed = o.part("quantParam").param("asymmetric", False)
        return dynamic(o, Expected(x), ASYMMETRIC if skewed else SYMMETRIC)
    if kind == QUANT:
        p = o.part("quantParam") if o.has("quantParam") else o
        product = x * p.param("inputScale", 1.0)
        y = product + p.param("inputOffset", 0)
        return coded(y, o.output(), o.input_unit * (2.0 * product.abs() + y.abs()))  # scale, product, sum are rounded
    scale, offset = o.wide(1), o.maybe(2)
    if kind == QUANT_CHANNEL:
        y = x / scale if offset is None else x / scale + offset.double()
        # a kernel may divide in the input's dtype
        return coded(y, o.output(), 2.0 * o.input_unit * ((x / scale).abs() + y.abs()))
    y = (x if offset is None else x - offset.double()) * scale
    _floats(o, "DEQUANT_PER_CHANNEL")
    top = torch.finfo(o.output().dtype).max
    return Expected(y.clamp(-top, top), bound=4.0 * SUM * y.abs())


_KINDS: tuple[tuple[Container[int], Callable[[Operands, int], Any]], ...] = (
    (_COMPARED, lambda o, kind: _COMPARED[kind](o.tensor(0), o.tensor(1))), (_FUNCTIONS, _function),
    ((ADD, SUB, MUL, DIV), _of_two), ((CAST,), _cast), ((MULS,), _scaled), ((NOT,), lambda o, _: ~o.tensor(0).bool()),
    ((NEG,), lambda o, _: -o.tensor(0)), ((QUANT, QUANT_CHANNEL, DEQUANT_CHANNEL, DYNAMIC_QUANT), _codes),
)  # fmt: skip


@operator("FillOperation", moves=True)
def fill(o: Operands) -> Tensor:
    """(x, mask) with withMask: x, value where the mask is 1; else outDim numbers, all of them value."""
    value = o.numbers("value")[0]
    if o.param("withMask", True):
        return o.tensor(0).masked_fill(o.tensor(1).bool().expand_as(o.tensor(0)), value)
    shape = o.integers("outDim")
    decline_if(shape != list(o.output().shape), "its parameters do not fit the output that was captured")
    return torch.full(shape, value, dtype=o.output().dtype)


@operator("OnehotOperation", moves=True)
def onehot(o: Operands) -> Tensor:
    """(indices, one, zero): a new dimension ``axis`` of ``depth``."""
    x, depth, out = o.tensor(0).long(), o.param("depth", 0), o.output()
    o.fits(max(x.numel(), 1) * depth)  # none of an empty input: it would not bound the depth
    dim = axis_of(o.param("axis", 0), x.dim() + 1)
    at = x.unsqueeze(dim) == torch.arange(depth).reshape(-1, *[1] * (x.dim() - dim))
    one, zero = o.maybe(1), o.maybe(2)
    if one is not None and zero is not None and one.numel() == zero.numel() == 1:
        return torch.where(at, one.reshape(()), zero.reshape(()))
    return at.to(out.dtype)


def softmax(x: Tensor, unit: float) -> Expected:
    """Over the last dimension; the exponentials may be rounded to ``unit``."""
    y = torch.softmax(x, -1)
    n = x.shape[-1]
    # an exponential's error is in its number and, with the others', in the sum
    off = 2.0 * (APPROXIMATE + unit) + gamma(n + 8) + 2.0 * SUM * (x - x.amax(-1, keepdim=True)).abs()
    least = subnormal(unit, 1.0 + n * y)  # the largest is 1
    return Expected(y, ROUNDED * (unit * y + least), common=0.5 * unit, bound=off * y + least)


@operator("SoftmaxOperation")
def softmax_of(o: Operands) -> Expected:
    x = o.wide(0)
    axes = sorted(axis_of(int(a), x.dim()) for a in o.numbers("axes"))
    decline_if(axes != list(range(axes[0], axes[-1] + 1)), f"axes {axes} do not follow one another")
    back = list(range(-len(axes), 0))
    turned = x.movedim(axes, back)
    y = softmax(turned.flatten(-len(axes)), o.input_unit)
    return y.map(lambda t: t.expand(y.value.shape).reshape(turned.shape).movedim(back, axes))


@operator("ReduceOperation")
def reduce(o: Operands) -> Any:
    x, kind = o.tensor(0), o.param("reduceType", 0)
    axes = [axis_of(int(a), x.dim()) for a in o.numbers("axis")]
    decline_if(kind not in (1, 2, 3), f"reduceType {kind} is none that is known here")
    if kind != 3:
        return x.amax(axes) if kind == 1 else x.amin(axes)
    if not x.is_floating_point():
        return x.long().sum(axes)
    wide, n = x.double(), math.prod(x.shape[a] for a in axes)
    size = wide.abs().sum(axes)
    return Expected(wide.sum(axes), SUM * n**0.5 * size, bound=gamma(n) * size)


@operator("CumsumOperation")
def cumsum(o: Operands) -> Any:
    x, (axis, *more) = o.tensor(0), o.numbers("axes")
    if more or o.param("exclusive", False) or o.param("reverse", False):
        raise Declined("a sum over several axes, an exclusive or a reverse one has no reference")
    axis = axis_of(int(axis), x.dim())
    if not x.is_floating_point():
        return x.long().cumsum(axis)
    wide, n, unit = x.double(), x.shape[axis], o.input_unit
    size = wide.abs().cumsum(axis)
    # sums on the way may be kept in the tensor's dtype
    return Expected(wide.cumsum(axis), unit * n**0.5 * size, bound=gamma(n, max(unit, SUM)) * size)


@operator("SortOperation")
def sort(o: Operands) -> list[Expected]:
    x, num = o.tensor(0), int(o.numbers("num")[0])
    decline_if(not 0 < num <= x.shape[-1], f"{num} of {x.shape[-1]} cannot be taken")
    values, places = (t[..., :num] for t in torch.sort(as_captured(x), dim=-1, descending=True, stable=True))
    mine = o.call.outputs.get("output.1")
    if mine is not None and mine.shape == places.shape:
        at = mine.long().clamp(0, x.shape[-1] - 1)
        right = (at == mine.long()) & (as_captured(x).gather(-1, at) == values)  # of equal numbers any
        once = torch.sort(mine.long(), -1).values.diff(dim=-1).ne(0).all(-1, keepdim=True)  # each place once
        places = torch.where(right & once, mine.long(), places)
    return [Expected(values, unit=0.0), equal(places)]


def _of_squares(o: Operands, inputs: int, one: Callable[..., Expected]) -> Expected:
    """Of each request's square of scores [headNum * n, n] in flat tensors."""
    out, heads, sizes = o.output(), o.param("headNum", 0), o.integers("qSeqLen")
    decline_if(heads <= 0 or min(sizes) <= 0, "headNum and qSeqLen do not fit its input")
    ends = [0, *accumulate(heads * n * n for n in sizes)]
    decline_if(ends[-1] > o.tensor(0).numel(), "headNum and qSeqLen do not fit its input")
    flat, found = [o.wide(k).reshape(-1) for k in range(inputs)], RowResults(out.numel())
    for n, (begin, end) in zip(sizes, pairwise(ends), strict=True):
        y = one(*(t[begin:end].reshape(-1, n) for t in flat))
        found.put(slice(begin, end), [t.reshape(-1) for t in (y.value, y.noise, y.bound) if t is not None])
    value, noise, bound = found.parts
    rows = found.rows() if out.dim() == 1 else None
    return reshaped(Expected(value, noise, bound=bound, rows=rows, reason="no row of a request"), out.shape)


@operator("FastSoftMaxOperation")
def fast_softmax(o: Operands) -> Expected:
    return _of_squares(o, 1, lambda x: softmax(x, o.input_unit))


@operator("FastSoftMaxGradOperation")
def fast_softmax_grad(o: Operands) -> Expected:
    """(y, dy)"""

    def one(a: Tensor, b: Tensor) -> Expected:
        total, size = (a * b).sum(-1, keepdim=True), a * (b.abs() + (a * b).abs().sum(-1, keepdim=True))
        bound = (3.0 * o.input_unit + gamma(a.shape[-1] + 4)) * size
        return Expected(a * (b - total), ROUNDED * o.input_unit * size, bound=bound)

    return _of_squares(o, 2, one)


@operator("FaUpdateOperation")
def fa_update(o: Operands) -> Expected:
    """(lse [parts, rows], out [parts, rows, width])"""
    parts = o.wide(1).reshape(len(o.tensor(1)), -1, o.tensor(1).shape[-1])
    lse = o.wide(0).reshape(parts.shape[:2])
    share = torch.softmax(lse, 0).unsqueeze(-1)
    size = (share * parts.abs()).sum(0)
    off = 2.0 * APPROXIMATE + gamma(len(parts) + 8) + 4.0 * SUM * lse.abs().amax(0).unsqueeze(-1)
    return reshaped(Expected((share * parts).sum(0), SUM * size, bound=off * size), o.output().shape)
