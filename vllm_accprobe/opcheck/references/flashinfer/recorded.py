"""A recorded call's arguments by name, and requests whose attention was computed together.

The problem: FlashInfer has a dozen attention calls that differ in how lengths, pages and scales are told, and one
formula. The idea: each call becomes `RequestRows` of queries, keys and values and the `AttentionRules` of all, and
`attended` applies attention.py's formula, with the log of the sum of exponentials where it was returned (to base 2,
FlashInfer's habit, or e). A window of w means that a query at p sees keys from p - w on; queries stand at the end of
their keys. Bounds: a score is off by gamma_d of |q||k|, tanh.approx by 2**-11 of a capped score [PTX ISA, section
tanh], and the sum of exponentials by their rounding to the values' dtype, which FlashInfer's tensor-core kernels do
before they add.
Not here: which argument means what (wrappers.py, stateless.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Call, Declined, Expected, gamma
from vllm_accprobe.opcheck.references.attention import TANH, attend, scores
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments

Tensor = Any  # a torch.Tensor
_EXP = 2.0**-20
"""Chosen: relative error of the sum and its logarithm, ex2.approx and lg2.approx being within 2**-22 [PTX ISA]."""
_MOST = 1 << 28
"""Chosen: elements of one request's keys. A list of pages may name one page as often as it likes, and come from a
stranger: 2**28 float64 are 2 GB."""
_EMPTY = "a query that sees no key, or a request without rows"
_PLAIN = ("NONE", "None", None)


@dataclass(frozen=True)
class RequestRows:
    """One request: q [n, heads, d], k [m, kv heads, d], v [m, kv heads, e], float64; begin: its first row of the
    output; hidden: bool [n, m] of keys that a mask of the caller's hides."""

    q: Tensor
    k: Tensor
    v: Tensor
    begin: int
    hidden: Tensor | None = None


@dataclass(frozen=True)
class AttentionRules:
    """scale: of scores; left: how far a query sees to the left, below 0: without limit; factor: of the result; base: of
    the logarithm that was returned too, None for none."""

    scale: float
    causal: bool
    left: int = -1
    cap: float | None = None
    sinks: Tensor | None = None
    factor: float = 1.0
    base: float | None = None


def told(call: Call, names: str) -> dict[str, Any]:
    """The arguments of ``names``, in order, those of the object and its plan, and all others that were named."""
    return {**call.kwargs, **arguments(call, names)}


def refuse(f: Mapping[str, Any], *names: str) -> None:
    """Raises Declined where one of these arguments is there: it changes the formula."""
    for name in names:
        value = f.get(name)
        if value is not None and not (isinstance(value, (bool, int, float)) and not value):
            raise Declined(f"{name.rpartition('.')[2]} has no reference")


def number(value: Any, default: float = 1.0) -> float:
    """A number, or a tensor of one; raises Declined for more."""
    if value is None:
        return default
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise Declined("a scale of each head has no reference")
    return float(value)


def plain_positions(mode: Any) -> None:
    if mode not in _PLAIN:
        raise Declined(f"positions of the mode {mode} inside attention have no reference")


def cap_of(value: Any) -> float | None:
    return float(value) if value is not None and float(value) > 0 else None


def wide(q: Tensor) -> Tensor:
    """Queries, float64. Raises Declined for 8 bits, where kernels round probabilities to 8 bits too."""
    if not isinstance(q, torch.Tensor) or not q.is_floating_point():
        raise Declined("its queries were not captured as numbers")
    if q.dtype.itemsize == 1:
        raise Declined("queries of 8 bits have no reference")
    return q.double()


def by_head(cache: Tensor, layout: Any) -> Tensor:
    """[..., rows, heads, width] of either layout. Raises Declined."""
    if layout not in ("NHD", "HND", None):
        raise Declined(f"a cache of the layout {layout} has no reference")
    return cache.transpose(-3, -2) if layout == "HND" else cache


def halves(cache: Any, layout: Any) -> tuple[Tensor, Tensor]:
    """Keys and values [pages, rows, heads, width], in their own dtype: of a pair, or of one tensor with 2 (or, for both
    at once, 1) in its second dimension."""
    if isinstance(cache, (list, tuple)) and len(cache) == 2:
        k, v = cache
    elif isinstance(cache, torch.Tensor) and cache.dim() == 5 and cache.shape[1] in (1, 2):
        k, v = cache[:, 0], cache[:, -1]
    else:
        raise Declined("its cache is neither a pair nor [pages, 2, ...]")
    if not all(isinstance(t, torch.Tensor) and t.dim() == 4 and t.is_floating_point() for t in (k, v)):
        raise Declined("a cache of codes without a float's dtype has no reference")
    return by_head(k, layout), by_head(v, layout)


