"""Operators on numbers of 8 and 4 bits with scales: turning numbers into codes, and products of codes.

Formula: q = round(x / s), clamped, plus a zero point where there is one; y = sa sb (A B - z colsum(B)) + bias [B. Jacob
et al., arXiv 1712.05877, equation 7]; scales of a tensor, a token (row) or a channel (column), or of blocks
[DeepSeek-V3, arXiv 2412.19437, section 3.3]. Dynamic scales: largest of a row (or tensor) over the largest code; with a
zero point (max - min) / 255. A code is right within half a step of x / s for the scale that was captured with it
(caches.py); the scale itself must be right, too. Sums of int8 products are exact, of fp8's in float32. Products of
MXFP8, MXFP4 and NVFP4 are those of the numbers that the codes stand for (quantised.py), FlashInfer's under the names
that vLLM registers [vLLM 0.32, utils/flashinfer.py]; weights that a backend wants shuffled, and tiles of 8 rows, are
declined.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, decline_if, only, reference, required
from vllm_accprobe.opcheck.references.caches import coded
from vllm_accprobe.opcheck.references.linear import biased, by_batch, product
from vllm_accprobe.opcheck.references.parts import Arguments, as_captured, equal, reshaped
from vllm_accprobe.opcheck.references.quantised import (
    E2M1,
    MX_BLOCK,
    NV_BLOCK,
    block_size,
    cut_off,
    from_tiles,
    mxfp4,
    nvfp4,
    scaled,
    unpacked,
)

Tensor = Any  # a torch.Tensor
_SCALE = 2.0**-20
"""Chosen: relative error of a scale, a quotient in float32 of the largest of a row."""


def _rows(scale: Tensor, like: Tensor) -> Tensor:
    """Scales of A [m, k] as they multiply it: of all, of rows, or of rows and blocks of columns."""
    scale = scale.double()
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.numel() == len(like):
        return scale.reshape(-1, 1)
    if scale.dim() == 2 and len(scale) == len(like):
        size = block_size(like.shape[1], scale.shape[1])
        return scale.repeat_interleave(size, 1)[:, : like.shape[1]]
    raise Declined(f"scales {list(scale.shape)} do not fit {list(like.shape)}")


def _product(call: Call, f: Arguments, azp: Tensor | None, adjusted: Tensor | None) -> dict[str, Expected]:
    """adjusted: azp_adj [n], the columns' sums of b; azp: [m], None where adjusted has the tensor's zero point."""
    a, b, scale_a, scale_b = f.wide("a", "b", "scale_a", "scale_b")
    left = a * _rows(scale_a, a)
    right = scaled(b.T, scale_b.T if scale_b.dim() == 2 and scale_b.numel() not in (1, b.shape[1]) else scale_b)
    y = product(left, right)
    if adjusted is not None:
        shift = adjusted.double().reshape(1, -1) * (1.0 if azp is None else azp.double().reshape(-1, 1))
        columns = scale_b.reshape(1, -1) if scale_b.numel() > 1 else scale_b.reshape(())
        off = shift * _rows(scale_a, a) * columns
        size = 2.0**-22 * off.abs()
        y = Expected(y.value - off, combined(y.noise, size), bound=y.bound + 2.0 * size)
    role = f.role("out")
    return {role: reshaped(biased(y, f.wide_or_none("bias"), call.unit), call.outputs[role].shape)}


@reference(
    "torch.ops._C.cutlass_scaled_mm", "torch.ops.*.cutlass_scaled_mm", "torch.ops._C.cutlass_scaled_mm_azp",
    "torch.ops.*.cutlass_scaled_mm_azp",
)  # fmt: skip
def scaled_product(call: Call) -> dict[str, Expected]:
    """(out [m, n], a [m, k], b [k, n], scales, bias), or with azp_adj and azp before the bias."""
    zero = "_azp" in call.cls
    f = Arguments(call, "out a b scale_a scale_b azp_adj azp bias" if zero else "out a b scale_a scale_b bias")
    return _product(call, f, f.get("azp"), f.get("azp_adj"))


@reference("torch.ops._C.onednn_scaled_mm")
def onednn(call: Call) -> dict[str, Expected]:
    """(out, a, scale of a or none, azp, azp_adj, bias, handle): the weight, its scale, and a static scale of a are
    those of the module that called it; azp_adj [n]: the columns' sums times their scales, unused without azp."""
    f = Arguments(call, "out a scale_a azp azp_adj bias handler")
    weight, scale_b = call.params.get("weight"), call.params.get("weight_scale")
    if weight is None or not weight.numel() or scale_b is None:
        raise Declined("the weight of the module that called it was packed or not captured")
    if weight.shape[1] == f["a"].shape[-1]:  # [outputs, inputs], as the checkpoint has it; a square one as well
        weight = weight.T
    decline_if(weight.shape[0] != f["a"].shape[-1], "the weight of the module that called it does not fit")
    scale_a = f["scale_a"] if f["scale_a"] is not None else call.params.get("input_scale")
    f |= {"b": weight, "scale_b": scale_b, "scale_a": scale_a}
    sums = None if f["azp"] is None else f["azp_adj"].double().reshape(-1) / scale_b.double().reshape(-1)
    found = _product(call, f, f["azp"], sums)
    (role,) = found
    return only(found, note=_cut_off(f, found[role].value, call.outputs[role]))


