"""Rotary position embeddings: which frequencies, which pairs of channels, which position of a token.

Formulas: x1 cos - x2 sin, x2 cos + x1 sin with angles p * base**(-2i/d) [Su et al., arXiv 2104.09864]; pairs are halves
(GPT-NeoX) or adjacent channels (GPT-J); linear interpolation [Chen et al., arXiv 2306.15595]; dynamic NTK as vLLM and
transformers publish it; YaRN [Peng et al., arXiv 2309.00071, sections 3.2 to 3.4], DeepSeek's quotient of two of its
magnitudes [DeepSeek-V2's published code]; Llama 3's smoothing by wavelength [its published code]; M-RoPE: sections of
the frequencies take a token's temporal, height and width position [Qwen2-VL, arXiv 2409.12191]. Cosines are computed
from the module's attributes and config.json, not taken from its cache: a wrong cache is a fault like any other. Noise:
the cache's rounding, the products', and the float32 angle's. A rounded cosine is that of all heads, and nearly that of
the next position (`groups` and `shared`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.dump.block_code import CODE
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if, device_kernel, reference, required
from vllm_accprobe.opcheck.references.parts import Arguments, on, reshaped, unit_of
from vllm_accprobe.opcheck.roundings import ROUNDED, subnormal


def plain_frequencies(dim: int, base: float) -> Any:
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def llama3_frequencies(dim: int, base: float, s: Mapping[str, Any]) -> Any:
    f = plain_frequencies(dim, base)
    factor, low, high = float(s["factor"]), float(s["low_freq_factor"]), float(s["high_freq_factor"])
    turns = float(s["original_max_position_embeddings"]) * f / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return f * smooth + f / factor * (1.0 - smooth)


def yarn_frequencies(dim: int, base: float, s: Mapping[str, Any]) -> Any:
    f = plain_frequencies(dim, base)
    original = float(s["original_max_position_embeddings"])

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(float(s.get("beta_fast", 32))), channel(float(s.get("beta_slow", 1)))
    if s.get("truncate", True):  # gpt-oss does not
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return f * (1.0 - ramp) + f / float(s["factor"]) * ramp


def yarn_magnitude(factor: float, m: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def dynamic_frequencies(dim: int, base: float, factor: float) -> Any:
    """As vLLM has it: one cache for the longest sequence, s = factor of the trained length."""
    return plain_frequencies(dim, base * (factor * factor - (factor - 1.0)) ** (dim / (dim - 2)))


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_scaling or rope_parameters of config.json under one set of names; {} where there are none."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found["rope_type"] = found.get("rope_type", found.get("type", "default"))
    return found


def angles_of(call: Call, dim: int) -> tuple[Any, float]:
    """Frequencies, float64 [dim / 2], and the magnitude of cos and sin. Raises Declined where they are not known."""
    base, s, cls = float(call.attr("base")), settings(call.config), call.cls
    s.setdefault("original_max_position_embeddings", call.attrs.get("max_position_embeddings"))
    try:
        if cls in ("RotaryEmbedding", "MRotaryEmbedding", "MRotaryEmbeddingInterleaved"):
            return plain_frequencies(dim, base), 1.0
        if cls == "Gemma4RotaryEmbedding":  # what does not turn has a frequency of 0
            turned = torch.arange(dim // 2) < call.attrs["rope_angles"]
            return plain_frequencies(dim, base) * turned, 1.0
        if cls == "Llama3RotaryEmbedding":
            return llama3_frequencies(dim, base, s), 1.0
        if cls == "LinearScalingRotaryEmbedding":
            return plain_frequencies(dim, base) / float(s["factor"]), 1.0
        if cls == "DynamicNTKScalingRotaryEmbedding":
            return dynamic_frequencies(dim, base, float(s["factor"])), 1.0
        if cls == "YaRNScalingRotaryEmbedding":
            factor, both = float(s["factor"]), [float(s.get(k) or 0) for k in ("mscale", "mscale_all_dim")]
            up, down = (yarn_magnitude(factor, m) for m in (both if all(both) else (1.0, 0.0)))
            size = float(s.get("attention_factor") or up / down)
            return yarn_frequencies(dim, base, s), size * float(s.get("attn_factor", 1.0))
        if cls == "DeepseekScalingRotaryEmbedding":
            factor = float(s["factor"])
            up, down = (yarn_magnitude(factor, float(s.get(k, d))) for k, d in (("mscale", 1), ("mscale_all_dim", 0)))
            return yarn_frequencies(dim, base, s), up / down
        if cls == "Phi3LongRoPEScaledRotaryEmbedding":
            kind = "long" if call.attr("use_long_rope") else "short"
            by = torch.tensor(call.attrs[f"{kind}_factor"], dtype=torch.float64)
            return plain_frequencies(dim, base) / by, float(call.attrs[f"{kind}_mscale"])
    except (KeyError, TypeError):
        raise Declined("its scaling is neither recorded nor in config.json") from None
    raise Declined(f"the frequencies of {cls} are not known")


def turn(x: Any, parts: int) -> Any:
    """x [..., d] with each two consecutive parts of it (a, b) as (-b, a): 2 parts are halves, d are pairs."""
    pairs = x.unflatten(-1, (parts // 2, 2, -1))
    a, b = pairs.unbind(-2)
    return torch.stack((-b, a), -2).flatten(-3)


def rotate(x: Any, cos: Any, sin: Any, neox: bool) -> Any:
    """x [..., d] turned by cos and sin [..., d / 2], which are broadcast."""
    return x * _both(cos, neox) + turn(x, 2 if neox else x.shape[-1]) * _both(sin, neox)


def table_rotated(x: Any, cos: Any, sin: Any, turned: Any, unit: float) -> Expected:
    """x cos + turned sin with tables over the whole width; each product may be rounded. Raises Declined: no fit."""
    a, b = x * cos, turned * sin
    decline_if(a.shape != x.shape or b.shape != x.shape, "its cosines do not fit its input")
    noise = ROUNDED * unit * (a * a + b * b).sqrt()
    return Expected(a + b, noise, bound=2.0 * unit * (a.abs() + b.abs()) + subnormal(unit, 2.0))


def rotation_errors(x: Any, angle: Any, neox: bool, step: float) -> tuple[Any, Any]:
    """(noise, bound) of each element, by rounded cosines and products, and the float32 angle: x1 (cos + e) - x2 (sin +
    f) with e of the size of cos and f of that of sin, so at most of 1. Bound: a rounded cosine and a rounded product
    each of x1 and x2, and the angle's three float32 roundings."""
    a, b = x.chunk(2, -1) if neox else (x[..., ::2], x[..., 1::2])
    root, size = _both((a * a + b * b).sqrt(), neox), _both(a.abs() + b.abs(), neox)
    relative = (2.0 * (ROUNDED * step) ** 2 + (angle.abs() * 2.0**-23) ** 2 + 2.0**-46).sqrt()
    least = subnormal(step, 2.0 + size)  # subnormal products, and cosines
    bound = size * _both(2.0 * step + angle.abs() * 2.0**-22 + 2.0**-22, neox) + least
    return root * _both(relative, neox), bound


