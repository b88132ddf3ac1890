"""PagedAttention and the operators that write caches, against numpy, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, attend, bits, holds, judged, lower, normal, slopes, wide

HALF, BRAIN, INT, INT8 = torch.float16, torch.bfloat16, torch.int32, torch.int8
Make = Callable[[np.random.Generator], MadeCall]
Array = np.ndarray[Any, Any]
HEADS, KV, D, SIZE = 4, 2, 16, 4
LENGTHS = (6, 9, 1)


def _table(rng: np.random.Generator, lengths: Sequence[int]) -> torch.Tensor:
    free, rows = list(rng.permutation(12)), []
    for n in lengths:
        own = [free.pop() for _ in range(-(-n // SIZE))]
        rows.append(own + [-1] * (4 - len(own)))
    return torch.tensor(np.array(rows), dtype=INT)


def _rows(blocks: Array, table: torch.Tensor, r: int, n: int) -> Array:
    return blocks[table[r, : -(-n // SIZE)].long().numpy()].reshape(-1, *blocks.shape[2:])[:n]


def paged(
    dtype: torch.dtype = HALF, mask: str = "", kv: int = KV, nz: bool = False, status: Sequence[int] = ()
) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        q = normal(rng, len(LENGTHS), HEADS, D, dtype=dtype)
        keys, values = (normal(rng, 12, SIZE, kv, D, dtype=dtype) for _ in range(2))
        table, out = _table(rng, LENGTHS), np.zeros((len(LENGTHS), HEADS, D))
        hidden = np.where(np.arange(12) < np.array([2, 0, 0])[:, None], -10000.0, 0.0)[:, None]
        bias = (
            slopes(HEADS)[None, :, None, None] * (np.arange(12)[None] - np.array(LENGTHS)[:, None] + 1)[:, None, None]
        )
        for r, n in enumerate(LENGTHS):
            added = hidden[r, :, :n] if mask == "norm" else bias[r, :, :, :n] if mask == "alibi" else 0.0
            if not status or status[r]:
                k, v = (_rows(wide(t), table, r, n) for t in (keys, values))
                out[r] = attend(wide(q)[r : r + 1], k, v, 0.25, added)[0]
        more = [bits(hidden if mask == "norm" else bias, dtype)] if mask else []
        more += [torch.tensor(list(status), dtype=INT)] if status else []
        caches = [keys, values]
        if nz:
            caches = [bits(wide(t).reshape(12, SIZE, -1, 16).transpose(0, 2, 1, 3), dtype) for t in caches]
        param = {"headNum": HEADS, "kvHeadNum": kv, "qkScale": 0.25, "maskType": {"": 0, "norm": 1, "alibi": 2}[mask],
                 "batchRunStatusEnable": bool(status)}  # fmt: skip
        inputs = [q, *caches, table, torch.tensor(LENGTHS, dtype=INT), *more]
        return MadeCall("PagedAttentionOperation", param, inputs, [bits(out, dtype)])

    return make


def dequantised(offset: bool) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        q = normal(rng, len(LENGTHS), HEADS, D)
        caches = [bits(rng.integers(-127, 128, (12, SIZE, KV, D)), INT8) for _ in range(2)]
        scales = [rng.uniform(0.005, 0.02, KV * D).astype(np.float32) for _ in range(2)]
        offsets = [bits(rng.integers(-9, 10, KV * D), INT) for _ in range(2)]
        table, out = _table(rng, LENGTHS), np.zeros((len(LENGTHS), HEADS, D))
        for r, n in enumerate(LENGTHS):
            k, v = (
                (_rows(wide(c), table, r, n) + (wide(o) if offset else np.zeros(KV * D)).reshape(KV, D))
                * s.astype(float).reshape(KV, D)
                for c, s, o in zip(caches, scales, offsets, strict=True)
            )
            out[r] = attend(wide(q)[r : r + 1], k, v, 0.25)[0]
        more: list[torch.Tensor] = []
        for s, o in zip(scales, offsets, strict=True):
            more += [torch.from_numpy(s.view(np.uint32).astype(np.int64)), *([o] if offset else [])]
        param = {"headNum": HEADS, "kvHeadNum": KV, "qkScale": 0.25, "quantType": 1, "hasQuantOffset": offset}
        inputs = [q, *caches, table, torch.tensor(LENGTHS, dtype=INT), *more]
        return MadeCall("PagedAttentionOperation", param, inputs, [bits(out)])

    return make


def speculative(rng: np.random.Generator) -> MadeCall:
    """Several queries of each request, and a mask of them all."""
    own = [2, 3, 1]
    q = normal(rng, sum(own), HEADS, D)
    keys, values = (normal(rng, 12, SIZE, KV, D) for _ in range(2))
    table, out, at, mask = _table(rng, LENGTHS), [], 0, np.zeros((3, 4, 12))
    for r, (n, m) in enumerate(zip(own, LENGTHS, strict=True)):
        mask[r, :n, :m] = lower(n, m, -10000.0)
        k, v = (_rows(wide(t), table, r, m) for t in (keys, values))
        out.append(attend(wide(q)[at : at + n], k, v, 0.25, lower(n, m)))
        at += n
    param = {"headNum": HEADS, "kvHeadNum": KV, "qkScale": 0.25, "maskType": 3, "calcType": 1}
    numbers = [torch.tensor(LENGTHS, dtype=INT), bits(mask), torch.tensor(own, dtype=INT)]
    return MadeCall("PagedAttentionOperation", param, [q, keys, values, table, *numbers], [bits(np.concatenate(out))])


def latent(rng: np.random.Generator) -> MadeCall:
    q, cache = normal(rng, len(LENGTHS), HEADS, D), normal(rng, 12, SIZE, 1, D)
    table, out = _table(rng, LENGTHS), np.zeros((len(LENGTHS), HEADS, 8))
    for r, n in enumerate(LENGTHS):
        k = _rows(wide(cache), table, r, n)
        out[r] = attend(wide(q)[r : r + 1], k, k[..., :8], 0.25)[0]
    param = {"headNum": HEADS, "kvHeadNum": 1, "qkScale": 0.25, "mlaVHeadSize": 8}
    return MadeCall("PagedAttentionOperation", param, [q, cache, table, torch.tensor(LENGTHS, dtype=INT)], [bits(out)])


def reshaped(nz: bool, alone: bool = False) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        new = [normal(rng, 5, KV, D) for _ in range(1 if alone else 2)]
        shape = (6, KV * D // 16, SIZE, 16) if nz else (6, SIZE, KV, D)
        caches = [normal(rng, *shape) for _ in new]
        slots = rng.permutation(24)[:5]
        slots[2] = -1
        after = [wide(c).copy() for c in caches]
        for cache, rows in zip(after, new, strict=True):
            for row, s in zip(wide(rows), slots, strict=True):
                if s >= 0 and nz:
                    cache[s // SIZE, :, s % SIZE] = row.reshape(-1, 16)
                elif s >= 0:
                    cache[s // SIZE, s % SIZE] = row
        param = {"compressType": 0, "kvCacheCfg": 1 if alone else 2 if nz else 0}
        first = len(new)
        written = {first + i: bits(a) for i, a in enumerate(after)}
        out = [bits(a) for a in after]
        return MadeCall("ReshapeAndCacheOperation", param, [*new, *caches, bits(slots, INT)], out, written)

    return make


def compressed(rng: np.random.Generator) -> MadeCall:
    """Of two requests each head keeps a window of its own."""
    lengths, wins = [4, 3], np.array([[3, 1], [2, 3]])
    new, caches = [normal(rng, 7, 2, D) for _ in range(2)], [normal(rng, 6, SIZE, 1, D) for _ in range(2)]
    slots, after = np.array([0, 5, 9, 14]), [wide(c).copy() for c in caches]
    for cache, rows in zip(after, new, strict=True):
        for r in range(2):
            for h in range(2):
                for j in range(wins[r, h]):
                    s, row = slots[2 * r + h] + j, sum(lengths[: r + 1]) - wins[r, h] + j
                    cache[s // SIZE, s % SIZE, 0] = wide(rows)[row, h]
    inputs = [*new, *caches, bits(slots, INT), bits(wins.reshape(-1), INT), bits(lengths, INT)]
    return MadeCall("ReshapeAndCacheOperation", {"compressType": 1}, inputs, [bits(a) for a in after])


def kv_cache(rng: np.random.Generator) -> MadeCall:
    new, cache, own, total = normal(rng, 5, 8), normal(rng, 2, 2, 7, 8), [2, 3], [6, 3]
    after, at = wide(cache).copy(), 0
    for r, (n, m) in enumerate(zip(own, total, strict=True)):
        after[1, r, m - n : m] = wide(new)[at : at + n]
        at += n
    inputs = [new, torch.tensor([1], dtype=INT), cache, torch.tensor(total, dtype=INT), torch.tensor(own, dtype=INT)]
    return MadeCall("KvCacheOperation", None, inputs, [], {2: bits(after)})


def block_copy(rng: np.random.Generator) -> MadeCall:
    caches = [normal(rng, 8, SIZE, KV, D) for _ in range(2)]
    after = [wide(c).copy() for c in caches]
    for c in after:
        c[[4, 5]] = c[[1, 1]]
        c[6] = c[3]
    numbers = [torch.tensor(t, dtype=INT) for t in ([1, 3], [4, 5, 6], [2, 3])]
    return MadeCall("BlockCopyOperation", None, [*caches, *numbers], [], {i: bits(a) for i, a in enumerate(after)})


CASES: dict[str, Make] = {
    "paged": paged(), "paged bfloat16": paged(BRAIN), "paged norm": paged(mask="norm"),
    "paged alibi": paged(mask="alibi"), "paged nz": paged(nz=True),
    "paged status": paged(status=(1, 0, 1)), "int8": dequantised(False),
    "int8 offset": dequantised(True), "speculative": speculative, "latent": latent, "reshape": reshaped(False),
    "reshape nz": reshaped(True), "reshape alone": reshaped(False, True), "compressed": compressed,
    "kv cache": kv_cache, "block copy": block_copy,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_caches(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


def test_a_row_in_the_slot_beside_is_a_fault_even_where_only_the_cache_behind_was_kept(tmp_path: Path) -> None:
    made = reshaped(False)(np.random.default_rng(7))
    assert judged(tmp_path / "right", made, after=True)["output.0"].status == "pass"
    wrong = [made.outputs[0].roll(1, 1), made.outputs[1]]
    moved = {2: wrong[0], 3: made.inplace[3]}
    found = judged(tmp_path / "wrong", MadeCall(made.kind, made.param, made.inputs, wrong, moved), after=True)
    assert (found["output.0"].status, found["output.1"].status) == ("fail", "pass")


def test_a_slot_outside_of_the_cache_is_declined(tmp_path: Path) -> None:
    made = reshaped(False)(np.random.default_rng(7))
    inputs = [*made.inputs[:4], torch.full((5,), 1 << 30, dtype=INT)]
    (row,) = judged(tmp_path, MadeCall(made.kind, made.param, inputs, made.outputs)).values()
    assert row.status == "skip"
