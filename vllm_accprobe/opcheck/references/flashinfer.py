"""FlashInfer's scaled products under the names that vLLM registers for them.

Formulas: linear.py's product of what the codes stand for (scaled/). FP8: one scale for each
operand; MXFP8: 32 terms share 2**(s - 127) [OCP Microscaling Formats v1.0, section 5.3]; NVFP4 and MXFP4: scales in
tiles of 128 rows (opcheck/references/quantised.py). Weights that a backend wants shuffled, and tiles of 8 rows, are
declined. Signatures: vLLM 0.32, utils/flashinfer.py. Not here: its rope from a table (engine_ops.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.linear import product
from vllm_accprobe.opcheck.references.quantised import MX_BLOCK, NV_BLOCK, from_tiles, mxfp4, nvfp4
from vllm_accprobe.opcheck.references.recurrent import arguments, given

_SHUFFLED = ("trtllm", "cute-dsl", "cake", "trtllm_low_latency")


@reference("torch.ops.vllm.bmm_fp8")
def batched_fp8(call: Call) -> Expected:
    """(A [batch, m, k] in 8 bits, B [batch, k, n], A_scale, B_scale: one number each, dtype, backend)"""
    a, b, scale_a, scale_b = given(arguments(call, "A B A_scale B_scale"), "A", "B", "A_scale", "B_scale")
    if scale_a.numel() != 1 or scale_b.numel() != 1:
        raise Declined("its scales are not one for each operand")
    a, b = a * scale_a.reshape(()), b * scale_b.reshape(())
    if a.dim() != 3 or b.dim() != 3 or len(a) != len(b) or a.shape[2] != b.shape[1]:
        raise Declined(f"operands {list(a.shape)} and {list(b.shape)} do not fit")
    found = [product(x, y.T) for x, y in zip(a, b, strict=True)]
    noise, bound = (torch.stack([getattr(y, n) for y in found]) for n in ("noise", "bound"))
    return Expected(torch.stack([y.value for y in found]), noise, bound=bound)


@reference("torch.ops.vllm.mm_mxfp8")
def mxfp8(call: Call) -> Expected:
    """(A [m, k] in e4m3, B [k, n], scales of 32 terms in tiles, out_dtype, backend, use_8x4_sf_layout)"""
    f = arguments(call, "A B A_scale B_scale out_dtype backend use_8x4_sf_layout")
    _refuse_shuffled(f)
    a, b = given(f, "A", "B")
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
    f = arguments(call, "A B A_scale B_scale g_scale dtype use_8x4_sf_layout backend block_size use_nvfp4")
    _refuse_shuffled(f)
    nv = f["use_nvfp4"] is None or bool(f["use_nvfp4"])
    size = int(f["block_size"] or NV_BLOCK)
    if size != (NV_BLOCK if nv else MX_BLOCK):
        raise Declined(f"blocks of {size} have no reference")
    sides = []
    for x, scales in ((f["A"], f["A_scale"]), (f["B"].T, f["B_scale"].T)):
        codes, tiles = x.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8)
        plain = from_tiles(tiles, len(codes), codes.shape[1] * 2 // size).contiguous()
        sides.append(nvfp4(codes, plain, 1.0) if nv else mxfp4(codes, plain))
    alpha = f["g_scale"].double()
    return product(sides[0] * (alpha.reshape(-1, 1) if alpha.numel() > 1 else alpha.reshape(())), sides[1])


def _refuse_shuffled(f: Mapping[str, Any]) -> None:
    if f["use_8x4_sf_layout"] or f["backend"] in _SHUFFLED:
        raise Declined("weights and scales in the order of this backend have no reference")
