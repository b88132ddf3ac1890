"""Products of ATB: Linear, its quantised forms (W8A8, W8A16), its activated forms, Matmul, StridedBatchMatmul.

Formula: y = A B + bias, A and B transposed where transposeA, transposeB say so; batches by torch.matmul's rule;
einstein sum: each batch b of x [m, b, k] has its own weight. accum: what is added to. Quantised: y = (A B + bias) *
scale of the column * scale of the token, with A and B int8 and the sum an exact int32 [B. Jacob et al., arXiv
1712.05877, equation 7]; the scale for float16 is a float32 in the lower half of an int64 [CANN, aclnnTransQuantParam].
Weights in FRACTAL_NZ, [b, k1, n, 16] (int8: 32), are put back. W8A16: y = x ((W + offset) * scale) [CANN,
aclnnWeightQuantBatchMatmulV2]. Noise: references/linear.py. A weight that a tool compressed (LinearSparse) is declined:
its layout is not public.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, reference
from vllm_accprobe.opcheck.references.activations import alone, gelu_tanh, silu
from vllm_accprobe.opcheck.references.atb.operands import ACL, UNDEFINED, Operands, Outputs, operator
from vllm_accprobe.opcheck.references.linear import added, biased, product, rounded
from vllm_accprobe.opcheck.references.parts import reshaped, unit_of

Tensor = Any  # a torch.Tensor
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


def matrices(o: Operands, a: bool, b: bool) -> tuple[Tensor, Tensor]:
    """A [..., m, k] and B [..., k, n] in their own dtypes."""
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
    parts = [product(a.double(), b.double().transpose(0, 1)) for a, b in zip(x, weight, strict=True)]
    return _stacked(parts, 0)


def _stacked(parts: list[Expected], dim: int) -> Expected:
    value, noise, bound = (torch.stack([getattr(p, n) for p in parts], dim) for n in ("value", "noise", "bound"))
    return Expected(value, noise, bound=bound)


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
        y = replace(y, value=y.value[..., :width], noise=None if y.noise is None else y.noise[..., :width],
                    bound=None if y.bound is None else y.bound[..., :width])  # fmt: skip
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
def linear(o: Operands) -> Outputs:
    """(x, weight, bias or accum where there is one, scale of the columns and of the tokens where it is quantised)"""
    out_type = o.param("outDataType", UNDEFINED)
    bias, accum = o.param("hasBias", True), o.param("enAccum", False)
    x, weight = matrices(o, o.param("transposeA", False), o.param("transposeB", True))
    if o.param("matmulType", 0) == _EINSTEIN:
        if x.dim() != 3:
            raise Declined("an einstein sum of another form than m b k")
        by_batch = x.transpose(0, 1)
        each = weight if weight.dim() == 3 else weight.expand(len(by_batch), *weight.shape)
        y = multiplied(by_batch, each)
        value, noise, bound = (None if t is None else t.transpose(0, 1) for t in (y.value, y.noise, y.bound))
        y = Expected(value, noise, bound=bound)
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
        if out_type not in ACL:
            raise Declined(f"outDataType {out_type} is none that is known here")
        token = o.tensor(3) if o.param("quantMode", 0) == _PER_TOKEN else None
        scale = o.tensor(3 if bias else 2)
        y = dequantised(o, x, weight, o.tensor(2) if bias else None, scale, token)
    return {"output.0": _fitted(y, o.output())}


@operator("LinearQuantOperation")
def linear_quant(o: Operands) -> Outputs:
    """(x int8, weight int8, bias int32 where there is one, scale of the columns): ATB's before 2.0."""
    x, weight = matrices(o, o.param("transposeA", False), o.param("transposeB", True))
    bias = o.param("hasBias", True)
    y = dequantised(o, x, weight, o.tensor(2) if bias else None, o.tensor(3 if bias else 2), None)
    return {"output.0": _fitted(y, o.output())}


def _activated(o: Operands, y: Expected) -> Expected:
    kind = o.param("activationFuncType", 0)
    if kind not in _ACTIVATED:
        raise Declined(f"activationFuncType {kind} has no reference behind a product")
    if kind == 1:
        return replace(y, value=torch.relu(y.value))
    if y.noise is None or y.bound is None:
        raise Declined("its product's error is not known")
    own = alone(y.value, _ACTIVATED[kind], o.unit)
    # |d silu / dx| and |d gelu / dx| are below 1.13
    noise, bound = combined(own.noise, 1.13 * y.noise), own.bound + 1.13 * y.bound
    return Expected(own.value, noise, bound=bound)


@operator("LinearActivationOperation")
def linear_activation(o: Operands) -> Outputs:
    """(x, weight, bias where there is one): the product's activation: ATB's before 2.0."""
    x, weight = matrices(o, o.param("transposeA", False), o.param("transposeB", True))
    y = multiplied(x, weight)
    if o.param("hasBias", True):
        y = biased(y, o.wide(2), None)
    return {"output.0": _fitted(_activated(o, rounded(y, o.unit)), o.output())}


