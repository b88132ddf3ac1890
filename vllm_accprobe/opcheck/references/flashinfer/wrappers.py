"""FlashInfer's attention wrappers: runs of objects that were planned before, over pages or rows side by side.

Formula: recorded.py's. A request's keys are its pages' rows, all pages full but the last [FlashInfer: Z. Ye et al.,
arXiv 2501.01005, section 3.1]. Latent attention has one key head for all, [c, k_pe], and c is the value too
[DeepSeek-V2, arXiv 2405.04434, section 2.1]. Signatures: flashinfer 0.7.2, decode.py, prefill.py, mla.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.flashinfer.recorded import (
    AttentionRules,
    RequestRows,
    attended,
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

_RUN = "self q paged_kv_cache"
_OTHERWISE = (
    "init.jit_args", "init.jit_kwargs", "plan.use_fp16_qk_reduction", "plan.prefix_len_ptr", "kv_cache_sf",
    "plan.token_pos_in_items_ptr", "plan.max_item_len_ptr", "skip_softmax_threshold_scale_factor", "use_fp16_softmax",
    "uses_spcompress", "o_scale",
)  # fmt: skip
_BASES = {"log2": 2.0, "ln": math.e, None: 2.0}


def _planned(f: Mapping[str, Any], name: str, default: Any = None) -> Any:
    found = f.get(f"plan.{name}")
    return default if found is None else found


def _rules(f: Mapping[str, Any], width: int, causal: bool, scale: float | None = None) -> AttentionRules:
    """Raises Declined for what changes the formula."""
    refuse(f, *_OTHERWISE)
    plain_positions(f.get("plan.pos_encoding_mode"))
    given = _planned(f, "sm_scale", scale)
    left = f.get("window_left")
    base = _BASES.get(f.get("lse_base"))
    if base is None:
        raise Declined(f"a logarithm to the base {f.get('lse_base')} has no reference")
    sinks = f.get("sinks")
    return AttentionRules(
        (width**-0.5 if given is None else number(given)) * number(f.get("q_scale")) * number(f.get("k_scale")),
        causal, int(_planned(f, "window_left", -1) if left is None else left), cap_of(_planned(f, "logits_soft_cap")),
        None if sinks is None else sinks.double(), number(f.get("v_scale")), base,
    )  # fmt: skip


def _mask(f: Mapping[str, Any]) -> Any:
    mask = f.get("plan.custom_mask")
    if mask is None:
        refuse(f, "plan.packed_custom_mask")
    return mask


@reference("flashinfer.*BatchPrefillWithPagedKVCacheWrapper.run")
def paged_prefill(call: Call) -> dict[str, Expected]:
    """(q [tokens, heads, d], cache): requests' rows by qo_indptr, pages by paged_kv_indptr and paged_kv_indices."""
    f = told(call, _RUN)
    starts = ends(f.get("plan.qo_indptr"), len(f["q"]))
    bounds = list(pairwise(starts))
    return _paged(call, f, bounds, ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
                  bool(_planned(f, "causal", False)))  # fmt: skip


@reference("flashinfer.*BatchDecodeWithPagedKVCacheWrapper.run")
def paged_decode(call: Call) -> dict[str, Expected]:
    """(q [requests * rows, heads, d], cache): as many rows of each request, the last ones."""
    f = told(call, _RUN)
    last = f.get("plan.last_page_len")
    if not isinstance(last, torch.Tensor) or not len(last) or len(f["q"]) % len(last):
        raise Declined("its rows are not as many for each request")
    each = len(f["q"]) // len(last)
    bounds = [(n * each, (n + 1) * each) for n in range(len(last))]
    return _paged(call, f, bounds, ("indptr", "indices", "last_page_len"), True)


