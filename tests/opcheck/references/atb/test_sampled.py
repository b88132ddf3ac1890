"""Draws of ATB: the tokens that a draw can give, and the one that given noise gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, wide

INT, LONG = torch.int32, torch.int64
KIND = "TopkToppSamplingOperation"


def probabilities(rng: np.random.Generator, rows: int = 4, words: int = 20) -> torch.Tensor:
    p = np.exp(2 * rng.standard_normal((rows, words)))
    return bits(p / p.sum(-1, keepdims=True))


def drawn(p: torch.Tensor, topk: int, topp: float, rand: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """As ATB has it, row by row: the token whose sum is the first above rand times the last sum below top-p."""
    out = []
    for row, r in zip(wide(p), rand, strict=True):
        order = np.argsort(-row, kind="stable")[:topk]
        sums = np.cumsum(row[order])
        last = sums[max((sums < topp).sum() - 1, 0)]
        out.append(order[(sums <= r * last).sum()])
    return np.array(out)


@pytest.mark.parametrize("seed", range(6))
def test_a_draw_is_one_that_some_rand_gives(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = probabilities(rng)
    token = drawn(p, 8, 0.8, rng.uniform(0, 1, 4))
    own = wide(p)[np.arange(4), token]
    param = {"topkToppSamplingType": 0, "topk": 8, "randSeed": 3}
    out = [bits(token[:, None], INT), bits(own[:, None])]
    inputs = [p, bits([[0.8]])]
    found = judged(tmp_path / "right", MadeCall(KIND, param, inputs, out))
    assert {r.status for r in found.values()} == {"pass"}, found
    least = wide(p).argmin(-1)  # beyond top-k
    found = judged(tmp_path / "wrong", MadeCall(KIND, param, inputs, [bits(least[:, None], INT), out[1]]))
    assert {role: r.status for role, r in found.items()} == {"output.0": "fail", "output.1": "fail"}
    assert "no rand between 0 and 1 gives it" in found["output.0"].message
    found = judged(tmp_path / "other", MadeCall(KIND, param, inputs, [out[0], bits(own[:, None] * 0.9)]))
    assert {role: r.status for role, r in found.items()} == {"output.0": "pass", "output.1": "fail"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_draw_by_given_noise(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, noise = probabilities(rng), bits(rng.exponential(1, (4, 20)) + 0.05, torch.float32)
    token, limits = [], []
    for row, e in zip(wide(p), wide(noise), strict=True):
        order = np.argsort(-row, kind="stable")
        sums = np.cumsum(row[order])
        limits.append(float(sums[1] + sums[2]) / 2)
        kept = (sums <= limits[-1]) & (np.arange(20) <= 9)
        token.append(order[np.argmax(np.where(kept, row[order] / e, 0))])  # noise belongs to places, not to tokens
    param = {"topkToppSamplingType": 2, "topk": 100}
    topk, topp = bits(np.full((4, 1), 9), LONG), bits(np.array(limits)[:, None])
    out = [bits(np.array(token)[:, None], INT), bits(wide(p)[np.arange(4), token][:, None])]
    holds(tmp_path, MadeCall(KIND, param, [p, topk, topp, noise], out))


def test_a_sample_of_probability_zero_is_a_fault(tmp_path: Path) -> None:
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float16)
    for n, (rows, status) in enumerate(
        (([[0, 2], [1, 1]], "pass"), ([[0, 1], [1, 1]], "fail"), ([[0, 7], [1, 1]], "fail"))
    ):
        made = MadeCall("MultinomialOperation", {"numSamples": 2, "randSeed": 1}, [p], [torch.tensor(rows, dtype=INT)])
        assert judged(tmp_path / str(n), made)["output.0"].status == status
