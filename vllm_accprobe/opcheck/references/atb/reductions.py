"""Softmax, Reduce, Cumsum, Sort, FastSoftMax and its gradient, FaUpdate.

Formulas: the names'. Softmax over one axis or several that follow one another; FastSoftMax: of each request's square of
scores, headNum times qSeqLen**2 numbers in a flat tensor; its gradient y (dy - sum y dy); Sort: the num largest of each
row, falling, with their indices: of equal ones any; FaUpdate: parts of one attention, each with the logarithm of its
sum, put together [Dao et al., arXiv 2205.14135, section 3.1]. Errors: an exponential off by APPROXIMATE at most, sums
by gamma_n [Higham, ASNA, lemma 3.1].
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Declined, Expected, gamma
from vllm_accprobe.opcheck.references.atb.moving import axis_of
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, chosen, copied, operator
from vllm_accprobe.opcheck.references.parts import reshaped, subnormal, unit_of

Tensor = Any  # a torch.Tensor


def softmax(x: Tensor, unit: float) -> Expected:
    """Over the last dimension; the exponentials may be rounded to ``unit``."""
    y = torch.softmax(x, -1)
    n = x.shape[-1]
    # an exponential's error is in its number and, with the others', in the sum
    off = 2.0 * (APPROXIMATE + unit) + gamma(n + 8) + 2.0 * SUM * (x - x.amax(-1, keepdim=True)).abs()
    least = subnormal(unit, 1.0 + n * y)  # the largest is 1
    return Expected(y, ROUNDED * (unit * y + least), common=0.5 * unit, bound=off * y + least)


@operator("SoftmaxOperation")
def softmax_of(o: Operands) -> Outputs:
    x = o.wide(0)
    axes = sorted(axis_of(int(a), x.dim()) for a in o.numbers("axes"))
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise Declined(f"axes {axes} do not follow one another")
    others = [d for d in range(x.dim()) if d not in axes]
    turned = x.permute(*others, *axes)
    y = softmax(turned.flatten(len(others)), unit_of(o.tensor(0)))
    back = [[*others, *axes].index(d) for d in range(x.dim())]

    def whole(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.expand(y.value.shape).reshape(turned.shape).permute(back)

    return {"output.0": Expected(whole(y.value), whole(y.noise), common=y.common, bound=whole(y.bound))}


@operator("ReduceOperation")
def reduce(o: Operands) -> Outputs:
    x, kind = o.tensor(0), o.param("reduceType", 0)
    axes = [axis_of(int(a), x.dim()) for a in o.numbers("axis")]
    if kind == 1:
        return {"output.0": copied(x.amax(axes))}
    if kind == 2:
        return {"output.0": copied(x.amin(axes))}
    if kind != 3:
        raise Declined(f"reduceType {kind} is none that is known here")
    if not x.is_floating_point():
        return {"output.0": chosen(x.long().sum(axes))}
    wide, n = x.double(), 1
    for a in axes:
        n *= x.shape[a]
    size = wide.abs().sum(axes)
    return {"output.0": Expected(wide.sum(axes), SUM * n**0.5 * size, bound=gamma(n) * size)}


@operator("CumsumOperation")
def cumsum(o: Operands) -> Outputs:
    x = o.tensor(0)
    (axis, *more) = o.numbers("axes")
    if more or o.param("exclusive", False) or o.param("reverse", False):
        raise Declined("a sum over several axes, an exclusive or a reverse one has no reference")
    axis = axis_of(int(axis), x.dim())
    if not x.is_floating_point():
        return {"output.0": chosen(x.long().cumsum(axis))}
    wide, n = x.double(), x.shape[axis]
    size = wide.abs().cumsum(axis)
    # sums on the way may be kept in the tensor's dtype
    unit = unit_of(x)
    return {"output.0": Expected(wide.cumsum(axis), unit * n**0.5 * size, bound=gamma(n, max(unit, SUM)) * size)}


@operator("SortOperation")
def sort(o: Operands) -> Outputs:
    x = o.tensor(0)
    num = int(o.numbers("num")[0])
    if not 0 < num <= x.shape[-1]:
        raise Declined(f"{num} of {x.shape[-1]} cannot be taken")
    values, places = torch.sort(x.double() if x.is_floating_point() else x.long(), dim=-1, descending=True, stable=True)
    values, places = values[..., :num], places[..., :num]
    found: dict[str, Expected] = {"output.0": Expected(values, unit=0.0)}
    mine = o.call.outputs.get("output.1")
    if mine is not None and mine.shape == places.shape:
        at = mine.long().clamp(0, x.shape[-1] - 1)
        wide = x.double() if x.is_floating_point() else x.long()
        right = (at == mine.long()) & (wide.gather(-1, at) == values)  # of equal numbers any
        once = torch.sort(mine.long(), -1).values.diff(dim=-1).ne(0).all(-1, keepdim=True)  # each place once
        places = torch.where(right & once, mine.long(), places)
    found["output.1"] = chosen(places)
    return found


def _squares(o: Operands) -> list[tuple[int, int, int]]:
    """(begin, end, length of a row) of each request's scores in the flat tensor."""
    heads, at, found = o.param("headNum", 0), 0, []
    for n in o.numbers("qSeqLen"):
        end = at + heads * int(n) * int(n)
        found.append((at, end, int(n)))
        at = end
    if heads <= 0 or at > o.tensor(0).numel() or any(n <= 0 for _, _, n in found):
        raise Declined("headNum and qSeqLen do not fit its input")
    return found


