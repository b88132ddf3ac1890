"""What a layer's own kernel holds: some columns of a weight that is packed out of sight, read back by unit vectors.

The problem: a CPU's linear layers hand their weight to oneDNN or AMX and keep an empty tensor; nobody can look at what
the kernel then computes with. The idea: a linear layer is a function, and its kernel is asked: a batch of unit vectors
gives columns of the weight, exactly, for 1 * w plus zeros is w in any order and precision that holds w. Of int8 weights
with a scale for each output, the output over the scale is the integer, nearly. It costs a forward of ``ASKED`` tokens.
Only what is equal before packing too may be compared: -0 becomes 0, and rows with NaN or Inf say nothing. Not here:
other packings (undo.py).
"""

from __future__ import annotations

from typing import Any

import torch

ASKED = 32
"""Columns that are read back, spread over the width: each row of the weight has as many of its elements looked at.
Chosen: two vectors of 16, half of what 64 cost (scripts/weight_cost.py); an error of a single tile of columns that is
narrower than a 32nd of the width may lie between them."""
SLACK = 1.5
"""By how much an integer weight that a kernel gives back may be off. Derived: 127 * 2**-8 for the output's rounding to
bfloat16, as much for the input's scale, and 0.5 for neither being exact."""
_EXACT = (torch.bfloat16, torch.float16)


def columns(width: int) -> torch.Tensor:
    """Which columns are asked: int64 [min(ASKED, width)], spread evenly."""
    count = min(ASKED, width)
    return (torch.arange(count, dtype=torch.int64) * width) // max(count, 1)


def expected(weight: torch.Tensor) -> torch.Tensor | None:
    """These columns of a weight [n, width] as it was given, or None for a kind that no kernel gives back exactly."""
    if weight.ndim != 2 or not weight.numel():
        return None
    if weight.dtype not in _EXACT and weight.dtype != torch.int8 and not _host_float(weight):
        return None
    found = weight.detach()[:, columns(weight.shape[1]).to(weight.device)]
    return found if weight.dtype == torch.int8 else found + 0.0


def _host_float(weight: torch.Tensor) -> bool:
    # A device may compute float32 in fewer bits (TF32).
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


@torch.no_grad()
def read_back(module: Any, dtype: torch.dtype, shape: tuple[int, ...], compute: torch.dtype) -> torch.Tensor | None:
    """The same columns as the layer's kernel has them: [n, ASKED] of ``dtype``, or of float32 for integers (`settled`).
    None where it cannot be asked.

    dtype, shape: of the weight as it was given. compute: what the layer computes in.
    """
    method = getattr(module, "quant_method", None)
    if method is None or len(shape) != 2:
        return None
    rows, width = shape
    asked = columns(width)
    device = next((p.device for p in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    x = torch.zeros(len(asked), width, dtype=dtype if dtype.is_floating_point else compute, device=device)
    # Of integers by -1: kernels that shift inputs to unsigned bytes (AVX2) saturate the sum of two large products.
    sign = 1.0 if dtype.is_floating_point else -1.0
    x[torch.arange(len(asked)), asked] = sign
    y = method.apply(module, x, None)
    if not isinstance(y, torch.Tensor) or y.shape[0] != len(asked) or y.shape[1] < rows:
        return None
    found = y[:, :rows].t()
    if dtype.is_floating_point:
        return (found.to(dtype) + 0.0).contiguous() if found.dtype in (dtype, torch.float32) else None
    return _integers(module, found)


def _integers(module: Any, found: torch.Tensor) -> torch.Tensor | None:
    """float32 of outputs [n, asked] = scale of the row * integer, over the scale."""
    scale = getattr(module, "weight_scale", None)
    if not isinstance(scale, torch.Tensor) or found.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    flat = scale.detach().float().reshape(-1)
    if flat.numel() not in (1, found.shape[0]) or not bool((flat > 0).all()):
        return None
    return (found.float() / -flat.reshape(-1, 1)).cpu()


def settled(found: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """int8 [n, asked] of what `read_back` gave of integers. A row within ``SLACK`` of the given one is that one: the
    kernel rounds its input, its scale and its output. Others are rounded as they are."""
    given = given.cpu()
    with_it = ((found - given.float()).abs() <= SLACK).all(1, keepdim=True)
    other = found.nan_to_num(0.0, 0.0, 0.0).round().clamp(-128, 127).to(torch.int8)
    return torch.where(with_it, given, other).contiguous()
