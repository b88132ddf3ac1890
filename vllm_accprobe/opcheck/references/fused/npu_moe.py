"""Routers of torch_npu: npu_moe_gating_top_k_softmax and its second version.

Formula: torch_npu's document: y, experts = topk(softmax(x), k), and row numbers arange(n k) as [k, n] transposed; a row
that is ``finished`` names the expert that there is not (their number). The second version takes the softmax of the
chosen logits with renorm 1, and has no row numbers but the whole softmax.
An expert is right if its weight is within rounding of the k-th largest, and no expert is named twice: of two that are
nearly equal either may be taken.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references.fused.fused_calls import Given, fused
from vllm_accprobe.opcheck.references.fused.npu_softmax import _EXP


def _chosen(g: Given, weights: Any, order: Any, k: int, unit: float) -> Any:
    """The captured experts where they may be chosen, else those of the exact order."""
    mine = g.call.outputs.get("output.1")
    if mine is None or mine.shape != order.shape:
        return order
    ids = mine.long()
    inside = (ids >= 0) & (ids < weights.shape[-1])
    theirs = weights.gather(-1, torch.where(inside, ids, 0))
    exact = weights.gather(-1, order)
    near = (theirs - exact).abs() <= (2.0 * unit + 4.0 * _EXP) * exact
    ordered = ids.sort(-1)[0]
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1, keepdim=True) if k > 1 else torch.zeros_like(inside)
    return torch.where(inside & near & ~twice, ids, order)


def _routed(g: Given, renorm: bool) -> tuple[Any, Any, Any, Any, int]:
    """(exact weights of the chosen, chosen experts, rows that are not finished, the whole softmax, k)"""
    x, k = g.tensor("x"), int(g.number("k"))
    if x.dim() not in (2, 3) or not 0 < k <= x.shape[-1]:
        raise Declined(f"k {k} does not fit an input {list(x.shape)}")
    p = torch.softmax(x, -1)
    y, order = torch.topk(p, k, -1)
    chosen = _chosen(g, p.detach(), order, k, g.unit("x"))
    if renorm:
        y = torch.softmax(x.gather(-1, order), -1)
    finished = g["finished"]
    rows = torch.ones(x.shape[:-1], dtype=torch.bool) if finished is None else ~finished.bool().reshape(x.shape[:-1])
    return y, torch.where(rows.unsqueeze(-1), chosen, x.shape[-1]), rows, p, k


def _weights(y: Any, rows: Any) -> Expected:
    """Rows that are finished take no part, and what stands there is not in the document."""
    told = rows if rows.dim() == 1 else rows.all(-1)
    why = "" if bool(told.all()) else "rows that are finished"
    return Expected(y, _EXP * y, rows=None if bool(told.all()) else told, reason=why)


@fused("npu_moe_gating_top_k_softmax(x, finished/finished_optional=None, k=1)")
def npu_moe_gating_top_k_softmax(g: Given) -> dict[str, Expected]:
    y, chosen, rows, _, k = _routed(g, renorm=False)
    n = rows.numel()
    numbers = torch.arange(n * k).reshape(k, n).T.reshape(chosen.shape)
    return {"output.0": _weights(y, rows), "output.1": Expected(chosen), "output.2": Expected(numbers)}


@fused("npu_moe_gating_top_k_softmax_v2(x, k=1, finished=None, renorm=0, output_softmax=False)")
def npu_moe_gating_top_k_softmax_v2(g: Given) -> dict[str, Expected]:
    y, chosen, rows, p, _ = _routed(g, renorm=bool(g["renorm"]))
    found = {"output.0": _weights(y, rows), "output.1": Expected(chosen)}
    return found | ({"output.2": Expected(p, _EXP * p)} if g["output_softmax"] and not g["renorm"] else {})
