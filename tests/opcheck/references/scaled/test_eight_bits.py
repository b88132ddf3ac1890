"""W8A8: codes and products against their definitions in numpy, number by number, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drawn_sizes import drawn_sizes
from family_verdict import verdict
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined

M, K, N = 5, 32, 9
sizes = drawn_sizes(__name__, M=(3, 9), K=(20, 70), N=(3, 14))


def product(a: Any, b: Any, sa: Any, sb: Any, zero: Any, bias: Any) -> np.ndarray:
    out = np.zeros((M, N))
    for i in range(M):
        for j in range(N):
            total = sum((int(a[i, k]) - zero[i]) * int(b[k, j]) for k in range(K))
            out[i, j] = sa[i] * sb[j] * total + bias[j]
    return out


@pytest.mark.parametrize("azp", ["none", "token", "tensor"])
@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize("fault", ["", "scale of the neighbour", "zero point left out", "no bias"])
def test_products(azp: str, channel: bool, fault: str) -> None:
    if fault == "zero point left out" and azp == "none":
        return
    r = np.random.default_rng(0)
    a, b = (r.integers(-127, 128, s).astype(np.int8) for s in ((M, K), (K, N)))
    sa, sb = r.uniform(0.01, 0.02, M), r.uniform(0.01, 0.02, N) if channel else np.full(N, 0.015)
    sa, sb = sa.astype(np.float32), sb.astype(np.float32)
    zero = {"none": np.zeros(M), "token": r.integers(-20, 20, M), "tensor": np.full(M, 13)}[azp].astype(int)
    bias = r.normal(size=N)
    used = np.roll(sa, 1) if fault == "scale of the neighbour" else sa
    y = product(a, b, used, sb, 0 * zero if "left out" in fault else zero, 0 * bias if fault == "no bias" else bias)
    mine = torch.from_numpy(y).bfloat16()
    columns = torch.from_numpy(b.astype(np.int32).sum(0).astype(np.int32))
    args = [torch.zeros_like(mine), torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(sa).reshape(M, 1),
            torch.from_numpy(sb if channel else sb[:1]).reshape(1, -1)]  # fmt: skip
    name = "cutlass_scaled_mm"
    if azp != "none":
        name = "cutlass_scaled_mm_azp"
        args += [
            columns if azp == "token" else columns * 13,
            torch.from_numpy(zero.astype(np.int32)) if azp == "token" else None,
        ]
    call = Call(
        "x",
        f"torch.ops._C.{name}",
        args=(*args, torch.from_numpy(bias).bfloat16().double()),
        outputs={"inplace.input.0": mine},
    )
    if not fault:
        exact = product(a, b, sa, sb, zero, call.args[-1].numpy())
        mine = torch.from_numpy(exact).bfloat16()
    assert verdict(call, "inplace.input.0", mine).passed == (not fault)


@pytest.mark.parametrize("kind", ["int8", "int8 azp", "fp8 token", "fp8 tensor"])
@pytest.mark.parametrize("fault", ["", "truncated", "scale of the neighbour"])
def test_codes(kind: str, fault: str) -> None:
    if fault == "scale of the neighbour" and kind == "fp8 tensor":
        return
    r = np.random.default_rng(3)
    x = torch.from_numpy(r.normal(size=(M, K)) * np.arange(1, M + 1)[:, None]).bfloat16()
    wide, zero = x.double().numpy(), np.zeros(M)
    if kind == "int8 azp":
        scale = (wide.max(1) - wide.min(1)) / 255
        zero = np.round(-128 - wide.min(1) / scale)
    elif kind == "fp8 tensor":
        scale = np.full(M, np.abs(wide).max() / 448)
    else:
        scale = np.abs(wide).max(1) / (127 if kind == "int8" else 448)
    used = np.roll(scale, 1) if fault == "scale of the neighbour" else scale
    exact = wide / used[:, None] + zero[:, None]
    if "int8" in kind:
        whole = np.trunc(exact) if fault == "truncated" else np.round(exact)
        codes = torch.from_numpy(np.clip(whole, -128, 127)).to(torch.int8)
    else:
        codes = torch.from_numpy(np.clip(exact, -448, 448)).float().to(torch.float8_e4m3fn)
        if fault == "truncated":
            codes = (codes.view(torch.uint8) - (codes.double().abs() > torch.from_numpy(exact).abs()).byte()).view(
                codes.dtype
            )
    held = torch.from_numpy(scale if kind != "fp8 tensor" else scale[:1]).float().reshape(-1, 1)
    outputs = {"inplace.input.0": codes, "inplace.input.2": held}
    int8, token = "dynamic_scaled_int8_quant", "dynamic_per_token_scaled_fp8_quant"
    names = {"int8": int8, "int8 azp": int8, "fp8 token": token, "fp8 tensor": "dynamic_scaled_fp8_quant"}
    name = names[kind]
    azp = torch.from_numpy(zero).int().reshape(-1, 1) if kind == "int8 azp" else None
    if azp is not None:
        outputs["inplace.input.3"] = azp
    args = (torch.zeros_like(codes), x, torch.zeros_like(held), azp)
    call = Call("x", f"torch.ops._C.{name}", args=args, outputs=outputs)
    if fault:
        assert not verdict(call, "inplace.input.0", codes).passed
    else:
        assert all(verdict(call, role, mine).passed for role, mine in outputs.items())


@pytest.mark.parametrize("outputs", [9, 64])
@pytest.mark.parametrize("cut", [True, False])
def test_a_processor_that_cuts_sums_off_in_16_bits_is_named(cut: bool, outputs: int) -> None:
    """Two products of (a + 128) b at a time, as a processor without VNNI adds them; another error is not named so."""
    g = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-127, 128, s, generator=g, dtype=torch.int8) for s in ((6, 64), (64, outputs)))
    y = np.zeros((6, outputs))
    for r in range(6):
        for c in range(outputs):
            pairs = [(int(a[r, k]) + 128) * int(b[k, c]) + (int(a[r, k + 1]) + 128) * int(b[k + 1, c])
                     for k in range(0, 64, 2)]  # fmt: skip
            kept = [min(max(p, -32768), 32767) for p in pairs] if cut else pairs
            y[r, c] = (sum(kept) - 128 * int(b[:, c].long().sum())) * 0.02 * 0.03
    mine = torch.from_numpy(y if cut else y * 1.2).bfloat16()
    sums = b.double().sum(0, keepdim=True).float() * 0.03  # given to every call, and without a zero point not used
    args = (mine, a, torch.full((6, 1), 0.02), None, sums, None, 0)
    params = {"weight": b.T.contiguous(), "weight_scale": torch.full((outputs, 1), 0.03)}
    call = Call("x", "torch.ops._C.onednn_scaled_mm", args=args, params=params, outputs={"inplace.input.0": mine})
    found = TABLE.evaluate(call)
    assert not isinstance(found, Declined)
    assert ("16 bits" in found["inplace.input.0"].note) == cut
    assert not verdict(call, "inplace.input.0", mine).passed
    right = torch.from_numpy((a.long() @ b.long()).double().numpy() * 0.02 * 0.03).bfloat16()
    assert verdict(call, "inplace.input.0", right).passed


@pytest.mark.parametrize("cls", ["ColumnParallelLinear", "RowParallelLinear"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cut", [True, False])
def test_a_module_has_the_note_of_its_operator(cut: bool, bias: bool, cls: str) -> None:
    """The module has x and not its codes. Positive weights, so that most sums end at 32,767; honest ones pass."""
    r = np.random.default_rng(7)
    x = torch.from_numpy(r.uniform(0.2, 1.0, size=(6, 64))).bfloat16()
    wide, b = x.double().numpy(), r.integers(60, 128, size=(9, 64))
    step = np.abs(wide).max(1) / 127
    codes = np.round(wide / step[:, None]).astype(int)
    extra = r.normal(size=9) if bias else np.zeros(9)
    y = np.zeros((6, 9))
    for i in range(6):
        for o in range(9):
            pairs = [(codes[i, k] + 128) * b[o, k] + (codes[i, k + 1] + 128) * b[o, k + 1] for k in range(0, 64, 2)]
            kept = [min(p, 32767) for p in pairs] if cut else pairs
            y[i, o] = (sum(kept) - 128 * b[o].sum()) * step[i] * 0.03 + extra[o]
    mine = torch.from_numpy(y).bfloat16()
    params = {"weight": torch.from_numpy(b).to(torch.int8), "weight_scale": torch.full((9, 1), 0.03)}
    if bias:
        params["bias"] = torch.from_numpy(extra).float()
    call = Call("x", cls, {"input_": x}, params=params, outputs={"output.0": mine})
    found = TABLE.evaluate(call)
    assert not isinstance(found, Declined)
    assert ("16 bits" in found["output.0"].note) == cut
    assert verdict(call, "output.0", mine).passed != cut
    other = Call("x", cls, {"input_": x}, params=params, outputs={"output.0": (mine.double() * 1.3).bfloat16()})
    found = TABLE.evaluate(other)
    assert not isinstance(found, Declined)
    assert not found["output.0"].note  # another error is not named so
