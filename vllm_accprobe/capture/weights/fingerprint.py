"""The fingerprint of one tensor, made where it lies: sums of its mixed bits, in chunks.

The problem: after each event all weights must be examined once more, on the device that holds them, without a copy of
any. The idea: rows of bits are mixed and summed chunk by chunk; eight bytes for each row leave the device, in one copy
at the end. On the host a compiled loop does it. Sums are kept of what a checkpoint or a sync loaded, never values.

Not here: how bits are mixed (dump/weight_sums.py), which tensors, and when (history.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import xxhash

from vllm_accprobe.dump import weight_sums as mixing
from vllm_accprobe.dump.stats import MEMORY

CHUNK = 1 << 22
"""Elements that are mixed at a time on a device: 32 MB of integers, thrice."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 1 << 16


@dataclass(frozen=True)
class RowSums:
    """The sums of a tensor's rows. order, bag: uint64 [rows]. nan: counted in small tensors only."""

    shape: tuple[int, ...]
    order: np.ndarray
    bag: np.ndarray
    zeros: int
    nan: int | None

    @property
    def whole(self) -> tuple[str, str]:
        """The two sums of the tensor, 16 hex digits each."""
        return f"{mixing.in_order(self.order):016x}", f"{int(self.bag.sum(dtype=np.uint64)):016x}"

    @property
    def short(self) -> np.ndarray:
        """uint32 [rows]."""
        return mixing.short(self.order)


def raw_bytes(tensor: torch.Tensor) -> int | None:
    """xxh3-128 of a tensor's bytes as they lie, ten times as fast as its sums: equal ones need no second look. None
    where they do not lie together in host memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return None
    return xxhash.xxh3_128_intdigest(MEMORY[tensor.data_ptr() : tensor.data_ptr() + nbytes])


def sums_of(tensor: torch.Tensor) -> RowSums:
    """The sums of ``tensor``, of any strides. Raises ValueError for what has no plain bits."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError("not a plain tensor")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    shape = tuple(tensor.shape)
    bits = _rows(tensor.view(_BITS[tensor.element_size()]))
    count, width = bits.shape
    nan = None
    if tensor.numel() <= _SMALL and tensor.is_floating_point():
        nan = int(torch.isnan(tensor.float()).sum())
    if not bits.numel():
        none = np.zeros(count, np.uint64)
        return RowSums(shape, none, none, 0, nan)
    row_sums = _host_loops() if bits.device.type == "cpu" else None
    if row_sums is not None:
        order, bag = np.empty(count, np.uint64), np.empty(count, np.uint64)
        zeros = row_sums(bits.numpy(), mixing.factors(width), order, bag)
        return RowSums(shape, order, bag, int(zeros), nan)
    return RowSums(shape, *_on_device(bits), nan)


@cache
def _host_loops() -> Callable[..., int] | None:
    """None without numba (vllm-accprobe-capture alone): torch's passes give the same sums, slower."""
    try:
        from vllm_accprobe.capture.weights.host_loops import row_sums
    except ImportError:
        return None
    return row_sums


def _rows(bits: torch.Tensor) -> torch.Tensor:
    """As a matrix: the last dimension, or each element where there is but one. A copy only where strides forbid."""
    if bits.ndim < 2:
        return bits.reshape(-1, 1)
    return bits if bits.ndim == 2 else bits.reshape(-1, bits.shape[-1])


def _on_device(bits: torch.Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    count, width = bits.shape
    out = torch.empty(2, count, dtype=torch.int64, device=bits.device)
    zeros = torch.zeros((), dtype=torch.int64, device=bits.device)
    factors = torch.from_numpy(mixing.factors(width).view(np.int64)).to(bits.device)
    step = max(CHUNK // width, 1)
    for first in range(0, count, step):
        part = bits[first : first + step]
        zeros += part.numel() - torch.count_nonzero(part)
        x = _mixed(part.to(torch.int64))
        torch.sum(x, 1, out=out[1, first : first + step])
        torch.sum(x.mul_(factors), 1, out=out[0, first : first + step])
    order, bag = out.cpu().numpy().view(np.uint64)
    return order, bag, int(zeros)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """mixing.mix of int64 that may be changed. Shifts of signed integers keep the sign: its copies are masked away."""
    x.bitwise_xor_((x >> 30) & ((1 << 34) - 1)).mul_(_signed(mixing.A))
    x.bitwise_xor_((x >> 27) & ((1 << 37) - 1)).mul_(_signed(mixing.B))
    return x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@dataclass
class LoadedTensor:
    """What a tensor was as it was loaded last. raw: `raw_bytes` of it."""

    sums: RowSums
    dtype: torch.dtype
    raw: int | None = None

    def same(self, tensor: torch.Tensor, raw: int | None) -> bool:
        """Whether ``tensor`` holds these very bytes: then nothing of it must be looked at again."""
        return raw is not None and (raw, tensor.dtype, tuple(tensor.shape)) == (self.raw, self.dtype, self.sums.shape)
