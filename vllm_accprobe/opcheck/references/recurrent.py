"""Recurrences token by token: short convolutions, selective scans, the gated delta rule.

Formulas: short convolution y_t = act(sum_j w_j x_(t - width + 1 + j) + bias), whose state becomes the last width - 1
inputs; selective scan h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t', y_t = h_t C_t + D x_t, times silu(z_t) where there is
a gate [A. Gu and T. Dao, Mamba, arXiv 2312.00752, section 3; T. Dao and A. Gu, arXiv 2405.21060, sections 2 and 7];
gated delta rule S_t = a_t S_(t-1) + k_t (b_t (v_t - a_t S_(t-1)' k_t))', o_t = s S_t' q_t [S. Yang, J. Kautz and A.
Hatamizadeh, Gated Delta Networks, arXiv 2412.06464, equation 10]. Chunked forms are equal in exact arithmetic. A kernel
may round operands, the new value b (v - S'k), and the state wherever it is read, to the model's dtype. Noise of the
last two is sampled (`scattered`): what stays in the state, and for how long, depends on the decays and keys of this
very call; errors in the state add up as independent ones, and fade with the decay. Convolutions: float32 sums of width
products [Higham, ASNA, (3.5)], one rounding before the activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, decline_if, reference
from vllm_accprobe.opcheck.references.parts import Arguments, RowResults, reshaped, runs, slots, unit_of
from vllm_accprobe.opcheck.roundings import APPROXIMATE, ROUNDED, SUM, gamma, once

SAMPLES = 8
"""Chosen: runs that the spread is taken from. The mean square of 8 is within a factor of 3 in all but 1 of 1,000; the
root mean square over a head's channels, which has hundreds, is the least that each gets."""
EXPONENT = 2.0**-18
"""Chosen: relative error of a decay, an exponential of a product that was rounded in float32 (vLLM's CPU kernels have
exp_u20: 2**-20; fast GPU ones 2**-22)."""
Rounds = Callable[[Any, float], Any]
Tensor = Any  # a torch.Tensor


def as_it_is(x: Tensor, unit: float) -> Tensor:
    return x


def at_random(seed: int) -> Rounds:
    """Roundings that are drawn: each number times 1 + u r, r uniform in [-1, 1], which has the variance of a rounding
    to nearest at most."""
    generator = torch.Generator().manual_seed(seed)
    return lambda x, u: x * (1.0 + u * (2.0 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1.0))


def samples_of(x: Tensor) -> Tensor:
    """x [1, ...] as SAMPLES of float32, from which the drawn roundings part."""
    return x.float().expand(SAMPLES, *x.shape[1:])


def scattered(evaluate: Callable[..., tuple[Tensor, ...]], *operands: Tensor | None) -> tuple[Any, ...]:
    """((value, noise), ...) for each result of ``evaluate(rounds, *operands)``. operands: float64, or None. Operands
    get a leading dimension, one or SAMPLES long; each result has it too. The last dimension is one head's: no element
    gets less noise than its root mean square.

    The recurrence is computed SAMPLES times more, in float32, with each quantity that a kernel may round,
    ``rounds(x, unit)``, rounded `at_random`; the spread of the results is the noise [Monte Carlo arithmetic: D. S.
    Parker, UCLA CSD-970002, 1997]."""
    one = [None if x is None else x.unsqueeze(0) for x in operands]
    exact = evaluate(as_it_is, *one)
    with torch.no_grad():
        samples = evaluate(at_random(0), *(None if x is None else samples_of(x) for x in one))
    return tuple(spread_of(value, sample) for value, sample in zip(exact, samples, strict=True))


def spread_of(value: Tensor, samples: Tensor, heads: int | None = None) -> tuple[Tensor, Tensor]:
    """(value, noise) from a value [1, ...] and samples of it. heads: into which its last dimension falls apart, None
    where that is one head's."""
    spread = (samples.double() - value).square().mean(0)
    by_head = spread if heads is None else spread.unflatten(-1, (heads, -1))
    head = by_head.mean(-1, keepdim=True).expand(by_head.shape).reshape(spread.shape)
    return value[0], torch.maximum(spread, head).sqrt() + SUM * value[0].abs()


