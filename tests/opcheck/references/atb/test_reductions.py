"""Softmax, sums, sorts of ATB against numpy, right and with a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, normal, wide

Make = Callable[[np.random.Generator], MadeCall]
Array = np.ndarray[Any, Any]


def softmax(x: Array, axis: Any = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def softmax_over(*axes: int, dtype: torch.dtype = torch.float16) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = normal(rng, 3, 5, 7, dtype=dtype)
        y = softmax(wide(x), tuple(axes))
        return MadeCall("SoftmaxOperation", {"axes": list(axes)}, [x], [bits(y, dtype)])

    return make


def reduce(kind: int, f: Callable[..., Array], dtype: torch.dtype = torch.float16) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = bits(20 * rng.standard_normal((3, 5, 7)), dtype)
        return MadeCall("ReduceOperation", {"reduceType": kind, "axis": [0, 2]}, [x], [bits(f(wide(x), (0, 2)), dtype)])

    return make


def cumsum(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, 4, 9)
    param = {"axes": [1], "exclusive": False, "reverse": False}
    return MadeCall("CumsumOperation", param, [x], [bits(np.cumsum(wide(x), 1))])


def sort(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, 4, 9)
    at = np.argsort(-wide(x), -1, kind="stable")[:, :4]
    out = [bits(np.take_along_axis(wide(x), at, -1)), bits(at, torch.int32)]
    return MadeCall("SortOperation", {"num": [4]}, [x], out)


def fast(rng: np.random.Generator) -> MadeCall:
    lengths, heads = [3, 5], 2
    parts = [2 * rng.standard_normal((heads * n, n)) for n in lengths]
    x = bits(np.concatenate([p.reshape(-1) for p in parts]))
    flat, out, at = wide(x), [], 0
    for n in lengths:
        out.append(softmax(flat[at : at + heads * n * n].reshape(-1, n)).reshape(-1))
        at += heads * n * n
    return MadeCall("FastSoftMaxOperation", {"headNum": heads, "qSeqLen": lengths}, [x], [bits(np.concatenate(out))])


def fast_grad(rng: np.random.Generator) -> MadeCall:
    """By differences of softmax, row by row."""
    n, heads, h = 4, 2, 1e-6
    y = bits(softmax(rng.standard_normal((heads * n, n))))
    dy = normal(rng, heads * n, n)
    out = np.zeros((heads * n, n))
    for i in range(heads * n):
        s = np.log(wide(y)[i])
        for j in range(n):
            up, down = s.copy(), s.copy()
            up[j] += h
            down[j] -= h
            out[i, j] = (wide(dy)[i] * (softmax(up) - softmax(down)) / (2 * h)).sum()
    # softmax(log y) is y / sum y, and y is rounded: its own formula
    exact = wide(y) * (wide(dy) - (wide(y) * wide(dy)).sum(-1, keepdims=True))
    assert np.abs(out - exact).max() < 2e-3
    param = {"headNum": heads, "qSeqLen": [n]}
    return MadeCall("FastSoftMaxGradOperation", param, [y.reshape(-1), dy.reshape(-1)], [bits(exact.reshape(-1))])


def fa_update(rng: np.random.Generator) -> MadeCall:
    lse, parts = normal(rng, 3, 6, dtype=torch.float32), normal(rng, 3, 6, 8, dtype=torch.float32)
    share = softmax(wide(lse), 0)
    y = sum(share[i][:, None] * wide(parts)[i] for i in range(3))
    return MadeCall("FaUpdateOperation", {"faUpdateType": 0, "sp": 3}, [lse, parts], [bits(y, torch.float32)])


CASES: dict[str, Make] = {
    "softmax": softmax_over(2), "softmax bfloat16": softmax_over(-1, dtype=torch.bfloat16),
    "softmax of two": softmax_over(1, 2), "softmax of the first": softmax_over(0), "max": reduce(1, np.max),
    "min": reduce(2, np.min), "sum": reduce(3, np.sum), "sum of integers": reduce(3, np.sum, torch.int32),
    "cumsum": cumsum, "sort": sort, "fast softmax": fast, "fast softmax grad": fast_grad, "fa update": fa_update,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_reductions(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


def test_equal_numbers_may_be_sorted_either_way(tmp_path: Path) -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 0.0]], dtype=torch.float16)
    values = torch.tensor([[2.0, 2.0, 1.0]], dtype=torch.float16)
    for n, places in enumerate(([1, 2, 0], [2, 1, 0], [1, 1, 0], [1, 3, 0])):
        made = MadeCall("SortOperation", {"num": [3]}, [x], [values, torch.tensor([places], dtype=torch.int32)])
        found = judged(tmp_path / str(n), made)
        assert found["output.1"].status == ("pass" if n < 2 else "fail"), places
