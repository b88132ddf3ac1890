"""Attention as vLLM runs it: a row of the batch looks back at all rows of its own request.

Formula: softmax(scale * q kᵀ + mask) v [Vaswani et al., arXiv 1706.03762], heads shared as in GQA [Ainslie et al.,
arXiv 2305.13245]; sliding window: keys at distance < W [Beltagy et al., arXiv 2004.05150; vLLM's meaning of W]; soft
cap c tanh(s/c) [Gemma 2, arXiv 2408.00118]; ALiBi: slope * (j - i) [Press et al., arXiv 2108.12409]; sinks: one more
logit per head that takes probability and gives nothing [gpt-oss's published code]. No paged cache is needed: keys and
values are those that the request itself computed, at positions from 0 on, as captured (``extra["cache"]``, see
opcheck/calls/history.py). Rows whose history is incomplete have no reference. Noise: probabilities rounded to the
values' dtype before they meet them, p * (v - o) each, or p * v where they are divided by a sum that is not rounded;
where a kernel rounds scores as well (torch's ``_math``), those too. With few keys the channels of a head share these
errors: a row has as many independent ones as heads (`groups`). Bound: with each p off by e of itself, sum p e |v - o|
<= e (P|V| + |o|): its rounding, an exponential off by APPROXIMATE, a score by gamma_d of |q||k|, and gamma_m P|V| for
the sum over m keys. torch's own attention operators are told their arguments by name, from the operator's schema.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import (
    APPROXIMATE,
    ROUNDED,
    SUM,
    Call,
    Declined,
    Expected,
    device_kernel,
    gamma,
    reference,
)
from vllm_accprobe.opcheck.references.aten import of

_FAR = 10.0
"""Chosen: standard errors of a score that is a sum of many roundings, in a bound."""


def alibi_slopes(heads: int) -> Any:
    """Slopes of ALiBi for any number of heads, float64 [heads]; as published with the paper."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    whole = 2 ** math.floor(math.log2(heads))
    return torch.tensor(powers(whole) + powers(2 * whole)[0::2][: heads - whole], dtype=torch.float64)


def attend(
    q: Any,
    k: Any,
    v: Any,
    scale: float,
    query_positions: Any | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
    slopes: Any | None = None,
    sinks: Any | None = None,
    step: float = 0.0,
    score_noise: Any | None = None,
) -> tuple[Any, Any, Any]:
    """(output, noise, bound) of one sequence, float64 [n, heads, e]: q [n, heads, d], k [m, kv heads, d], v [m, kv
    heads, e].

    query_positions: int [n], keys being at 0 .. m - 1; None: everything sees everything. step: relative error of a
    rounded probability. score_noise: standard error of the scores, [heads, n, m]; the bound has ten times that.
    """
    heads, kv = q.shape[1], k.shape[1]
    if heads % kv:
        raise Declined("query heads are no multiple of key heads")
    k, v = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if query_positions is not None:
        distance = query_positions[:, None] - torch.arange(k.shape[0])[None, :]
        if slopes is not None:
            scores = scores - slopes[:, None, None] * distance
        hidden = distance < 0
        if window:
            hidden = hidden | (distance >= window)
        scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.reshape(-1, 1, 1).expand(heads, q.shape[0], 1)
        p = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    else:
        p = torch.softmax(scores, -1)
    by_head = v.transpose(0, 1)
    width = v.shape[-1]
    mixed = (p @ torch.cat((by_head, by_head.abs()), -1)).transpose(0, 1)
    out, sizes = mixed[..., :width], mixed[..., width:]
    own = ROUNDED * step
    w = p * p * (own * own if score_noise is None else own * own + score_noise**2)
    # sum of w (v - o)**2 without building the differences
    both = (w @ torch.cat((by_head * by_head, by_head), -1)).transpose(0, 1)
    spread = both[..., :width] - 2 * out * both[..., width:] + out * out * w.sum(-1).T.unsqueeze(-1)
    # |q||k| <= their norms' product [Cauchy and Schwarz]
    largest = scale * q.norm(dim=-1) * k.norm(dim=-1).amax(0)
    relative = step + APPROXIMATE + 2.0 * (gamma(q.shape[-1] + 8) + 4.0 * SUM) * largest.unsqueeze(-1)
    if score_noise is not None:
        relative = relative + 2.0 * _FAR * score_noise.amax(-1).T.unsqueeze(-1)
    bound = relative * (sizes + out.abs()) + gamma(k.shape[0] + 8) * sizes
    # a kernel that divides by the sum of unrounded probabilities, as flash attention does, is off by p v each
    return out, torch.maximum(spread, both[..., :width]).sqrt(), bound


