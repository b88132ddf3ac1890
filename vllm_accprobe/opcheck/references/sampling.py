"""From logits to a token: softmax, the best k.

Formulas: softmax and log-softmax by definition. Of vLLM's sampler a dump holds the best logits and ids, before and
after penalties and the like, the runner's settings of each row, and the tokens. What these should be follows from each
row's request, whose parameters the journal has (calls/sampler_calls.py, judge/sampling_rules.py); a row of a request
whose parameters are not there has no reference.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, device_kernel, reference

_EQUAL = "equal logits may stand in any order"
_UNKNOWN = "the sampling parameters of its request were not captured"


_NORMALISED = {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax}


@reference(*_NORMALISED)
def normalised(call: Call) -> Expected:
    return Expected(_NORMALISED[call.cls](call.wide("input", "x", "0"), int(call.attr("dim", default=-1))))


@reference("Sampler", "*Sampler")
def sampler(call: Call) -> dict[str, Expected]:
    """The best logits; their ids where no two are equal (any order of equals is right); and by each row's request what
    its processors leave, what its runner should have of it, and its token."""
    logits = call.extra.get("logits")
    best = call.outputs.get("output.top_logits")
    found = _by_request(call)
    if logits is None or best is None or logits.shape[0] != best.shape[0]:
        if not found:
            raise Declined("the logits of its rows were not captured beside it")
        return found
    k = best.shape[1]
    top = logits.double().topk(min(k + 1, logits.shape[1]), -1)
    apart = (top.values.diff(dim=-1) != 0).all(-1)
    return found | {
        "output.top_logits": Expected(top.values[:, :k], torch.zeros(()), 0.0),
        "output.top_ids": Expected(top.indices[:, :k], unit=0.0, rows=apart, reason=_EQUAL),
    }


def _by_request(call: Call) -> dict[str, Expected]:
    facts = call.extra.get("sampled")
    if not facts:
        return {}
    out = {}
    if "token" in facts:
        out["output.token"] = Expected(facts["token"], unit=0.0, rows=facts["token_rows"], reason=facts["token_why"],
                                       note=facts["token_note"], source=facts["token_source"])  # fmt: skip
    if "left" in facts:
        told = {"rows": facts["left_rows"], "reason": facts["left_why"], "note": facts["left_note"]}
        bound = facts["left_bound"]
        out["output.masked_logits"] = Expected(facts["left"], bound / 4.0, bound=bound, **told)
        out["output.masked_ids"] = Expected(facts["left_ids"], unit=0.0, **told)
    for name, (values, known) in facts["settings"].items():
        said = f"the runner has another {name.replace('_', ' ')} for a row than its request asks for"
        out[f"input.{name}"] = Expected(values.double() if values.is_floating_point() else values, rows=known,
                                        reason=_UNKNOWN, note=said)  # fmt: skip
    return out


# --- on a device --------------------------------------------------------------------------------------------------


@device_kernel(*_NORMALISED)
def normalised_kernel(call: Call) -> Any:
    return _NORMALISED[call.cls](call.tensor("input", "x", "0"), int(call.attr("dim", default=-1)))
