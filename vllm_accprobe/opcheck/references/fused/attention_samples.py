"""A fused attention's tensors by sample, whatever their layout, and back.

The problem: query, key and value come as BSH, SBH, BSND, BNSD, or TND with the samples one after another and their
lengths added up. The idea: a list of samples [heads, rows, size], views of what came, and the way back.
Source: torch_npu's document of npu_fusion_attention: input_layout, actual_seq_qlen, actual_seq_kvlen (trailing zeros
stand for samples that take no part). Not here: which key a query sees (attention_masks.py), the formula
(npu_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.references.fused.fused_calls import Given

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")


@dataclass(frozen=True)
class SampleLengths:
    """Of each sample, its first row and the one past its last, of queries and of keys; TND's only."""

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]


def lengths_of(g: Given, rows: int, keys: int) -> SampleLengths:
    """Raises Declined."""
    queries, others = g.integers("actual_seq_qlen"), g.integers("actual_seq_kvlen")
    if queries is None or others is None or len(queries) != len(others):
        raise Declined("a TND call without the lengths of its samples")
    return SampleLengths(_runs(queries, rows), _runs(others, keys))


def _runs(ends: Sequence[int], total: int) -> tuple[tuple[int, int], ...]:
    live = list(ends)
    while live and live[-1] == 0:
        live.pop()
    starts = [0, *live[:-1]]
    if any(a > b for a, b in zip(starts, live, strict=True)) or (live and live[-1] > total):
        raise Declined(f"lengths {list(ends)[:8]} do not fit {total} rows")
    return tuple(zip(starts, live, strict=True))


def by_head(x: Any, layout: str, heads: int) -> Any:
    """[B, N, S, D], or of TND [N, T, D]. Raises Declined."""
    dims = 3 if layout in ("BSH", "SBH", "TND") else 4
    if layout not in LAYOUTS or x.dim() != dims:
        raise Declined(f"a tensor {list(x.shape)} in layout {layout!r}")
    if layout in ("BSH", "SBH"):
        x = x if layout == "BSH" else x.transpose(0, 1)
        if not heads or x.shape[-1] % heads:
            raise Declined(f"{heads} heads do not fit a width of {x.shape[-1]}")
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if layout == "BSND":
        return x.transpose(1, 2)
    return x if layout == "BNSD" else x.transpose(0, 1)


def back(samples: Sequence[Any], layout: str, rows: int, lengths: SampleLengths | None) -> Any:
    """[N, S, D] of each sample in the layout of the output; rows of TND that no sample has are 0."""
    if lengths is not None:
        whole = [s.transpose(0, 1) for s in samples]
        missing = rows - sum(len(s) for s in whole)
        if missing:
            whole.append(whole[0].new_zeros(missing, *whole[0].shape[1:]))
        return torch.cat(whole)
    x = torch.stack(list(samples))
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    if layout == "BSND":
        return x
    x = x.flatten(2)
    return x if layout == "BSH" else x.transpose(0, 1)


def heads_of_keys(query: Any, key: Any, layout: str, heads: int) -> int:
    """How many heads keys have. Raises Declined."""
    if layout not in LAYOUTS:
        raise Declined(f"a tensor {list(query.shape)} in layout {layout!r}")
    if layout in ("BSH", "SBH"):
        size = query.shape[-1] // heads if heads else 0
        found = key.shape[-1] // size if size else 0
    else:
        found = key.shape[1 if layout in ("BNSD", "TND") else 2] if key.dim() > 2 else 0
    if not found or heads % found:
        raise Declined(f"{heads} heads of queries do not fit {found} of keys")
    return found