def _paged(
    call: Call, f: Mapping[str, Any], bounds: list[tuple[int, int]], names: tuple[str, str, str], causal: bool
) -> dict[str, Expected]:
    q = wide(f["q"])
    keys, values = halves(f["paged_kv_cache"], f.get("init.kv_layout"))
    indices, last = (f.get(f"plan.{name}") for name in names[1:])
    if not isinstance(indices, torch.Tensor) or not isinstance(last, torch.Tensor):
        raise Declined("the pages of its requests were not captured")
    pages = list(pairwise(ends(f.get(f"plan.{names[0]}"), len(indices))))
    if not len(pages) == len(bounds) == last.numel():
        raise Declined("its plan has not as many requests everywhere")
    size = keys.shape[1]
    lengths = [max(b - a - 1, 0) * size + int(x) if b > a else 0 for (a, b), x in zip(pages, last, strict=True)]
    sizes = [(end - begin, m) for (begin, end), m in zip(bounds, lengths, strict=True)]
    rules = _rules(f, q.shape[-1], causal)
    requests = [
        RequestRows(q[begin:end], paged(keys, indices[a:b], m), paged(values, indices[a:b], m), begin, hidden)
        for (begin, end), (a, b), m, hidden in zip(bounds, pages, lengths, masks(_mask(f), sizes), strict=True)
    ]
    return attended(call, requests, rules, len(q))


@reference("flashinfer.*BatchPrefillWithRaggedKVCacheWrapper.run")
def ragged(call: Call) -> dict[str, Expected]:
    """(q [tokens, heads, d], k [rows, kv heads, d], v [rows, kv heads, e]): requests one after the other."""
    f = told(call, "self q k v")
    q, k, v = (wide(f["q"]), *(f[n].double() for n in ("k", "v")))
    bounds, rows = (
        list(pairwise(ends(f.get(f"plan.{n}"), m))) for n, m in (("qo_indptr", len(q)), ("kv_indptr", len(k)))
    )
    if len(bounds) != len(rows):
        raise Declined("its plan has not as many requests everywhere")
    sizes = [(b - a, d - c) for (a, b), (c, d) in zip(bounds, rows, strict=True)]
    requests = [
        RequestRows(q[a:b], k[c:d], v[c:d], a, hidden)
        for (a, b), (c, d), hidden in zip(bounds, rows, masks(_mask(f), sizes), strict=True)
    ]
    return attended(call, requests, _rules(f, q.shape[-1], bool(_planned(f, "causal", False))), len(q))


_MLA = "self q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table return_lse_base_on_e"


@reference("flashinfer.*BatchMLAPagedAttentionWrapper.run")
def latent(call: Call) -> dict[str, Expected]:
    """(q_nope [tokens, heads, latent], q_pe [tokens, heads, rope], ckv_cache [pages, rows, latent], kpe_cache [pages,
    rows, rope])"""
    f = told(call, _MLA)
    parts = [f["q_nope"], f["q_pe"], f["ckv_cache"], f["kpe_cache"]]
    if not all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in parts):
        raise Declined("queries and latents are not apart")
    refuse(f, "kv_len", "page_table", "query", "kv_cache", "ckv_scale", "ckv_scale_arr", "kpe_scale", "bmm1_scale",
           "bmm2_scale")  # fmt: skip
    q = torch.cat([wide(t) for t in parts[:2]], -1)
    rows = list(pairwise(ends(f.get("plan.kv_indptr"))))
    bounds = list(pairwise(ends(f.get("plan.qo_indptr"), len(q))))
    lengths, indices = f.get("plan.kv_len_arr"), f.get("plan.kv_indices")
    if not isinstance(indices, torch.Tensor) or lengths is None or not len(rows) == len(bounds) == lengths.numel():
        raise Declined("its plan has not as many requests everywhere")
    requests = []
    for (begin, end), (a, b), m in zip(bounds, rows, lengths.reshape(-1), strict=True):
        c, pe = (paged(t, indices[a:b], int(m)) for t in parts[2:])
        requests.append(RequestRows(q[begin:end], torch.cat((c, pe), -1).unsqueeze(1), c.unsqueeze(1), begin))
    base = "ln" if f.get("return_lse_base_on_e") else None
    rules = _rules({**f, "lse_base": base}, q.shape[-1], bool(_planned(f, "causal", False)))
    return attended(call, requests, rules, len(q))
