"""Samples of recurrences: the gated delta rule, Mamba's scans, short convolutions and their states; and of what opaque
operators leave in their buffers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from opcheck.samples.definitions import sigmoid
from opcheck.samples.dtypes import BRAIN, DOUBLE, INT, SINGLE
from opcheck.samples.sample import Array, Draw, Made, declined, made, sample, wide

from vllm_accprobe.opcheck.reference import Call

# --- the gated delta rule -------------------------------------------------------------------------------------------


def delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, fault: str, eps: float = 1e-5
) -> tuple[Array, Array]:
    """One sequence, token by token: q, k [t, h, n], v [t, hv, m], g, beta [t, hv], state [hv, n, m]."""
    share = v.shape[1] // q.shape[1]
    s, out = state.copy(), np.zeros(v.shape)
    norm = 1.0 if fault == "no norm" else np.sqrt((k * k).sum(-1, keepdims=True) + eps)
    key = (k / norm).repeat(share, 1)
    query = (q / np.sqrt((q * q).sum(-1, keepdims=True) + eps) / np.sqrt(q.shape[2])).repeat(share, 1)
    for i in range(len(v)):
        decay = np.exp(g[i])[:, None, None]
        s = s if fault == "decay after" else s * decay
        fresh = beta[i][:, None] * (v[i] - np.einsum("hn,hnm->hm", key[i], s))
        s = s + key[i][:, :, None] * fresh[:, None]
        s = s * decay if fault == "decay after" else s
        out[i] = np.einsum("hn,hnm->hm", query[i], s)
    return out, s


DELTA = "torch.ops._C.chunk_gated_delta_rule_cpu"


def delta_inputs(d: Draw, lengths: list[int], n: int, m: int, heads: int) -> tuple[Any, ...]:
    """Arguments of the operator. heads: of keys; of values there are twice as many."""
    t, values = sum(lengths), 2 * heads
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=INT)
    places = torch.from_numpy(d.rng.permutation(6)[: len(lengths)].astype(np.int32))
    return (d(1, t, heads, n), d(1, t, heads, n), d(1, t, values, m), d.between(-0.4, 0, 1, t, values),
            d.between(0, 1, 1, t, values, dtype=d.dtype), d(6, values, n, m, dtype=SINGLE), True, ends, False, True,
            places, 1e-5)  # fmt: skip


@sample("state of another slot", "last chunk dropped", "decay after", "no norm", seeds=2, dtypes=(BRAIN, SINGLE))
def gated_delta_rule(d: Draw, fault: str) -> Made:
    lengths = [12, 1, 20] if not d.seed else d.ints(4, 20, d.below(2, 5)).tolist()
    args = delta_inputs(d, lengths, d.below(3, 14), d.below(3, 14), d.below(1, 4))
    x, states, ends, places = [wide(t)[0] for t in args[:5]], wide(args[5]), args[7].tolist(), args[10].tolist()
    out, new = np.zeros(x[2].shape), states.copy()
    for n, at in enumerate(places):
        first = states[(at + 1) % 6] if fault == "state of another slot" else states[at]
        stop = ends[n + 1] - 3 if fault == "last chunk dropped" and lengths[n] > 3 else ends[n + 1]
        out[ends[n] : stop], new[at] = delta_rule(*(y[ends[n] : stop] for y in x), first, fault)
    return made(DELTA, *args, outputs={"output.0": (out[None], d.dtype), "inplace.input.5": (new, SINGLE)})


@sample("state of another slot", "decay after", "no norm", variants=[{"module": m} for m in (True, False)])
def delta_rule_of_flash_linear_attention(d: Draw, fault: str, module: bool) -> Made:
    """States [sequences, heads, v, k]."""
    lengths = [9, 14]
    q, k, v, g, beta, *_ = args = delta_inputs(d, lengths, 8, 6, 2)
    states, ends = d(2, 4, 6, 8, dtype=SINGLE), [0, 9, 23]
    x, out, new = [wide(t)[0] for t in args[:5]], np.zeros((1, 23, 4, 6)), np.zeros((2, 4, 6, 8))
    for n in range(2):
        first = wide(states)[1 - n if fault == "state of another slot" else n].swapaxes(1, 2)
        rows = slice(ends[n], ends[n + 1])
        out[0, rows], last = delta_rule(*(y[rows] for y in x), first, fault, 1e-6)
        new[n] = last.swapaxes(1, 2)
    numbers = torch.tensor(ends)
    if module:
        inputs = dict(zip(("q", "k", "v", "g", "beta", "initial_state", "output_final_state", "cu_seqlens"),
                          (q, k, v, g, beta, states, True, numbers), strict=True))  # fmt: skip
        return made("ChunkGatedDeltaRule", inputs=inputs, outputs={"output.0": out, "output.1": (new, SINGLE)})
    return made("torch.ops.vllm.chunk_gated_delta_rule", q, k, v, g, beta, None, states, False, numbers,
                kwargs={"use_qk_l2norm_in_kernel": True},
                outputs={"output.0": out, "output.1": (new, SINGLE)})  # fmt: skip


def gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, fault: str
) -> tuple[Array, Array]:
    x = wide(a) + (0 if fault == "no bias" else wide(bias))
    return -np.exp(wide(a_log)) * np.log1p(np.exp(x)), sigmoid(wide(b))


@sample("no bias", dtypes=(SINGLE,))
def gates_of_the_delta_rule(d: Draw, fault: str) -> Made:
    a_log, a, b, bias = d(4), d(7, 4), d(7, 4), d(4)
    g, beta = gates(a_log, a, b, bias, fault)
    return made("torch.ops._C.fused_gdn_gating_cpu", a_log, a, b, bias, outputs={"output.0": g, "output.1": beta},
                dtype=SINGLE)  # fmt: skip


@sample("no bias", "state of another slot", "no norm")
def delta_rule_of_one_token(d: Draw, fault: str) -> Made:
    """Of three sequences, with the gates inside."""
    q, k, v, states = d(1, 3, 2, 8), d(1, 3, 2, 8), d(1, 3, 4, 6), d(6, 4, 8, 6, dtype=SINGLE)
    a_log, a, b, bias, places = d(4, dtype=SINGLE), d(3, 4), d(3, 4), d(4, dtype=SINGLE), [4, 1, 3]
    g, beta = gates(a_log, a, b, bias, fault)
    out, new = np.zeros((1, 3, 4, 6)), wide(states).copy()
    for n, at in enumerate(places):
        first = wide(states)[places[n - 1] if fault == "state of another slot" else at]
        one = (wide(t)[0, n : n + 1] for t in (q, k, v))
        out[:, n], new[at] = delta_rule(*one, g[n : n + 1], beta[n : n + 1], first, fault)
    return made("torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu", a_log, bias, q, k, v, a, b, states,
                torch.tensor(places), torch.arange(4), True,
                outputs={"output.0": out, "inplace.input.7": (new, SINGLE)})  # fmt: skip


@sample(dtypes=(BRAIN, SINGLE))
def long_delta_rule_rounded_on_the_way(d: Draw, fault: str) -> Made:
    """A kernel that rounds its keys, new values and outputs, and adds up in float32, over 300 tokens."""
    args = delta_inputs(d, [300], 16, 16, 2)
    q, k, v, g, beta, states = (t.float() for t in args[:6])
    at, out = int(args[10][0]), []
    s = states[at].clone()
    for t in range(300):
        key, query = (x[0, t] * torch.rsqrt(x[0, t].square().sum(-1, True) + 1e-5) for x in (k, q))
        key, query = (x.to(d.dtype).float().repeat_interleave(2, 0) for x in (key, query / 4.0))
        s = s * g[0, t].exp()[:, None, None]
        fresh = (beta[0, t][:, None] * (v[0, t] - torch.einsum("hk,hkv->hv", key, s))).to(d.dtype).float()
        s = s + key[:, :, None] * fresh[:, None, :]
        out.append(torch.einsum("hk,hkv->hv", query, s.to(d.dtype).float()))
    new = states.clone()
    new[at] = s
    return made(DELTA, *args, outputs={"output.0": torch.stack(out)[None].to(d.dtype), "inplace.input.5": new})


# --- Mamba ----------------------------------------------------------------------------------------------------------


def scan(
    x: Array, dt: Array, a: Array, b: Array, c: Array, skip: Array, state: Array, fault: str
) -> tuple[Array, Array]:
    """One sequence: x [t, h, p], dt [t, h], a [h], b, c [t, groups, n], skip [h], state [h, p, n]."""
    share = x.shape[1] // b.shape[1]
    group = np.zeros(x.shape[1], int) if fault == "first group for all" else np.arange(x.shape[1]) // share
    s, out = state.copy(), np.zeros_like(x)
    for i in range(len(x)):
        decay = np.exp(dt[i] * a)[:, None, None]
        fed = (dt[i][:, None] * x[i])[:, :, None] * b[i, group][:, None]
        s = (s + fed) * decay if fault == "decay after" else s * decay + fed
        out[i] = (s * c[i, group][:, None]).sum(-1) + (0.0 if fault == "no skip" else skip[:, None] * x[i])
    return out, s


def _scan_inputs(d: Draw, tokens: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], tuple[int, int, int]]:
    groups = d.below(2, 4)
    h, p, n = groups * d.below(1, 4), d.below(2, 7), d.below(3, 9)
    return [d(tokens, h, p, dtype=dtype), d.between(0, 1, tokens, h), d.between(-2, 0, h),
            d(tokens, groups, n, dtype=dtype), d(tokens, groups, n, dtype=dtype),
            d(h, dtype=SINGLE)], (h, p, n)  # fmt: skip


CHUNKS = ("decay after", "first group for all", "no skip", "state of another sequence")


@sample(*CHUNKS, dtypes=(SINGLE,))
def mamba_2_of_varying_lengths(d: Draw, fault: str) -> Made:
    """Steps through a softplus, and a gate behind all."""
    (x, dt, a, b, c, skip), (h, p, n) = _scan_inputs(d, 14, SINGLE)
    first, ends, bias, z = d(2, h, p, n, dtype=SINGLE), [0, 5, 14], d(h, dtype=SINGLE), d(14, h, p)
    step, out, new = np.log1p(np.exp(wide(dt) + wide(bias))), np.zeros(x.shape), np.zeros(first.shape)
    for k in range(2):
        rows, at = slice(ends[k], ends[k + 1]), 1 - k if fault == "state of another sequence" else k
        y = (wide(x)[rows], step[rows], wide(a), wide(b)[rows], wide(c)[rows], wide(skip))
        out[rows], new[k] = scan(*y, wide(first)[at], fault)
    outputs = {"inplace.input.10": out * wide(z) * sigmoid(wide(z)), "output.0": new}
    return made("torch.ops.vllm.mamba_chunk_scan_combined_varlen", x, dt, a, b, c, 8, torch.tensor(ends), None, None,
                None, torch.zeros_like(x), skip, z, bias, first, True, None, False, outputs=outputs,
                dtype=SINGLE)  # fmt: skip


SCANS = ("decay after", "first group for all", "no skip", "last chunk dropped", "state of another sequence")


@sample(*SCANS, seeds=2, dtypes=(BRAIN, SINGLE), variants=[{"lengths": n} for n in ([1], [7, 1, 12], [3, 0, 5])])
def mamba_2_in_chunks(d: Draw, fault: str, lengths: list[int]) -> Made | None:
    if fault and lengths[0] != 7:
        return None
    (x, dt, a, b, c, skip), (h, p, n) = _scan_inputs(d, sum(lengths), d.dtype)
    first, ends = d(len(lengths), h, p, n, dtype=SINGLE), [0, *np.cumsum(lengths).tolist()]
    out, new = np.zeros(x.shape), wide(first).copy()
    for k in range(len(lengths)):
        stop = max(ends[k + 1] - 2, ends[k]) if fault == "last chunk dropped" else ends[k + 1]
        rows, begin = slice(ends[k], stop), new[k - 1] if fault == "state of another sequence" else new[k]
        out[rows], new[k] = scan(*(wide(t) if t.dim() == 1 else wide(t)[rows] for t in (x, dt, a, b, c, skip)), begin,
                                  fault)  # fmt: skip
    return made("torch.ops._C.mamba_chunk_scan_fwd_cpu", torch.zeros_like(x), first, x, dt, a, b, c, skip, None,
                torch.tensor(ends, dtype=INT),
                outputs={"inplace.input.0": (out, d.dtype), "inplace.input.1": (new, SINGLE)})  # fmt: skip


@sample("no bias", "state of another slot", seeds=3)
def mamba_2_of_one_token(d: Draw, fault: str) -> Made:
    """Of four sequences: one of them padding, one whose new state goes elsewhere."""
    (x, dt, a, b, c, skip), (h, p, n) = _scan_inputs(d, 4, SINGLE)
    bias, states = torch.linspace(-1, 1, h), d(7, h, p, n, dtype=SINGLE)
    reads, writes = torch.tensor([3, 0, 5, 1], dtype=INT), torch.tensor([3, 0, 6, 1], dtype=INT)
    out, new = np.zeros(x.shape), wide(states).copy()
    for k in (0, 2, 3):
        step = np.log1p(np.exp(wide(dt)[k : k + 1] + (0 if fault == "no bias" else wide(bias))))
        at = int(reads[(k + 2) % 4 if fault == "state of another slot" else k])
        one = [wide(t)[k : k + 1] for t in (x, b, c)]
        out[k], s = scan(one[0], step, wide(a), one[1], one[2], wide(skip), wide(states)[at], fault)
        new[int(reads[k])] = new[int(writes[k])] = s
    args = (states, x, dt[:, :, None].expand(-1, -1, p), a[:, None, None].expand(h, p, n), b, c,
            skip[:, None].expand(h, p), None, bias[:, None].expand(h, p), True, reads, writes, 0, torch.zeros_like(x),
            None, None)  # fmt: skip
    return made("torch.ops._C.selective_state_update_cpu", *args, dtype=SINGLE,
                outputs={"inplace.input.0": new, "inplace.input.13": out})  # fmt: skip


@sample("a token late", variants=[{"gated": g} for g in (True, False)])
def mamba_1(d: Draw, fault: str, gated: bool) -> Made:
    ends, places, begins, width, n = [0, 5, 11], [2, 1], [True, False], 6, 4
    u, delta, z = (d(width, 11, dtype=DOUBLE) for _ in range(3))
    a, skip, bias = d.between(-1, 0, width, n, dtype=DOUBLE), d(width, dtype=DOUBLE), d(width, dtype=DOUBLE)
    b, c, states = d(2, n, 11, dtype=DOUBLE), d(2, n, 11, dtype=DOUBLE), d(4, width, n, dtype=DOUBLE)
    out, new = np.zeros((width, 11)), wide(states).copy()
    for k in range(2):
        s = new[places[k]] if begins[k] else np.zeros((width, n))
        for t in range(ends[k], ends[k + 1]):
            dt = np.log1p(np.exp(wide(delta)[:, t] + wide(bias)))
            of_b, of_c = (wide(x)[np.arange(width) // 3, :, t] for x in (b, c))
            s = np.exp(dt[:, None] * wide(a)) * s + (dt * wide(u)[:, t])[:, None] * of_b
            out[:, t] = (s * of_c).sum(-1) + wide(skip) * wide(u)[:, t]
        new[places[k]] = s
    out = out * wide(z) * sigmoid(wide(z)) if gated else out
    args = (u, delta, a, b, c, skip, z if gated else None, bias, True, torch.tensor(ends), torch.tensor(places),
            torch.tensor(begins), states, -1)  # fmt: skip
    role = "inplace.input.6" if gated else "inplace.input.1"
    return made("torch.ops._C.selective_scan_fwd", *args, dtype=SINGLE,
                outputs={role: np.roll(out, 1, 1) if fault else out, "inplace.input.12": (new, DOUBLE)})  # fmt: skip


# --- short convolutions ---------------------------------------------------------------------------------------------


def convolved(
    x: Array, w: Array, bias: Array, state: Array, fault: str = "", act: bool = True
) -> tuple[Array, Array]:  # fmt: skip
    """x [t, d], w [d, width], state [d, width - 1]: outputs (act: through SiLU) and the last inputs."""
    width = w.shape[1]
    whole = np.concatenate((state, x.T), 1)
    early = np.concatenate((np.zeros((len(w), 1)), whole), 1) if fault == "one early" else whole
    y = np.stack([(early[:, i : i + width] * w).sum(1) + bias for i in range(len(x))])
    last = whole[:, -width:-1] if fault == "state one early" else whole[:, whole.shape[1] - width + 1 :]
    return y * sigmoid(y) if act else y, last


CONVOLUTIONS = ("one early", "state one early", "state of another slot", "stale state")


@sample(*CONVOLUTIONS, seeds=3, dtypes=(DOUBLE, BRAIN))
def short_convolution_of_a_batch(d: Draw, fault: str) -> Made:
    """Three sequences: new, continued, one of one token; states with more room than they need."""
    width, w_ = d.below(3, 12), d.below(2, 6)
    ends, places, begins = [0, 6, 8, 9], [2, 4, 1], [False, True, True]
    x, w, bias, states = d(width, 9), d(width, w_), d(width), d(5, width, w_ - 1)
    out, new = np.zeros((9, width)), wide(states).copy()
    for n in range(3):
        at = places[(n + 1) % 3] if fault == "state of another slot" else places[n]
        first = wide(states)[at] if begins[n] or fault == "stale state" else np.zeros((width, w_ - 1))
        rows = slice(ends[n], ends[n + 1])
        out[rows], new[places[n]] = convolved(wide(x).T[rows], wide(w), wide(bias), first, fault)
    args = (x, w, bias, states, torch.tensor(ends), torch.tensor(places), torch.tensor(begins), "silu")
    return made("torch.ops.vllm.causal_conv1d_fn", *args, dtype=d.dtype,
                outputs={"output.0": out.T, "inplace.input.3": new})  # fmt: skip


@sample("one early", "state one early", seeds=3, dtypes=(DOUBLE,))
def short_convolution_of_one_token(d: Draw, fault: str) -> Made:
    """Slot 0 is padding."""
    width, w_ = d.below(3, 12), d.below(2, 6)
    x, w, bias, states = d(3, width), d(width, w_), d(width), d(6, width, w_ - 1)
    places, out, new = [4, 0, 2], np.zeros((3, width)), wide(states).copy()
    for n in (0, 2):
        y, new[places[n]] = convolved(wide(x)[n : n + 1], wide(w), wide(bias), wide(states)[places[n]], fault)
        out[n] = y[0]
    return made("torch.ops._C.causal_conv1d_update_cpu_vec", x, states, w, bias, "silu", torch.tensor(places)[:, None],
                None, 0, outputs={"output.0": out, "inplace.input.1": new}, dtype=DOUBLE)  # fmt: skip


# --- opaque operators: the rows that what runs inside them made lie in their buffers, in the batch's order ----------

ORDERS = ("two rows exchanged", "prompts first")


def _in_order(rows: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "two rows exchanged":
        return rows[[1, 0, *range(2, len(rows))]]
    return rows.roll(2, 0) if fault else rows


@sample(*ORDERS, variants=[{"padding": p} for p in (9.0, 0.0)])
def latent_attention_of_a_batch(d: Draw, fault: str, padding: float) -> Made:
    """Two decode rows of 3 heads by 4, then five rows of prompts, then padding that nobody made."""
    prompt, mixed = d(5, 12), d(3, 2, 4)
    out = torch.cat((mixed.transpose(0, 1).flatten(1), prompt, torch.full((2, 12), padding, dtype=BRAIN)))
    inner: list[tuple[str, Any]] = [
        ("aten.copy_.default", torch.zeros(5, 3, 4)), ("aten.copy_.default", prompt),
        ("aten.bmm.out", torch.zeros(3, 2, 8)),
        ("_C.mla_decode_kvcache.default", torch.zeros(2, 3, 8)), ("aten.bmm.out", mixed),
    ]  # fmt: skip
    return made("vllm.unified_mla_attention_with_output.default", extra={"inner": inner},
                outputs={"inplace.input.3": _in_order(out, fault)})  # fmt: skip


@sample(*ORDERS)
def short_convolution_of_a_layer(d: Draw, fault: str) -> Made:
    rows = d(7, 12)
    inner = [("aten.copy_.default", torch.zeros(12, 7)), ("aten.vstack.default", None), ("aten.copy_.default", rows)]
    out = _in_order(torch.cat((rows, torch.full((2, 12), 9.0, dtype=BRAIN))), fault)
    return made("vllm.short_conv.default", extra={"inner": inner}, outputs={"inplace.input.1": out})


@sample(*ORDERS)
def mamba_of_a_layer(d: Draw, fault: str) -> Made:
    """Rows of decoded tokens, then those of prompts."""
    step, chunks = d(2, 12), d(5, 12)
    inner = [("_C.mamba_chunk_scan_fwd_cpu.default", chunks), ("_C.selective_state_update_cpu.default", step)]
    return made("torch.ops.vllm.mamba_mixer2.default", extra={"inner": inner},
                outputs={"inplace.input.1": _in_order(torch.cat((step, chunks)), fault)})  # fmt: skip


@declined
def opaque_operators_whose_inside_was_not_captured() -> Iterator[tuple[Call, str]]:
    for make in (
        lambda: latent_attention_of_a_batch(Draw(0), "", 9.0),
        lambda: short_convolution_of_a_layer(Draw(0), ""),
    ):
        call = make().call
        inner = [(op, None if op.startswith(("aten.copy_", "aten.bmm")) else t) for op, t in call.extra["inner"]]
        for changed in ([], inner):
            yield replace(call, extra={"inner": changed}), "inside"
    for op in ("vllm.unified_kv_cache_update.default", "vllm.unified_mla_kv_cache_update.default"):
        yield Call("x", op, outputs={"output.0": torch.zeros(0)}, extra={"inner": [("aten.ge.Scalar", None)]}), ""
