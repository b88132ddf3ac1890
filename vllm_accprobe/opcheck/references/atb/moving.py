"""Operators of ATB that move numbers and compute nothing: equal to the bit.

Formulas: Gather takes slices along axis, with batchDims leading dimensions in common; Concat, Split, Slice, Transpose,
AsStrided, Repeat as numpy has them; SetValue writes src into dst between starts and ends; Transdata to and from
FRACTAL_NZ, [b, n / n0, m, n0] of [b, m, n], padded by zeros to multiples of 16 rows and of n0 = 16 columns (int8: 32).
Unpad: the tokens of all requests one after the other, zeros behind; Pad: the last row of each request; with hidden
states: rows of requests, with and without padding to maxSeqLen. GenAttentionMask: each request's own square of its
mask, for each head. ScatterElementsV2, IndexAdd: written or added at indices. Nonzero: indices, padded by zeros.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected, decline_if
from vllm_accprobe.opcheck.references.atb.operands import Operands, Outputs, operator
from vllm_accprobe.opcheck.references.parts import equal
from vllm_accprobe.opcheck.roundings import ROUNDED, SUM, subnormal

Tensor = Any  # a torch.Tensor


def axis_of(axis: Any, dims: int) -> int:
    """A dimension counted from the front; raises Declined where there is none of this number."""
    if not isinstance(axis, int) or not -dims <= axis < max(dims, 1):
        raise Declined(f"{axis!r} is none of {dims} dimensions")
    return axis % max(dims, 1)


def within(index: Tensor, size: int) -> Tensor:
    """Indices as int64; raises Declined where one lies outside of ``size``."""
    found = index.long()
    if found.numel() and (int(found.min()) < 0 or int(found.max()) >= size):
        raise Declined("an index lies outside of what it is an index of")
    return found


@operator("GatherOperation")
def gather(o: Operands) -> Outputs:
    """(x, indices)"""
    x, index, batch = o.tensor(0), o.tensor(1), o.param("batchDims", 0)
    axis = axis_of(o.param("axis", 0), x.dim())
    at = within(index, x.shape[axis])
    if not 0 <= batch <= min(axis, at.dim()) or x.shape[:batch] != at.shape[:batch]:
        raise Declined(f"batchDims {batch} does not fit its inputs")
    o.fits(x.numel() // max(x.shape[axis], 1) * (at.numel() // max(at.shape[:batch].numel(), 1)))
    if not batch:
        y = x.index_select(axis, at.reshape(-1))
        return {"output.0": equal(y.reshape(*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]))}
    lead = x.shape[:batch].numel()
    flat, places = x.reshape(lead, *x.shape[batch:]), at.reshape(lead, -1)
    parts = [part.index_select(axis - batch, own) for part, own in zip(flat, places, strict=True)]
    y = torch.stack(parts)
    return {"output.0": equal(y.reshape(*x.shape[:axis], *at.shape[batch:], *x.shape[axis + 1 :]))}


@operator("ConcatOperation")
def concat(o: Operands) -> Outputs:
    parts = [o.tensor(k) for k in range(len(o))]
    if len({p.dim() for p in parts}) != 1 or len({p.dtype for p in parts}) != 1:
        raise Declined("its inputs do not fit together")
    return {"output.0": equal(torch.cat(parts, axis_of(o.param("concatDim", 0), parts[0].dim())))}


@operator("SplitOperation")
def split(o: Operands) -> Outputs:
    x, count, sizes = o.tensor(0), o.param("splitNum", 2), [int(n) for n in o.numbers("splitSizes", [])]
    dim = axis_of(o.param("splitDim", 0), x.dim())
    if not sizes:
        decline_if(count < 1 or x.shape[dim] % count, f"{x.shape[dim]} cannot be cut into {count} equal parts")
        sizes = [x.shape[dim] // count] * count
    decline_if(sum(sizes) != x.shape[dim] or min(sizes) < 0, f"splitSizes {sizes} do not fit {x.shape[dim]}")
    return {f"output.{k}": equal(part) for k, part in enumerate(x.split(sizes, dim))}


@operator("SliceOperation")
def slice_of(o: Operands) -> Outputs:
    y = o.tensor(0)
    offsets, sizes = ([int(n) for n in o.numbers(name)] for name in ("offsets", "size"))
    decline_if(not len(offsets) == len(sizes) <= y.dim(), "its offsets and sizes do not fit its input")
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        first = offset if offset >= 0 else offset + y.shape[dim]
        count = size if size != -1 else y.shape[dim] - first
        decline_if(first < 0 or count < 0 or first + count > y.shape[dim], "it cuts beyond its input")
        y = y.narrow(dim, first, count)
    return {"output.0": equal(y)}


@operator("TransposeOperation")
def transpose(o: Operands) -> Outputs:
    x, perm = o.tensor(0), [int(n) for n in o.numbers("perm")]
    if sorted(perm) != list(range(x.dim())):
        raise Declined(f"perm {perm} is no order of {x.dim()} dimensions")
    return {"output.0": equal(x.permute(perm))}


@operator("AsStridedOperation")
def as_strided(o: Operands) -> Outputs:
    x = o.tensor(0).contiguous()
    size, stride = ([int(n) for n in o.numbers(name)] for name in ("size", "stride"))
    (offset,) = [int(n) for n in o.numbers("offset", [0])][:1] or [0]
    decline_if(len(size) != len(stride) or min([offset, *size, *stride]) < 0, "its size and stride do not fit together")
    o.fits(math.prod(size))
    if offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n) >= max(x.numel(), 1):
        raise Declined("its strides lead out of its input")
    return {"output.0": equal(torch.as_strided(x, size, stride, offset))}


@operator("RepeatOperation")
def repeat(o: Operands) -> Outputs:
    x, multiples = o.tensor(0), [int(n) for n in o.numbers("multiples")]
    if len(multiples) < x.dim() or min(multiples) < 0:
        raise Declined(f"multiples {multiples} do not fit {x.dim()} dimensions")
    o.fits(x.numel() * math.prod(multiples))
    return {"output.0": equal(x.repeat(multiples))}


@operator("SetValueOperation")
def set_value(o: Operands) -> Outputs:
    """(dst, src), dst in place."""
    dst, src = o.tensor(0).clone(), o.tensor(1)
    starts, ends = ([int(n) for n in o.numbers(name)] for name in ("starts", "ends"))
    if any(n != 1 for n in o.numbers("strides", [])) or not len(starts) == len(ends) <= dst.dim():
        raise Declined("its starts, ends and strides do not fit")
    part = dst
    for dim, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        decline_if(not 0 <= begin <= end <= dst.shape[dim], "it writes beyond its input")
        part = part.narrow(dim, begin, end - begin)
    decline_if(part.shape != src.shape, f"{list(src.shape)} does not fit between its starts and ends")
    part.copy_(src)
    return dict.fromkeys(("inplace.0", "output.0"), equal(dst))


@operator("TransdataOperation")
def transdata(o: Operands) -> Outputs:
    x, kind = o.tensor(0), o.param("transdataType", 0)
    if kind == 1:
        decline_if(x.dim() != 4, f"{list(x.shape)} is not FRACTAL_NZ")
        b, n1, m, n0 = x.shape
        rows, columns = (int(n) for n in o.numbers("outCrops", [0, 0]))
        if not (0 < rows <= m and 0 < columns <= n1 * n0):
            raise Declined(f"outCrops {rows}, {columns} do not fit {list(x.shape)}")
        return {"output.0": equal(x.transpose(1, 2).reshape(b, m, n1 * n0)[:, :rows, :columns])}
    decline_if(kind != 2 or x.dim() not in (2, 3), f"transdataType {kind} of {list(x.shape)} has no reference")
    x = x.reshape(-1, *x.shape[-2:])
    wide = 32 if x.dtype == torch.int8 else 16
    b, m, n = x.shape
    up = torch.zeros(b, -(-m // 16) * 16, -(-n // wide) * wide, dtype=x.dtype)
    up[:, :m, :n] = x
    return {"output.0": equal(up.reshape(b, up.shape[1], -1, wide).transpose(1, 2))}


def _lengths(o: Operands, k: int, most: int) -> list[int]:
    found = [int(n) for n in o.tensor(k).reshape(-1)]
    decline_if(any(not 0 <= n <= most for n in found), "a length is beyond its tensor")
    return found


@operator("UnpadOperation")
def unpad(o: Operands) -> Outputs:
    """(tokens [batch, most], sums of paddings, number of tokens, lengths) → (tokens, offsets, offset of each)"""
    ids = o.tensor(0)
    batch, most = ids.shape
    lengths, sums = _lengths(o, 3, most), [int(n) for n in o.tensor(1).reshape(-1)]
    decline_if(len(lengths) != batch or len(sums) != batch, "its lengths do not fit its batch")
    kept = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])
    before = [0, *sums[:-1]]
    own = [off for off, n in zip(before, lengths, strict=True) for _ in range(n)]
    tokens, offsets = (torch.zeros(batch * most, dtype=torch.int64) for _ in range(2))
    tokens[: len(kept)], offsets[: len(own)] = kept.long(), torch.tensor(own, dtype=torch.int64)
    found = (tokens, torch.tensor(before), offsets)
    return {f"output.{k}": equal(t.reshape(o.output(k).shape)) for k, t in enumerate(found)}


@operator("PadOperation")
def pad(o: Operands) -> Outputs:
    """(rows, offset of each, lengths, tokens [batch, most]) → the last row of each request."""
    rows, most = o.tensor(0), o.tensor(3).shape[-1]
    ends = torch.tensor(_lengths(o, 2, most)).cumsum(0) - 1
    return {"output.0": equal(rows[within(ends, len(rows))])}


@operator("UnpadWithHiddenStateOperation")
def unpad_rows(o: Operands) -> Outputs:
    x = o.tensor(0)
    lengths = [int(n) for n in o.numbers("qSeqLen")]
    if len(lengths) != len(x) or any(not 0 <= n <= x.shape[1] for n in lengths):
        raise Declined("qSeqLen does not fit its input")
    return {"output.0": equal(torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]))}


@operator("PadWithHiddenStateOperation")
def pad_rows(o: Operands) -> Outputs:
    x, most = o.tensor(0), o.param("maxSeqLen", 0)
    lengths = [int(n) for n in o.numbers("qSeqLen")]
    decline_if(sum(lengths) != len(x) or any(not 0 <= n <= most for n in lengths), "qSeqLen does not fit its input")
    o.fits(len(lengths) * most * x.shape[-1])
    y = torch.zeros(len(lengths), most, x.shape[-1], dtype=x.dtype)
    for row, part in zip(y, x.split(lengths), strict=True):
        row[: len(part)] = part
    return {"output.0": equal(y)}


@operator("GenAttentionMaskOperation")
def attention_masks(o: Operands) -> Outputs:
    x, heads = o.tensor(0), o.param("headNum", 1)
    lengths = [int(n) for n in o.numbers("seqLen")]
    if len(lengths) > len(x) or any(not 0 <= n <= min(x.shape[-2:]) for n in lengths):
        raise Declined("seqLen does not fit its input")
    o.fits(heads * sum(x[i, ..., :n, :n].numel() for i, n in enumerate(lengths)))
    parts = [x[i, ..., :n, :n].reshape(-1).repeat(heads) for i, n in enumerate(lengths)]
    return {"output.0": equal(torch.cat(parts).reshape(o.output().shape))}


@operator("ScatterElementsV2Operation")
def scatter(o: Operands) -> Outputs:
    """(x, indices, updates), x in place."""
    x, index, more = o.tensor(0), o.tensor(1), o.tensor(2)
    axis = axis_of(o.param("axis", -1), x.dim())
    at = within(index, x.shape[axis])
    if o.param("reduction", 0):
        y = x.double().scatter_add(axis, at, more.double())
        size = x.double().abs().scatter_add(axis, at, more.double().abs())
        # each addition to a place may be rounded, the last one is the result's
        times = torch.zeros_like(size).scatter_add(axis, at, torch.ones_like(more, dtype=torch.float64)).clamp(min=1.0)
        found = Expected(y, ROUNDED * o.unit * times.sqrt() * size, bound=times * o.unit * size)
    else:
        found = equal(x.scatter(axis, at, more.to(x.dtype)))
    return dict.fromkeys(("inplace.0", "output.0"), found)


@operator("IndexAddOperation")
def index_add(o: Operands) -> Outputs:
    """(x, indices, updates, alpha), or with INDEX_ADD_VALID (x, indices, updates, how many of them are valid)."""
    x, kind = o.wide(0), o.param("indexType", 0)
    axis, at, more = axis_of(o.param("axis", 0), o.tensor(0).dim()), o.tensor(1), o.wide(2)
    if kind == 2:
        valid = int(o.tensor(3).reshape(-1)[0])
        at, more, alpha = at[:valid], more.narrow(axis, 0, valid), 1.0
    elif kind == 1:
        alpha = float(o.wide(3).reshape(-1)[0])
    else:
        raise Declined(f"indexType {kind} is none that is known here")
    at = within(at, x.shape[axis])
    y, size = x.index_add(axis, at, more, alpha=alpha), x.abs().index_add(axis, at, more.abs(), alpha=abs(alpha))
    times = float(torch.bincount(at).max()) if len(at) else 0.0
    # each addition may be rounded to the tensor's dtype
    least = subnormal(o.unit, times)
    found = Expected(y, ROUNDED * (o.unit * times**0.5 * size + least),
                     bound=(times * o.unit + times * SUM) * size + least)  # fmt: skip
    return dict.fromkeys(("inplace.0", "output.0"), found)


@operator("NonzeroOperation")
def nonzero(o: Operands) -> Outputs:
    """→ (indices [dimensions, elements], how many)"""
    x = o.tensor(0)
    at = x.nonzero().T
    y = torch.zeros(x.dim(), x.numel(), dtype=torch.int64)
    y[:, : at.shape[1]] = at
    return {"output.0": equal(y), "output.1": equal(torch.tensor(at.shape[1]).reshape(o.output(1).shape))}