def _of_squares(o: Operands, one: Any) -> Expected:
    size = o.output().numel()
    value, noise, bound = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    known = torch.zeros(size, dtype=torch.bool)
    for begin, end, n in _squares(o):
        y = one(begin, end, n)
        for flat, part in zip((value, noise, bound), (y.value, y.noise, y.bound), strict=True):
            flat[begin:end] = part.reshape(-1)
        known[begin:end] = True
    rows = None if bool(known.all()) or o.output().dim() != 1 else known
    return reshaped(Expected(value, noise, bound=bound, rows=rows, reason="no row of a request"), o.output().shape)


@operator("FastSoftMaxOperation")
def fast_softmax(o: Operands) -> Outputs:
    x, unit = o.wide(0).reshape(-1), unit_of(o.tensor(0))
    return {"output.0": _of_squares(o, lambda b, e, n: softmax(x[b:e].reshape(-1, n), unit))}


@operator("FastSoftMaxGradOperation")
def fast_softmax_grad(o: Operands) -> Outputs:
    """(y, dy)"""
    y, dy, unit = o.wide(0).reshape(-1), o.wide(1).reshape(-1), unit_of(o.tensor(0))

    def one(begin: int, end: int, n: int) -> Expected:
        a, b = (t[begin:end].reshape(-1, n) for t in (y, dy))
        total, sizes = (a * b).sum(-1, keepdim=True), (a * b).abs().sum(-1, keepdim=True)
        size = a * (b.abs() + sizes)
        return Expected(a * (b - total), ROUNDED * unit * size, bound=(3.0 * unit + gamma(n + 4)) * size)

    return {"output.0": _of_squares(o, one)}


@operator("FaUpdateOperation")
def fa_update(o: Operands) -> Outputs:
    """(lse [parts, rows], out [parts, rows, width])"""
    lse, parts = o.wide(0), o.wide(1)
    lse = lse.reshape(len(parts), -1)
    share = torch.softmax(lse, 0).unsqueeze(-1)
    y = (share * parts.reshape(len(parts), lse.shape[1], -1)).sum(0)
    size = (share * parts.reshape(len(parts), lse.shape[1], -1).abs()).sum(0)
    off = 2.0 * APPROXIMATE + gamma(len(parts) + 8) + 4.0 * SUM * lse.abs().amax(0).unsqueeze(-1)
    return {"output.0": reshaped(Expected(y, SUM * size, bound=off * size), o.output().shape)}
