"""Softmax attention: one formula for all engines, and the modules and operators of vLLM and torch that compute it.

Formula: softmax(scale * q kᵀ + mask) v [Vaswani et al., arXiv 1706.03762], heads shared as in GQA [Ainslie et al.,
arXiv 2305.13245]; sliding window: keys at distance < W [Beltagy et al., arXiv 2004.05150; vLLM's meaning of W]; soft
cap c tanh(s/c) [Gemma 2, arXiv 2408.00118]; ALiBi: slope * (j - i) [Press et al., arXiv 2108.12409]; sinks: one more
logit per head that takes probability and has no value [gpt-oss's published code]. Latent attention: k = [W_UK c, k_pe]
and v = W_UV c of a latent c per token [DeepSeek-V2, arXiv 2405.04434, section 2.1]. Keys and values are those that the
request computed, at positions from 0 on (``extra["cache"]``, calls/neighbours.py), so that no paged cache is
needed. Noise and bound: `attend`.
Elsewhere: blocks of a cache (paged_attention.py), sparse attention, ATB's and torch_npu's arguments (atb/, fused/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, decline_if, device_kernel, reference
from vllm_accprobe.opcheck.references.aten import of
from vllm_accprobe.opcheck.references.caches import (
    FAR,
    CacheFormat,
    cache_format,
    cut_off,
    rounding_of,
    through_cache,
)
from vllm_accprobe.opcheck.references.parts import Arguments, RowResults, reshaped
from vllm_accprobe.opcheck.roundings import APPROXIMATE, ROUNDED, SUM, gamma, once, subnormal

_SIZES = ("num_heads", "num_kv_heads", "head_size")
_FIRST = 0.5
"""Chosen: from this standard error of a score on its probability is not off by that share of itself: e**0.5 = 1.65."""
TANH = 2.0**-11
"""Standard error of a capped score over ROUNDED, relative: tanh.approx.f32's largest [PTX ISA, section tanh]."""
EXP, COARSE = 2.0**-20, 2.0**-15
"""Chosen: relative error of an exponential and of a sum of them in float32, and in torch's kernels for 16 bits."""
_KEYS = _SCORES = 1 << 20
"""Chosen: elements of the keys, and of the scores, that are computed at a time: 8 MiB of float64. What is larger is cut
along its heads and then along its queries, which are independent of each other."""
_CHECKPOINTS = 16
"""Chosen: blocks of scores from which on a gradient's forward pass is computed again instead of kept."""


