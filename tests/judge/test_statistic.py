"""One rate of false alarms: what it is divided by, and the quantiles at what is left."""

import pytest
from scipy import stats

from vllm_accprobe.judge.statistic import QUESTIONS, Chance


def test_the_rate_is_divided_over_places_questions_and_rows():
    chance = Chance(1e-3, 40)
    assert chance.level() * 40 * QUESTIONS == pytest.approx(1e-3)
    assert chance.level(100) == pytest.approx(chance.level() / 100)
    assert chance.sigmas(100) == pytest.approx(stats.norm.isf(chance.level(100) / 2))
    assert Chance(1e-3, 400).sigmas() > chance.sigmas() > Chance(1e-2, 40).sigmas()


@pytest.mark.parametrize("among", [1, 50])
def test_what_is_just_beyond_is_as_likely_as_the_rate(among):
    chance = Chance(1e-3, 7)
    assert chance.of_sigmas(chance.sigmas(among), among) == pytest.approx(1e-3)
    assert chance.of_sigmas(0.0, among) == 1.0
