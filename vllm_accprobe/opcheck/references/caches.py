"""How keys and values lie in the blocks of a cache, and what caches of 8 bits contain.

The problem: the same keys lie in memory in half a dozen orders, and which one a call has is in its name, its shapes, or
nowhere. The idea: a layout is a shape and an order of its dimensions: a block's memory, viewed in that shape and
permuted, is [slots, heads, width], and backwards.
Keys and values that pass through a cache of 8 bits are read back as x / scale rounded to e4m3, e5m2 or int8. That
rounding is known to the bit from what was written: with keys and values rounded so, the reference is the kernel's own.
The same reference without it says how far the format alone moves the output (`CacheRounding`). Scales: of a layer, as
its kernel has them; of a token and a head, the largest over the largest code [vLLM's *_per_token_head].
Elsewhere: attention over blocks (paged_attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import CacheRounding, Declined, decline_if

Tensor = Any  # a torch.Tensor
_KINDS = {
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_inc": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
    "int8": "int8", "int8_per_token_head": "int8", "fp8_per_token_head": "float8_e4m3fn",
}  # fmt: skip
"""By vLLM's word for a kind of cache, the dtype of its codes."""
_SLACK = 1.0 + 2.0**-8
"""Chosen: how far beyond half a step a code may be: x times 1 / scale in float32 or bfloat16 instead of x / scale."""


@dataclass(frozen=True)
class BlockLayout:
    """name; shape: of a block's memory, from slots, heads, width; order: of its dimensions, that makes them these."""

    name: str
    shape: Callable[[int, int, int], Sequence[int]]
    order: tuple[int, ...]

    def rows(self, cache: Tensor, slots: int, heads: int, width: int) -> Tensor:
        """``cache`` [blocks, ...] as [blocks, slots, heads, width]."""
        shape = self.shape(slots, heads, width)
        if math.prod(shape) != math.prod(cache.shape[1:]):
            raise Declined(f"a block of {list(cache.shape[1:])} is none of {slots} slots, {heads} heads, {width} wide")
        wide = cache.contiguous().reshape(len(cache), *shape)
        return wide.permute(0, *(d + 1 for d in self.order)).reshape(len(cache), slots, heads, width)

    def packed(self, rows: Tensor, like: Tensor) -> Tensor:
        """[blocks, slots, heads, width] in this layout, in the shape of ``like``."""
        shape = self.shape(*rows.shape[1:])
        back = [self.order.index(d) for d in range(len(self.order))]
        turned = rows.reshape(len(rows), *(shape[d] for d in self.order)).permute(0, *(b + 1 for b in back))
        return turned.reshape(like.shape)


