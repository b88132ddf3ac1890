"""Errors below every fixed limit, planted among honest noise."""

from dataclasses import replace

import numpy as np
import pytest
import scipy
import simulate_judge

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.siblings import COLUMNS, GAIN, GROWTH, Siblings, TensorStats, chance_of_size, deviation
from vllm_accprobe.judge.statistic import BEYOND_CHANCE
from vllm_accprobe.judge.tensor_errors import Columns
from vllm_accprobe.kernels.structure import structure

UNIT = 2.0**-8
ROWS, WIDTH = 120, 64


def stats(layer, *, fault=None, noise=0.004, before=0.005, seed=0):
    """An operator whose rows are ``noise`` off at random; fault: (golden values) → what mine adds to them."""
    random = np.random.default_rng((seed, layer))
    g = random.standard_normal((ROWS, WIDTH))
    d = g * 0 + noise * random.standard_normal(g.shape)
    if fault is not None:
        d += fault(g)
    gg = (g * g).sum(1)
    err, gain = np.sqrt((d * d).sum(1) / gg), (d * g).sum(1) / gg
    front = before * (1 + 0.1 * random.standard_normal(ROWS))
    zero = np.zeros(ROWS)
    tap = f"model.layers.{layer}.proj"
    rows = np.arange(ROWS), err, gain, front, zero
    return TensorStats(tap, "output.0", UNIT, *rows, WIDTH, Columns(structure(g, g + d)))


def judged(fault, layers=4, **how):
    """What is said of layer 1, and of the other layers."""
    places = [stats(i, fault=fault if i == 1 else None, **how) for i in range(layers)]
    siblings = Siblings(places)
    said = [siblings.judge(x) for x in places]
    return said[1], [s for i, s in enumerate(said) if i != 1 and s is not None]


@pytest.mark.parametrize("seed", range(6))
def test_honest_noise_is_silent(seed):
    assert judged(None, seed=seed) == (None, [])


def test_a_scale_within_the_noise_of_every_row():
    found, others = judged(lambda g: 0.006 * g)  # 1.5 roundings; the rows' own noise is as large
    assert found.how == GAIN
    assert found.size == pytest.approx(0.006, rel=0.1)
    assert others == []


def test_one_column():
    def fault(g):
        d = np.zeros_like(g)
        d[:, 17] = 0.06 * g[:, 17]  # of a row it is 0.06 / 8
        return d

    found, others = judged(fault)
    assert (found.how, found.columns.tolist(), others) == (COLUMNS, [17], [])


def test_one_column_says_nothing_where_nothing_in_front_was_compared():
    places = [stats(i, fault=(lambda g: 0.06 * g * (np.arange(WIDTH) == 17)) if i == 1 else None) for i in range(4)]
    assert [f is not None for f in map(Siblings(places).judge, places)] == [False, True, False, False]
    blind = [replace(x, unfed=True) for x in places]
    assert [Siblings(blind).judge(x) for x in blind] == [None] * 4
    behind = [replace(x, untapped=True) for x in places]  # siblings measure nothing there
    assert [Siblings(behind).judge(x) for x in behind] == [None] * 4


def test_results_of_equal_inputs_need_no_kin():
    random = np.random.default_rng(7)
    places = [stats(i, noise=0.0065 if i == 1 else 0.0, before=0.0, seed=3) for i in range(2)]  # 1.7 u
    for one in places:
        one.inputs_known = True
    found = [Siblings(places).judge(x) for x in places]
    assert found[0] is None
    assert (found[1].how, found[1].tier, found[1].chance) == (GROWTH, BEYOND_CHANCE, 0.0)
    places[1].inputs_known = False  # nobody saw what went in
    assert Siblings(places).judge(places[1]) is None
    rounded = stats(2, noise=0.0, before=0.0)
    g = random.standard_normal((ROWS, WIDTH))  # two results, each rounded twice, independently of the other
    d = g * UNIT * random.uniform(-1, 1, (4, *g.shape)).sum(0)
    rounded.err, rounded.inputs_known = np.sqrt((d * d).sum(1) / (g * g).sum(1)), True
    assert Siblings([rounded]).judge(rounded) is None


