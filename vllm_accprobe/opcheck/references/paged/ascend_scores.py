"""Ascend's fused attention over rows of several requests, from blocks or side by side.

Formula: attention.py's. ``actual_seq_lengths`` are the ends of the requests' queries; ``actual_seq_lengths_kv`` their
keys' numbers where there are blocks, and the ends of their keys where there are none; ``sparse_mode`` 3 lets a query
see keys up to its own, counted from the end, and 0 without a mask all of them [torch_npu's documentation,
npu_fused_infer_attention_score]. Other layouts, masks and modes are declined.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.paged.paged_attention import PagedBatch

_CAUSAL, _ALL = 3, 0
_OTHERWISE = ("pse_shift", "dequant_scale1", "quant_scale1", "antiquant_scale", "key_antiquant_scale", "query_rope",
              "query_padding_size", "key_shared_prefix")  # fmt: skip


def _numbers(values: Any) -> list[int]:
    if values is None:
        raise Declined("the lengths of its requests were not captured")
    return [int(v) for v in (values.reshape(-1) if isinstance(values, torch.Tensor) else values)]


@reference("torch.ops.*.npu_fused_infer_attention_score")
def scored(call: Call) -> dict[str, Expected]:
    """(query [tokens, heads, width], key, value: [tokens, kv heads, width], or blocks [blocks, slots, kv heads *
    width])"""
    f: dict[str, Any] = {**dict(zip(("query", "key", "value"), call.args, strict=False)), **call.kwargs}
    mode = int(f.get("sparse_mode") or 0)
    if f.get("input_layout") != "TND" or any(f.get(n) is not None for n in _OTHERWISE):
        raise Declined("fused attention in another layout than TND, or with scales, has no reference")
    if mode not in (_CAUSAL, _ALL) or (mode == _ALL and f.get("atten_mask") is not None):
        raise Declined(f"fused attention of the mode {mode} with this mask has no reference")
    q, keys, values = f["query"], *(t[0] if isinstance(t, (list, tuple)) else t for t in (f["key"], f["value"]))
    kv = int(f.get("num_key_value_heads") or 0) or int(f["num_heads"])
    bounds = list(pairwise([0, *_numbers(f.get("actual_seq_lengths"))]))
    told, table = _numbers(f.get("actual_seq_lengths_kv")), f.get("block_table")
    if table is None:  # requests side by side: a block of one row each
        rows = [t.reshape(len(t), 1, kv, -1) for t in (keys, values)]
        runs = list(pairwise([0, *told]))
        lengths = [b - a for a, b in runs]
        table = torch.full((len(runs), max([*lengths, 1])), -1)
        for n, (a, b) in enumerate(runs):
            table[n, : b - a] = torch.arange(a, b)
    else:
        rows, lengths = [t.reshape(len(t), t.shape[1], kv, -1) for t in (keys, values)], told
    if len(lengths) != len(bounds) or bounds[-1][1] > len(q):
        raise Declined("its requests are not as many everywhere")
    batch = PagedBatch(
        q, [(rows[0], rows[1])], bounds, torch.tensor(lengths), table, mode == _CAUSAL,
        {"scale": 1.0 if f.get("scale") is None else float(f["scale"])}, ("output.0",),
        call.outputs.get("output.0", q),
    )  # fmt: skip
    return batch.expected(call)
