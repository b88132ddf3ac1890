"""Numbers that codes of 8 and 4 bits stand for: weights as checkpoints and kernels store them.

Formulas: fp8 and int8: w = q * scale, one scale per tensor, per output channel or per block of the matrix [Micikevicius
et al., arXiv 2209.05433; DeepSeek-V3, arXiv 2412.19437, section 3.3]. GPTQ: eight 4-bit numbers per int32 along the
inputs, w = (q - z) * s by group, z stored as z - 1 [Frantar et al., arXiv 2210.17323, and the published checkpoint
format]; AWQ: eight per int32 along the outputs in the order 0 2 4 6 1 3 5 7, z stored as it is [Lin et al., arXiv
2306.00978, and its published format]. MXFP4: codes e2m1, two in a byte, the first in its lower half, of which 32 along
the inputs share a scale 2**(s - 127) [OCP Microscaling Formats v1.0, sections 5.3 and 6.3]. NVFP4: 16 share a scale in
e4m3, and the tensor one in float32; kernels want the block scales in tiles of 128 rows by 4 [NVIDIA, cuBLAS
documentation, 1D block scaling factors layout]. A packed kernel's form of a weight is declined.
Elsewhere: products (linear.py of modules, scaled.py of operators).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, decline_if

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_BLOCK, NV_BLOCK = 32, 16
Tensor = Any  # a torch.Tensor


def unpacked(codes: Tensor) -> Tensor:
    """uint8 [..., n / 2] of two codes each: float64 [..., n]."""
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
    return table[both]


def mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 [..., n] from uint8 [..., n / 2] and exponents uint8 [..., n / 32]. Raises Declined."""
    wide = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.view(torch.uint8).int() - 127)
    return _blocks(unpacked(codes), wide, MX_BLOCK)


def nvfp4(codes: Tensor, scales: Tensor, whole: float) -> Tensor:
    """float64 [..., n] from uint8 [..., n / 2], e4m3 [..., n / 16] and the tensor's scale. Raises Declined."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e4m3fn)
    return _blocks(unpacked(codes), scales.double(), NV_BLOCK) * whole


def _blocks(numbers: Tensor, scales: Tensor, size: int) -> Tensor:
    if scales.shape[:-1] != numbers.shape[:-1] or scales.shape[-1] * size != numbers.shape[-1]:
        raise Declined(f"scales {list(scales.shape)} do not fit codes for {list(numbers.shape)}")
    return numbers * scales.repeat_interleave(size, -1)


def from_tiles(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Block scales [rows, columns] from the order that kernels want, padded to multiples of 128 and 4."""
    high, wide = math.ceil(rows / 128), math.ceil(columns / 4)
    if scales.numel() != high * wide * 512:
        raise Declined(f"{scales.numel()} scales are no tiles for {rows} rows of {columns}")
    tiles = scales.reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * 128, wide * 4)[:rows, :columns]


_EXAMINED = 32
"""Chosen: numbers, those furthest off, that show why a product is wrong."""
_EXPLAINED = 0.05
"""Chosen: what may be left of their squares where a cause explains them; a row alone has few that are cut off."""


def cut_off(a: Tensor, b: Tensor, left: Tensor, right: Tensor, exact: Tensor, mine: Tensor) -> str:
    """Why mine [m, n] is off: without VNNI, oneDNN adds two products (a + 128) b in 16 bits, which end at 32767 [oneDNN
    documentation, Nuances of int8 Computations]. "" where that does not explain the numbers that are furthest off.
    Codes a int8 [m, k], b int8 [k, n]; scales left [m], right [n], float64; exact: their product (and a bias)."""
    if a.dtype != torch.int8 or b.dtype != torch.int8 or a.shape[1] % 2 or not mine.numel():
        return ""
    numbers = mine.double()
    off = (numbers - exact).abs()
    at = off.reshape(-1).topk(min(_EXAMINED, off.numel())).indices
    rows, columns = at // off.shape[1], at % off.shape[1]
    terms = (a[rows].long() + 128) * b.T[columns].long()
    whole = (terms[:, 0::2] + terms[:, 1::2]).clamp(-32768, 32767).sum(1) - 128 * b.T[columns].long().sum(1)
    plain = (a[rows].long() * b.T[columns].long()).sum(1)
    cut = exact[rows, columns] + (whole - plain) * left[rows] * right[columns]
    far, near = ((numbers[rows, columns] - v).abs() for v in (exact[rows, columns], cut))
    explained = bool((whole != plain).any()) and float((near**2).sum()) < _EXPLAINED * float((far**2).sum())
    if not explained:
        return ""
    return "as if pairs of its products were added in 16 bits and cut off there: oneDNN without VNNI"


