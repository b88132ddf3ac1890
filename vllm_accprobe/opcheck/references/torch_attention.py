"""torch's own attention operators, whichever kernel torch took for them.

Formula: attention.py's, with a mask that is added or that says what is seen. The operators of this family differ in the
order of their arguments, which are told by name, from the operator's schema. Noise: as in attention.py; where a kernel
rounds scores as well (torch's ``_math``), those too.
"""

from __future__ import annotations

import math

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.aten import of


@reference("aten.*scaled_dot_product*attention*", "torch.ops.aten.*scaled_dot_product*attention*")
def fused_attention(call: Call) -> dict[str, Expected]:
    """torch's attention operators, whichever kernel: q [..., heads, n, d], k, v [..., kv heads, m, ...]; a mask is
    added, or, where it is bool, says what is seen. Second output: log-sum-exp of the scores, where a kernel gives it;
    kernels for 16 bits take an exponential of some 15 bits."""
    if "backward" in call.cls:
        raise Declined("a backward kernel of attention")
    found = of(call.cls)
    schema = getattr(found, "_schema", None) or found.default._schema
    given = {a.name: v for a, v in zip(schema.arguments, call.args, strict=False)} | dict(call.kwargs)
    if given.get("dropout_p") or given.get("dropout_mask") is not None:
        raise Declined("an operator that draws random numbers")
    q, k, v = (given[n].double() for n in ("query", "key", "value"))
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = given.get("scale")
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    mask = given.get("attn_mask", given.get("attn_bias"))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if given.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    p = torch.softmax(scores, -1)
    out = p @ v
    own = ROUNDED * call.unit
    rounded = torch.full_like(p, own * own)
    if "math" in call.cls:  # q and k scaled by a root each, and the scores
        rounded = rounded + (2.0 * own * torch.nan_to_num(scores, neginf=0.0)).square()
    w = p * p * rounded
    spread = w @ (v * v) - 2 * out * (w @ v) + out * out * w.sum(-1, keepdim=True)
    expected = {"output.0": Expected(out, spread.clamp(min=0.0).sqrt(), groups=1)}
    sums = call.outputs.get("output.1")
    if sums is not None and sums.is_floating_point() and tuple(sums.shape) == tuple(scores.shape[:-1]):
        lse = torch.logsumexp(scores, -1)
        largest = torch.nan_to_num(scores, neginf=0.0).abs().amax(-1)
        coarse = 2.0**-15 if call.unit > 2.0**-20 else 0.0
        expected["output.1"] = Expected(lse, coarse + 2.0**-20 * (1 + largest), common=coarse)
    return expected
