"""Errors below every fixed limit, planted among honest noise."""

from dataclasses import replace

import numpy as np
import pytest

from vllm_accprobe.judge.origins.columns import Columns
from vllm_accprobe.judge.origins.outliers import Peers
from vllm_accprobe.judge.origins.peer_evidence import COLUMNS, GAIN, GROWTH, Look
from vllm_accprobe.judge.tiers import BEYOND_CHANCE, UNLIKE_KIN
from vllm_accprobe.kernels.structure import structure

UNIT = 2.0**-8
ROWS, WIDTH = 120, 64


def look(layer, *, fault=None, noise=0.004, before=0.005, seed=0):
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
    return Look(tap, "output.0", "Linear", UNIT, *rows, WIDTH, Columns(structure(g, g + d)))


def judged(fault, layers=4, **how):
    """What is said of layer 1, and of the other layers."""
    looks = [look(i, fault=fault if i == 1 else None, **how) for i in range(layers)]
    peers = Peers(looks)
    said = [peers.judge(x) for x in looks]
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
    looks = [look(i, fault=(lambda g: 0.06 * g * (np.arange(WIDTH) == 17)) if i == 1 else None) for i in range(4)]
    assert [f is not None for f in map(Peers(looks).judge, looks)] == [False, True, False, False]
    blind = [replace(x, unfed=True) for x in looks]
    assert [Peers(blind).judge(x) for x in blind] == [None] * 4


def test_more_noise_than_the_other_layers_have():
    random = np.random.default_rng(7)

    def fault(g):
        return 0.02 * random.standard_normal(g.shape)

    found, others = judged(fault, layers=16)
    assert (found.how, found.tier, others) == (GROWTH, UNLIKE_KIN, [])
    assert found.chance < 1e-3
    assert judged(fault, layers=4) == (None, [])  # one of four layers may be so much noisier: nobody knows


def test_behind_operators_that_nobody_saw_other_layers_measure_nothing():
    random = np.random.default_rng(7)
    looks = [look(i, fault=(lambda g: 0.02 * random.standard_normal(g.shape)) if i == 1 else None) for i in range(16)]
    assert Peers(looks).judge(looks[1]).tier == UNLIKE_KIN
    looks[1].untapped = True
    assert Peers(looks).judge(looks[1]) is None


def test_results_of_equal_inputs_need_no_kin():
    random = np.random.default_rng(7)
    looks = [look(i, noise=0.0065 if i == 1 else 0.0, before=0.0, seed=3) for i in range(2)]  # 1.7 u
    for one in looks:
        one.inputs_known = True
    found = [Peers(looks).judge(x) for x in looks]
    assert found[0] is None
    assert (found[1].how, found[1].tier, found[1].chance) == (GROWTH, BEYOND_CHANCE, 0.0)
    looks[1].inputs_known = False  # nobody saw what went in
    assert Peers(looks).judge(looks[1]) is None
    rounded = look(2, noise=0.0, before=0.0)
    g = random.standard_normal((ROWS, WIDTH))  # two results, each rounded twice, independently of the other
    d = g * UNIT * random.uniform(-1, 1, (4, *g.shape)).sum(0)
    rounded.err, rounded.inputs_known = np.sqrt((d * d).sum(1) / (g * g).sum(1)), True
    assert Peers([rounded]).judge(rounded) is None


def test_a_factor_in_every_layer_is_no_habit():
    """More than two truncations explain: a scale that is wrong in all layers."""
    looks = [look(i, fault=lambda g: 0.02 * g) for i in range(4)]
    found = [Peers(looks).judge(x) for x in looks]
    assert {(f.how, f.tier) for f in found} == {(GAIN, BEYOND_CHANCE)}
    small = [look(i, fault=lambda g: -0.0055 * g) for i in range(4)]  # 1.4 u: two truncations
    assert [Peers(small).judge(x) for x in small] == [None] * 4


def test_a_few_rows():
    def fault(g):
        d = np.zeros_like(g)
        d[100:] = 0.03 * g[100:]
        return d

    found, others = judged(fault)
    assert np.flatnonzero(found.rows).tolist() == list(range(100, 120))
    assert others == []


