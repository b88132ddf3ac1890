"""Codes of 4 bits turned into numbers: MXFP4 and NVFP4.

Formula: a code is e2m1: a sign and one of 0, 1/2, 1, 3/2, 2, 3, 4, 6, two in a byte, the first in its lower half.
MXFP4: 32 neighbours along the inputs share a scale 2**(s - 127) [OCP Microscaling Formats v1.0, sections 5.3 and
6.3]. NVFP4: 16 share a scale in e4m3, and the tensor one in float32; kernels that multiply want the block scales in
tiles of 128 rows by 4, row r of a tile at 32 places by r % 32, and within one by r // 32 [NVIDIA, cuBLAS
documentation, 1D block scaling factors layout]. Each number is a product of few bits and is exact in bfloat16 (MXFP4)
or in float32.
Not here: operators on them (four_bits.py), modules with such weights (quantised.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_BLOCK, NV_BLOCK = 32, 16
Tensor = Any  # a torch.Tensor


def unpacked(codes: Tensor) -> Tensor:
    """uint8 [..., n / 2] of two codes each: float64 [..., n]."""
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
    return table[both]


def mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 [..., n] from uint8 [..., n / 2] and exponents uint8 [..., n / 32]. Raises Declined."""
    wide = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.view(torch.uint8).int() - 127)
    return _blocks(unpacked(codes), wide, MX_BLOCK)


def nvfp4(codes: Tensor, scales: Tensor, whole: float) -> Tensor:
    """float64 [..., n] from uint8 [..., n / 2], e4m3 [..., n / 16] and the tensor's scale. Raises Declined."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e4m3fn)
    return _blocks(unpacked(codes), scales.double(), NV_BLOCK) * whole


def _blocks(numbers: Tensor, scales: Tensor, size: int) -> Tensor:
    if scales.shape[:-1] != numbers.shape[:-1] or scales.shape[-1] * size != numbers.shape[-1]:
        raise Declined(f"scales {list(scales.shape)} do not fit codes for {list(numbers.shape)}")
    return numbers * scales.repeat_interleave(size, -1)


def from_tiles(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Block scales [rows, columns] from the order that kernels want, padded to multiples of 128 and 4."""
    high, wide = math.ceil(rows / 128), math.ceil(columns / 4)
    if scales.numel() != high * wide * 512:
        raise Declined(f"{scales.numel()} scales are no tiles for {rows} rows of {columns}")
    tiles = scales.reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * 128, wide * 4)[:rows, :columns]