def read_noise(state: Tensor, weights: Tensor, unit: float, rounds: Rounds) -> Tensor | float:
    """What rounding ``state`` [..., k, v] for a product with ``weights`` [..., k] adds, [..., v]; 0 for the exact
    one."""
    if rounds is as_it_is:
        return 0.0
    size = torch.einsum("...k,...kv->...v", weights * weights, state * state).sqrt()
    return rounds(torch.ones_like(size), unit) * size - size


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


def in_order(packed: Tensor) -> Tensor:
    """A weight [d, width] packed for AMX or AVX-512: of 32 channels two neighbouring taps each, then the next two."""
    d, width = packed.shape[0], packed.numel() // max(packed.shape[0], 1)
    decline_if(d % _CHANNELS or width % 2, f"a packed weight of {list(packed.shape)} is not known here")
    whole = packed.contiguous().reshape(d // _CHANNELS, width // 2, _CHANNELS, 2)
    return whole.permute(0, 2, 1, 3).reshape(packed.shape)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sums before the activation [t, d], their sizes, last inputs [d, width - 1]) of x [t, d], weight [d, width],
    first."""
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
) -> tuple[RowResults, Tensor | None]:  # fmt: skip
    """(results [tokens, d], states) of rows x [tokens, d]; states [slots, d, width - 1 or more, of which the first are
    used]; masks: bool, which sequences begin from theirs, None for all."""
    weight = weight.double().reshape(weight.shape[0], -1)
    width = weight.shape[1]
    if x.shape[1] != len(weight) or (states is not None and states.shape[-1] < width - 1):
        raise Declined("its weight does not fit its input")
    bias = bias.double() if isinstance(bias, torch.Tensor) else None
    found = RowResults(len(x), x.shape[1])
    new = None if states is None else states.double().clone()
    for n, ((begin, end), at) in enumerate(zip(bounds, places, strict=True)):
        if at is None or begin == end:
            continue
        first = torch.zeros(len(weight), width - 1, dtype=torch.float64)
        if states is not None and (masks is None or bool(masks[n])):
            first = states[at, :, : width - 1].double()
        y, size, last = convolved(x[begin:end], weight, bias, first)
        found.put(slice(begin, end), activated(y, size, width, call.unit, silu))
        if new is not None:
            new[at, :, : width - 1] = last
    return found, new


def _convolution(found: RowResults, shape: Any, turned: bool) -> Expected:
    """turned: the output has channels first."""
    value, noise, bound = found.parts
    decline_if(turned and found.rows() is not None, "some of its tokens belong to no sequence")
    y = Expected(value, noise, bound=bound, rows=found.rows(), reason="padding")
    return y.map(lambda t: (t.T if turned else t).reshape(shape))


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
    f = Arguments(call, _FORWARD + (" is_weight_packed" if call.cls.endswith("fwd_cpu.default") else ""))
    x, weight = f.wide("x", "weight")
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
    found = {out: _convolution(y, f["x"].shape, turned)}
    if new is not None:
        found[f.role("conv_states")] = _kept(new, f["x"], states)
    return found


_UPDATES = {
    "causal_conv1d_update_cpu_vec": "x conv_state weight bias activation conv_state_indices query_start_loc null",
    "causal_conv1d_update_cpu": "x conv_state weight bias activation num_accepted conv_state_indices null packed",
    "causal_conv1d_update": "x conv_state weight bias activation conv_state_indices num_accepted query_start_loc",
}


@reference(*(f"torch.ops._C.{name}" for name in _UPDATES), "torch.ops.*.causal_conv1d_update")
def update(call: Call) -> dict[str, Expected]:
    """(x [batch, d] or [batch, d, tokens], states [slots, d, width - 1], ...): the next tokens of each sequence."""
    short = call.cls.removeprefix("torch.ops.").split(".")[1]
    f = Arguments(call, _UPDATES.get(short, _UPDATES["causal_conv1d_update"]))
    if f.get("num_accepted") is not None:
        raise Declined("speculative tokens, of which inputs are kept, have no reference here")
    x, states, weight = f.wide("x", "conv_state", "weight")
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
        value, noise, bound = (p.reshape(len(x), tokens, -1).transpose(1, 2) for p in y.parts)
        known = y.known.reshape(len(x), tokens).all(1)
        found = Expected(value, noise, bound=bound, rows=None if bool(known.all()) else known, reason="padding")
    else:
        found = _convolution(y, x.shape, False)
    out = "output.0" if "output.0" in call.outputs else "inplace.input.0"
    assert new is not None
    return {out: found, f.role("conv_state"): _kept(new, f["x"], f["conv_state"])}


def scan(
    rounds: Rounds, unit: float, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    z: Tensor | None, state: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs [..., t, heads, channels], last state [..., heads, channels, n]) of one sequence: x, z [..., t, heads,
    channels], dt [..., t, heads, channels or 1], a, d [..., heads, channels or 1, (n or 1)], b, c [..., t, heads,
    n]."""
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
    """B or C [..., groups, n] for each head."""
    decline_if(heads % x.shape[-2], "its heads are no multiple of its groups")
    return x.repeat_interleave(heads // x.shape[-2], -2)


def by_sequence(
    evaluate: Callable[..., Any], tokens: Sequence[Tensor | None], like: Tensor, bounds: list[tuple[int, int]],
    places: list[int | None], first: Callable[[int, int], Tensor],
) -> tuple[RowResults, dict[int, tuple[Tensor, Tensor]]]:  # fmt: skip
    """(outputs and their noise, the last states and theirs by place) of ``evaluate(rounds, *tokens, state)`` for the
    rows of each sequence. like: the shape of all outputs; first(n, place): the state from which sequence n begins."""
    found, new = RowResults(len(like)), {}
    found.parts = [torch.zeros_like(like), torch.zeros_like(like)]
    for n, ((begin, end), at) in enumerate(zip(bounds, places, strict=True)):
        if at is not None and begin != end:
            rows = (None if t is None else t[begin:end] for t in tokens)
            part, new[at] = scattered(evaluate, *rows, first(n, at))
            found.put(slice(begin, end), part)
    return found, new


def scanned(
    unit: float, bounds: list[tuple[int, int]], places: list[int | None], tokens: Mapping[str, Tensor | None],
    a: Tensor, d: Tensor | None, states: Tensor, masks: Tensor | None = None,
) -> tuple[RowResults, tuple[Tensor, Tensor]]:  # fmt: skip
    """Outputs and their noise, (states, noise). tokens: x, dt, b, c, z of all rows, float64; states: [slots,
    heads, channels, n]; masks: bool, which sequences begin from theirs, None for all."""

    def evaluate(rounds: Rounds, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor | None, state: Tensor) -> Any:
        return scan(rounds, unit, x, dt, a.to(x.dtype), b, c, None if d is None else d.to(x.dtype), z, state)

    def first(n: int, at: int) -> Tensor:
        state = states[at].double()
        return state if masks is None or bool(masks[n]) else torch.zeros_like(state)

    x = tokens["x"]
    found, new = by_sequence(evaluate, [x, *(tokens[k] for k in ("dt", "b", "c", "z"))], x, bounds, places, first)
    return found, changed(states, new)


def _scan_output(found: RowResults, like: Tensor, heads: int) -> Expected:
    value, noise = found.parts
    rows = found.rows()
    if value.numel() != like.numel() or (rows is not None and like.shape[0] != len(rows)):
        raise Declined("its output has another shape than its input, or some of its rows belong to no sequence")
    return Expected(value.reshape(like.shape), noise.reshape(like.shape), rows=rows, reason="padding", groups=heads,
                    shared=True)  # fmt: skip


def _states(value: Tensor, noise: Tensor, heads: int) -> Expected:
    return Expected(value, noise, groups=heads, shared=True)


def _by_chunks(
    f: Arguments, dt: Tensor, first: Tensor | None, like: Tensor
) -> tuple[Expected, Expected]:  # fmt: skip
    """(outputs, states) of x [tokens, heads, channels], A [heads], B, C [tokens, groups, n]; dt [tokens, heads]; first:
    states [sequences, heads, channels, n], None for 0."""
    x, a, b, c = f.wide("x", "A", "B", "C")
    heads, bounds = x.shape[1], runs(f["cu_seqlens"], len(x))
    if first is None:
        first = torch.zeros(len(bounds), heads, x.shape[-1], b.shape[-1])
    decline_if(len(bounds) > len(first), "more sequences than states")
    d, z = f.wide_or_none("D"), f.wide_or_none("z")
    tokens = {"x": x, "dt": dt.unsqueeze(-1), "b": by_heads(b, heads), "c": by_heads(c, heads),
              "z": None if z is None else z.reshape(x.shape)}  # fmt: skip
    y, states = scanned(unit_of(f["x"]), bounds, list(range(len(bounds))), tokens, a.reshape(heads, 1, 1),
                        None if d is None else d.reshape(heads, -1), first)  # fmt: skip
    return _scan_output(y, like, heads), _states(*states, heads)


@reference("torch.ops._C.mamba_chunk_scan_fwd_cpu")
def chunk_scan(call: Call) -> dict[str, Expected]:
    """(out, states, x, dt, A, B, C, D, z, cu_seqlens): dt as the recurrence has it, states both in and out."""
    f = Arguments(call, "out final_states x dt A B C D z cu_seqlens")
    (dt,) = f.wide("dt")
    y, states = _by_chunks(f, dt, f["final_states"], f["out"])
    return {"inplace.input.0": y, "inplace.input.1": states}


_VARLEN = (
    "x dt A B C chunk_size cu_seqlens cu_chunk_seqlens last_chunk_indices seq_idx out D z dt_bias initial_states "
    "dt_softplus dt_limit return_intermediate_states state_dtype"
)


@reference("torch.ops.*.mamba_chunk_scan_combined_varlen")
def chunk_scan_combined(call: Call) -> dict[str, Expected]:
    """(x [tokens, heads, channels], dt [tokens, heads], A [heads], B, C [tokens, groups, n], ...) of Mamba 2."""
    f = Arguments(call, _VARLEN)
    decline_if(f["return_intermediate_states"], "the states between chunks have no reference")
    (dt,) = f.wide("dt")
    dt = steps(dt, f.wide_or_none("dt_bias"), bool(f["dt_softplus"]))
    if f["dt_limit"] is not None:
        dt = dt.clamp(float(f["dt_limit"][0]), float(f["dt_limit"][1]))
    y, states = _by_chunks(f, dt, f["initial_states"], f["x"])
    return {f.role("out"): y, "output.0": states}


_UPDATE = (
    "state x dt A B C D z dt_bias dt_softplus state_batch_indices dst_state_batch_indices null_block_id out "
    "num_accepted_tokens cu_seqlens"
)


@reference("torch.ops._C.selective_state_update_cpu", "torch.ops.*.selective_state_update")
def state_update(call: Call) -> dict[str, Expected]:
    """(state [slots, heads, channels, n], x [tokens, heads, channels], dt, A, B, C, ...): one token of each sequence,
    or runs of them by cu_seqlens; the new state lies in dst_state_batch_indices, or where the old one was."""
    f = Arguments(call, _UPDATE if "_cpu" in call.cls else _UPDATE.replace("z dt_bias", "dt_bias z"))
    if f["num_accepted_tokens"] is not None:
        raise Declined("speculative tokens, of which states are kept, have no reference here")
    state, x, dt, a, b, c = f.wide("state", "x", "dt", "A", "B", "C")
    plain = state.dim() == 3  # Mamba 1: no heads
    if plain:
        state, x, dt, a, b, c = (t.unsqueeze(0 if t is a else 1) for t in (state, x, dt, a, b, c))
    slots_, heads, channels, n = state.shape
    x = x.reshape(-1, heads, channels)
    dt = dt.reshape(len(x), heads, -1) if dt.numel() != len(x) * heads else dt.reshape(len(x), heads, 1)
    shapes = {"dt_bias": (heads, -1), "D": (heads, -1), "z": x.shape}
    bias, d, z = (None if f[n] is None else f[n].double().reshape(shape) for n, shape in shapes.items())
    dt = steps(dt, bias, bool(f["dt_softplus"]))
    bounds = [(t, t + 1) for t in range(len(x))] if f["cu_seqlens"] is None else runs(f["cu_seqlens"], len(x))
    null = f["null_block_id"]
    reads = list(slots(f["state_batch_indices"], len(bounds), slots_, null))
    writes = reads
    if f["dst_state_batch_indices"] is not None:
        writes = list(slots(f["dst_state_batch_indices"], len(bounds), slots_, null))
    tokens = {"x": x, "dt": dt, "b": by_heads(b.reshape(len(x), -1, n), heads),
              "c": by_heads(c.reshape(len(x), -1, n), heads), "z": z}  # fmt: skip
    y, states = scanned(unit_of(f["x"]), bounds, reads, tokens, a.reshape(heads, -1, a.shape[-1]), d, state)
    elsewhere = [(r, w) for r, w in zip(reads, writes, strict=True) if r is not None and w is not None and r != w]
    for read, write in elsewhere:
        for new in states:
            new[write] = new[read]
    out = f.role("out") if f["out"] is not None else "output.0"
    found = {out: _scan_output(y, f["x"], heads)}
    moved = _states(*states, heads)
    if elsewhere:  # what lies where the old state was read, kernels leave as they like
        rows = torch.ones(slots_, dtype=torch.bool)
        rows[[read for read, _ in elsewhere]] = False
        moved = Expected(*states, rows=rows, reason="a state that has moved on", groups=heads, shared=True)
    if plain:
        moved = replace(moved.map(lambda t: t.squeeze(1)), groups=None)
    return found | {f.role("state"): moved}


_SELECTIVE = (
    "u delta A B C D z delta_bias delta_softplus query_start_loc cache_indices has_initial_state ssm_states "
    "null_block_id block_size"
)


@reference("torch.ops._C.selective_scan_fwd")
def selective_scan(call: Call) -> dict[str, Expected]:
    """Mamba 1: (u [channels, tokens], delta, A [channels, n], B, C [groups, n, tokens], D, z, ...): the result lies
    in z where there is one, else in delta; states [slots, channels, n] changed where they lie."""
    f = Arguments(call, _SELECTIVE)
    u, delta, a, b, c, states = f.wide("u", "delta", "A", "B", "C", "ssm_states")
    decline_if(u.dim() != 2 or f["query_start_loc"] is None, "a batch of equal lengths has no reference here")
    x = u.T.unsqueeze(-1)  # each channel is a head of one
    bias, d, z = map(f.wide_or_none, ("delta_bias", "D", "z"))
    dt = steps(delta.T.unsqueeze(-1), None if bias is None else bias.reshape(-1, 1), bool(f["delta_softplus"]))
    heads, n = x.shape[1], a.shape[-1]
    z = None if z is None else z.T.unsqueeze(-1)
    by_token = [t.reshape(-1, n, len(x)).permute(2, 0, 1) for t in (b, c)]
    tokens = {"x": x, "dt": dt, "b": by_heads(by_token[0], heads), "c": by_heads(by_token[1], heads), "z": z}
    d = None if d is None else d.reshape(heads, 1)
    bounds = runs(f["query_start_loc"], len(x))
    places = list(slots(f["cache_indices"], len(bounds), len(states), f["null_block_id"]))
    y, new = scanned(unit_of(f["u"]), bounds, places, tokens, a.unsqueeze(1), d, states.unsqueeze(2),
                     f["has_initial_state"])  # fmt: skip
    decline_if(y.rows() is not None, "some of its tokens belong to no sequence")
    value, noise = y.parts
    return {
        f.role("delta" if f["z"] is None else "z"): Expected(value.squeeze(-1).T, noise.squeeze(-1).T, shared=True),
        f.role("ssm_states"): Expected(new[0].squeeze(2), new[1].squeeze(2), shared=True),
    }


EPSILON = 1e-6
"""What is added to a sum of squares before its root: flash-linear-attention's l2norm, and vLLM's kernels for CPUs."""


def _norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def rule(
    rounds: Rounds, unit: float, scale: float, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs [..., t, h, v], last state [..., h, k, v]): q, k [..., t, h, k], v [..., t, h, v], g, beta [..., t,
    h]."""
    q, k = rounds(q * scale, unit), rounds(k, unit)
    out = []
    for t in range(q.shape[-3]):
        key, query = k[..., t, :, :], q[..., t, :, :]
        state = state * rounds(g[..., t, :].exp(), EXPONENT)[..., None, None]
        stored = torch.einsum("...hk,...hkv->...hv", key, state) + read_noise(state, key, unit, rounds)
        fresh = rounds((v[..., t, :, :] - stored) * beta[..., t, :, None], unit)
        state = state + key[..., None] * fresh[..., None, :]
        out.append(torch.einsum("...hk,...hkv->...hv", query, state) + read_noise(state, query, unit, rounds))
    return torch.stack(out, -3), state


def evaluated_delta_rule(
    call: Call, f: Arguments, ends: Tensor | None, indices: Tensor | None, *, eps: float | None, key_first: bool,
    scale: float | None = None,
) -> tuple[Expected, Expected | None]:  # fmt: skip
    """The outputs [tokens, value heads, v], and all states, None where the call has none. f: q, k, v, g, beta and
    ``state`` [states, heads, k, v], or with k last."""
    q, k, v, g, beta = f.wide("q", "k", "v", "g", "beta")
    heads, width = v.shape[-2:]
    q, k = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
    v, g = v.reshape(-1, heads, width), g.reshape(-1, heads)
    beta = beta.reshape(-1, heads)
    if heads % q.shape[1] or len(g) != len(v) or len(beta) != len(v) or len(q) != len(v):
        raise Declined("its heads or gates do not fit one another")
    unit = unit_of(f["v"])
    batch = f["q"].shape[0] if ends is None and f["q"].dim() == 4 else 1
    length = len(v) // batch
    bounds = [(n * length, (n + 1) * length) for n in range(batch)] if ends is None else runs(ends, len(v))
    states = f.get("state")
    places = list(slots(indices, len(bounds), len(bounds) if states is None else len(states)))
    share, times = heads // q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale

    def evaluate(rounds: Rounds, q: Tensor, k: Tensor, *rest: Tensor) -> Any:
        q, k = (x if eps is None else _norm(x, eps) for x in (q, k))
        return rule(rounds, unit, times, *(x.repeat_interleave(share, -2) for x in (q, k)), *rest)

    def first(n: int, at: int) -> Tensor:
        if states is None:
            return torch.zeros(heads, q.shape[-1], width, dtype=torch.float64)
        return states[at].double() if key_first else states[at].double().transpose(-1, -2)

    found, new = by_sequence(evaluate, (q, k, v, g, beta), v, bounds, places, first)
    if not key_first:
        new = {at: (x.transpose(-1, -2), e.transpose(-1, -2)) for at, (x, e) in new.items()}
    y = _scan_output(found, call.outputs.get("output.0", v), heads)
    if states is not None:
        return y, _states(*changed(states, new), heads)
    if not new:
        return y, None
    value, noise = (torch.stack([new[n][side] for n in sorted(new)]) for side in (0, 1))
    return y, _states(value, noise, heads)


_FLA = "q k v g beta scale initial_state inplace_final_state cu_seqlens ssm_state_indices num_accepted_tokens"


@reference(
    "torch.ops.*.fused_recurrent_gated_delta_rule", "torch.ops.*.chunk_gated_delta_rule", "ChunkGatedDeltaRule",
    "torch.ops.*.recurrent_gated_delta_rule",
)  # fmt: skip
def flash_linear_attention(call: Call) -> dict[str, Expected]:
    """(q, k, v, g, beta, scale, initial_state, ...) of flash-linear-attention as vLLM 0.32 has it: states [sequences,
    heads, v, k], changed where they lie if ``inplace_final_state``; ChunkGatedDeltaRule has no scale."""
    module = call.cls == "ChunkGatedDeltaRule"
    a = Arguments(call, "q k v g beta initial_state output_final_state cu_seqlens" if module else _FLA)
    if a.get("num_accepted_tokens") is not None:
        raise Declined("speculative tokens, of which states are kept, have no reference here")
    if a["beta"] is None:
        a["beta"] = torch.ones_like(a["g"])
    norm = call.attrs if module else call.kwargs
    eps = EPSILON if norm.get("use_qk_l2norm_in_kernel", module) else None
    a["state"] = a["initial_state"]
    y, states = evaluated_delta_rule(
        call, a, a["cu_seqlens"], a.get("ssm_state_indices"), eps=eps, key_first=False, scale=a.get("scale")
    )
    found = {"output.0": y}
    if states is not None:
        found["output.1"] = found[a.role("initial_state")] = states
    return found


_CHUNK = (
    "q k v g beta initial_state output_final_state cu_seqlens head_first use_qk_l2norm_in_kernel "
    "initial_state_indices eps"
)


@reference("torch.ops._C.chunk_gated_delta_rule_cpu")
def chunked_on_cpu(call: Call) -> dict[str, Expected]:
    """(query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel,
    initial_state_indices, eps): states [slots, heads, k, v], changed where they lie."""
    a = Arguments(call, _CHUNK)
    decline_if(a["head_first"], "heads before tokens have no reference")
    a["state"] = a["initial_state"]
    eps = float(a["eps"] if a["eps"] is not None else 1e-5) if a["use_qk_l2norm_in_kernel"] else None
    indices = a["initial_state_indices"]
    y, states = evaluated_delta_rule(call, a, a["cu_seqlens"], indices, eps=eps, key_first=True)
    assert states is not None
    return {"output.0": y, "output.1": states, "inplace.input.5": states}


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias) and sigmoid(b) of Gated DeltaNet, float64."""
    return -a_log.exp() * F.softplus(a + dt_bias, beta), torch.sigmoid(b)


@reference("torch.ops._C.fused_gdn_gating_cpu", "torch.ops.*.fused_gdn_gating", "torch.ops.*.npu_fused_gdn_gating")
def gating(call: Call) -> dict[str, Expected]:
    """(A_log, a, b, dt_bias): the logarithm of the decay, and beta."""
    f = Arguments(call, "A_log a b dt_bias beta threshold")
    a_log, a, b, bias = f.wide("A_log", "a", "b", "dt_bias")
    g, beta = gates(a_log, a, b, bias, float(f["beta"] or 1.0))
    # a + dt_bias is rounded once to float32 at least, which softplus, with a slope of 1 at most, hands on
    slack = 2.0**-22 * (g.abs() + a_log.exp() * (a.abs() + bias.abs()))
    # two exponentials and a logarithm
    most = 3.0 * APPROXIMATE * g.abs() + slack
    shapes = [call.outputs[f"output.{n}"].shape for n in (0, 1)]
    # 1 / (1 + e**-b) by a dtype's own operators: e**-b and 1 + e**-b may each be rounded to it
    u = unit_of(call.outputs["output.1"])
    noise, bound = ROUNDED * u * beta * ((1.0 - beta) ** 2 + 1.0).sqrt(), (u * (2.0 - beta) + APPROXIMATE) * beta
    return {
        "output.0": reshaped(Expected(g, slack, bound=most), shapes[0]),
        "output.1": reshaped(Expected(beta, noise, bound=bound), shapes[1]),
    }


_DELTA_RULE_UPDATE = (
    "A_log dt_bias q k v a b initial_state_source initial_state_indices cu_seqlens use_qk_l2norm_in_kernel "
    "softplus_beta softplus_threshold"
)


@reference("torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu")
def fused_update(call: Call) -> dict[str, Expected]:
    """(A_log, dt_bias, q, k, v, a, b, states, indices, cu_seqlens, use_qk_l2norm_in_kernel): one token of each
    sequence, states [slots, heads, k, v] changed where they lie."""
    a = Arguments(call, _DELTA_RULE_UPDATE)
    a_log, bias, x, b = a.wide("A_log", "dt_bias", "a", "b")
    count = a["a"].shape[0]
    decline_if(math.prod(a["v"].shape[:-2]) != count, "more than one token of a sequence")
    g, beta = gates(a_log, x, b, bias, float(a["softplus_beta"] or 1.0))
    a |= {"g": g, "beta": beta, "state": a["initial_state_source"]}
    eps = 1e-5 if a["use_qk_l2norm_in_kernel"] else None
    ends = torch.arange(count + 1)
    y, states = evaluated_delta_rule(call, a, ends, a["initial_state_indices"], eps=eps, key_first=True)
    assert states is not None
    # the gates' own roundings, of one token each: relative to what comes out and to what is forgotten
    extra = 2.0 * ROUNDED * unit_of(call.outputs["output.0"]) * y.value.abs()
    y = replace(y, noise=combined(y.noise, extra))
    return {"output.0": y, "inplace.input.7": states}
