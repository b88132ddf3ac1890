"""Sparse latent attention's three steps against their definitions in numpy, and against wrong kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn_sizes import drawn_sizes
from family_verdict import verdict
from reference_calls import evaluated

from vllm_accprobe.opcheck.reference import Call

T, H, D, S, TOP = 6, 3, 8, 14, 5
FIRST, STOP = [0, 0, 0, 2, 2, 2], [1, 4, 14, 6, 9, 14]
sizes = drawn_sizes(
    __name__, H=(1, 7), D=(6, 20), S=(10, 30), TOP=(3, 8),
    FIRST=lambda r, of: [0, 0, 0, *r.integers(1, 3, T - 3).tolist()],
    STOP=lambda r, of: [1, *r.integers(4, of["S"], T - 2).tolist(), of["S"]],
)  # fmt: skip


def scored(fault: str = "") -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    r = np.random.default_rng(0)
    q, w = torch.from_numpy(r.normal(size=(T, H, D))).bfloat16(), torch.from_numpy(r.normal(size=(T, H))).float()
    k = torch.from_numpy(r.normal(size=(S, D))).float().to(torch.float8_e4m3fn)
    scale = torch.from_numpy(r.uniform(0.5, 2, S)).float()
    a, b, c, s = (x.double().numpy() for x in (q, k, w, scale))
    out = np.full((T, S), -np.inf)
    for t in range(T):
        for n in range(FIRST[t], STOP[t] + (fault == "one key too many" and STOP[t] < S)):
            by = s[(n + 1) % S] if fault == "scale of the neighbour" else s[n]
            dots = [by * sum(a[t, h] * b[n]) for h in range(H)]
            out[t, n] = sum(c[t, h] * (dots[h] if fault == "no relu" else max(dots[h], 0)) for h in range(H))
    return (q, k, scale, w, torch.tensor(FIRST), torch.tensor(STOP)), torch.from_numpy(out).float()


@pytest.mark.parametrize("fault", ["", "no relu", "scale of the neighbour", "one key too many"])
def test_scores(fault: str) -> None:
    args, mine = scored(fault)
    call = Call("x", "torch.ops.vendor.fp8_mqa_logits", args=args, outputs={"output.0": mine})
    assert verdict(call, "output.0", mine).passed == (not fault)


@pytest.mark.parametrize("fault", ["", "no relu", "scale of the neighbour"])
def test_scores_beside_a_large_number_that_nobody_reads(fault: str) -> None:
    args, mine = scored(fault)
    mine = torch.where(torch.isinf(mine), 0.0, mine)
    mine[1, -1] = 1e30  # query 1 does not see the last key: memory as it was found
    call = Call("x", "torch.ops.vendor.fp8_mqa_logits", args=args, outputs={"output.0": mine})
    rows = evaluated(call)["output.0"].rows
    assert rows is not None
    assert rows.tolist() == [True, False] + [True] * (T - 2)
    assert verdict(call, "output.0", mine).passed == (not fault)


def test_an_error_beside_a_large_number_does_not_pass() -> None:
    args, mine = scored()
    mine = torch.where(torch.isinf(mine), 0.0, mine)
    seen = mine[1, 2].clone()
    for beside, judged in ((0.0, True), (1e30, False)):
        mine[1, 2], mine[1, -1] = 30.0 * seen, beside
        call = Call("x", "torch.ops.vendor.fp8_mqa_logits", args=args, outputs={"output.0": mine})
        rows = evaluated(call)["output.0"].rows
        assert (rows is None or bool(rows[1])) == judged  # a row that is not judged is counted as that
        assert not judged or not verdict(call, "output.0", mine).passed


@pytest.mark.parametrize("fault", ["", "one worse", "twice the same", "from the first key"])
def test_the_best(fault: str) -> None:
    _, z = scored()
    mine = torch.full((T, TOP), -1, dtype=torch.int32)
    for t in range(T):
        keys = sorted(range(FIRST[t], STOP[t]), key=lambda n: -float(z[t, n]))
        best = keys[: TOP - 1] + keys[TOP : TOP + 1] if fault == "one worse" and len(keys) > TOP else keys[:TOP]
        if fault == "twice the same" and len(best) > 1:
            best[-1] = best[0]
        shift = 0 if fault == "from the first key" else FIRST[t]
        mine[t, : len(best)] = torch.tensor([n - shift for n in best[::-1]])
    args = (z, torch.tensor(FIRST), torch.tensor(STOP), torch.zeros_like(mine), T, S, 1, TOP)
    call = Call("x", "torch.ops._C.top_k_per_row_prefill", args=args, outputs={"inplace.input.3": mine})
    assert verdict(call, "inplace.input.3", mine).passed == (not fault)


@pytest.mark.parametrize("fault", ["", "padding is key 0", "last key left out"])
def test_attention_over_the_chosen(fault: str) -> None:
    r = np.random.default_rng(2)
    q, kv = (torch.from_numpy(r.normal(size=s)).bfloat16() for s in ((T, H, D), (S, 1, D)))
    indices = torch.tensor([[*r.permutation(S)[:4].tolist(), -1, -1] for _ in range(T)])
    a, b = q.double().numpy(), kv.double().numpy()[:, 0]
    out = np.zeros((T, H, 6))
    for t in range(T):
        keys = [int(n) for n in indices[t] if n >= 0 or fault == "padding is key 0"]
        keys = [max(n, 0) for n in (keys[:-1] if fault == "last key left out" else keys)]
        for h in range(H):
            p = np.array([np.exp(0.5 * sum(a[t, h] * b[n])) for n in keys])
            for n, weight in zip(keys, p / p.sum(), strict=True):
                out[t, h] += weight * b[n, :6]
    mine = torch.from_numpy(out).bfloat16()
    call = Call("x", "torch.ops._flashmla_C.sparse_prefill_fwd", args=(q, kv, indices[:, None], 0.5, 6),
                outputs={"output.0": mine})  # fmt: skip
    assert verdict(call, "output.0", mine).passed == (not fault)