def _cut_off(f: Arguments, y: Tensor, mine: Tensor) -> str:
    """Why a product of codes without a zero point is off, where it is this; else nothing (quantised.py)."""
    a, b = f["a"].reshape(-1, f["a"].shape[-1]), f["b"]
    if f["azp"] is not None:
        return ""
    right = _rows(f["scale_b"], b.T).expand(b.shape[1], 1).reshape(-1)
    left = _rows(f["scale_a"], a).expand(len(a), 1).reshape(-1)
    return cut_off(a, b, left, right, y.reshape(len(a), -1), mine.reshape(len(a), -1))


@reference(
    "torch.ops._C.static_scaled_int8_quant", "torch.ops._C.static_scaled_fp8_quant",
    "torch.ops.*.static_scaled_int8_quant", "torch.ops.*.static_scaled_fp8_quant",
)  # fmt: skip
def static(call: Call) -> dict[str, Expected]:
    """(out, input, scale, azp): codes for a known scale."""
    f = Arguments(call, "out input scale azp")
    zero = f["azp"] if f["out"].dtype == torch.int8 else None
    return {f.role("out"): _codes(f["input"], f["scale"], zero, call.outputs[f.role("out")])}


def _codes(x: Tensor, scale: Tensor, zero: Tensor | None, mine: Tensor) -> Expected:
    by = _rows(scale, x.reshape(-1, x.shape[-1]))
    exact = x.double() / (by if by.dim() == 0 else by.reshape(*x.shape[:-1], 1))
    if zero is not None:
        exact = exact + (zero.double().reshape(()) if zero.numel() == 1 else zero.double().reshape(*x.shape[:-1], 1))
    return equal(coded(exact, mine, mine.dtype))


@reference(
    "torch.ops._C.dynamic_scaled_int8_quant", "torch.ops._C.dynamic_scaled_fp8_quant",
    "torch.ops._C.dynamic_per_token_scaled_fp8_quant", "torch.ops.*.dynamic_scaled_int8_quant",
    "torch.ops.*.dynamic_per_token_scaled_fp8_quant", "torch.ops.*.dynamic_scaled_fp8_quant",
)  # fmt: skip
def dynamic(call: Call) -> dict[str, Expected]:
    """(out, input, scale, azp): the scale of each row, or of all for ``dynamic_scaled_fp8_quant``, and the codes."""
    f = Arguments(call, f"out input scale {'azp' if 'int8' in call.cls else 'scale_ub'}")
    x, role = f["input"].double(), f.role("out")
    decline_if(f.get("scale_ub") is not None, "a scale with an upper limit has no reference")
    mine = call.outputs[role]
    given_scale = required(call.outputs.get(f.role("scale")), "the scale that it found was not captured")
    rows = x.reshape(-1, x.shape[-1])
    if given_scale.numel() == 1:
        rows = rows.reshape(1, -1)
    top = 127.0 if mine.dtype == torch.int8 else torch.finfo(mine.dtype).max
    zero, found = None, {}
    if f.get("azp") is not None:
        size = (rows.amax(1) - rows.amin(1)) / 255.0
        azp = f.role("azp")
        zero = required(call.outputs.get(azp), "the zero point that it found was not captured")
        exact = -128.0 - rows.amin(1) / size
        near = (zero.double().reshape(-1) - exact).abs() <= 0.5 + 2.0**-10
        found[azp] = Expected(torch.where(near, zero.reshape(-1).long(), exact.round().long()).reshape(zero.shape))
    else:
        size = rows.abs().amax(1) / top
    value = size.reshape(given_scale.shape)
    least = torch.where(value == 0, given_scale.double(), value)  # a row of zeros may have any scale
    found[f.role("scale")] = Expected(least, _SCALE * least.abs())
    found[role] = _codes(f["input"], given_scale, zero, mine)
    return found


