"""The same operators by torch's own kernels, in the captured dtype, on any device.

The problem: whether this machine's device computes an operator rightly can only be seen by letting it do so, where no
vLLM is installed. The idea: each class of modules in a few torch operators, on the device where its tensors lie, marked
like references and kept in a table of their own; a vendor's kernel of the same name (``torch.ops._C.rms_norm``) is
taken where it is registered. An operator call runs itself. Blocks compute nothing of their own and are declined. This
file is copied beside the tests that gentest writes. Not here: exact results (references/).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.calls.case import mapped
from vllm_accprobe.opcheck.reference import Call, Declined, reference
from vllm_accprobe.opcheck.references import rotary as turns
from vllm_accprobe.opcheck.references.api import ready, torch_function
from vllm_accprobe.opcheck.references.aten import of, outputs_by_role, tensors_by_role
from vllm_accprobe.opcheck.references.attention import attention_settings
from vllm_accprobe.opcheck.references.moe import activation_of
from vllm_accprobe.opcheck.run import mindspore_api

_HANDLES = ("onednn", "_mm_handler", "custom_ar", "quick_ar")
"""Operators that are given addresses as integers: to run them again would crash."""
_X = ("x", "input_", "input", "hidden_states", "0")


def on(call: Call, device: Any) -> Call:
    """``call`` with all its tensors on ``device``, and its device arguments naming it. A tensor that has a shape and no
    values (an output, where inputs are drawn) stays as it is."""
    moved: Call = mapped(call, lambda t: t if t.is_meta else t.to(device))
    return moved


def vendor(name: str) -> Any | None:
    """torch.ops._C.<name> where it is registered in this process, else None."""
    return getattr(torch.ops._C, name, None)


def _weight(call: Call, name: str = "weight") -> Any:
    call.param(name)  # raises Declined where it is missing or packed
    found = call.params[name]
    if not found.is_floating_point() or found.element_size() < 2:
        raise Declined("a quantised weight: what its kernel does is not torch's")
    return found


def _maybe(call: Call, name: str) -> Any | None:
    return call.params.get(name)


def _rms(x: Any, weight: Any | None, eps: float) -> Any:
    """F.rms_norm, or its formula in float32 where torch is older than 2.4."""
    if hasattr(F, "rms_norm"):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    y = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


# --- norms ------------------------------------------------------------------------------------------------------


@reference("RMSNorm", "*RMSNorm", "*RMSNormFused")
def rms(call: Call) -> dict[str, Any]:
    x, eps = call.tensor("x", "hidden_states", "input", "0"), float(call.attr("variance_epsilon", "eps"))
    w = _maybe(call, "weight")
    residual = call.maybe("residual", "1")
    if residual is None:
        kernel = vendor("rms_norm")
        if kernel is not None and w is not None and x.dim() == 2 and x.device.type != "cpu":
            out = torch.empty_like(x)
            kernel(out, x.contiguous(), w, eps)
            return {"output.0": out}
        return {"output.0": _rms(x, w, eps)}
    total = x + residual
    return {"output.0": _rms(total, w, eps), "output.1": total}


@reference("GemmaRMSNorm", "Gemma*RMSNorm", "Qwen3NextRMSNorm")
def gemma(call: Call) -> Any:
    if call.cls.startswith(("Gemma3n", "Gemma4")):
        return rms(call)
    x, eps = call.tensor("x", "hidden_states", "0"), float(call.attr("variance_epsilon", "eps"))
    residual = call.maybe("residual", "1")
    total = x if residual is None else x + residual
    y = _rms(total.float(), 1.0 + _weight(call).float(), eps).to(x.dtype)
    return {"output.0": y} | ({} if residual is None else {"output.1": total})


@reference("LayerNorm", "*LayerNorm")
def layer(call: Call) -> Any:
    x = call.tensor("input", "x", "hidden_states", "0")
    w, b = _maybe(call, "weight"), _maybe(call, "bias")
    shape = call.attr("normalized_shape", default=[x.shape[-1]])
    shape = list(shape) if isinstance(shape, (list, tuple)) else [int(shape)]
    return F.layer_norm(x, shape, w, b, float(call.attr("variance_epsilon", "eps")))


@reference("GroupNorm")
def group(call: Call) -> Any:
    w, b = _maybe(call, "weight"), _maybe(call, "bias")
    return F.group_norm(call.tensor("input", "x", "0"), int(call.attr("num_groups")), w, b, float(call.attr("eps")))


# --- products ---------------------------------------------------------------------------------------------------


@reference(
    "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear", "GateLinear",
    "MergedReplicatedLinear", "*ParallelLinear", "Linear", "*Linear", "RowParallelLinear", "ParallelLMHead",
)  # fmt: skip
def linear(call: Call) -> dict[str, Any]:
    size = int(call.attr("tp_size", default=1))
    if size > 1 and (call.attrs.get("reduce_results") or call.attrs.get("gather_output")):
        raise Declined("adds up or gathers over ranks")
    x = call.tensor("input_", "x", "input", "hidden_states", "0", *(["1"] if call.cls == "ParallelLMHead" else []))
    held = bool(call.attr("skip_bias_add", default=False))
    bias = _maybe(call, "bias") if int(call.attr("tp_rank", default=0)) == 0 or call.cls[:3] != "Row" else None
    y = F.linear(x, _weight(call), None if held else bias)
    found = {"output.0": y.to(call.outputs["output.0"].dtype)}
    return found | ({"output.1": bias} if held and bias is not None else {})


@reference("Conv2dLayer", "Conv3dLayer", "Conv2d", "Conv3d")
def convolution(call: Call) -> Any:
    x, w = call.tensor("x", "input", "0"), _weight(call)
    stride = list(call.attr("stride", default=list(w.shape[2:])))
    padding, groups = call.attrs.get("padding", 0), int(call.attr("groups", default=1))
    if isinstance(padding, str):
        raise Declined("a padding that is named")
    run = F.conv2d if w.dim() == 4 else F.conv3d
    return run(x, w, _maybe(call, "bias"), stride, padding, call.attrs.get("dilation", 1), groups)


@reference("VocabParallelEmbedding", "Embedding", "*WordEmbedding")
def embedding(call: Call) -> Any:
    if int(call.attr("tp_size", default=1)) > 1:
        raise Declined("adds up or gathers over ranks")
    return F.embedding(call.tensor("input_", "input", "input_ids", "position_ids", "0").long(), _weight(call))


# --- activations ------------------------------------------------------------------------------------------------


def _gate(call: Call, name: str, act: Any, first: bool = True) -> Any:
    x = call.tensor(*_X)
    kernel = vendor(name)
    if kernel is not None and x.device.type != "cpu":
        out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
        kernel(out, x.contiguous())
        return out
    a, b = x.chunk(2, -1)
    return act(a) * b if first else a * act(b)


@reference("SiluAndMul")
def silu_and_mul(call: Call) -> Any:
    return _gate(call, "silu_and_mul", F.silu)


@reference("MulAndSilu")
def mul_and_silu(call: Call) -> Any:
    return _gate(call, "mul_and_silu", F.silu, first=False)


@reference("GeluAndMul")
def gelu_and_mul(call: Call) -> Any:
    kind = call.attrs.get("approximate") or call.config.get("hidden_activation") or call.config.get("hidden_act")
    if kind is None:
        raise Declined("attribute approximate was not recorded")
    tanh = kind in ("tanh", "gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast")
    name = "gelu_tanh_and_mul" if tanh else "gelu_and_mul"
    return _gate(call, name, lambda x: F.gelu(x, approximate="tanh" if tanh else "none"))


@reference("SiLU", "SiLUActivation")
def silu(call: Call) -> Any:
    return F.silu(call.tensor(*_X))


@reference("GELU", "GELUActivation")
def gelu(call: Call) -> Any:
    return F.gelu(call.tensor(*_X), approximate="tanh" if call.attrs.get("approximate") == "tanh" else "none")


@reference("GELUTanh", "NewGELU", "NewGELUActivation", "FastGELU", "FastGELUActivation", "PytorchGELUTanh")
def gelu_tanh(call: Call) -> Any:
    return F.gelu(call.tensor(*_X), approximate="tanh")


@reference("QuickGELU", "QuickGELUActivation")
def quick_gelu(call: Call) -> Any:
    x = call.tensor(*_X)
    return x * torch.sigmoid(1.702 * x)


@reference("ReLUSquaredActivation")
def relu2(call: Call) -> Any:
    return F.relu(call.tensor(*_X)).square()


@reference("ReLU")
def relu(call: Call) -> Any:
    return F.relu(call.tensor(*_X))


@reference("Sigmoid")
def sigmoid(call: Call) -> Any:
    return torch.sigmoid(call.tensor(*_X))


@reference("Tanh")
def tanh(call: Call) -> Any:
    return torch.tanh(call.tensor(*_X))


@reference("Softmax")
def softmax(call: Call) -> Any:
    return torch.softmax(call.tensor("input", "x", "0"), int(call.attr("dim", default=-1)))


@reference("LogSoftmax")
def log_softmax(call: Call) -> Any:
    return torch.log_softmax(call.tensor("input", "x", "0"), int(call.attr("dim", default=-1)))


# --- attention --------------------------------------------------------------------------------------------------


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


@reference("Attention", "EncoderOnlyAttention")
def attention(call: Call) -> Any:
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


@reference("MMEncoderAttention", "MultiHeadAttention")
def encoder_attention(call: Call) -> Any:
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


@reference("*RotaryEmbedding", "MRotaryEmbeddingInterleaved")
def rotary(call: Call) -> dict[str, Any]:
    """Cosines and sines in float64 on the CPU, rounded to the dtype; the rotation itself on the device."""
    head, neox = int(call.attr("head_size")), bool(call.attr("is_neox_style", default=True))
    dim = int(call.attr("rotary_dim", default=head))
    angle, size = turns.token_angles(on(call, "cpu"), dim)
    found: dict[str, Any] = {}
    for place, (name, role) in enumerate((("query", "output.0"), ("key", "output.1")), 1):
        x = call.maybe(name, str(place))
        if x is None:
            continue
        cos, sin = ((size * f(angle)).to(x.dtype).to(x.device).unsqueeze(1) for f in (torch.cos, torch.sin))
        heads = x.reshape(x.shape[0], -1, head)
        y = torch.cat((turns.rotate(heads[..., :dim], cos, sin, neox), heads[..., dim:]), -1).reshape(x.shape)
        found[role] = found[f"inplace.{name}"] = found[f"inplace.{place}"] = y
    return found


# --- experts ----------------------------------------------------------------------------------------------------


@reference("UnquantizedFusedMoEMethod")
def experts(call: Call) -> Any:
    x, ids, weights = call.tensor("x"), call.tensor("topk_ids"), call.tensor("topk_weights")
    w13, w2 = (call.params.get(n) for n in ("w13_weight", "w2_weight"))
    if w13 is None or w2 is None or "w13_bias" in call.params or not w13.is_floating_point():
        raise Declined("experts in a form that torch has no kernel for")
    act = activation_of(call)
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float32, device=x.device)
    for e in range(len(w13)):
        row, place = (ids == e).nonzero(as_tuple=True)
        if len(row):
            gate, up = F.linear(x[row], w13[e]).chunk(2, -1)
            y = F.linear(act(gate) * up, w2[e])
            out.index_add_(0, row, y.float() * weights[row, place].float().unsqueeze(-1))
    return out.to(x.dtype)


# --- operators --------------------------------------------------------------------------------------------------


@reference("*.*", "torch.ops.*")
def operator(call: Call) -> dict[str, Any]:
    """An aten or vendor operator itself, on the device of its tensors."""
    if any(word in call.cls for word in _HANDLES):
        raise Declined("takes a handle of the process that was captured")
    function = of(call.cls)
    devices = [t.device for t in tensors_by_role(call.args, call.kwargs).values()]
    device = devices[0] if devices else torch.device("cpu")

    def placed(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if isinstance(value, (list, tuple)):
            return [placed(v) for v in value]
        return value.clone() if isinstance(value, torch.Tensor) else value

    args, kwargs = [placed(a) for a in call.args], {k: placed(v) for k, v in call.kwargs.items()}
    result = function(*args, **kwargs)
    return outputs_by_role(result, args, kwargs)


@reference("Functional.*", "Torch.*", "Tensor.*")
def api(call: Call) -> dict[str, Any]:
    """A function of torch that msprobe recorded."""
    call = ready(mapped(call, lambda t: t.clone()))
    result = torch_function(call.cls)(*call.args, **call.kwargs)
    return outputs_by_role(result, call.args, call.kwargs)


@reference(*(f"{head}.*" for head in mindspore_api.HEADS))
def mindspores(call: Call) -> dict[str, Any]:
    return mindspore_api.run(call)
