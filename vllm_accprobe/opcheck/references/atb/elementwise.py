"""Elementwise operators of ATB by elewiseType, Where, Fill, Onehot.

Formulas: the names'. CAST is right to the bit where it goes to a float, and truncates or rounds to an integer, either
of which is taken; QUANT is round(x * inputScale + inputOffset), the scale as float16 [ATB's published quant kernel];
QUANT_PER_CHANNEL round(x / scale + offset); DEQUANT_PER_CHANNEL (x - offset) * scale; DYNAMIC_QUANT: quantise.py.
Comparisons and logic give int8. Noise of a function: APPROXIMATE; of a sum: reference.sum_of_two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, SUM, Declined, Expected, sum_of_two
from vllm_accprobe.opcheck.references.atb.operands import ACL, UNDEFINED, Operands, Outputs, chosen, copied, operator
from vllm_accprobe.opcheck.references.atb.quantise import ASYMMETRIC, SYMMETRIC, coded, dynamic
from vllm_accprobe.opcheck.references.parts import unit_of

Tensor = Any  # a torch.Tensor
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


def _once(value: Tensor) -> Expected:
    """Rounded once."""
    return Expected(value, bound=SUM * value.abs())


@operator("ElewiseOperation")
def elewise(o: Operands) -> Outputs:
    kind = o.param("elewiseType", 0)
    if kind in _COMPARED:
        return {"output.0": chosen(_COMPARED[kind](o.tensor(0), o.tensor(1)))}
    if kind == NOT:
        return {"output.0": chosen(~o.tensor(0).bool())}
    if kind in _FUNCTIONS:
        _floats(o, f"elewiseType {kind}")
        return {"output.0": _function(o, kind)}
    if kind in (ADD, SUB, MUL, DIV):
        return {"output.0": _of_two(o, kind)}
    if kind in (QUANT, QUANT_CHANNEL, DEQUANT_CHANNEL, DYNAMIC_QUANT):
        return _codes(o, kind)
    if kind == CAST:
        return {"output.0": _cast(o)}
    if kind == NEG:
        return {"output.0": copied(-o.tensor(0))}
    if kind == MULS:
        return {"output.0": _scaled(o)}
    raise Declined(f"elewiseType {kind} is none that is known here")


def _function(o: Operands, kind: int) -> Expected:
    x = o.wide(0)
    y = _FUNCTIONS[kind](x)
    if kind == TANH:
        return Expected(y, bound=APPROXIMATE * y.abs())
    # the angle is reduced in float32 at best, and its cosine is off by what the angle is
    return Expected(y, SUM * (1.0 + x.abs()), bound=APPROXIMATE * (1.0 + y.abs()) + 4.0 * SUM * x.abs())


def _of_two(o: Operands, kind: int) -> Expected:
    a, b = o.tensor(0), o.tensor(1)
    if not o.output().is_floating_point():
        if kind == DIV:
            raise Declined("a division of integers has no reference")
        a, b = a.long(), b.long()
        return chosen(a + b if kind == ADD else a - b if kind == SUB else a * b)
    a, b = a.double(), b.double()
    if kind in (ADD, SUB):
        return sum_of_two(a + b if kind == ADD else a - b, o.unit)
    y = a * b if kind == MUL else a / b
    return Expected(y, common=0.5 * o.unit if min(a.numel(), b.numel()) == 1 else 0.0, bound=2.0 * SUM * y.abs())


def _cast(o: Operands) -> Expected:
    x, out = o.tensor(0), o.output()
    asked = o.param("outTensorType", UNDEFINED)
    # a float's numbers may lie on a coarser grid, and be taken for that (calls/grid.py)
    if asked in ACL and ACL[asked].is_floating_point != out.is_floating_point():
        raise Declined(f"outTensorType {asked} is {ACL[asked]}, and {out.dtype} was captured")
    if out.is_floating_point():
        return copied(x.to(out.dtype))
    if not x.is_floating_point():
        return chosen(x.to(out.dtype))
    wide, held = x.double(), out.long()
    near = (held == wide.trunc().long()) | (held == wide.round().long())
    return Expected(torch.where(near, held, wide.trunc().long()), unit=0.0)


def _scaled(o: Operands) -> Expected:
    factor = (o.part("mulsParam") if o.has("mulsParam") else o).param("varAttr", 0.0)
    y = o.wide(0) * factor
    # the factor may be rounded to the tensor's dtype first
    return Expected(y, common=o.unit, bound=(o.unit + SUM) * y.abs())


def _codes(o: Operands, kind: int) -> Outputs:
    x = o.wide(0)
    if kind == DYNAMIC_QUANT:
        skewed = o.part("quantParam").param("asymmetric", False)
        return dynamic(o, Expected(x), ASYMMETRIC if skewed else SYMMETRIC)
    if kind == QUANT:
        p = o.part("quantParam") if o.has("quantParam") else o
        product = x * p.param("inputScale", 1.0)
        y = product + p.param("inputOffset", 0)
        unit = unit_of(o.tensor(0))  # scale, product and sum are rounded
        return {"output.0": coded(y, o.output(), unit * (2.0 * product.abs() + y.abs()))}
    scale, offset = o.wide(1), o.maybe(2)
    if kind == QUANT_CHANNEL:
        y = x / scale if offset is None else x / scale + offset.double()
        error = 2.0 * unit_of(o.tensor(0)) * ((x / scale).abs() + y.abs())  # a kernel may divide in the input's dtype
        return {"output.0": coded(y, o.output(), error)}
    y = (x if offset is None else x - offset.double()) * scale
    top = torch.finfo(o.output().dtype).max if o.output().is_floating_point() else 0.0
    _floats(o, "DEQUANT_PER_CHANNEL")
    return {"output.0": Expected(y.clamp(-top, top), bound=4.0 * SUM * y.abs())}


@operator("WhereOperation")
def where(o: Operands) -> Outputs:
    """(condition of 0 and 1, x, y)"""
    return {"output.0": copied(torch.where(o.tensor(0).bool(), o.tensor(1), o.tensor(2)))}


@operator("FillOperation")
def fill(o: Operands) -> Outputs:
    """(x, mask) with withMask: x, value where the mask is 1; else outDim numbers, all of them value."""
    out, value = o.output(), o.numbers("value")[0]
    if o.param("withMask", True):
        x = o.tensor(0)
        return {"output.0": copied(x.masked_fill(o.tensor(1).bool().expand_as(x), value))}
    shape = [int(n) for n in o.numbers("outDim")]
    if shape != list(out.shape):
        raise Declined("its parameters do not fit the output that was captured")
    return {"output.0": copied(torch.full(shape, value, dtype=out.dtype))}


@operator("OnehotOperation")
def onehot(o: Operands) -> Outputs:
    """(indices, one, zero): a new dimension ``axis`` of ``depth``."""
    x, depth, axis = o.tensor(0).long(), o.param("depth", 0), o.param("axis", 0)
    o.fits(x.numel() * depth)
    if not -x.dim() - 1 <= axis <= x.dim():
        raise Declined(f"axis {axis} is none of the output's")
    dim = axis if axis >= 0 else axis + x.dim() + 1
    y = (x.unsqueeze(dim) == torch.arange(depth).reshape(-1, *[1] * (x.dim() - dim))).long()
    one, zero = o.maybe(1), o.maybe(2)
    if one is not None and zero is not None and one.numel() == zero.numel() == 1:
        return {"output.0": copied(torch.where(y.bool(), one.reshape(()), zero.reshape(())))}
    return {"output.0": copied(y.to(o.output().dtype))}
