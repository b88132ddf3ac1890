"""Rounding toward zero is seen in the numbers, honest at the default standard, and hides no fault."""

from typing import Any

import pytest
import torch
from support.truncated import truncated

from vllm_accprobe.opcheck.floors import rounding, verdict

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def exact(*shape: int, seed: int = 0) -> torch.Tensor:
    return 10 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_room(v: verdict.Verdict) -> bool:
    """An element may be off by its limit, a whole step; what adds errors up stays away from its own."""
    return all(ratio < (0.99 if measure == "element" else 0.9) for measure, ratio in v.ratios)


def nearest(y: torch.Tensor, dtype: str) -> torch.Tensor:
    return y.to(DTYPES[dtype]).double()


def cut(y: torch.Tensor, dtype: str) -> torch.Tensor:
    return truncated(y, DTYPES[dtype]).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128), (57, 128), (2, 4096), (200, 1024)])
def test_the_direction_is_seen(shape: tuple[int, int], dtype: str) -> None:
    for seed in range(20):
        y = exact(*shape, seed=seed)
        found = rounding.direction(y, cut(y, dtype), dtype)
        assert found.toward_zero
        assert found.share > 0.99  # float32 has come to the next number of the grid here and there
        assert found.proved or shape[0] == 1
        straight = rounding.direction(y, nearest(y, dtype), dtype)
        assert (straight.toward_zero, straight.nearest) == (False, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_a_little_too_small_is_no_truncation(dtype: str) -> None:
    """Its mean error is the same; 0.65u and 0.75u lie between the scales that are tried."""
    for factor in (0.5, 0.65, 2 / 3, 0.7, 0.75, 1.0):
        y = exact(8, 1024)
        mine = nearest(y * (1 - factor * UNIT[dtype]), dtype)
        assert not rounding.direction(y, mine, dtype).toward_zero
        assert not rounding.judge(y, mine, dtype).passed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128), (64, 128), (2, 4096)])
