"""Honest rounding passes, small defects do not, whatever the dtype; equal errors count once; NaN never passes."""

import math

import pytest
import torch

from vllm_accprobe.opcheck.floors.output_rows import OutputRows, matrix, numbers
from vllm_accprobe.opcheck.floors.pooled import Pool
from vllm_accprobe.opcheck.floors.verdict import first_of, judge, judge_each, repeated
from vllm_accprobe.opcheck.reference import Expected

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def exact(rows: int = 64, width: int = 128, seed: int = 0) -> torch.Tensor:
    return 10.0 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(y: torch.Tensor, dtype: str) -> torch.Tensor:
    return y.to(DTYPES[dtype]).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 128), (500, 16), (2, 4096)])
def test_rounding_once_passes_with_room(dtype: str, shape: tuple[int, int]) -> None:
    for seed in range(20):
        y = exact(*shape, seed=seed)
        v = judge(y, rounded(y, dtype), dtype)
        assert v.passed
        assert v.severity < 0.9


def unit(dtype: str) -> float:
    return {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]


def test_coarser_rounding_is_seen() -> None:
    """Six bits instead of eight."""
    y = exact()
    mantissa, exponent = torch.frexp(y)
    assert not judge(y, torch.ldexp((mantissa * 64).round() / 64, exponent), "bfloat16").passed


def test_noise_allows_what_the_reference_says_and_no_more() -> None:
    y = exact()
    noise = torch.full_like(y, 0.5)
    wrong = y + 0.05 * exact(seed=2)
    assert not judge(y, rounded(wrong, "bfloat16"), "bfloat16").passed
    assert judge(y, rounded(wrong, "bfloat16"), "bfloat16", noise=noise).passed
    assert not judge(y, rounded(y + 3 * (wrong - y), "bfloat16"), "bfloat16", noise=noise).passed


def test_a_shared_error_is_allowed_only_where_it_is_said() -> None:
    y = exact()
    wrong = rounded(y * (1 + 1.5 * unit("bfloat16")), "bfloat16")
    assert judge(y, wrong, "bfloat16", common=2 * unit("bfloat16")).passed
    assert not judge(y, wrong, "bfloat16").passed


def test_nan_never_passes_and_equal_ones_do() -> None:
    y = exact()
    y[0, 0] = math.nan
    assert judge(y, y, "bfloat16").passed
    mine = exact()
    v = judge(exact(), torch.where(torch.arange(128) == 5, math.nan, mine), "bfloat16")
    assert (v.passed, v.measure, v.value) == (False, "nonfinite", 64.0)
    assert not judge(y, exact(), "bfloat16").passed


def test_integers_and_what_is_handed_on_must_be_equal() -> None:
    ids = torch.arange(12).reshape(3, 4)
    assert judge(ids, ids, "int32").passed
    other = ids.clone()
    other[1, 2] += 1
    v = judge(ids, other, "int32")
    assert (v.passed, v.row, v.column, v.value) == (False, 1, 2, 1.0)
    y = exact()
    assert not judge(y, y * (1 + 2**-40), "float32", last=0.0).passed


def test_empty_and_zero_rows() -> None:
    assert judge(torch.zeros(0, 4), torch.zeros(0, 4), "bfloat16").passed
    assert judge(torch.zeros(3, 4), torch.zeros(3, 4), "bfloat16").passed
    assert not judge(torch.zeros(3, 4), torch.full((3, 4), 1e-3), "bfloat16").passed


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
        pool.add([found.sums])
        pool.add([judge(*picture(colours, seed), "bfloat16").sums])
        assert pool.breach(1e-6) is None


@pytest.mark.parametrize("colours", [40, 256])
def test_a_scale_is_seen_in_it_all_the_same(colours: int) -> None:
    y, mine = picture(colours, 0, 1.02)
    found = judge(y, mine, "bfloat16")
    pool = Pool()
    pool.add([found.sums])
    assert not found.passed or pool.breach(1e-6) is not None


def test_numbers_of_their_own_are_counted_one_by_one() -> None:
    y = torch.randn((96, 192), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert repeated(y[None], (y.float().bfloat16().double() - y)[None]) == [False]
    keys = torch.tensor([[1, 2, 1], [1, 1, 3]])
    assert first_of(keys[None]).tolist() == [[[True, True, False], [False, False, True]]]
    assert first_of(keys[None], torch.arange(2).unsqueeze(1)).tolist() == [[[True, True, False], [True, False, True]]]


def test_numbers_are_exact():
    assert numbers(torch.tensor([1.5], dtype=torch.bfloat16)).dtype == torch.float64
    assert numbers(torch.tensor([True])).tolist() == [1]
    assert numbers(torch.tensor([1 + 2j])).tolist() == [[1.0, 2.0]]


def test_matrices_have_a_row_for_each_place_along_the_row_dimension():
    x = torch.arange(6).reshape(1, 2, 3)
    assert matrix(x, 1).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert matrix(x, 7).shape == (1, 6)
    assert matrix(torch.tensor(2.0), 0).tolist() == [[2.0]]
    assert matrix(torch.zeros(0, 4), 0).shape == (0, 1)


def test_rows_without_a_reference_are_left_out():
    value = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    mine = torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 4.0]]).bfloat16()
    expected = Expected(value, noise=torch.tensor(0.5), rows=torch.tensor([True, False, True]))
    found = OutputRows.of(expected, mine, 0)
    assert (found.at.tolist(), found.mine.tolist()) == ([0, 2], [[1.0, 2.0], [3.0, 4.0]])
    assert (found.noise.tolist(), found.bound, found.exact) == ([[0.5, 0.5]] * 2, None, None)
    assert found.judge("bfloat16").passed
    assert not OutputRows.of(Expected(value), mine, 0).judge("bfloat16").passed


def test_calls_that_are_judged_together_get_what_each_gets_alone() -> None:
    y = torch.stack([exact(), exact(seed=1), exact(seed=2), exact(seed=3)])
    mine = torch.stack([rounded(y[0], "bfloat16"), rounded(y[1] * 1.01, "bfloat16"), y[2].float().double(), y[3]])
    y[2, 0, 0] = math.nan
    y[3] = mine[3] = (8 * y[3]).round() / 8  # many equal numbers, as a few colours are
    mine[3] += 2.0**-7 * y[3]
    noise = 1e-3 * y.abs().nan_to_num()
    together = judge_each(y, mine, "bfloat16", noise=noise)
    alone = [judge(a, b, "bfloat16", noise=n) for a, b, n in zip(y, mine, noise, strict=True)]
    assert together == alone
    assert [v.passed for v in together] == [True, False, False, False]
    assert [v.sums is not None and v.sums.few for v in together] == [False, False, False, True]


@pytest.mark.parametrize("size", [1e160, 1e200, 1e300])
def test_what_no_limit_can_be_computed_of_has_no_verdict(size: float) -> None:
    """Equal numbers would fail, with a limit of nan."""
    y = exact(8, 16) * size / 1e3
    with pytest.raises(ValueError, match="so large"):
        judge(y, y, "float64")
    assert judge(y, y, "float64", last=0.0).passed
    assert not judge(exact(8, 16), y, "float64").passed  # the error alone is
    noise = torch.full_like(y, size)
    with pytest.raises(ValueError, match="so large"):
        judge(exact(8, 16), exact(8, 16), "float64", noise=noise)
