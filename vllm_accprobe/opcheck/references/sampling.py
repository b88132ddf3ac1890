"""From logits to a token: softmax, the best k.

Formulas: softmax and log-softmax by definition. Of vLLM's sampler a dump holds the best logits and ids; whether a token
is right depends on temperature and chance, which a dump does not record, so its tokens are declined here (compare tells
flips).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, device_kernel, reference

_EQUAL = "equal logits may stand in any order"


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
