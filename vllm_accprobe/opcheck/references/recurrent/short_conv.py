"""Short causal convolutions of each channel, and the last inputs that are kept for the next token.

Formula: y_t = act(sum over j of w_j x_(t - width + 1 + j) + bias), where the width - 1 inputs before a sequence's first
row are those of its state, or 0 [A. Gu and T. Dao, arXiv 2312.00752, section 3.4: the convolution of a Mamba block;
vLLM's causal_conv1d]. The state becomes the last width - 1 inputs, as they are: a copy. Noise and bound: float32 sums
of width products, gamma_width |w| |x| [Higham, ASNA, (3.5)], one rounding before the activation, which has a slope of
1.1 at most.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Call, Declined, Expected, gamma, reference
from vllm_accprobe.opcheck.references.parts import once
from vllm_accprobe.opcheck.references.recurrent.sequences import arguments, given, place_of, runs, slots

_SLOPE = 1.1
"""Derived: the largest slope of x sigmoid(x), 1.0998 at x = 2.4."""
_CHANNELS = 32
"""Channels that lie together in a packed weight [vLLM's CPU build, causal_conv1d_weight_pack; its test packs one]."""
Tensor = Any  # a torch.Tensor


def in_order(packed: Tensor) -> Tensor:
    """A weight [d, width] that was packed for AMX or AVX-512: 32 channels together, of each of them two neighbouring
    taps, then the next two. Raises Declined."""
    d, width = packed.shape[0], packed.numel() // max(packed.shape[0], 1)
    if d % _CHANNELS or width % 2:
        raise Declined(f"a packed weight of {list(packed.shape)} is not known here")
    whole = packed.contiguous().reshape(d // _CHANNELS, width // 2, _CHANNELS, 2)
    return whole.permute(0, 2, 1, 3).reshape(packed.shape)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sums before the activation [t, d], their sizes, the last inputs [d, width - 1]) of one sequence: x [t, d],
    weight [d, width], first [d, width - 1]."""
    width = weight.shape[1]
    whole = torch.cat((first.T, x))
    windows = whole.unfold(0, width, 1)[: len(x)]  # [t, d, width]
    y, size = (windows * weight).sum(-1), (windows * weight).abs().sum(-1)
    if bias is not None:
        y, size = y + bias, size + bias.abs()
    return y, size, whole[len(whole) - width + 1 :].T


def activated(y: Tensor, size: Tensor, width: int, unit: float, silu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(value, noise, bound) of the activated sums, which a kernel may round first."""
    early = once(y.abs(), unit) if silu else 0.0 * y
    noise = ((SUM * width**0.5 * size) ** 2 + (ROUNDED * early) ** 2).sqrt()
    bound = gamma(width + 2) * size + early
    if not silu:
        return y, noise, bound
    value = F.silu(y)
    return value, _SLOPE * noise, _SLOPE * bound + APPROXIMATE * value.abs()


def evaluated(
    call: Call, x: Tensor, weight: Tensor, bias: Any, states: Tensor | None, bounds: list[tuple[int, int]],
    places: list[int | None], silu: bool, masks: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:  # fmt: skip
    """((value, noise, bound, which rows) [tokens, d], states) of rows x [tokens, d]; states [slots, d, width - 1 or
    more, of which the first are used]."""
    weight = weight.double().reshape(weight.shape[0], -1)
    width = weight.shape[1]
    if x.shape[1] != len(weight) or (states is not None and states.shape[-1] < width - 1):
        raise Declined("its weight does not fit its input")
    unit = call.unit
    bias = bias.double() if isinstance(bias, torch.Tensor) else None
    parts = [torch.zeros_like(x) for _ in range(3)]
    known = torch.zeros(len(x), dtype=torch.bool)
    new = None if states is None else states.double().clone()
    for n, ((begin, end), at) in enumerate(zip(bounds, places, strict=True)):
        if at is None or begin == end:
            continue
        first = torch.zeros(len(weight), width - 1, dtype=torch.float64)
        if states is not None and (masks is None or bool(masks[n])):
            first = states[at, :, : width - 1].double()
        y, size, last = convolved(x[begin:end], weight, bias, first)
        for part, found in zip(parts, activated(y, size, width, unit, silu), strict=True):
            part[begin:end] = found
        known[begin:end] = True
        if new is not None:
            new[at, :, : width - 1] = last
    return (*parts, known), new


def _told(found: tuple[Tensor, Tensor, Tensor, Tensor], shape: Any, turned: bool) -> Expected:
    """turned: the output has channels first."""
    *parts, known = found
    if turned:
        if not bool(known.all()):
            raise Declined("some of its tokens belong to no sequence")
        parts = [p.T for p in parts]
    value, noise, bound = (p.reshape(shape) for p in parts)
    return Expected(value, noise, bound=bound, rows=None if bool(known.all()) else known, reason="padding")


def _kept(states: Tensor, x: Tensor, like: Tensor) -> Expected:
    """States that are copies of inputs, to the bit where both have one dtype."""
    return Expected(states, unit=0.0 if x.dtype == like.dtype else None)


def _silu(activation: Any) -> bool:
    if activation not in (None, True, False, "", "silu", "swish"):
        raise Declined(f"the activation {activation} has no reference")
    return bool(activation)


_FORWARD = "x weight bias conv_states query_start_loc cache_indices has_initial_state activation pad_slot_id"


@reference("torch.ops._C.causal_conv1d_fwd_cpu", "torch.ops._C.causal_conv1d_fwd", "torch.ops.*.causal_conv1d_fn")
def forward(call: Call) -> dict[str, Expected]:
    """(x [d, tokens], weight [d, width], bias, states [slots, d, width - 1], query_start_loc, cache_indices,
    has_initial_state, activation); the old CUDA operator writes into x."""
    names = _FORWARD + (" is_weight_packed" if call.cls.endswith("fwd_cpu.default") else "")
    f = arguments(call, names)
    x, weight = given(f, "x", "weight")
    if f.get("is_weight_packed"):
        weight = in_order(weight)
    turned = x.dim() == 2 and x.shape[0] == weight.shape[0]
    rows = x.T if turned else x.reshape(-1, x.shape[-1])
    bounds = runs(f["query_start_loc"], len(rows))
    states = f["conv_states"]
    places = list(slots(f["cache_indices"], len(bounds), len(bounds) if states is None else len(states)))
    y, new = evaluated(
        call, rows, weight, f["bias"], states, bounds, places, _silu(f["activation"]), f["has_initial_state"]
    )
    out = "output.0" if "output.0" in call.outputs else "inplace.input.0"
    found = {out: _told(y, f["x"].shape, turned)}
    if new is not None:
        found[place_of(call, names, "conv_states")] = _kept(new, f["x"], states)
    return found


_UPDATES = {
    "causal_conv1d_update_cpu_vec": "x conv_state weight bias activation conv_state_indices query_start_loc null",
    "causal_conv1d_update_cpu": "x conv_state weight bias activation num_accepted conv_state_indices null packed",
    "causal_conv1d_update": "x conv_state weight bias activation conv_state_indices num_accepted query_start_loc",
}


@reference(*(f"torch.ops._C.{name}" for name in _UPDATES), "torch.ops.*.causal_conv1d_update")
def update(call: Call) -> dict[str, Expected]:
    """(x [batch, d] or [batch, d, tokens], states [slots, d, width - 1], weight, bias, activation, ...): the next
    tokens of each sequence."""
    short = call.cls.removeprefix("torch.ops.").split(".")[1]
    names = _UPDATES.get(short, _UPDATES["causal_conv1d_update"])
    f = arguments(call, names)
    if f.get("num_accepted") is not None:
        raise Declined("speculative tokens, of which inputs are kept, have no reference here")
    x, states, weight = given(f, "x", "conv_state", "weight")
    if f.get("packed"):
        weight = in_order(weight)
    tokens = x.shape[2] if x.dim() == 3 else 1
    rows = x.transpose(1, 2).reshape(-1, x.shape[1]) if x.dim() == 3 else x
    starts = f.get("query_start_loc")
    bounds = [(n * tokens, (n + 1) * tokens) for n in range(len(x))] if starts is None else runs(starts, len(rows))
    null = f["null"] if f.get("null") is not None else (0 if short == "causal_conv1d_update_cpu_vec" else -1)
    places = list(slots(f["conv_state_indices"], len(bounds), len(states), null))
    y, new = evaluated(call, rows, weight, f["bias"], states, bounds, places, _silu(f["activation"]))
    if x.dim() == 3:
        *parts, known = y
        parts = [p.reshape(len(x), tokens, -1).transpose(1, 2) for p in parts]
        known = known.reshape(len(x), tokens).all(1)
        found = Expected(
            parts[0], parts[1], bound=parts[2], rows=None if bool(known.all()) else known, reason="padding"
        )
    else:
        found = _told(y, x.shape, False)
    out = "output.0" if "output.0" in call.outputs else "inplace.input.0"
    assert new is not None
    return {out: found, place_of(call, names, "conv_state"): _kept(new, f["x"], f["conv_state"])}
