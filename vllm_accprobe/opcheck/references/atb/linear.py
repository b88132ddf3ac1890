"""Products of ATB: Linear, its quantised and activated forms, Matmul, and operators over ranks.

Formula: y = A B + bias, A and B transposed where transposeA, transposeB say so; batches by torch.matmul's rule;
einstein sum: each batch b of x [m, b, k] has its own weight. accum: what is added to. Quantised: y = (A B + bias) *
scale of the column * scale of the token, with A and B int8 and the sum an exact int32 [B. Jacob et al., arXiv
1712.05877, equation 7]; the scale for float16 is a float32 in the lower half of an int64 [CANN, aclnnTransQuantParam].
Weights in FRACTAL_NZ, [b, k1, n, 16] (int8: 32), are put back. W8A16: y = x ((W + offset) * scale) [CANN,
aclnnWeightQuantBatchMatmulV2]. Codes: q = round(x / s + offset); dynamic s = largest |x| of a row / 127; asymmetric: s
= (max - min) / 255, offset = -(max + min) / (2 s). Over ranks: what each rank gave, added up, put together, or handed
on from rankRoot; all ranks' tensors are needed (``extra["ranks"]``), and each part and each sum on the way may be
rounded. A weight that a tool compressed (LinearSparse) is declined: its layout is not public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, decline_if, only
from vllm_accprobe.opcheck.references.activations import alone, gelu_tanh, silu
from vllm_accprobe.opcheck.references.atb.operands import ACL, UNDEFINED, Operands, Outputs, operator
from vllm_accprobe.opcheck.references.caches import coded as coded_in
from vllm_accprobe.opcheck.references.linear import biased, by_batch, product
from vllm_accprobe.opcheck.references.parts import equal, reshaped, unit_of
from vllm_accprobe.opcheck.roundings import added, rounded, summed

Tensor = Any  # a torch.Tensor
SYMMETRIC, ASYMMETRIC = 1, 2
_SCALE = 2.0**-20
"""Chosen: relative error of a scale, a quotient in float32 of the largest of a row."""
_SLACK = 2.0**-9
"""Chosen: how much further than in caches.py a code may be from its number: x times 1 / scale instead of x / scale."""


def coded(exact: Tensor, mine: Tensor, error: Tensor | float = 0.0, like: Expected | None = None) -> Expected:
    """What ``exact``, float64, may become in int8: mine's own codes where they are within half a step of it and
    ``error``, else the nearest. like: what has a reference for the same rows. Raises Declined."""
    if mine.dtype != torch.int8:
        raise Declined(f"codes in {str(mine.dtype).removeprefix('torch.')} have no reference")
    decline_if(exact.numel() != mine.numel(), f"codes for {list(exact.shape)} where {list(mine.shape)} was captured")
    error = error.reshape(mine.shape) if isinstance(error, torch.Tensor) else error
    y = equal(coded_in(exact.reshape(mine.shape).clamp(-128, 127), mine, torch.int8, error=error + _SLACK))
    return y if like is None else replace(y, rows=like.rows, reason=like.reason)


def dynamic(o: Operands, y: Expected, kind: int) -> dict[str, Expected]:
    """Codes, scale and, asymmetric, offset of each row of ``y``."""
    decline_if(kind not in (SYMMETRIC, ASYMMETRIC), f"dynamicQuantType {kind} is none that is known here")
    x, mine = y.value, o.output()
    error = torch.zeros_like(x) if y.bound is None else y.bound.expand_as(x)
    scale, found = o.output(1), {}
    decline_if(scale.numel() != x.shape[:-1].numel(), "its scales are not those of rows")
    high, low = x.amax(-1), x.amin(-1)
    size = (high - low) / 255.0 if kind == ASYMMETRIC else x.abs().amax(-1) / 127.0
    off = error.amax(-1) / (255.0 if kind == ASYMMETRIC else 127.0) * (2.0 if kind == ASYMMETRIC else 1.0)
    captured = scale.double().reshape(size.shape)
    value = torch.where(size == 0, captured, size)  # a row of zeros may have any scale
    bound = _SCALE * value + off
    found["output.1"] = reshaped(Expected(value, bound, bound=bound), scale.shape)
    divisor = torch.where(captured == 0, 1.0, captured)
    step = divisor.unsqueeze(-1)
    exact = x / step
    wide = error / step.abs()
    if kind == ASYMMETRIC:
        shift = o.output(2)
        own = shift.double().reshape(size.shape)
        right = -(high + low) / (2.0 * divisor)
        near = _SCALE * (1.0 + right.abs()) + 2.0 * error.amax(-1) / divisor.abs()
        found["output.2"] = reshaped(Expected(right, near, bound=near), shift.shape)
        exact = exact + own.unsqueeze(-1)
    found["output.0"] = coded(exact, mine, wide)
    return only(found, rows=y.rows, reason=y.reason)


_PER_TOKEN, _EINSTEIN = 2, 1
_ACTIVATED = {1: torch.relu, 2: gelu_tanh, 4: silu}


def from_nz(t: Tensor) -> Tensor:
    """[b, n1, m, n0] of FRACTAL_NZ as [b, m, n1 * n0], without b where that is 1."""
    b, n1, m, n0 = t.shape
    plain = t.transpose(1, 2).reshape(b, m, n1 * n0)
    return plain[0] if b == 1 else plain


def scale_of(t: Tensor) -> Tensor:
    """A scale as float64: of an int64 the lower half is a float32's bits."""
    if t.dtype in (torch.int64, torch.uint64):
        return t.contiguous().view(torch.int32).reshape(-1, 2)[:, 0].contiguous().view(torch.float32).double()
    return t.double()


