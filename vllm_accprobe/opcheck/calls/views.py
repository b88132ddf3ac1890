"""Tensors of a call as they lay in memory: strides, offset, and what lies in the gaps.

The problem: a kernel that takes a view for contiguous is right for the contiguous tensors that a dump keeps. The idea:
a `MemoryLayout` has the captured stride and offset of an input, and the memory next to it where another record of the
step has it. `laid_out` puts each such input back into a storage of its own. What the memory between its rows was, or
else random numbers of the tensor's own size, fills the gaps: no row of it, and no NaN, which a right kernel may not
survive either.
This file is copied with the tests that gentest writes. Elsewhere: who writes strides down (capture/core/session.py),
where the memory is found (module_index.py), the cause (causes/addresses.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.random_inputs import draw, moments_of
from vllm_accprobe.opcheck.reference import Call, MemoryLayout, decline_if

_MOST = 1 << 26
"""Elements of a storage that is made again: a dump may come from a stranger."""
_READ = 1 << 24
"""Elements that `read_at` finds the places of, which takes 40 bytes for each."""
_FAR, _ALIGNED = 1 << 20, 4096
"""Chosen: a view that begins further on than this many elements begins at the remainder by the second number: a cache
is not made again for one of its layers, and what the address is a multiple of stays."""


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these strides leave no gaps and no other order, as torch has it."""
    expected = 1
    for n, s in zip(reversed(shape), reversed(stride), strict=True):
        if n != 1 and s != expected:
            return math.prod(shape) == 0
        expected *= n
    return True


def view_of(
    shape: Sequence[int], stride: Sequence[int] | None, offset: int = 0, memory: Any = None
) -> MemoryLayout | None:  # fmt: skip
    """A `MemoryLayout`, None for a contiguous tensor and for strides that are not those of ``shape``."""
    if stride is None or len(stride) != len(shape) or is_contiguous(shape, stride):
        return None
    return MemoryLayout(tuple(stride), offset, memory)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to behind the last one of a tensor; 0 for an empty one."""
    return sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if math.prod(shape) else 0


def by_place(call: Call, change: Callable[[Any, str], Any]) -> Call:
    """``call`` with ``change(tensor, place)`` instead of each input and argument; places as in `Call.views`."""

    def changed(value: Any, place: str) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value, place)
        if isinstance(value, (list, tuple)):
            return type(value)(changed(v, f"{place}.{k}") for k, v in enumerate(value))
        return value

    return replace(
        call,
        inputs={k: changed(v, f"inputs.{k}") for k, v in call.inputs.items()},
        args=changed(tuple(call.args), "args"),
        kwargs={k: changed(v, f"kwargs.{k}") for k, v in call.kwargs.items()},
    )


def laid_out(call: Call) -> Call:
    """``call`` with each input of `Call.views` in a storage of its own, at its stride and offset; no views are left."""
    if not call.views:
        return call
    views = call.views
    return replace(by_place(call, lambda t, at: in_memory(t, views[at]) if at in views else t), views={})


def in_memory(tensor: Any, view: MemoryLayout) -> Any:
    """``tensor`` at the view's stride and offset; itself where that takes too much memory, or elements overlap in
    another way than by being expanded."""
    if not tensor.numel() or len(view.stride) != tensor.dim():
        return tensor
    size, offset, memory = max(span(tensor.shape, view.stride), tensor.numel()), view.offset, known_memory(tensor, view)
    if memory is None:
        offset = offset if offset <= _FAR else offset % _ALIGNED
        if offset + size > _MOST:
            return tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        generator = torch.Generator().manual_seed(0)
        memory = draw((offset + size,), dtype, moments_of(tensor), generator).to(tensor.device)
    else:
        memory = memory.clone()
    source = tensor
    for dim, s in enumerate(view.stride):
        source = source if s else source.narrow(dim, 0, 1)
    try:
        memory.as_strided(source.shape, view.stride, offset).copy_(source)
    except RuntimeError:
        return tensor
    found = memory.as_strided(tensor.shape, view.stride, offset)
    return found if same_bits(found, tensor) else tensor


def same_bits(a: Any, b: Any) -> bool:
    """Of two tensors of one dtype and shape, with a dimension or more."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def known_memory(tensor: Any, view: MemoryLayout) -> Any | None:
    """The storage that ``tensor`` lay in, [n] of its dtype; None where it is not known."""
    memory = view.read()
    if memory is None or memory.dtype != tensor.dtype or len(memory) < view.offset + span(tensor.shape, view.stride):
        return None
    return memory


def read_at(
    tensor: Any, view: MemoryLayout, stride: Sequence[int], begin: int, first: int = 0,
    others: Iterable[tuple[Any, MemoryLayout]] = (),
) -> tuple[Any, Any]:  # fmt: skip
    """What a kernel reads that takes ``tensor`` to lie at another stride and offset, and which elements of that are
    known, bool of its shape: of the tensor's own, of ``others`` in the same storage, and of the memory where it is
    known. first: the row of the whole with which all of them begin. Raises Declined."""
    decline_if(tensor.numel() > _READ, f"it has more than {_READ:,} elements")
    at = torch.full(tuple(tensor.shape), begin)
    for dim, (n, s) in enumerate(zip(tensor.shape, stride, strict=True)):
        numbers = torch.arange(n) + (0 if dim else first)
        at += (s * numbers).reshape([-1 if d == dim else 1 for d in range(tensor.dim())])
    memory = None if first else known_memory(tensor, view)
    known = torch.zeros_like(at, dtype=torch.bool) if memory is None else at < len(memory)
    found = torch.zeros_like(tensor) if memory is None else memory[at.clamp(max=len(memory) - 1)]
    for t, lies in (*others, (tensor, view)):
        own, index = _elements(t.shape, lies, at, first)
        found, known = torch.where(own, t.reshape(-1)[index], found), known | own
    return found, known


def _elements(shape: Sequence[int], view: MemoryLayout, at: Any, first: int) -> tuple[Any, Any]:
    """Of places in a storage, which are those of a tensor, bool, and of which of its elements, int64."""
    rest, index, own = at - view.offset, torch.zeros_like(at), torch.full_like(at, math.prod(shape), dtype=torch.bool)
    dense = contiguous(shape)
    for dim in sorted(range(len(shape)), key=lambda d: -view.stride[d]):
        if (shape[dim] > 1 or (first and not dim)) and view.stride[dim]:
            number = rest // view.stride[dim] - (0 if dim else first)
            rest = rest % view.stride[dim]
            own &= (number >= 0) & (number < shape[dim])
            index += number.clamp(0, shape[dim] - 1) * dense[dim]
    return own & (rest == 0), index * own


def some_rows(view: MemoryLayout, shape: Sequence[int], rows: Any) -> MemoryLayout:
    """The view of some rows, int64 [k], along dimension 0 of a tensor of ``shape``: they lie below each other as all
    of them did. The memory stays where a row's begins behind that of the row before."""
    n, row = shape[0], view.stride[0]
    wider = tuple(-(-s * len(rows) // n) if d and s >= row * n > 0 else s for d, s in enumerate(view.stride))
    memory = view.read()
    if memory is None or row != max(view.stride) or view.offset >= row:
        return MemoryLayout(wider, view.offset, None)
    memory = torch.cat((memory[: n * row], memory.new_zeros(max(0, n * row - len(memory)))))
    return MemoryLayout(view.stride, view.offset, memory.reshape(n, row)[rows].reshape(-1))
