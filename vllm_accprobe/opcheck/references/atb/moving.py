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
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected, decline_if
from vllm_accprobe.opcheck.references.atb.operands import NO_FIT, Operands, operator
from vllm_accprobe.opcheck.references.parts import within
from vllm_accprobe.opcheck.roundings import ROUNDED, SUM, subnormal

Tensor = Any  # a torch.Tensor
moves: Any = partial(operator, moves=True)


def _split(o: Operands) -> Any:
    dim, count = o.axis("splitDim", 0), o.param("splitNum", 2)
    x, long = o.tensor(0), o.tensor(0).shape[dim]
    most = max(long, len(o.call.outputs))  # an empty one has parts, too
    return x.split(o.integers("splitSizes", []) or [long // count] * min(count, most), dim)


_AT_ONCE: Mapping[str, Callable[[Operands], Any]] = {
    "TransposeOperation": lambda o: o.tensor(0).permute(o.integers("perm")), "SplitOperation": _split,
    "WhereOperation": lambda o: torch.where(o.tensor(0).bool(), o.tensor(1), o.tensor(2)),  # a condition of 0 and 1
}  # fmt: skip


@moves(*_AT_ONCE)
def at_once(o: Operands) -> Any:
    """What is one operation of torch."""
    return _AT_ONCE[o.call.cls](o)


@moves("GatherOperation")
def gather(o: Operands) -> Tensor:
    """(x, indices)"""
    x, batch, axis = o.tensor(0), o.param("batchDims", 0), o.axis("axis", 0)
    at = within(o.tensor(1), x.shape[axis])
    decline_if(not 0 <= batch <= axis or x.shape[:batch] != at.shape[:batch], NO_FIT)
    lead = x.shape[:batch].numel()
    o.fits(x.numel() // max(x.shape[axis], 1) * (at.numel() // max(lead, 1)))
    each = zip(x.reshape(lead, *x.shape[batch:]), at.reshape(lead, -1), strict=True)
    y = torch.stack([part.index_select(axis - batch, own) for part, own in each])
    return y.reshape(*x.shape[:axis], *at.shape[batch:], *x.shape[axis + 1 :])


@moves("ConcatOperation")
def concat(o: Operands) -> Tensor:
    parts = [o.tensor(k) for k in range(len(o))]
    decline_if(len({p.dim() for p in parts}) != 1 or len({p.dtype for p in parts}) != 1, NO_FIT)
    return torch.cat(parts, o.axis("concatDim", 0))


@moves("SliceOperation")
def slice_of(o: Operands) -> Tensor:
    y = o.tensor(0)
    for dim, (offset, size) in enumerate(zip(o.integers("offsets"), o.integers("size"), strict=True)):
        first = offset if offset >= 0 else offset + y.shape[dim]
        decline_if(first < 0, NO_FIT)  # torch would count it from the end again
        y = y.narrow(dim, first, size if size != -1 else y.shape[dim] - first)
    return y


@moves("AsStridedOperation")
def as_strided(o: Operands) -> Tensor:
    x, size, stride = o.tensor(0), o.integers("size"), o.integers("stride")
    offset = [*o.integers("offset", []), 0][0]
    decline_if(min([offset, *size, *stride]) < 0, NO_FIT)
    o.fits(math.prod(size))
    if offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n) >= max(x.numel(), 1):
        raise Declined("its strides lead out of its input")
    return torch.as_strided(x.contiguous(), size, stride, offset)


@moves("RepeatOperation")
def repeat(o: Operands) -> Tensor:
    o.fits(o.tensor(0).numel() * math.prod(o.integers("multiples")))
    return o.tensor(0).repeat(o.integers("multiples"))


@moves("SetValueOperation", writes=0)
def set_value(o: Operands) -> Tensor:
    """(dst, src), dst in place."""
    dst, src = o.tensor(0).clone(), o.tensor(1)
    starts, ends = o.integers("starts"), o.integers("ends")
    decline_if(any(n != 1 for n in o.numbers("strides", [])) or min(starts) < 0, NO_FIT)
    part = dst
    for dim, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        part = part.narrow(dim, begin, end - begin)
    decline_if(part.shape != src.shape, NO_FIT)
    part.copy_(src)
    return dst


@moves("TransdataOperation")
def transdata(o: Operands) -> Tensor:
    x, kind = o.tensor(0), o.param("transdataType", 0)
    if kind == 1:
        b, n1, m, n0 = x.shape
        rows, columns = o.integers("outCrops", [0, 0])
        decline_if(not (0 < rows <= m and 0 < columns <= n1 * n0), NO_FIT)
        return x.transpose(1, 2).reshape(b, m, n1 * n0)[:, :rows, :columns]
    decline_if(kind != 2 or x.dim() not in (2, 3), f"transdataType {kind} of {list(x.shape)} has no reference")
    x = x.reshape(-1, *x.shape[-2:])
    wide = 32 if x.dtype == torch.int8 else 16
    b, m, n = x.shape
    up = torch.zeros(b, -(-m // 16) * 16, -(-n // wide) * wide, dtype=x.dtype)
    up[:, :m, :n] = x
    return up.reshape(b, up.shape[1], -1, wide).transpose(1, 2)


def _runs(lengths: list[int], count: int, most: int) -> list[int]:
    """Lengths of ``count`` requests; raises Declined where one is beyond ``most``."""
    decline_if(len(lengths) != count or any(not 0 <= n <= most for n in lengths), "its lengths do not fit its input")
    return lengths


@moves("UnpadOperation")
def unpad(o: Operands) -> list[Tensor]:
    """(tokens [batch, most], sums of paddings, number of tokens, lengths) → (tokens, offsets, offset of each)"""
    ids = o.tensor(0)
    lengths, sums = _runs(o.counts(3), *ids.shape), o.counts(1)
    decline_if(len(sums) != len(ids), NO_FIT)
    before, found = torch.tensor([0, *sums[:-1]]), torch.zeros(2, ids.numel(), dtype=torch.int64)
    found[0, : sum(lengths)] = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])
    found[1, : sum(lengths)] = before.repeat_interleave(torch.tensor(lengths))
    return [t.reshape(o.output(k).shape) for k, t in enumerate((found[0], before, found[1]))]


@moves("PadOperation")
def pad(o: Operands) -> Tensor:
    """(rows, offset of each, lengths, tokens [batch, most]) → the last row of each request."""
    lengths = o.counts(2)
    ends = torch.tensor(_runs(lengths, len(lengths), o.tensor(3).shape[-1])).cumsum(0) - 1
    return o.tensor(0)[within(ends, len(o.tensor(0)))]


@moves("UnpadWithHiddenStateOperation")
def unpad_rows(o: Operands) -> Tensor:
    x = o.tensor(0)
    lengths = _runs(o.integers("qSeqLen"), *x.shape[:2])
    return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])


