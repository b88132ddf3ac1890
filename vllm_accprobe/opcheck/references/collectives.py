"""What ranks exchange: all-reduce, all-gather, reduce-scatter of captured tensors.

Formulas: sum, concatenation, and sum cut into equal parts [MPI 4.1, chapter 6]. Noise: a sum of n ranks' values may be
rounded at each of its n - 1 additions. ``extra["ranks"]`` has every rank's input, in the order of the group, and
``attrs["rank"]`` this one's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, Call, Declined, Expected, reference


def all_reduce(parts: Sequence[Any], step: float = 0.0) -> Expected:
    """The sum; the partial sums of three ranks and more may be rounded, each to ``step`` of sum |x| at most."""
    whole = torch.stack([p.double() for p in parts])
    size, inner = step * whole.abs().sum(0), max(len(parts) - 2, 0)
    return Expected(whole.sum(0), ROUNDED * inner**0.5 * size, bound=(inner + 2.0**-10) * size)


def all_gather(parts: Sequence[Any], dim: int = -1) -> Expected:
    return Expected(torch.cat([p.double() for p in parts], dim))


def reduce_scatter(parts: Sequence[Any], rank: int, dim: int = -1, step: float = 0.0) -> Expected:
    total = all_reduce(parts, step)
    n = len(parts)
    assert total.noise is not None
    assert total.bound is not None
    value, noise, bound = (t.chunk(n, dim)[rank] for t in (total.value, total.noise, total.bound))
    return Expected(value, noise, bound=bound)


def _parts(call: Call) -> list[Any]:
    parts = list(call.extra.get("ranks", ()))
    if not parts:
        raise Declined("a collective whose other ranks were not captured")
    return parts


@reference("torch.ops.vllm.all_reduce", "vllm.all_reduce", "c10d_functional.all_reduce")
def reduce_op(call: Call) -> Expected:
    return all_reduce(_parts(call), call.unit)


@reference("torch.ops.vllm.all_gather", "vllm.all_gather")
def gather_op(call: Call) -> Expected:
    return all_gather(_parts(call), int(call.attr("dim", default=-1)))


@reference("torch.ops.vllm.reduce_scatter", "vllm.reduce_scatter")
def scatter_op(call: Call) -> Expected:
    return reduce_scatter(_parts(call), int(call.attr("rank")), int(call.attr("dim", default=-1)), call.unit)
