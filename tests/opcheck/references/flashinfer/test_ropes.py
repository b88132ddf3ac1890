"""Rotary embeddings against their definition pair by pair, at random shapes, and against wrong kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined


def turned(x: Any, position: float, frequency: Any, dim: int, neighbours: bool) -> np.ndarray:
    """One head of one token, pair by pair."""
    y = x.copy()
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if neighbours else (i, i + dim // 2)
        angle = position * frequency(i)
        y[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        y[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return y


def all_turned(x: torch.Tensor, positions: list[int], frequency: Any, dim: int, neighbours: bool) -> torch.Tensor:
    wide = x.double().numpy()
    rows = [[turned(h, p, frequency, dim, neighbours) for h in row] for row, p in zip(wide, positions, strict=True)]
    return torch.from_numpy(np.array(rows)).to(x.dtype)


def llama31(i: int, dim: int, theta: float, scale: float, low: float, high: float, old: float) -> float:
    f = theta ** (-2 * i / dim)
    length = 2 * math.pi / f
    if length < old / high:
        return f
    if length > old / low:
        return f / scale
    smooth = (old / length - low) / (high - low)
    return (1 - smooth) * f / scale + smooth * f


FAULTS = ["", "a position early", "other pairs", "wrong base"]


@pytest.mark.parametrize("place", ["", "_inplace"])
@pytest.mark.parametrize("how", ["", "_pos_ids"])
@pytest.mark.parametrize("fault", FAULTS)
def test_computed_angles(how: str, place: str, fault: str) -> None:
    r = np.random.default_rng(len(fault) + len(how))
    tokens, dim, width = 7, int(r.choice([8, 16])), 16
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(tokens, h, width, generator=g).bfloat16() for h in (4, 2))
    offsets = [5, 40]
    positions = [*range(5, 8), *range(40, 44)]
    used = [p - (fault == "a position early") for p in positions]
    base = 1e5 if fault == "wrong base" else 1e4

    def frequency(i: int) -> float:
        return float(base ** (-2 * i / dim)) / 2.0

    mine = [all_turned(x, used, frequency, dim, fault != "other pairs") for x in (q, k)]
    told = (torch.tensor(positions),) if how else (torch.tensor([0, 3, 7]), torch.tensor(offsets))
    roles = ["inplace.input.0", "inplace.input.1"] if place else ["output.0", "output.1"]
    call = Call("x", f"flashinfer.apply_rope{how}{place}", args=(q, k, *told),
                kwargs={"rotary_dim": dim, "interleave": True, "rope_scale": 2.0},
                outputs=dict(zip(roles, mine, strict=True)))  # fmt: skip
    for role, y in zip(roles, mine, strict=True):
        assert verdict(call, role, y).passed == (not fault)


@pytest.mark.parametrize("fault", [False, True])
def test_llama31(fault: bool) -> None:
    g = torch.Generator().manual_seed(4)
    q, k = (torch.randn(5, h, 64, generator=g).half() for h in (2, 1))
    positions = [3, 90, 7, 41, 0]
    used = (1.0 if fault else 8.0, 1.0, 4.0, 64.0)
    mine = [all_turned(x, positions, lambda i: llama31(i, 64, 5e5, *used), 64, False) for x in (q, k)]
    call = Call("x", "flashinfer.apply_llama31_rope_pos_ids", args=(q, k, torch.tensor(positions)),
                kwargs={"old_context_len": 64}, outputs={"output.0": mine[0], "output.1": mine[1]})  # fmt: skip
    assert verdict(call, "output.0", mine[0]).passed == (not fault)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("fault", [False, True])
def test_from_a_table(neox: bool, fault: bool) -> None:
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
    call = Call("x", "flashinfer.apply_rope_with_cos_sin_cache",
                args=(torch.tensor(positions), q, k, 16, table, neox),
                outputs={"output.0": mine[0], "output.1": mine[1]})  # fmt: skip
    for n in range(2):
        assert verdict(call, f"output.{n}", mine[n]).passed == (not fault)


def test_in_place_without_what_it_left_is_declined() -> None:
    q = torch.ones(2, 1, 8)
    call = Call("x", "flashinfer.apply_rope_pos_ids_inplace", args=(q, q, torch.arange(2)), outputs={"output.0": q})
    found = TABLE.evaluate(call)
    assert isinstance(found, Declined)
    assert "in place" in found.reason
