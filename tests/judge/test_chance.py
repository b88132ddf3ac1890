"""One rate of false alarms: what it is divided by, and the quantiles at what is left."""

import numpy as np
import pytest
from scipy import stats

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.chance import Chance, chance_of_size, deviation, tail


def test_the_rate_is_divided_over_places_questions_and_rows():
    chance = Chance(1e-3, 40)
    assert chance.level() * 40 * c.QUESTIONS == pytest.approx(1e-3)
    assert chance.level(100) == pytest.approx(chance.level() / 100)
    assert chance.sigmas(100) == pytest.approx(stats.norm.isf(chance.level(100) / 2))
    assert chance.student(3.0) == pytest.approx(stats.t.isf(chance.level() / 2, 3.0))
    assert Chance(1e-3, 400).sigmas() > chance.sigmas() > Chance(1e-2, 40).sigmas()


@pytest.mark.parametrize("among", [1, 50])
def test_what_is_just_beyond_is_as_likely_as_the_rate(among):
    chance = Chance(1e-3, 7)
    assert chance.of_sigmas(chance.sigmas(among), among) == pytest.approx(1e-3)
    assert chance.of_student(chance.student(4.0, among), 4.0, among) == pytest.approx(1e-3)
    assert chance.of_sigmas(0.0, among) == 1.0


def test_robust_deviations_of_a_normal_distribution():
    values = np.random.default_rng(0).normal(3.0, 2.0, 20000)
    middle, spread = deviation(values)
    assert (middle, spread, tail(values, middle)) == pytest.approx((3.0, 2.0, 2.0), rel=0.03)


def test_how_likely_an_error_is_among_those_of_honest_places():
    honest = np.exp(np.random.default_rng(0).normal(0.0, 0.5, 400))
    assert chance_of_size(np.exp(1.0), honest, 1) == pytest.approx(stats.norm.sf(2.0), rel=0.3)
    assert chance_of_size(np.exp(1.0), honest, 400) == 1.0
    assert chance_of_size(np.inf, honest, 400) == 0.0
    assert chance_of_size(1.0, honest[: c.FEW - 1], 1) is None