_SLACK = 1.0 + 2.0**-8
"""Chosen: how far beyond the nearest code's distance another may lie: in the middle of two, either is right."""
_SCALED = 2.0**-10
"""Chosen: relative error of a number over its scale: kernels multiply by an approximate reciprocal."""


@reference("torch.ops.vllm.dequant_mxfp4", "torch.ops.*.dequant_mxfp4")
def dequantised(call: Call) -> Expected:
    """(codes, exponents, dtype): the numbers themselves."""
    f = Arguments(call, "x scale float_dtype")
    out = call.outputs["output.0"]
    return Expected(mxfp4(f["x"], f["scale"]).reshape(out.shape), unit=0.0 if out.dtype != torch.float16 else None)


@reference("torch.ops._C.cutlass_scaled_fp4_mm", "torch.ops.*.cutlass_scaled_fp4_mm")
def nvfp4_product(call: Call) -> dict[str, Expected]:
    """(out [m, n], a uint8 [m, k / 2], b uint8 [n, k / 2], scales in tiles, alpha): alpha a b'."""
    f = Arguments(call, "out a b block_scale_a block_scale_b alpha")
    left, right = (_from_blocks(f[n], f[f"block_scale_{n}"], NV_BLOCK, nv=True) for n in ("a", "b"))
    return {f.role("out"): product(left * float(f["alpha"]), right)}


