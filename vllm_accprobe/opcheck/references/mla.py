"""Latent attention: keys and values are made of a small vector per token.

Formula: head h sees k = [W_UK c, k_pe] and v = W_UV c of the normalised latent c [DeepSeek-V2, arXiv 2405.04434,
section 2.1]. Engines compute it in two ways, keys and values made explicit (prefill) or W_UK moved to the query and
W_UV behind the sum (decode): equal in exact arithmetic, so that one reference serves both; noise covers what either way
rounds; in the bound, a score is off by u |q||k| or u |q W_UK||c|, whichever is more. W_UK and W_UV come from kv_b_proj,
or as the engine keeps them. The cache: see attention.py.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, Call, Declined, Expected, combined, reference
from vllm_accprobe.opcheck.references.attention import attend, by_request, cache_of, probabilities, scale_of
from vllm_accprobe.opcheck.references.parts import once


def matrices(call: Call, nope: int) -> tuple[Any, Any]:
    """W_UK [heads, nope, latent] and W_UV [heads, v, latent], float64."""
    if "W_UK_T" in call.params and "W_UV" in call.params:
        return call.param("W_UK_T"), call.param("W_UV").transpose(1, 2)
    heads = int(call.attr("num_heads"))
    both = call.extra.get("kv_b_proj")
    if both is None:
        raise Declined("neither W_UK_T and W_UV nor kv_b_proj's weight were captured")
    w = both.double().reshape(heads, -1, both.shape[-1])
    return w[:, :nope], w[:, nope:]


@reference("MLAAttention")
def latent_attention(call: Call) -> Expected:
    """q [tokens, heads, nope + rope], kv_c_normed [tokens, latent], k_pe [tokens, 1, rope]."""
    cache = cache_of(call)
    q, pe = call.wide("q"), call.wide("k_pe")
    rope = pe.shape[-1]
    nope = q.shape[-1] - rope
    up_k, up_v = matrices(call, nope)
    scale, step = scale_of(call, q.shape[-1]), call.unit

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
        y, e, most = attend(q[at], k, v, scale, positions, step=step, score_noise=score_noise, score_bound=score_bound)
        p = probabilities(q[at], k, scale, positions)
        rounded_v = ROUNDED * step * torch.einsum("hnm,mhv->nhv", p * p, v * v).sqrt()
        mixed = torch.einsum("hnm,mc->nhc", p, latent)
        rounded_mix = ROUNDED * step * torch.einsum("nhc,hvc->nhv", mixed**2, up_v**2).sqrt()
        # a rounded v is off by step |v|, a rounded mix by step |mixed|
        most = most + torch.einsum("nhc,hvc->nhv", once(mixed.abs(), step), up_v.abs())
        most = most + torch.einsum("hnm,mhv->nhv", p, once(v.abs(), step))
        return y, combined(e, torch.maximum(rounded_v, rounded_mix)), most

    whole, rows = by_request(cache, len(q), one)
    out, noise, bound = (t.reshape(call.outputs["output.0"].shape) for t in whole)
    return Expected(out, noise, rows=rows, reason=cache.why, bound=bound, groups=q.shape[1])
