"""Masks of ATB's attention operators, as what is added to scores.

The problem: a mask is a tensor whose meaning follows from maskType, from its dtype and from its shape. The idea: what
is added to the scores of one request, float64 [heads or 1, queries, keys]. Formulas: NORM: the tensor itself; where it
holds ones in place of negative numbers (bfloat16's convention) a one hides; 2 dimensions for all requests, 3 and 4 with
a request or a head first. A NORM mask that is smaller than the request, and NORM_COMPRESS, stand for the lower
triangle. ALIBI: the tensor itself, biases and hidden keys together; SLIDING_WINDOW: keys at distance < windowSize;
CAUSAL: the lower triangle. The compressed forms of alibi are declined: their tiles are a kernel's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.references.atb.linear import from_nz
from vllm_accprobe.opcheck.references.atb.operands import Operands

Tensor = Any  # a torch.Tensor
(NONE, NORM, ALIBI, NORM_COMPRESS, ALIBI_COMPRESS, ALIBI_SQRT, ALIBI_LEFT, WINDOW, WINDOW_COMPRESS, CAUSAL) = range(10)
SLOPES = (ALIBI_COMPRESS, ALIBI_SQRT, ALIBI_LEFT)
Mask = Callable[[int, int, int], "Tensor | None"]
"""(request, queries, keys) → what is added, None for nothing."""


def causal(queries: int, keys: int, window: int = 0) -> Tensor:
    """0 where a query sees a key, the last query being the last key; else minus infinity."""
    at = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
    hidden = (at < 0) | (at >= window) if window else at < 0
    return torch.zeros(queries, keys, dtype=torch.float64).masked_fill(hidden, -math.inf)


def mask_of(o: Operands, kind: int, tensor: Tensor | None, heads: int, batch: int, window: int) -> Mask:
    """Raises Declined for a kind, or a shape, that has no reference."""
    if kind == NONE:
        return lambda i, n, m: None
    if kind in (NORM_COMPRESS, CAUSAL):
        return lambda i, n, m: causal(n, m)
    if kind in (WINDOW, WINDOW_COMPRESS):
        if window <= 0:
            raise Declined("windowSize was not recorded")
        return lambda i, n, m: causal(n, m, window)
    if kind not in (NORM, ALIBI):
        raise Declined(f"maskType {kind} has no reference")
    if tensor is None:
        raise Declined("its mask was not captured")
    added = tensor.double()
    if added.dim() == 4 and added.shape[-1] == 16 and added.shape[1] * 16 >= added.shape[2] > 16:
        added = from_nz(added)
    if kind == NORM and bool((added > 0).any()):
        if bool((added < 0).any()):
            raise Declined("its mask both adds and takes away")
        added = torch.where(added > 0, -math.inf, 0.0)
    return lambda i, n, m: _cut(added, kind, heads, batch, i, n, m)


def _cut(added: Tensor, kind: int, heads: int, batch: int, i: int, n: int, m: int) -> Tensor:
    """The part of request i: its first n rows and m columns; one row for all where it has one."""
    if added.dim() == 4:
        part = added[i if len(added) == batch else 0] if len(added) in (1, batch) else None
    elif added.dim() == 3:
        by_head = kind == ALIBI and len(added) == heads
        if by_head and heads == batch > 1 and added.shape[1] == 1:
            raise Declined("whether its mask is one of heads or of requests cannot be told")
        part = added if by_head else added[i : i + 1] if len(added) == batch else added if len(added) == 1 else None
    else:
        part = added.unsqueeze(0) if added.dim() == 2 else None
    if part is None or len(part) not in (1, heads):
        raise Declined(f"a mask {list(added.shape)} does not fit {batch} requests of {heads} heads")
    if kind == NORM and n > part.shape[1] > 1:
        return causal(n, m)
    if part.shape[2] < m or (part.shape[1] < n and part.shape[1] != 1):
        raise Declined(f"a mask {list(added.shape)} is smaller than {n} queries and {m} keys")
    return part[:, :n, :m]
