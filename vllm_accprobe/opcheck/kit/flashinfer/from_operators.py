"""Operators' calls as calls of FlashInfer's functions: vLLM's own, torch's, and FlashInfer's as they are.

The idea and the refusals are those of from_modules.py. Attention over blocks becomes an object that is planned and run:
its block table becomes lists of pages, its blocks, packed as a processor's kernels want them, become [pages, rows,
heads, width]. Signatures of vLLM's operators: references/engine_ops.py, references/scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.opcheck.kit.flashinfer.from_modules import HALVES, gated, half, norm, product
from vllm_accprobe.opcheck.kit.flashinfer.recorder import FlashCall, NotFlashInfers
from vllm_accprobe.opcheck.kit.flashinfer.signatures import FUNCTIONS, WRAPPERS
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.paged.layouts import code_dtype
from vllm_accprobe.opcheck.references.paged.paged_attention import BATCHES, batch_of
from vllm_accprobe.opcheck.references.quantised import weight_of
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments

Tensor = Any  # a torch.Tensor


def _result(call: Call, *roles: str) -> Tensor:
    found = next((call.outputs[r] for r in roles if r in call.outputs), None)
    if found is None:
        raise NotFlashInfers("a call whose result was not captured")
    return found


def rms(call: Call) -> list[FlashCall]:
    f = arguments(call, "out input weight epsilon")
    y = _result(call, "inplace.input.0", "inplace.input.out")
    return [norm(f["input"], None, f["weight"], float(f["epsilon"]), False, (y,))]


def fused_add(call: Call) -> list[FlashCall]:
    f = arguments(call, "input residual weight epsilon")
    left = tuple(
        _result(call, f"inplace.input.{n}", f"inplace.input.{name}") for n, name in enumerate(("input", "residual"))
    )
    return [norm(f["input"], f["residual"], f["weight"], float(f["epsilon"]), False, left)]


def activation(call: Call) -> list[FlashCall]:
    name = call.cls.removeprefix("torch.ops.").split(".")[1]
    return [gated(name, arguments(call, "out input")["input"], _result(call, "inplace.input.0", "inplace.input.out"))]


def rotary(call: Call) -> list[FlashCall]:
    f = arguments(call, "positions query key head_size cos_sin_cache is_neox rope_dim_offset inverse")
    if f["key"] is None or f["rope_dim_offset"] or f["inverse"] or f["positions"].dim() != 1:
        raise NotFlashInfers("rope without keys, with an offset, or backwards")
    rows = len(f["positions"])
    flat = [half(t, "rope").reshape(rows, -1) for t in (f["query"], f["key"])]
    results = tuple(_result(call, f"inplace.input.{n}").reshape(rows, -1) for n in (1, 2))
    args = (f["positions"].long(), *flat, int(f["head_size"]), f["cos_sin_cache"].float(), bool(f["is_neox"]))
    return [FlashCall("apply_rope_with_cos_sin_cache", args, results=results)]


def in_blocks(call: Call) -> list[FlashCall]:
    """One object with its plan; decode where each request has one row."""
    batch = batch_of(call)
    assert batch is not None
    told = dict(batch.settings)
    if told.get("slopes") is not None:
        raise NotFlashInfers("attention with ALiBi: FlashInfer scales its slopes")
    mine = _result(call, *batch.roles)
    keys, values = batch.layout(mine, call.unit)
    codes = code_dtype(keys, batch.kind)
    if codes is not None and not codes.is_floating_point:
        raise NotFlashInfers("attention over a cache of int8")
    q, width = half(batch.q, "attention"), batch.q.shape[-1]
    size = keys.shape[1]
    kept = [(n, a, b) for n, (a, b) in enumerate(batch.bounds) if b > a]
    lengths = [int(batch.lengths.reshape(-1)[n]) for n, _, _ in kept]
    if not kept or [a for _, a, _ in kept] != [0, *(b for _, _, b in kept[:-1])]:
        raise NotFlashInfers("attention whose requests do not stand one after the other")
    pages = [batch.table[n, : -(-m // size)] for (n, _, _), m in zip(kept, lengths, strict=True)]
    if any(
        len(p) * size < m or int(p.min()) < 0 or int(p.max()) >= len(keys) for p, m in zip(pages, lengths, strict=True)
    ):
        raise NotFlashInfers("attention of which a block was not captured")
    rows = kept[-1][2]
    indptr = torch.tensor([0, *torch.tensor([len(p) for p in pages]).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor([(m - 1) % size + 1 for m in lengths], dtype=torch.int32)
    indices = torch.cat(pages).int()
    cache = tuple(c.contiguous() if codes is None else c.contiguous().view(codes) for c in (keys, values))
    plan: dict[str, Any] = {
        "num_qo_heads": q.shape[1], "num_kv_heads": keys.shape[2], "page_size": size,
        "sm_scale": float(told["scale"]), "q_data_type": q.dtype, "kv_data_type": cache[0].dtype,
    }  # fmt: skip
    if told.get("window"):
        plan["window_left"] = int(told["window"]) - 1
    if told.get("cap"):
        plan["logits_soft_cap"] = float(told["cap"])
    run: dict[str, Any] = {} if told.get("sinks") is None else {"sinks": told["sinks"].float()}
    if codes is not None:
        named = zip(("k_scale", "v_scale"), batch.scales, strict=True)
        run |= {name: 1.0 if s is None else float(s) for name, s in named}
    y = mine.reshape(-1, q.shape[1], values.shape[-1])[:rows]
    if all(b - a == 1 for _, a, b in kept):
        plan |= {"indptr": indptr, "indices": indices, "last_page_len": last, "head_dim": width}
        return [FlashCall("BatchDecodeWithPagedKVCacheWrapper.run", (q[:rows], cache), run, (y,), plan=plan)]
    starts = torch.tensor([0, *(b for _, _, b in kept)], dtype=torch.int32)
    plan |= {"qo_indptr": starts, "paged_kv_indptr": indptr, "paged_kv_indices": indices,
             "paged_kv_last_page_len": last, "head_dim_qk": width, "causal": bool(batch.causal)}  # fmt: skip
    return [FlashCall("BatchPrefillWithPagedKVCacheWrapper.run", (q[:rows], cache), run, (y,), plan=plan)]


def mm(call: Call) -> list[FlashCall]:
    a, b = call.args[:2]
    return [product(a, b.T, None, _result(call, "output.0"))]


def addmm(call: Call) -> list[FlashCall]:
    bias, a, b = call.args[:3]
    if bias.dim() != 1 or any(call.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")) or len(call.args) > 3:
        raise NotFlashInfers("a sum of products with factors, or with a matrix")
    return [product(a, b.T, bias, _result(call, "output.0"))]


def linear(call: Call) -> list[FlashCall]:
    x, weight, bias = (*call.args, None)[:3]
    y = _result(call, "output.0")
    return [product(x, weight, bias, y)]


def bmm(call: Call) -> list[FlashCall]:
    a, b = call.args[:2]
    if a.dtype != torch.bfloat16:
        raise NotFlashInfers("bmm_bf16 is for bfloat16")
    return [FlashCall("bmm_bf16", (a, b), results=(_result(call, "output.0"),))]


def softmax(call: Call) -> list[FlashCall]:
    x, dim = call.args[:2]
    if x.dim() != 2 or x.dtype != torch.float32 or int(dim) not in (1, -1):
        raise NotFlashInfers("softmax is for rows of float32")
    return [FlashCall("softmax", (x,), results=(_result(call, "output.0"),))]


def topk(call: Call) -> list[FlashCall]:
    x, k = call.args[:2]
    dim, largest, ordered = (call.args[n] if n < len(call.args) else d for n, d in ((2, -1), (3, True), (4, True)))
    if x.dim() != 2 or int(dim) not in (1, -1) or not largest or x.dtype not in (*HALVES, torch.float32):
        raise NotFlashInfers("top_k is for the largest of rows")
    results = tuple(_result(call, f"output.{n}") for n in range(2))
    return [FlashCall("top_k", (x, int(k), bool(ordered)), results=results)]


def onednn(call: Call) -> list[FlashCall]:
    """(out, input, bias, handle), or (out, input, packed weight, bias): the weight is the calling module's."""
    weight = call.params.get("weight")
    if weight is None or not weight.numel() or weight_of(call).shape != weight.shape:
        raise NotFlashInfers("a product whose weight was packed or not captured")
    bias = call.args[2 if "onednn" in call.cls else 3]
    return [product(call.args[1], weight, bias, _result(call, "inplace.input.0"))]