def test_a_factor_in_every_layer_is_no_habit():
    """More than two truncations explain: a scale that is wrong in all layers."""
    places = [stats(i, fault=lambda g: 0.02 * g) for i in range(4)]
    found = [Siblings(places).judge(x) for x in places]
    assert {(f.how, f.tier) for f in found} == {(GAIN, BEYOND_CHANCE)}
    small = [stats(i, fault=lambda g: -0.0055 * g) for i in range(4)]  # 1.4 u: two truncations
    assert [Siblings(small).judge(x) for x in small] == [None] * 4


def test_rows_that_are_equal_have_no_error_among_rows_with_a_factor():
    """A fault upstream scales all rows but those of a short request, which are equal to the bit."""
    places = [stats(i) for i in range(4)]
    places[1].gain = np.where(np.arange(ROWS) < 5, 0.0, 0.4)
    places[1].err[:5] = 0.0
    places[1].gain_before = np.where(np.arange(ROWS) < 5, 0.0, 0.4)
    found = Siblings(places).judge(places[1])
    assert found is None or not found.rows[:5].any()


def test_too_few_rows_and_infinite_errors_are_left_to_others():
    x = stats(0)
    x.err[3] = np.inf
    assert Siblings([x]).judge(x) is None
    few = TensorStats("a", "output.0", UNIT, *(np.zeros(3) for _ in range(5)))
    assert Siblings([few]).judge(few) is None


def test_a_gain_that_came_in_is_not_created():
    places = [stats(i, fault=(lambda g: 0.01 * g) if i == 1 else None) for i in range(4)]
    places[1].gain_before = np.full(ROWS, 0.006)
    found = Siblings(places).judge(places[1])
    assert found is None or found.how != GAIN


def test_more_noise_than_the_siblings_is_left_to_the_replay():
    """Layers differ in noise by factors, and few of them know no spread."""
    random = np.random.default_rng(7)
    assert judged(lambda g: 0.02 * random.standard_normal(g.shape), layers=16) == (None, [])


def test_identical_places_are_left_out_before_the_rate_is_divided():
    places = [stats(i, noise=0.004 if i == 1 else 0.0) for i in range(4)]
    assert Siblings(places).chance.places == 1


def test_what_was_made_is_what_did_not_come_in():
    err, before = np.full(9, 0.05), np.full(9, 0.03)
    known = TensorStats("m", "output.0", 2.0**-8, np.arange(9), err, np.full(9, 0.5), before, np.zeros(9))
    assert known.made == pytest.approx(0.04)
    assert (known.typical_gain, known.gain_error) == (0.5, 0.0)


@pytest.mark.parametrize(("make", "layers", "n"), [("single", 4, 150), ("single", 12, 50), ("model", 4, 20)])
def test_correct_layers_that_differ_are_not_blamed(make, layers, n):
    """The simulation in small: scripts/simulate_judge.py has 2000 comparisons of each."""
    found, how = simulate_judge.alarms(lambda r: getattr(simulate_judge, make)(r, 0.8, layers, 0.004, 0.005), n, seed=5)
    assert (found, how) == (0, {})


def test_robust_deviations_of_a_normal_distribution():
    values = np.random.default_rng(0).normal(3.0, 2.0, 20000)
    middle, spread = deviation(values)
    assert (middle, spread) == pytest.approx((3.0, 2.0), rel=0.03)


def test_how_likely_an_error_is_among_those_of_honest_places():
    honest = np.exp(np.random.default_rng(0).normal(0.0, 0.5, 400))
    assert chance_of_size(np.exp(1.0), honest, 1) == pytest.approx(scipy.stats.norm.sf(2.0), rel=0.3)
    assert chance_of_size(np.exp(1.0), honest, 400) == 1.0
    assert chance_of_size(np.inf, honest, 400) == 0.0
    assert chance_of_size(1.0, honest[: c.FEW - 1], 1) is None
