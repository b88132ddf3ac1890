"""Recurrences token by token: short convolutions, selective scans, the gated delta rule, and blocks around them.

What all recurrences share: runs of tokens, the slots their states lie in, and how rounding errors pile up.

The problem: an honest kernel rounds on the way (operands and chunk states to the model's dtype, sums in float32), what
it puts into the state stays there for later tokens, and how much of it is left depends on the decays and keys of this
very call. The idea: the recurrence itself tells. It is computed a few times more, in float32, with each quantity that a
kernel may round multiplied by 1 + u r, r uniform in [-1, 1], which has the variance of a rounding to nearest at most;
the spread of the results is the noise [Monte Carlo arithmetic: D. S. Parker, UCLA CSD-970002, 1997]. So errors in the
state add up as the independent ones that they are, and fade with the decay: after T tokens sqrt(min(T, 1 / (1 - a**2)))
of one token's for a decay a, never T of them.

Short causal convolutions of each channel, and the last inputs that are kept for the next token.

Formula: y_t = act(sum over j of w_j x_(t - width + 1 + j) + bias), where the width - 1 inputs before a sequence's first
row are those of its state, or 0 [A. Gu and T. Dao, arXiv 2312.00752, section 3.4: the convolution of a Mamba block;
vLLM's causal_conv1d]. The state becomes the last width - 1 inputs, as they are: a copy. Noise and bound: float32 sums
of width products, gamma_width |w| |x| [Higham, ASNA, (3.5)], one rounding before the activation, which has a slope of
1.1 at most.

Selective scans of Mamba 1 and 2, token by token, whatever chunks a kernel cuts them into.

Formula: h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t', y_t = h_t C_t + D x_t, times silu(z_t) where there is a gate, for a
state h [channels, n] of each head; dt = softplus(dt + bias) where the kernel does so [A. Gu and T. Dao, Mamba, arXiv
2312.00752, section 3.2; T. Dao and A. Gu, Transformers are SSMs, arXiv 2405.21060, section 2 and 7]. Mamba 1 has an A
of each channel and state, Mamba 2 one of each head; heads share B and C by groups. A kernel may round dt x, B, C, and
the state wherever it meets C, to the model's dtype.

The gated delta rule, token by token, whatever chunks a kernel cuts it into.

Formula: S_t = a_t S_(t-1) + k_t (b_t (v_t - a_t S_(t-1)' k_t))', o_t = s S_t' q_t for a state S [k, v] of each value
head, a decay a = exp(g), b in (0, 1), s = 1 / sqrt(k) unless it is given [S. Yang, J. Kautz and A. Hatamizadeh, Gated
Delta Networks, arXiv 2412.06464, equation 10]; chunked forms [section 3.3] are equal in exact arithmetic. q and k
divided by their norms where the kernel does so; value head h has the key head h // (value heads / key heads).
Qwen3-Next makes g = -exp(A_log) softplus(a + dt_bias) and b = sigmoid(b) of its projections. A kernel may round q, k,
the new value b (v - S'k), and the state wherever it meets q or k, to the model's dtype. Since |k| <= 1 and 0 <= b <=
2, what is off in the state never grows: I - b k k' has the norm 1.

Blocks around a recurrence: their gated norm, what they hand on, and the opaque operators that name only a layer.

Formula: Mamba 2's norm weighs RMSNorm(x silu(z)) by groups [T. Dao and A. Gu, arXiv 2405.21060, section 7.1; the
published Mamba 2 code]. A block gives what its last projection gave; that its convolution and recurrence are right
does not follow from it, since they are no modules: a block is found wrong here, and never right. vLLM's opaque
operators run the operators that are captured inside them and put their results, first those of single tokens, then
those of prompts, into one buffer: the results must lie there, row by row; whether they are right is judged where they
are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.judge.floor import unit as unit_of_dtype
from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, SUM, Call, Declined, Expected, gamma, reference
from vllm_accprobe.opcheck.references.norms import gate_first
from vllm_accprobe.opcheck.references.parts import UNSEEN, inside, once, param_if, reshaped, same

SAMPLES = 8
"""Chosen: runs that the spread is taken from. The mean square of 8 is within a factor of 3 in all but 1 of 1,000; the
root mean square over a head's channels, which has hundreds, is the least that each gets."""
EXPONENT = 2.0**-18
"""Chosen: relative error of a decay, an exponential of a product that was rounded in float32 (vLLM's CPU kernels have
exp_u20: 2**-20; fast GPU ones 2**-22)."""
Rounds = Callable[[Any, float], Any]
Tensor = Any  # a torch.Tensor


def _as_it_is(x: Tensor, unit: float) -> Tensor:
    return x


