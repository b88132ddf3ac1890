"""Calls of a model's modules as calls of FlashInfer's functions.

The problem: a module's inputs, parameters and attributes are not a kernel's arguments. The idea: each class of modules
has a function here that gives the calls of FlashInfer which compute the same from the same numbers; attention, whose
keys are those of its own request (calls/history.py), becomes one call for each request. What FlashInfer has not (ALiBi
as published, float32 norms, quantised weights, sums over ranks) is refused by name.
Not here: operators (from_operators.py), how a call is written (recorder.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.opcheck.kit.flashinfer.recorder import FlashCall, NotFlashInfers
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references import activations, norms
from vllm_accprobe.opcheck.references.attention import attention_settings, cache_of
from vllm_accprobe.opcheck.references.rotary import settings

Tensor = Any  # a torch.Tensor
HALVES = (torch.bfloat16, torch.float16)
_INPUT = ("x", "hidden_states", "input", "input_", "0")


def half(x: Tensor, what: str) -> Tensor:
    """``x`` where it is of a dtype that FlashInfer's kernels take. Raises NotFlashInfers."""
    if not isinstance(x, torch.Tensor) or x.dtype not in HALVES:
        kind = str(x.dtype).removeprefix("torch.") if isinstance(x, torch.Tensor) else "nothing"
        raise NotFlashInfers(f"{what} is for bfloat16 and float16, not {kind}")
    return x


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, gemma: bool, results: tuple[Tensor, ...]
) -> FlashCall:  # fmt: skip
    """RMSNorm, with a residual in place. results: the norm, and with a residual the sum."""
    if weight is None or not weight.numel():
        raise NotFlashInfers("a norm without a captured weight")
    prefix = "gemma_" if gemma else ""
    half(x, f"{prefix}rmsnorm")
    if weight.dtype != x.dtype:
        raise NotFlashInfers("a norm whose weight is of another dtype than its input")
    if residual is None:
        return FlashCall(f"{prefix}rmsnorm", (x, weight, eps), results=results[:1])
    left = dict(zip(("input.0", "input.1"), results, strict=True))
    return FlashCall(f"{prefix}fused_add_rmsnorm", (x, residual, weight, eps), inplace=left)


def rms(call: Call) -> list[FlashCall]:
    x, residual = call.tensor(*_INPUT), call.maybe("residual", "1")
    roles = ["output.0"] + ([] if residual is None else ["output.1"])
    eps, gemma = norms.epsilon(call)[0], norms.offset_of(call.cls) > 0
    return [norm(x, residual, call.params.get("weight"), eps, gemma, tuple(call.outputs[r] for r in roles))]


def layer(call: Call) -> list[FlashCall]:
    x, weight, bias = call.tensor(*_INPUT), call.params.get("weight"), call.params.get("bias")
    if x.dtype != torch.bfloat16 or weight is None or bias is None or x.dim() != 2:
        raise NotFlashInfers("layernorm is for bfloat16 rows with a weight and a bias")
    eps = norms.epsilon(call)[0]
    return [FlashCall("layernorm", (x, weight.float(), bias.float(), eps), results=(call.outputs["output.0"],))]


def gated(name: str, x: Tensor, y: Tensor) -> FlashCall:
    return FlashCall(name, (half(x, name),), results=(y,))


def silu_and_mul(call: Call) -> list[FlashCall]:
    return [gated("silu_and_mul", call.tensor(*_INPUT), call.outputs["output.0"])]


def gelu_and_mul(call: Call) -> list[FlashCall]:
    name = "gelu_tanh_and_mul" if activations.by_tanh(call) else "gelu_and_mul"
    return [gated(name, call.tensor(*_INPUT), call.outputs["output.0"])]


def rotary(call: Call) -> list[FlashCall]:
    """With the module's own table where that was captured, else with computed angles."""
    q, k, positions = half(call.tensor("query", "1"), "rope"), call.maybe("key", "2"), call.tensor("positions", "0")
    if k is None or positions.dim() != 1:
        raise NotFlashInfers("rope without keys, or with several positions for a token")
    head, neox = int(call.attr("head_size")), bool(call.attr("is_neox_style", default=True))
    results = tuple(call.outputs.get(f"output.{n}", call.outputs.get(f"inplace.{name}"))
                    for n, name in enumerate(("query", "key")))  # fmt: skip
    if any(y is None for y in results):
        raise NotFlashInfers("rope of which not both results were captured")
    table = call.params.get("cos_sin_cache")
    if table is not None and table.numel():
        flat = [t.reshape(len(positions), -1) for t in (q, k)]
        args = (positions.long(), *flat, head, table.float().contiguous(), neox)
        return [FlashCall("apply_rope_with_cos_sin_cache", args, results=_like(flat, results))]
    names = {"RotaryEmbedding": "apply_rope_pos_ids", "Llama3RotaryEmbedding": "apply_llama31_rope_pos_ids"}
    if call.cls not in names:
        raise NotFlashInfers(f"the angles of {call.cls}, whose table was not captured")
    kwargs: dict[str, Any] = {"rotary_dim": int(call.attr("rotary_dim", default=head)), "interleave": not neox,
                              "rope_theta": float(call.attr("base"))}  # fmt: skip
    if call.cls.startswith("Llama3"):
        s = settings(call.config)
        wanted = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if any(s.get(n) is None for n in wanted):
            raise NotFlashInfers("Llama 3's rope, whose scaling is not in config.json")
        kwargs |= dict(
            zip(("rope_scale", "low_freq_factor", "high_freq_factor"), (float(s[n]) for n in wanted), strict=False)
        )
        kwargs["old_context_len"] = int(s[wanted[3]])
    shaped = [t.reshape(len(positions), -1, head) for t in (q, k)]
    return [FlashCall(names[call.cls], (*shaped, positions.int()), kwargs, results=_like(shaped, results))]