def alibi_slopes(heads: int) -> Any:
    """Slopes of ALiBi for any number of heads, float64 [heads]; as published with the paper."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    whole = 2 ** math.floor(math.log2(heads))
    return torch.tensor(powers(whole) + powers(2 * whole)[0::2][: heads - whole], dtype=torch.float64)


def scores(
    q: Any, k: Any, scale: float, positions: Any | None = None, *, window: int | None = None, cap: float | None = None,
    slopes: Any | None = None, hidden: Any | None = None, clamp: tuple[float, float] | None = None,
    added: Any | None = None,
) -> Any:  # fmt: skip
    """scale * q kᵀ, clamped or capped, with what is added; minus infinity where a query does not see a key. float64
    [heads, n, m]; arguments as of `attend`, with a key head for each query head."""
    found = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if clamp is not None:
        found = found.clamp(*clamp)
    if cap:
        found = cap * torch.tanh(found / cap)
    if positions is not None:
        distance = positions[:, None] - torch.arange(k.shape[0])[None, :]
        if slopes is not None:
            found = found - slopes[:, None, None] * distance
        found = found.masked_fill(_beyond(distance, window), -math.inf)
    if added is not None:
        found = found + added
    return found if hidden is None else found.masked_fill(hidden, -math.inf)


def probabilities(
    q: Any, k: Any, scale: float, positions: Any | None = None, *, sinks: Any | None = None, **masks: Any
) -> Any:  # fmt: skip
    """softmax of `scores`, float64 [heads, n, m]; 0 for a query that sees no key."""
    found = scores(q, k, scale, positions, **masks)
    if sinks is not None:
        column = sinks.reshape(-1, 1, 1).expand(len(found), len(q), 1)
        return torch.softmax(torch.cat((found, column), -1), -1)[..., :-1]
    p = torch.softmax(found, -1)
    if masks.get("hidden") is None and masks.get("added") is None:
        return p
    return p.masked_fill(found.detach().amax(-1, keepdim=True) == -math.inf, 0.0)


def score_sums(
    q: Any, k: Any, scale: float, *, sinks: Any | None = None, hidden: Any | None = None, added: Any | None = None
) -> tuple[Any, Any, Any]:
    """(largest score, sum of the exponentials of what scores are below it, largest size of a score), [heads, n];
    arguments as of `attend`. A query that sees no key has 0 and 0."""
    every, k = slice(0, q.shape[1]), k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    parts = []
    for rows in _blocks(len(q), q.shape[1] * len(k)):
        s = scores(q[rows], k, scale, hidden=_cut(hidden, every, rows), added=_cut(added, every, rows))
        s = s if sinks is None else torch.cat((s, sinks.reshape(-1, 1, 1).expand(*s.shape[:2], 1)), -1)
        top = torch.nan_to_num(s.amax(-1), neginf=0.0)
        total = torch.exp(s - top.unsqueeze(-1)).sum(-1)
        parts.append(torch.stack((top, total, torch.nan_to_num(s, neginf=0.0).abs().amax(-1))))
    largest, total, size = torch.cat(parts, 2)
    return largest, total, size


def _beyond(distance: Any, window: int | None) -> Any:
    """Which keys a query does not see, by how far they lie before it."""
    return (distance < 0) | (distance >= window) if window else distance < 0


def attend(
    q: Any, k: Any, v: Any, scale: float, query_positions: Any | None = None, *, sinks: Any | None = None,
    step: float = 0.0, score_step: float = 0.0, score_noise: Any | None = None, score_bound: Any | None = None,
    hidden: Any | None = None, added: Any | None = None, slopes: Any | None = None, **limits: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(output, noise, bound) of one sequence, float64 [n, heads, e]: q [n, heads, d], k [m, kv heads, d], v [m, kv
    heads, e]. Raises Declined.

    query_positions: int [n], keys being at 0 .. m - 1; None: each query sees each key. hidden: bool, and added:
    float64, [n, m], or [heads or 1, n, m]; limits: window, and cap or clamp of the scores. step: relative error of a
    rounded probability; score_step: of a rounded score; score_noise, score_bound: standard error of the scores, [heads
    or 1, n, m], and their largest.

    Noise: probabilities rounded to the values' dtype before they meet them, p (v - o) each, or p v where a kernel
    divides by the sum of unrounded ones. Bound: with each p off by e of itself, sum p e |v - o| <= e (P|V| + |o|): its
    rounding, an exponential off by APPROXIMATE, a score by gamma_d of |q||k|, and gamma_m P|V| for the sum over m keys.
    Scores that are off by d each, by a tanh off by APPROXIMATE or by rounded keys, move p by e**d - 1 (`moved_scores`).
    With few keys the channels of a head share these errors: a row has as many independent ones as heads
    (``Expected.groups``). Of tensors that require gradients only the output is computed."""
    heads, kv = q.shape[1], k.shape[1]
    decline_if(not kv or heads % kv, "query heads are no multiple of key heads")
    share, at_once = heads // kv, max(1, _KEYS // max(len(k) * (heads // kv) * max(k.shape[2], v.shape[2]), 1))
    by_score = {"score_noise": score_noise, "score_bound": score_bound, "hidden": hidden, "added": added}
    by_head = {"slopes": slopes, "sinks": sinks}
    one: Any = partial(_attend, step=step, score_step=score_step, **limits)
    if kv <= at_once and heads * len(q) * len(k) <= _SCORES:
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        return one(q, k, v, scale, query_positions, **by_score, **by_head)
    parts = []
    for first in range(0, kv, at_once):
        some = slice(first * share, (first + at_once) * share)
        k_here, v_here = (x[:, first : first + at_once].repeat_interleave(share, 1) for x in (k, v))
        own = {name: None if x is None else x[some] for name, x in by_head.items()}
        blocks = _blocks(len(q), k_here.shape[1] * len(k))
        done = []
        for rows in blocks:
            block = partial(one, **own, **{name: _cut(x, some, rows) for name, x in by_score.items()})
            places = None if query_positions is None else query_positions[rows]
            operands = q[rows, some], k_here, v_here, scale, places
            again = len(blocks) > _CHECKPOINTS and _wants_gradient(q, k, v)
            done.append(checkpoint(block, *operands, use_reentrant=False) if again else block(*operands))
        parts.append([t[0] if len(done) == 1 else torch.cat(t) for t in zip(*done, strict=True)])
    out, noise, bound = (t[0] if len(parts) == 1 else torch.cat(t, 1) for t in zip(*parts, strict=True))
    return out, noise, bound


