"""What rounding allows: it passes with room, to nearest or toward zero, small defects do not, whatever the dtype; equal
errors count once; NaN never passes; a floor is what its name claims: a bound that no order breaks, a limit that chance
breaks as rarely as is said."""

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from support.truncated import truncated

from vllm_accprobe.judge import statistic
from vllm_accprobe.opcheck.floors import rounding, verdict
from vllm_accprobe.opcheck.floors.output_rows import OutputRows, matrix, numbers
from vllm_accprobe.opcheck.floors.pooled import COLUMN, COLUMN_SCALE, SCALE, TOGETHER, Pool, Pooled, moderated_t, unlike
from vllm_accprobe.opcheck.floors.verdict import first_of, judge, judge_each, repeated
from vllm_accprobe.opcheck.reference import Call, Expected
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.roundings import gamma

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def exact(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 10.0 * torch.randn(shape or (64, 128), generator=generator, dtype=torch.float64)


def rounded(y: torch.Tensor, dtype: str) -> torch.Tensor:
    return y.to(DTYPES[dtype]).double()


def unit(dtype: str) -> float:
    return {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]


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
    for seed in range(8):
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


@pytest.mark.parametrize("row_dim", [0, 1])
def test_outputs_that_are_cut_together_are_what_each_is_alone(row_dim: int) -> None:
    """Noise that is one number, a column or of the output's shape; rows that have no reference."""
    values, known = exact(2, 4, 3), torch.tensor([True, False, True, True])
    noises = [torch.tensor(0.5), torch.tensor(2.0)], [exact(4, 1), exact(4, 1, seed=1)], [exact(4, 3), exact(4, 3)]
    for noise in noises if row_dim == 0 else noises[:1]:
        shapes = [v if row_dim == 0 else v[None] for v in values]
        expected = [Expected(v, noise=e, exact=v.reshape(-1), rows=known if row_dim else None)
                    for v, e in zip(shapes, noise, strict=True)]  # fmt: skip
        mine = [v.bfloat16() for v in shapes]
        together = OutputRows.of_each(expected, mine, row_dim)
        for k, (e, m) in enumerate(zip(expected, mine, strict=True)):
            found, due = together.one(k), OutputRows.of(e, m, row_dim)
            assert found.at.tolist() == due.at.tolist() == ([0, 2, 3] if row_dim else [0, 1, 2, 3])
            for name in ("reference", "mine", "noise", "exact"):
                assert torch.equal(getattr(found, name), getattr(due, name)), name
            assert torch.equal(found.mine, matrix(m.double(), row_dim)[found.at])
            assert torch.equal(found.reference, found.exact)


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


def with_room(v: verdict.Verdict) -> bool:
    """An element may be off by its limit, a whole step; what adds errors up stays away from its own."""
    return all(ratio < (0.99 if measure == "element" else 0.9) for measure, ratio in v.ratios)


def cut(y: torch.Tensor, dtype: str) -> torch.Tensor:
    return truncated(y, DTYPES[dtype]).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128), (57, 128), (2, 4096), (200, 1024)])
def test_the_direction_is_seen(shape: tuple[int, int], dtype: str) -> None:
    for seed in range(8):
        y = exact(*shape, seed=seed)
        found = rounding.direction(y, cut(y, dtype), dtype)
        assert found.toward_zero
        assert found.share > 0.99  # float32 has come to the next number of the grid here and there
        assert found.proved or shape[0] == 1
        straight = rounding.direction(y, rounded(y, dtype), dtype)
        assert (straight.toward_zero, straight.nearest) == (False, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_a_little_too_small_is_no_truncation(dtype: str) -> None:
    """Its mean error is the same; 0.65u and 0.75u lie between the scales that are tried."""
    for factor in (0.5, 0.65, 2 / 3, 0.7, 0.75, 1.0):
        y = exact(8, 1024)
        mine = rounded(y * (1 - factor * unit(dtype)), dtype)
        assert not rounding.direction(y, mine, dtype).toward_zero
        assert not rounding.judge(y, mine, dtype).passed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128), (64, 128), (2, 4096)])
