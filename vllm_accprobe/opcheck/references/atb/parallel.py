"""Operators of ATB that work over ranks: AllReduce, AllGather, ReduceScatter, Broadcast, LinearParallel.

Formula: what each rank gave, added up (or multiplied, or the largest or smallest), put together along the first
dimension, or handed on from rankRoot; LinearParallel: a product of linear.py before or behind that, and a residual
added at the end. All ranks' tensors are needed (``extra["ranks"]``): a dump of one rank cannot be judged, and says so.
Error: each part and each sum on the way may be rounded to the tensor's dtype, in any order.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references.atb.linear import dequantised, matrices, multiplied, summed
from vllm_accprobe.opcheck.references.atb.operands import ACL, UNDEFINED, Operands, Outputs, copied, operator
from vllm_accprobe.opcheck.references.linear import added
from vllm_accprobe.opcheck.references.parts import reshaped

Tensor = Any  # a torch.Tensor
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALONE = range(4)
_UNQUANTISED, _PER_TENSOR, _PER_CHANNEL = -1, 0, 1


def ranks(o: Operands) -> list[Operands]:
    """The same call on all ranks, in their order. Raises Declined."""
    size = o.param("rankSize", 0)
    if size == 1:
        return [o]
    calls: list[Call] = list(o.call.extra.get("ranks", ()))
    found = {p.param("rank", 0): p for p in map(Operands, calls)}
    if sorted(found) != list(range(size)):
        raise Declined(
            f"works over {size} ranks, and the tensors of {len(found)} are there: open the folder that holds all"
        )
    return [found[k] for k in range(size)]


def _whole(t: Tensor) -> Expected:
    wide = t.double()
    return Expected(wide, torch.zeros_like(wide), bound=torch.zeros_like(wide))


@operator("AllReduceOperation")
def all_reduce(o: Operands) -> Outputs:
    kind = o.param("allReduceType", "sum")
    if o.param("quantType", 0):
        raise Declined("a quantised sum over ranks has no reference")
    parts = [p.tensor(0) for p in ranks(o)]
    if len({p.shape for p in parts}) != 1:
        raise Declined("its ranks gave tensors of several shapes")
    if kind in ("max", "min"):
        stack = torch.stack(parts)
        return {"output.0": copied(stack.amax(0) if kind == "max" else stack.amin(0))}
    if not parts[0].is_floating_point():
        stack = torch.stack(parts).long()
        return {"output.0": Expected(stack.sum(0) if kind == "sum" else stack.prod(0), unit=0.0)}
    if kind == "sum":
        return {"output.0": summed([_whole(p) for p in parts], o.unit)}
    if kind == "prod":
        y = torch.stack(parts).double().prod(0)
        return {
            "output.0": Expected(y, o.unit * (len(parts) - 1) ** 0.5 * y.abs(), bound=o.unit * len(parts) * y.abs())
        }
    raise Declined(f"allReduceType {kind[:20]!r} has no reference")


@operator("AllGatherOperation")
def all_gather(o: Operands) -> Outputs:
    parts = torch.stack([p.tensor(0) for p in ranks(o)])
    return {"output.0": copied(parts.reshape(o.output().shape) if parts.numel() == o.output().numel() else parts)}


@operator("ReduceScatterOperation")
def reduce_scatter(o: Operands) -> Outputs:
    kind = o.param("reduceType", "sum")
    each = ranks(o)
    parts = [p.tensor(0).chunk(len(each))[o.param("rank", 0)] for p in each]
    if kind == "sum":
        return {"output.0": summed([_whole(p) for p in parts], o.unit)}
    if kind not in ("max", "min"):
        raise Declined(f"reduceType {kind[:20]!r} has no reference")
    stack = torch.stack(parts)
    return {"output.0": copied(stack.amax(0) if kind == "max" else stack.amin(0))}


@operator("BroadcastOperation")
def broadcast(o: Operands) -> Outputs:
    root = o.param("rankRoot", 0)
    each = ranks(o)
    if not 0 <= root < len(each):
        raise Declined(f"rankRoot {root} is none of {len(each)} ranks")
    return dict.fromkeys(("output.0", "inplace.0"), copied(each[root].tensor(0)))


def _product(o: Operands, x: Tensor | None = None) -> Expected:
    left, weight = matrices(o, False, o.param("transWeight", True))
    left = left if x is None else x
    quant = o.param("quantType", _UNQUANTISED)
    if quant == _UNQUANTISED:
        return multiplied(left, weight)
    if quant not in (_PER_TENSOR, _PER_CHANNEL) or o.param("outDataType", UNDEFINED) not in ACL:
        raise Declined(f"quantType {quant} of a product over ranks has no reference")
    return dequantised(o, left, weight, o.maybe(2), o.tensor(3), None)


@operator("LinearParallelOperation")
def linear_parallel(o: Operands) -> Outputs:
    """(x, weight, residual where there is one), or of codes (x, weight, bias, scale, residual)"""
    kind, found = o.param("type", ALL_REDUCE), {}
    if kind == ALONE:
        y = _product(o)
    elif kind == ALL_GATHER:
        x = torch.cat([p.tensor(0) for p in ranks(o)])
        y = _product(o, x)
        if o.param("keepIntermediate", False):
            found["output.1"] = copied(x)
    elif kind in (ALL_REDUCE, REDUCE_SCATTER):
        each = ranks(o)
        y = summed([_product(p) for p in each], o.unit)
        if kind == REDUCE_SCATTER:
            rank = o.param("rank", 0)
            parts = (None if t is None else t.chunk(len(each))[rank] for t in (y.value, y.noise, y.bound))
            value, noise, bound = parts
            y = Expected(value, noise, bound=bound)
    else:
        raise Declined(f"type {kind} of a product over ranks has no reference")
    if o.param("hasResidual", False):
        y = added(y, _whole(o.tensor(2 if o.param("quantType", _UNQUANTISED) == _UNQUANTISED else 4)))
    return {"output.0": reshaped(y, o.output().shape), **found}