def test_rows_that_are_equal_have_no_error_among_rows_with_a_factor():
    """A fault upstream scales all rows but those of a short request, which are equal to the bit."""
    looks = [look(i) for i in range(4)]
    looks[1].gain = np.where(np.arange(ROWS) < 5, 0.0, 0.4)
    looks[1].err[:5] = 0.0
    looks[1].gain_before = np.where(np.arange(ROWS) < 5, 0.0, 0.4)
    found = Peers(looks).judge(looks[1])
    assert found is None or not found.rows[:5].any()


def test_too_few_rows_and_infinite_errors_are_left_to_others():
    x = look(0)
    x.err[3] = np.inf
    assert Peers([x]).judge(x) is None
    few = Look("a", "output.0", "Linear", UNIT, *(np.zeros(3) for _ in range(5)))
    assert Peers([few]).judge(few) is None


def test_a_gain_that_came_in_is_not_created():
    looks = [look(i, fault=(lambda g: 0.01 * g) if i == 1 else None) for i in range(4)]
    looks[1].gain_before = np.full(ROWS, 0.006)
    looks[1].passed = {"model.layers.*.up|output.0": 0.006}
    found = Peers(looks).judge(looks[1])
    assert found is None or found.how != GAIN


def truncated(layer, *, scale=1.0, front=0.0, seed=0):
    """An operator that rounds toward zero twice, as vLLM's AVX2 attention does: its probabilities and its result.

    front: mean gain of its input, in roundings."""
    random = np.random.default_rng((seed, layer))
    g = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    mine = g * np.float32(scale) * (1 + np.float32(0.002) * random.standard_normal(g.shape).astype(np.float32))
    for _ in range(2):
        mine = (mine.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) * np.float32(1.0001)
    d = mine.astype(np.float64) - g
    gg = (g.astype(np.float64) ** 2).sum(1)
    err, gain = np.sqrt((d * d).sum(1) / gg), (d * g).sum(1) / gg
    before, brought = np.full(ROWS, 0.008), np.full(ROWS, 0.005)
    tap, passed = f"model.layers.{layer}.attn", {"model.layers.*.attn|input.0": front * UNIT}
    rows = np.arange(ROWS), err, gain, before, brought
    return Look(tap, "output.0", "Attention", UNIT, *rows, WIDTH, mixing=True, passed=passed)


def judged_among_truncating(scale, fronts=(0.72, 0.71, 0.73, 0.72) * 3, seed=0):
    looks = [truncated(i, scale=scale if i == 1 else 1.0, front=f, seed=seed) for i, f in enumerate(fronts)]
    return [Peers(looks).judge(x) for x in looks]


@pytest.mark.parametrize("seed", range(6))
def test_layers_that_all_truncate_are_silent(seed):
    assert judged_among_truncating(1.0, seed=seed) == [None] * 12


@pytest.mark.parametrize("scale", [1.011, 0.989])
def test_a_factor_among_layers_that_all_truncate(scale):
    before, found, *after = judged_among_truncating(scale)
    assert found is not None
    assert found.how == GAIN
    assert found.size == pytest.approx(0.011, rel=0.2)
    assert [before, *after] == [None] * 11


def test_a_factor_that_came_in_is_not_created_among_layers_that_truncate():
    assert judged_among_truncating(1.011, fronts=(0.72, 0.72 + 2.8, *[0.72, 0.73] * 5)) == [None] * 12


def test_layers_that_agree_by_chance_accuse_nobody():
    """Two layers whose gains are equal to a thousandth, and one that one truncation would explain."""
    looks = [truncated(i, front=0.72) for i in range(3)]
    for one, gain in zip(looks, (-1.44, -1.441, -0.75), strict=True):
        one.gain = one.gain - np.median(one.gain) + gain * UNIT
    assert [Peers(looks).judge(x) for x in looks] == [None] * 3
    looks[2].gain = looks[2].gain + 0.9 * UNIT  # two truncations less and more: three layers know of no spread
    assert Peers(looks).judge(looks[2]) is None
    looks[2].gain = looks[2].gain + 1.9 * UNIT  # no truncations explain it
    found = Peers(looks).judge(looks[2])
    assert found is not None
    assert (found.how, found.tier) == (GAIN, BEYOND_CHANCE)
