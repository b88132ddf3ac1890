"""The notes in which SGLang's dumper says how ranks cut a tensor, and undoing what they say.

The note: one word per dimension, in brackets the parallel groups that cut it, each with ``partial`` (add instead of
joining) or ``zigzag`` (two chunks per rank, from both ends); after ``#`` the groups that hold copies:
``t num_heads[tp] head_dim``, ``t h[tp:partial]``, ``t h # tp:replicated``. Several groups are undone one by one.
Not here: which ranks there are, and their files (formats/sglang.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.formats.io.torchtensor import TorchTensor

_DIM = re.compile(r"(?:([A-Za-z_]\w*|1)|\(([^()]+)\))(?:\[([^\]]+)\])?")


@dataclass(frozen=True, slots=True)
class Cut:
    """One parallel group in a note. dim: which dimension of the tensor; kind: ``join``, ``partial``."""

    group: str
    dim: int
    kind: str
    zigzag: bool = False


@dataclass(frozen=True, slots=True)
class Dims:
    """A note. cuts: innermost first, the order in which they are undone."""

    dims: int
    cuts: tuple[Cut, ...]
    copies: frozenset[str]


def parse_dims(note: str) -> Dims:
    """Raises ValueError for what is no such note."""
    shape, _, rest = note.partition("#")
    cuts: list[Cut] = []
    dim = 0
    for word in re.sub(r"\s*\*\s*", "*", shape).split():
        match = _DIM.fullmatch(word)
        if match is None:
            raise ValueError(word)
        own = []
        for modifier in (match[3] or "").split(","):
            if not modifier.strip():
                continue
            group, _, how = modifier.strip().partition(":")
            kinds = {h.strip() for h in how.split("+") if h.strip()}
            if not kinds <= {"partial", "zigzag", "natural"}:
                raise ValueError(modifier)
            own.append(Cut(group, dim, "partial" if "partial" in kinds else "join", "zigzag" in kinds))
        cuts += reversed(own)
        dim += 1
    copies = frozenset(w.removesuffix(":replicated") for w in rest.split() if w.endswith(":replicated"))
    return Dims(dim, tuple(cuts), copies)


def put_together(
    pieces: Mapping[tuple[int, ...], TorchTensor], cuts: Sequence[Cut], sizes: Sequence[int]
) -> np.ndarray:
    """The whole, of pieces by their places along ``cuts``, which are undone one after the other: the bits, or float32
    where one of them is partial. sizes: pieces along each cut."""
    numbers = any(c.kind == "partial" for c in cuts)
    values = {at: widen(t.read(), t.dtype).astype(np.float32) if numbers else t.read() for at, t in pieces.items()}
    for c, n in zip(cuts, sizes, strict=True):
        merged = {}
        for rest in sorted({at[1:] for at in values}):
            parts = [values[(i, *rest)] for i in range(n)]
            if c.kind == "partial":
                merged[rest] = np.sum([p.astype(np.float64) for p in parts], axis=0).astype(parts[0].dtype)
            else:
                whole = np.concatenate(parts, axis=c.dim)
                merged[rest] = unzigzag(whole, c.dim, n) if c.zigzag else whole
        values = merged
    return values[()]


def unzigzag(whole: np.ndarray, dim: int, ranks: int) -> np.ndarray:
    """The natural order of a sequence of which rank i held chunks i and 2 * ranks - 1 - i, one behind the other."""
    chunks = np.array_split(whole, 2 * ranks, axis=dim)
    order = [0] * (2 * ranks)
    for i in range(ranks):
        order[i], order[2 * ranks - 1 - i] = 2 * i, 2 * i + 1
    return np.concatenate([chunks[k] for k in order], axis=dim)