def scaled_mm(call: Call) -> list[FlashCall]:
    """fp8 with one scale for each operand."""
    f = arguments(call, "out a b scale_a scale_b bias")
    if f["a"].dtype.itemsize != 1 or not f["a"].is_floating_point() or f["bias"] is not None:
        raise NotFlashInfers("bmm_fp8 is for 8-bit floats without a bias")
    if f["scale_a"].numel() != 1 or f["scale_b"].numel() != 1:
        raise NotFlashInfers("bmm_fp8 has one scale for each operand")
    y = _result(call, "inplace.input.0", "inplace.input.out")
    scales = (f[n].float().reshape(()) for n in ("scale_a", "scale_b"))
    args = (f["a"].unsqueeze(0), f["b"].unsqueeze(0), *scales, half(y, "bmm_fp8").dtype)
    return [FlashCall("bmm_fp8", args, results=(y.unsqueeze(0),))]


def fp4_mm(call: Call) -> list[FlashCall]:
    f = arguments(call, "out a b block_scale_a block_scale_b alpha")
    y = _result(call, "inplace.input.0", "inplace.input.out")
    scales = (f["block_scale_a"], f["block_scale_b"].T)
    alpha = f["alpha"].float() if isinstance(f["alpha"], torch.Tensor) else torch.tensor(float(f["alpha"]))
    args = (f["a"], f["b"].T, *scales, alpha, half(y, "mm_fp4").dtype)
    return [FlashCall("mm_fp4", args, results=(y,))]


