"""FlashInfer's functions that calls are written as: module and names of parameters, in order.

Data: the names by which replay finds a function, and by which our reader finds a plan's arguments. Checked against
flashinfer-python 0.7.2.post1 by scripts/flashinfer_replay.py, which binds each folder's arguments to the function.
"""

from __future__ import annotations

WORKSPACE = 128 << 20
"""Bytes, as FlashInfer's documentation recommends for its float workspace."""

_ROPE = "(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale, rope_theta"
FUNCTIONS: dict[str, tuple[str, str]] = {
    "rmsnorm": ("flashinfer.norm", "(input, weight, eps=1e-06, out=None, enable_pdl=None)"),
    "gemma_rmsnorm": ("flashinfer.norm", "(input, weight, eps=1e-06, out=None, enable_pdl=None)"),
    "fused_add_rmsnorm": ("flashinfer.norm", "(input, residual, weight, eps=1e-06, enable_pdl=None)"),
    "gemma_fused_add_rmsnorm": ("flashinfer.norm", "(input, residual, weight, eps=1e-06, enable_pdl=None)"),
    "layernorm": ("flashinfer.norm", "(input, gemma, beta, eps=1e-06)"),
    "silu_and_mul": ("flashinfer.activation", "(input, out=None, enable_pdl=None)"),
    "gelu_and_mul": ("flashinfer.activation", "(input, out=None, enable_pdl=None)"),
    "gelu_tanh_and_mul": ("flashinfer.activation", "(input, out=None, enable_pdl=None)"),
    "softmax": ("flashinfer.sampling", "(logits, temperature=None, enable_pdl=None)"),
    "top_k_top_p_sampling_from_logits": ("flashinfer.sampling", "(logits, top_k, top_p)"),
    "top_k_mask_logits": ("flashinfer.sampling", "(logits, top_k)"),
    "top_k": ("flashinfer.topk", "(input, k, sorted=False)"),
    "apply_rope_pos_ids": ("flashinfer.rope", f"{_ROPE})"),
    "apply_llama31_rope_pos_ids": (
        "flashinfer.rope", f"{_ROPE}, low_freq_factor=1, high_freq_factor=4, old_context_len=8192)",
    ),
    "apply_rope_with_cos_sin_cache": (
        "flashinfer.rope", "(positions, query, key, head_size, cos_sin_cache, is_neox=True)",
    ),
    "mm_bf16": ("flashinfer.gemm.gemm_base", "(a, b, bias=None, pdl=False, out=None, out_dtype, backend)"),
    "bmm_bf16": ("flashinfer.gemm.gemm_base", "(A, B, out=None, out_dtype, backend)"),
    "bmm_fp8": ("flashinfer.gemm.gemm_base", "(A, B, A_scale, B_scale, dtype, out=None, backend)"),
    "mm_fp4": ("flashinfer.gemm.gemm_base", "(a, b, a_descale, b_descale, alpha=None, out_dtype, out=None)"),
    "single_prefill_with_kv_cache": ("flashinfer.prefill", "(q, k, v)"),
    "single_decode_with_kv_cache": ("flashinfer.decode", "(q, k, v)"),
}  # fmt: skip

WRAPPERS: dict[str, tuple[str, dict[str, str]]] = {
    "BatchPrefillWithPagedKVCacheWrapper": ("flashinfer.prefill", {
        "__init__": "(self, float_workspace_buffer, kv_layout='NHD')",
        "plan": "(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)",
        "run": "(self, q, paged_kv_cache, *args)",
    }),
    "BatchDecodeWithPagedKVCacheWrapper": ("flashinfer.decode", {
        "__init__": "(self, float_workspace_buffer, kv_layout='NHD')",
        "plan": "(self, indptr, indices, last_page_len)",
        "run": "(self, q, paged_kv_cache, *args)",
    }),
}  # fmt: skip