def _both(half: Any, neox: bool) -> Any:
    return torch.cat((half, half), -1) if neox else torch.stack((half, half), -1).flatten(-2)


def sections(angle: Any, section: list[int], interleaved: bool) -> Any:
    """angle [3, tokens, d / 2] → [tokens, d / 2]: each channel with the temporal, height or width position."""
    channel = torch.arange(angle.shape[-1])
    if interleaved:
        kind = torch.zeros_like(channel)
        for k in (1, 2):
            kind[(channel % 3 == k) & (channel < 3 * section[k])] = k
    else:
        kind = torch.repeat_interleave(torch.arange(len(section)), torch.tensor(section))
    return angle.gather(0, kind.expand(1, *angle.shape[1:])).squeeze(0)


def _frequencies_of_transformers(call: Call) -> dict[str, Expected]:
    """Cosines and sines of both halves, or of adjacent channels where the source repeats each; from the module's own
    frequencies; or one complex number a channel pair."""
    words = set(call.attrs.get(CODE) or ())
    adjacent = "repeat_interleave" in words
    decline_if(adjacent and "cat" in words, "its source lays the frequencies out in sections")
    decline_if("rope_init_fn" in words, "its source computes its frequencies anew at each call")
    positions = required(call.maybe("position_ids", "positions", "1"), "its frequencies were not captured")
    scale, out = float(call.attr("attention_scaling", default=1.0)), call.outputs["output.0"]
    angle = positions.double().unsqueeze(-1) * call.param("inv_freq")
    decline_if(angle.dim() != out.dim(), "its positions have an unknown form")
    if out.is_complex():
        return {"output.0": Expected(torch.polar(torch.full_like(angle, scale), angle))}
    noise = _both(scale * angle.abs() * 2.0**-23 + 2.0**-23, not adjacent)
    both = _both(angle, not adjacent)
    return {"output.0": Expected(scale * both.cos(), noise), "output.1": Expected(scale * both.sin(), noise)}