def scale_of(call: Call, head: int) -> float:
    for source in (call.attrs, call.parent):
        for name in ("scale", "scaling"):
            if name in source:
                return float(source[name])
    if "query_pre_attn_scalar" in call.config:
        return float(call.config["query_pre_attn_scalar"]) ** -0.5
    return float(head) ** -0.5


def _window(call: Call) -> int | None:
    found = call.attrs.get("sliding_window")
    if isinstance(found, (list, tuple)):  # flash-attention's spelling: (left, right), -1 for none
        found = int(found[0]) + 1 if found and int(found[0]) >= 0 else None
    return int(found) if found else None


def _slopes(call: Call, heads: int) -> Any | None:
    if call.config.get("model_type") not in ("bloom", "mpt") and not call.config.get("alibi"):
        return None
    size, rank = int(call.parent.get("tp_size", 1)), int(call.parent.get("tp_rank", 0))
    return alibi_slopes(heads * size)[rank * heads : (rank + 1) * heads]


@reference("Attention", "EncoderOnlyAttention", "ChunkedLocalAttention", "CrossAttention")
def paged_attention(call: Call) -> Expected:
    """Rows of several requests; q [tokens, heads * d] or [tokens, heads, d]."""
    if call.cls in ("ChunkedLocalAttention", "CrossAttention"):
        raise Declined(f"no reference for {call.cls}")
    heads, kv = int(call.attr("num_heads")), int(call.attr("num_kv_heads"))
    head = int(call.attr("head_size"))
    cache = call.extra.get("cache")
    if cache is None:
        raise Declined("which row belongs to which request was not captured")
    captured = call.outputs["output.0"]
    q = call.wide("query").reshape(captured.shape[0], heads, head)
    out, noise, bound, rows = _by_request(call, cache, q, kv, attention_settings(call, heads, head))
    shape = captured.shape
    if out.numel() != captured.numel():
        raise Declined("its output has another shape than its queries")
    return Expected(out.reshape(shape), noise.reshape(shape), rows=rows, reason=cache.why, bound=bound.reshape(shape),
                    groups=heads)  # fmt: skip


def attention_settings(call: Call, heads: int, head: int) -> dict[str, Any]:
    """The keyword arguments of `attend` that a module's attributes and config.json tell."""
    return {
        "scale": scale_of(call, head),
        "window": _window(call),
        "cap": call.attrs.get("logits_soft_cap") or call.config.get("attn_logit_softcapping") or None,
        "slopes": _slopes(call, heads),
        "sinks": call.param("sinks") if "sinks" in call.params else None,
        "step": call.unit,
    }


