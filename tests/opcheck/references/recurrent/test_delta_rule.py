"""The gated delta rule against its definition in numpy, written out token by token, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict
from reference_calls import evaluated

from vllm_accprobe.opcheck.reference import Call

NAME = "torch.ops._C.chunk_gated_delta_rule_cpu"


def defined(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, eps: float, fault: str = "") -> tuple[Any, Any]:
    """One sequence, plain loops: q, k [t, h, n], v [t, hv, m], g, beta [t, hv], state [hv, n, m]; outputs, last
    state."""
    t, hv, m = v.shape
    n, share = q.shape[2], hv // q.shape[1]
    s, out = state.astype(np.float64).copy(), np.zeros((t, hv, m))
    for i in range(t):
        for h in range(hv):
            key, query = k[i, h // share], q[i, h // share]
            if fault != "no norm":
                key = key / np.sqrt((key * key).sum() + eps)
            query = query / np.sqrt((query * query).sum() + eps) / np.sqrt(n)
            if fault != "decay after":
                s[h] *= np.exp(g[i, h])
            for c in range(m):
                held = sum(key[r] * s[h][r, c] for r in range(n))
                fresh = beta[i, h] * (v[i, h, c] - held)
                for r in range(n):
                    s[h][r, c] += key[r] * fresh
            if fault == "decay after":
                s[h] *= np.exp(g[i, h])
            out[i, h] = query @ s[h]
    return out, s


def drawn(seed: int, lengths: list[int], dtype: torch.dtype, n: int = 8, m: int = 6, heads: int = 2) -> tuple[Any, ...]:
    """heads: of keys; of values there are twice as many."""
    r = np.random.default_rng(seed)
    t = sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(r.normal(size=shape)).to(dtype)

    g = torch.from_numpy(-0.4 * r.random((1, t, 2 * heads))).float()
    beta = torch.from_numpy(r.random((1, t, 2 * heads))).to(dtype)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    places = torch.from_numpy(r.permutation(6)[: len(lengths)].astype(np.int32))
    states = torch.from_numpy(r.normal(size=(6, 2 * heads, n, m))).float()
    return (
        normal(1, t, heads, n),
        normal(1, t, heads, n),
        normal(1, t, 2 * heads, m),
        g,
        beta,
        states,
        True,
        ends,
        False,
        True,
        places,
        1e-5,
    )


def by_hand(args: tuple[Any, ...], fault: str = "") -> tuple[np.ndarray, np.ndarray]:
    q, k, v, g, beta, states, _, ends, _, _, places, eps = args
    wide = [x.double().numpy()[0] for x in (q, k, v, g, beta)]
    out, new = np.zeros(v.shape[1:]), states.double().numpy().copy()
    for n, (a, b) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        at = int(places[n])
        first = new[(at + 1) % len(new)] if fault == "state of another slot" else new[at]
        stop = b - 3 if fault == "last chunk dropped" and b - a > 3 else b
        y, last = defined(*(x[a:stop] for x in wide), first, eps, fault)
        out[a:stop], new[at] = y, last
    return out[None], new


def call_of(args: tuple[Any, ...], out: Any, new: Any) -> Call:
    dtype = args[0].dtype
    outputs = {"output.0": torch.from_numpy(out).to(dtype), "inplace.input.5": torch.from_numpy(new).float()}
    return Call("x", NAME, args=args, outputs=outputs)


def sizes(seed: int) -> tuple[list[int], dict[str, int]]:
    """Lengths of the sequences, and widths."""
    r = np.random.default_rng(1000 + seed)
    lengths = r.integers(1, 20, int(r.integers(1, 5))).tolist()
    return lengths, {"n": int(r.integers(3, 14)), "m": int(r.integers(3, 14)), "heads": int(r.integers(1, 4))}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_definition(seed: int, dtype: torch.dtype) -> None:
    lengths, widths = sizes(seed)
    args = drawn(seed, lengths, dtype, **widths)
    out, new = by_hand(args)
    found = evaluated(call_of(args, out, new))
    np.testing.assert_allclose(found["output.0"].value.numpy(), out, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found["inplace.input.5"].value.numpy(), new, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("fault", ["state of another slot", "last chunk dropped", "decay after", "no norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_kernel_is_found_and_a_right_one_is_not(seed: int, fault: str, dtype: torch.dtype) -> None:
    args = drawn(7, [12, 1, 20], dtype, **(sizes(seed)[1] if seed else {}))
    right, wrong = (call_of(args, *by_hand(args, f)) for f in ("", fault))
    for role in ("output.0", "inplace.input.5"):
        assert verdict(right, role, right.outputs[role]).passed
    assert any(not verdict(right, role, wrong.outputs[role]).passed for role in right.outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_long_sequence_rounded_on_the_way_is_no_fault(dtype: torch.dtype) -> None:
    """A kernel that rounds its keys, new values and outputs, and adds up in float32, over 600 tokens."""
    torch.manual_seed(3)
    q, k, v, g, beta, states, *rest = drawn(11, [600], dtype, 16, 16)
    args = (q, k, v, g, beta, states, *rest)
    s = states[int(rest[4][0])].float().clone()
    out = []
    for t in range(600):
        key, query = (x[0, t].float() * torch.rsqrt(x[0, t].float().square().sum(-1, True) + 1e-5) for x in (k, q))
        key, query = (x.to(dtype).float().repeat_interleave(2, 0) for x in (key, query / 4.0))
        s = s * g[0, t].exp()[:, None, None]
        fresh = (beta[0, t].float()[:, None] * (v[0, t].float() - torch.einsum("hk,hkv->hv", key, s))).to(dtype).float()
        s = s + key[:, :, None] * fresh[:, None, :]
        out.append(torch.einsum("hk,hkv->hv", query, s.to(dtype).float()))
    new = states.clone()
    new[int(rest[4][0])] = s
    y = torch.stack(out)[None].to(dtype)
    call = Call("x", NAME, args=args, outputs={"output.0": y, "inplace.input.5": new})
    for role in call.outputs:
        found = verdict(call, role, call.outputs[role])
        assert found.passed, (role, found)
