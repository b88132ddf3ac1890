"""Numbers turned into int8 codes by ATB's operators, with given scales and with those of each row.

Formula: q = round(x / s + offset), clamped to -128 .. 127, or with a factor instead of a divisor [B. Jacob et al.,
arXiv 1712.05877]. Dynamic: s = largest |x| of a row / 127; asymmetric: s = (max - min) / 255, offset = -(max + min) /
(2 s). A code is right within half a step of x / s for the scale that was captured beside it, widened by what the kernel
may have rounded before (paged/layouts.py's rule); the scale itself must be right too.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references.atb.operands import Operands
from vllm_accprobe.opcheck.references.parts import reshaped

Tensor = Any  # a torch.Tensor
SYMMETRIC, ASYMMETRIC = 1, 2
_SCALE = 2.0**-20
"""Chosen: relative error of a scale, a quotient in float32 of the largest of a row (as scaled/eight_bits.py)."""
_SLACK = 2.0**-8
"""Chosen: how far beyond half a step a code may be in any case: x times 1 / scale instead of x / scale."""


def coded(exact: Tensor, mine: Tensor, error: Tensor | float = 0.0) -> Expected:
    """What ``exact``, float64, may become in int8: mine's own codes where they are within half a step of it and
    ``error``, else the nearest."""
    if mine.dtype != torch.int8:
        raise Declined(f"codes in {str(mine.dtype).removeprefix('torch.')} have no reference")
    if exact.numel() != mine.numel():
        raise Declined(f"codes for {list(exact.shape)} where {list(mine.shape)} was captured")
    exact = exact.reshape(mine.shape)
    nearest = exact.clamp(-128, 127).round().long()
    reach = 0.5 + _SLACK + (error.reshape(mine.shape) if isinstance(error, torch.Tensor) else error)
    held = mine.long()
    right = (held - exact.clamp(-128, 127)).abs() <= reach + 2.0**-20 * exact.abs()
    return Expected(torch.where(right, held, nearest), unit=0.0)


def dynamic(o: Operands, y: Expected, kind: int, first: int = 0) -> dict[str, Expected]:
    """Codes, scale and, asymmetric, offset of each row of ``y``, from output ``first`` on."""
    if kind not in (SYMMETRIC, ASYMMETRIC):
        raise Declined(f"dynamicQuantType {kind} is none that is known here")
    x, mine = y.value, o.output(first)
    error = torch.zeros_like(x) if y.bound is None else y.bound.expand_as(x)
    scale, found = o.output(first + 1), {}
    if scale.numel() != x.shape[:-1].numel():
        raise Declined("its scales are not those of rows")
    high, low = x.amax(-1), x.amin(-1)
    size = (high - low) / 255.0 if kind == ASYMMETRIC else x.abs().amax(-1) / 127.0
    off = error.amax(-1) / (255.0 if kind == ASYMMETRIC else 127.0) * (2.0 if kind == ASYMMETRIC else 1.0)
    given = scale.double().reshape(size.shape)
    value = torch.where(size == 0, given, size)  # a row of zeros may have any scale
    bound = _SCALE * value + off
    found[f"output.{first + 1}"] = reshaped(Expected(value, bound, bound=bound), scale.shape)
    step = torch.where(given == 0, 1.0, given).unsqueeze(-1)
    exact = x / step
    wide = error / step.abs()
    if kind == ASYMMETRIC:
        shift = o.output(first + 2)
        own = shift.double().reshape(size.shape)
        right = -(high + low) / (2.0 * torch.where(given == 0, 1.0, given))
        near = _SCALE * (1.0 + right.abs()) + 2.0 * error.amax(-1) / torch.where(given == 0, 1.0, given).abs()
        found[f"output.{first + 2}"] = reshaped(Expected(right, near, bound=near), shift.shape)
        exact = exact + own.unsqueeze(-1)
    found[f"output.{first}"] = coded(exact, mine, wide)
    return found
