"""One rate for a whole comparison: quantiles, spreads among layers, and honest layers that differ unblamed."""

import numpy as np
import pytest
import simulate_judge
from scipy import stats

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.chance import Chance, chance_of_size, deviation, tail
from vllm_accprobe.judge.origins.everywhere import in_all_layers
from vllm_accprobe.judge.origins.kin import Spreads, passed_on


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


def _share_beyond(spread_of_kind, kinds, layers, runs, level=0.01):
    """Of honest layers, how many lie beyond the quantile that leaves ``level``."""
    random = np.random.default_rng(1)
    beyond = count = 0
    for _ in range(runs):
        values = {str(k): spread_of_kind(random) * random.standard_normal(layers) for k in range(kinds)}
        spreads = Spreads(values, 1e-6)
        for k in values:
            for at in range(layers):
                found = spreads.against(k, at)
                beyond += abs(found.t) > stats.t.isf(level / 2, found.freedom)
                count += 1
    return beyond / count


@pytest.mark.parametrize(("kinds", "layers"), [(1, 4), (2, 4), (8, 4), (8, 30), (30, 3)])
def test_layers_of_one_spread_are_beyond_as_often_as_said(kinds, layers):
    assert _share_beyond(lambda r: 1.0, kinds, layers, 12000 // (kinds * layers)) < 0.014


def test_so_are_layers_of_kinds_with_spreads_of_their_own():
    """Spreads as Smyth's model has them: s^2 distributed as d0 s0^2 / chi^2 of d0."""
    assert _share_beyond(lambda r: (4.0 / r.chisquare(4.0)) ** 0.5, 10, 4, 300) < 0.02


def test_other_kinds_make_few_layers_count():
    random = np.random.default_rng(2)
    kinds = {str(k): random.standard_normal(4) for k in range(10)}
    alone, among = Spreads({"0": kinds["0"]}, 1e-6).against("0", 1), Spreads(kinds, 1e-6).against("0", 1)
    assert alone.freedom == 2
    assert among.freedom > 4
    assert Spreads({"0": [1.0, 2.0]}, 1e-6).against("0", 1) is None


def test_what_only_one_layer_has_passed_on():
    assert passed_on({"a": 0.5}, {"a": 0.1, "b": -0.7}) == 0.7
    assert passed_on({}, {}) == 0.0


@pytest.mark.parametrize("sigma", [0.5, 0.8])
@pytest.mark.parametrize(("make", "layers", "n"), [("single", 4, 150), ("single", 12, 50), ("model", 4, 20)])
def test_honest_layers_that_differ_are_not_blamed(sigma, make, layers, n):
    """The simulation in small: scripts/simulate_judge.py has 2000 comparisons of each."""
    found, how = simulate_judge.alarms(
        lambda r: getattr(simulate_judge, make)(r, sigma, layers, 0.004, 0.005), n, seed=5
    )
    assert (found, how) == (0, {})


def test_all_layers_or_not():
    ran = [f"model.layers.{i}.{what}" for i in range(3) for what in ("mlp", "attn")] + ["model.norm"]
    named = ["model.layers.0.mlp", "model.norm", "model.layers.2.mlp", "model.layers.0.attn"]
    assert in_all_layers(named, ran) == {}
    assert in_all_layers([*named, "model.layers.1.mlp"], ran) == {
        f"model.layers.{i}.mlp": {"in": 3, "of": 3} for i in (0, 2, 1)
    }
