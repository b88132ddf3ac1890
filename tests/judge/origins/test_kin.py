"""How far layers may honestly lie apart: as often beyond as is said."""

import numpy as np
import pytest
import simulate_judge
from scipy import stats

from vllm_accprobe.judge.origins.kin import Spreads, doubt_of, passed_on


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


def test_the_fewer_others_there_are_the_less_their_spread_says() -> None:
    assert [round(doubt_of(n), 2) for n in (2, 3, 4, 60)] == [1.71, 1.5, 1.41, 1.09]
