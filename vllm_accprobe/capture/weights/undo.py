"""Packings that only move elements, taken off again.

The problem: a packed weight holds the elements of the loaded one in an order that its kernel likes; whether packing
lost one, or exchanged two rows, shows only in the old order. The idea: a transpose is turned back; a packer that moves
elements and is at hand is asked where it puts them: it packs the numbers of the places themselves, two bytes at a time,
and must hand back each of them once. This is done for one block (one expert) at a time, so nothing of the weights' size
is made. What neither explains stays as it lies. Orders of whole rows (gate and up exchanged, rows interleaved) need no
undoing: rows have sums of their own (judge/weights/). Not here: which packer a layer has (vllm/weights/packers.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Packer = Callable[[torch.Tensor], torch.Tensor]
"""Packs [1, n, width] of two-byte elements; the elements are moved, not looked at."""
TRANSPOSED = "transposed"
MOST = 1 << 26
"""Elements of a block whose places are kept: 64 M of 4 bytes."""


def transposed(packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """``packed`` with its last two dimensions turned, where that is what the loaded one's ``shape`` says."""
    if packed.ndim < 2 or len(shape) != packed.ndim or packed.shape[-1] == packed.shape[-2]:
        return None
    turned = packed.transpose(-1, -2)
    return turned if tuple(turned.shape) == shape else None


def places(pack: Packer, n: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Where each element of a block [n, width] lies once it is packed: int32 [n * width]. None where the packer does
    more than move two-byte elements."""
    count = n * width
    if dtype.itemsize != 2 or count > MOST:
        return None
    number = torch.arange(count, dtype=torch.int32)
    halves = []
    for half in (number & 0xFFFF, number >> 16):
        signed = torch.where(half > 0x7FFF, half - 0x10000, half).to(torch.int16)
        out = pack(signed.view(dtype).reshape(1, n, width).contiguous())
        if out.numel() != count or out.dtype != dtype:
            return None
        halves.append(out.reshape(-1).view(torch.int16).to(torch.int32) & 0xFFFF)
    came_from = halves[0] | (halves[1] << 16)
    place = torch.full((count,), -1, dtype=torch.int32)
    if bool(((came_from < 0) | (came_from >= count)).any()):
        return None
    place[came_from.long()] = torch.arange(count, dtype=torch.int32)
    return place if bool((place >= 0).all()) else None


def unpacked(block: torch.Tensor, place: torch.Tensor, width: int) -> torch.Tensor:
    """One packed block as it was loaded: [n, width]."""
    return block.reshape(-1)[place.long().to(block.device)].reshape(-1, width)
