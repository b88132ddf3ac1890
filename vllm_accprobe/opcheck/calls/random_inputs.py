"""Inputs drawn again: from what is known of the captured ones, or of tensors that were never stored.

The problem: a dump of statistics has no tensors to replay, and a kernel that is right for the captured ones may be
wrong for others. The idea: floats from a normal distribution with the captured mean and standard deviation, cut to the
captured range; integers and booleans evenly between minimum and maximum; seeded, so that two machines draw the same.
What is drawn has none of the structure of real activations (outliers in a few channels, say): weaker evidence, and
whoever uses it says so. With torch alone: this file is copied with the tests that gentest writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined

WEAKER = "inputs drawn at random from the captured statistics: weaker evidence"
_INDICES = ("ids", "positions", "indices", "index", "cu_seqlens", "input_ids", "slot", "block")
_MOST = 1 << 28
"""Elements of one drawn tensor: a dump may come from a stranger."""


@dataclass(frozen=True)
class DrawnMoments:
    """low, high: range of the finite elements; mean, std: of them; any may be None where it is not known."""

    low: float | None
    high: float | None
    mean: float | None
    std: float | None


def draw(shape: tuple[int, ...], dtype: str, moments: DrawnMoments, generator: Any) -> Any:
    """A tensor of torch dtype ``dtype``. Raises Declined for one that is too large or of an unknown dtype."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or math.prod(shape) > _MOST:
        raise Declined(f"no tensor of {dtype} {list(shape)} can be drawn")
    if kind.is_complex:
        parts = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(kind)
    low, high = (-1.0, 1.0) if moments.low is None or moments.high is None else (moments.low, moments.high)
    if not kind.is_floating_point:
        top = 2 if kind is torch.bool else int(high) + 1
        return torch.randint(int(low), max(top, int(low) + 1), shape, generator=generator).to(kind)
    mean = moments.mean if moments.mean is not None else (low + high) / 2
    std = moments.std if moments.std is not None else (high - low) / 6
    drawn = mean + std * torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn.clamp(low, high).to(kind)


def moments_of(tensor: Any) -> DrawnMoments:
    wide = tensor.detach().cpu()
    wide = wide[torch.isfinite(wide.float())].double() if wide.is_floating_point() else wide.double().flatten()
    if not wide.numel():
        return DrawnMoments(None, None, None, None)
    return DrawnMoments(float(wide.min()), float(wide.max()), float(wide.mean()), float(wide.std(correction=0)))


def redrawn(call: Call, seed: int) -> Call:
    """``call`` with floating inputs drawn again; indices, parameters and all that they must fit stay. Raises Declined
    for calls whose inputs hang together (attention's history, what a block holds inside, other ranks)."""
    if any(name in call.extra for name in ("cache", "children", "ranks", "lm_head", "logits", "router_logits")):
        raise Declined("its inputs hang together with others and cannot be drawn alone")
    generator = torch.Generator().manual_seed(seed)

    def change(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            if not any(word in name for word in _INDICES):
                dtype = str(value.dtype).removeprefix("torch.")
                return draw(tuple(value.shape), dtype, moments_of(value), generator)
        elif isinstance(value, (list, tuple)):
            return type(value)(change(name, v) for v in value)
        return value

    return replace(
        call,
        views={k: replace(v, memory=None) for k, v in call.views.items()},
        inputs={k: change(k, v) for k, v in call.inputs.items()},
        args=tuple(change("", v) for v in call.args),
        kwargs={k: change(k, v) for k, v in call.kwargs.items()},
    )
