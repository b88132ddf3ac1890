"""Activations of ATB, each activationType, against numpy, right and with a fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, normal, wide

Make = Callable[[np.random.Generator], MadeCall]
Array = np.ndarray[Any, Any]
KIND = "ActivationOperation"


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def fast_gelu(x: Array) -> Array:
    return x * np.exp(0.851 * (x - np.abs(x))) / (1 + np.exp(-1.702 * np.abs(x)))


def single(number: int, f: Callable[[Array], Array], dtype: torch.dtype = torch.float16, **param: Any) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = normal(rng, int(rng.integers(3, 9)), int(rng.integers(4, 40)), dtype=dtype)
        x = x.abs() + 0.1 if number == 5 else x
        return MadeCall(KIND, {"activationType": number, **param}, [x], [bits(f(wide(x)), dtype)])

    return make


def gated(dim: int, dtype: torch.dtype = torch.float16) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = normal(rng, 4, 6, 8, dtype=dtype)
        a, b = np.split(wide(x), 2, dim)
        return MadeCall(KIND, {"activationType": 6, "dim": dim}, [x], [bits(a * sigmoid(a) * b, dtype)])

    return make


def backward(rng: np.random.Generator) -> MadeCall:
    """By differences: silu(a) b for each element alone."""
    x, dy = normal(rng, 5, 12), normal(rng, 5, 6)
    a, b = np.split(wide(x), 2, -1)
    h = 1e-6
    slope = ((a + h) * sigmoid(a + h) - (a - h) * sigmoid(a - h)) / (2 * h)
    y = np.concatenate([wide(dy) * b * slope, wide(dy) * a * sigmoid(a)], -1)
    return MadeCall(KIND, {"activationType": 7, "dim": -1}, [dy, x], [bits(y)])


def swiglu_quant(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, 5, 24)
    a, b = np.split(wide(x), 2, -1)
    y = a * sigmoid(a) * b
    scale = np.abs(y).max(-1) / 127
    out = [bits(np.round(y / scale[:, None]), torch.int8), bits(scale, torch.float32)]
    return MadeCall("SwigluQuantOperation", {"quantType": 0}, [x], out, bump=5)


CASES: dict[str, Make] = {
    "relu": single(1, lambda x: np.maximum(x, 0)), "gelu": single(2, gelu_tanh, geluMode=0),
    "exact gelu": single(2, gelu, geluMode=1), "fast gelu": single(3, fast_gelu),
    "swish": single(4, lambda x: x * sigmoid(x), torch.bfloat16, scale=1.0),
    "swish of another scale": single(4, lambda x: x * sigmoid(0.5 * x), scale=0.5), "log": single(5, np.log),
    "swiglu": gated(-1), "swiglu along 1": gated(1), "swiglu bfloat16": gated(-1, torch.bfloat16),
    "backward": backward, "sigmoid": single(8, sigmoid), "faster gelu": single(9, fast_gelu),
    "swiglu quant": swiglu_quant,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_activations(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


def test_another_function_is_named(tmp_path: Path) -> None:
    made = CASES["swish"](np.random.default_rng(0))
    (row,) = judged(tmp_path, MadeCall(KIND, {"activationType": 3}, made.inputs, made.outputs)).values()
    assert row.status == "fail"
    assert row.message.endswith("(its numbers are those of SWISH)")