def scattered(evaluate: Callable[..., tuple[Tensor, ...]], *operands: Tensor | None) -> tuple[Any, ...]:
    """((value, noise), ...) for each result of ``evaluate(rounds, *operands)``. operands: float64, or None; ``rounds(x,
    unit)`` is x as an honest kernel may have it. Operands get a leading dimension, one or SAMPLES long; each result has
    it too. The last dimension is one head's: no element gets less noise than its root mean square."""
    exact = evaluate(_as_it_is, *(None if x is None else x.unsqueeze(0) for x in operands))
    generator = torch.Generator().manual_seed(0)

    def rounds(x: Tensor, unit: float) -> Tensor:
        return x * (1.0 + unit * (2.0 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1.0))

    narrow = (None if x is None else x.float().expand(SAMPLES, *x.shape) for x in operands)
    with torch.no_grad():
        samples = evaluate(rounds, *narrow)
    found = []
    for value, sample in zip(exact, samples, strict=True):
        spread = (sample.double() - value).square().mean(0)
        head = spread.mean(-1, keepdim=True)
        found.append((value[0], torch.maximum(spread, head).sqrt() + SUM * value[0].abs()))
    return tuple(found)


def read_noise(state: Tensor, weights: Tensor, unit: float, rounds: Rounds) -> Tensor | float:
    """What rounding the entries of ``state`` [..., k, v] for one product with ``weights`` [..., k] adds to it,
    [..., v]: 0 for the exact value."""
    if rounds is _as_it_is:
        return 0.0
    size = torch.einsum("...k,...kv->...v", weights * weights, state * state).sqrt()
    return rounds(torch.ones_like(size), unit) * size - size


def runs(cu_seqlens: Tensor | None, tokens: int) -> list[tuple[int, int]]:
    """(begin, end) of each sequence. Raises Declined where they are not those of ``tokens`` rows."""
    if cu_seqlens is None:
        return [(0, tokens)]
    ends = [int(e) for e in cu_seqlens]
    if not ends or ends[0] != 0 or ends[-1] > tokens or sorted(ends) != ends:
        raise Declined("its sequences' bounds do not fit its rows")
    return list(pairwise(ends))


def slots(indices: Tensor | None, count: int, states: int, null: int | None = None) -> Iterator[int | None]:
    """The state's place of each sequence, None for padding: below 0, or ``null``. Raises Declined."""
    for n in range(count):
        if indices is None:
            yield n
            continue
        at = int(indices.reshape(len(indices), -1)[n, 0])
        if at < 0 or at == null:
            yield None
        elif at >= states:
            raise Declined("a state's index lies outside of the states that were captured")
        else:
            yield at


def arguments(call: Call, names: str) -> Mapping[str, Any]:
    """An operator's arguments, or a module's inputs, by the names of its signature, in order; missing ones are None."""
    order = names.split()
    found: dict[str, Any] = dict.fromkeys(order)
    found.update(zip(order, call.args, strict=False))
    for place, name in enumerate(order):
        if name in call.kwargs:
            found[name] = call.kwargs[name]
        elif name in call.inputs:
            found[name] = call.inputs[name]
        elif str(place) in call.inputs:
            found[name] = call.inputs[str(place)]
    return found


def place_of(call: Call, names: str, name: str) -> str:
    """The role that argument ``name`` has after the call: ``inplace.input.0``, or ``inplace.input.state`` by name."""
    if name in call.kwargs:
        return f"inplace.input.{name}"
    return f"inplace.input.{names.split().index(name)}"


def given(found: Mapping[str, Any], *names: str) -> list[Any]:
    """These arguments in float64. Raises Declined where one is no tensor."""
    for name in names:
        if not isinstance(found[name], torch.Tensor):
            raise Declined(f"argument {name} is no tensor")
    return [found[name].double() for name in names]


