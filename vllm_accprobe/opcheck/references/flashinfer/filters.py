"""FlashInfer's samplers: which tokens a filter keeps, probabilities made whole again, and tokens drawn from the rest.

Formulas: samplers/logits.py's, on the logarithm of probabilities. ``top_k_first`` filters by p what k left over, made
whole again; ``joint`` filters by both at once. A drawn token is right where the filters keep it: which of them is
chance. Rows whose probabilities do not add up to 1 have no reference: kernels compare sums of what they are given with
p. Signatures: flashinfer 0.7.2, sampling.py, topk.py.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import SUM, Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given
from vllm_accprobe.opcheck.references.samplers.logits import TIED, kept

Tensor = Any  # a torch.Tensor
_WHOLE = 2.0**-10
"""Chosen: how far from 1 the sum of a row's probabilities may be, float32's rounding over a vocabulary."""


def _each(value: Any, rows: int) -> Tensor | None:
    """A number for each row: of a tensor, or the same for all."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return torch.full((rows,), float(value), dtype=torch.float64)
    if value.numel() not in (1, rows):
        raise Declined("its limits are not one for each row")
    return value.double().reshape(-1).expand(rows)


def _logs(probs: Tensor) -> tuple[Tensor, Tensor]:
    """(log of probabilities, which rows are whole)."""
    return probs.log(), (probs.sum(-1) - 1.0).abs() < _WHOLE


def _unlike(z: Tensor, k: Tensor | None) -> Tensor:
    """Rows where the k-th largest is not equal to the next, so that k tokens are k."""
    if k is None:
        return torch.ones(len(z), dtype=torch.bool)
    found = []
    for row, n in zip(z, k.long().tolist(), strict=True):
        top = row.topk(min(n + 1, len(row))).values if n > 0 else row[:0]
        found.append(n <= 0 or n >= len(row) or bool(top[n - 1] > top[n]))
    return torch.tensor(found, dtype=torch.bool)


@reference("flashinfer.top_k_renorm_probs", "flashinfer.top_p_renorm_probs")
def renormalised(call: Call) -> Expected:
    """(probs [rows, vocabulary], top_k or top_p): 0 where the filter takes away, and the rest over its sum."""
    by_k = "top_k" in call.cls
    f = arguments(call, "probs limit")
    limit = f["limit"] if f["limit"] is not None else call.kwargs.get("top_k" if by_k else "top_p")
    (probs,) = given(f, "probs")
    each = _each(limit, len(probs))
    z, certain = _logs(probs)
    keep, clear = kept(z, each if by_k else None, None if by_k else each)
    rest = probs.masked_fill(~keep, 0.0)
    y = rest / rest.sum(-1, keepdim=True)
    certain = certain & clear & (_unlike(z, each) if by_k else certain)
    off = SUM * probs.shape[-1] ** 0.5 + 4.0 * SUM
    return Expected(y, off * y, rows=certain, reason=TIED, bound=2.0 * SUM * (probs.shape[-1] + 4) * y)


@reference("flashinfer.top_k_mask_logits")
def masked(call: Call) -> Expected:
    """(logits [rows, vocabulary], top_k): minus infinity below the k-th largest."""
    f = arguments(call, "logits top_k")
    (z,) = given(f, "logits")
    each = _each(f["top_k"], len(z))
    keep, _ = kept(z, each, None)
    return Expected(z.masked_fill(~keep, -torch.inf), unit=0.0, rows=_unlike(z, each), reason=TIED)


_TAIL = "indices filter_apply_order deterministic generator check_nan seed offset"
_DRAWS = {
    "flashinfer.sampling_from_logits": "logits indices",
    "flashinfer.sampling_from_probs": "probs indices",
    "flashinfer.top_p_sampling_from_probs": "probs top_p indices",
    "flashinfer.top_k_sampling_from_probs": "probs top_k indices",
    "flashinfer.min_p_sampling_from_probs": "probs min_p indices",
    "flashinfer.top_k_top_p_sampling_from_logits": f"logits top_k top_p {_TAIL}",
    "flashinfer.top_k_top_p_sampling_from_probs": f"probs top_k top_p {_TAIL}",
}


@reference(*_DRAWS)
def drawn(call: Call) -> Expected:
    """(probabilities or logits [rows, vocabulary], limits, indices: the row of each token, or none): tokens [rows]."""
    f = arguments(call, _DRAWS[call.cls])
    mine, from_logits = call.outputs["output.0"], "logits" in f
    (given_rows,) = given(f, "logits" if from_logits else "probs")
    tokens = mine.reshape(-1).long()
    at = f["indices"].reshape(-1).long() if f["indices"] is not None else torch.arange(len(given_rows))
    if len(tokens) != len(at) or (len(at) and (int(at.min()) < 0 or int(at.max()) >= len(given_rows))):
        raise Declined("its tokens are not one for each row of its probabilities")
    z, certain = (given_rows, torch.ones(len(at), dtype=torch.bool)) if from_logits else _logs(given_rows)
    z, certain = z[at], certain if from_logits else certain[at]
    # an output's limits: one for each token, as its row of the batch
    k, p, least = (_each(f.get(n), len(at)) for n in ("top_k", "top_p", "min_p"))
    order = f.get("filter_apply_order") or "top_k_first"
    if order not in ("top_k_first", "joint"):
        raise Declined(f"filters in the order {order} have no reference")
    if order == "joint":
        both = kept(z, k, None), kept(z, None, p, least)
        keep, clear = both[0][0] & both[1][0], both[0][1] & both[1][1]
    else:
        keep, clear = kept(z, k, p, least)
    keep &= z > -torch.inf
    inside = (tokens >= 0) & (tokens < z.shape[1])
    right = keep[torch.arange(len(at)), tokens.clamp(0, z.shape[1] - 1)] & inside
    value = torch.where(right, tokens, z.argmax(1)).reshape(mine.shape)
    return Expected(value, rows=certain & clear, reason=TIED)


@reference("flashinfer.top_k")
def largest(call: Call) -> dict[str, Expected]:
    """(input [rows, n], k, sorted): the k largest of each row and their places, in falling order or in any."""
    f = arguments(call, "input k sorted")
    (x,) = given(f, "input")
    values, places = (call.outputs.get(f"output.{n}") for n in range(2))
    if values is None or places is None:
        raise Declined("its values and places were not captured both")
    best = x.topk(int(f["k"]), -1).values
    mine = values.double()
    same = (mine if f["sorted"] else mine.sort(-1, descending=True).values) == best
    at = places.long()
    inside = ((at >= 0) & (at < x.shape[1])).all(-1)
    found = x.gather(1, at.clamp(0, x.shape[1] - 1))
    apart = (at.sort(-1).values.diff(dim=-1) != 0).all(-1)
    value = torch.where(same.all(-1, keepdim=True), mine, best)
    good = (inside & apart).unsqueeze(-1) & (found == mine)
    # what is no place of its value becomes one that it cannot be
    return {"output.0": Expected(value, unit=0.0), "output.1": Expected(torch.where(good, at, -1 - at.abs()))}
