"""Rounding toward zero, as vLLM's kernels for AVX2 do it: the upper bits of a float32."""

from typing import Any

import torch

_CUT = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of float32's significand that go."""


def truncated(x: Any, dtype: Any = torch.bfloat16) -> Any:
    """A float tensor, of normal numbers, in ``dtype``."""
    bits = x.float().contiguous().view(torch.int32) & -(1 << _CUT[dtype])
    return bits.view(torch.float32).to(dtype)