def test_truncation_passes_with_room_and_fails_strict(shape: tuple[int, int], dtype: str) -> None:
    for seed in range(20):
        y = exact(*shape, seed=seed)
        mine = cut(y, dtype)
        v = rounding.judge(y, mine, dtype)
        assert v.passed
        assert v.rounding == rounding.TOWARD_ZERO
        assert with_room(v)
        if shape[1] > 128 or shape[0] > 1:  # one narrow row is within the limits of either
            assert not verdict.judge(y, mine, dtype).passed or shape[1] == 128
            assert not rounding.judge(y, mine, dtype, strict=True).passed
    assert rounding.judge(y, nearest(y, dtype), dtype, strict=True) == verdict.judge(y, nearest(y, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [nearest, cut])
def test_defects_of_a_few_roundings_are_seen(way: Any, dtype: str) -> None:
    y, u = exact(64, 128), UNIT[dtype]
    column, element, row, sixteenth = y.clone(), y.clone(), y.clone(), y.clone()
    column[:, 9] *= 1 + 5 * u
    element[3, 4] += 8 * u * float(y.abs().mean())
    row[11] += 4 * u * exact(128, seed=1)
    sixteenth[:, :8] *= 1 + 5 * u
    for wrong, at in (
        (y * (1 + 1.5 * u), None), (y * (1 - 2.5 * u), None), (column, ("column", -1, 9)), (element, ("element", 3, 4)),
        (row, None), (sixteenth, None),
    ):  # fmt: skip
        v = rounding.judge(y, way(wrong, dtype), dtype)
        assert not v.passed
        assert at in (None, (v.measure, v.row, v.column))
    assert rounding.judge(y, way(y * (1 + 1.5 * u), dtype), dtype).measure == "gain" or way is cut
    assert rounding.judge(y, way(row, dtype), dtype).row == 11


def test_roundings_before_the_last_one_may_be_truncated_too() -> None:
    """A sum of products with a truncated intermediate result, as experts have it: -0.67u twice."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 256, generator=g, dtype=torch.float64)
    weight = torch.randn(512, 256, generator=g, dtype=torch.float64)
    y, mine = hidden @ weight.T, cut(cut(hidden, "bfloat16") @ weight.T, "bfloat16")
    noise = 2.0**-8 * ((hidden**2) @ (weight**2).T).sqrt()
    assert not verdict.judge(y, mine, "bfloat16", noise=noise).passed
    assert rounding.judge(y, mine, "bfloat16", noise=noise).passed
    assert not rounding.judge(y, cut(1.01 * y, "bfloat16"), "bfloat16", noise=noise).passed


def test_an_intermediate_result_may_be_truncated_and_the_last_one_rounded() -> None:
    """As latent attention for AVX2 does it; allowed where the reference knows of such a result, and to that size."""
    g = torch.Generator().manual_seed(4)
    hidden = torch.randn(40, 256, generator=g, dtype=torch.float64)
    weight = torch.randn(4096, 256, generator=g, dtype=torch.float64)
    y, mine = hidden @ weight.T, nearest(cut(hidden, "bfloat16") @ weight.T, "bfloat16")
    noise = 2.0**-8 * ((hidden**2) @ (weight**2).T).sqrt()
    v = rounding.judge(y, mine, "bfloat16", noise=noise)
    assert v.passed
    assert v.rounding in (rounding.EARLIER, rounding.TOWARD_ZERO)  # which one, such noise hides
    assert not rounding.judge(y, mine, "bfloat16", noise=noise, strict=True).passed
    assert not rounding.judge(y, mine, "bfloat16").passed
    for factor in (1.5, -1.5):
        wrong = nearest((1 + factor * 2.0**-8) * y, "bfloat16")
        assert not rounding.judge(y, wrong, "bfloat16", noise=noise).passed


def test_an_error_of_a_truncating_kernel_that_a_bound_allows_is_not_proved_wrong() -> None:
    """The bound is that of the distance from the exact result, not from what truncation makes of it in the mean."""
    y = exact(40, 2048)
    step = rounding.steps(y, "bfloat16")
    bound = noise = 0.1 * step
    mine = cut(y, "bfloat16")
    for steps, passed in ((1.19, True), (1.3, False)):  # twice half a step and the bound: 1.2
        mine[3, 4] = y[3, 4] + torch.sign(y[3, 4]) * steps * step[3, 4]
        v = rounding.judge(y, mine, "bfloat16", noise=noise, bound=bound)
        assert (v.passed, v.tier) == ((True, "") if passed else (False, "proved"))
        assert passed or (v.measure, v.row, v.column) == ("element", 3, 4)


@pytest.mark.parametrize("early", [False, True])
def test_truncation_excuses_no_error_that_is_proved(early: bool) -> None:
    """Toward zero, where truncation's mean lies: beyond twice half a step and the bound nothing is right."""
    y = exact(40, 2048)
    step = rounding.steps(y, "bfloat16")
    bound = noise = 0.1 * step
    mine = nearest((1 - 2 / 3 * UNIT["bfloat16"]) * y, "bfloat16") if early else cut(y, "bfloat16")
    for steps, tier in ((1.19, ""), (1.25, "proved"), (1.9, "proved")):
        mine[3, 4] = y[3, 4] - torch.sign(y[3, 4]) * steps * step[3, 4]
        v = rounding.judge(y, mine, "bfloat16", noise=noise, bound=bound)
        assert (v.passed, v.tier) == (not tier, tier)


def test_rows_of_one_step_may_come_from_two_kernels() -> None:
    y = exact(40, 2048)
    noise = 2.0**-8 * y.abs()
    mine = nearest(y, "bfloat16")
    mine[30:] = nearest((1 - 2 / 3 * 2.0**-8) * y[30:], "bfloat16")
    assert rounding.judge(y, mine, "bfloat16", noise=noise).passed
    mine[5] = nearest((1 + 2 * 2.0**-8) * y[5], "bfloat16")
    v = rounding.judge(y, mine, "bfloat16", noise=noise)
    assert (v.passed, v.measure) == (False, "gain")


def test_what_is_on_the_grid_already_is_handed_on() -> None:
    """Attention over a single key gives that key's value, whatever the kernel does with others."""
    y = exact(32, 1024)
    y[:24] = nearest(y[:24], "bfloat16")
    mine = cut(y, "bfloat16")
    assert torch.equal(mine[:24], y[:24])
    v = rounding.judge(y, mine, "bfloat16")
    assert v.passed
    assert v.rounding == rounding.TOWARD_ZERO
    assert with_room(v)


def test_what_was_rounded_itself_tells_the_direction_by_what_it_was_made_of() -> None:
    y = exact(8, 4096)
    other, noise = nearest(y, "bfloat16"), 2.0**-8 * y.abs()
    blind = rounding.judge(other, cut(y, "bfloat16"), "bfloat16", noise=noise)
    told = rounding.judge(other, cut(y, "bfloat16"), "bfloat16", noise=noise, exact=y)
    assert (blind.passed, blind.rounding) == (True, rounding.EARLIER)
    assert (told.passed, told.rounding) == (True, rounding.TOWARD_ZERO)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_and_their_subnormal_numbers(dtype: Any) -> None:
    name, y = str(dtype).removeprefix("torch."), exact(16, 512) / 50
    near = y.to(dtype).double()
    step = rounding.steps(y, name)
    assert float((y - near).abs().div(step).max()) <= 0.5
    mine = (y / step).trunc() * step
    assert torch.equal(mine.to(dtype).double(), mine)
    assert rounding.direction(y, mine, name).toward_zero
    assert rounding.direction(y, near, name).nearest
    assert rounding.judge(y, mine, name).passed


def test_numbers_without_a_grid_say_nothing() -> None:
    y = exact(8, 512)
    assert rounding.direction(y, cut(y, "bfloat16"), "float32") == rounding.UNKNOWN
    ids = torch.arange(12).reshape(3, 4)
    assert rounding.judge(ids, ids, "int32").passed
    assert not rounding.judge(y, torch.full_like(y, float("nan")), "bfloat16").passed
    handed_on = nearest(y, "bfloat16")
    assert not rounding.judge(y, handed_on, "bfloat16", last=0.0).passed
