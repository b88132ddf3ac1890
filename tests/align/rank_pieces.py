"""What ranks hold of a tensor, made by hand: the inverse of align.shards.merge."""

import math
from collections.abc import Sequence

import numpy as np


def split(whole: np.ndarray, dim: int, sizes: Sequence[int], replicas: Sequence[int], ranks: int) -> list[np.ndarray]:
    """The pieces that ``ranks`` ranks hold of ``whole``, made of blocks of ``sizes`` along ``dim``, each with so many
    replicas."""
    if sum(sizes) != whole.shape[dim]:
        raise ValueError(f"blocks {list(sizes)} do not add up to {whole.shape[dim]}")
    edges = np.cumsum([0, *sizes])
    held: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for b, (size, r) in enumerate(zip(sizes, replicas, strict=True)):
        local = math.ceil(size * r / ranks)
        for k in range(ranks):
            start = edges[b] + (k // r) * local
            held[k].append(np.take(whole, range(start, min(start + local, edges[b + 1])), axis=dim))
    return [np.concatenate(h, axis=dim) for h in held]