_FP8 = {"float8_e4m3fn": (448.0, 3), "float8_e5m2": (57344.0, 2), "float8_e4m3fnuz": (240.0, 3)}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def name_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


WIDE = 1 << 24
"""Chosen: elements of a weight that is widened whole, and kept so for its module's calls: 192 MiB with its sizes."""
COLUMNS = 1 << 19
"""Chosen: elements of a larger weight that are widened at a time: 4 MiB of float64, which a processor's caches hold."""
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


def weight_of(call: Call) -> Any:
    """The weight as numbers [outputs, inputs]: float64, or as it is stored where it has WIDE elements or more, of which
    a few rows are widened at a time. Raises Declined where its form is not known."""
    stored = call.params.get("weight")
    if stored is not None and stored.numel() >= WIDE and stored.dtype in _PLAIN and "qweight" not in call.params:
        return stored
    return call.once(weight_of, lambda: _weight(call))


def widened(weight: Any) -> Iterator[tuple[slice, Any]]:
    """Of what `weight_of` gives: which outputs, and their rows in float64."""
    if weight.dtype == torch.float64:
        yield slice(0, len(weight)), weight
        return
    step = max(1, COLUMNS // weight.shape[1])
    for a in range(0, len(weight), step):
        yield slice(a, a + step), weight[a : a + step].double()


def _weight(call: Call) -> Any:
    if "qweight" in call.params:
        return _packed(call)
    weight = call.params.get("weight", call.params.get("weight_packed"))
    if weight is not None and weight.dtype == torch.uint8:
        return _four_bits(call, weight)
    if weight is None or name_of(weight) not in (*_FP8, "int8"):
        return call.param("weight")
    for name in ("weight_scale_inv", "weight_scale"):
        if name in call.params:
            return scaled(call.param("weight"), call.param(name))
    raise Declined("the scale of its quantised weight was not captured")


def scaled(weight: Any, scale: Any) -> Any:
    """q * scale for float64 weight [outputs, inputs]; scale of one element, [outputs], [outputs, 1] or by block."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    outputs, inputs = weight.shape
    if scale.numel() == outputs:
        return weight * scale.reshape(-1, 1)
    if scale.dim() == 2:
        rows, columns = (block_size(n, k) for n, k in zip(weight.shape, scale.shape, strict=True))
        wide = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        if wide.shape == weight.shape:
            return weight * wide
    raise Declined(f"scales {list(scale.shape)} do not fit a weight {list(weight.shape)}")


def block_size(size: int, count: int) -> int:
    """The block size that cuts ``size`` into ``count``, the last perhaps short: a power of two where one does."""
    least = math.ceil(size / count)
    power = 1 << max(least - 1, 0).bit_length()
    return power if math.ceil(size / power) == count else least


def unpack_columns(packed: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """int32 [n, m] of eight 4-bit numbers along dimension 1, number i in place order[i]: int64 [n, 8 m]."""
    shifts = torch.arange(0, 32, 4).reshape(1, 1, 8)
    numbers = (packed.long().unsqueeze(2) >> shifts) & 15
    places = torch.empty_like(numbers)
    places[:, :, list(order)] = numbers
    return places.flatten(1)


def gptq(qweight: Any, qzeros: Any, scales: Any, g_idx: Any | None = None) -> Any:
    """float64 [outputs, inputs] from GPTQ's 4-bit checkpoint: qweight int32 [inputs / 8, outputs], qzeros int32
    [groups, outputs / 8], scales [groups, outputs], g_idx [inputs] the group of each input or None for equal runs."""
    return _from_groups(unpack_columns(qweight.T).T, unpack_columns(qzeros) + 1, scales, g_idx)


def awq(qweight: Any, qzeros: Any, scales: Any) -> Any:
    """float64 [outputs, inputs] from AWQ's: qweight int32 [inputs, outputs / 8], qzeros [groups, outputs / 8],
    scales."""
    return _from_groups(unpack_columns(qweight, _AWQ_ORDER), unpack_columns(qzeros, _AWQ_ORDER), scales)


def _from_groups(q: Any, zeros: Any, scales: Any, g_idx: Any | None = None) -> Any:
    """(q - zero) * scale of each input's group, float64 [outputs, inputs]."""
    if g_idx is None or not g_idx.numel():
        g_idx = torch.arange(len(q)) // math.ceil(len(q) / len(scales))
    group = g_idx.long()
    return ((q - zeros[group]).double() * scales.double()[group]).T


def _packed(call: Call) -> Any:
    missing = [n for n in ("qweight", "qzeros", "scales") if n not in call.params or not call.params[n].numel()]
    if missing:
        raise Declined(f"parameter {missing[0]} was not captured as the checkpoint has it")
    q, z, s = (call.params[n] for n in ("qweight", "qzeros", "scales"))
    outputs = s.shape[1]
    decline_if(q.dtype != torch.int32 or z.shape[-1] * 8 != outputs, "its packed weight is not of 4 bits in int32")
    if q.shape[1] == outputs:
        return gptq(q, z, s, call.params.get("g_idx"))
    if q.shape[1] * 8 == outputs:
        return awq(q, z, s)
    raise Declined("its packed weight has an unknown form")


def _four_bits(call: Call, codes: Any) -> Any:
    """MXFP4's or NVFP4's numbers, by the dtype of their scales."""
    scales = call.params.get("weight_scale")
    if scales is None or not scales.numel():
        raise Declined("the scale of its quantised weight was not captured")
    if "input_scale" in call.params or "input_global_scale" in call.params:
        raise Declined("activations of 4 bits have no reference")
    if scales.shape[-1] * MX_BLOCK == codes.shape[-1] * 2:
        return mxfp4(codes, scales)
    if "weight_scale_2" in call.params:  # ModelOpt multiplies by it
        return nvfp4(codes, scales, float(call.param("weight_scale_2").max()))
    if "weight_global_scale" in call.params:  # compressed-tensors divides by it
        return nvfp4(codes, scales, 1.0 / float(call.param("weight_global_scale").max()))
    raise Declined("the scale of its quantised weight was not captured")


def activation_noise(call: Call, x: Any) -> Any | None:
    """Standard error that quantising x inside the kernel adds to it, float64 like x; None where x stays as it is.

    Kernels of 8-bit float and int8 weights quantise x (W8A8): static: ``input_scale``; dynamic: the largest of a row.
    The error is half a step of that scale, uniformly: step / sqrt(12). Weight-only 4-bit formats leave x alone, but for
    vLLM's kernel on CPUs with AMX (VLLM_CPU_INT4_W4A8), which quantises each row to int8."""
    weight = call.params.get("weight")
    kind = name_of(weight) if weight is not None else ""
    if kind == "int8" or call.attrs.get("use_w4a8"):
        step = activation_step(call, x)
        return (step / math.sqrt(12)).expand_as(x)
    if kind in _FP8:
        top, bits = _FP8[kind]
        # relative half steps of a float with so many bits, and the fixed step of its subnormals
        return x.abs() * 2.0 ** -(bits + 1) / math.sqrt(3) + _step(call, x, top) * 2.0**-9
    return None


def activation_step(call: Call, x: Any) -> Any:
    """The scale by which a W8A8 kernel makes int8 of x [..., k], float64 [..., 1]: ``input_scale``, or of each row."""
    return _step(call, x, 127.0)


def _step(call: Call, x: Any, top: float) -> Any:
    static = call.params.get("input_scale")
    if static is not None and static.numel():
        return static.double().max().reshape(*[1] * x.dim())
    return x.abs().amax(-1, keepdim=True) / top
