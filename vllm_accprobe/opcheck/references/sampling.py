"""From logits to a token: processors, softmax, filters, and the draw; and the slots of a batch.

Formulas: temperature: z / T. Repetition: tokens of the prompt or the output so far, z / r above 0, z r below [N. Keskar
et al., CTRL, arXiv 1909.05858, section 4.1]. Presence and frequency: of the output alone, minus p, minus f for each
time [OpenAI API reference; vLLM has the same]. Top-k: below the k-th largest, minus infinity. Top-p: of the tokens in
falling order, those from which on the sum before them is p or more are left out, and the first one never [A. Holtzman
et al., arXiv 1904.09751, section 3.1]. Min-p: below p times the largest probability [M. Nguyen et al., arXiv
2407.01082, section 3]. A draw: argmax of probability over a noise from Exp(1), or of z plus a Gumbel noise [L. Devroye,
1986]. Rows with a tie, or a sum at its limit, may be cut either way, and have no reference. What vLLM's sampler should
give follows from each row's request (calls/sampler_calls.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if, device_kernel, reference
from vllm_accprobe.opcheck.references.parts import Arguments
from vllm_accprobe.opcheck.roundings import SUM

Tensor = Any  # a torch.Tensor
_BORDER = 2.0**-14
"""Chosen: how near to p a float32 sum of probabilities may be to fall on either side."""
TIED = "a token lies at the limit of a filter, or is tied with one"


def _column(values: Any, rows: int) -> Tensor:
    if not isinstance(values, torch.Tensor):
        return torch.full((rows, 1), float(values), dtype=torch.float64)
    return values.double().reshape(-1, 1)


def penalised(z: Tensor, seen: Tensor, counts: Tensor, repetition: Any, presence: Any, frequency: Any) -> Tensor:
    """float64 [rows, vocabulary]; seen: bool, in prompt or output; counts: how often in the output."""
    r = torch.where(seen, _column(repetition, len(z)), 1.0)
    z = torch.where(z > 0, z / r, z * r)
    return z - _column(frequency, len(z)) * counts - _column(presence, len(z)) * (counts > 0)


def _summed(y: Tensor, size: Tensor) -> Expected:
    return Expected(y, 2.0 * SUM * size, bound=8.0 * SUM * size)


@reference("torch.ops._C.apply_repetition_penalties_", "torch.ops.*.apply_repetition_penalties_")
def repetition(call: Call) -> dict[str, Expected]:
    """(logits, prompt mask, output mask, penalties [rows]), in place."""
    f = Arguments(call, "logits prompt_mask output_mask repetition_penalties")
    (z,) = f.wide("logits")
    seen = f["prompt_mask"].bool() | f["output_mask"].bool()
    y = penalised(z, seen, torch.zeros_like(z), f["repetition_penalties"], 0.0, 0.0)
    return {f.role("logits"): _summed(y, y.abs())}


def _counted(tokens: Tensor, vocabulary: int) -> Tensor:
    """How often each token is in each row of ``tokens`` [rows, n]; what is no token is padding."""
    inside = torch.where((tokens < 0) | (tokens >= vocabulary), vocabulary, tokens.long())
    counts = torch.zeros(len(tokens), vocabulary + 1, dtype=torch.float64)
    return counts.scatter_add_(1, inside, torch.ones(inside.shape, dtype=torch.float64))[:, :vocabulary]


@reference("torch.ops.*.apply_penalties")
def penalties(call: Call) -> dict[str, Expected]:
    """(logits, prompt tokens [rows, n], output tokens, presence, frequency, repetition [rows]), in place or not."""
    f = Arguments(call, "logits prompt_tokens output_tokens presence frequency repetition")
    (z,) = f.wide("logits")
    prompt, output = (_counted(f[n], z.shape[1]) for n in ("prompt_tokens", "output_tokens"))
    seen = (prompt > 0) | (output > 0)
    y = penalised(z, seen, output, f["repetition"], f["presence"], f["frequency"])
    size = y.abs() + z.abs() + _column(f["frequency"], len(z)).abs() * output
    role = "output.0" if "output.0" in call.outputs else f.role("logits")
    return {role: _summed(y, size)}


def kept(z: Tensor, k: Tensor | None, p: Tensor | None, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(which tokens are kept, bool [rows, vocabulary]; which rows are certain) of logits, float64."""
    keep, certain = torch.ones(z.shape, dtype=torch.bool), torch.ones(len(z), dtype=torch.bool)
    for row in range(len(z)):
        if k is not None and 0 < int(k.reshape(-1)[row]) < z.shape[1]:
            keep[row] = z[row] >= z[row].topk(int(k.reshape(-1)[row])).values[-1]
        left = z[row].masked_fill(~keep[row], -torch.inf)
        if p is not None and float(p.reshape(-1)[row]) < 1.0:
            limit = float(p.reshape(-1)[row])
            order = left.argsort(descending=True)
            q = torch.softmax(left, 0)[order]
            before = q.cumsum(0) - q
            inside = before < limit
            inside[0] = True
            last = int(inside.nonzero().max())
            keep[row, order[~inside]] = False
            at_limit = (before[1:] - limit).abs() < _BORDER * max(limit, 1.0)
            tied = last + 1 < len(order) and left[order[last]] == left[order[last + 1]]
            certain[row] = not bool((at_limit & (q[1:] > 0)).any()) and not bool(tied)
        if least is not None:
            q = torch.softmax(left, 0)
            limit = float(least.reshape(-1)[row]) * float(q.max())
            keep[row] &= q >= limit
            certain[row] &= not bool(((q - limit).abs() < _BORDER * limit).any())
    return keep, certain


