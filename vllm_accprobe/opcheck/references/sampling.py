"""From logits to a token: softmax, the best k, the probabilities that are sampled from.

Formulas: softmax and log-softmax by definition; top-k keeps the k largest logits, top-p the smallest set of most
probable tokens whose probabilities reach p [Holtzman et al., arXiv 1904.09751], min-p those at least that part of the
most probable [Nguyen et al., arXiv 2407.01082]; in vLLM's order: temperature, min-p, top-k, top-p. Of vLLM's sampler a
dump holds the best logits and ids; whether a token is right depends on temperature and chance, which a dump does not
record, so its tokens are declined here (compare tells flips).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, device_kernel, reference

_EQUAL = "equal logits may stand in any order"


def probabilities(logits: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """Probabilities that a token is sampled with, float64 [..., vocabulary]; temperature 0: the largest alone (the
    first of equal ones). top_k 0: all."""
    if temperature <= 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    z = logits.double() / temperature
    if min_p > 0:
        p = torch.softmax(z, -1)
        z = z.masked_fill(p < min_p * p.amax(-1, keepdim=True), -math.inf)
    if 0 < top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k, -1).values[..., -1:], -math.inf)
    if top_p < 1:
        ordered, places = torch.softmax(z, -1).sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        drop = torch.zeros_like(ordered, dtype=torch.bool).scatter(-1, places, before >= top_p)
        z = z.masked_fill(drop, -math.inf)
    return torch.softmax(z, -1)


_NORMALISED = {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax}


@reference(*_NORMALISED)
def normalised(call: Call) -> Expected:
    return Expected(_NORMALISED[call.cls](call.wide("input", "x", "0"), int(call.attr("dim", default=-1))))


@reference("Sampler")
def sampler(call: Call) -> dict[str, Expected]:
    """The best logits; their ids where no two are equal (any order of equals is right)."""
    logits = call.extra.get("logits")
    best = call.outputs.get("output.top_logits")
    if logits is None or best is None or logits.shape[0] != best.shape[0]:
        raise Declined("the logits of its rows were not captured beside it")
    k = best.shape[1]
    top = logits.double().topk(min(k + 1, logits.shape[1]), -1)
    apart = (top.values.diff(dim=-1) != 0).all(-1)
    return {
        "output.top_logits": Expected(top.values[:, :k], torch.zeros(()), 0.0),
        "output.top_ids": Expected(top.indices[:, :k], unit=0.0, rows=apart, reason=_EQUAL),
    }


# --- on a device --------------------------------------------------------------------------------------------------


@device_kernel(*_NORMALISED)
def normalised_kernel(call: Call) -> Any:
    return _NORMALISED[call.cls](call.tensor("input", "x", "0"), int(call.attr("dim", default=-1)))