def token_angles(call: Call, dim: int) -> tuple[Any, float]:
    """Angle of each token and channel pair, float64 [tokens, dim / 2], and the magnitude."""
    frequencies, size = angles_of(call, dim)
    angle = call.wide("positions", "0").unsqueeze(-1) * frequencies
    if angle.dim() == 3 and angle.shape[0] == 3:
        s = settings(call.config)
        section: Any = call.attrs.get("mrope_section") or s.get("mrope_section")
        decline_if(not section or sum(section) != dim // 2, "mrope_section is neither recorded nor in config.json")
        angle = sections(angle, list(section), bool(s.get("mrope_interleaved", False)))
    elif angle.dim() != 2:
        raise Declined("its positions have an unknown form")
    return angle, size


@reference("*RotaryEmbedding", "MRotaryEmbeddingInterleaved")
def rotary(call: Call) -> dict[str, Expected]:
    """Of query and key, [tokens, heads * size] or [tokens, heads, size]; channels past rotary_dim pass through."""
    if "inv_freq" in call.params and call.maybe("query", "1") is None:
        return _frequencies_of_transformers(call)
    neox, dim = way_of(call)
    cache = call.params.get("cos_sin_cache")
    step = call.unit if cache is None else max(unit_of(cache), call.unit)
    angle, size = token_angles(call, dim)
    angle = angle.unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    found: dict[str, Any] = {}
    for roles, x, heads in query_and_key(call):
        y = turned(heads.double(), cos, sin, neox, step, angle, size=size)
        found |= dict.fromkeys(roles, reshaped(y, x.shape))
    return found


def way_of(call: Call) -> tuple[bool, int]:
    """(whether pairs are halves, how many channels of a head turn)."""
    head = int(call.attr("head_size"))
    return bool(call.attr("is_neox_style", default=True)), int(call.attr("rotary_dim", default=head))


def by_table(call: Call, heads: Any, cos: Any, sin: Any) -> Any:
    """Heads [tokens, heads, size] turned by cos and sin [tokens, 1, d / 2]; channels behind those pass through."""
    neox, dim = way_of(call)
    return torch.cat((rotate(heads[..., :dim], cos, sin, neox), heads[..., dim:]), -1)


def query_and_key(call: Call) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Query and key, with the roles that their results may stand under, and as [tokens, heads, size]."""
    for place, (name, role) in enumerate((("query", "output.0"), ("key", "output.1")), 1):
        x = call.maybe(name, str(place))
        if x is not None:
            heads = x.reshape(x.shape[0], -1, int(call.attr("head_size")))
            yield (role, f"inplace.{name}", f"inplace.{place}"), x, heads


def turned(
    x: Any, cos: Any, sin: Any, neox: bool, step: float, angle: Any, *, offset: int = 0, size: float = 1.0
) -> Expected:
    """x [..., d] with the channels from ``offset`` on turned, so far as cos and sin go; the others pass through. step:
    one rounding of cosines and products; angle: as in `rotation_errors`; size: of cos and sin."""
    end = offset + 2 * cos.shape[-1]
    turn = x[..., offset:end]
    parts = rotate(turn, cos, sin, neox), *rotation_errors(turn, angle, neox, step)
    y, noise, bound = x.clone(), torch.zeros_like(x), torch.zeros_like(x)
    for whole, part in zip((y, noise, bound), parts, strict=True):
        whole[..., offset:end] = size * part
    return Expected(y, noise, bound=bound, groups=end - offset, shared=True)


@reference("ApplyRotaryEmb")
def apply_rotary(call: Call) -> Expected:
    """x [..., tokens, heads, size], cosines and sines [tokens, size / 2]."""
    x, cos, sin = call.wide("x", "0"), call.wide("cos", "1"), call.wide("sin", "2")
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return turned(x, cos, sin, bool(call.attr("is_neox_style", default=True)), call.unit, torch.zeros_like(cos))


@reference("torch.ops._C.rotary_embedding", "torch.ops.vllm.flashinfer_rotary_embedding")
def rotary_embedding(call: Call) -> dict[str, Expected]:
    """(positions, query, key or None, head_size, cos_sin_cache, is_neox, ...), turned in place."""
    f = Arguments(call, "positions query key head_size cos_sin_cache is_neox rope_dim_offset inverse")
    positions, head, neox = f["positions"], int(f["head_size"]), bool(f["is_neox"])
    cos, sin = f.wide("cos_sin_cache")[0][positions.flatten().long()].unsqueeze(1).chunk(2, -1)
    sin, still = -sin if f["inverse"] else sin, torch.zeros_like(cos)
    found = {}
    for place, name in ((1, "query"), (2, "key")):
        x = f.wide_or_none(name)
        if x is not None:
            heads = x.reshape(positions.numel(), -1, head)
            y = turned(heads, cos, sin, neox, call.unit, still, offset=int(f["rope_dim_offset"] or 0))
            found[f"inplace.input.{place}"] = replace(reshaped(y, x.shape), bound=None)
    return found


@device_kernel("*RotaryEmbedding", "MRotaryEmbeddingInterleaved")
def rotary_kernel(call: Call) -> dict[str, Any]:
    """Cosines and sines in float64 on the CPU, rounded to the dtype; the rotation itself on the device."""
    angle, size = token_angles(on(call, "cpu"), way_of(call)[1])
    found: dict[str, Any] = {}
    for roles, x, heads in query_and_key(call):
        cos, sin = ((size * f(angle)).to(x.dtype).to(x.device).unsqueeze(1) for f in (torch.cos, torch.sin))
        found |= dict.fromkeys(roles, by_table(call, heads, cos, sin).reshape(x.shape))
    return found
