"""Attention over paged blocks against its definition in numpy, in every layout, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drawn_sizes import drawn_sizes
from family_verdict import verdict

from vllm_accprobe.opcheck.reference import Call

HEADS, KV, WIDTH, SIZE, BLOCKS = 4, 2, 16, 16, 9
TABLE, LENGTHS, STARTS = [[5, 2, 7], [8, 1, 0], [3, 0, 0]], [35, 17, 4], [0, 3, 4, 8]
sizes = drawn_sizes(
    __name__, KV=(2, 4), HEADS=lambda r, of: of["KV"] * int(r.integers(2, 4)), WIDTH=(16, 49, 16), SIZE=(16, 49, 16),
    BLOCKS=(9, 14), TABLE=lambda r, of: [[p + 1 for p in r.permutation(8)[:3].tolist()] for _ in range(3)],
    LENGTHS=lambda r, of: [int(r.integers(2 * of["SIZE"] + 1, 3 * of["SIZE"])), int(r.integers(20, 30)), 4],
)  # fmt: skip


def defined(q: Any, k: Any, v: Any, at: int, scale: float, window: int = 0, fault: str = "") -> np.ndarray:
    """One row at position ``at``, plain loops: q [heads, d], k and v [rows, kv, d]."""
    out = np.zeros((HEADS, v.shape[-1]))
    first = max(0, at + 1 - window - (1 if fault == "window off by one" else 0)) if window else 0
    rows = range(first, at + 1)
    for h in range(HEADS):
        kv = h % k.shape[1] if fault == "heads interleaved" else h * k.shape[1] // HEADS
        scores = [scale * sum(q[h, c] * k[r, kv, c] for c in range(q.shape[1])) for r in rows]
        p = np.exp(np.array(scores) - max(scores))
        p /= p.sum()
        for r, weight in zip(rows, p, strict=True):
            out[h] += weight * v[r, kv]
    return out


def cpu_layout(rows: np.ndarray, which: str) -> np.ndarray:
    """[blocks, slots, kv, d] as vLLM's CPU kernels have it, element by element, in the shape [blocks, kv, slots, d]."""
    out = np.zeros((BLOCKS, KV, SIZE * WIDTH))
    for s in range(SIZE):
        for c in range(WIDTH):
            place = {"vec key": c * SIZE + s, "vec value": s * WIDTH + c,
                     "amx key": (s // 16) * 16 * WIDTH + (c // 2) * 32 + (s % 16) * 2 + c % 2,
                     "amx value": (c // 16) * SIZE * 16 + (s // 2) * 32 + (c % 16) * 2 + s % 2}[which]  # fmt: skip
            out[:, :, place] = rows[:, s, :, c]
    return out.reshape(BLOCKS, KV, SIZE, WIDTH)


def drawn(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((8, HEADS, WIDTH), (BLOCKS, SIZE, KV, WIDTH), (BLOCKS, SIZE, KV, WIDTH))
    return tuple(torch.randn(*s, generator=g).to(dtype) for s in shapes)


def by_hand(q: Any, k: Any, v: Any, window: int = 0, fault: str = "") -> np.ndarray:
    q, k, v = (t.double().numpy() for t in (q, k, v))
    out = np.zeros((8, HEADS, WIDTH))
    for n in range(3):
        table = TABLE[(n + 1) % 2] if fault == "another request's blocks" and n == 0 else TABLE[n]
        past = [np.array([x[table[p // SIZE], p % SIZE] for p in range(LENGTHS[n])]) for x in (k, v)]
        for r in range(STARTS[n], STARTS[n + 1]):
            at = LENGTHS[n] - (STARTS[n + 1] - r)
            if fault == "one key too few" and at:
                at -= 1
            out[r] = defined(q[r], *past, at, 0.25, window, fault)
    return out


def on_cpu(which: str, dtype: torch.dtype, window: int = 0, fault: str = "") -> Call:
    q, k, v = drawn(dtype)
    out = torch.from_numpy(by_hand(q, k, v, window, fault)).to(dtype)
    caches = [
        torch.from_numpy(cpu_layout(t.double().numpy(), f"{which} {n}")).to(dtype)
        for t, n in ((k, "key"), (v, "value"))
    ]
    args = (q, *caches, torch.zeros_like(q), torch.tensor(STARTS), torch.tensor(LENGTHS), 0.25, True, None,
            window or -1, torch.tensor(TABLE), 0.0, torch.zeros(8), None, None)  # fmt: skip
    return Call("x", "torch.ops._C.cpu_attention_with_kv_cache", args=args, outputs={"inplace.input.3": out})


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("which", ["vec", "amx"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layouts_of_cpu_kernels(which: str, dtype: torch.dtype, window: int) -> None:
    call = on_cpu(which, dtype, window)
    found = verdict(call, "inplace.input.3", call.outputs["inplace.input.3"])
    assert found.passed
    assert found.severity < 0.9


@pytest.mark.parametrize(
    "fault", ["window off by one", "heads interleaved", "another request's blocks", "one key too few"]
)
def test_a_wrong_kernel_is_found(fault: str) -> None:
    right, wrong = (on_cpu("vec", torch.bfloat16, 9, f) for f in ("", fault))
    assert not verdict(right, "inplace.input.3", wrong.outputs["inplace.input.3"]).passed


def test_flash_attention_with_a_block_table() -> None:
    q, k, v = drawn(torch.float16)
    out = torch.from_numpy(by_hand(q, k, v, 9)).half()
    args = (q, k, v, None, torch.tensor(STARTS), None, torch.tensor(LENGTHS), None, torch.tensor(TABLE), None, 4, 35,
            0.0, 0.25, False, True, 8, -1, 0.0)  # fmt: skip
    call = Call("x", "torch.ops._vllm_fa2_C.varlen_fwd", args=args, outputs={"output.0": out})
    assert verdict(call, "output.0", out).passed
    assert not verdict(call, "output.0", torch.from_numpy(by_hand(q, k, v, 9, "window off by one")).half()).passed


def test_the_first_layout_with_8_bit_keys() -> None:
    """[blocks, kv, d / x, slots, x] and [blocks, kv, d, slots] of e4m3 codes with scales."""
    q, k, v = drawn(torch.bfloat16)
    q = q[:3]
    codes = [(t.float() / s).to(torch.float8_e4m3fn) for t, s in ((k, 0.5), (v, 0.25))]
    wide = [c.double() * s for c, s in zip(codes, (0.5, 0.25), strict=True)]
    key = codes[0].view(torch.uint8).reshape(BLOCKS, SIZE, KV, 1, WIDTH).permute(0, 2, 3, 1, 4).contiguous()
    value = codes[1].view(torch.uint8).permute(0, 2, 3, 1).contiguous()
    out = np.zeros((3, HEADS, WIDTH))
    for n in range(3):
        past = [np.array([x[TABLE[n][p // SIZE], p % SIZE].numpy() for p in range(LENGTHS[n])]) for x in wide]
        out[n] = defined(q[n].double().numpy(), *past, LENGTHS[n] - 1, 0.25)
    y = torch.from_numpy(out).bfloat16()
    args = [torch.zeros_like(q), q, key, value, KV, 0.25, torch.tensor(TABLE), torch.tensor(LENGTHS), SIZE, 35, None,
            "fp8", torch.tensor(0.5), torch.tensor(0.25)]  # fmt: skip
    call = Call("x", "torch.ops._C.paged_attention_v1", args=tuple(args), outputs={"inplace.input.0": y})
    assert verdict(call, "inplace.input.0", y).passed
    swapped = Call(call.name, call.cls, args=(*args[:12], args[13], args[12]), outputs=call.outputs)
    assert not verdict(swapped, "inplace.input.0", y).passed


def test_latent_attention_reads_values_from_its_keys() -> None:
    g = torch.Generator().manual_seed(1)
    q, cache = torch.randn(3, HEADS, 12, generator=g).bfloat16(), torch.randn(BLOCKS, SIZE, 12, generator=g).bfloat16()
    out = np.zeros((3, HEADS, 8))
    for n in range(3):
        past = np.array([cache[TABLE[n][p // SIZE], p % SIZE].double().numpy() for p in range(LENGTHS[n])])[:, None]
        out[n] = defined(q[n].double().numpy(), past, past[..., :8], LENGTHS[n] - 1, 0.3)
    y = torch.from_numpy(out).bfloat16()
    args = (torch.zeros_like(y), q, cache, 0.3, torch.tensor(TABLE), torch.tensor(LENGTHS))
    call = Call("x", "torch.ops._C.mla_decode_kvcache", args=args, outputs={"inplace.input.0": y})
    assert verdict(call, "inplace.input.0", y).passed
    assert not verdict(call, "inplace.input.0", y.roll(1, 0)).passed