TOKENS = BlockLayout("slots, heads, width", lambda s, h, w: (s, h, w), (0, 1, 2))
HEADS = BlockLayout("heads, slots, width", lambda s, h, w: (h, s, w), (1, 0, 2))
HEADS_TURNED = BlockLayout("heads, width, slots", lambda s, h, w: (h, w, s), (2, 0, 1))
NZ = BlockLayout("heads * width / 16, slots, 16", lambda s, h, w: (h * w // 16, s, 16), (1, 0, 2))
AMX_KEY = BlockLayout(
    "heads, slots / 16, width / 2, 16, 2", lambda s, h, w: (h, s // 16, w // 2, 16, 2), (1, 3, 0, 2, 4)
)
AMX_VALUE = BlockLayout(
    "heads, width / 16, slots / 2, 16, 2", lambda s, h, w: (h, w // 16, s // 2, 16, 2), (2, 4, 0, 1, 3)
)
CPU = {"amx": (AMX_KEY, AMX_VALUE), "vec": (HEADS_TURNED, HEADS), "vec16": (HEADS_TURNED, HEADS)}
"""vLLM's CPU kernels, by their word for the instruction set: layouts of keys and of values."""


def split_key(x: int) -> BlockLayout:
    """vLLM's first layout of keys, with x numbers of a head together."""
    return BlockLayout("heads, width / x, slots, x", lambda s, h, w: (h, w // x, s, x), (2, 0, 1, 3))


def numbers(cache: Tensor, kind: str, scale: Any) -> Tensor:
    """What a cache's entries stand for, float64: codes of 8 bits times ``scale``, a number or a tensor."""
    scale = scale.double() if isinstance(scale, torch.Tensor) else float(scale if scale is not None else 1.0)
    dtype = code_dtype(cache, kind)
    if dtype is None:
        return cache.double()
    return cache.view(dtype).double() * scale


def code_dtype(cache: Tensor, kind: str) -> Any | None:
    """The dtype of a cache's codes; None where it holds the model's numbers. Raises Declined."""
    if cache.dtype.itemsize > 1:
        return None
    if cache.dtype not in (torch.uint8, torch.int8):
        return cache.dtype
    decline_if(kind not in _KINDS or kind == "fp8_per_token_head", f"a cache of kind {kind} has no reference")
    return getattr(torch, _KINDS[kind])


def largest(dtype: Any) -> float:
    """The largest code's number."""
    return 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)


def half_step(exact: Tensor, dtype: Any) -> Tensor:
    """Half the distance of the two codes around each of ``exact``, float64, none of which is beyond the largest."""
    if dtype == torch.int8:
        return torch.full_like(exact, 0.5)
    bits, low = (3, -9) if "e4m3" in str(dtype) else (2, -16)
    _, exponent = torch.frexp(exact.abs().clamp(min=torch.finfo(torch.float64).tiny))
    return torch.ldexp(torch.full_like(exact, 0.5), (exponent - 1 - bits).clamp(min=low))


def coded(exact: Tensor, mine: Tensor, dtype: Any, keep: bool = True, error: Tensor | float = 0.0) -> Tensor:
    """What ``exact``, float64, may become in ``dtype``: mine's own codes where they are within half a step and
    ``error`` of it, as either neighbour may stand for a number in the middle (and where ``keep``), else the nearest."""
    if dtype == torch.int8:
        nearest = exact.round().clamp(-128, 127).to(torch.int8)
    else:
        limit = largest(dtype)
        exact = exact.clamp(-limit, limit)
        nearest = exact.float().to(dtype)
    if not keep:
        return nearest.view(mine.dtype)
    half = half_step(exact, dtype)
    codes_ = mine.view(dtype).double()
    right = (codes_ - exact).abs() <= half * _SLACK + error + 2.0**-20 * exact.abs()
    return torch.where(right, mine.view(dtype).view(torch.uint8), nearest.view(torch.uint8)).view(mine.dtype)


_WHOLE = ("", "auto", "bfloat16", "float16", "half", "float", "float32")
_DOUBT = 2.0**-8
"""Chosen: relative error of x over a scale that is no power of two, where a kernel multiplies by its inverse in
bfloat16: of a number so near to the middle of two codes either may stand there."""
_OUT = 2.0**-8
"""Derived: a rounding of bfloat16, the coarsest dtype that an output has."""
_CLEARLY = 2.0
"""Chosen: cutting off is tried where an output is off by more than this many of what is usual."""
Attend = Callable[[Tensor, Tensor, "Tensor | None", "Tensor | None"], "tuple[Tensor, Tensor, Tensor]"]
"""(keys, values, standard error of scores and what they are off by at most, or None) → (output, noise, bound)."""
FAR = 30.0
"""Exponent from which a bound says nothing."""


@dataclass(frozen=True)
class CacheFormat:
    """kind: vLLM's word; dtype: of a code; scales: of keys and values, None where each token and head has its own;
    toward_zero: codes are cut off, as vLLM's own kernel does with AVX-512, and off by up to a whole step."""

    kind: str
    dtype: Any
    scales: tuple[float, float] | None
    toward_zero: bool = False

    @property
    def label(self) -> str:
        return f"{self.kind}, cut off toward zero," if self.toward_zero else self.kind

    def read_back(self, rows: Tensor, which: int) -> tuple[Tensor, Tensor, Tensor]:
        """Float64 ``rows`` [m, heads, width] as they are read back; how far a code may right be from that; and half
        a step of the format there. which: 0 for keys, 1 for values."""
        if self.scales is not None:
            scale: Tensor = torch.tensor(self.scales[which], dtype=torch.float64)
        else:
            scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-10) / largest(self.dtype)
        exact = rows / scale
        read = self._nearest(exact)
        doubt = torch.zeros_like(exact)
        mantissa, _ = torch.frexp(scale)
        if not bool((mantissa == 0.5).all()):
            doubt = torch.maximum(*((self._nearest(exact * (1.0 + d)) - read).abs() for d in (-_DOUBT, _DOUBT)))
        clipped = (exact.abs() - largest(self.dtype)).clamp(min=0.0)
        off = half_step(exact, self.dtype) * (2.0 if self.toward_zero else 1.0)
        return read * scale, doubt * scale, torch.maximum(off, clipped) * scale

    def _nearest(self, exact: Tensor) -> Tensor:
        mine = torch.zeros(exact.shape, dtype=torch.uint8)
        codes = coded(exact, mine, self.dtype, keep=False)
        read = codes.view(self.dtype).double()
        if not self.toward_zero:
            return read
        # A number's code less one is the next one toward zero, for either sign.
        return torch.where(read.abs() > exact.abs(), (codes - 1).view(self.dtype).double(), read)


def cut_off(eight: CacheFormat | None, out: Tensor, noise: Tensor, mine: Tensor, rows: Tensor) -> CacheFormat | None:
    """The same format with codes cut off, where ``out``, by the nearest codes, is too far from ``mine`` to be a right
    kernel's; whoever asks takes it where it is nearer. All [n, ...]; rows: bool [n], which are known."""
    if eight is None or eight.dtype == torch.int8 or eight.toward_zero or not bool(rows.any()):
        return None
    off, usual = (t[rows].norm() for t in (out - mine, noise.expand_as(out) + _OUT * out.abs()))
    return replace(eight, toward_zero=True) if bool(off > _CLEARLY * usual) else None


def cache_format(attrs: Mapping[str, Any]) -> CacheFormat | None:
    """Of an attention's module; None for the model's own numbers. Raises Declined where its numbers are not known."""
    kind = str(attrs.get("impl.kv_cache_dtype") or attrs.get("kv_cache_dtype") or "auto")
    if kind in _WHOLE:
        return None
    decline_if(kind not in _KINDS, f"what a cache of kind {kind} holds is not known")
    dtype = getattr(torch, _KINDS[kind])
    if kind.endswith("_per_token_head"):
        return CacheFormat(kind, dtype, None)
    values = [attrs.get(f"_{x}_scale_float") for x in "kv"]
    scales = [float(s) for s in values if isinstance(s, (int, float)) and s > 0]
    decline_if(len(scales) < 2, f"the scales of its {kind} cache were not captured")
    return CacheFormat(kind, dtype, (scales[0], scales[1]))


def through_cache(
    eight: CacheFormat, q: Tensor, written: tuple[Tensor, Tensor], p: Tensor, plain: Tensor, scale: float,
    attend: Attend,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(output, noise, bound) of keys and values ``written`` [m, kv heads, d] that were read back from the cache; then
    ``plain``, the output without it, and what `by_format` gives. p: probabilities without it [heads, n, m]."""
    (k_read, k_doubt, k_half), (v_read, v_doubt, v_half) = (eight.read_back(x, i) for i, x in enumerate(written))
    share = q.shape[1] // k_read.shape[1]
    k_half, k_doubt, v, v_half, v_doubt = (
        x.repeat_interleave(share, 1) for x in (k_half, k_doubt, written[1], v_half, v_doubt)
    )
    # an inverse that is too large or too small moves all codes the same way
    signs = written[0].sign().repeat_interleave(share, 1)
    along = torch.einsum("nhd,mhd->hnm", q, signs * k_doubt).abs()
    doubt = torch.maximum(torch.einsum("nhd,mhd->hnm", q * q, k_doubt**2).sqrt(), along) * scale
    most = torch.einsum("nhd,mhd->hnm", q.abs(), k_doubt) * scale
    out, noise, bound = attend(k_read, v_read, *((doubt, most) if bool(doubt.any()) else (None, None)))
    if bool(v_doubt.any()):
        own = (p * p @ (v_doubt**2).transpose(0, 1)).transpose(0, 1)
        # with the keys that were read, which may be examined otherwise
        doubted = v_doubt[:, ::share]
        along = attend(k_read, written[1].sign() * doubted, None, None)[0]
        noise = (noise**2 + torch.maximum(own, along**2)).sqrt()
        moved, _, further = attend(k_read, doubted, doubt, most)
        bound = bound + moved + further
    usual, most = by_format(q, v, (k_half, v_half), p, plain, scale)
    return out, noise, bound, plain, usual, most


def by_format(
    q: Tensor, v: Tensor, half: tuple[Tensor, Tensor], p: Tensor, out: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(standard error, bound) of an output by the format's step alone: float64 [n, heads, width]. q [n, heads, d]; v,
    and half a step of keys and of values [m, heads, d]; p [heads, n, m]: probabilities with keys as they were written;
    out: the output with them.

    Derived. k and v are off by at most half a step each, e(x) = scale 2**(exponent - bits - 1), 0.5 scale for int8,
    evenly spread, so with a variance of e**2 / 3 [B. Widrow and I. Kollar, Quantization Noise, 2008]. Standard error,
    in first order: sum_j p_j**2 (e(v_j)**2 / 3 + s**2 sum_d q_d**2 e(k_jd)**2 / 3 (v_j - o)**2), s being the scale of
    scores. Bound: a score is off by S_j = s sum_d |q_d| e(k_jd); a probability becomes p_j exp(x_j) / Z, |x_j| <= S_j
    and exp(-m) <= Z <= M for m = sum p S [Jensen], M = sum p exp(S), and changes by at most p_j c_j, c_j = max(exp(S_j
    + m) - 1, 1 - exp(-S_j) / M); the output, as these changes add up to 0, by sum_j p_j (1 + c_j) e(v_j) + sum_j p_j
    c_j (|v_j| + |o|)."""
    k_half, v_half = half
    seen = p > 0
    by_head, halves = v.transpose(0, 1), v_half.transpose(0, 1)
    variance = torch.where(seen, torch.einsum("nhd,mhd->hnm", q * q, k_half**2) * (scale**2 / 3.0), 0.0)
    w = p * p * variance
    squares = (
        w @ by_head**2 - 2 * out.transpose(0, 1) * (w @ by_head) + out.transpose(0, 1) ** 2 * w.sum(-1, keepdim=True)
    )
    usual = (squares.clamp(min=0.0) + (p * p) @ halves**2 / 3.0).sqrt().transpose(0, 1)
    s = torch.where(seen, torch.einsum("nhd,mhd->hnm", q.abs(), k_half) * scale, 0.0)
    mean, total = (p * s).sum(-1, keepdim=True), (p * s.clamp(max=FAR).exp()).sum(-1, keepdim=True)
    change = torch.maximum((s + mean).clamp(max=FAR).exp() - 1.0, 1.0 - (-s).exp() / total)
    moved = p * change
    own = ((p + moved) @ halves).transpose(0, 1)
    others = (moved @ by_head.abs()).transpose(0, 1)
    return usual, own + others + out.abs() * moved.sum(-1).T.unsqueeze(-1)


def rounding_of(kind: str, outputs: Sequence[Tensor], rows: Tensor) -> CacheRounding:
    """How far the format moves the row of an output that it moves most. outputs: with it, without it, and the two of
    `by_format`, all [n, ...]; rows: bool [n], which are known."""
    out, plain, usual, most = outputs
    moved, size, expected, allowed = (
        t.reshape(len(t), -1)[rows].norm(dim=-1) for t in (out - plain, plain, usual, most)
    )
    size = size.clamp(min=torch.finfo(torch.float64).tiny)
    at = int((moved / size).argmax())
    return CacheRounding(kind, *(float(t[at] / size[at]) for t in (moved, expected, allowed)))
