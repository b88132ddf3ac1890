"""How keys and values lie in the blocks of a cache, and what 8-bit caches hold.

The problem: the same keys lie in memory in half a dozen orders, and which one a call has is in its name, its shapes, or
nowhere. The idea: a layout is a shape and an order of its dimensions: a block's memory, viewed in that shape and
permuted, is [slots, heads, width], and backwards. Layouts: [slots, heads, width] (flash attention's, vLLM's default and
Ascend's ND); key [heads, width / x, slots, x] and value [heads, width, slots] (vLLM's first paged attention [Kwon et
al., arXiv 2309.06180]); [heads * width / 16, slots, 16] (Ascend's NZ); vLLM's CPU kernels, head by head: key [width,
slots] and value [slots, width], or, for AMX, tiles of pairs, key [slots / 16, width / 2, 16, 2] and value [width / 16,
slots / 2, 16, 2]. 8-bit caches hold x / scale rounded to e4m3, e5m2 or int8. A cache's codes are right where they are
within half a step of it: either neighbour may stand for a number in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined

Tensor = Any  # a torch.Tensor
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp8_inc": "float8_e4m3fn"}
_SLACK = 1.0 + 2.0**-8
"""Chosen: how far beyond half a step a code may be: x times 1 / scale in float32 or bfloat16 instead of x / scale."""


@dataclass(frozen=True)
class BlockLayout:
    """name; shape: of a block's memory from slots, heads and width; order: of those dimensions, so that slots come
    first, then heads, then width."""

    name: str
    shape: Callable[[int, int, int], Sequence[int]]
    order: tuple[int, ...]

    def rows(self, cache: Tensor, slots: int, heads: int, width: int) -> Tensor:
        """``cache`` [blocks, ...] as [blocks, slots, heads, width]."""
        shape = self.shape(slots, heads, width)
        if math.prod(shape) != math.prod(cache.shape[1:]):
            raise Declined(f"a block of {list(cache.shape[1:])} is none of {slots} slots, {heads} heads, {width} wide")
        wide = cache.contiguous().reshape(len(cache), *shape)
        return wide.permute(0, *(d + 1 for d in self.order)).reshape(len(cache), slots, heads, width)

    def packed(self, rows: Tensor, like: Tensor) -> Tensor:
        """[blocks, slots, heads, width] in this layout, in the shape of ``like``."""
        shape = self.shape(*rows.shape[1:])
        back = [self.order.index(d) for d in range(len(self.order))]
        turned = rows.reshape(len(rows), *(shape[d] for d in self.order)).permute(0, *(b + 1 for b in back))
        return turned.reshape(like.shape)


TOKENS = BlockLayout("slots, heads, width", lambda s, h, w: (s, h, w), (0, 1, 2))
HEADS = BlockLayout("heads, slots, width", lambda s, h, w: (h, s, w), (1, 0, 2))
HEADS_TURNED = BlockLayout("heads, width, slots", lambda s, h, w: (h, w, s), (2, 0, 1))
NZ = BlockLayout("heads * width / 16, slots, 16", lambda s, h, w: (h * w // 16, s, 16), (1, 0, 2))
AMX_KEY = BlockLayout(
    "heads, slots / 16, width / 2, 16, 2", lambda s, h, w: (h, s // 16, w // 2, 16, 2), (1, 3, 0, 2, 4)
)
AMX_VALUE = BlockLayout(
    "heads, width / 16, slots / 2, 16, 2", lambda s, h, w: (h, w // 16, s // 2, 16, 2), (2, 4, 0, 1, 3)
)
CPU = {"amx": (AMX_KEY, AMX_VALUE), "vec": (HEADS_TURNED, HEADS), "vec16": (HEADS_TURNED, HEADS)}
"""vLLM's CPU kernels, by their word for the instruction set: layouts of keys and of values."""


def split_key(x: int) -> BlockLayout:
    """vLLM's first layout of keys, with x numbers of a head together."""
    return BlockLayout("heads, width / x, slots, x", lambda s, h, w: (h, w // x, s, x), (2, 0, 1, 3))


def numbers(cache: Tensor, kind: str, scale: Any) -> Tensor:
    """What a cache's entries stand for, float64: codes of 8 bits times ``scale`` (a number, or a tensor that
    broadcasts)."""
    scale = scale.double() if isinstance(scale, torch.Tensor) else float(scale if scale is not None else 1.0)
    dtype = code_dtype(cache, kind)
    if dtype is None:
        return cache.double()
    return cache.view(dtype).double() * scale


def code_dtype(cache: Tensor, kind: str) -> Any | None:
    """The dtype of a cache's codes; None where it holds the model's numbers. Raises Declined."""
    if cache.dtype.itemsize > 1:
        return None
    if cache.dtype not in (torch.uint8, torch.int8):
        return cache.dtype
    if kind in ("int8", "int8_per_token_head"):
        return torch.int8
    name = _FP8.get(kind)
    if name is None:
        raise Declined(f"a cache of kind {kind} has no reference")
    return getattr(torch, name)


def largest(dtype: Any) -> float:
    """The largest code's number."""
    return 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)


def half_step(exact: Tensor, dtype: Any) -> Tensor:
    """Half the distance of the two codes around each of ``exact``, float64, none of which is beyond the largest."""
    if dtype == torch.int8:
        return torch.full_like(exact, 0.5)
    bits, low = (3, -9) if "e4m3" in str(dtype) else (2, -16)
    _, exponent = torch.frexp(exact.abs().clamp(min=torch.finfo(torch.float64).tiny))
    return torch.ldexp(torch.full_like(exact, 0.5), (exponent - 1 - bits).clamp(min=low))


def coded(exact: Tensor, mine: Tensor, dtype: Any, keep: bool = True) -> Tensor:
    """What ``exact``, float64, may become in ``dtype``: mine's own codes where they are within half a step of it (and
    these are to be kept), else the nearest; in mine's dtype."""
    if dtype == torch.int8:
        nearest = exact.round().clamp(-128, 127).to(torch.int8)
    else:
        limit = largest(dtype)
        exact = exact.clamp(-limit, limit)
        nearest = exact.float().to(dtype)
    if not keep:
        return nearest.view(mine.dtype)
    half = half_step(exact, dtype)
    held = mine.view(dtype).double()
    right = (held - exact).abs() <= half * _SLACK + 2.0**-20 * exact.abs()
    return torch.where(right, mine.view(dtype).view(torch.uint8), nearest.view(torch.uint8)).view(mine.dtype)