def test_truncation_passes_with_room_and_fails_strict(shape: tuple[int, int], dtype: str) -> None:
    for seed in range(8):
        y = exact(*shape, seed=seed)
        mine = cut(y, dtype)
        v = rounding.judge(y, mine, dtype)
        assert v.passed
        assert v.rounding == rounding.TOWARD_ZERO
        assert with_room(v)
        if shape[1] > 128 or shape[0] > 1:  # one narrow row is within the limits of either
            assert not verdict.judge(y, mine, dtype).passed or shape[1] == 128
            assert not rounding.judge(y, mine, dtype, strict=True).passed
    assert rounding.judge(y, rounded(y, dtype), dtype, strict=True) == verdict.judge(y, rounded(y, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [rounded, cut])
def test_defects_of_a_few_roundings_are_seen(way: Any, dtype: str) -> None:
    y, u = exact(64, 128), unit(dtype)
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
    y, mine = hidden @ weight.T, rounded(cut(hidden, "bfloat16") @ weight.T, "bfloat16")
    noise = 2.0**-8 * ((hidden**2) @ (weight**2).T).sqrt()
    v = rounding.judge(y, mine, "bfloat16", noise=noise)
    assert v.passed
    assert v.rounding in (rounding.EARLIER, rounding.TOWARD_ZERO)  # which one, such noise hides
    assert not rounding.judge(y, mine, "bfloat16", noise=noise, strict=True).passed
    assert not rounding.judge(y, mine, "bfloat16").passed
    for factor in (1.5, -1.5):
        wrong = rounded((1 + factor * 2.0**-8) * y, "bfloat16")
        assert not rounding.judge(y, wrong, "bfloat16", noise=noise).passed


@pytest.mark.parametrize(("early", "away"), [(False, 1), (False, -1), (True, -1)])
def test_truncation_excuses_no_error_that_is_proved(early: bool, away: int) -> None:
    """The bound is that of the distance from the exact result, not from what truncation makes of it in the mean: beyond
    twice half a step and the bound, 1.2 steps here, nothing is right, toward zero, where that mean lies, or away."""
    y = exact(40, 2048)
    step = rounding.steps(y, "bfloat16")
    bound = noise = 0.1 * step
    mine = rounded((1 - 2 / 3 * unit("bfloat16")) * y, "bfloat16") if early else cut(y, "bfloat16")
    for steps, tier in ((1.19, ""), (1.25, "proved"), (1.9, "proved")):
        mine[3, 4] = y[3, 4] + away * torch.sign(y[3, 4]) * steps * step[3, 4]
        v = rounding.judge(y, mine, "bfloat16", noise=noise, bound=bound)
        assert (v.passed, v.tier) == (not tier, tier)
        assert v.passed or (v.measure, v.row, v.column) == ("element", 3, 4)


def test_of_equal_outputs_the_first_element_is_named() -> None:
    y = exact(3, 4).round()
    v = verdict.judge(y, y, "int32")
    assert (v.passed, v.measure, v.value, v.row, v.column) == (True, verdict.EXACT, 0.0, 0, 0)
    v = verdict.judge(y[:0], y[:0], "int32")
    assert (v.passed, v.row, v.column) == (True, -1, -1)


def test_an_element_without_a_bound_proves_nothing() -> None:
    """A bound may be NaN where a strange input made it so: of the others the furthest is found, or none."""
    y, bound = exact(6, 64), torch.full((6, 64), 1e-4, dtype=torch.float64)
    bound[1, 1] = math.nan
    mine = rounded(y, "bfloat16")
    mine[3, 4] += 5.0
    proof = verdict.judge(y, mine, "bfloat16", bound=bound).beyond_proof
    assert proof is not None
    assert (proof.row, proof.column) == (3, 4)
    v = verdict.judge(y, rounded(y * 1.01, "bfloat16"), "bfloat16", bound=bound + 1.0)
    assert (v.passed, v.beyond_proof, v.tier) == (False, None, statistic.BEYOND_CHANCE)


def test_rows_of_one_step_may_come_from_two_kernels() -> None:
    y = exact(40, 2048)
    noise = 2.0**-8 * y.abs()
    mine = rounded(y, "bfloat16")
    mine[30:] = rounded((1 - 2 / 3 * 2.0**-8) * y[30:], "bfloat16")
    assert rounding.judge(y, mine, "bfloat16", noise=noise).passed
    mine[5] = rounded((1 + 2 * 2.0**-8) * y[5], "bfloat16")
    v = rounding.judge(y, mine, "bfloat16", noise=noise)
    assert (v.passed, v.measure) == (False, "gain")


def test_what_is_on_the_grid_already_is_handed_on() -> None:
    """Attention over a single key gives that key's value, whatever the kernel does with others."""
    y = exact(32, 1024)
    y[:24] = rounded(y[:24], "bfloat16")
    mine = cut(y, "bfloat16")
    assert torch.equal(mine[:24], y[:24])
    v = rounding.judge(y, mine, "bfloat16")
    assert v.passed
    assert v.rounding == rounding.TOWARD_ZERO
    assert with_room(v)


def test_what_was_rounded_itself_tells_the_direction_by_what_it_was_made_of() -> None:
    y = exact(8, 4096)
    other, noise = rounded(y, "bfloat16"), 2.0**-8 * y.abs()
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
    handed_on = rounded(y, "bfloat16")
    assert not rounding.judge(y, handed_on, "bfloat16", last=0.0).passed


U = 2.0**-8
BUDGET = statistic.Budget()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_bfloat16_accumulator_is_proved_wrong() -> None:
    """A float32 one in any order keeps within the bound: test_bounds.py."""
    x, w = draw(3, 512).bfloat16(), draw(8, 512, seed=1).bfloat16()
    total = torch.zeros(3, 8, dtype=torch.bfloat16)
    for term in (x[:, None, :] * w[None]).unbind(2):
        total = total + term
    found = default_references().evaluate(Call("l", "ColumnParallelLinear", {"x": x}, params={"weight": w},
                                               attrs={"tp_size": 1}, outputs={"output.0": total}))  # fmt: skip
    assert isinstance(found, dict), found
    e = found["output.0"]
    coarse = verdict.judge(e.value, total.double(), "bfloat16", noise=e.noise, bound=e.bound)
    assert (coarse.passed, coarse.tier, coarse.chance) == (False, verdict.PROVED, 0.0)


def test_gamma_is_highams() -> None:
    assert gamma(1000) == pytest.approx(1000 * 2**-24 / (1 - 1000 * 2**-24))
    assert gamma(2**25) == math.inf


def test_limits_are_broken_as_rarely_as_is_said() -> None:
    """At a chance of 1 in 50 for an output, 2,000 of them: no more than that fail, for any dtype's shape."""
    for shape in ((1, 64), (16, 32), (9, 200)):
        failed = 0
        for seed in range(2000 // 3):
            y = draw(*shape, seed=seed)
            failed += not verdict.judge(y, rounded(y, "bfloat16"), "bfloat16", 0.02).passed
        assert failed <= 0.02 * 2000 / 3


def test_the_quantiles_by_simulation_and_by_known_values() -> None:
    assert statistic.normal(0.05) == pytest.approx(1.959964, rel=1e-6)
    assert statistic.normal(0.05, 10) == pytest.approx(-NormalDist().inv_cdf(0.0025))
    # chi-square's 99.9 % quantiles, from tables: 29.588 with 10 degrees, 149.449 with 100
    for freedom, known in ((10, 29.588), (100, 149.449)):
        assert freedom * statistic.chi_square(freedom, statistic.normal(0.001, 1, 1)) == pytest.approx(known, rel=0.01)
    assert statistic.deviations_of(statistic.chi_square(12.0, 4.5), 12.0) == pytest.approx(4.5)
    # Student's t: P(T > 2.776) = 0.025 with 4 degrees, P(T > 3.169) = 0.005 with 10
    t, freedom = moderated_t(1.0, 4, 3.0 * 0.25, 1.0, 2.0)
    assert (t, freedom) == (pytest.approx((5 / 2.75 / 1.25) ** 0.5), 5.0)


def pooled(wrong, calls: int = 60, rows: int = 8, width: int = 256, noise: float = 0.0, **more) -> Pool:
    pool = Pool()
    for n in range(calls):
        y = draw(rows, width, seed=n)
        e = None if not noise else noise * y.abs()
        v = verdict.judge(y, rounded(wrong(y, n), "bfloat16"), "bfloat16", BUDGET.output, noise=e, **more)
        assert v.passed, v  # nothing is seen in a single call
        pool.add([v.sums])
    return pool


def test_honest_rows_pass_together() -> None:
    pool = pooled(lambda y, n: y)
    assert pool.breach(BUDGET.tap) is None
    ratio, freedom, scale, error = pool.pooled()
    assert ratio == pytest.approx(1.0, abs=0.03)
    assert abs(scale) < 4 * error
    assert pool.rows == 480
    assert freedom > 1e4


def test_what_no_row_shows_all_rows_show() -> None:
    """Faults of a third of a rounding: a scale, a column's scale, errors half as large again as they should be."""
    b = pooled(lambda y, n: y * (1 + 0.3 * U)).breach(BUDGET.tap)
    assert b.measure == SCALE
    assert b.words.startswith("all 480 rows together: a scale of 1.001")
    assert b.chance < 1e-6
    column = torch.ones(256)
    column[17] = 1 + 1.4 * U
    b = pooled(lambda y, n: y * column, noise=0.577 * U).breach(BUDGET.tap)
    assert b.column == 17
    assert b.measure in (COLUMN_SCALE, COLUMN)
    b = pooled(lambda y, n: y * (1 + 0.5 * U * torch.tanh(3 * draw(8, 256, seed=1000 + n)))).breach(BUDGET.tap)
    assert b.measure == TOGETHER


def test_a_column_of_nearly_equal_values_has_one_rounding_error() -> None:
    """A trained bias or an outlier channel: 3.008 in every row is 3.0 in bfloat16 in every row, and no fault."""

    def steady(n: int) -> torch.Tensor:
        y = draw(8, 256, seed=n)
        y[:, 5] = 3.0 + 0.98 * 0.5 * 2.0**-6 + 1e-4 * y[:, 5]
        return y

    pool = Pool()
    for n in range(60):
        y = steady(n)
        v = verdict.judge(y, rounded(y, "bfloat16"), "bfloat16", BUDGET.output)
        assert v.passed
        pool.add([v.sums])
    assert pool.breach(BUDGET.tap) is None
    y = torch.cat([steady(n) for n in range(60)])
    assert verdict.judge(y, rounded(y, "bfloat16"), "bfloat16", BUDGET.output).passed


def test_the_same_rows_again_say_nothing_new() -> None:
    pool = Pool()
    y = draw(8, 64)
    for _ in range(500):
        pool.add([verdict.judge(y, rounded(y, "bfloat16"), "bfloat16", BUDGET.output).sums])
    assert (pool.rows, pool.seen) == (8, 4000)
    assert pool.breach(BUDGET.tap) is None


def test_two_hundred_equal_rows_in_one_call_are_one() -> None:
    for seed in range(8):
        y = draw(1, 256, seed=seed).expand(200, 256).contiguous()
        assert verdict.judge(y, rounded(y, "bfloat16"), "bfloat16", BUDGET.output).passed


def test_an_error_that_a_row_shares_is_not_averaged_away_within_it() -> None:
    """Half a unit of each row, either way: rounding 1 / rms. Ten thousand elements do not make it a fault."""

    def shared(y: torch.Tensor, n: int) -> torch.Tensor:
        return y * (1 + 0.5 * U * (2 * torch.rand(len(y), 1, generator=torch.Generator().manual_seed(n)) - 1))

    assert pooled(shared, width=2048, common=0.5 * U).breach(BUDGET.tap) is None


def layer(n: int, ratio: float, freedom: float = 1e4) -> Pooled:
    return Pooled(f"layers.{n}.mlp", "C", "output.0", 0, "bfloat16", ratio, freedom, 0.0, 0.0, 400, n, 0.0)


def test_a_layer_whose_errors_are_twice_its_kins_stands_out_and_few_layers_say_little() -> None:
    def found(n: int, factor: float) -> list[str]:
        ratios = [0.40 + 0.01 * (k % 3) for k in range(n)]
        ratios[n // 2] *= factor
        return [o.pooled.tap for o in unlike([], [layer(k, r) for k, r in enumerate(ratios)], BUDGET.siblings)]

    assert found(24, 6.0) == ["layers.12.mlp"]
    assert found(24, 1.2) == []
    assert found(3, 50.0) == []
    assert found(24, 1 / 6) == []  # fewer errors than its kin have are no fault


def test_layers_that_honestly_differ_raise_no_alarm() -> None:
    g = torch.Generator().manual_seed(7)
    alarms = 0
    for _ in range(400):
        ratios = torch.exp(0.25 * torch.randn(12, generator=g, dtype=torch.float64)).tolist()
        alarms += bool(unlike([], [layer(k, r) for k, r in enumerate(ratios)], BUDGET.siblings))
    assert alarms <= 1


def test_what_golden_does_in_the_same_layer_is_taken_off() -> None:
    ratios = [0.4, 0.4, 2.4, 0.4, 0.4, 0.4, 0.4, 0.4]
    mine = [layer(k, r) for k, r in enumerate(ratios)]
    assert [o.pooled.tap for o in unlike([], mine, BUDGET.siblings)] in ([], ["layers.2.mlp"])
    assert unlike([layer(k, r) for k, r in enumerate(ratios)], mine, BUDGET.siblings) == []


def test_what_chance_can_do_is_never_exactly_nothing() -> None:
    assert 0 < statistic.tail(12.0) < 1e-30  # 0 is the word for proved
    assert statistic.tail(3.0) == pytest.approx(2 * 0.0013498980316301035)
