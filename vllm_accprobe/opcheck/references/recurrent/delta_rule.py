"""The gated delta rule, token by token, whatever chunks a kernel cuts it into.

Formula: S_t = a_t S_(t-1) + k_t (b_t (v_t - a_t S_(t-1)' k_t))', o_t = s S_t' q_t for a state S [k, v] of each value
head, a decay a = exp(g), b in (0, 1), s = 1 / sqrt(k) unless it is given [S. Yang, J. Kautz and A. Hatamizadeh, Gated
Delta Networks, arXiv 2412.06464, equation 10]; chunked forms [section 3.3] are equal in exact arithmetic. q and k
divided by their norms where the kernel does so; value head h has the key head h // (value heads / key heads).
Qwen3-Next makes g = -exp(A_log) softplus(a + dt_bias) and b = sigmoid(b) of its projections. A kernel may round q, k,
the new value b (v - S'k), and the state wherever it meets q or k, to the model's dtype. Since |k| <= 1 and 0 <= b <=
2, what is off in the state never grows: I - b k k' has the norm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.judge.floor import unit as unit_of_dtype
from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, Call, Declined, Expected, reference
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

EPSILON = 1e-6
"""What is added to a sum of squares before its root: flash-linear-attention's l2norm, and vLLM's kernels for CPUs."""
Tensor = Any  # a torch.Tensor


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


def evaluated(
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
    y, states, noise = evaluated(
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
    y, states, noise = evaluated(call, a, a["cu_seqlens"], a["initial_state_indices"], eps=eps, key_first=True)
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


_UPDATE = (
    "A_log dt_bias q k v a b initial_state_source initial_state_indices cu_seqlens use_qk_l2norm_in_kernel "
    "softplus_beta softplus_threshold"
)


@reference("torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu")
def fused_update(call: Call) -> dict[str, Expected]:
    """(A_log, dt_bias, q, k, v, a, b, states, indices, cu_seqlens, use_qk_l2norm_in_kernel): one token of each
    sequence, states [slots, heads, k, v] changed where they lie."""
    a = dict(arguments(call, _UPDATE))
    a_log, bias, x, b = given(a, "A_log", "dt_bias", "a", "b")
    count = a["a"].shape[0]
    if math.prod(a["v"].shape[:-2]) != count:
        raise Declined("more than one token of a sequence")
    g, beta = gates(a_log, x, b, bias, float(a["softplus_beta"] or 1.0))
    a |= {"g": g, "beta": beta, "state": a["initial_state_source"]}
    eps = 1e-5 if a["use_qk_l2norm_in_kernel"] else None
    ends = torch.arange(count + 1)
    y, states, noise = evaluated(call, a, ends, a["initial_state_indices"], eps=eps, key_first=True)
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
