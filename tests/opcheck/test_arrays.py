"""Of numpy's arrays and of torch's tensors the measures are the same."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_accprobe.opcheck import measures
from vllm_accprobe.opcheck.floors.output_rows import numbers

DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int8", "bool", "float8_e4m3fn", "complex64")


def tensors(dtype: str, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(7, 33, generator=g, dtype=torch.float64) * (100.0 if "int" in dtype else 10.0 ** (seed % 5 - 3))
    noise = 1 + 0.01 * torch.randn(7, 33, generator=g, dtype=torch.float64)
    if kind == "empty":
        y, noise = y[:0], noise[:0]
    if kind == "zeros":
        y[:, ::2] = 0
    mine = y * noise + (1e-3 if kind == "zeros" else 0)
    if kind == "nonfinite" and dtype[:3] != "int":
        y[0, 0] = mine[0, 0] = math.nan
        y[1, 1], mine[2, 2], y[3, 3], mine[3, 3] = math.inf, -math.inf, math.inf, math.inf
        y[4, 4] = 1e300
    real = getattr(torch, dtype)
    if dtype == "complex64":
        return torch.complex(y, mine), torch.complex(mine, y).to(real)
    if dtype in ("int64", "int8", "bool"):
        return (y.clamp(-99, 99)).to(real), mine.clamp(-99, 99).to(real)
    return y, mine.to(real)


@pytest.mark.parametrize("kind", ["plain", "zeros", "nonfinite", "empty"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_kinds_of_arrays_agree(dtype: str, kind: str) -> None:
    for seed in range(5):
        reference, mine = tensors(dtype, kind, seed)
        g, m = numbers(reference), numbers(mine)
        theirs = measures.measure(g.numpy(), m.numpy(), dtype, kl=True)
        ours = measures.measure(g, m, dtype, kl=True)
        for name in measures.Measures.FIELDS:
            a, b = getattr(theirs, name), getattr(ours, name)
            assert (a is None) == (b is None), name
            if a is not None:
                # kl is a small difference of sums that are of the order of 1
                assert b == pytest.approx(a, rel=1e-12, abs=1e-12 if name == "kl" else 1e-300), name
