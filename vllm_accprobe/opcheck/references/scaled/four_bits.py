"""Operators on numbers of 4 bits with scales of blocks: MXFP4 and NVFP4. Formulas: codes.py."""

from __future__ import annotations

import torch

from vllm_accprobe.opcheck.reference import Call, Expected, reference
from vllm_accprobe.opcheck.references.linear import product
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, place_of
from vllm_accprobe.opcheck.references.scaled.codes import NV_BLOCK, from_tiles, mxfp4, nvfp4


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
