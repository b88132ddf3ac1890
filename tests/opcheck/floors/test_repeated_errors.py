"""Outputs with few different numbers: the same rounding of the same number is one error, however often it comes."""

from __future__ import annotations

import pytest
import torch

from vllm_accprobe.opcheck.floors.pooled import Pool
from vllm_accprobe.opcheck.floors.verdict import first_of, judge, repeated


def picture(colours: int, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(exact, bfloat16) of 96 rows of 3 x 64 pixels, normalised by channel."""
    generator = torch.Generator().manual_seed(seed)
    shades = torch.randint(0, 256, (3, colours), generator=generator).double()
    at = torch.randint(0, colours, (96, 3, 64), generator=generator)
    x = torch.stack([shades[c][at[:, c]] for c in range(3)], 1)
    y = ((x / 255.0 - torch.tensor([0.481, 0.458, 0.408])[None, :, None].double()) / 0.27).reshape(96, -1)
    return y, (scale * y).float().bfloat16().double()


@pytest.mark.parametrize("colours", [2, 5, 40])
def test_a_clean_picture_of_few_colours_passes(colours: int) -> None:
    for seed in range(20):
        y, mine = picture(colours, seed)
        found, pool = judge(y, mine, "bfloat16"), Pool()
        assert found.sums.few
        assert found.passed
        pool.add(found.sums)
        pool.add(judge(*picture(colours, seed), "bfloat16").sums)
        assert pool.breach(1e-6) is None


@pytest.mark.parametrize("colours", [40, 256])
def test_a_scale_is_seen_in_it_all_the_same(colours: int) -> None:
    y, mine = picture(colours, 0, 1.02)
    found = judge(y, mine, "bfloat16")
    pool = Pool()
    pool.add(found.sums)
    assert not found.passed or pool.breach(1e-6) is not None


def test_numbers_of_their_own_are_counted_one_by_one() -> None:
    y = torch.randn((96, 192), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert not repeated(y, y.float().bfloat16().double() - y)
    keys = torch.tensor([[1, 2, 1], [1, 1, 3]])
    assert first_of(keys).tolist() == [[True, True, False], [False, False, True]]
    assert first_of(keys, torch.arange(2).unsqueeze(1)).tolist() == [[True, True, False], [True, False, True]]
