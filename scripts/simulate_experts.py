"""How far two honest kernels of experts are apart: the measured half of the norm ratio's limit (standards/limits.py).

The problem: vLLM 0.32 computes experts on AVX2 in float32 and rounds the activation and the result toward zero; 0.26,
whose build for AVX2 lacks that kernel, calls torch once per projection and rounds each of them to nearest. Both are
right, and a limit made from one pair of them fits that pair. The idea: both are written out here as the sources and the
captured bits say (0.32's is met in 99.99 % of its numbers, 0.26's in all), and run on random layers of many shapes.
    python scripts/simulate_experts.py [--seeds 6]
Not here: engines (matrix.sh).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm_accprobe.judge.tensor_errors import row_errors
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import Standard, narrowest

UNIT = 2.0**-8
ROWS = 512


@dataclass(frozen=True)
class Shape:
    """width: of a row; inside: of one expert's intermediate."""

    width: int
    inside: int
    experts: int
    top: int


SHAPES = (Shape(64, 32, 4, 1), Shape(128, 64, 8, 2), Shape(256, 128, 8, 2), Shape(512, 512, 1, 1),
          Shape(1024, 256, 8, 2), Shape(2048, 768, 16, 4), Shape(4096, 1536, 8, 2))  # fmt: skip


def nearest(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def toward_zero(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def two_kernels(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [ROWS, width] of a random layer: by one kernel that truncates, and by one call per projection."""
    g = torch.Generator().manual_seed(seed)
    x = nearest(torch.randn(ROWS, shape.width, generator=g))
    spread = 0.3 * math.sqrt(8 / shape.width)
    up = nearest(spread * torch.randn(shape.experts, 2 * shape.inside, shape.width, generator=g))
    down = nearest(torch.randn(shape.experts, shape.width, shape.inside, generator=g) / math.sqrt(shape.inside))
    logits = nearest(2.0 * torch.randn(ROWS, shape.experts, generator=g))
    weights, chosen = torch.softmax(logits, -1).topk(shape.top, -1)
    weights = nearest(weights / weights.sum(-1, keepdim=True))
    fused, plain = torch.zeros_like(x), torch.zeros_like(x)
    for k in range(shape.top):
        for e in range(shape.experts):
            at = chosen[:, k] == e
            both, factor, silu = x[at] @ up[e].T, weights[at, k][:, None], torch.nn.functional.silu
            fused[at] += factor * (toward_zero(silu(both[:, : shape.inside]) * both[:, shape.inside :]) @ down[e].T)
            both = nearest(both)
            inner = nearest(nearest(silu(both[:, : shape.inside])) * both[:, shape.inside :])
            plain[at] += factor * nearest(inner @ down[e].T)
    return toward_zero(fused).numpy(), nearest(plain).numpy()


def over(shape: Shape, golden: np.ndarray, mine: np.ndarray, standard: Standard) -> np.ndarray:
    """bool [rows]: beyond what one operator may create."""
    inside = narrowest("model.layers.0.mlp.experts", "FusedMoE", shape.width)
    errors = row_errors(definition.row_table(golden, mine), 0.0, shape.width, standard, inside=inside)
    return errors.err > standard.created_limits(UNIT, inside).row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6, metavar="N")
    args = parser.parse_args()
    standard = Standard()
    for shape in SHAPES:
        ratios, bad = [], 0
        for seed in range(args.seeds):
            golden, mine = two_kernels(shape, seed)
            norms = (np.linalg.norm(a.astype(np.float64), axis=1) for a in (mine, golden))
            ratios.append((next(norms) / next(norms) - 1.0) / UNIT)
            bad += int(over(shape, golden, mine, standard).sum())
        every = np.concatenate(ratios)
        allowed = standard.created_limits(UNIT, narrowest("", "FusedMoE", shape.width)).ratio / UNIT
        scatter = every.std() * math.sqrt(shape.inside)
        told = f"norm ratio {every.mean():.2f} u, standard deviation {scatter:.2f} u / sqrt(inside)"
        worst = f"worst {np.abs(every).max():.2f} u of {allowed:.2f}"
        print(f"{shape}: {told}, {worst}; {bad} of {len(every)} rows beyond a limit")


if __name__ == "__main__":
    main()