def _matrices(o: Operands, a: bool = False, b: bool = True) -> tuple[Tensor, Tensor]:
    """`matrices` by transposeA and transposeB, whose defaults are these."""
    return matrices(o, o.param("transposeA", a), o.param("transposeB", b))


def matrices(o: Operands, a: bool, b: bool) -> tuple[Tensor, Tensor]:
    """A [..., m, k] and B [..., k, n] in their own dtypes. a, b: whether they are transposed."""
    x, weight = o.tensor(0), o.tensor(1)
    if weight.dim() == 4 and x.dim() < 4:
        if weight.shape[-1] not in (16, 32):
            raise Declined(f"a weight {list(weight.shape)} is in no layout that is known here")
        weight = from_nz(weight)
    x = x.transpose(-1, -2) if a else x
    weight = weight.transpose(-1, -2) if b else weight
    if weight.dim() < 2 or x.dim() < 1 or x.shape[-1] > weight.shape[-2]:
        raise Declined(f"weight {list(o.tensor(1).shape)} does not fit an input {list(o.tensor(0).shape)}")
    return x, weight[..., : x.shape[-1], :]  # NZ is padded to multiples of 16


def multiplied(x: Tensor, weight: Tensor) -> Expected:
    """A B in float64, batch by batch where B has batches."""
    if weight.dim() == 2:
        return product(x.double(), weight.double().transpose(0, 1))
    if weight.dim() != 3 or x.dim() != 3 or len(x) != len(weight):
        raise Declined(f"weight {list(weight.shape)} does not fit an input {list(x.shape)}")
    return by_batch(x.double(), weight.double())


def times(y: Expected, factor: Tensor) -> Expected:
    """``y`` times an exact factor, one float32 rounding of it."""
    size = factor.abs()
    value = y.value * factor
    noise = combined(None if y.noise is None else y.noise * size, 2.0**-24 * value.abs())
    return replace(
        y, value=value, noise=noise, bound=None if y.bound is None else y.bound * size + 2.0**-23 * value.abs()
    )


def _fitted(y: Expected, like: Tensor) -> Expected:
    """Without the columns that NZ pads, in the captured shape."""
    width = like.shape[-1] if like.dim() else 1
    if y.value.shape[-1] > width:
        y = y.map(lambda t: t[..., :width])
    if y.value.numel() != like.numel():
        raise Declined(f"a product {list(y.value.shape)} where {list(like.shape)} was captured")
    return reshaped(y, like.shape)


def dequantised(
    o: Operands, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, token: Tensor | None
) -> Expected:
    """(A B + bias) * scale * scale of the token, from codes."""
    y = multiplied(x, weight)
    if x.dtype == torch.int8 and weight.dtype == torch.int8:
        y = replace(y, noise=torch.zeros_like(y.value), bound=torch.zeros_like(y.value))  # a sum in int32 is exact
    if bias is not None:
        y = replace(y, value=y.value + bias.double())
    y = times(y, scale_of(scale))
    return y if token is None else times(y, scale_of(token).reshape(-1, 1))


