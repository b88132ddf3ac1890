"""The indexer over its paged cache against definitions in numpy at random shapes, wrong kernels, and vLLM's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict
from reference_calls import evaluated

from vllm_accprobe.opcheck.reference import Call

SEEDS = range(4)


def cached(r: Any, blocks: int, size: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys' codes [blocks, size, width], scales [blocks, size], the cache's bytes [blocks, size * (width + 4)])"""
    codes = torch.from_numpy(r.normal(size=(blocks, size, width))).float().to(torch.float8_e4m3fn)
    scales = torch.from_numpy(r.uniform(0.5, 2, (blocks, size))).float()
    sides = [x.view(torch.uint8).reshape(blocks, -1) for x in (codes, scales)]
    return codes, scales, torch.cat(sides, 1)


def by_hand(q: Any, codes: Any, scales: Any, w: Any, lengths: Any, table: Any, longest: int, fault: str = "") -> Any:
    """Number by number; q [requests, n, heads, d], lengths of the requests' last queries."""
    a, b, s, c = (x.double().numpy() for x in (q, codes, scales, w))
    requests, many, heads, _ = a.shape
    size = b.shape[1]
    out = np.full((requests * many, longest), -np.inf)
    for r in range(requests):
        for j in range(many):
            stop = lengths[r] if fault == "drafts see each other" else lengths[r] - many + j + 1
            for p in range(stop):
                of = (r + 1) % requests if fault == "blocks of another request" else r
                block, slot = int(table[of, p // size]), p % size
                dots = [float(a[r, j, h] @ b[block, slot]) for h in range(heads)]
                if fault != "no relu":
                    dots = [max(d, 0.0) for d in dots]
                by = s[block, (slot + 1) % size] if fault == "scale of the next key" else s[block, slot]
                out[r * many + j, p] = by * sum(d * v for d, v in zip(dots, c[r * many + j], strict=True))
    return torch.from_numpy(out).float()


def drawn(seed: int, many: int = 1) -> tuple[Any, ...]:
    r = np.random.default_rng(seed)
    requests, heads, width, size, pages = (int(r.integers(*at)) for at in ((2, 5), (1, 6), (4, 20), (2, 8), (2, 5)))
    codes, scales, cache = cached(r, requests * pages + 2, size, width)
    q = torch.from_numpy(r.normal(size=(requests, many, heads, width))).float().to(torch.float8_e4m3fn)
    w = torch.from_numpy(r.normal(size=(requests * many, heads))).float()
    table = torch.from_numpy(r.permutation(requests * pages + 2)[: requests * pages].reshape(requests, pages)).int()
    lengths = r.integers(many + 1, size * pages + 1, requests)
    return q, codes, scales, cache, w, lengths, table, size, size * pages


FAULTS = ["", "no relu", "scale of the next key", "blocks of another request", "drafts see each other"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_scores_over_blocks(seed: int, fault: str) -> None:
    q, codes, scales, cache, w, lengths, table, size, longest = drawn(seed, many=3)
    mine = by_hand(q, codes, scales, w, lengths, table, longest, fault)
    paged = cache.reshape(len(cache), size, 1, -1)
    args = (q, paged, w, torch.from_numpy(lengths).int(), table, torch.zeros(1), longest)
    call = Call("x", "torch.ops.vllm.xpu_fp8_paged_mqa_logits", args=args, outputs={"output.0": mine})
    assert verdict(call, "output.0", mine).passed == (not fault)


@pytest.mark.parametrize("fault", FAULTS[:-1])
@pytest.mark.parametrize("seed", SEEDS)
def test_scores_of_single_tokens(seed: int, fault: str) -> None:
    """What lies behind a row's keys is nobody's: the kernel does not clean it."""
    q, codes, scales, cache, w, lengths, table, size, longest = drawn(seed)
    mine = by_hand(q, codes, scales, w, lengths, table, longest, fault)
    behind = torch.isinf(mine).nonzero()
    mine = torch.where(torch.isinf(mine), 1e-3, mine)
    for place, value in zip(behind.tolist(), (float("nan"), float("inf"), -float("inf")), strict=False):
        mine[tuple(place)] = value
    args = (q[:, 0], cache, w, torch.from_numpy(lengths).int(), table, size, longest)
    call = Call("x", "torch.ops._C.fp8_paged_mqa_logits_cpu", args=args, outputs={"output.0": mine})
    assert verdict(call, "output.0", mine).passed == (not fault)


def test_a_row_beside_large_numbers_that_nobody_wrote_is_not_judged() -> None:
    q, codes, scales, cache, w, lengths, table, size, longest = drawn(1)
    mine = by_hand(q, codes, scales, w, lengths, table, longest + 1)
    mine[0, -1] = 3e38
    args = (q[:, 0], cache, w, torch.from_numpy(lengths).int(), table, size, longest + 1)
    call = Call("x", "torch.ops._C.fp8_paged_mqa_logits_cpu", args=args, outputs={"output.0": mine})
    rows = evaluated(call)["output.0"].rows
    assert rows is not None
    assert rows.tolist() == [False] + [True] * (len(lengths) - 1)


def best_by_hand(z: Any, lengths: Any, table: Any, size: int, k: int, fault: str) -> tuple[Any, Any]:
    slots, positions = (np.full((len(z), k), -1) for _ in range(2))
    for r in range(len(z)):
        order = sorted(range(lengths[r]), key=lambda p: -z[r, p])
        if fault == "one worse" and len(order) > k:
            order[k - 1] = order[k]
        for n, p in enumerate(order[:k]):
            of = (r + 1) % len(z) if fault == "table of another row" else r
            positions[r, n] = p
            slots[r, n] = p if fault == "positions for slots" else table[of, p // size] * size + p % size
    return torch.from_numpy(slots).int(), torch.from_numpy(positions).int()


@pytest.mark.parametrize("fault", ["", "one worse", "table of another row", "positions for slots"])
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_keys_slots(seed: int, raw: bool, fault: str) -> None:
    r = np.random.default_rng(seed)
    rows, pages, size, k = int(r.integers(2, 5)), int(r.integers(4, 7)), int(r.integers(3, 6)), int(r.integers(4, 9))
    z = r.normal(size=(rows, pages * size)).astype(np.float32)
    lengths = r.integers(k + 1, pages * size + 1, rows)
    lengths[0] = k - 1
    table = 9 + r.permutation(rows * pages).reshape(rows, pages)
    slots, positions = best_by_hand(z, lengths, table, size, k, fault)
    args = [*(torch.from_numpy(x) for x in (z, lengths, table)), torch.zeros_like(slots), size]
    outputs = {"inplace.input.3": slots}
    if raw:
        args.append(torch.zeros_like(positions))
        outputs["inplace.input.5"] = positions
    call = Call("x", "torch.ops._C.topk_transform_512_cpu", args=tuple(args), outputs=outputs)
    assert all(verdict(call, role, y).passed for role, y in outputs.items()) == (not fault)


@pytest.mark.parametrize("fault", ["", "another slot", "scale of the next", "not rounded up", "codes cut off"])
@pytest.mark.parametrize("kind", ["ue8m0", "float"])
@pytest.mark.parametrize("seed", SEEDS)
def test_keys_written(seed: int, kind: str, fault: str) -> None:
    r = np.random.default_rng(seed)
    quant, parts, blocks, size = int(r.integers(4, 9)), int(r.integers(1, 4)), 5, int(r.integers(3, 7))
    if fault == "not rounded up" and kind != "ue8m0":
        pytest.skip("only powers of two are rounded up")
    width, tokens = quant * parts, int(r.integers(3, 7))
    k = torch.from_numpy(r.normal(size=(tokens, width))).bfloat16()
    cache = torch.from_numpy(r.integers(0, 120, (blocks, size, width + 4 * parts), np.uint8))
    slots = r.permutation(blocks * size)[:tokens]
    slots[1] = -1
    x, mine = k.double().numpy(), cache.numpy().reshape(blocks, -1).copy()
    for t in range(tokens):
        if slots[t] < 0:
            continue
        slot = (slots[t] + 1) % (blocks * size) if fault == "another slot" else slots[t]
        block, at = divmod(int(slot), size)
        for p in range(parts):
            of = (t + 1) % tokens if fault == "scale of the next" else t
            by = max(np.abs(x[of, p * quant : (p + 1) * quant]).max(), 1e-4) / 448
            if kind == "ue8m0":
                by = 2.0 ** (np.floor(np.log2(by)) if fault == "not rounded up" else np.ceil(np.log2(by)))
            by = float(np.float32(by))
            begin = size * width + 4 * (at * parts + p)
            mine[block, begin : begin + 4] = np.frombuffer(np.float32(by).tobytes(), np.uint8)
            for c in range(p * quant, (p + 1) * quant):
                code = torch.tensor(np.clip(x[t, c] / by, -448, 448)).float().to(torch.float8_e4m3fn)
                if fault == "codes cut off" and abs(float(code)) > abs(x[t, c] / by):
                    code = (code.view(torch.uint8) - 1).view(torch.float8_e4m3fn)
                mine[block, at * width + c] = int(code.view(torch.uint8))
    y = torch.from_numpy(mine).reshape(cache.shape)
    args = (k, cache, torch.from_numpy(slots), quant, kind)
    call = Call("x", "torch.ops._C_cache_ops.indexer_k_quant_and_cache", args=args, outputs={"inplace.input.1": y})
    assert verdict(call, "inplace.input.1", y).passed == (not fault)


@pytest.mark.parametrize("fault", ["", "blocks of another request", "scale of the next key"])
@pytest.mark.parametrize("seed", SEEDS)
def test_keys_gathered(seed: int, fault: str) -> None:
    _, codes, scales, cache, _, lengths, table, size, _ = drawn(seed)
    keys, by = [], []
    for r, stop in enumerate(lengths):
        for p in range(stop):
            of = (r + 1) % len(table) if fault == "blocks of another request" else r
            block = int(table[of, p // size])
            keys.append(codes[block, p % size])
            by.append(scales[block, (p + (fault == "scale of the next key")) % size])
    mine = {"inplace.input.1": torch.stack(keys), "inplace.input.2": torch.stack(by).reshape(-1, 1)}
    ends = torch.tensor([0, *np.cumsum(lengths)])
    args = (cache.reshape(len(cache), size, -1), *(torch.zeros_like(x) for x in mine.values()), table, ends)
    call = Call("x", "torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache", args=args, outputs=mine)
    assert all(verdict(call, role, y).passed for role, y in mine.items()) == (not fault)


def pages_of(r: Any, blocks: int, size: int, normal: bool = False) -> tuple[torch.Tensor, np.ndarray]:
    """(a cache of keys 512 wide in bytes, the same as numbers [slots, 512]), as DeepSeek-V4 has it. normal: none of its
    codes is subnormal."""
    codes = torch.from_numpy(r.normal(size=(blocks, size, 448))).float().to(torch.float8_e4m3fn)
    if normal:
        codes = torch.where(codes.float().abs() < 2.0**-6, 2.0**-6, codes.float()).to(codes.dtype)
    rope = torch.from_numpy(r.normal(size=(blocks, size, 64))).bfloat16()
    exponents = r.integers(125, 130, (blocks, size, 8)).astype(np.uint8)
    data = torch.cat([codes.view(torch.uint8), rope.view(torch.uint8).reshape(blocks, size, 128)], -1)
    whole = torch.cat([data.reshape(blocks, -1), torch.from_numpy(exponents).reshape(blocks, -1)], 1)
    wide = codes.double().numpy() * np.repeat(2.0 ** (exponents[..., :7].astype(float) - 127), 64, -1)
    return whole, np.concatenate([wide, rope.double().numpy()], -1).reshape(blocks * size, 512)


def attention_call(
    seed: int, heads: int, size: int, less: int, fault: str = "", normal: bool = False
) -> tuple[Call, torch.Tensor]:
    """A call and its result by hand. size, less: keys of a block, of single tokens and compressed."""
    r = np.random.default_rng(seed)
    tokens = int(r.integers(2, 5))
    (window, a), (short, b) = pages_of(r, 4, size, normal), pages_of(r, 3, less, normal)
    ws, cs = r.integers(0, 4 * size, (tokens, 5)), r.integers(0, 3 * less, (tokens, 4))
    ws[0, 3:], cs[-1, 2:] = -1, -1
    q = torch.from_numpy(0.1 * r.normal(size=(tokens, heads, 512))).bfloat16()
    sinks = torch.from_numpy(r.normal(size=heads)).float()
    wide, out = q.double().numpy(), np.zeros((tokens, heads, 512))
    for t in range(tokens):
        padding = 0 if fault == "padding is key 0" else None
        keys = [a[s if s >= 0 else padding] for s in ws[t] if s >= 0 or padding is not None]
        keys += [b[s] for s in cs[t] if s >= 0 and fault != "compressed keys left out"]
        for h in range(heads):
            weights = np.exp([0.2 * wide[t, h] @ k for k in keys])
            total = weights.sum() + (0.0 if fault == "no sink" else np.exp(float(sinks[h])))
            out[t, h] = sum(w / total * k for w, k in zip(weights, keys, strict=True))
    mine = torch.from_numpy(out).bfloat16()
    slots = torch.from_numpy(ws), torch.from_numpy(cs)
    args = (torch.zeros_like(mine), q, window, slots[0], size, short, slots[1], less, sinks, 0.2)
    return Call("x", "torch.ops._C.flash_mla_with_kvcache_cpu", args=args, outputs={"inplace.input.0": mine}), mine


@pytest.mark.parametrize("fault", ["", "padding is key 0", "compressed keys left out", "no sink"])
@pytest.mark.parametrize("seed", SEEDS)
def test_attention_over_pages(seed: int, fault: str) -> None:
    r = np.random.default_rng(100 + seed)
    call, mine = attention_call(seed, int(r.integers(1, 4)), int(r.integers(2, 5)), int(r.integers(2, 4)), fault)
    assert verdict(call, "inplace.input.0", mine).passed == (not fault)


@pytest.fixture(scope="module")
def kernels() -> Any:
    """vLLM's CPU kernels; they need AVX-512."""
    pytest.importorskip("vllm")
    import vllm._custom_ops  # noqa: F401
    from vllm.platforms import current_platform  # noqa: F401

    found = torch.ops._C
    if not hasattr(found, "fp8_paged_mqa_logits_cpu") or not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's kernels of the indexer are not here")
    return found


def test_vllms_own_scores_and_choice(kernels: Any) -> None:
    r = np.random.default_rng(1)
    codes, _, cache = cached(r, 40, 64, 128)
    q = torch.from_numpy(r.normal(size=(3, 64, 128))).float().to(torch.float8_e4m3fn)
    w = torch.from_numpy(r.normal(size=(3, 64))).float()
    table = torch.from_numpy(r.permutation(len(codes))[:33].reshape(3, 11)).int()
    lengths = torch.tensor([5, 600, 700], dtype=torch.int32)
    args = (q, cache, w, lengths, table, 64, 700)
    mine = kernels.fp8_paged_mqa_logits_cpu(*args)
    for row, stop in enumerate(lengths.tolist()):
        mine[row, stop:] = 0  # memory as it was found, which the kernel leaves behind a row's keys
    call = Call("x", "torch.ops._C.fp8_paged_mqa_logits_cpu", args=args, outputs={"output.0": mine})
    assert verdict(call, "output.0", mine).passed
    wrong = mine.clone()
    wrong[1, :64] = mine[2, :64]
    call = Call("x", call.cls, args=args, outputs={"output.0": wrong})
    assert not verdict(call, "output.0", wrong).passed

    slots, positions = (torch.zeros(3, 512, dtype=torch.int32) for _ in range(2))
    args = (mine, lengths, table, torch.zeros_like(slots), 64, torch.zeros_like(positions))
    kernels.topk_transform_512_cpu(mine, lengths, table, slots, 64, positions)
    outputs = {"inplace.input.3": slots, "inplace.input.5": positions}
    call = Call("x", "torch.ops._C.topk_transform_512_cpu", args=args, outputs=outputs)
    assert all(verdict(call, role, y).passed for role, y in outputs.items())


@pytest.mark.parametrize("seed", SEEDS)
def test_vllms_own_attention_over_pages(kernels: Any, seed: int) -> None:
    call, _ = attention_call(seed, 64, 64, 16, normal=True)
    mine = torch.zeros_like(call.args[0])
    kernels.flash_mla_with_kvcache_cpu(mine, *call.args[1:])
    call = Call("x", call.cls, args=call.args, outputs={"inplace.input.0": mine})
    assert verdict(call, "inplace.input.0", mine).passed
    wrong = mine.clone()
    wrong[0] = mine[1]
    assert not verdict(call, "inplace.input.0", wrong).passed


def test_vllms_own_attention_reads_subnormal_codes_as_normal_ones(kernels: Any) -> None:
    """A fault of vLLM 0.32 that nobody planted: code 0 is read as 2**-7, code m below 8 as (1 + m / 8) 2**-7."""
    data, heads = torch.zeros(1, 64 * 584, dtype=torch.uint8), 64
    data[0, :8], data[0, 64 * 576 : 64 * 576 + 7] = torch.arange(8, dtype=torch.uint8), 127
    nothing, one = torch.full((1, 1), -1), torch.zeros(1, 1, dtype=torch.int64)
    args = (torch.zeros(1, heads, 512).bfloat16(), torch.zeros(1, heads, 512).bfloat16(), data, one, 64, data, nothing,
            64, torch.full((heads,), -1e4), 1.0)  # fmt: skip
    mine = torch.zeros_like(args[0])  # one key with weight 1: the output is the key
    kernels.flash_mla_with_kvcache_cpu(mine, *args[1:])
    call = Call("x", "torch.ops._C.flash_mla_with_kvcache_cpu", args=args, outputs={"inplace.input.0": mine})
    right = bool((mine[0, 0, :8].double() == torch.arange(8) * 2.0**-9).all())
    assert right or bool((mine[0, 0, :8].double() == (1 + torch.arange(8) / 8) * 2.0**-7).all())
    assert verdict(call, "inplace.input.0", mine).passed == right