def _by_request(call: Call, cache: Any, q: Any, kv: int, limits: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    causal = call.cls != "EncoderOnlyAttention"
    out: Any = None
    noise: Any = None
    bound: Any = None
    rows = torch.zeros(q.shape[0], dtype=torch.bool)
    for at, positions, past in cache.requests(causal):
        k, v = (past[name].double().reshape(len(past[name]), kv, -1) for name in ("key", "value"))
        y, e, most = attend(q[at], k, v, query_positions=positions if causal else None, **limits)
        if out is None:
            out = torch.zeros(q.shape[0], *y.shape[1:], dtype=torch.float64)
            noise, bound = torch.zeros_like(out), torch.zeros_like(out)
        out[at], noise[at], bound[at], rows[at] = y, e, most, True
    if out is None:
        raise Declined(cache.why or "no row has its whole history in the dump")
    return out, noise, bound, rows


@reference("MMEncoderAttention", "MultiHeadAttention")
def encoder_attention(call: Call) -> Expected:
    """Full attention within runs of rows; q, k, v [1, tokens, heads, d] or [1, tokens, heads * d], cu_seqlens the runs'
    ends."""
    captured = call.outputs["output.0"]
    heads, kv, head = (int(call.attr(n)) for n in ("num_heads", "num_kv_heads", "head_size"))
    q, k, v = (call.wide(n, str(i)) for i, n in enumerate(("query", "key", "value")))
    batch = q.shape[0]
    q, k, v = q.reshape(batch, -1, heads, head), k.reshape(batch, -1, kv, head), v.reshape(batch, -1, kv, head)
    ends = [0, q.shape[1]]
    if "cu_seqlens" in call.inputs:
        ends = [int(e) for e in call.tensor("cu_seqlens")]
    if ends[0] != 0 or ends[-1] != q.shape[1] or sorted(ends) != ends:
        raise Declined("not all rows of its sequences were captured")
    scale = scale_of(call, head)
    done = [_runs(q[b], k[b], v[b], ends, scale, call.unit) for b in range(batch)]
    out, noise, bound = (torch.stack([d[i] for d in done]).reshape(captured.shape) for i in range(3))
    return Expected(out, noise, bound=bound, groups=heads)


def _runs(q: Any, k: Any, v: Any, ends: Sequence[int], scale: float, step: float) -> tuple[Any, ...]:
    parts = [attend(q[a:b], k[a:b], v[a:b], scale, step=step) for a, b in pairwise(ends) if b > a]
    return tuple(torch.cat([p[i] for p in parts]) for i in range(3))


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


# --- on a device --------------------------------------------------------------------------------------------------


def _sdpa(q: Any, k: Any, v: Any, scale: float, mask: Any | None = None) -> Any:
    """q [n, heads, d], k and v [m, kv heads, ...] of one sequence; mask added to the scores or None."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).squeeze(0).transpose(0, 1)


def _mask(positions: Any, keys: int, window: int | None, like: Any) -> Any:
    distance = positions[:, None] - torch.arange(keys, device=positions.device)[None, :]
    hidden = distance < 0
    if window:
        hidden = hidden | (distance >= window)
    return torch.zeros(distance.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, -math.inf)


@device_kernel("Attention", "EncoderOnlyAttention")
def attention_kernel(call: Call) -> Any:
    heads, kv, head = (int(call.attr(n)) for n in ("num_heads", "num_kv_heads", "head_size"))
    settings = attention_settings(call, heads, head)
    if settings["cap"] or settings["sinks"] is not None or settings["slopes"] is not None:
        raise Declined("soft caps, sinks and ALiBi have no torch kernel")
    if "cache" not in call.extra:
        raise Declined("the keys and values that it looked back at were not captured")
    captured = call.outputs["output.0"]
    q = call.tensor("query").reshape(captured.shape[0], heads, head)
    out = None
    for at, positions, past in call.extra["cache"].requests(call.cls == "Attention"):
        k, v = (past[n].to(q.dtype).reshape(len(past[n]), kv, -1) for n in ("key", "value"))
        mask = _mask(positions, len(k), settings["window"], q) if call.cls == "Attention" else None
        y = _sdpa(q[at], k, v, settings["scale"], mask)
        out = torch.zeros(q.shape[0], *y.shape[1:], dtype=q.dtype, device=q.device) if out is None else out
        out[at] = y
    if out is None:
        raise Declined("no row has its whole history in the dump")
    return out.reshape(captured.shape)


@device_kernel("MMEncoderAttention", "MultiHeadAttention")
def encoder_attention_kernel(call: Call) -> Any:
    captured = call.outputs["output.0"]
    heads, kv, head = (int(call.attr(n)) for n in ("num_heads", "num_kv_heads", "head_size"))
    settings = attention_settings(call, heads, head)
    q, k, v = (call.tensor(n, str(i)) for i, n in enumerate(("query", "key", "value")))
    n = q.shape[0]
    q, k, v = q.reshape(n, -1, heads, head), k.reshape(n, -1, kv, head), v.reshape(n, -1, kv, head)
    ends = [int(e) for e in call.tensor("cu_seqlens")] if "cu_seqlens" in call.inputs else [0, q.shape[1]]
    runs = [(a, b) for a, b in pairwise(ends) if b > a]
    done = [torch.cat([_sdpa(q[i, a:b], k[i, a:b], v[i, a:b], settings["scale"]) for a, b in runs]) for i in range(n)]
    return torch.stack(done).reshape(captured.shape)