@operator("LinearOperation")
def linear(o: Operands) -> Expected:
    """(x, weight, bias or accum where there is one, scale of the columns and of the tokens where it is quantised)"""
    out_type = o.param("outDataType", UNDEFINED)
    bias, accum = o.param("hasBias", True), o.param("enAccum", False)
    x, weight = _matrices(o)
    token_scales = o.param("quantMode", 0) == _PER_TOKEN
    o.exactly(2 + (bias or accum) + (0 if out_type == UNDEFINED else 1 + token_scales))
    if out_type == UNDEFINED and not (x.is_floating_point() and weight.is_floating_point()):
        raise Declined("codes without an outDataType have no reference")
    if o.param("matmulType", 0) == _EINSTEIN:
        decline_if(x.dim() != 3, "an einstein sum of another form than m b k")
        batches = x.transpose(0, 1)
        each = weight if weight.dim() == 3 else weight.expand(len(batches), *weight.shape)
        y = multiplied(batches, each).map(lambda t: t.transpose(0, 1))
        if bias:
            y = biased(y, o.wide(2), o.unit)
    elif out_type == UNDEFINED:
        y = multiplied(x, weight)
        if bias or accum:
            more = o.wide(2)
            if bias and more.dim() == 2 and y.value.dim() == 3 and len(more) == len(y.value):
                more = more.unsqueeze(1)  # one for each batch
            y = biased(y, more, None if accum else unit_of(o.tensor(2)))
    else:
        decline_if(out_type not in ACL, f"outDataType {out_type} is none that is known here")
        decline_if(bias and token_scales, "a bias beside scales of tokens has no reference")
        token = o.tensor(3) if token_scales else None
        scale = o.tensor(3 if bias else 2)
        y = dequantised(o, x, weight, o.tensor(2) if bias else None, scale, token)
    return _fitted(y, o.output())


def _activated(o: Operands, y: Expected) -> Expected:
    kind = o.param("activationFuncType", 0)
    decline_if(kind not in _ACTIVATED, f"activationFuncType {kind} has no reference behind a product")
    if kind == 1:
        return replace(y, value=torch.relu(y.value))
    if y.noise is None or y.bound is None:
        raise Declined("its product's error is not known")
    own = alone(y.value, _ACTIVATED[kind], o.unit)
    # |d silu / dx| and |d gelu / dx| are below 1.13
    noise, bound = combined(own.noise, 1.13 * y.noise), own.bound + 1.13 * y.bound
    return Expected(own.value, noise, bound=bound)


def _of_codes(o: Operands) -> Expected:
    """(x int8, weight int8, bias int32 where there is one, scale of the columns)"""
    bias = o.tensor(2) if o.param("hasBias", True) else None
    return dequantised(o, *_matrices(o), bias, o.tensor(2 if bias is None else 3), None)


def _with_bias(o: Operands) -> Expected:
    """(x, weight, bias where there is one)"""
    y = multiplied(*_matrices(o))
    return biased(y, o.wide(2), None) if o.param("hasBias", True) else y


def _compressed(o: Operands) -> Expected:
    """(x int8, weight int8 as its tool compressed it, bias int32, scale, index of the compression)"""
    whole = o.tensor(1).dim() >= 2 and o.maybe(4) is None
    decline_if(not whole, "its weight was compressed, and the layout of that is not public")
    return dequantised(o, *_matrices(o), o.maybe(2), o.tensor(3), None)


_PRODUCTS: Mapping[str, Callable[[Operands], Expected]] = {
    "LinearQuantOperation": _of_codes,
    "LinearActivationOperation": lambda o: _activated(o, rounded(_with_bias(o), o.unit)),
    "LinearActivationQuantOperation": lambda o: _activated(o, rounded(_of_codes(o), o.unit)),
    "MatmulOperation": lambda o: multiplied(*_matrices(o, b=False)),
    "LinearSparseOperation": _compressed,
}
"""The activated ones and LinearQuant are of ATB before 2.0."""


@operator(*_PRODUCTS)
def products(o: Operands) -> Expected:
    return _fitted(_PRODUCTS[o.call.cls](o), o.output())


@operator("W8A16Operation")
def w8a16(o: Operands) -> Expected:
    """(x, weight int8, [k, n] or turned, scale, offset, bias): MindIE's node around aclnnWeightQuantBatchMatmulV2."""
    x, codes = o.wide(0), o.wide(1)
    turned = o.param("transposeB", False)
    scale, offset = o.wide(2), o.maybe(3)
    k, n = reversed(codes.shape) if turned else codes.shape
    if scale.numel() not in (1, n) or (offset is not None and offset.numel() != scale.numel()):
        raise Declined("scales of groups have no reference")
    shape = (-1, 1) if turned else (1, -1)
    wide = codes if offset is None else codes + offset.double().reshape(shape)
    weight = wide * scale.reshape(shape)
    weight = weight if turned else weight.T
    y = product(x, weight)
    size = o.input_unit * (x.abs() @ weight.abs().T)  # the weight is rounded to x's dtype
    y = Expected(y.value, combined(y.noise, size / k**0.5), bound=None if y.bound is None else y.bound + size)
    if o.param("hasBias", False):
        y = biased(y, o.wide(4), o.unit)
    return _fitted(y, o.output())


