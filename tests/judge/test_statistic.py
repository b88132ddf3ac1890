"""Rates of false alarms and their quantiles, distributions against scipy's, units of rounding."""

import math
import random
from fractions import Fraction

import pytest
import scipy

from vllm_accprobe.judge import distributions as ours
from vllm_accprobe.judge.rounding_unit import flow_unit, is_exact, is_mask, unit
from vllm_accprobe.judge.statistic import QUESTIONS, Chance


def test_the_rate_is_divided_over_places_questions_and_rows():
    chance = Chance(1e-3, 40)
    assert chance.level() * 40 * QUESTIONS == pytest.approx(1e-3)
    assert chance.level(100) == pytest.approx(chance.level() / 100)
    assert chance.sigmas(100) == pytest.approx(scipy.stats.norm.isf(chance.level(100) / 2))
    assert Chance(1e-3, 400).sigmas() > chance.sigmas() > Chance(1e-2, 40).sigmas()


@pytest.mark.parametrize("among", [1, 50])
def test_what_is_just_beyond_is_as_likely_as_the_rate(among):
    chance = Chance(1e-3, 7)
    assert chance.of_sigmas(chance.sigmas(among), among) == pytest.approx(1e-3)
    assert chance.of_sigmas(0.0, among) == 1.0


DRAW = random.Random(3)


@pytest.mark.parametrize("largest", [1.0, 2.0, 4.0])
def test_against_scipy(largest: float) -> None:
    """Parameters from 0.5 to 10 ** largest, at points around the mode and anywhere; to 9 digits, as scipy's own
    digits end there (the exact sums below)."""
    for _ in range(300):
        a, b = (10 ** DRAW.uniform(-0.3, largest) for _ in range(2))
        near = DRAW.gauss(a / (a + b), 4 * math.sqrt(a * b / (a + b + 1)) / (a + b))
        for x in (min(max(near, 1e-12), 1 - 1e-12), DRAW.random()):
            assert ours.incomplete_beta(a, b, x) == pytest.approx(scipy.special.betainc(a, b, x), rel=1e-9, abs=1e-290)
        t = DRAW.gauss(0, 1) * 10 ** DRAW.uniform(-2, 1.5)
        assert ours.t_at_most(a, t) == pytest.approx(scipy.special.stdtr(a, t), rel=1e-9, abs=1e-290)
        p, freedom = DRAW.uniform(0.001, 0.999), math.ceil(a)
        assert ours.t_quantile(freedom, p) == pytest.approx(scipy.special.stdtrit(freedom, p), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 7, 60, 900])
@pytest.mark.parametrize("p", [Fraction(1, 2), Fraction(1, 64), Fraction(63, 64)])
def test_binomial_tails_are_the_exact_sums(n: int, p: Fraction) -> None:
    each = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    for k in {0, 1, n // 3, n // 2, n - 1, n}:
        at_most, at_least = float(sum(each[: k + 1])), float(sum(each[k:]))
        assert ours.binomial_at_most(k, n, float(p)) == pytest.approx(at_most, rel=1e-12, abs=1e-300)
        assert ours.binomial_at_least(k, n, float(p)) == pytest.approx(at_least, rel=1e-12, abs=1e-300)


def test_the_ends() -> None:
    assert (ours.incomplete_beta(2.0, 3.0, 0.0), ours.incomplete_beta(2.0, 3.0, 1.0)) == (0.0, 1.0)
    assert (ours.binomial_at_most(-1, 4, 0.5), ours.binomial_at_most(4, 4, 0.5)) == (0.0, 1.0)
    assert (ours.binomial_at_least(0, 4, 0.5), ours.binomial_at_least(5, 4, 0.5)) == (1.0, 0.0)
    assert (ours.t_at_most(3.0, -math.inf), ours.t_at_most(3.0, 0.0), ours.t_at_most(3.0, math.inf)) == (0.0, 0.5, 1.0)
    assert ours.t_quantile(5, 0.5) == pytest.approx(0.0, abs=1e-12)
    for a, b, x in ((0.0, 1.0, 0.5), (1.0, -1.0, 0.5), (1.0, 1.0, 1.5), (1.0, 1.0, math.nan), (math.nan, 1.0, 0.5)):
        with pytest.raises(ValueError, match="needs a, b > 0"):
            ours.incomplete_beta(a, b, x)


def test_a_root_is_found_to_the_last_bit() -> None:
    assert ours.root(lambda x: x * x - 2.0, 0.0, 2.0) == pytest.approx(math.sqrt(2.0), rel=3e-16)
    assert ours.root(lambda x: 1.0 - x, 0.0, 1.0) == 1.0
    assert ours.root(lambda x: math.inf if x > 0.25 else -1.0, 0.0, 1.0) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="no change of sign"):
        ours.root(lambda x: 1.0 + x, 0.0, 1.0)


def test_units_are_half_a_step_of_the_dtype():
    assert (unit("bfloat16"), unit("float16"), unit("int64")) == (2.0**-8, 2.0**-11, 0.0)
    assert flow_unit(["float32", "bfloat16", "float8_e4m3fn", "int64"]) == 2.0**-8
    assert is_exact("int64", "int64")
    assert not is_exact("float32", "bfloat16")


def test_masks_hold_the_lowest_number_of_their_dtype():
    roles = ("input.attention_mask", "input.causal_mask", "input.hidden_states", "param.mask_token")
    assert [is_mask(r) for r in roles] == [True, True, False, False]
