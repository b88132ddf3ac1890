"""FlashInfer's attention functions without an object: one request, TensorRT-LLM's kernels, and merged halves.

Formula: recorded.py's. Two results over disjoint keys are one result: v = (va 2^sa + vb 2^sb) / (2^sa + 2^sb), s = log2
of that sum [FlashInfer: Z. Ye et al., arXiv 2501.01005, section 2.2]. Signatures: flashinfer 0.7.2, decode.py,
prefill.py, mla, cascade.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import APPROXIMATE, SUM, Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.flashinfer.recorded import (
    AttentionRules,
    RequestRows,
    attended,
    by_head,
    cap_of,
    ends,
    halves,
    masks,
    number,
    paged,
    plain_positions,
    refuse,
    told,
    wide,
)
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given

_DECODE = (
    "q k v kv_layout pos_encoding_mode use_tensor_cores q_scale k_scale v_scale window_left logits_soft_cap sm_scale "
    "rope_scale rope_theta return_lse"
)
_PREFILL = (
    "q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask causal kv_layout pos_encoding_mode "
    "use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale rope_theta backend return_lse kv_cache_sf "
    "k_scale v_scale"
)


@reference("flashinfer.single_decode_with_kv_cache")
def single_decode(call: Call) -> dict[str, Expected]:
    """(q [heads, d], k [rows, kv heads, d], v): one query after all keys."""
    f = told(call, _DECODE)
    return _single(call, {**f, "q": f["q"].unsqueeze(0) if isinstance(f["q"], torch.Tensor) else None}, True)


@reference("flashinfer.single_prefill_with_kv_cache")
def single_prefill(call: Call) -> dict[str, Expected]:
    """(q [tokens, heads, d], k [rows, kv heads, d], v)"""
    f = told(call, _PREFILL)
    refuse(f, "scale_q", "scale_k", "scale_v", "use_fp16_qk_reduction", "kv_cache_sf")
    if f["custom_mask"] is None:
        refuse(f, "packed_custom_mask")
    return _single(call, f, bool(f["causal"]))


def _single(call: Call, f: Mapping[str, Any], causal: bool) -> dict[str, Expected]:
    plain_positions(f["pos_encoding_mode"])
    q = wide(f["q"])
    k, v = (by_head(t, f["kv_layout"]) for t in given(f, "k", "v"))
    scale = q.shape[-1] ** -0.5 if f["sm_scale"] is None else number(f["sm_scale"])
    scale *= number(f.get("q_scale")) * number(f.get("k_scale"))
    left = -1 if f["window_left"] is None else int(f["window_left"])
    rules = AttentionRules(scale, causal, left, cap_of(f["logits_soft_cap"]), None, number(f.get("v_scale")), 2.0)
    (hidden,) = masks(f.get("custom_mask"), [(len(q), len(k))])
    return attended(call, [RequestRows(q, k, v, 0, hidden)], rules, len(q))


_TRTLLM_DECODE = (
    "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out out_dtype "
    "o_sf_scale o_sf_vec_size sinks kv_layout enable_pdl backend q_len_per_req o_scale mask"
)
_TRTLLM_CONTEXT = (
    "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale batch_size "
    "cum_seq_lens_q cum_seq_lens_kv window_left out out_dtype o_sf_scale o_sf_vec_size kv_layout enable_pdl sinks"
)
_OTHERWISE = (
    "o_sf_scale", "o_sf_vec_size", "mask", "skip_softmax_threshold_scale_factor", "kv_cache_sf", "bmm1_scale_log2",
    "enable_block_sparse_attention", "causal_seqlens_kv_global", "use_fp16_softmax", "uses_spcompress", "enable_dcp",
    "sparse_mla_top_k",
)  # fmt: skip


@reference("flashinfer.trtllm_batch_decode_with_kv_cache", "flashinfer.xqa_batch_decode_with_kv_cache")
def trtllm_decode(call: Call) -> dict[str, Expected]:
    """(query [tokens, heads, d], kv_cache, workspace, block_tables [requests, pages], seq_lens, ...)"""
    f = told(call, _TRTLLM_DECODE)
    if call.cls.endswith("xqa_batch_decode_with_kv_cache"):
        names = _TRTLLM_DECODE.replace("out out_dtype o_sf_scale o_sf_vec_size ", "out ").replace("backend ", "")
        f = {**told(call, names), "o_sf_scale": None, "o_sf_vec_size": None}
        f["kv_layout"] = f["kv_layout"] or "NHD"
    count = f["seq_lens"].numel()
    if f.get("cum_seq_lens_q") is not None:
        bounds = list(pairwise(ends(f["cum_seq_lens_q"], len(f["query"]))))
    else:
        each = int(f["q_len_per_req"] or 1)
        bounds = [(n * each, (n + 1) * each) for n in range(count)]
    return _tables(call, f, bounds, True)


@reference("flashinfer.trtllm_batch_context_with_kv_cache")
def trtllm_context(call: Call) -> dict[str, Expected]:
    """The same for requests of any number of rows, by cum_seq_lens_q."""
    f = told(call, _TRTLLM_CONTEXT)
    causal = f.get("causal")
    return _tables(
        call, f, list(pairwise(ends(f["cum_seq_lens_q"], len(f["query"])))), causal is None or bool(causal)
    )  # fmt: skip


def _scales(f: Mapping[str, Any]) -> tuple[float, float]:
    refuse(f, *_OTHERWISE)
    if int(f.get("cp_world") or 1) > 1 or f.get("uses_shared_paged_kv_idx") is False:
        raise Declined("keys that lie on several ranks, or apart from their values, have no reference")
    return number(f["bmm1_scale"]), number(f["bmm2_scale"])


def _sinks(value: Any) -> Any:
    value = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    return value.double() if isinstance(value, torch.Tensor) else None


def _tables(call: Call, f: Mapping[str, Any], bounds: list[tuple[int, int]], causal: bool) -> dict[str, Expected]:
    scale, factor = _scales(f)
    q = wide(f["query"])
    keys, values = halves(f["kv_cache"], f["kv_layout"] or "HND")
    lengths = [int(m) for m in f["seq_lens"].reshape(-1)]
    if len(lengths) != len(bounds) or f["block_tables"].dim() != 2 or bounds[-1][1] > len(q):
        raise Declined("its tables have not as many requests everywhere")
    requests = []
    for n, (begin, end) in enumerate(bounds):
        used = f["block_tables"][n, : -(-lengths[n] // keys.shape[1])]
        requests.append(
            RequestRows(q[begin:end], paged(keys, used, lengths[n]), paged(values, used, lengths[n]), begin)
        )
    left = -1 if f["window_left"] is None else int(f["window_left"])
    rules = AttentionRules(scale, causal, left, None, _sinks(f["sinks"]), factor, 2.0)
    return attended(call, requests, rules, len(q))


_TRTLLM_MLA = (
    "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len "
    "sparse_mla_top_k out bmm1_scale bmm2_scale sinks"
)


@reference("flashinfer.trtllm_batch_decode_with_kv_cache_mla")
def trtllm_latent(call: Call) -> dict[str, Expected]:
    """(query [requests, rows, heads, latent + rope], kv_cache [pages, 1 or none, rows, latent + rope], ...)"""
    f = told(call, _TRTLLM_MLA)
    scale, factor = _scales(f)
    refuse(f, "cum_seq_lens_q")
    q, cache, width = wide(f["query"]), f["kv_cache"], int(f["kv_lora_rank"])
    if q.dim() != 4 or not cache.is_floating_point():
        raise Declined("its queries are not [requests, rows, heads, width]")
    cache = cache.reshape(len(cache), -1, 1, cache.shape[-1])
    each, flat = q.shape[1], q.flatten(0, 1)
    requests = []
    for n, m in enumerate(int(m) for m in f["seq_lens"].reshape(-1)):
        rows = paged(cache, f["block_tables"][n, : -(-m // cache.shape[1])], m)
        requests.append(RequestRows(flat[n * each : (n + 1) * each], rows, rows[..., :width], n * each))
    return attended(call, requests, AttentionRules(scale, True, -1, None, _sinks(f["sinks"]), factor, 2.0), len(flat))


@reference("flashinfer.merge_state")
def merged(call: Call) -> dict[str, Expected]:
    """(v_a [tokens, heads, d], s_a [tokens, heads], v_b, s_b)"""
    f = arguments(call, "v_a s_a v_b s_b")
    va, sa, vb, sb = given(f, "v_a", "s_a", "v_b", "s_b")
    return _merged(torch.stack((va, vb), 1), torch.stack((sa, sb), 1))


@reference("flashinfer.merge_states")
def all_merged(call: Call) -> dict[str, Expected]:
    """(v [tokens, parts, heads, d], s [tokens, parts, heads])"""
    v, s = given(arguments(call, "v s"), "v", "s")
    return _merged(v, s)


def _merged(v: Any, s: Any) -> dict[str, Expected]:
    w = torch.softmax(s * math.log(2.0), 1).unsqueeze(-1)
    total = torch.logsumexp(s * math.log(2.0), 1) / math.log(2.0)
    size = (w * v.abs()).sum(1)
    off = 2.0**-20 + SUM * s.abs().amax(1).unsqueeze(-1)
    return {
        "output.0": Expected((w * v).sum(1), off * size, bound=(2.0 * APPROXIMATE + 4.0 * off) * size),
        "output.1": Expected(total, 2.0**-20 + SUM * total.abs()),
    }