_FILTERS = {
    "apply_top_k_top_p": "logits k p", "top_k_top_p": "logits k p", "npu_top_k_top_p": "logits p k",
    "apply_min_p": "logits min_p",
}  # fmt: skip
"""By operator, its arguments; limits are [rows] or None."""


@reference(*(f"torch.ops.*.{name}" for name in _FILTERS))
def filters(call: Call) -> dict[str, Expected]:
    f = Arguments(call, _FILTERS[call.cls.replace("::", ".").removeprefix("torch.ops.").split(".")[1]])
    (z,) = f.wide("logits")
    keep, certain = kept(z, f.get("k"), f.get("p"), f.get("min_p"))
    role = "output.0" if "output.0" in call.outputs else f.role("logits")
    return {role: Expected(z.masked_fill(~keep, -torch.inf), unit=0.0, rows=certain, reason=TIED)}


@reference("TopKTopPSampler")
def drawn(call: Call) -> dict[str, Expected]:
    """The module's token must be one that its filters keep; which of them is chance."""
    z, mine = call.wide("logits", "0"), call.outputs["output.0"]
    keep, certain = kept(z, call.maybe("k", "2"), call.maybe("p", "3"))
    tokens = mine.reshape(-1).long()
    if len(tokens) != len(z) or int(tokens.min()) < 0 or int(tokens.max()) >= z.shape[1]:
        raise Declined("its tokens are not one for each row of its logits")
    right = keep[torch.arange(len(z)), tokens]
    value = torch.where(right, tokens, z.argmax(1)).reshape(mine.shape)
    return {"output.0": Expected(value, rows=certain if mine.dim() else None, reason=TIED)}


@reference("torch.ops.*.random_sample")
def by_noise(call: Call) -> Expected:
    """(probabilities, noise from Exp(1)): the largest quotient."""
    probs, noise = Arguments(call, "probs q").wide("probs", "q")
    best = (probs / noise).topk(2)
    apart = best.values[:, 0] > best.values[:, 1] * (1.0 + 2.0**-20)
    return Expected(best.indices[:, 0].reshape(call.outputs["output.0"].shape), rows=apart, reason=TIED)


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
        decline_if(not found, "the logits of its rows were not captured beside it")
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
        known = {"rows": facts["left_rows"], "reason": facts["left_why"], "note": facts["left_note"]}
        bound = facts["left_bound"]
        out["output.masked_logits"] = Expected(facts["left"], bound / 4.0, bound=bound, **known)
        out["output.masked_ids"] = Expected(facts["left_ids"], unit=0.0, **known)
    for name, (values, known) in facts["settings"].items():
        note = f"the runner has another {name.replace('_', ' ')} for a row than its request asks for"
        out[f"input.{name}"] = Expected(values.double() if values.is_floating_point() else values, rows=known,
                                        reason=_UNKNOWN, note=note)  # fmt: skip
    return out


@reference("torch.ops._C.greedy_argmax")
def greedy_argmax(call: Call) -> Expected:
    """The first largest logit of each row."""
    (logits,) = Arguments(call, "logits").wide("logits")
    return Expected(logits.argmax(-1).reshape(call.outputs["output.0"].shape))


@reference("torch.ops._C.compute_slot_mapping_kernel_impl")
def slot_mapping(call: Call) -> dict[str, Expected]:
    """block_table[request, position // size] * size + position % size [Kwon et al., arXiv 2309.06180, section 4]."""
    f = Arguments(call, "query_start_loc positions block_table slot_mapping block_size")
    size, out = int(f["block_size"]), f["slot_mapping"].long().clone()
    known = torch.zeros(len(out), dtype=torch.bool)
    for row, (a, b) in enumerate(pairwise(int(s) for s in f["query_start_loc"])):
        p = f["positions"][a:b].long()
        out[a:b] = f["block_table"][row].long()[p // size] * size + p % size
        known[a:b] = True
    return {"inplace.input.3": Expected(out, rows=known, reason="no row of the batch")}


@device_kernel(*_NORMALISED)
def normalised_kernel(call: Call) -> Any:
    return _NORMALISED[call.cls](call.tensor("input", "x", "0"), int(call.attr("dim", default=-1)))