def paged(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first ``length`` rows of one request, float64 [length, ...]; cache [pages, rows, ...]."""
    at = pages.long()
    if len(at) * math.prod(cache.shape[1:]) > _MOST:
        raise Declined("a request of more keys than are read here")
    if (
        length < 0
        or len(at) * cache.shape[1] < length
        or (len(at) and (int(at.min()) < 0 or int(at.max()) >= len(cache)))
    ):
        raise Declined("a page lies outside of the cache")
    return cache[at].flatten(0, 1)[:length].double()


def ends(indptr: Any, rows: int | None = None) -> list[int]:
    """An array of bounds as numbers. Raises Declined where they do not rise from 0, or go beyond ``rows``."""
    if not isinstance(indptr, torch.Tensor):
        raise Declined("the bounds of its requests were not captured")
    found = [int(e) for e in indptr.reshape(-1)]
    if not found or found[0] != 0 or sorted(found) != found or (rows is not None and found[-1] > rows):
        raise Declined("the bounds of its requests do not fit its rows")
    return found


def masks(mask: Any, sizes: Sequence[tuple[int, int]]) -> Iterator[Tensor | None]:
    """What is hidden from each request's queries, from one flat mask of what is seen."""
    if mask is None:
        yield from (None for _ in sizes)
        return
    flat = mask.reshape(-1).bool()
    if len(flat) != sum(n * m for n, m in sizes):
        raise Declined("its mask does not fit its requests")
    at = 0
    for n, m in sizes:
        yield ~flat[at : at + n * m].reshape(n, m)
        at += n * m


def attended(call: Call, requests: Sequence[RequestRows], rules: AttentionRules, rows: int) -> dict[str, Expected]:
    """``output.0`` of ``rows`` rows in the captured shape, and ``output.1``, the logarithm, where one was returned."""
    if not requests:
        raise Declined("it has no request with rows")
    heads, width = requests[0].q.shape[1], requests[0].v.shape[-1]
    whole = [torch.zeros(rows, heads, width, dtype=torch.float64) for _ in range(3)]
    logs = [torch.zeros(rows, heads, dtype=torch.float64) for _ in range(3)]
    known = torch.zeros(rows, dtype=torch.bool)
    for r in requests:
        if not len(r.q) or not len(r.k):
            continue
        at = slice(r.begin, r.begin + len(r.q))
        hidden = _hidden(r, rules)
        seen = ~hidden.all(-1)
        for part, new in zip((*whole, *logs), _one(r, rules, hidden, call.unit), strict=True):
            part[at] = torch.nan_to_num(new)
        known[at] = seen
    out = call.outputs["output.0"]
    if out.numel() != whole[0].numel():
        raise Declined("its output has another shape than its queries")
    rows_known = None if bool(known.all()) else known
    if rows_known is not None and out.shape[0] != rows:
        raise Declined(_EMPTY)
    value, noise, bound = (t.reshape(out.shape) for t in whole)
    found = {"output.0": Expected(value, noise, bound=bound, groups=heads, rows=rows_known, reason=_EMPTY)}
    lse = call.outputs.get("output.1")
    if lse is not None and rules.base is not None and rules.sinks is None:
        turned = tuple(lse.shape) == (heads, rows) and heads != rows
        value, noise, bound = ((t.T if turned else t).reshape(lse.shape) / math.log(rules.base) for t in logs)
        found["output.1"] = Expected(
            value, noise, bound=bound, rows=None if turned else rows_known, reason=_EMPTY
        )  # fmt: skip
    return found


def _hidden(r: RequestRows, rules: AttentionRules) -> Tensor:
    n, m = len(r.q), len(r.k)
    distance = torch.arange(m - n, m)[:, None] - torch.arange(m)[None, :]
    hidden = torch.zeros(n, m, dtype=torch.bool) if r.hidden is None else r.hidden
    if rules.causal and r.hidden is None:
        hidden = hidden | (distance < 0)
    return hidden | (distance > rules.left) if rules.left >= 0 else hidden


def _one(r: RequestRows, rules: AttentionRules, hidden: Tensor, step: float) -> tuple[Tensor, ...]:
    heads, kv = r.q.shape[1], r.k.shape[1]
    if heads % kv:
        raise Declined("query heads are no multiple of key heads")
    k = r.k.repeat_interleave(heads // kv, 1)
    found = scores(r.q, k, rules.scale, cap=rules.cap, hidden=hidden)
    y = attend(r.q, r.k, r.v, rules.scale, cap=rules.cap, sinks=rules.sinks, hidden=hidden, step=step)
    total = torch.logsumexp(found, -1).T
    p = torch.softmax(found, -1)
    off = gamma(r.q.shape[-1] + 8) + 4.0 * SUM
    largest = abs(rules.scale) * r.q.norm(dim=-1) * k.norm(dim=-1).amax(0)
    tanh = torch.zeros_like(total)
    if rules.cap:
        tanh = TANH * torch.where(hidden, 0.0, found).abs().amax(-1).T
    spread = ROUNDED * step * p.square().sum(-1).sqrt().T
    noise = spread + SUM * r.q.shape[-1] ** 0.5 * largest + _EXP + tanh
    bound = step + APPROXIMATE + off * largest + APPROXIMATE / TANH * tanh
    return *(abs(rules.factor) * t if n else rules.factor * t for n, t in enumerate(y)), total, noise, bound
