"""Selective scans of Mamba 1 and 2, token by token, whatever chunks a kernel cuts them into.

Formula: h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t', y_t = h_t C_t + D x_t, times silu(z_t) where there is a gate, for a
state h [channels, n] of each head; dt = softplus(dt + bias) where the kernel does so [A. Gu and T. Dao, Mamba, arXiv
2312.00752, section 3.2; T. Dao and A. Gu, Transformers are SSMs, arXiv 2405.21060, section 2 and 7]. Mamba 1 has an A
of each channel and state, Mamba 2 one of each head; heads share B and C by groups. A kernel may round dt x, B, C, and
the state wherever it meets C, to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.judge.floor import unit as unit_of_dtype
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.references.recurrent.sequences import (
    EXPONENT,
    Rounds,
    arguments,
    changed,
    given,
    place_of,
    read_noise,
    runs,
    scattered,
    slots,
)

Tensor = Any  # a torch.Tensor


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
