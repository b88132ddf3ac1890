"""MXFP4 and NVFP4 against their definitions in numpy, number by number, and against wrong kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from family_verdict import verdict

from vllm_accprobe.opcheck.reference import Call

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def number(code: int) -> float:
    return (-1.0 if code >= 8 else 1.0) * VALUES[code % 8]


def by_hand(codes: np.ndarray, scale: np.ndarray, size: int, fault: str = "") -> np.ndarray:
    """codes [rows, n / 2], scale [rows, blocks] as numbers."""
    rows, half = codes.shape
    out = np.zeros((rows, 2 * half))
    for r in range(rows):
        for c in range(2 * half):
            byte = int(codes[r, c // 2])
            low = c % 2 == (1 if fault == "halves exchanged" else 0)
            block = c // size
            if fault == "scale of the neighbour" and r >= 2:
                block = (block + 1) % scale.shape[1]
            out[r, c] = number(byte & 15 if low else byte >> 4) * scale[r, block]
    return out


@pytest.mark.parametrize("fault", ["", "halves exchanged", "scale of the neighbour"])
@pytest.mark.parametrize("seed", range(5))
def test_mxfp4(seed: int, fault: str) -> None:
    r = np.random.default_rng(seed)
    rows, blocks = int(r.integers(3, 12)), int(r.integers(2, 7))
    codes, exponents = r.integers(0, 256, (rows, 16 * blocks), np.uint8), r.integers(120, 134, (rows, blocks))
    exponents = exponents.astype(np.uint8)
    mine = torch.from_numpy(by_hand(codes, 2.0 ** (exponents.astype(float) - 127), 32, fault)).bfloat16()
    args = (torch.from_numpy(codes), torch.from_numpy(exponents), torch.bfloat16)
    call = Call("x", "torch.ops.vllm.dequant_mxfp4", args=args, outputs={"output.0": mine})
    assert verdict(call, "output.0", mine).passed == (not fault)


def tiled(scale: np.ndarray) -> np.ndarray:
    """[rows, blocks] in tiles of 128 by 4, place by place."""
    high, wide = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    out = np.zeros(high * wide * 512, scale.dtype)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            tile = (r // 128) * wide + c // 4
            out[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scale[r, c]
    return out.reshape(high * 128, wide * 4)


@pytest.mark.parametrize("fault", ["", "scale of the neighbour", "no global scale"])
@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_product(seed: int, fault: str) -> None:
    r = np.random.default_rng(seed)
    m, n, blocks = int(r.integers(3, 9)), int(r.integers(120, 140)), int(r.integers(2, 9))
    sides, args = [], []
    for rows in (m, n):
        codes = r.integers(0, 256, (rows, 8 * blocks), np.uint8)
        scale = torch.from_numpy(r.uniform(0.1, 4, (rows, blocks))).float().to(torch.float8_e4m3fn)
        sides.append(by_hand(codes, scale.double().numpy(), 16, fault))
        args.append((torch.from_numpy(codes), torch.from_numpy(tiled(scale.view(torch.uint8).numpy()))))
    alpha = 0.37
    y = np.zeros((m, n))
    for i in range(m):
        for j in range(n):
            y[i, j] = (1.0 if fault == "no global scale" else alpha) * sum(sides[0][i] * sides[1][j])
    mine = torch.from_numpy(y).bfloat16()
    call = Call("x", "torch.ops._C.cutlass_scaled_fp4_mm", outputs={"inplace.input.0": mine}, args=(
        torch.zeros_like(mine), args[0][0], args[1][0], args[0][1].view(torch.float8_e4m3fn),
        args[1][1].view(torch.float8_e4m3fn), torch.tensor(alpha),
    ))  # fmt: skip
    assert verdict(call, "inplace.input.0", mine).passed == (not fault)


@pytest.mark.parametrize("size", [32, 16])
@pytest.mark.parametrize("seed", range(4))
def test_a_linear_module_with_such_a_weight(seed: int, size: int) -> None:
    r = np.random.default_rng(seed)
    rows, n, width = int(r.integers(2, 9)), int(r.integers(6, 40)), 32 * int(r.integers(2, 5))
    codes = r.integers(0, 256, (n, width // 2), np.uint8)
    x = torch.from_numpy(r.normal(size=(rows, width))).bfloat16()
    if size == 32:
        scale = torch.from_numpy(r.integers(122, 130, (n, width // 32)).astype(np.uint8))
        wide, more = 2.0 ** (scale.double().numpy() - 127), {}
    else:
        scale = torch.from_numpy(r.uniform(0.1, 2, (n, width // 16))).float().to(torch.float8_e4m3fn)
        wide, more = scale.double().numpy() * 0.5, {"weight_scale_2": torch.tensor(0.5)}
    right, wrong = (by_hand(codes, wide, size, f) for f in ("", "scale of the neighbour"))
    params = {"weight": torch.from_numpy(codes), "weight_scale": scale} | more
    mine = torch.from_numpy(x.double().numpy() @ right.T).bfloat16()
    call = Call("l", "ReplicatedLinear", {"x": x}, params=params, outputs={"output.0": mine})
    assert verdict(call, "output.0", mine).passed
    assert not verdict(call, "output.0", torch.from_numpy(x.double().numpy() @ wrong.T).bfloat16()).passed


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("fault", ["", "scales of the next block", "rounds down", "halves of a byte exchanged"])
@pytest.mark.parametrize("seed", range(4))
def test_quantised_to_nvfp4(seed: int, tiled: bool, fault: str) -> None:
    """Number by number: the nearest of the 16 codes for the e4m3 scale of its 16 neighbours."""
    g, draw = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    rows, width, whole = int(draw.integers(3, 9)), 16 * int(draw.integers(2, 5)), 37.5
    x = torch.randn(rows, width, generator=g).bfloat16()
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes, scales = np.zeros((rows, width // 2), np.uint8), torch.zeros(rows, width // 16, dtype=torch.float8_e4m3fn)
    for r in range(rows):
        for b in range(width // 16):
            of = (b + 1) % (width // 16) if fault == "scales of the next block" else b
            largest = max(abs(float(v)) for v in x[r, 16 * of : 16 * of + 16])
            scales[r, b] = torch.tensor(largest / 6 * whole).to(torch.float8_e4m3fn)
            for c in range(16 * b, 16 * b + 16):
                v = abs(float(x[r, c])) * whole / float(scales[r, b])
                under = [k for k in range(8) if values[k] <= v]
                code = max(under) if fault == "rounds down" else min(range(8), key=lambda k: abs(values[k] - v))
                code |= 8 if float(x[r, c]) < 0 else 0
                high = (c % 2 == 1) != (fault == "halves of a byte exchanged")
                codes[r, c // 2] |= code << 4 if high else code
    held = scales.view(torch.uint8).numpy()
    if tiled:
        out = np.zeros((128, 4), np.uint8).reshape(-1)
        for r in range(rows):
            for b in range(width // 16):
                out[(r % 32) * 16 + r // 32 * 4 + b] = held[r, b]
        held = out.reshape(128, 4)
    sides = {"inplace.input.output": torch.from_numpy(codes),
             "inplace.input.output_scale": torch.from_numpy(held.copy()).view(torch.float8_e4m3fn)}  # fmt: skip
    given = {"output": sides["inplace.input.output"], "output_scale": sides["inplace.input.output_scale"]}
    call = Call("x", "torch.ops._C.scaled_fp4_quant.out", args=(x, torch.tensor([whole]), tiled), kwargs=given,
                outputs=sides)  # fmt: skip
    assert all(verdict(call, role, y).passed for role, y in sides.items()) == (not fault)
