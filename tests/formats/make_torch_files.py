"""Small tensors of every dtype that torch saves, and their bytes."""

import numpy as np
import torch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def bits(t: torch.Tensor) -> bytes:
    flat = torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def some(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.from_numpy(np.random.default_rng(3).integers(0, 2, 12 * 16).astype(np.uint8))
    return raw.view(torch.uint8)[: 12 * dtype.itemsize].contiguous().view(dtype).reshape(3, 4)