def _from_blocks(codes: Tensor, scales: Tensor, size: int, nv: bool) -> Tensor:
    """float64 [rows, n] of uint8 [rows, n / 2] whose scales of ``size`` numbers lie in tiles. nv: NVFP4, else MXFP4."""
    codes = codes.contiguous().view(torch.uint8)
    plain = from_tiles(scales.contiguous().view(torch.uint8), len(codes), codes.shape[1] * 2 // size).contiguous()
    return nvfp4(codes, plain, 1.0) if nv else mxfp4(codes, plain)


@reference("torch.ops._C.scaled_fp4_quant", "torch.ops.*.scaled_fp4_quant")
def quantised(call: Call) -> dict[str, Expected]:
    """(input [m, n], global_scale, in tiles or not; output uint8 [m, n / 2], output_scale): the scale of 16 numbers is
    their largest over 6, times global_scale, in e4m3; a code is the number times global_scale over its scale."""
    f = Arguments(call, "input global_scale swizzled output output_scale")
    roles = [f.role(n) for n in ("output", "output_scale")]
    if not all(role in call.outputs for role in roles):
        roles = ["output.0", "output.1"]
    codes, kept = (call.outputs.get(role) for role in roles)
    if codes is None or kept is None:
        raise Declined("its codes and scales were not captured both")
    x = f["input"].double().reshape(-1, f["input"].shape[-1]) * float(f["global_scale"])
    rows, columns = len(x), x.shape[1] // NV_BLOCK
    blocks = x.reshape(rows, columns, NV_BLOCK)
    flat = kept.contiguous().view(torch.uint8)
    tiled = f["swizzled"] is None or bool(f["swizzled"])
    places = torch.arange(flat.numel())
    at = (from_tiles(places, rows, columns) if tiled else places.reshape(-1, columns)[:rows]).contiguous()
    mine = flat.reshape(-1)[at].contiguous().view(torch.float8_e4m3fn)
    right = coded(blocks.abs().amax(-1) / E2M1[-1], mine, torch.float8_e4m3fn)
    scales = flat.reshape(-1).clone()
    scales[at.reshape(-1)] = right.view(torch.uint8).reshape(-1)
    wide = mine.double().unsqueeze(-1)
    exact = torch.where(wide > 0, blocks / wide, 0.0).clamp(-E2M1[-1], E2M1[-1]).reshape(rows, -1)
    bytes_ = codes.contiguous().view(torch.uint8).reshape(rows, -1)
    numbers = unpacked(bytes_)
    table = torch.tensor(E2M1, dtype=torch.float64)
    nearest = (exact.abs().unsqueeze(-1) - table).abs().argmin(-1)
    best = (exact.abs() - table[nearest]).abs()
    good = (exact - numbers).abs() <= best * _SLACK + 2.0**-20 + _SCALED * exact.abs()
    sign = (exact < 0).long() * 8
    both = (nearest + sign).reshape(rows, -1, 2)
    whole = both[..., 0] | both[..., 1] << 4
    fits = good.reshape(rows, -1, 2).all(-1)
    value = torch.where(fits, bytes_.long(), whole).reshape(codes.shape)
    return {
        roles[0]: Expected(value if codes.dtype == torch.uint8 else value.to(torch.uint8).view(codes.dtype).double()),
        roles[1]: Expected(as_captured(scales.view(kept.dtype).reshape(kept.shape))),
    }


_SHUFFLED = ("trtllm", "cute-dsl", "cake", "trtllm_low_latency")


@reference("torch.ops.vllm.bmm_fp8")
def batched_fp8(call: Call) -> Expected:
    """(A [batch, m, k] in 8 bits, B [batch, k, n], A_scale, B_scale: one number each, dtype, backend)"""
    a, b, scale_a, scale_b = Arguments(call, "A B A_scale B_scale").wide("A", "B", "A_scale", "B_scale")
    decline_if(scale_a.numel() != 1 or scale_b.numel() != 1, "its scales are not one for each operand")
    a, b = a * scale_a.reshape(()), b * scale_b.reshape(())
    if a.dim() != 3 or b.dim() != 3 or len(a) != len(b) or a.shape[2] != b.shape[1]:
        raise Declined(f"operands {list(a.shape)} and {list(b.shape)} do not fit")
    return by_batch(a, b)


@reference("torch.ops.vllm.mm_mxfp8")
def mxfp8(call: Call) -> Expected:
    """(A [m, k] in e4m3, B [k, n], scales of 32 terms in tiles, out_dtype, backend, use_8x4_sf_layout)"""
    f = Arguments(call, "A B A_scale B_scale out_dtype backend use_8x4_sf_layout")
    _refuse_shuffled(f)
    a, b = f.wide("A", "B")
    sides = []
    for x, name in ((a, "A_scale"), (b.T, "B_scale")):
        codes = f[name].contiguous().view(torch.uint8)
        codes = from_tiles(codes, len(x), x.shape[1] // MX_BLOCK).int()
        scales = torch.ldexp(torch.ones(codes.shape, dtype=torch.float64), codes - 127)
        sides.append(x * scales.repeat_interleave(MX_BLOCK, 1))
    return product(*sides)


@reference("torch.ops.vllm.flashinfer_mm_fp4")
def four_bits(call: Call) -> Expected:
    """(A uint8 [m, k / 2], B uint8 [k / 2, n], scales in tiles, g_scale, ...): g_scale A B."""
    f = Arguments(call, "A B A_scale B_scale g_scale dtype use_8x4_sf_layout backend block_size use_nvfp4")
    _refuse_shuffled(f)
    nv = f["use_nvfp4"] is None or bool(f["use_nvfp4"])
    size = int(f["block_size"] or NV_BLOCK)
    decline_if(size != (NV_BLOCK if nv else MX_BLOCK), f"blocks of {size} have no reference")
    left = _from_blocks(f["A"], f["A_scale"], size, nv)
    right = _from_blocks(f["B"].T, f["B_scale"].T, size, nv)
    alpha = f["g_scale"].double()
    return product(left * (alpha.reshape(-1, 1) if alpha.numel() > 1 else alpha.reshape(())), right)


def _refuse_shuffled(f: Arguments) -> None:
    if f["use_8x4_sf_layout"] or f["backend"] in _SHUFFLED:
        raise Declined("weights and scales in the order of this backend have no reference")
