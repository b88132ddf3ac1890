"""The step of the logits, from log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_accprobe.gate.self_check import step


def bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize(("size", "steps"), [(5.0, {2**-5, 2**-4}), (20.0, {2**-3, 2**-4})])
def test_bfloat16_shows_its_spacing(size: float, steps: set[float]) -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        logits = bfloat16(draw.uniform(size * 0.85, size * 1.5, 20))
        normal = np.float32(np.log(np.exp(logits.astype(np.float64)).sum()))
        said = sorted((float(v) for v in logits - normal), reverse=True)
        assert step(said) in steps


def test_float32_has_none() -> None:
    values = np.sort(np.random.default_rng(2).normal(-5, 2, 20).astype(np.float32))[::-1]
    assert step([float(v) for v in values]) == 0.0
    assert step([]) == step([-1.0, -2.0]) == 0.0
