"""Where the bytes of a host tensor lie, and what they are called.

The problem: statistics, hashes and copies work on plain memory, and tensors come strided, conjugated and with rows that
nobody wants. The idea: everything becomes a list of (address, bytes); a dense tensor's is its own memory, the rest is
brought together in a scratch buffer that is used again and again. Not here: what is done with the bytes (sink.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
        "complex128",
    ]
    if hasattr(torch, name)
}

Ranges = Sequence[tuple[int, int]] | None
"""Wanted [start, stop) rows along dimension 0, or None for all of the tensor."""
LAZY = frozenset(("float32", "float64", "complex64", "complex128"))
"""Dtypes whose tensors may be views with a pending conjugation or negation."""


class Scratch:
    """One buffer for all tensors that do not lie in memory as they are written. Valid until the next one."""

    def __init__(self) -> None:
        self._bytes = torch.empty(1 << 20, dtype=torch.uint8)

    def dense(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in the buffer."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._bytes.numel():
            self._bytes = torch.empty(nbytes + nbytes // 4, dtype=torch.uint8)
        return self._bytes[:nbytes].view(dtype).view(tuple(shape))

    def parts(self, tensor: torch.Tensor, ranges: Ranges) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Shape and memory of the wanted bytes of a host tensor."""
        if tensor.is_contiguous():
            if ranges is None:
                return tuple(tensor.shape), [(tensor.data_ptr(), tensor.nbytes)]
            row = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
            address = tensor.data_ptr()
            shape = (sum(b - a for a, b in ranges), *tensor.shape[1:])
            return shape, [(address + a * row, (b - a) * row) for a, b in ranges]
        rows = tensor.shape[0] if ranges is None else sum(b - a for a, b in ranges)
        dense = self.dense((rows, *tensor.shape[1:]), tensor.dtype)
        if ranges is None:
            dense.copy_(tensor)
        else:
            torch.cat([tensor[a:b] for a, b in ranges], out=dense)
        return tuple(dense.shape), [(dense.data_ptr(), dense.nbytes)]


def selected(tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """The wanted rows on the tensor's own device: a view where they are one range."""
    if ranges is None:
        return tensor
    return tensor[slice(*ranges[0])] if len(ranges) == 1 else torch.cat([tensor[a:b] for a, b in ranges])
