"""Norms of ATB against numpy, at random shapes, right and with a fault; int8 codes and their scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, normal, wide

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
Make = Callable[[np.random.Generator], MadeCall]
Array = np.ndarray[Any, Any]
EPS = 1e-5


def rms(x: Array, weight: Array, eps: float = EPS) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array, eps: float = EPS) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias


def codes(x: Array) -> torch.Tensor:
    return bits(np.clip(np.round(x), -128, 127), torch.int8)


def _shape(rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(3, 12)), int(rng.integers(16, 64))


def plain(dtype: torch.dtype, **param: Any) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        n, d = _shape(rng)
        x, w = normal(rng, n, d, dtype=dtype), normal(rng, d, dtype=dtype)
        y = rms(wide(x), wide(w) + (1.0 if param.get("modelType") else 0.0), param.get("epsilon", EPS))
        return MadeCall("RmsNormOperation", {"layerType": 1, "normParam": param}, [x, w], [bits(y, dtype)])

    return make


def first_release(rng: np.random.Generator) -> MadeCall:
    made = plain(HALF, epsilon=1e-3)(rng)
    return MadeCall(made.kind, {"epsilon": 1e-3}, made.inputs, made.outputs)


def with_rstd(rng: np.random.Generator) -> MadeCall:
    x, w = normal(rng, 4, 3, 16, dtype=SINGLE), normal(rng, 3, 16, dtype=SINGLE)
    rstd = 1 / np.sqrt((wide(x) ** 2).mean((-2, -1), keepdims=True) + EPS)
    out = [bits(wide(x) * rstd * wide(w), SINGLE), bits(rstd, SINGLE)]
    return MadeCall("RmsNormOperation", {"layerType": 1, "normParam": {"rstd": True}}, [x, w], out)


def added(kind: int, bias: bool) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        n, d = _shape(rng)
        x, residual, w = normal(rng, n, d), normal(rng, n, d), normal(rng, d)
        more = [normal(rng, 1, d)] if bias else []
        total = wide(x) + wide(residual) + sum(wide(t) for t in more)
        part = "preNormParam" if kind == 2 else "postNormParam"
        out = [bits(rms(total, wide(w))), *([bits(total)] if kind == 2 else [])]
        param = {"layerType": kind, part: {"hasBias": bias, "epsilon": EPS, "quantType": 0}}
        return MadeCall("RmsNormOperation", param, [x, *more, residual, w], out)

    return make


def in_int8(kind: int) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        n, d = _shape(rng)
        x, residual, w, beta = normal(rng, n, d), normal(rng, n, d), normal(rng, 1, d), normal(rng, 1, d)
        scale, offset = bits([0.03125]), bits([3], torch.int8)
        total = wide(x) + (wide(residual) if kind > 1 else 0)
        y = rms(total, wide(w))
        coded = codes((y + (wide(beta) if kind < 3 else 0)) / 0.03125 + 3)
        inputs = [x, *([residual] if kind > 1 else []), w, *([beta] if kind < 3 else []), scale, offset]
        out = [coded] + ([bits(total)] if kind == 2 else [bits(y)] if kind == 3 else [])
        part = ("normParam", "preNormParam", "postNormParam")[kind - 1]
        return MadeCall("RmsNormOperation", {"layerType": kind, part: {"quantType": 2}}, inputs, out, bump=5)

    return make


def dynamic(kind: int) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        n, d = _shape(rng)
        x, w, beta = normal(rng, n, d), normal(rng, d), normal(rng, d)
        y = rms(wide(x), wide(w)) + wide(beta)
        param = {"layerType": 1, "normParam": {"quantType": 2, "dynamicQuantType": kind}}
        if kind == 1:
            scale = np.abs(y).max(-1) / 127
            out = [codes(y / scale[:, None]), bits(scale, SINGLE)]
        else:
            scale = (y.max(-1) - y.min(-1)) / 255
            offset = -(y.max(-1) + y.min(-1)) / (2 * scale)
            out = [codes(y / scale[:, None] + offset[:, None]), bits(scale, SINGLE), bits(offset, SINGLE)]
        return MadeCall("RmsNormOperation", param, [x, w, beta], out, bump=5)

    return make


def gathered(rng: np.random.Generator) -> MadeCall:
    n, d = _shape(rng)
    x, rows, w = normal(rng, n, d), normal(rng, 7, d), normal(rng, 1, d)
    at = bits(rng.integers(0, 7, n), torch.int32)
    total = wide(x) + wide(rows)[at.numpy()]
    out = [bits(rms(total, wide(w)), SINGLE), bits(total)]
    return MadeCall("GatherPreRmsNormOperation", {"epsilon": EPS}, [x, rows, at, w], out)


def backward(rng: np.random.Generator) -> MadeCall:
    n, d = _shape(rng)
    dy, x, w = (normal(rng, *s, dtype=SINGLE) for s in ((n, d), (n, d), (d,)))
    rstd = bits(1 / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + EPS), SINGLE)
    r, g = wide(rstd), wide(dy) * wide(w)
    dx = r * g - wide(x) * r**3 * (g * wide(x)).mean(-1, keepdims=True)
    out = [bits(dx, SINGLE), bits((wide(dy) * wide(x) * r).sum(0), SINGLE)]
    return MadeCall("RmsNormBackwardOperation", {}, [dy, x, rstd, w], out)


def layer(rng: np.random.Generator) -> MadeCall:
    n, d = _shape(rng)
    x, w, b = normal(rng, n, d), normal(rng, d), normal(rng, d)
    param = {"layerType": 1, "normParam": {"beginNormAxis": 1, "epsilon": 1e-4, "quantType": 0}}
    return MadeCall("LayerNormOperation", param, [x, w, b], [bits(layer_norm(wide(x), wide(w), wide(b), 1e-4))])


def layer_of_two(rng: np.random.Generator) -> MadeCall:
    x, w, b = normal(rng, 5, 4, 8), normal(rng, 4, 8), normal(rng, 4, 8)
    y = layer_norm(wide(x).reshape(5, 32), wide(w).reshape(-1), wide(b).reshape(-1)).reshape(5, 4, 8)
    return MadeCall("LayerNormOperation", {"layerType": 1, "normParam": {"beginNormAxis": 1}}, [x, w, b], [bits(y)])


def layer_added(kind: int) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        n, d = _shape(rng)
        x, residual, w, b = normal(rng, n, d), normal(rng, n, d), normal(rng, 1, d), normal(rng, 1, d)
        total = wide(x) + 0.5 * wide(residual)
        part = {"zoomScaleValue": 0.5, "epsilon": EPS, "quantType": 0}
        out = [bits(layer_norm(total, wide(w), wide(b))), *([bits(total)] if kind == 2 else [])]
        param = {"layerType": kind, "preNormParam" if kind == 2 else "postNormParam": part}
        return MadeCall("LayerNormOperation", param, [x, residual, w, b], out)

    return make


def layer_in_int8(divided: bool) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        n, d = _shape(rng)
        x, w, b = normal(rng, n, d), normal(rng, 1, d), normal(rng, 1, d)
        scale, offset = bits([0.0625 if divided else 16.0]), bits([-2], torch.int8)
        coded = codes(layer_norm(wide(x), wide(w), wide(b)) * 16.0 - 2)
        param = {"layerType": 1, "normParam": {"quantType": 2, "epsilon": EPS}}
        return MadeCall("LayerNormOperation", param, [x, w, b, scale, offset], [coded], bump=5)

    return make


def cohere(rng: np.random.Generator) -> MadeCall:
    x, w = normal(rng, 5, 4, 16), normal(rng, 4, 16)
    y = layer_norm(wide(x), np.ones(16), np.zeros(16)) * wide(w)
    return MadeCall("CohereLayerNormOperation", {"epsilon": EPS}, [x, w], [bits(y)])


CASES: dict[str, Make] = {
    "rms": plain(HALF, epsilon=1e-6), "rms bfloat16": plain(BRAIN, epsilon=1e-6), "gemma": plain(HALF, modelType=1),
    "half inside": plain(HALF, precisionMode=1), "first release": first_release, "rstd": with_rstd,
    "pre": added(2, False), "pre bias": added(2, True), "post": added(3, False), "post bias": added(3, True),
    "int8": in_int8(1), "pre int8": in_int8(2), "post int8": in_int8(3), "dynamic": dynamic(1), "skewed": dynamic(2),
    "gathered": gathered, "backward": backward, "layer": layer, "layer of two": layer_of_two,
    "layer pre": layer_added(2), "layer post": layer_added(3), "layer int8": layer_in_int8(True),
    "layer int8 times": layer_in_int8(False), "cohere": cohere,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_norms(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


def test_another_epsilon_is_a_fault(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, w = bits(0.01 * rng.standard_normal((4, 32))), normal(rng, 32)
    made = MadeCall("RmsNormOperation", {"layerType": 1, "normParam": {"epsilon": 1e-5}}, [x, w],
                    [bits(rms(wide(x), wide(w), 1e-6))])  # fmt: skip
    assert judged(tmp_path, made)["output.0"].status == "fail"


def test_the_residual_of_a_norm_is_no_weight(tmp_path: Path) -> None:
    """Two executions with two residuals: each is judged with its own."""
    for token in (0, 1):
        made = added(2, False)(np.random.default_rng(token))
        rows = judged(tmp_path, made, token=token)
    assert {(r.step, r.role): r.status for r in _all(tmp_path)} == {
        (t, f"output.{k}"): "pass" for t in (0, 1) for k in (0, 1)
    }
    assert rows


def _all(path: Path) -> list[Any]:
    from atb_dumps import rows_of

    return [r for r in rows_of(path) if r.step is not None]
