"""FlashInfer's rotary embeddings: positions told, or counted from bounds and offsets; angles computed, or from a table.

Formulas: rotary.py's. ``rope_scale`` divides positions [S. Chen et al., arXiv 2306.15595]; Llama 3.1's blends f and f /
scale by wavelength [its published code]. ``interleave``: pairs are neighbours. FlashInfer computes angles, sines and
products in float32 and rounds once; other kernels, whose calls `gentest` writes down as FlashInfer's, round cosines and
products to the model's dtype, and both are honest. Fast sines and powers are allowed 2**-20 of an angle (chosen:
__sincosf and __powf are within 2**-21 of small arguments [CUDA C Programming Guide, intrinsic functions]). Functions in
place are judged where the folder tells what they left (formats/flashinfer.py, INPLACE). Signatures: flashinfer 0.7.2,
rope.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.flashinfer.recorded import ends
from vllm_accprobe.opcheck.references.parts import reshaped
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given, place_of
from vllm_accprobe.opcheck.references.rotary import llama3_frequencies, plain_frequencies, turned

Tensor = Any  # a torch.Tensor
_FAST = 8.0
"""Chosen: 2**-20 of an angle, in units of the 2**-23 that rotation_noise allows."""
IN_PLACE = "works in place: FlashInfer's recorder keeps what it was given and not what it made of it"
_BOUNDS = (
    "q k indptr offsets rotary_dim interleave rope_scale rope_theta low_freq_factor high_freq_factor old_context_len"
)
_POSITIONS = _BOUNDS.replace("indptr offsets", "pos_ids")


def _positions(f: Any, rows: int) -> Tensor:
    if f.get("pos_ids") is not None:
        return f["pos_ids"].reshape(-1).double()
    found = torch.zeros(rows, dtype=torch.float64)
    bounds = list(pairwise(ends(f["indptr"], rows)))
    if len(bounds) != f["offsets"].numel():
        raise Declined("its bounds and offsets are not as many")
    for (begin, end), offset in zip(bounds, f["offsets"].reshape(-1), strict=True):
        found[begin:end] = torch.arange(end - begin) + int(offset)
    return found


def _number(f: Any, name: str, default: float) -> float:
    return default if f.get(name) is None else float(f[name])


def _frequencies(f: Any, dim: int, llama31: bool) -> Tensor:
    if not llama31:
        return plain_frequencies(dim, _number(f, "rope_theta", 1e4)) / _number(f, "rope_scale", 1.0)
    told = {
        "factor": _number(f, "rope_scale", 8.0), "low_freq_factor": _number(f, "low_freq_factor", 1.0),
        "high_freq_factor": _number(f, "high_freq_factor", 4.0),
        "original_max_position_embeddings": _number(f, "old_context_len", 8192),
    }  # fmt: skip
    return llama3_frequencies(dim, _number(f, "rope_theta", 5e5), told)


_COMPUTED = [
    f"flashinfer.apply_{llama}rope{how}{place}"
    for llama in ("", "llama31_") for how in ("", "_pos_ids") for place in ("", "_inplace")
]  # fmt: skip


@reference(*_COMPUTED)
def computed(call: Call) -> dict[str, Expected]:
    """(q [tokens, heads, d], k, indptr and offsets [requests] or pos_ids [tokens], rotary_dim, interleave, ...)"""
    names = _POSITIONS if "pos_ids" in call.cls else _BOUNDS
    f = arguments(call, names)
    q, k = given(f, "q", "k")
    dim = int(f["rotary_dim"] or q.shape[-1])
    positions = _positions(f, len(q))
    if len(positions) != len(q):
        raise Declined("its positions are not as many as its rows")
    angle = (positions.unsqueeze(-1) * _frequencies(f, dim, "llama31" in call.cls)).unsqueeze(1)
    found = {}
    for place, x in (("q", q), ("k", k)):
        y = turned(x, angle.cos(), angle.sin(), not f["interleave"], call.unit, _FAST * angle)
        found[_role(call, names, place, ("q", "k").index(place))] = y
    return found


def _role(call: Call, names: str, name: str, output: int) -> str:
    """Where its result stands. Raises Declined for a call in place of which nobody kept the result."""
    if not call.cls.endswith("_inplace"):
        return f"output.{output}"
    role = place_of(call, names, name)
    if role not in call.outputs:
        raise Declined(IN_PLACE)
    return role


_CACHE = "positions query key head_size cos_sin_cache is_neox"


@reference("flashinfer.apply_rope_with_cos_sin_cache", "flashinfer.apply_rope_with_cos_sin_cache_inplace")
def from_table(call: Call) -> dict[str, Expected]:
    """(positions [tokens], query [tokens, heads * size], key, head_size, cos_sin_cache [positions, rotary], is_neox)"""
    f = arguments(call, _CACHE)
    (table,) = given(f, "cos_sin_cache")
    positions = f["positions"].reshape(-1).long()
    if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= len(table)):
        raise Declined("a position lies outside of its table")
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    found = {}
    for output, name in enumerate(("query", "key")):
        (x,) = given(f, name)
        heads = x.reshape(len(positions), -1, int(f["head_size"]))
        y = turned(heads, cos, sin, f["is_neox"] is None or bool(f["is_neox"]), call.unit, torch.zeros_like(cos))
        found[_role(call, _CACHE, name, output)] = reshaped(y, x.shape)
    return found
