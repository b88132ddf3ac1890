"""Modules that compute nothing themselves, and what stands around a vision tower.

What stands before and behind a vision tower: pictures in, patches embedded, patches merged.

Formulas: x * weight[c] + bias[c] on the channels of raw pixels; a convolution over patches that do not overlap is a
product with the flattened kernel [Dosovitskiy et al., arXiv 2010.11929, section 3.1; Qwen2-VL, arXiv 2409.12191, for
frames in pairs]. Mergers consist of modules that have references of their own.

Modules that compute nothing themselves: what comes out must be what their last part gave.

The problem: most calls of a model are of blocks, and a fault can sit between modules, where nothing is captured (a
residual stream that is scaled, shared experts that are not added). The idea: a block's output is checked against the
outputs captured inside it, bit for bit where it hands one on, in float64 where it adds two up. What a block does is
known by class; others are declined. Formulas: vLLM's model files: (hidden, residual) handed on by decoder layers;
output projection last in attention; down projection last in an MLP, times a sigmoid gate in Qwen2-MoE's shared expert;
routed and shared experts added.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.judge.floor import unit
from vllm_accprobe.opcheck.reference import (
    APPROXIMATE,
    ROUNDED,
    Call,
    Declined,
    Expected,
    device_kernel,
    reference,
    sum_of_two,
)
from vllm_accprobe.opcheck.references.hf import mixture, residual_layer
from vllm_accprobe.opcheck.references.linear import added, biased, product, rounded
from vllm_accprobe.opcheck.references.parts import (
    UNSEEN,
    UNTOLD,
    WHERE_SCALED,
    all_seen,
    held,
    inside,
    param_if,
    ranks_of,
    routed_factor,
    same,
    weight_here,
)


@reference("FusedMMInputNorm")
def input_norm(call: Call) -> Expected:
    x, weight, bias = call.wide("pixel_values", "0"), call.param("weight"), call.param("bias")
    if x.dim() != 2 or x.shape[1] % len(weight):
        raise Declined("its pixels have an unknown form")
    by_channel = x.reshape(len(x), len(weight), -1)
    y = by_channel * weight.reshape(1, -1, 1) + bias.reshape(1, -1, 1)
    noise = 2.0**-23 * ((by_channel * weight.reshape(1, -1, 1)).abs() + bias.abs().reshape(1, -1, 1))
    return Expected(y.reshape(x.shape), noise.reshape(x.shape))


@reference("Conv2dLayer", "Conv3dLayer", "Conv2d", "Conv3d")
def convolution(call: Call) -> Expected:
    """Of kernels as large as their stride: the output tells, because each input is used once."""
    x, weight = call.wide("x", "input", "0"), call.param("weight")
    out, dims = call.outputs["output.0"], weight.dim() - 2
    kernel, grid = list(weight.shape[2:]), list(out.shape[2:])
    if x.dim() != dims + 2 or list(x.shape[2:]) != [g * k for g, k in zip(grid, kernel, strict=True)]:
        raise Declined("a convolution whose stride is not its kernel")
    if weight.shape[1] != x.shape[1]:
        raise Declined("a convolution in groups")
    y = product(_patches(x, kernel), weight.flatten(1))
    y = biased(y, param_if(call, "bias"), call.unit)
    value, noise, bound = (_back(t, len(x), grid) for t in (y.value, y.noise, y.bound))
    return Expected(value, noise, bound=bound)


def _back(rows: Any, n: int, grid: list[int]) -> Any:
    return rows.reshape(n, *grid, -1).movedim(-1, 1)


def _patches(x: Any, kernel: list[int]) -> Any:
    """[n, c, g1 k1, ...] → [n * g1 ..., c * k1 ...]."""
    shape: list[int] = [x.shape[0], x.shape[1]]
    for size, k in zip(x.shape[2:], kernel, strict=True):
        shape += [size // k, k]
    dims = len(kernel)
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    width = x.shape[1]
    for k in kernel:
        width *= k
    return torch.reshape(x.reshape(shape).permute(order), (-1, width))


# --- on a device --------------------------------------------------------------------------------------------------


@device_kernel("Conv2dLayer", "Conv3dLayer", "Conv2d", "Conv3d")
def convolution_kernel(call: Call) -> Any:
    x, w = call.tensor("x", "input", "0"), weight_here(call)
    stride = list(call.attr("stride", default=list(w.shape[2:])))
    padding, groups = call.attrs.get("padding", 0), int(call.attr("groups", default=1))
    if isinstance(padding, str):
        raise Declined("a padding that is named")
    run = F.conv2d if w.dim() == 4 else F.conv3d
    return run(x, w, call.params.get("bias"), stride, padding, call.attrs.get("dilation", 1), groups)


def _handed_on(call: Call, *places: tuple[str, str, str], last: bool = True) -> dict[str, Expected]:
    """(role, child, child's role): the first place of a role that was captured.

    last: output.0 only from the child that ran last: a block that does more behind it is not the one that is meant."""
    found: dict[str, Expected] = {}
    ran_last = inside(call)[-1][0]
    if last:
        all_seen(call)
    for role, child, child_role in places:
        if last and role == "output.0" and ran_last != child and not ran_last.startswith(f"{child}."):
            continue
        if role in call.outputs and role not in found:
            held = same(call, role, child, child_role)
            if held is not None:
                found[role] = held
    if not found:
        raise Declined(UNTOLD)
    return found


def _last(call: Call, *children: str) -> dict[str, Expected]:
    """output.0 from the first of these children that was captured and ran last."""
    return _handed_on(call, *(("output.0", child, "output.0") for child in children))


@reference("*DecoderLayer")
def decoder_layer(call: Call) -> dict[str, Expected]:
    """Of layers that hand on (hidden, residual); those that add the residual themselves: hf.py."""
    if "output.1" not in call.outputs:
        return residual_layer(call)
    if call.unit == unit("float16") and call.config.get("routed_scaling_factor") not in (None, 1, 1.0):
        raise Declined(WHERE_SCALED)  # some layers divide by it, so that float16 does not overflow
    return _handed_on(
        call,
        ("output.0", inside(call)[-1][0].partition(".")[0], "output.0"),
        ("output.1", "post_attention_layernorm", "output.1"),
        ("output.1", "pre_feedforward_layernorm", "output.1"),
    )


@reference("*Attention", "MultiHeadLatentAttentionWrapper")
def attention_block(call: Call) -> dict[str, Expected]:
    return _last(call, "o_proj", "mla_attn", "proj", "dense", "out_proj", "c_proj", "wo")


@reference("*LinearAttention", "*DeltaAttention", "*DeltaNet", "*DeltaNetAttention")
def recurrent_block(call: Call) -> dict[str, Expected]:
    """Attention whose recurrence is no module: it hands on what its projection gave, and is never right by that."""
    found = _last(call, "o_proj", "out_proj", "dense")
    return {role: replace(expected, unseen=UNSEEN) for role, expected in found.items()}


@reference("*MLP")
def mlp(call: Call) -> dict[str, Expected]:
    gates = [f for f in inside(call) if f[0] == "expert_gate" and f[1] == "output.0"]
    if gates:
        return {"output.0": _gated(call, gates[-1][2])}
    return _last(call, "down_proj", "fc2", "c_proj", "dense_4h_to_h")


def _gated(call: Call, gate: Any) -> Expected:
    y = held(call, "down_proj").value * call.extra["read"](gate).double().sigmoid()
    size = call.unit * y.abs()
    return Expected(y, ROUNDED * size, common=call.unit, bound=2.0 * size + APPROXIMATE * y.abs())


@reference("MoERunner", "FusedMoE", "SharedFusedMoE")
def experts(call: Call) -> dict[str, Expected]:
    """Routed and shared experts added up; over the ranks where each of them has a part. Where the block adds them
    (SharedFusedMoE, up to vLLM 0.18) output.0 is the shared experts', output.1 the routed ones'."""
    if "output.1" in call.outputs:
        names = ("_shared_experts", "_shared_experts._layer")
        return _handed_on(call, *(("output.0", name, "output.0") for name in names), last=False)
    if not call.extra.get("partial"):
        return {"output.0": _experts(call)}
    parts = [_experts(rank) for rank in ranks_of(call, call.extra["partial"])]
    return {"output.0": reduce(lambda total, p: added(rounded(total, call.unit), rounded(p, call.unit)), parts)}


def _experts(call: Call) -> Expected:
    alone, out = same(call, "output.0", "quant_method", "output.0"), call.outputs.get("output.0")
    if alone is not None and out is not None and torch.equal(alone.value, out.double()):
        return alone  # up to 0.11 nothing is added; in between shared experts may be, which the block owns
    all_seen(call)
    routed, factor = held(call, "routed_experts.quant_method"), _factor_behind(call)
    shared = same(call, "output.0", "_shared_experts._layer", "output.0")
    return _sum(call, routed.value, None if shared is None else shared.value, factor)


def _factor_behind(call: Call) -> float:
    """What this object multiplies its experts' sum with, where a factor is not in the weights."""
    if call.cls != "MoERunner":  # the factor of FusedMoE itself is in the weights
        return 1.0
    own = call.attrs.get("routed_scaling_factor")
    return float(own) if own is not None else routed_factor(call)


def _sum(call: Call, routed: Any, shared: Any | None, factor: float) -> Expected:
    """Routed experts times ``factor``, and shared ones. In float16 the shared ones are divided by it instead."""
    scaled = 0.0
    if factor != 1.0 and shared is not None and call.unit == unit("float16"):
        shared = shared / factor
        scaled = shared.abs()
    elif factor != 1.0:
        routed = routed * factor
        scaled = routed.abs()
    if shared is None:
        return Expected(routed, None, 0.0) if factor == 1.0 else Expected(routed)
    y = routed + shared
    half = call.unit * 0.5 * y.abs()  # some kernels add in the experts' own sum
    scaled = call.unit * scaled
    return Expected(y, ROUNDED * (half * half + scaled * scaled) ** 0.5, bound=2.0 * (half + scaled))


@reference("*MoE", "*MoeSparseMoeBlock", "*SparseMoeBlock", "*Moe")
def moe_block(call: Call) -> dict[str, Expected]:
    parts = {path for path, _, _ in inside(call)}
    all_seen(call)
    if any((path, role) == ("experts", "output.1") for path, role, _ in inside(call)):
        return {"output.0": _apart(call)}
    if "experts" in parts and ("shared_expert" in parts or "shared_experts" in parts):
        return mixture(call)
    if (factor := routed_factor(call)) == 1.0:
        return _last(call, "experts")
    return {"output.0": _sum(call, held(call, "experts").value, None, factor)}


def _apart(call: Call) -> Expected:
    """Shared and routed experts, which the block adds."""
    factor = routed_factor(call)
    if any(getattr(r.layout, "kind", "") == "partial" for path, _, r in inside(call) if path == "experts"):
        raise Declined("adds up over ranks behind it")
    shared, routed = (same(call, "output.0", "experts", f"output.{k}") for k in (0, 1))
    if shared is None or routed is None:
        raise Declined(UNTOLD)
    if factor != 1.0:
        return _sum(call, routed.value, shared.value, factor)
    return sum_of_two(shared.value + routed.value, call.unit)


@reference("*Model")
def model(call: Call) -> dict[str, Expected]:
    names = ("norm", "final_layernorm")
    return _handed_on(
        call, *((role, n, "output.0") for n in names for role in ("output.0", "output.last_hidden_state"))
    )  # fmt: skip


@reference("*ForCausalLM", "*ForConditionalGeneration")
def causal_lm(call: Call) -> dict[str, Expected]:
    """vLLM's head runs behind it, in another call; transformers' is inside."""
    places = [("output.0", "model", "output.0"), ("output.0", "language_model.model", "output.0")]
    return _handed_on(call, *places, ("output.logits", "lm_head", "output.0"), last=False)


@reference("*VisionPatchEmbed", "*PatchEmbed")
def patch_embed(call: Call) -> dict[str, Expected]:
    read, out = call.extra.get("read"), call.outputs.get("output.0")
    for path, role, record in reversed(inside(call)):
        if path == "proj" and role == "output.0" and read is not None and out is not None:
            value = read(record).double()
            if value.numel() == out.numel():
                return {"output.0": Expected(value.reshape(out.shape), None, 0.0)}
    raise Declined(UNTOLD)


@reference("*VisionBlock")
def vision_block(call: Call) -> dict[str, Expected]:
    """The residual that its second norm gave, and the MLP's output, added."""
    down, stream = held(call, "mlp"), held(call, "norm2", "output.1")
    return {"output.0": sum_of_two(down.value + stream.value, call.unit)}


@reference("*VisionTransformer")
def vision_transformer(call: Call) -> dict[str, Expected]:
    """The merger's rows, perhaps in another order (windows are undone behind it): each of them once."""
    merged = held(call, "merger")
    out = call.outputs["output.0"]
    if out.dim() != 2:
        raise Declined(UNTOLD)
    rows: dict[tuple[float, ...], list[int]] = {}
    for k, row in enumerate(merged.value.tolist()):
        rows.setdefault(tuple(row), []).append(k)
    order = [rows.get(tuple(row), [-1]).pop() if rows.get(tuple(row)) else -1 for row in out.double().tolist()]
    left = iter(sorted(set(range(len(order))) - set(order)))
    return {"output.0": Expected(merged.value[[k if k >= 0 else next(left) for k in order]], None, 0.0)}


@reference("*PatchMerger", "Sequential")
def last_part(call: Call) -> dict[str, Expected]:
    """The output of the part that ended last."""
    read, out = call.extra.get("read"), call.outputs.get("output.0")
    _, role, record = inside(call)[-1]
    all_seen(call)
    if read is None or out is None or role != "output.0" or tuple(record.shape) != tuple(out.shape):
        raise Declined(UNTOLD)
    return {"output.0": Expected(read(record).double(), None, 0.0)}
