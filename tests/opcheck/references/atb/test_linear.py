"""Products of ATB against numpy, at random shapes, right and with a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, normal, wide

HALF, BRAIN = torch.float16, torch.bfloat16
Make = Callable[[np.random.Generator], MadeCall]


def _sizes(rng: np.random.Generator) -> tuple[int, int, int]:
    m, k, n = (int(x) for x in rng.integers(3, 40, 3))
    return m, k, n


def plain(a: bool, b: bool, bias: bool, dtype: torch.dtype) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        m, k, n = _sizes(rng)
        x = normal(rng, *((k, m) if a else (m, k)), dtype=dtype)
        w = normal(rng, *((n, k) if b else (k, n)), dtype=dtype)
        more = [normal(rng, n, dtype=dtype)] if bias else []
        y = (wide(x).T if a else wide(x)) @ (wide(w).T if b else wide(w))
        y = y + wide(more[0]) if bias else y
        param = {"transposeA": a, "transposeB": b, "hasBias": bias, "outDataType": -1, "enAccum": False}
        return MadeCall("LinearOperation", param, [x, w, *more], [bits(y, dtype)])

    return make


def accumulated(rng: np.random.Generator) -> MadeCall:
    m, k, n = _sizes(rng)
    x, w, before = normal(rng, m, k), normal(rng, n, k), normal(rng, m, n, dtype=torch.float32)
    y = bits(wide(x) @ wide(w).T + wide(before), torch.float32)
    return MadeCall("LinearOperation", {"hasBias": False, "enAccum": True}, [x, w, before], [y])


def batched(rng: np.random.Generator) -> MadeCall:
    m, k, n = _sizes(rng)
    x, w, b = normal(rng, 3, m, k), normal(rng, 3, k, n), normal(rng, 3, n)
    y = np.stack([wide(x)[i] @ wide(w)[i] + wide(b)[i] for i in range(3)])
    return MadeCall("LinearOperation", {"hasBias": True, "transposeB": False}, [x, w, b], [bits(y)])


def einstein(rng: np.random.Generator) -> MadeCall:
    m, k, n = _sizes(rng)
    x, w = normal(rng, m, 4, k), normal(rng, 4, n, k)
    y = np.einsum("mbk,bnk->mbn", wide(x), wide(w))
    return MadeCall("LinearOperation", {"hasBias": False, "matmulType": 1}, [x, w], [bits(y)])


def in_nz(rng: np.random.Generator) -> MadeCall:
    """A weight [n, k] in FRACTAL_NZ: [1, k / 16, n, 16], k padded."""
    m, k, n = int(rng.integers(3, 9)), int(rng.integers(17, 40)), 32
    x, w = normal(rng, m, k), normal(rng, n, k)
    up = np.zeros((n, -(-k // 16) * 16))
    up[:, :k] = wide(w)
    nz = up.reshape(n, -1, 16).transpose(1, 0, 2)[None]
    return MadeCall("LinearOperation", {"hasBias": False}, [x, bits(nz)], [bits(wide(x) @ wide(w).T)])


def _codes(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    m, k, n = _sizes(rng)
    x, w, b = (bits(rng.integers(-127, 128, s), t) for s, t in (((m, k), torch.int8), ((n, k), torch.int8),
                                                                ((n,), torch.int32)))  # fmt: skip
    return x, w, b, rng.uniform(1e-4, 1e-3, n).astype(np.float32)


def quantised(rng: np.random.Generator) -> MadeCall:
    """W8A8 for float16: the scale's bits in the lower half of an int64."""
    x, w, b, scale = _codes(rng)
    y = (wide(x) @ wide(w).T + wide(b)) * scale.astype(float)
    coded = torch.from_numpy(scale.view(np.uint32).astype(np.int64))
    param = {"hasBias": True, "outDataType": 1, "quantMode": 1}
    return MadeCall("LinearOperation", param, [x, w, b, coded], [bits(y)])


def by_token(rng: np.random.Generator) -> MadeCall:
    x, w, _, scale = _codes(rng)
    token = rng.uniform(0.5, 2.0, len(x)).astype(np.float32)
    y = wide(x) @ wide(w).T * scale.astype(float) * token.astype(float)[:, None]
    param = {"hasBias": False, "outDataType": 27, "quantMode": 2}
    return MadeCall(
        "LinearOperation", param, [x, w, torch.from_numpy(scale), torch.from_numpy(token)], [bits(y, BRAIN)]
    )


def old_quantised(rng: np.random.Generator) -> MadeCall:
    x, w, b, scale = _codes(rng)
    y = (wide(x) @ wide(w).T + wide(b)) * scale.astype(float)
    param = {"transposeA": False, "transposeB": True, "hasBias": True}
    return MadeCall("LinearQuantOperation", param, [x, w, b, torch.from_numpy(scale)], [bits(y)])