def filtered(call: Call) -> list[FlashCall]:
    f = arguments(call, "logits k p")
    if f["p"] is not None or f["k"] is None:
        raise NotFlashInfers("a filter by p that gives logits")
    y = _result(call, "output.0", "inplace.input.0", "inplace.input.logits")
    return [FlashCall("top_k_mask_logits", (f["logits"].float(), f["k"].int()), results=(y.float(),))]


def own(call: Call) -> list[FlashCall]:
    """A call of FlashInfer's recorder, again."""
    name = call.cls.removeprefix("flashinfer.")
    told: dict[str, dict[str, Any]] = {"init": {}, "plan": {}, "": {}}
    for key, value in call.kwargs.items():
        part, _, rest = key.partition(".")
        told[part if rest else ""][rest or part] = value
    known = name in FUNCTIONS or name.rpartition(".")[0] in WRAPPERS
    if not known:
        raise NotFlashInfers(f"{name}: the module that has it is not in our table")
    results = tuple(call.outputs[r] for r in sorted(call.outputs) if r.startswith("output."))
    left = {r.removeprefix("inplace."): t for r, t in call.outputs.items() if r.startswith("inplace.")}
    args = call.args[1:] if "." in name else call.args
    return [FlashCall(name, args, told[""], results, left, told["init"], told["plan"])]


OPERATORS: dict[str, Callable[[Call], list[FlashCall]]] = {
    "torch.ops._C.rms_norm": rms, "torch.ops._C.fused_add_rms_norm": fused_add,
    **dict.fromkeys((f"torch.ops._C.{n}" for n in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")), activation),
    "torch.ops._C.rotary_embedding": rotary, **dict.fromkeys(BATCHES, in_blocks),
    "torch.ops.aten.mm": mm, "torch.ops.aten.addmm": addmm, "torch.ops.aten.bmm": bmm,
    "torch.ops.aten.linear": linear,
    "torch.ops.aten._softmax": softmax, "torch.ops.aten.topk": topk,
    "torch.ops._C.onednn_mm": onednn, "torch.ops._C.weight_packed_linear": onednn,
    "torch.ops._C.cutlass_scaled_mm": scaled_mm, "torch.ops._C.cutlass_scaled_fp4_mm": fp4_mm,
    "torch.ops.*.apply_top_k_top_p": filtered, "flashinfer.*": own,
}  # fmt: skip
"""By operator, without overload."""
