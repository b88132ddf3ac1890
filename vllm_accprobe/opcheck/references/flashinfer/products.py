"""FlashInfer's products: plain ones, and of numbers of 8 and 4 bits with scales.

Formulas: linear.py's, of what the codes stand for (scaled/). fp8: one scale for each operand; groupwise: a scale for
each ``scale_granularity_mnk`` of (rows, columns, terms), [.., k / g] for the mode K and turned for MN; MXFP8: 32 terms
share 2**(s - 127) [OCP Microscaling Formats v1.0, section 5.3]; NVFP4 and MXFP4: scales in tiles of 128 rows
(scaled/codes.py). Weights that a backend wants shuffled, and tiles of 8 rows, are declined. Signatures: flashinfer
0.7.2, gemm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.linear import biased, product
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given
from vllm_accprobe.opcheck.references.scaled.codes import MX_BLOCK, NV_BLOCK, from_tiles, mxfp4, nvfp4

Tensor = Any  # a torch.Tensor
_SHUFFLED = ("trtllm", "cute-dsl", "cake", "trtllm_low_latency")


@reference("flashinfer.mm_bf16")
def mm(call: Call) -> Expected:
    """(a [m, k], b [k, n], bias [n] or None, ...)"""
    f = arguments(call, "a b bias")
    a, b = given(f, "a", "b")
    return biased(product(a, b.T), None if f["bias"] is None else f["bias"].double())


@reference("flashinfer.bmm_bf16")
def batched(call: Call) -> Expected:
    """(A [batch, m, k], B [batch, k, n])"""
    return _each(*given(arguments(call, "A B"), "A", "B"))


@reference("flashinfer.bmm_fp8")
def batched_fp8(call: Call) -> Expected:
    """(A [batch, m, k] in 8 bits, B [batch, k, n], A_scale, B_scale: one number each, dtype)"""
    f = arguments(call, "A B A_scale B_scale dtype out backend")
    a, b, scale_a, scale_b = given(f, "A", "B", "A_scale", "B_scale")
    if scale_a.numel() != 1 or scale_b.numel() != 1:
        raise Declined("its scales are not one for each operand")
    return _each(a * scale_a.reshape(()), b * scale_b.reshape(()))


def _each(a: Tensor, b: Tensor) -> Expected:
    if a.dim() != 3 or b.dim() != 3 or len(a) != len(b) or a.shape[2] != b.shape[1]:
        raise Declined(f"operands {list(a.shape)} and {list(b.shape)} do not fit")
    found = [product(x, y.T) for x, y in zip(a, b, strict=True)]
    noise, bound = (torch.stack([getattr(y, n) for y in found]) for n in ("noise", "bound"))
    return Expected(torch.stack([y.value for y in found]), noise, bound=bound)


_GROUPS = "a b a_scale b_scale scale_major_mode mma_sm scale_granularity_mnk out out_dtype backend"


@reference("flashinfer.gemm_fp8_nt_groupwise")
def groupwise(call: Call) -> Expected:
    """(a [m, k], b [n, k], a_scale, b_scale, mode, ...): y = a b'."""
    f = arguments(call, _GROUPS)
    return _groups(f, f["scale_granularity_mnk"] or (1, 128, 128))


@reference("flashinfer.gemm_fp8_nt_blockscaled")
def blocks(call: Call) -> Expected:
    """The same with blocks of 128 everywhere."""
    f = arguments(call, _GROUPS.replace("scale_granularity_mnk ", "").replace(" backend", ""))
    return _groups({**f, "scale_major_mode": f["scale_major_mode"] or "MN"}, (128, 128, 128))


def _groups(f: Mapping[str, Any], sizes: Any) -> Expected:
    if f.get("backend") == "trtllm":
        raise Declined("the scales of this backend lie in an order that has no reference")
    a, b, scale_a, scale_b = given(f, "a", "b", "a_scale", "b_scale")
    rows, columns, terms = (int(s) for s in sizes)
    mode = f["scale_major_mode"]
    if mode not in ("MN", "K"):
        raise Declined("scales without a mode have no reference")
    sides = []
    for x, scale, size in ((a, scale_a, rows), (b, scale_b, columns)):
        scale = scale.T if mode == "MN" else scale
        if tuple(scale.shape) != (-(-x.shape[0] // size), -(-x.shape[1] // terms)):
            raise Declined(f"scales {list(scale.shape)} do not fit {list(x.shape)}")
        whole = scale.repeat_interleave(size, 0)[: len(x)].repeat_interleave(terms, 1)[:, : x.shape[1]]
        sides.append(x * whole)
    return product(*sides)


def _tiles(f: Mapping[str, Any]) -> None:
    if f["use_8x4_sf_layout"] or f["backend"] in _SHUFFLED:
        raise Declined("weights and scales in the order of this backend have no reference")


@reference("flashinfer.mm_mxfp8")
def mxfp8(call: Call) -> Expected:
    """(a [m, k] in e4m3, b [k, n], scales of 32 terms in tiles)"""
    f = arguments(call, "a b a_descale b_descale out out_dtype use_8x4_sf_layout backend")
    _tiles(f)
    a, b = given(f, "a", "b")
    sides = []
    for x, name in ((a, "a_descale"), (b.T, "b_descale")):
        codes = f[name].contiguous().view(torch.uint8)
        codes = from_tiles(codes, len(x), x.shape[1] // MX_BLOCK).int()
        sides.append(
            x * torch.ldexp(torch.ones(codes.shape, dtype=torch.float64), codes - 127).repeat_interleave(32, 1)
        )
    return product(*sides)


@reference("flashinfer.mm_fp4")
def four_bits(call: Call) -> Expected:
    """(a uint8 [m, k / 2], b uint8 [k / 2, n], scales in tiles, alpha): alpha a b."""
    f = arguments(
        call, "a b a_descale b_descale alpha out_dtype out block_size use_8x4_sf_layout backend use_nvfp4"
    )  # fmt: skip
    _tiles(f)
    size = int(f["block_size"] or NV_BLOCK)
    nv = f["use_nvfp4"] is None or bool(f["use_nvfp4"])
    if size != (NV_BLOCK if nv else MX_BLOCK):
        raise Declined(f"blocks of {size} have no reference")
    sides = []
    for x, scales in ((f["a"], f["a_descale"]), (f["b"].T, f["b_descale"].T)):
        codes, held = x.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8)
        held = from_tiles(held, len(codes), codes.shape[1] * 2 // size).contiguous()
        sides.append(nvfp4(codes, held, 1.0) if nv else mxfp4(codes, held))
    alpha = f["alpha"]
    if alpha is not None:
        sides[0] = sides[0] * (alpha.double().reshape(-1, 1) if alpha.numel() > 1 else alpha.double().reshape(()))
    return product(*sides)