def sparse_whole(rng: np.random.Generator) -> MadeCall:
    made = old_quantised(rng)
    return MadeCall("LinearSparseOperation", {"tilingK": 8, "tilingN": 8}, made.inputs, made.outputs)


def activated(rng: np.random.Generator) -> MadeCall:
    m, k, n = _sizes(rng)
    x, w, b = normal(rng, m, k), normal(rng, n, k), normal(rng, n)
    y = wide(x) @ wide(w).T + wide(b)
    param = {"hasBias": True, "activationFuncType": 4}
    return MadeCall("LinearActivationOperation", param, [x, w, b], [bits(y / (1 + np.exp(-y)))])


def activated_codes(rng: np.random.Generator) -> MadeCall:
    made = old_quantised(rng)
    y = np.maximum(wide(made.outputs[0]), 0)
    return MadeCall(
        "LinearActivationQuantOperation", {"hasBias": True, "activationFuncType": 1}, made.inputs, [bits(y)]
    )


def matmul(rng: np.random.Generator) -> MadeCall:
    m, k, n = _sizes(rng)
    x, w = normal(rng, m, k), normal(rng, k, n)
    return MadeCall("MatmulOperation", {"transposeA": False, "transposeB": False}, [x, w], [bits(wide(x) @ wide(w))])


def w8a16(rng: np.random.Generator) -> MadeCall:
    m, k, n = _sizes(rng)
    x, codes = normal(rng, m, k), bits(rng.integers(-127, 128, (k, n)), torch.int8)
    scale, offset = bits(rng.uniform(0.01, 0.02, (1, n))), bits(rng.integers(-3, 4, (1, n)))
    y = wide(x) @ ((wide(codes) + wide(offset)) * wide(scale))
    return MadeCall("W8A16Operation", {"transposeB": False, "hasBias": False}, [x, codes, scale, offset], [bits(y)])


def strided(rng: np.random.Generator) -> MadeCall:
    """Two requests of two heads: heads beside one another in A and B, one after the other in C."""
    heads, k, lengths = 2, 8, (3, 5)
    a, b = (normal(rng, sum(lengths) * heads * k) for _ in range(2))
    out, at = [], 0
    for n in lengths:
        own = slice(at, at + n * heads * k)
        left, right = (wide(t)[own].reshape(n, heads, k) for t in (a, b))
        out += [(left[:, h] @ right[:, h].T).reshape(-1) for h in range(heads)]
        at += n * heads * k
    n2 = [n * n for n in lengths]
    param = {"transA": False, "transB": True, "batch": 2, "headNum": heads, "m": lengths, "n": lengths, "k": [k, k],
             "lda": [heads * k] * 2, "ldb": [heads * k] * 2, "ldc": lengths, "strideA": [k, k], "strideB": [k, k],
             "strideC": n2}  # fmt: skip
    return MadeCall("StridedBatchMatmulOperation", param, [a, b], [bits(np.concatenate(out))])


CASES: dict[str, Make] = {
    "plain": plain(False, True, True, HALF), "bfloat16": plain(False, True, False, BRAIN),
    "turned": plain(True, False, False, HALF), "accumulated": accumulated, "batched": batched, "einstein": einstein,
    "nz": in_nz, "w8a8": quantised, "w8a8 by token": by_token, "LinearQuant": old_quantised, "sparse": sparse_whole,
    "activated": activated, "activated codes": activated_codes, "matmul": matmul, "w8a16": w8a16, "strided": strided,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_products(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


def test_a_compressed_weight_is_declined(tmp_path: Path) -> None:
    made = sparse_whole(np.random.default_rng(0))
    index = torch.zeros(8, dtype=torch.int8)
    inputs = [made.inputs[0], made.inputs[1].reshape(-1)[:-3], *made.inputs[2:], index]
    (row,) = judged(tmp_path, MadeCall(made.kind, made.param, inputs, made.outputs)).values()
    assert (row.status, row.message) == ("skip", "its weight was compressed, and the layout of that is not public")


def test_without_parameters_nothing_is_supposed(tmp_path: Path) -> None:
    made = plain(False, True, False, HALF)(np.random.default_rng(0))
    (row,) = judged(tmp_path, MadeCall(made.kind, None, made.inputs, made.outputs)).values()
    assert row.status == "skip"
    assert row.message.startswith("its parameters are not in the dump")


def test_defaults_are_the_library_s_and_a_missing_bias_is_seen(tmp_path: Path) -> None:
    made = plain(False, True, False, HALF)(np.random.default_rng(0))
    (row,) = judged(tmp_path, MadeCall(made.kind, {}, made.inputs, made.outputs)).values()
    assert (row.status, row.message) == ("skip", "input 2 was not captured")  # hasBias is true by default
