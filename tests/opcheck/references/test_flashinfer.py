"""FlashInfer's operators as vLLM calls them, against their definition term by term, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def by_terms(a: Any, b: Any) -> torch.Tensor:
    """a [m, k] times b [n, k], one product after the other."""
    y = np.zeros((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            y[i, j] = sum(float(s) * float(t) for s, t in zip(a[i], b[j], strict=True))
    return torch.from_numpy(y)


def codes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("fault", [False, True])
def test_bmm_fp8(fault: bool) -> None:
    a, b = codes((2, 5, 32), 1), codes((2, 32, 9), 2)
    scales = torch.tensor(0.25), torch.tensor([0.013])
    factor = 0.25 * float(scales[1]) * (1.05 if fault else 1.0)
    mine = torch.stack([factor * by_terms(x.float(), y.float().T) for x, y in zip(a, b, strict=True)]).bfloat16()
    call = Call("x", "torch.ops.vllm.bmm_fp8.default", args=(a, b, *scales, torch.bfloat16, "auto"),
                outputs={"output.0": mine})  # fmt: skip
    assert verdict(call, "output.0", mine).passed == (not fault)


def tiles(scales: np.ndarray) -> np.ndarray:
    """uint8 [rows, columns] where a kernel wants it, place by place: tiles of 128 by 4."""
    rows, columns = scales.shape
    high, wide = -(-rows // 128), -(-columns // 4)
    out = np.zeros(high * wide * 512, dtype=np.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * wide + c // 4
            out[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scales[r, c]
    return out


@pytest.mark.parametrize("rows", [5, 130])
@pytest.mark.parametrize("fault", [False, True])
def test_mxfp8(rows: int, fault: bool) -> None:
    r = np.random.default_rng(5)
    a, b = codes((rows, 64), 5), codes((3, 64), 6)
    ea, eb = r.integers(120, 132, (rows, 2)).astype(np.uint8), r.integers(120, 132, (3, 2)).astype(np.uint8)
    used = ea[::-1] if fault else ea
    wide = [np.array([[float(x[i, c]) * 2.0 ** (int(e[i, c // 32]) - 127) for c in range(64)] for i in range(len(x))])
            for x, e in ((a, used), (b, eb))]  # fmt: skip
    mine = by_terms(*wide).bfloat16()
    scales = [torch.from_numpy(tiles(e)) for e in (ea, eb)]
    call = Call("x", "torch.ops.vllm.mm_mxfp8.default", args=(a, b.T, *scales, torch.bfloat16, "cutlass"),
                outputs={"output.0": mine})  # fmt: skip
    assert verdict(call, "output.0", mine).passed == (not fault)


@pytest.mark.parametrize("nv", [True, False])
@pytest.mark.parametrize("fault", ["", "halves of a byte exchanged", "alpha left out"])
def test_mm_fp4(nv: bool, fault: str) -> None:
    r = np.random.default_rng(7)
    size, k, m, n = 16 if nv else 32, 64, 4, 5
    packed = [r.integers(0, 256, (rows, k // 2)).astype(np.uint8) for rows in (m, n)]
    if nv:
        held = [codes((rows, k // size), s).abs() for rows, s in ((m, 8), (n, 9))]
        numbers = [h.float().numpy() for h in held]
        bits = [h.view(torch.uint8).numpy() for h in held]
    else:
        bits = [r.integers(122, 130, (rows, k // size)).astype(np.uint8) for rows in (m, n)]
        numbers = [2.0 ** (b.astype(float) - 127) for b in bits]
    wide = []
    for side, (q, s) in enumerate(zip(packed, numbers, strict=True)):
        w = np.zeros((len(q), k))
        for i in range(len(q)):
            for c in range(k):
                high = (c % 2 == 1) != (fault == "halves of a byte exchanged" and side == 0)
                code = int(q[i, c // 2]) >> 4 if high else int(q[i, c // 2]) & 15
                w[i, c] = E2M1[code] * s[i, c // size]
        wide.append(w)
    alpha = torch.tensor([0.6])
    mine = ((1.0 if fault == "alpha left out" else float(alpha)) * by_terms(*wide)).bfloat16()
    a, b = (torch.from_numpy(q) for q in packed)
    scales = [torch.from_numpy(tiles(x)) for x in bits]
    shaped = [s.reshape(128, -1) for s in scales]
    call = Call("x", "torch.ops.vllm.flashinfer_mm_fp4.default",
                args=(a, b.T, shaped[0], shaped[1].T, alpha, torch.bfloat16, False, "cutlass", size, nv),
                outputs={"output.0": mine})  # fmt: skip
    assert verdict(call, "output.0", mine).passed == (not fault)


@pytest.mark.parametrize("how", [(False, "trtllm"), (False, "cute-dsl"), (True, "cutlass")])
def test_shuffled_weights_are_declined(how: tuple[bool, str]) -> None:
    x = torch.zeros(4, 32, dtype=torch.uint8)
    call = Call("x", "torch.ops.vllm.flashinfer_mm_fp4", args=(x, x.T, x, x.T, torch.ones(1), torch.bfloat16, *how),
                outputs={"output.0": torch.zeros(4, 4)})  # fmt: skip
    assert isinstance(TABLE.evaluate(call), Declined)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("fault", [False, True])
def test_rope_from_a_table(neox: bool, fault: bool) -> None:
    g = torch.Generator().manual_seed(5)
    q, k = (torch.randn(4, h * 16, generator=g).bfloat16() for h in (3, 1))
    positions = [9, 2, 2, 30]
    angle = torch.arange(32)[:, None] * 10.0 ** (-torch.arange(4) / 4)
    table = torch.cat((angle.cos(), angle.sin()), -1)
    mine = []
    for x in (q, k):
        y = x.double().reshape(4, -1, 16).numpy().copy()
        for t, p in enumerate(positions):
            for h in range(y.shape[1]):
                old = y[t, h].copy()
                for i in range(4):
                    a, b = (i, i + 4) if neox else (2 * i, 2 * i + 1)
                    c, s = float(table[p, i]), float(table[p, 4 + i]) * (-1 if fault else 1)
                    y[t, h, a], y[t, h, b] = old[a] * c - old[b] * s, old[b] * c + old[a] * s
        mine.append(torch.from_numpy(y).reshape(x.shape).bfloat16())
    roles = ["inplace.input.1", "inplace.input.2"]
    call = Call("x", "torch.ops.vllm.flashinfer_rotary_embedding.default",
                args=(torch.tensor(positions), q, k, 16, table, neox),
                outputs=dict(zip(roles, mine, strict=True)))  # fmt: skip
    for role, y in zip(roles, mine, strict=True):
        assert verdict(call, role, y).passed == (not fault)
