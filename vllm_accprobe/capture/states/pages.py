"""The raw bytes of a cache's blocks, and one number for each block.

The problem: a layer's cache is one tensor or several (keys and values, convolution and state), laid out as a kernel
wants it, packed by instruction set on a CPU, over memory that layers of other groups share; values cannot be compared,
bytes can. The idea: `Pages` knows where a block's bytes lie, as few dense regions a fixed stride apart, and hashes them
in place. In host memory that is xxh3-64; on a device it is a sum of 32-bit words with odd weights modulo 2^64, made by
torch's integer operations without waiting: any one changed word changes it, since an odd factor is no divisor of zero.
Numbers of the two kinds are never compared with each other. Not here: what the numbers are for (ledger.py), when they
are taken (observer.py), when those of a device arrive (arrivals.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

_MOST_REGIONS = 8
"""Dense regions of one block: keys and values of a few tensors; more is a layout that nobody has thought of."""
_SEED = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


class UnknownLayout(ValueError):
    """The bytes of a block cannot be told; the message is a short reason, for a skip's line."""


@dataclass(frozen=True)
class Region:
    """One dense part of every block. address: of block 0, in bytes; stride: to the next block; nbytes: of each.

    tensor: int32 or uint8 words [blocks, words], a view of the cache where it is; None where nobody asked for one."""

    address: int
    stride: int
    nbytes: int
    tensor: torch.Tensor


class Pages:
    """The cache of one layer, block by block.

    Args:
        caches: the layer's tensors: each has as many blocks along one of its first two dimensions.
        blocks: of the scheduler. A kernel's blocks may be a whole fraction of one.

    Raises:
        UnknownLayout: no dimension counts blocks, or a block's bytes do not lie together.
    """

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int):
        self.blocks = blocks
        self.split = 1
        self.regions: list[Region] = []
        for cache in caches:
            self._add(cache)
        if not 1 <= len(self.regions) <= _MOST_REGIONS:
            raise UnknownLayout(f"its cache lies in {len(self.regions)} places")
        self.nbytes = sum(region.nbytes for region in self.regions)
        self.on_host = caches[0].device.type == "cpu"
        self._types = [ctypes.c_char * region.nbytes for region in self.regions]
        self._weights: dict[int, torch.Tensor] = {}

    def _add(self, cache: torch.Tensor) -> None:
        dim = next(
            (d for d in range(min(2, cache.dim())) if cache.shape[d] and cache.shape[d] % self.blocks == 0), None
        )
        if dim is None:
            raise UnknownLayout(f"no dimension of {tuple(cache.shape)} counts {self.blocks} blocks")
        view = cache.movedim(dim, 0)
        split = view.shape[0] // self.blocks
        self.split = max(self.split, split)
        self._dense(view.unflatten(0, (self.blocks, split)) if split > 1 else view)

    def _dense(self, view: torch.Tensor) -> None:
        """view: [blocks, ...], whose interior is dense, or is so without the dimension of its longest stride."""
        size, stride = view.element_size(), view.stride(0)
        numel = view[0].numel()
        if not numel:
            return
        span = 1 + sum((n - 1) * s for n, s in zip(view.shape[1:], view.stride()[1:], strict=True))
        if span == numel:
            start = view.untyped_storage().data_ptr() + view.storage_offset() * size
            nbytes = numel * size
            self.regions.append(Region(start, stride * size, nbytes, _words(view, stride, numel)))
            return
        outer = max(range(1, view.dim()), key=lambda d: view.stride(d))
        if view.shape[outer] > _MOST_REGIONS or len(self.regions) > _MOST_REGIONS:
            raise UnknownLayout(f"a block of {tuple(view.shape[1:])} with strides {view.stride()[1:]} is not dense")
        for i in range(view.shape[outer]):
            self._dense(view.select(outer, i))

    def hashes(self, blocks: np.ndarray) -> np.ndarray:
        """xxh3-64 of each of ``blocks``, int [n] → uint64 [n]. In host memory only."""
        digest = xxhash.xxh3_64_intdigest
        out = np.empty(len(blocks), np.uint64)
        (first, kind), *more = zip(self.regions, self._types, strict=True)
        at, stride, of = first.address, first.stride, kind.from_address
        if not more:
            out[:] = [digest(of(at + b * stride)) for b in blocks.tolist()]
            return out
        for i, b in enumerate(blocks.tolist()):
            hasher = xxhash.xxh3_64(of(at + b * stride))
            for region, other in more:
                hasher.update(other.from_address(region.address + b * region.stride))
            out[i] = hasher.intdigest()
        return out

    def sums(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """The number of each of ``blocks``, int64 [n], into ``out``, int64 [n], both where the cache is. Launches
        kernels and waits for none; words by their `odd_weights`, modulo 2**64, over the regions one after the other."""
        out.zero_()
        begin = 0
        for region in self.regions:
            words = region.tensor.index_select(0, blocks)
            weights = self._weights.get(begin)
            if weights is None:
                made = torch.from_numpy(odd_weights(begin, words.shape[1]).view(np.int64))
                weights = self._weights[begin] = made.to(words.device)
            out.add_((words.to(torch.int64) * weights).sum(1))
            begin += words.shape[1]


def _words(view: torch.Tensor, stride: int, numel: int) -> torch.Tensor:
    """The dense blocks of ``view`` as [blocks, words]; words are int32 where sizes and places allow, else bytes."""
    size = view.element_size()
    flat = view.as_strided((view.shape[0], numel), (stride, 1), view.storage_offset())
    fits = all(n * size % 4 == 0 for n in (numel, stride, view.storage_offset()))
    kind = torch.int32 if fits else torch.uint8
    if size == 1 or kind is torch.uint8 or size >= 4:
        return flat.view(kind) if flat.dtype != kind else flat
    return flat.view(kind)


def odd_weights(begin: int, n: int) -> np.ndarray:
    """Weights of words ``begin`` to ``begin + n``: odd, uint64 [n]: splitmix64's steps, which spread well [G. Steele,
    D. Lea, C. Flood, OOPSLA 2014]."""
    z = np.arange(begin + 1, begin + n + 1, dtype=np.uint64) * np.uint64(_SEED)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def tensors_of(cache: Any) -> list[torch.Tensor]:
    """A layer's ``kv_cache`` as a list: a tensor, or a tuple or list of them (older releases: one per engine)."""
    found = list(cache) if isinstance(cache, (tuple, list)) else [cache]
    return [one for one in found if isinstance(one, torch.Tensor) and one.numel()]
