"""SelfAttention of ATB against numpy, head by head: encoders, decoders, masks, clamps, caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, attend, bits, holds, judged, lower, normal, slopes, wide

HALF, BRAIN, INT = torch.float16, torch.bfloat16, torch.int32
Make = Callable[[np.random.Generator], MadeCall]
Array = np.ndarray[Any, Any]
KIND = "SelfAttentionOperation"
HEADS, KV, D = 4, 2, 16


def encoder(
    mask: torch.Tensor | None, added: Callable[[int, int], Any], *, dtype: torch.dtype = HALF,
    lengths: Sequence[int] = (5, 9), clamp: tuple[float, float] | None = None, **param: Any,
) -> Make:  # fmt: skip
    """PA_ENCODER; added: of (request, length)."""

    def make(rng: np.random.Generator) -> MadeCall:
        tokens = sum(lengths)
        q, k, v = (normal(rng, tokens, h, D, dtype=dtype) for h in (HEADS, KV, KV))
        out, at = [], 0
        for r, n in enumerate(lengths):
            own = slice(at, at + n)
            out.append(attend(wide(q)[own], wide(k)[own], wide(v)[own], 0.25, added(r, n), clamp))
            at += n
        inputs = [q, k, v, *([] if mask is None else [mask]), torch.tensor(lengths, dtype=INT)]
        whole = {"headNum": HEADS, "kvHeadNum": KV, "qkScale": 0.25, "calcType": 3, **param}
        return MadeCall(KIND, whole, inputs, [bits(np.concatenate(out), dtype)])

    return make


def norm_mask(dtype: torch.dtype = HALF, far: float = -10000.0) -> torch.Tensor:
    return bits(np.where(np.triu(np.ones((16, 16)), 1) > 0, far, 0.0), dtype)


def alibi(heads: int, n: int) -> Array:
    at = np.arange(n)
    return slopes(heads)[:, None, None] * (at[None, :] - at[:, None])[None] + lower(n, n, -10000.0)[None]


def far(n: int) -> Array:
    """Keys at distance 3 or more."""
    return np.where(np.arange(n)[:, None] - np.arange(n) >= 3, -np.inf, 0.0)


def flat(rng: np.random.Generator) -> MadeCall:
    """[tokens, heads * d], without calcType and maskType: the order of inputs tells."""
    made = encoder(norm_mask(), lambda r, n: lower(n, n), lengths=(7,))(rng)
    q, k, v, mask, lengths = made.inputs
    out = made.outputs[0].reshape(7, -1)
    param = {"headNum": HEADS, "kvHeadNum": KV, "qkScale": 0.25}
    return MadeCall(KIND, param, [*(t.reshape(7, -1) for t in (q, k, v)), mask, lengths], [out])


def latent(rng: np.random.Generator) -> MadeCall:
    q, k = normal(rng, 6, HEADS, D), normal(rng, 6, 1, D)
    y = attend(wide(q), wide(k), wide(k)[..., :8], 0.25)
    param = {"headNum": HEADS, "kvHeadNum": 1, "qkScale": 0.25, "calcType": 3, "mlaVHeadSize": 8}
    return MadeCall(KIND, param, [q, k, torch.tensor([6], dtype=INT)], [bits(y)])


def cached(
    own: Sequence[int], total: Sequence[int], masked: bool, bypass: bool = False, status: Sequence[int] | None = None
) -> Make:
    """Layer 1 of 2; caches [layers, requests, most, kv heads * d]."""

    def make(rng: np.random.Generator) -> MadeCall:
        tokens, batch, most = sum(own), len(own), 16
        q, k, v = (normal(rng, tokens, h * D) for h in (HEADS, KV, KV))
        caches = [normal(rng, 2, batch, most, KV * D) for _ in range(2)]
        after = [wide(c).copy() for c in caches]
        mask = bits(np.where(rng.integers(0, 2, (batch, most, most)), 0.0, -10000.0)) if masked else None
        out, at = np.zeros((tokens, HEADS * D)), 0
        if masked and mask is not None:
            mask[..., 0] = 0  # each query sees a key
        for r, (n, m) in enumerate(zip(own, total, strict=True)):
            on = status is None or status[r]
            if not bypass and on:
                for cache, new in zip(after, (k, v), strict=True):
                    cache[1, r, m - n : m] = wide(new)[at : at + n]
            if on:
                keys, values = (c[1, r, :m].reshape(m, KV, D) for c in after)
                added = wide(mask)[r, :n, :m] if mask is not None else 0.0
                y = attend(wide(q)[at : at + n].reshape(n, HEADS, D), keys, values, 0.5 * 0.5, added)
                out[at : at + n] = y.reshape(n, -1)
            at += n
        numbers = [torch.tensor(list(t), dtype=INT) for t in (total, own, [1])]
        more = [] if status is None else [torch.tensor(list(status), dtype=INT)]
        inputs = [q, *([] if bypass else [k, v]), *caches, *([] if mask is None else [mask]), *numbers, *more]
        param = {"headNum": HEADS, "kvHeadNum": KV, "qScale": 0.5, "qkScale": 0.5, "calcType": 0,
                 "maskType": int(masked), "kvcacheCfg": int(bypass),
                 "batchRunStatusEnable": status is not None}  # fmt: skip
        written = {} if bypass else {3: bits(after[0]), 4: bits(after[1])}
        return MadeCall(KIND, param, inputs, [bits(out)], written)

    return make


def prefix(rng: np.random.Generator) -> MadeCall:
    """Blocks of 4 slots, in an order of their own."""
    own, total = [3, 2], [9, 6]
    q = normal(rng, 5, HEADS, D)
    keys, values = (normal(rng, 8, 4, KV, D) for _ in range(2))
    table = torch.tensor([[5, 0, 3], [7, 2, -1]], dtype=INT)
    out, at = [], 0
    for r, (n, m) in enumerate(zip(own, total, strict=True)):
        blocks = table[r, : -(-m // 4)].long().numpy()
        k, v = (wide(t)[blocks].reshape(-1, KV, D)[:m] for t in (keys, values))
        out.append(attend(wide(q)[at : at + n], k, v, 0.25, lower(n, m)))
        at += n
    param = {"headNum": HEADS, "kvHeadNum": KV, "qkScale": 0.25, "calcType": 4, "maskType": 9}
    inputs = [q, keys, values, table, torch.tensor(own, dtype=INT), torch.tensor(total, dtype=INT)]
    return MadeCall(KIND, param, inputs, [bits(np.concatenate(out))])


CASES: dict[str, Make] = {
    "encoder": encoder(None, lambda r, n: 0.0, maskType=0),
    "norm": encoder(norm_mask(), lambda r, n: lower(n, n), maskType=1),
    "norm bfloat16": encoder(norm_mask(BRAIN, 1.0), lambda r, n: lower(n, n), dtype=BRAIN, maskType=1),
    "clamped": encoder(None, lambda r, n: 0.0, clamp=(-0.4, 0.3), maskType=0, clampType=1, clampMin=-0.4, clampMax=0.3),
    "alibi of heads": encoder(bits(alibi(HEADS, 16)), lambda r, n: alibi(HEADS, n), maskType=2),
    "alibi of requests": encoder(bits(np.stack([alibi(HEADS, 16)] * 2)), lambda r, n: alibi(HEADS, n), maskType=2),
    "compressed": encoder(norm_mask()[:4, :4], lambda r, n: lower(n, n), maskType=3),
    "window": encoder(norm_mask(), lambda r, n: lower(n, n) + far(n), maskType=7, windowSize=3),
    "high precision": encoder(norm_mask(), lambda r, n: lower(n, n), maskType=1, kernelType=1),
    "flat": flat, "latent": latent, "cache": cached([4, 3], [4, 3], True), "with a past": cached([2, 3], [7, 5], True),
    "decoder": cached([1, 1], [6, 9], False), "bypass": cached([1, 1], [6, 9], True, True),
    "switched off": cached([1, 1], [6, 9], False, status=[1, 0]), "prefix": prefix,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_attention(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


@pytest.mark.parametrize(
    "change", [{"qkScale": 0.3}, {"maskType": 0, "calcType": 3}, {"clampType": 1, "clampMin": -0.1, "clampMax": 0.1}]
)
def test_another_parameter_is_a_fault(tmp_path: Path, change: dict[str, Any]) -> None:
    made = CASES["norm"](np.random.default_rng(4))
    inputs = [t for i, t in enumerate(made.inputs) if i != 3] if change.get("maskType") == 0 else made.inputs
    found = judged(tmp_path, MadeCall(KIND, {**(made.param or {}), **change}, inputs, made.outputs))
    assert found["output.0"].status == "fail"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"scaleType": 1}, "a LogN scale has no reference"), ({"inputLayout": 1}, "the layout BNSD has no reference"),
        ({"quantType": 2}, "int8 queries, keys and values has no reference"),
        ({"maskType": 4}, "maskType 4 has no reference"), ({"headNum": 0}, "headNum 0, kvHeadNum 2"),
    ],
)  # fmt: skip
def test_what_has_no_reference_says_so(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    made = CASES["norm"](np.random.default_rng(4))
    (row,) = judged(tmp_path, MadeCall(KIND, {**(made.param or {}), **change}, made.inputs, made.outputs)).values()
    assert (row.status, row.message) == ("skip", why)
