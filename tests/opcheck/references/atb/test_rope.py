"""Rotary embeddings of ATB against numpy, pair by pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, normal, wide

Array = np.ndarray[Any, Any]


def turned(x: Array, cos: Array, sin: Array, partner: Array) -> Array:
    """x [tokens, heads, d]: channel c with the channel ``partner[c]`` behind it, or before it where that is smaller."""
    y = np.empty_like(x)
    for c in range(x.shape[-1]):
        other = x[..., partner[c]] * (-1 if partner[c] > c else 1)
        y[..., c] = x[..., c] * cos[:, None, c] + other * sin[:, None, c]
    return y


def partners(d: int, parts: int) -> Array:
    """Of each channel: half a pair's width away."""
    width = d // parts
    at = np.arange(d)
    return np.where(at // width % 2 == 0, at + width, at - width)


def made(rng: np.random.Generator, parts: int, d: int, dtype: torch.dtype, four: bool = False) -> MadeCall:
    tokens, heads, kv = int(rng.integers(3, 9)), 4, 2
    shapes = [(1, tokens, heads, d), (1, tokens, kv, d)] if four else [(tokens, heads * d), (tokens, kv * d)]
    q, k = (normal(rng, *s, dtype=dtype) for s in shapes)
    angle = rng.uniform(0, 6, (tokens, d))
    cos, sin = bits(np.cos(angle), dtype), bits(np.sin(angle), dtype)
    pairs = partners(d, parts)
    parts_of = (turned(wide(x).reshape(tokens, -1, d), wide(cos), wide(sin), pairs).reshape(x.shape) for x in (q, k))
    out = [bits(y, dtype) for y in parts_of]
    return MadeCall(
        "RopeOperation", {"rotaryCoeff": parts}, [q, k, cos, sin, torch.tensor([tokens], dtype=torch.int32)], out
    )


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("parts", "d", "four"), [(2, 16, False), (4, 16, False), (8, 8, False), (8, 8, True)])
def test_rope(tmp_path: Path, parts: int, d: int, four: bool, dtype: torch.dtype, seed: int) -> None:
    holds(tmp_path, made(np.random.default_rng([seed, parts]), parts, d, dtype, four))


def test_other_pairs_are_a_fault(tmp_path: Path) -> None:
    right = made(np.random.default_rng(3), 2, 16, torch.float16)
    found = judged(tmp_path, MadeCall(right.kind, {"rotaryCoeff": 4}, right.inputs, right.outputs))
    assert {r.status for r in found.values()} == {"fail"}


@pytest.mark.parametrize("param", [{"rotaryCoeff": 3}, {"rotaryCoeff": 2, "cosFormat": 1}])
def test_what_is_not_public_is_declined(tmp_path: Path, param: dict[str, int]) -> None:
    right = made(np.random.default_rng(3), 2, 16, torch.float16)
    found = judged(tmp_path, MadeCall(right.kind, param, right.inputs, right.outputs))
    assert {r.status for r in found.values()} == {"skip"}


def test_rope_beside_another_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    q, other, angle = normal(rng, 5, 3 * 8), normal(rng, 5, 3, 4), rng.uniform(0, 6, (5, 8))
    cos, sin = bits(np.cos(angle)), bits(np.sin(angle))
    y = turned(wide(q).reshape(5, 3, 8), wide(cos), wide(sin), partners(8, 2))
    holds(
        tmp_path,
        MadeCall("RopeQConcatOperation", {}, [q, cos, sin, other], [bits(np.concatenate([y, wide(other)], 2))]),
    )