@moves("PadWithHiddenStateOperation")
def pad_rows(o: Operands) -> Tensor:
    x, most, lengths = o.tensor(0), o.param("maxSeqLen", 0), o.integers("qSeqLen")
    _runs(lengths, len(lengths), most)
    o.fits(len(lengths) * most * x.shape[-1])
    y = torch.zeros(len(lengths), most, x.shape[-1], dtype=x.dtype)
    for row, part in zip(y, x.split(lengths), strict=True):
        row[: len(part)] = part
    return y


@moves("GenAttentionMaskOperation")
def attention_masks(o: Operands) -> Tensor:
    x, heads, lengths = o.tensor(0), o.param("headNum", 1), o.integers("seqLen")
    _runs(lengths, min(len(lengths), len(x)), min(x.shape[-2:]))
    o.fits(heads * sum(x[i, ..., :n, :n].numel() for i, n in enumerate(lengths)))
    parts = [x[i, ..., :n, :n].reshape(-1).repeat(heads) for i, n in enumerate(lengths)]
    return torch.cat(parts).reshape(o.output().shape)


@moves("ScatterElementsV2Operation", writes=0)
def scatter(o: Operands) -> Any:
    """(x, indices, updates), x in place."""
    x, at, more, axis = o.tensor(0), o.tensor(1).long(), o.tensor(2), o.axis("axis", -1)
    if not o.param("reduction", 0):
        return x.scatter(axis, at, more.to(x.dtype))
    y = x.double().scatter_add(axis, at, more.double())
    size = x.double().abs().scatter_add(axis, at, more.double().abs())
    # each addition to a place may be rounded, the last one is the result's
    times = torch.zeros_like(size).scatter_add(axis, at, torch.ones_like(more, dtype=torch.float64)).clamp(min=1.0)
    return Expected(y, ROUNDED * o.unit * times.sqrt() * size, bound=times * o.unit * size)


@moves("IndexAddOperation", writes=0)
def index_add(o: Operands) -> Expected:
    """(x, indices, updates, alpha), or with INDEX_ADD_VALID (x, indices, updates, how many of them are valid)."""
    x, kind, axis = o.wide(0), o.param("indexType", 0), o.axis("axis", 0)
    decline_if(kind not in (1, 2), f"indexType {kind} is none that is known here")
    last, at, more = float(o.tensor(3).reshape(-1)[0]), o.tensor(1), o.wide(2)
    if kind == 2:
        at, more, last = at[: int(last)], more.narrow(axis, 0, int(last)), 1.0
    at = within(at, x.shape[axis])
    y, size = x.index_add(axis, at, more, alpha=last), x.abs().index_add(axis, at, more.abs(), alpha=abs(last))
    times = float(torch.bincount(at).max()) if len(at) else 0.0
    # each addition may be rounded to the tensor's dtype
    least = subnormal(o.unit, times)
    return Expected(y, ROUNDED * (o.unit * times**0.5 * size + least),
                    bound=(times * o.unit + times * SUM) * size + least)  # fmt: skip


@moves("NonzeroOperation")
def nonzero(o: Operands) -> list[Tensor]:
    """→ (indices [dimensions, elements], how many)"""
    x = o.tensor(0)
    at = x.nonzero().T
    y = torch.zeros(x.dim(), x.numel(), dtype=torch.int64)
    y[:, : at.shape[1]] = at
    return [y, torch.tensor(at.shape[1]).reshape(o.output(1).shape)]
