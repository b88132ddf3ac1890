"""Mamba's scans against their definition in numpy, written out token by token, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drawn_sizes import drawn_sizes
from family_verdict import verdict
from reference_calls import evaluated

from vllm_accprobe.opcheck.reference import Call


def defined(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, state: Any, fault: str = "") -> tuple[Any, Any]:
    """One sequence, plain loops: x [t, h, p], dt [t, h], a [h], b, c [t, groups, n], d [h], state [h, p, n]."""
    t, heads, p = x.shape
    share, n = heads // b.shape[1], b.shape[2]
    s, out = state.copy(), np.zeros_like(x)
    for i in range(t):
        for h in range(heads):
            group = 0 if fault == "first group for all" else h // share
            for q in range(p):
                y = 0.0
                for r in range(n):
                    decay, fed = np.exp(dt[i, h] * a[h]), dt[i, h] * x[i, h, q] * b[i, group, r]
                    s[h, q, r] = (s[h, q, r] + fed) * decay if fault == "decay after" else s[h, q, r] * decay + fed
                    y += s[h, q, r] * c[i, group, r]
                out[i, h, q] = y + (0.0 if fault == "no skip" else d[h] * x[i, h, q])
    return out, s


H, P, G, N = 4, 3, 2, 5
"""Heads, their width, groups, and the width of a state."""
sizes = drawn_sizes(__name__, G=(2, 4), H=lambda r, of: of["G"] * int(r.integers(1, 4)), P=(2, 7), N=(3, 9))


def drawn(seed: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    r = np.random.default_rng(seed)

    def of(values: np.ndarray, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_numpy(values).to(kind)

    return (
        of(r.normal(size=(tokens, H, P)), dtype), of(r.random((tokens, H))), of(-2 * r.random(H)),
        of(r.normal(size=(tokens, G, N)), dtype), of(r.normal(size=(tokens, G, N)), dtype), of(r.normal(size=H)),
    )  # fmt: skip


def wide(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [t.double().numpy() for t in tensors]


def chunked(seed: int, lengths: list[int], dtype: torch.dtype, fault: str = "") -> Call:
    x, dt, a, b, c, d = drawn(seed, sum(lengths), dtype)
    first = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=(len(lengths), H, P, N))).float()
    ends = [0, *np.cumsum(lengths).tolist()]
    out, new = np.zeros(x.shape), first.double().numpy().copy()
    for n in range(len(lengths)):
        rows = slice(ends[n], ends[n + 1])
        stop = slice(ends[n], max(ends[n + 1] - 2, ends[n])) if fault == "last chunk dropped" else rows
        begin = new[n - 1] if fault == "state of another sequence" else new[n]
        out[stop], new[n] = defined(*wide(x[stop], dt[stop], a, b[stop], c[stop], d), begin, fault)
    args = (torch.zeros_like(x), first, x, dt, a, b, c, d, None, torch.tensor(ends, dtype=torch.int32))
    outputs = {"inplace.input.0": torch.from_numpy(out).to(dtype), "inplace.input.1": torch.from_numpy(new).float()}
    call = Call("x", "torch.ops._C.mamba_chunk_scan_fwd_cpu", args=args, outputs=outputs)
    if not fault:
        found = evaluated(call)
        np.testing.assert_allclose(found["inplace.input.0"].value, out, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(found["inplace.input.1"].value, new, rtol=1e-9, atol=1e-10)
    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[1], [7, 1, 12], [3, 0, 5]])
def test_chunks_are_the_definition(lengths: list[int], dtype: torch.dtype) -> None:
    call = chunked(len(lengths), lengths, dtype)
    assert all(verdict(call, role, mine).passed for role, mine in call.outputs.items())


@pytest.mark.parametrize(
    "fault", ["decay after", "first group for all", "no skip", "last chunk dropped", "state of another sequence"]
)
def test_a_wrong_scan_is_found(fault: str) -> None:
    right, wrong = (chunked(5, [9, 14], torch.bfloat16, f) for f in ("", fault))
    assert any(not verdict(right, role, wrong.outputs[role]).passed for role in right.outputs)


def updated(fault: str = "") -> Call:
    """One token of four sequences: one of them padding, one whose new state goes elsewhere."""
    x, dt, a, b, c, d = drawn(2, 4, torch.float32)
    bias = torch.linspace(-1, 1, H)
    states = torch.from_numpy(np.random.default_rng(8).normal(size=(7, H, P, N))).float()
    reads, writes = torch.tensor([3, 0, 5, 1], dtype=torch.int32), torch.tensor([3, 0, 6, 1], dtype=torch.int32)
    out, new = np.zeros(x.shape), states.double().numpy().copy()
    held = new.copy()
    for n in (0, 2, 3):
        raw = dt[n].double().numpy() + (0 if fault == "no bias" else bias.double().numpy())
        step = np.log1p(np.exp(raw))
        at = int(reads[(n + 2) % 4]) if fault == "state of another slot" else int(reads[n])
        y, s = defined(*wide(x[n : n + 1]), step[None], *wide(a, b[n : n + 1], c[n : n + 1], d), held[at])
        out[n], new[int(reads[n])], new[int(writes[n])] = y[0], s, s
    expand = dt[:, :, None].expand(-1, -1, P)
    args = (states, x, expand, a[:, None, None].expand(H, P, N), b, c, d[:, None].expand(H, P), None,
            bias[:, None].expand(H, P), True, reads, writes, 0, torch.zeros_like(x), None, None)  # fmt: skip
    outputs = {"inplace.input.0": torch.from_numpy(new).float(), "inplace.input.13": torch.from_numpy(out).float()}
    return Call("x", "torch.ops._C.selective_state_update_cpu", args=args, outputs=outputs)


def test_one_token_is_the_definition() -> None:
    call = updated()
    found = evaluated(call)
    assert found["inplace.input.13"].rows.tolist() == [True, False, True, True]
    for role, mine in call.outputs.items():
        rows = found[role].rows
        torch.testing.assert_close(found[role].value[rows], mine.double()[rows], rtol=1e-6, atol=1e-6)
        assert verdict(call, role, mine).passed


@pytest.mark.parametrize("fault", ["no bias", "state of another slot"])
def test_a_wrong_update_is_found(fault: str) -> None:
    right, wrong = updated(), updated(fault)
    assert any(not verdict(right, role, wrong.outputs[role]).passed for role in right.outputs)


@pytest.mark.parametrize("gated", [True, False])
def test_mamba_1_is_the_definition(gated: bool) -> None:
    r = np.random.default_rng(4)
    ends, d_in, n = [0, 5, 11], 6, 4
    u, delta, z = (r.normal(size=(d_in, 11)) for _ in range(3))
    a, skip, bias = -r.random((d_in, n)), r.normal(size=d_in), r.normal(size=d_in)
    b, c = r.normal(size=(2, n, 11)), r.normal(size=(2, n, 11))
    states = r.normal(size=(4, d_in, n))
    places, begins = [2, 1], [True, False]
    out, new = np.zeros((d_in, 11)), states.copy()
    for k in range(2):
        for ch in range(d_in):
            s = states[places[k], ch].copy() if begins[k] else np.zeros(n)
            for t in range(ends[k], ends[k + 1]):
                dt = np.log1p(np.exp(delta[ch, t] + bias[ch]))
                s = np.exp(dt * a[ch]) * s + dt * u[ch, t] * b[ch // 3, :, t]
                y = (s * c[ch // 3, :, t]).sum() + skip[ch] * u[ch, t]
                out[ch, t] = y * z[ch, t] / (1 + np.exp(-z[ch, t])) if gated else y
            new[places[k], ch] = s
    of = [torch.from_numpy(t) for t in (u, delta, a, b, c, skip, z, bias, states)]
    args = (*of[:6], of[6] if gated else None, of[7], True, torch.tensor(ends), torch.tensor(places),
            torch.tensor(begins), of[8], -1)  # fmt: skip
    role = "inplace.input.6" if gated else "inplace.input.1"
    call = Call("x", "torch.ops._C.selective_scan_fwd", args=args, outputs={role: torch.from_numpy(out)})
    found = evaluated(call)
    np.testing.assert_allclose(found[role].value, out, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found["inplace.input.12"].value, new, rtol=1e-9, atol=1e-10)
    late = torch.from_numpy(np.roll(out, 1, 1)).float()
    assert not verdict(call, role, late).passed
