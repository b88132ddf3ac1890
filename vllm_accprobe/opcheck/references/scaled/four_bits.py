"""Operators on numbers of 4 bits with scales of blocks: MXFP4 and NVFP4. Formulas: codes.py."""

from __future__ import annotations

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.linear import product
from vllm_accprobe.opcheck.references.paged.layouts import coded
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, place_of
from vllm_accprobe.opcheck.references.scaled.codes import E2M1, NV_BLOCK, from_tiles, mxfp4, nvfp4, unpacked

_SLACK = 1.0 + 2.0**-8
"""Chosen: how far beyond the nearest code's distance another may lie: in the middle of two, either is right."""
_SCALED = 2.0**-10
"""Chosen: relative error of a number over its scale: kernels multiply by an approximate reciprocal."""


@reference("torch.ops.vllm.dequant_mxfp4", "torch.ops.*.dequant_mxfp4")
def dequantised(call: Call) -> Expected:
    """(codes, exponents, dtype): the numbers themselves."""
    f = arguments(call, "x scale float_dtype")
    out = call.outputs["output.0"]
    return Expected(mxfp4(f["x"], f["scale"]).reshape(out.shape), unit=0.0 if out.dtype != torch.float16 else None)


_MM = "out a b block_scale_a block_scale_b alpha"


@reference("torch.ops._C.cutlass_scaled_fp4_mm", "torch.ops.*.cutlass_scaled_fp4_mm")
def nvfp4_product(call: Call) -> dict[str, Expected]:
    """(out [m, n], a uint8 [m, k / 2], b uint8 [n, k / 2], scales in tiles, alpha): alpha a b'."""
    f = arguments(call, _MM)
    sides = []
    for name in ("a", "b"):
        codes, scales = f[name], f[f"block_scale_{name}"]
        rows, columns = codes.shape[0], codes.shape[1] * 2 // NV_BLOCK
        sides.append(nvfp4(codes, from_tiles(scales.view(torch.uint8), rows, columns).contiguous(), 1.0))
    y = product(sides[0] * float(f["alpha"]), sides[1])
    return {place_of(call, _MM, "out"): y}


_QUANT = "input global_scale swizzled output output_scale"


@reference("torch.ops._C.scaled_fp4_quant", "torch.ops.*.scaled_fp4_quant")
def quantised(call: Call) -> dict[str, Expected]:
    """(input [m, n], global_scale, in tiles or not; output uint8 [m, n / 2], output_scale): the scale of 16 numbers is
    their largest over 6, times global_scale, in e4m3; a code is the number times global_scale over its scale."""
    f = arguments(call, _QUANT)
    roles = [place_of(call, _QUANT, n) for n in ("output", "output_scale")]
    if not all(role in call.outputs for role in roles):
        roles = ["output.0", "output.1"]
    codes, held = (call.outputs.get(role) for role in roles)
    if codes is None or held is None:
        raise Declined("its codes and scales were not captured both")
    x = f["input"].double().reshape(-1, f["input"].shape[-1]) * float(f["global_scale"])
    rows, columns = len(x), x.shape[1] // NV_BLOCK
    blocks = x.reshape(rows, columns, NV_BLOCK)
    flat = held.contiguous().view(torch.uint8)
    tiled = f["swizzled"] is None or bool(f["swizzled"])
    places = torch.arange(flat.numel())
    at = (from_tiles(places, rows, columns) if tiled else places.reshape(-1, columns)[:rows]).contiguous()
    mine = flat.reshape(-1)[at].contiguous().view(torch.float8_e4m3fn)
    right = coded(blocks.abs().amax(-1) / E2M1[-1], mine, torch.float8_e4m3fn)
    scales = flat.reshape(-1).clone()
    scales[at.reshape(-1)] = right.view(torch.uint8).reshape(-1)
    wide = mine.double().unsqueeze(-1)
    exact = torch.where(wide > 0, blocks / wide, 0.0).clamp(-E2M1[-1], E2M1[-1]).reshape(rows, -1)
    numbers = unpacked(codes.contiguous().view(torch.uint8).reshape(rows, -1))
    table = torch.tensor(E2M1, dtype=torch.float64)
    nearest = (exact.abs().unsqueeze(-1) - table).abs().argmin(-1)
    best = (exact.abs() - table[nearest]).abs()
    good = (exact - numbers).abs() <= best * _SLACK + 2.0**-20 + _SCALED * exact.abs()
    told = codes.contiguous().view(torch.uint8).reshape(rows, -1)
    sign = (exact < 0).long() * 8
    both = (nearest + sign).reshape(rows, -1, 2)
    whole = both[..., 0] | both[..., 1] << 4
    fits = good.reshape(rows, -1, 2).all(-1)
    value = torch.where(fits, told.long(), whole).reshape(codes.shape)
    return {
        roles[0]: Expected(value if codes.dtype == torch.uint8 else value.to(torch.uint8).view(codes.dtype).double()),
        roles[1]: Expected(_like(scales, held)),
    }


def _like(scales: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    y = scales.view(held.dtype).reshape(held.shape)
    return y.double() if held.dtype.is_floating_point else y.long()