@operator("StridedBatchMatmulOperation")
def strided_batch(o: Operands) -> Expected:
    """Matrices that lie in flat A, B and C by leading dimensions and strides, batch by batch, head by head."""
    a, b, out = o.wide(0).reshape(-1), o.wide(1).reshape(-1), o.output()
    batch, heads = o.param("batch", 1), o.param("headNum", 1)
    turned = [o.param(f"trans{x}" if o.has(f"trans{x}") else f"transpose{x}", False) for x in "AB"]
    sizes = [o.integers(n) for n in ("m", "n", "k", "lda", "ldb", "ldc", "strideA", "strideB", "strideC")]
    decline_if(any(len(v) < batch for v in sizes) or batch * heads > out.numel(), "its sizes do not fit its batch")
    parts = [torch.zeros(out.numel(), dtype=torch.float64) for _ in range(3)]
    at_a = at_b = at_c = 0
    for _, (m, n, k, lda, ldb, ldc, step_a, step_b, step_c) in zip(
        range(batch), zip(*sizes, strict=False), strict=False
    ):
        for j in range(heads):
            left = _strided(a, at_a + step_a * j, lda, *((k, m) if turned[0] else (m, k)))
            right = _strided(b, at_b + step_b * j, ldb, *((n, k) if turned[1] else (k, n)))
            y = product(left.T if turned[0] else left, right if turned[1] else right.T)
            for flat, part in zip(parts, (y.value, y.noise, y.bound), strict=True):
                _strided(flat, at_c + step_c * j, ldc, m, n).copy_(part)
        at_a, at_b, at_c = at_a + m * k * heads, at_b + k * n * heads, at_c + m * n * heads
    return reshaped(Expected(parts[0], parts[1], bound=parts[2]), out.shape)


def _strided(flat: Tensor, start: int, lead: int, rows: int, columns: int) -> Tensor:
    """rows x columns from ``start`` on, ``lead`` apart; raises Declined where that is not in ``flat``."""
    if min(start, lead, rows, columns) < 0 or (rows and start + lead * (rows - 1) + columns > len(flat)):
        raise Declined("its strides lead out of its tensors")
    return flat.as_strided((rows, columns), (lead, 1), start)


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
def all_reduce(o: Operands) -> Any:
    kind = o.param("allReduceType", "sum")
    decline_if(o.param("quantType", 0), "a quantised sum over ranks has no reference")
    parts = [p.tensor(0) for p in ranks(o)]
    decline_if(len({p.shape for p in parts}) != 1, "its ranks gave tensors of several shapes")
    if kind in ("sum", "prod") and not parts[0].is_floating_point():
        return Expected(getattr(torch.stack(parts).long(), kind)(0), unit=0.0)
    if kind == "prod":
        y = torch.stack(parts).double().prod(0)
        noise, bound = (o.unit * times * y.abs() for times in ((len(parts) - 1) ** 0.5, len(parts)))
        return Expected(y, noise, bound=bound)
    return _reduced("allReduceType", kind, parts, o.unit)


def _reduced(name: str, kind: str, parts: list[Tensor], unit: float) -> Any:
    if kind in ("max", "min"):
        return getattr(torch.stack(parts), f"a{kind}")(0)
    decline_if(kind != "sum", f"{name} {kind[:20]!r} has no reference")
    return summed([_whole(p) for p in parts], unit)


@operator("AllGatherOperation")
def all_gather(o: Operands) -> Tensor:
    parts = torch.stack([p.tensor(0) for p in ranks(o)])
    return parts.reshape(o.output().shape) if parts.numel() == o.output().numel() else parts


@operator("ReduceScatterOperation")
def reduce_scatter(o: Operands) -> Any:
    each = ranks(o)
    parts = [p.tensor(0).chunk(len(each))[o.param("rank", 0)] for p in each]
    return _reduced("reduceType", o.param("reduceType", "sum"), parts, o.unit)


@operator("BroadcastOperation", writes=0)
def broadcast(o: Operands) -> Tensor:
    each, root = ranks(o), o.param("rankRoot", 0)
    decline_if(not 0 <= root < len(each), f"rankRoot {root} is none of {len(each)} ranks")
    return each[root].tensor(0)


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
            found["output.1"] = equal(x)
    elif kind in (ALL_REDUCE, REDUCE_SCATTER):
        each = ranks(o)
        y = summed([_product(p) for p in each], o.unit)
        if kind == REDUCE_SCATTER:
            rank = o.param("rank", 0)
            y = y.map(lambda t: t.chunk(len(each))[rank])
    else:
        raise Declined(f"type {kind} of a product over ranks has no reference")
    if o.param("hasResidual", False):
        y = added(y, _whole(o.tensor(2 if o.param("quantType", _UNQUANTISED) == _UNQUANTISED else 4)))
    return {"output.0": reshaped(y, o.output().shape), **found}