def _like(given: list[Tensor], results: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(y.reshape(x.shape) for x, y in zip(given, results, strict=True))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> FlashCall:
    """y = x weight' + bias; weight [outputs, inputs]."""
    if any(t is not None and t.dtype != torch.bfloat16 for t in (x, weight, bias)) or y.dtype != torch.bfloat16:
        raise NotFlashInfers("mm_bf16 is for bfloat16")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise NotFlashInfers("a product whose weight was packed")
    rows = x.reshape(-1, x.shape[-1])
    more: dict[str, Any] = {"backend": "cublaslt"}  # the default wants another library, and takes no bias
    if bias is not None:
        more["bias"] = bias
    return FlashCall("mm_bf16", (rows, weight.T), more, results=(y.reshape(len(rows), -1),))


def linear(call: Call) -> list[FlashCall]:
    size = int(call.attr("tp_size", default=1))
    if size > 1 and (call.attrs.get("reduce_results") or call.attrs.get("gather_output")):
        raise NotFlashInfers("a product that is added up or gathered over ranks")
    weight = call.params.get("weight")
    if weight is None or not weight.numel():
        raise NotFlashInfers("a product whose weight was packed or not captured")
    bias = None if call.attr("skip_bias_add", default=False) else call.params.get("bias")
    x = call.tensor(*_INPUT, *(["1"] if call.cls == "ParallelLMHead" else []))
    return [product(x, weight, bias, call.outputs["output.0"])]


def attention(call: Call) -> list[FlashCall]:
    """A call for each request whose earlier rows are in the dump: decode for one row, prefill for more."""
    heads, kv, head = (int(call.attr(n)) for n in ("num_heads", "num_kv_heads", "head_size"))
    causal, y = call.cls != "EncoderOnlyAttention", call.outputs["output.0"]
    told = attention_settings(call, heads, head)
    if told["sinks"] is not None or told["slopes"] is not None:
        raise NotFlashInfers("attention of one request with sinks or ALiBi")
    q = half(call.tensor("query"), "attention").reshape(len(y), heads, head)
    out = y.reshape(len(y), heads, -1)
    kwargs: dict[str, Any] = {"sm_scale": float(told["scale"])}
    if told["window"] and causal:
        kwargs["window_left"] = int(told["window"]) - 1
    if told["cap"]:
        kwargs["logits_soft_cap"] = float(told["cap"])
    found = []
    for at, positions, past in cache_of(call).requests(causal):
        k, v = (past[n].to(q.dtype).reshape(len(past[n]), kv, -1) for n in ("key", "value"))
        if causal:
            n = int(positions[-1]) + 1
            if not torch.equal(positions, torch.arange(n - len(positions), n)):
                raise NotFlashInfers("attention of rows that are not neighbours")
            k, v = k[:n], v[:n]
        if len(at) == 1 and causal:
            row = int(at[0])
            found.append(FlashCall("single_decode_with_kv_cache", (q[row], k, v), kwargs, results=(out[row],)))
            continue
        more = {**kwargs, "causal": causal}
        found.append(FlashCall("single_prefill_with_kv_cache", (q[at], k, v), more, results=(out[at],)))
    if not found:
        raise NotFlashInfers("attention of which no request's earlier rows are in the dump")
    return found


def sampled(call: Call) -> list[FlashCall]:
    z, k, p = call.tensor("logits", "0").float(), call.maybe("k", "2"), call.maybe("p", "3")
    tokens = call.outputs["output.0"]
    if tokens.numel() != len(z):
        raise NotFlashInfers("a sampler whose tokens are not one for each row")
    top_k = torch.full((len(z),), z.shape[1], dtype=torch.int32) if k is None else k.reshape(-1).int()
    top_p = torch.ones(len(z)) if p is None else p.reshape(-1).float()
    return [FlashCall("top_k_top_p_sampling_from_logits", (z, top_k, top_p), results=(tokens.reshape(-1).int(),))]


MODULES: dict[str, Callable[[Call], list[FlashCall]]] = {
    "*RMSNorm": rms, "LayerNorm": layer, "SiluAndMul": silu_and_mul,
    "GeluAndMul": gelu_and_mul, "*RotaryEmbedding": rotary, "*Linear": linear, "ParallelLMHead": linear,
    "Attention": attention, "EncoderOnlyAttention": attention, "TopKTopPSampler": sampled,
}  # fmt: skip
"""By class; the longest name that fits counts."""