def _wants_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _cut(x: Any | None, heads: slice, rows: slice) -> Any | None:
    """Of [heads, n, m] or [n, m], where one may stand for all."""
    if x is None:
        return None
    x = x[heads] if x.dim() == 3 and x.shape[0] > 1 else x
    return x[..., rows, :] if x.shape[-2] > 1 else x


def _blocks(rows: int, scores: int) -> list[slice]:
    """Runs of queries, each of which has so many scores."""
    size = max(1, _SCORES // max(scores, 1))
    return [slice(a, min(a + size, rows)) for a in range(0, rows, size)] or [slice(0, 0)]


def _attend(
    q: Any, k: Any, v: Any, scale: float, positions: Any | None, *, sinks: Any | None, step: float, score_step: float,
    score_noise: Any | None, score_bound: Any | None, **masks: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`attend` of some queries and heads, with a key head for each query head. masks: of `scores`."""
    p = probabilities(q, k, scale, positions, sinks=sinks, **masks)
    by_head = v.transpose(0, 1)
    if _wants_gradient(q, k, v):
        out = (p @ by_head).transpose(0, 1)
        return out, out.detach(), out.detach()
    width = v.shape[-1]
    mixed = (p @ torch.cat((by_head, by_head.abs()), -1)).transpose(0, 1)
    out, sizes = mixed[..., :width], mixed[..., width:]
    own = ROUNDED * step
    variance = own * own if score_noise is None else own * own + score_noise**2
    # |q||k| <= their norms' product [Cauchy and Schwarz]
    largest = abs(scale) * q.norm(dim=-1) * k.norm(dim=-1).amax(0)
    if masks["added"] is not None:
        largest = largest + torch.where(p > 0, masks["added"], 0.0).abs().amax(-1).T
    if masks.get("cap") or score_step:
        size = torch.where(p > 0, scores(q, k, scale, positions, **masks), 0.0).abs()
        variance = variance + (2.0 * (ROUNDED * score_step * size) ** 2 if score_step else 0.0)
        if masks.get("cap"):
            variance, most = variance + (ROUNDED * TANH * size) ** 2, APPROXIMATE * size
            score_bound = most if score_bound is None else score_bound + most
    w = p * p * variance
    # sum of w (v - o)**2 without building the differences
    both = (w @ torch.cat((by_head * by_head, by_head), -1)).transpose(0, 1)
    spread = both[..., :width] - 2 * out * both[..., width:] + out * out * w.sum(-1).T.unsqueeze(-1)
    score = gamma(q.shape[-1] + 8) + 4.0 * SUM + 2.0 * score_step
    relative = step + APPROXIMATE + 2.0 * score * largest.unsqueeze(-1)
    bound = relative * (sizes + out.abs()) + gamma(k.shape[0] + 8) * sizes
    if score_bound is not None:
        bound = bound + moved_scores(p, by_head.abs(), out, score_bound)
    if subnormal(step):  # a subnormal probability, where the largest is 1, and so is the sum at least
        seen = (p > 0).double()
        least = subnormal(step) * ((seen @ by_head.abs()).transpose(0, 1) + seen.sum(-1).T.unsqueeze(-1) * out.abs())
        spread, bound = spread + (ROUNDED * least).square(), bound + least
    if score_noise is not None and bool((score_noise > _FIRST).any()):
        far = (score_noise.amax(-1).T > _FIRST).unsqueeze(-1)
        spread = torch.where(far, torch.maximum(spread, moved_scores(p, by_head.abs(), out, score_noise) ** 2), spread)
    # a kernel that divides by the sum of unrounded probabilities, as flash attention does, is off by p v each
    return out, torch.maximum(spread, both[..., :width]).sqrt(), bound


def moved_scores(p: Any, sizes: Any, out: Any, by: Any) -> Any:
    """The largest error of an output whose scores are off ``by`` d [heads, n, m], float64 [n, heads, e]: with f = e**d
    - 1, |sum p f (v - o)| / sum p (1 + f). p: probabilities [heads, n, m]; sizes: |v| [heads, m, e]."""
    by = by.clamp(max=FAR)
    far = p * torch.expm1(by)
    left = (1.0 + (p * torch.expm1(-by)).sum(-1, keepdim=True)).clamp(min=math.exp(-FAR))
    moved = far @ sizes + out.transpose(0, 1).abs() * far.sum(-1, keepdim=True)
    return (moved / left).transpose(0, 1)


def scale_of(call: Call, head: int) -> float:
    for source in (call.attrs, call.parent):
        for name in ("scale", "scaling", "attention_multiplier"):
            if name in source:
                return float(source[name])
    if "impl.scale" in call.attrs:  # Gemma 3n and 4 scale nothing
        return float(call.attrs["impl.scale"])
    if "query_pre_attn_scalar" in call.config:
        return float(call.config["query_pre_attn_scalar"]) ** -0.5
    return float(head) ** -0.5


def _cap(call: Call) -> float | None:
    return call.attrs.get("logits_soft_cap") or call.config.get("attn_logit_softcapping") or None


def attention_settings(call: Call, heads: int, head: int) -> dict[str, Any]:
    """The keyword arguments of `attend` that a module's attributes and config.json have."""
    window, slopes = call.attrs.get("sliding_window"), None
    if isinstance(window, (list, tuple)):  # flash-attention's spelling: (left, right), -1 for none
        window = int(window[0]) + 1 if window and int(window[0]) >= 0 else None
    if call.config.get("model_type") in ("bloom", "mpt") or call.config.get("alibi"):
        size, rank = int(call.parent.get("tp_size", 1)), int(call.parent.get("tp_rank", 0))
        slopes = alibi_slopes(heads * size)[rank * heads : (rank + 1) * heads]
        slopes = slopes * scale_of(call, head) if call.config.get("alibi") else slopes  # Falcon adds, then scales
    elif own := call.attrs.get("impl.alibi_slopes"):
        slopes = torch.tensor(own, dtype=torch.float64)
    sinks = call.extra.get("parent_sinks", call.attrs.get("impl.sinks"))
    sinks = call.param("sinks") if "sinks" in call.params else sinks
    if isinstance(sinks, list):  # of its kernel's object
        sinks = torch.tensor(sinks, dtype=torch.float64)
    return {"scale": scale_of(call, head), "window": int(window) if window else None, "cap": _cap(call),
            "slopes": slopes, "sinks": sinks, "step": call.unit}  # fmt: skip


def cache_of(call: Call, missing: str = "which row belongs to which request was not captured") -> Any:
    """The rows that the call reads from its cache (calls/neighbours.py). Raises Declined."""
    if call.extra.get("cache") is None:
        raise Declined(missing)
    return call.extra["cache"]


def attended(q: Any, requests: Iterable[tuple[Any, ...]], width: int, **settings: Any) -> RowResults:
    """`attend` of each request: (its rows of q [tokens, heads, d], keys, values, own settings). width: of a value."""
    found = RowResults(len(q), q.shape[1], width)
    for at, k, v, own in requests:
        found.put(at, attend(q[at], k, v, **settings, **own))
    return found


def by_request(
    cache: Any, n: int, one: Callable[[Any, Any, Any], tuple[Any, ...]], causal: bool = True
) -> tuple[list[Any], Any]:
    """What ``one(rows, positions, past)`` gives for each request, put together to ``n`` rows; which. Raises
    Declined."""
    found = RowResults(n)
    for at, positions, past in cache.requests(causal):
        found.put(at, one(at, positions, past))
    if not found.parts:
        raise Declined(cache.why or "no row has its whole history in the dump")
    return found.parts, found.known


@reference("Attention", "EncoderOnlyAttention", "ChunkedLocalAttention", "CrossAttention")
def paged_attention(call: Call) -> Expected:
    """Rows of several requests, [tokens, heads * d] or [tokens, heads, d]; none where a history is incomplete."""
    decline_if(call.cls in ("ChunkedLocalAttention", "CrossAttention"), f"no reference for {call.cls}")
    heads, kv, head = (int(call.attr(n)) for n in _SIZES)
    causal, captured = call.cls != "EncoderOnlyAttention", call.outputs["output.0"]
    cache = cache_of(call)
    q = call.wide("query").reshape(captured.shape[0], heads, head)
    settings, eight = attention_settings(call, heads, head), cache_format(call.attrs)

    def one(at: Any, positions: Any, past: Any, eight: CacheFormat | None = eight) -> tuple[Any, ...]:
        k, v = (past[name].double().reshape(len(past[name]), kv, -1) for name in ("key", "value"))
        seen, own = positions if causal else None, {}
        if not causal and settings["window"]:  # to both sides
            own["hidden"] = (positions[:, None] - torch.arange(len(k))).abs() >= settings["window"]
        plain = attend(q[at], k, v, query_positions=seen, **own, **settings)
        if eight is None:
            return plain

        def again(k: Any, v: Any, noise: Any, most: Any) -> tuple[Any, Any, Any]:
            return attend(q[at], k, v, query_positions=seen, score_noise=noise, score_bound=most, **settings)

        masks = {n: settings[n] for n in ("window", "cap", "slopes", "sinks")}
        p = probabilities(q[at], k.repeat_interleave(heads // kv, 1), settings["scale"], seen, **masks)
        return through_cache(eight, q[at], (k, v), p, plain[0], settings["scale"], again)

    (out, noise, bound, *more), rows = by_request(cache, len(q), one, causal)
    decline_if(out.numel() != captured.numel(), "its output has another shape than its queries")
    mine = captured.double().reshape(out.shape)
    if (cut := cut_off(eight, out, noise, mine, rows)) is not None:
        other, _ = by_request(cache, len(q), partial(one, eight=cut), causal)
        if bool((other[0] - mine)[rows].norm() < 0.5 * (out - mine)[rows].norm()):
            (out, noise, bound, *more), eight = other, cut
    moved = None if eight is None else rounding_of(eight.label, (out, *more), rows)
    y = Expected(out, noise, rows=rows, reason=cache.why, bound=bound, groups=heads, cache=moved)
    return reshaped(y, captured.shape)


@reference("MMEncoderAttention", "MultiHeadAttention")
def encoder_attention(call: Call) -> Expected:
    """Full attention within runs of rows, whose ends cu_seqlens are; [1, tokens, heads, d] or [1, tokens, heads *
    d]."""
    q, k, v = _by_heads(call)
    return _full_attention(q, k, v, call.inputs.get("cu_seqlens"), scale_of(call, q.shape[-1]), call)


@reference("torch.ops.vllm.torch_sdpa_wrapper")
def sdpa_wrapper(call: Call) -> Expected:
    """(q, k, v [1, tokens, heads, d], scale, cu_seqlens): each row sees all rows of its run."""
    f = Arguments(call, "q k v scale cu_seqlens")
    q, k, v = f.wide("q", "k", "v")
    scale = float(f["scale"]) if f["scale"] is not None else 1.0 / math.sqrt(q.shape[-1])
    return _full_attention(q, k, v, f["cu_seqlens"], scale, call)


def _by_heads(call: Call) -> tuple[Any, ...]:
    """q, k, v [batch, tokens, heads, d] of an encoder's module."""
    heads, kv, head = (int(call.attr(n)) for n in _SIZES)
    q, k, v = (call.tensor(n, str(i)) for i, n in enumerate(("query", "key", "value")))
    n = q.shape[0]
    return q.reshape(n, -1, heads, head), k.reshape(n, -1, kv, head), v.reshape(n, -1, kv, head)


def _full_attention(q: Any, k: Any, v: Any, cu_seqlens: Any | None, scale: float, call: Call) -> Expected:
    """Each row sees all rows of its run; q, k, v [batch, tokens, heads, d]."""
    ends = [int(e) for e in cu_seqlens] if cu_seqlens is not None else [0, q.shape[1]]
    if ends[0] != 0 or ends[-1] != q.shape[1] or sorted(ends) != ends:
        raise Declined("not all rows of its sequences were captured")
    n, (q, k, v) = q.shape[1], (t.double().flatten(0, 1) for t in (q, k, v))
    each = (slice(b + i, b + j) for b in range(0, len(q), n) for i, j in pairwise(ends) if j > i)
    found = attended(q, ((at, k[at], v[at], {}) for at in each), v.shape[-1], scale=scale, step=call.unit)
    return found.expected(call.outputs["output.0"], q.shape[1], "")


def _latent_matrices(call: Call, nope: int) -> tuple[Any, Any]:
    """W_UK [heads, nope, latent] and W_UV [heads, v, latent], float64."""
    if "W_UK_T" in call.params and "W_UV" in call.params:
        return call.param("W_UK_T"), call.param("W_UV").transpose(1, 2)
    both = call.extra.get("kv_b_proj")
    if both is None:
        raise Declined("neither W_UK_T and W_UV nor kv_b_proj's weight were captured")
    w = both.double().reshape(int(call.attr("num_heads")), -1, both.shape[-1])
    return w[:, :nope], w[:, nope:]


@reference("MLAAttention")
def latent_attention(call: Call) -> Expected:
    """q [tokens, heads, nope + rope], kv_c_normed [tokens, latent], k_pe [tokens, 1, rope].

    Engines compute it in two ways, keys and values made explicit (prefill) or W_UK moved to the query and W_UV behind
    the sum (decode): equal in exact arithmetic. Noise covers what either way rounds; in the bound, a score is off by
    u |q||k| or u |q W_UK||c|, whichever is larger."""
    cache = cache_of(call)
    q, pe = call.wide("q"), call.wide("k_pe")
    nope = q.shape[-1] - pe.shape[-1]
    up_k, up_v = _latent_matrices(call, nope)
    scale, step, cap = scale_of(call, q.shape[-1]), call.unit, _cap(call)

    def one(at: Any, positions: Any, past: Any) -> tuple[Any, ...]:
        latent, k_pe = past["kv_c_normed"].double(), past["k_pe"].double().reshape(len(past["k_pe"]), -1)
        k_nope = torch.einsum("mc,hnc->mhn", latent, up_k)
        k = torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, q.shape[1], -1)), -1)
        v = torch.einsum("mc,hvc->mhv", latent, up_v)
        # rounded keys, or rounded absorbed queries: the same size in random signs, added up over the channels
        by_keys = torch.einsum("nhd,mhd->hnm", q[at, :, :nope] ** 2, k_nope**2)
        absorbed = torch.einsum("nhd,hdc->nhc", q[at, :, :nope], up_k)
        by_queries = torch.einsum("nhc,mc->hnm", absorbed**2, latent**2)
        score_noise = ROUNDED * step * scale * torch.maximum(by_keys, by_queries).sqrt()
        by_keys = torch.einsum("nhd,mhd->hnm", q[at, :, :nope].abs(), k_nope.abs())
        by_queries = torch.einsum("nhc,mc->hnm", absorbed.abs(), latent.abs())
        score_bound = step * abs(scale) * torch.maximum(by_keys, by_queries)
        y, e, most = attend(q[at], k, v, scale, positions, step=step, score_noise=score_noise, score_bound=score_bound,
                            cap=cap)  # fmt: skip
        p = probabilities(q[at], k, scale, positions, cap=cap)
        rounded_v = ROUNDED * step * torch.einsum("hnm,mhv->nhv", p * p, v * v).sqrt()
        mixed = torch.einsum("hnm,mc->nhc", p, latent)
        rounded_mix = ROUNDED * step * torch.einsum("nhc,hvc->nhv", mixed**2, up_v**2).sqrt()
        # a rounded v is off by step |v|, a rounded mix by step |mixed|
        most = most + torch.einsum("nhc,hvc->nhv", once(mixed.abs(), step), up_v.abs())
        most = most + torch.einsum("hnm,mhv->nhv", p, once(v.abs(), step))
        return y, combined(e, torch.maximum(rounded_v, rounded_mix)), most

    (out, noise, bound), rows = by_request(cache, len(q), one)
    y = Expected(out, noise, rows=rows, reason=cache.why, bound=bound, groups=q.shape[1])
    return reshaped(y, call.outputs["output.0"].shape)


@reference("aten.*scaled_dot_product*attention*", "torch.ops.aten.*scaled_dot_product*attention*")
def fused_attention(call: Call) -> dict[str, Expected]:
    """torch's attention operators, whichever kernel: q [..., heads, n, d], k, v [..., kv heads, m, ...]; a mask is
    added, or, where it is bool, says what is seen. Second output: log-sum-exp of the scores, where a kernel gives it.
    The operators differ in the order of their arguments, which are named by the operator's schema. Where a kernel
    rounds scores (torch's ``_math``), noise has that, too; their bound is not known."""
    decline_if("backward" in call.cls, "a backward kernel of attention")
    found = of(call.cls)
    schema = getattr(found, "_schema", None) or found.default._schema
    arguments = {a.name: v for a, v in zip(schema.arguments, call.args, strict=False)} | dict(call.kwargs)
    random = arguments.get("dropout_p") or arguments.get("dropout_mask") is not None
    decline_if(random, "an operator that draws random numbers")
    q, k, v = (arguments[n].double() for n in ("query", "key", "value"))
    scale = q.shape[-1] ** -0.5 if arguments.get("scale") is None else float(arguments["scale"])
    lead, sizes = q.shape[:-3], (q.shape[-2], k.shape[-2])
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    if arguments.get("is_causal"):
        causal = torch.full(sizes, -math.inf, dtype=torch.float64).triu(1)
        mask = causal if mask is None else mask + causal
    if mask is not None:  # [heads or 1, n, m] of each sequence
        heads = mask.shape[-3] if mask.dim() > 2 else 1
        mask = mask.double().expand(*lead, heads, *sizes).reshape(-1, heads, *sizes)
    rounded = 2.0**0.5 * call.unit if "math" in call.cls else 0.0  # q and k scaled by a root each, and the scores
    mine = call.outputs.get("output.1")
    q_each, k_each, v_each = (t.reshape(-1, *t.shape[max(t.dim() - 3, 0) :]) for t in (q, k, v))
    parts, sums = [], []
    for b, one in enumerate(zip(q_each, k_each, v_each, strict=True)):
        q_b, k_b, v_b = (t.reshape(-1, *t.shape[-2:]).transpose(0, 1) for t in one)
        added = None if mask is None else mask[b]
        parts.append(attend(q_b, k_b, v_b, scale, step=call.unit, score_step=rounded, added=added))
        if mine is not None and mine.is_floating_point() and tuple(mine.shape) == (*q.shape[:-2], sizes[0]):
            sums.append(score_sums(q_b, k_b, scale, added=added))
    value, noise = (torch.stack([p[n].transpose(0, 1) for p in parts]).reshape(*q.shape[:-1], -1) for n in (0, 1))
    expected = {"output.0": Expected(value, noise, groups=1)}
    if mine is not None and sums:
        largest, total, size = (torch.stack([s[n] for s in sums]).reshape(mine.shape) for n in range(3))
        coarse = COARSE if call.unit > EXP else 0.0
        expected["output.1"] = Expected(largest + total.log(), coarse + EXP * (1.0 + size), common=coarse)
    return expected


@reference("torch.ops._C.get_scheduler_metadata")
def plans(call: Call) -> Expected:
    raise Declined("it plans the work of a kernel and computes nothing")


@reference("torch.ops.vllm.unified_mla_*", "torch.ops._C_cache_ops.*")
def reads_cache(call: Call) -> Expected:
    raise Declined("reads the KV cache, which is not kept: its module's call is checked instead")


def _sdpa(q: Any, k: Any, v: Any, scale: float, mask: Any | None = None) -> Any:
    """q [n, heads, d], k and v [m, kv heads, ...] of one sequence; mask added to the scores or None."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).squeeze(0).transpose(0, 1)


@device_kernel("Attention", "EncoderOnlyAttention")
def attention_kernel(call: Call) -> Any:
    heads, kv, head = (int(call.attr(n)) for n in _SIZES)
    settings = attention_settings(call, heads, head)
    if settings["cap"] or settings["sinks"] is not None or settings["slopes"] is not None:
        raise Declined("soft caps, sinks and ALiBi have no torch kernel")
    captured, causal = call.outputs["output.0"], call.cls == "Attention"
    q = call.tensor("query").reshape(captured.shape[0], heads, head)

    def one(at: Any, positions: Any, past: Any) -> tuple[Any, ...]:
        k, v = (past[n].to(q.dtype).reshape(len(past[n]), kv, -1) for n in ("key", "value"))
        mask = None
        if causal:
            distance = positions[:, None] - torch.arange(len(k), device=positions.device)[None, :]
            hidden = _beyond(distance, settings["window"])
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)
        return (_sdpa(q[at], k, v, settings["scale"], mask),)

    cache = cache_of(call, "the keys and values that it looked back at were not captured")
    return by_request(cache, len(q), one, causal)[0][0].reshape(captured.shape)


@device_kernel("MMEncoderAttention", "MultiHeadAttention")
def encoder_attention_kernel(call: Call) -> Any:
    q, k, v = _by_heads(call)
    ends = [int(e) for e in call.tensor("cu_seqlens")] if "cu_seqlens" in call.inputs else [0, q.shape[1]]
    scale, runs = scale_of(call, q.shape[-1]), [(a, b) for a, b in pairwise(ends) if b > a]
    done = [torch.cat([_sdpa(q[i, a:b], k[i, a:b], v[i, a:b], scale) for a, b in runs]) for i in range(len(q))]
    return torch.stack(done).reshape(call.outputs["output.0"].shape)