def changed(states: Tensor, parts: Mapping[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(value, noise) of all states, float64, where ``parts`` are new and the others as they were."""
    value, noise = states.double().clone(), torch.zeros(states.shape, dtype=torch.float64)
    for at, (y, e) in parts.items():
        value[at], noise[at] = y.reshape(states.shape[1:]), e.reshape(states.shape[1:])
    return value, noise


_SLOPE = 1.1
"""Derived: the largest slope of x sigmoid(x), 1.0998 at x = 2.4."""
_CHANNELS = 32
"""Channels that lie together in a packed weight [vLLM's CPU build, causal_conv1d_weight_pack; its test packs one]."""
  # a torch.Tensor


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


def evaluated_conv(
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
    y, new = evaluated_conv(
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
    y, new = evaluated_conv(call, rows, weight, f["bias"], states, bounds, places, _silu(f["activation"]))
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


  # a torch.Tensor


def scan(
    rounds: Rounds, unit: float, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    z: Tensor | None, state: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs [..., t, heads, channels], last state [..., heads, channels, n]) of one sequence: x, z [..., t,
    heads, channels], dt [..., t, heads, channels or 1], a [..., heads, channels or 1, n or 1], b, c [..., t, heads, n],
    d [..., heads, channels or 1]."""
    b, c, fed = rounds(b, unit), rounds(c, unit), rounds(x * dt, unit)
    out = []
    for t in range(x.shape[-3]):
        state = state * rounds((dt[..., t, :, :, None] * a).exp(), EXPONENT)
        state = state + fed[..., t, :, :, None] * b[..., t, :, None, :]
        read = state.transpose(-1, -2)
        y = torch.einsum("...n,...nv->...v", c[..., t, :, :], read)
        out.append(y + read_noise(read, c[..., t, :, :], unit, rounds))
    y = torch.stack(out, -3)
    if d is not None:
        y = y + d.unsqueeze(-3) * x
    if z is not None:
        y = y * F.silu(z)
    return y, state


def steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """dt as the recurrence has it; threshold 20 as in all kernels, which changes nothing that float32 can hold."""
    dt = dt if bias is None else dt + bias
    return F.softplus(dt) if softplus else dt


def by_heads(x: Tensor, heads: int) -> Tensor:
    """B or C [tokens, groups, n] for each head."""
    if heads % x.shape[1]:
        raise Declined("its heads are no multiple of its groups")
    return x.repeat_interleave(heads // x.shape[1], 1)


def scanned(
    unit: float, bounds: list[tuple[int, int]], places: list[int | None], tokens: Mapping[str, Tensor | None],
    a: Tensor, d: Tensor | None, states: Tensor, masks: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """(outputs, noise, which rows), (states, noise). tokens: x, dt, b, c, z of all rows, float64; states: [slots,
    heads, channels, n]; masks: bool, which sequences begin from theirs, None for all."""
    x = tokens["x"]
    assert x is not None
    out, noise, known = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(len(x), dtype=torch.bool)
    new = {}
    for n, ((begin, end), at) in enumerate(zip(bounds, places, strict=True)):
        if at is None or begin == end:
            continue
        first = states[at].double()
        if masks is not None and not bool(masks[n]):
            first = torch.zeros_like(first)
        of_x, dt, b, c, z = (
            None if t is None else t[begin:end] for t in (tokens[k] for k in ("x", "dt", "b", "c", "z"))
        )

        def evaluate(rounds: Rounds, *parts: Any) -> tuple[Tensor, Tensor]:
            return scan(rounds, unit, *parts)

        (y, e), last = scattered(evaluate, of_x, dt, a, b, c, d, z, first)
        out[begin:end], noise[begin:end], known[begin:end] = y, e, True
        new[at] = last
    return (out, noise, known), changed(states, new)


def told(found: tuple[Tensor, Tensor, Tensor], like: Tensor, heads: int) -> Expected:
    value, noise, known = found
    rows = None if bool(known.all()) else known
    if value.numel() != like.numel() or (rows is not None and like.shape[0] != len(rows)):
        raise Declined("its output has another shape than its input")
    return Expected(value.reshape(like.shape), noise.reshape(like.shape), rows=rows, reason="padding", groups=heads,
                    shared=True)  # fmt: skip


def _states(found: tuple[Tensor, Tensor], heads: int) -> Expected:
    return Expected(found[0], found[1], groups=heads, shared=True)


def _unit(tensor: Tensor) -> float:
    return unit_of_dtype(str(tensor.dtype).removeprefix("torch."))


_CHUNKS = "out final_states x dt A B C D z cu_seqlens"


@reference("torch.ops._C.mamba_chunk_scan_fwd_cpu")
def chunk_scan(call: Call) -> dict[str, Expected]:
    """(out, states, x, dt, A, B, C, D, z, cu_seqlens): dt as the recurrence has it, states [sequences, heads, channels,
    n] both in and out."""
    f = arguments(call, _CHUNKS)
    x, dt, a, b, c = given(f, "x", "dt", "A", "B", "C")
    heads, bounds = x.shape[1], runs(f["cu_seqlens"], len(x))
    if len(bounds) > len(f["final_states"]):
        raise Declined("more sequences than states")
    d = None if f["D"] is None else f["D"].double().reshape(heads, -1)
    z = None if f["z"] is None else f["z"].double().reshape(x.shape)
    tokens = {"x": x, "dt": dt.unsqueeze(-1), "b": by_heads(b, heads), "c": by_heads(c, heads), "z": z}
    y, states = scanned(
        _unit(f["x"]), bounds, list(range(len(bounds))), tokens, a.reshape(heads, 1, 1), d, f["final_states"]
    )
    return {"inplace.input.0": told(y, f["out"], heads), "inplace.input.1": _states(states, heads)}


_VARLEN = (
    "x dt A B C chunk_size cu_seqlens cu_chunk_seqlens last_chunk_indices seq_idx out D z dt_bias initial_states "
    "dt_softplus dt_limit return_intermediate_states state_dtype"
)


@reference("torch.ops.*.mamba_chunk_scan_combined_varlen")
def chunk_scan_combined(call: Call) -> dict[str, Expected]:
    """(x [tokens, heads, channels], dt [tokens, heads], A [heads], B, C [tokens, groups, n], ...) as Mamba 2's kernels
    have it: states [sequences, heads, channels, n], given or 0."""
    f = arguments(call, _VARLEN)
    x, dt, a, b, c = given(f, "x", "dt", "A", "B", "C")
    if f["return_intermediate_states"]:
        raise Declined("the states between chunks have no reference")
    heads, bounds = x.shape[1], runs(f["cu_seqlens"], len(x))
    bias = None if f["dt_bias"] is None else f["dt_bias"].double()
    dt = steps(dt, bias, bool(f["dt_softplus"]))
    if f["dt_limit"] is not None:
        dt = dt.clamp(float(f["dt_limit"][0]), float(f["dt_limit"][1]))
    d = None if f["D"] is None else f["D"].double().reshape(heads, -1)
    z = None if f["z"] is None else f["z"].double().reshape(x.shape)
    tokens = {"x": x, "dt": dt.unsqueeze(-1), "b": by_heads(b, heads), "c": by_heads(c, heads), "z": z}
    first = f["initial_states"]
    if first is None:
        first = torch.zeros(len(bounds), heads, x.shape[-1], b.shape[-1])
    y, states = scanned(_unit(f["x"]), bounds, list(range(len(bounds))), tokens, a.reshape(heads, 1, 1), d, first)
    out = place_of(call, _VARLEN, "out")
    return {out: told(y, f["x"], heads), "output.0": _states(states, heads)}


_UPDATE = (
    "state x dt A B C D z dt_bias dt_softplus state_batch_indices dst_state_batch_indices null_block_id out "
    "num_accepted_tokens cu_seqlens"
)
_TRITON = (
    "state x dt A B C D dt_bias z dt_softplus state_batch_indices dst_state_batch_indices null_block_id out "
    "num_accepted_tokens cu_seqlens"
)


@reference("torch.ops._C.selective_state_update_cpu", "torch.ops.*.selective_state_update")
def state_update(call: Call) -> dict[str, Expected]:
    """(state [slots, heads, channels, n], x [tokens, heads, channels], dt, A, B, C, ...): one token of each sequence,
    or runs of them by cu_seqlens; the new state lies in dst_state_batch_indices, or where the old one was."""
    names = _UPDATE if "_cpu" in call.cls else _TRITON
    f = arguments(call, names)
    if f["num_accepted_tokens"] is not None:
        raise Declined("speculative tokens, of which states are kept, have no reference here")
    state, x, dt, a, b, c = given(f, "state", "x", "dt", "A", "B", "C")
    plain = state.dim() == 3  # Mamba 1: no heads
    if plain:
        state, x, dt, a, b, c = (t.unsqueeze(0 if t is a else 1) for t in (state, x, dt, a, b, c))
    slots_, heads, channels, n = state.shape
    x = x.reshape(-1, heads, channels)
    dt = dt.reshape(len(x), heads, -1) if dt.numel() != len(x) * heads else dt.reshape(len(x), heads, 1)
    bias = None if f["dt_bias"] is None else f["dt_bias"].double().reshape(heads, -1)
    dt = steps(dt, bias, bool(f["dt_softplus"]))
    d = None if f["D"] is None else f["D"].double().reshape(heads, -1)
    z = None if f["z"] is None else f["z"].double().reshape(x.shape)
    bounds = [(t, t + 1) for t in range(len(x))] if f["cu_seqlens"] is None else runs(f["cu_seqlens"], len(x))
    null = f["null_block_id"]
    reads = list(slots(f["state_batch_indices"], len(bounds), slots_, null))
    writes = reads
    if f["dst_state_batch_indices"] is not None:
        writes = list(slots(f["dst_state_batch_indices"], len(bounds), slots_, null))
    tokens = {"x": x, "dt": dt, "b": by_heads(b.reshape(len(x), -1, n), heads),
              "c": by_heads(c.reshape(len(x), -1, n), heads), "z": z}  # fmt: skip
    y, states = scanned(_unit(f["x"]), bounds, reads, tokens, a.reshape(heads, -1, a.shape[-1]), d, state)
    elsewhere = [(r, w) for r, w in zip(reads, writes, strict=True) if r is not None and w is not None and r != w]
    for read, write in elsewhere:
        for new in states:
            new[write] = new[read]
    out = place_of(call, names, "out") if f["out"] is not None else "output.0"
    found = {out: told(y, f["x"], heads)}
    moved = _states(states, heads)
    if elsewhere:  # what lies where the old state was read, kernels leave as they like
        rows = torch.ones(slots_, dtype=torch.bool)
        rows[[read for read, _ in elsewhere]] = False
        moved = Expected(*states, rows=rows, reason="a state that has moved on", groups=heads, shared=True)
    if plain:
        moved = Expected(moved.value.squeeze(1), None if moved.noise is None else moved.noise.squeeze(1),
                         rows=moved.rows, reason=moved.reason, shared=True)  # fmt: skip
    return found | {place_of(call, names, "state"): moved}


_SELECTIVE = (
    "u delta A B C D z delta_bias delta_softplus query_start_loc cache_indices has_initial_state ssm_states "
    "null_block_id block_size"
)


@reference("torch.ops._C.selective_scan_fwd")
def selective_scan(call: Call) -> dict[str, Expected]:
    """Mamba 1: (u [channels, tokens], delta, A [channels, n], B, C [groups, n, tokens], D, z, ...): the result lies
    in z where there is one, else in delta; states [slots, channels, n] changed where they lie."""
    f = arguments(call, _SELECTIVE)
    u, delta, a, b, c, states = given(f, "u", "delta", "A", "B", "C", "ssm_states")
    if u.dim() != 2 or f["query_start_loc"] is None:
        raise Declined("a batch of equal lengths has no reference here")
    x = u.T.unsqueeze(-1)  # each channel is a head of one
    bias = None if f["delta_bias"] is None else f["delta_bias"].double().reshape(-1, 1)
    dt = steps(delta.T.unsqueeze(-1), bias, bool(f["delta_softplus"]))
    heads, n = x.shape[1], a.shape[-1]
    z = None if f["z"] is None else f["z"].double().T.unsqueeze(-1)
    by_token = [t.reshape(-1, n, len(x)).permute(2, 0, 1) for t in (b, c)]
    tokens = {"x": x, "dt": dt, "b": by_heads(by_token[0], heads), "c": by_heads(by_token[1], heads), "z": z}
    d = None if f["D"] is None else f["D"].double().reshape(heads, 1)
    bounds = runs(f["query_start_loc"], len(x))
    places = list(slots(f["cache_indices"], len(bounds), len(states), f["null_block_id"]))
    y, new = scanned(_unit(f["u"]), bounds, places, tokens, a.unsqueeze(1), d, states.unsqueeze(2),
                     f["has_initial_state"])  # fmt: skip
    value, noise, known = y
    if not bool(known.all()):
        raise Declined("some of its tokens belong to no sequence")
    out = place_of(call, _SELECTIVE, "delta" if f["z"] is None else "z")
    kept = [s.squeeze(2) for s in new]
    return {
        out: Expected(value.squeeze(-1).T, noise.squeeze(-1).T, shared=True),
        place_of(call, _SELECTIVE, "ssm_states"): Expected(kept[0], kept[1], shared=True),
    }


EPSILON = 1e-6
"""What is added to a sum of squares before its root: flash-linear-attention's l2norm, and vLLM's kernels for CPUs."""
  # a torch.Tensor


def _norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def rule(
    rounds: Rounds, unit: float, scale: float, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs [..., t, h, v], last state [..., h, k, v]) of one sequence: q, k [..., t, h, k], v [..., t, h, v], g,
    beta [..., t, h], state [..., h, k, v]."""
    q, k = rounds(q * scale, unit), rounds(k, unit)
    out = []
    for t in range(q.shape[-3]):
        key, query = k[..., t, :, :], q[..., t, :, :]
        state = state * rounds(g[..., t, :].exp(), EXPONENT)[..., None, None]
        held = torch.einsum("...hk,...hkv->...hv", key, state) + read_noise(state, key, unit, rounds)
        fresh = rounds((v[..., t, :, :] - held) * beta[..., t, :, None], unit)
        state = state + key[..., None] * fresh[..., None, :]
        out.append(torch.einsum("...hk,...hkv->...hv", query, state) + read_noise(state, query, unit, rounds))
    return torch.stack(out, -3), state


def _of_sequence(
    unit: float, scale: float, eps: float | None, parts: list[Tensor], state: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Output and states of one sequence, each (value, noise), from q, k, v, g, beta of its tokens."""
    share = parts[2].shape[-2] // parts[0].shape[-2]

    def evaluate(rounds: Rounds, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Any:
        q, k = (x if eps is None else _norm(x, eps) for x in (q, k))
        q, k = (x.repeat_interleave(share, -2) for x in (q, k))
        return rule(rounds, unit, scale, q, k, v, g, beta, s)

    found = scattered(evaluate, *parts, state)
    return found[0], found[1]


def evaluated_delta_rule(
    call: Call, found: Mapping[str, Any], ends: Tensor | None, indices: Tensor | None, *, eps: float | None,
    key_first: bool, scale: float | None = None, null: int | None = None, masks: Tensor | None = None,
) -> tuple[Expected, Tensor | None, Tensor | None]:  # fmt: skip
    """The outputs [tokens, value heads, v], and value and noise of all states, None where the call has none. found: q,
    k, v, g, beta and ``state`` [states, heads, k, v], or with k last; masks: bool, which sequences begin from
    theirs."""
    q, k, v, g, beta = given(found, "q", "k", "v", "g", "beta")
    heads, width = v.shape[-2:]
    q, k = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
    v, g = v.reshape(-1, heads, width), g.reshape(-1, heads)
    beta = beta.reshape(-1, heads)
    if heads % q.shape[1] or len(g) != len(v) or len(beta) != len(v) or len(q) != len(v):
        raise Declined("its heads or gates do not fit one another")
    unit = unit_of_dtype(str(found["v"].dtype).removeprefix("torch."))
    batch = found["q"].shape[0] if ends is None and found["q"].dim() == 4 else 1
    length = len(v) // batch
    bounds = [(n * length, (n + 1) * length) for n in range(batch)] if ends is None else runs(ends, len(v))
    states = found.get("state")
    places = list(slots(indices, len(bounds), len(bounds) if states is None else len(states), null))
    out = torch.zeros(len(v), heads, width, dtype=torch.float64)
    noise, known, new = torch.zeros_like(out), torch.zeros(len(v), dtype=torch.bool), {}
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for n, ((begin, end), at) in enumerate(zip(bounds, places, strict=True)):
        if at is None or begin == end:
            continue
        first = torch.zeros(heads, q.shape[-1], width, dtype=torch.float64)
        if states is not None and (masks is None or bool(masks[n])):
            first = states[at].double() if key_first else states[at].double().transpose(-1, -2)
        (y, e), last = _of_sequence(unit, scale, eps, [x[begin:end] for x in (q, k, v, g, beta)], first)
        out[begin:end], noise[begin:end], known[begin:end] = y, e, True
        new[at] = last if key_first else tuple(x.transpose(-1, -2) for x in last)
    shape = call.outputs["output.0"].shape if "output.0" in call.outputs else out.shape
    if out.numel() != math.prod(shape):
        raise Declined("its output has another shape than its values")
    rows = None if bool(known.all()) or shape[0] != len(known) else known
    if rows is None and not bool(known.all()):
        raise Declined("some of its rows belong to no sequence")
    y = Expected(out.reshape(shape), noise.reshape(shape), rows=rows, reason="padding", groups=heads, shared=True)
    if states is None:
        stacked = [torch.stack([new[n][side] for n in sorted(new)]) for side in (0, 1)] if new else [None, None]
        return y, stacked[0], stacked[1]
    return y, *changed(states, new)


def _state(value: Tensor, noise: Tensor) -> Expected:
    return Expected(value, noise, groups=value.shape[1], shared=True)


_FLA = "q k v g beta scale initial_state inplace_final_state cu_seqlens ssm_state_indices num_accepted_tokens"


@reference(
    "torch.ops.*.fused_recurrent_gated_delta_rule", "torch.ops.*.chunk_gated_delta_rule", "ChunkGatedDeltaRule",
    "torch.ops.*.recurrent_gated_delta_rule",
)  # fmt: skip
def flash_linear_attention(call: Call) -> dict[str, Expected]:
    """(q, k, v, g, beta, scale, initial_state, ...) of flash-linear-attention as vLLM 0.32 has it: states [sequences,
    heads, v, k], changed where they lie if ``inplace_final_state``; the module ChunkGatedDeltaRule has the same names
    without a scale."""
    module = call.cls == "ChunkGatedDeltaRule"
    names = "q k v g beta initial_state output_final_state cu_seqlens" if module else _FLA
    a = dict(arguments(call, names))
    if a.get("num_accepted_tokens") is not None:
        raise Declined("speculative tokens, of which states are kept, have no reference here")
    if a["beta"] is None:
        a["beta"] = torch.ones_like(a["g"])
    norm = call.attrs if module else call.kwargs
    eps = EPSILON if norm.get("use_qk_l2norm_in_kernel", module) else None
    a["state"] = a["initial_state"]
    y, states, noise = evaluated_delta_rule(
        call, a, a["cu_seqlens"], a.get("ssm_state_indices"), eps=eps, key_first=False, scale=a.get("scale")
    )
    found = {"output.0": y}
    if states is not None and noise is not None:
        found["output.1"] = found[place_of(call, names, "initial_state")] = _state(states, noise)
    return found


_CHUNK = (
    "q k v g beta initial_state output_final_state cu_seqlens head_first use_qk_l2norm_in_kernel "
    "initial_state_indices eps"
)


@reference("torch.ops._C.chunk_gated_delta_rule_cpu")
def chunked_on_cpu(call: Call) -> dict[str, Expected]:
    """(query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel,
    initial_state_indices, eps): states [slots, heads, k, v], changed where they lie."""
    a = dict(arguments(call, _CHUNK))
    if a["head_first"]:
        raise Declined("heads before tokens have no reference")
    a["state"] = a["initial_state"]
    eps = float(a["eps"] if a["eps"] is not None else 1e-5) if a["use_qk_l2norm_in_kernel"] else None
    indices = a["initial_state_indices"]
    y, states, noise = evaluated_delta_rule(call, a, a["cu_seqlens"], indices, eps=eps, key_first=True)
    assert states is not None
    assert noise is not None
    return {"output.0": y, "output.1": _state(states, noise), "inplace.input.5": _state(states, noise)}


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias) and sigmoid(b) of Gated DeltaNet, float64."""
    return -a_log.exp() * F.softplus(a + dt_bias, beta), torch.sigmoid(b)


@reference("torch.ops._C.fused_gdn_gating_cpu", "torch.ops.*.fused_gdn_gating", "torch.ops.*.npu_fused_gdn_gating")
def gating(call: Call) -> dict[str, Expected]:
    """(A_log, a, b, dt_bias): the logarithm of the decay, and beta."""
    found = arguments(call, "A_log a b dt_bias beta threshold")
    a_log, a, b, bias = given(found, "A_log", "a", "b", "dt_bias")
    g, beta = gates(a_log, a, b, bias, float(found["beta"] or 1.0))
    # a + dt_bias is rounded once to float32 at least, which softplus, with a slope of 1 at most, hands on
    slack = 2.0**-22 * (g.abs() + a_log.exp() * (a.abs() + bias.abs()))
    # two exponentials and a logarithm
    most = 3.0 * APPROXIMATE * g.abs() + slack
    shapes = [call.outputs[f"output.{n}"].shape for n in (0, 1)]
    # 1 / (1 + e**-b) by a dtype's own operators: e**-b and 1 + e**-b may each be rounded to it
    u = unit_of_dtype(str(call.outputs["output.1"].dtype).removeprefix("torch."))
    noise, bound = ROUNDED * u * beta * ((1.0 - beta) ** 2 + 1.0).sqrt(), (u * (2.0 - beta) + APPROXIMATE) * beta
    return {
        "output.0": Expected(g.reshape(shapes[0]), slack.reshape(shapes[0]), bound=most.reshape(shapes[0])),
        "output.1": Expected(beta.reshape(shapes[1]), noise.reshape(shapes[1]), bound=bound.reshape(shapes[1])),
    }


_DELTA_RULE_UPDATE = (
    "A_log dt_bias q k v a b initial_state_source initial_state_indices cu_seqlens use_qk_l2norm_in_kernel "
    "softplus_beta softplus_threshold"
)


@reference("torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu")
def fused_update(call: Call) -> dict[str, Expected]:
    """(A_log, dt_bias, q, k, v, a, b, states, indices, cu_seqlens, use_qk_l2norm_in_kernel): one token of each
    sequence, states [slots, heads, k, v] changed where they lie."""
    a = dict(arguments(call, _DELTA_RULE_UPDATE))
    a_log, bias, x, b = given(a, "A_log", "dt_bias", "a", "b")
    count = a["a"].shape[0]
    if math.prod(a["v"].shape[:-2]) != count:
        raise Declined("more than one token of a sequence")
    g, beta = gates(a_log, x, b, bias, float(a["softplus_beta"] or 1.0))
    a |= {"g": g, "beta": beta, "state": a["initial_state_source"]}
    eps = 1e-5 if a["use_qk_l2norm_in_kernel"] else None
    ends = torch.arange(count + 1)
    y, states, noise = evaluated_delta_rule(call, a, ends, a["initial_state_indices"], eps=eps, key_first=True)
    assert states is not None
    assert noise is not None
    # the gates' own roundings, of one token each: relative to what comes out and to what is forgotten
    extra = 2.0 * ROUNDED * y_unit(call) * y.value.abs()
    assert y.noise is not None
    y = Expected(y.value, (y.noise**2 + extra**2).sqrt(), groups=y.groups, shared=True, rows=y.rows, reason=y.reason)
    return {"output.0": y, "inplace.input.7": _state(states, noise)}


def y_unit(call: Call) -> float:
    """The rounding of the values' dtype: the state may be wider."""
    return unit_of_dtype(str(call.outputs["output.0"].dtype).removeprefix("torch."))


_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups", "ssm_n_groups")
_INSIDE = "what it runs inside was not captured"
  # a torch.Tensor


@reference("Mixer2RMSNormGated")
def gated_norm(call: Call) -> Expected:
    """x, gate [tokens, channels of this rank]; without a weight it only gates."""
    x, gate = call.wide("x", "0"), call.wide("gate", "1")
    y = x * F.silu(gate)
    weight = param_if(call, "weight")
    if weight is None:
        early = once(F.silu(gate).abs(), call.unit, x.abs())
        return Expected(y, ROUNDED * early, bound=early + APPROXIMATE * y.abs())
    groups = next((int(call.config[n]) for n in _GROUPS if n in call.config), 0)
    ranks = int(call.attr("tp_size", default=1))
    if not groups:
        raise Declined("the number of its groups was not recorded")
    if groups % ranks:
        raise Declined("its groups are cut over ranks")
    shape = (len(y), groups // ranks, -1)
    eps, by = float(call.attr("variance_epsilon")), weight.reshape(shape[1:])
    return reshaped(gate_first(y.reshape(shape), x.reshape(shape), by, eps, call.unit), y.shape)


@reference("MambaMixer2", "MambaMixer", "ShortConv", "*Mixer2", "*MambaMixer")
def mixer(call: Call) -> dict[str, Expected]:
    """What ``out_proj`` gave."""
    if inside(call)[-1][0] != "out_proj":
        raise Declined("a block whose parts do not tell what it hands on")
    read = call.extra.get("read")
    found = {}
    for role, out in call.outputs.items():
        held = same(call, role, "out_proj", "output.0")
        records = [r for path, r_role, r in inside(call) if path == "out_proj" and r_role == "output.0"]
        if held is not None:
            found[role] = held
        elif role == "inplace.output" and read is not None and records[-1].shape[1:] == out.shape[1:]:
            rows = torch.arange(len(out)) < len(read(records[-1]))
            value = torch.zeros(out.shape, dtype=torch.float64)
            value[rows] = read(records[-1]).double()
            found[role] = Expected(value, None, 0.0, rows=rows, reason="padding")
    if not found:
        raise Declined("a block whose parts do not tell what it hands on")
    return {role: replace(expected, unseen=UNSEEN) for role, expected in found.items()}


_MADE = {
    "vllm.mamba_mixer2": ("selective_state_update_cpu", "mamba_chunk_scan_fwd_cpu"),
    "vllm.unified_attention_with_output": ("cpu_attention_with_kv_cache",),
    "vllm.cpu_gdn_attention_core": ("fused_sigmoid_gating_delta_rule_update_cpu", "chunk_gated_delta_rule_cpu"),
}
"""By opaque operator: the operators inside that make its rows, in the order of the rows."""
_WRITES = ("cpu_attn_reshape_and_cache", "concat_and_cache_mla", "index_put_")


@reference(*(f"torch.ops.{name}" for name in _MADE))
def opaque(call: Call) -> dict[str, Expected]:
    """The rows that the operators inside it made, in its buffer."""
    roles = [role for role in call.outputs if role.startswith("inplace.")]
    if len(roles) != 1:
        raise Declined(_INSIDE)
    out = call.outputs[roles[0]]
    made = next(names for name, names in _MADE.items() if f"{name}." in f"{call.cls}.")
    rows = [t for name in made for op, t in call.extra.get("inner", ()) if f".{name}." in f".{op}."]
    return {roles[0]: _in_buffer(out, rows)}


def _in_buffer(out: Tensor, rows: list[Tensor | None]) -> Expected:
    """These rows, one after the other, at the front of a buffer of at least as many. Raises Declined."""
    width = max(out[0].numel(), 1) if len(out) else 1
    flat = [None if t is None or t.numel() % width else t.reshape(-1, *out.shape[1:]) for t in rows]
    if not flat or any(f is None or f.dtype != out.dtype for f in flat):
        raise Declined(_INSIDE)
    value = torch.cat(flat).double()
    if len(value) > len(out):
        raise Declined(_INSIDE)
    known = torch.arange(len(out)) < len(value)
    whole = torch.zeros(out.shape, dtype=torch.float64)
    whole[: len(value)] = value
    return Expected(whole, None, 0.0, rows=known, reason="padding")


def _buffer(call: Call) -> tuple[str, Tensor]:
    roles = [role for role in call.outputs if role.startswith("inplace.")]
    if len(roles) != 1 or not len(call.outputs[roles[0]]):
        raise Declined(_INSIDE)
    return roles[0], call.outputs[roles[0]]


@reference("torch.ops.vllm.short_conv")
def opaque_convolution(call: Call) -> dict[str, Expected]:
    """(hidden_states, output, layer): its last act copies the rows of its output projection into ``output``."""
    role, out = _buffer(call)
    copies = [t for op, t in call.extra.get("inner", ()) if op.startswith("aten.copy_")]
    if not copies or copies[-1] is None or copies[-1].shape[1:] != out.shape[1:]:
        raise Declined(_INSIDE)
    return {role: _in_buffer(out, [copies[-1]])}


@reference("torch.ops.vllm.unified_mla_attention_with_output")
def opaque_latent(call: Call) -> dict[str, Expected]:
    """(q, kv_c, k_pe, output, ...): rows of single tokens first, what the second matrix made of the mixed latents
    [heads, rows, width]; then those of prompts, copied."""
    role, out = _buffer(call)
    rows: list[Tensor | None] = []
    decoding, prompt, mixed = False, None, None
    for op, t in call.extra.get("inner", ()):
        if "mla_decode_kvcache" in op:
            decoding = True
        elif op.startswith("aten.bmm") and decoding:
            mixed = t
        elif op.startswith("aten.copy_") and not decoding and t is not None and t.shape[1:] == out.shape[1:]:
            prompt = t
    if decoding:
        if mixed is None or mixed.dim() != 3:
            raise Declined(_INSIDE)
        rows.append(mixed.transpose(0, 1).reshape(mixed.shape[1], -1))
    if prompt is not None:
        rows.append(prompt)
    return {role: _in_buffer(out, rows)}


@reference("torch.ops.vllm.unified_kv_cache_update", "torch.ops.vllm.unified_mla_kv_cache_update")
def opaque_write(call: Call) -> dict[str, Expected]:
    """It gives an empty tensor, and writes by the operator inside it, which must be there."""
    if not any(f".{name}." in f".{op}." for name in _WRITES for op, _ in call.extra.get("inner", ())):
        raise Declined(_INSIDE)
    out = call.outputs["output.0"]
    if out.numel():
        raise Declined("its output has a content that no formula tells")
    return {"output.0": Expected(out.double(), unit=0.0)}