@operator("LinearActivationQuantOperation")
def linear_activation_quant(o: Operands) -> Outputs:
    """The same of codes: (x int8, weight int8, bias int32 where there is one, scale of the columns)."""
    x, weight = matrices(o, o.param("transposeA", False), o.param("transposeB", True))
    bias = o.param("hasBias", True)
    y = dequantised(o, x, weight, o.tensor(2) if bias else None, o.tensor(3 if bias else 2), None)
    return {"output.0": _fitted(_activated(o, rounded(y, o.unit)), o.output())}


@operator("MatmulOperation")
def matmul(o: Operands) -> Outputs:
    x, weight = matrices(o, o.param("transposeA", False), o.param("transposeB", False))
    return {"output.0": _fitted(multiplied(x, weight), o.output())}


@reference("LinearSparseOperation")
def linear_sparse(call: Call) -> Outputs:
    """(x int8, weight int8 as its tool compressed it, bias int32, scale, index of the compression)"""
    o = Operands(call)
    x, weight = o.tensor(0), o.tensor(1)
    whole = weight.dim() >= 2 and o.maybe(4) is None
    if not whole:
        raise Declined("its weight was compressed, and the layout of that is not public")
    x, weight = matrices(o, o.param("transposeA", False), o.param("transposeB", True))
    y = dequantised(o, x, weight, o.maybe(2), o.tensor(3), None)
    return {"output.0": _fitted(y, o.output())}


@operator("W8A16Operation")
def w8a16(o: Operands) -> Outputs:
    """(x, weight int8, scale, offset, bias where there is one): MindIE's node around aclnnWeightQuantBatchMatmulV2; a
    weight [k, n], or [n, k] with transposeB."""
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
    size = unit_of(o.tensor(0)) * (x.abs() @ weight.abs().T)  # the weight is rounded to x's dtype
    y = Expected(y.value, combined(y.noise, size / k**0.5), bound=None if y.bound is None else y.bound + size)
    if o.param("hasBias", False):
        y = biased(y, o.wide(4), o.unit)
    return {"output.0": _fitted(y, o.output())}


@operator("StridedBatchMatmulOperation")
def strided_batch(o: Operands) -> Outputs:
    """Matrices that lie in flat A, B and C by leading dimensions and strides, batch by batch, head by head."""
    a, b, out = o.wide(0).reshape(-1), o.wide(1).reshape(-1), o.output()
    batch, heads = o.param("batch", 1), o.param("headNum", 1)
    turn_a, turn_b = (
        o.param(new if o.has(new) else old, False) for new, old in (("transA", "transposeA"), ("transB", "transposeB"))
    )
    size = {n: o.numbers(n) for n in ("m", "n", "k", "lda", "ldb", "ldc", "strideA", "strideB", "strideC")}
    if any(len(v) < batch for v in size.values()) or batch * heads > out.numel():
        raise Declined("its sizes do not fit its batch")
    value, noise, bound = (torch.zeros(out.numel(), dtype=torch.float64) for _ in range(3))
    at_a = at_b = at_c = 0
    for i in range(batch):
        m, n, k = (int(size[x][i]) for x in "mnk")
        for j in range(heads):
            left = _strided(a, at_a + int(size["strideA"][i]) * j, int(size["lda"][i]), *((k, m) if turn_a else (m, k)))
            right = _strided(
                b, at_b + int(size["strideB"][i]) * j, int(size["ldb"][i]), *((n, k) if turn_b else (k, n))
            )
            y = product(left.T if turn_a else left, right if turn_b else right.T)
            for flat, part in zip((value, noise, bound), (y.value, y.noise, y.bound), strict=True):
                _strided(flat, at_c + int(size["strideC"][i]) * j, int(size["ldc"][i]), m, n).copy_(part)
        at_a, at_b, at_c = at_a + m * k * heads, at_b + k * n * heads, at_c + m * n * heads
    return {"output.0": reshaped(Expected(value, noise, bound=bound), out.shape)}


def _strided(flat: Tensor, start: int, lead: int, rows: int, columns: int) -> Tensor:
    """rows x columns from ``start`` on, ``lead`` apart; raises Declined where that is not in ``flat``."""
    if min(start, lead, rows, columns) < 0 or (rows and start + lead * (rows - 1) + columns > len(flat)):
        raise Declined("its strides lead out of its tensors")
    return flat.as_strided((rows, columns), (lead, 1), start)


def summed(parts: list[Expected], unit: float) -> Expected:
    """The sum over ranks, each part and each sum rounded."""
    total = rounded(parts[0], unit)
    for part in parts[1:]:
        total = added(rounded(total, unit), rounded(part, unit))
    return total
