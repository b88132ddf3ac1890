"""What is written into a cache, slot by slot in numpy, and a slot beside the right one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict

from vllm_accprobe.opcheck.reference import Call

BLOCKS, SIZE, KV, WIDTH = 4, 16, 2, 8
SLOTS = [17, 18, -1, 35, 0]


def rows(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(len(SLOTS), KV, WIDTH, generator=g).to(dtype) for _ in range(2))
    return key, value


def put(cache: np.ndarray, new: np.ndarray, at: Any, late: int = 0) -> np.ndarray:
    """``cache`` with new rows; at: gives an index of a slot's head and channel."""
    out = cache.copy()
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            block, row = divmod(slot + (late if t == 1 else 0), SIZE)
            for h in range(KV):
                for c in range(WIDTH):
                    out[at(block, row, h, c)] = new[t, h, c]
    return out


LAYOUTS = {
    "reshape_and_cache_flash": [((BLOCKS, SIZE, KV, WIDTH), lambda b, s, h, c: (b, s, h, c))] * 2,
    "reshape_and_cache": [
        ((BLOCKS, KV, WIDTH // 4, SIZE, 4), lambda b, s, h, c: (b, h, c // 4, s, c % 4)),
        ((BLOCKS, KV, WIDTH, SIZE), lambda b, s, h, c: (b, h, c, s)),
    ],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2"])
def test_a_slot_is_written_and_no_other(name: str, kind: str) -> None:
    pair, scales = rows(), (torch.tensor(0.5), torch.tensor(0.125))
    caches, roles, wrong = [], {}, {}
    for n, ((shape, at), new, scale) in enumerate(zip(LAYOUTS[name], pair, scales, strict=True)):
        g = torch.Generator().manual_seed(n)
        if kind == "auto":
            cache, codes = torch.randn(*shape, generator=g).bfloat16(), new
            before, stored = cache.double().numpy(), codes.double().numpy()
            after = [torch.from_numpy(put(before, stored, at, late)).bfloat16() for late in (0, 1)]
        else:
            dtype = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
            cache = torch.randint(0, 100, shape, generator=g, dtype=torch.uint8)
            codes = (new.float() / scale).to(dtype).view(torch.uint8)
            after = [torch.from_numpy(put(cache.numpy(), codes.numpy(), at, late)) for late in (0, 1)]
        caches.append(cache)
        roles[f"inplace.input.{n + 2}"], wrong[f"inplace.input.{n + 2}"] = after
    call = Call("x", f"torch.ops._C_cache_ops.{name}", args=(*pair, *caches, torch.tensor(SLOTS), kind, *scales),
                outputs=roles)  # fmt: skip
    for role, mine in roles.items():
        assert verdict(call, role, mine).passed, role
        other = Call(call.name, call.cls, args=call.args, outputs=wrong)
        assert not verdict(other, role, wrong[role]).passed, role


def test_a_scale_that_is_anothers_is_found() -> None:
    key, value = rows()
    cache = torch.zeros(BLOCKS, SIZE, KV, WIDTH, dtype=torch.uint8)
    scales = torch.tensor(0.5), torch.tensor(0.125)
    after = cache.clone().reshape(-1, KV, WIDTH)
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            after[slot] = (key[t].float() / scales[1]).to(torch.float8_e4m3fn).view(torch.uint8)
    after = after.reshape(cache.shape)
    args = (key, value, cache, cache, torch.tensor(SLOTS), "fp8", *scales)
    call = Call("x", "torch.ops._C_cache_ops.reshape_and_cache_flash", args=args, outputs={"inplace.input.2": after})
    assert not verdict(call, "inplace.input.2", after).passed


def test_latent_rows_copies_and_gathers() -> None:
    g = torch.Generator().manual_seed(5)
    cache, c, pe = (torch.randn(*s, generator=g).bfloat16() for s in ((BLOCKS, SIZE, 6), (5, 4), (5, 2)))
    after = cache.clone()
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            after[slot // SIZE, slot % SIZE] = torch.cat((c[t], pe[t]))
    call = Call("x", "torch.ops._C_cache_ops.concat_and_cache_mla", outputs={"inplace.input.2": after},
                args=(c, pe, cache, torch.tensor(SLOTS), "auto", torch.tensor(1.0)))  # fmt: skip
    assert verdict(call, "inplace.input.2", after).passed
    assert not verdict(call, "inplace.input.2", cache).passed
    to = cache.roll(1, 0)
    moved = to.clone()
    moved[3] = cache[1]
    swap = Call("x", "torch.ops._C_cache_ops.swap_blocks", args=(cache, to, 192, torch.tensor([[1, 3]])),
                outputs={"inplace.input.1": moved})  # fmt: skip
    assert verdict(swap, "inplace.input.1", moved).passed
    assert not verdict(swap, "inplace.input.1", to).passed
    out = torch.zeros(21, 6).bfloat16()
    table, ends = torch.tensor([[2, 1], [3, 0]]), torch.tensor([0, 18, 21])
    for n, (a, b) in enumerate([(0, 18), (18, 21)]):
        for p in range(b - a):
            out[a + p] = cache[int(table[n, p // SIZE]), p % SIZE]
    gather = Call("x", "torch.ops._C_cache_ops.cp_gather_cache", outputs={"inplace.input.1": out},
                  args=(cache, torch.zeros_like(out), table, ends, 2, None))  # fmt: skip
    assert verdict(gather, "inplace.input.1", out).passed
    assert not verdict(gather, "inplace.input.1", out.roll(1, 0)).passed
