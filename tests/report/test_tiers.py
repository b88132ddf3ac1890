"""Which floor an origin breaks, how likely that is, and in how many layers: the sentences, whole."""

import math

import pytest
from report_examples import ORIGIN, comparison

from vllm_accprobe.judge.statistic import BEHIND_A_ROUTER, BEYOND_CHANCE, PROVED, SIBLING_OUTLIER
from vllm_accprobe.report import facts

PROVEN = {"tier": PROVED, "times": 3.1, "chance": 0.0}
LUCKLESS = {"tier": BEYOND_CHANCE, "times": 5.2, "chance": 1e-4}
ODD = {"tier": SIBLING_OUTLIER, "times": 4.0, "chance": 5e-4}


@pytest.mark.parametrize(("says", "sentence", "short"), [
    (PROVEN, "proved: 3.1 times the error bound of its own inputs", "proved, 3.1x"),
    (LUCKLESS, "beyond chance: 5.2 times its floor; rounding alone shows such a thing in 1 of 10,000 comparisons",
     "beyond chance, 5.2x"),
    (ODD, "outlier among sibling layers: 4 times what the same operator does in other layers (1 of 2,000)",
     "outlier among sibling layers, 4x"),
    (ODD | {"evidence": "replay"},
     "outlier among sibling layers: 4 times what the same operator does in its other calls (1 of 2,000)",
     "outlier among sibling layers, 4x"),
    ({"tier": BEHIND_A_ROUTER, "times": 6.6, "chance": None},
     "behind an unseen router: 6.6 times its floor, as rows are that a near tie sends to other experts",
     "behind an unseen router, 6.6x"),
    (PROVEN | {"times": math.inf}, "proved: beyond the error bound of its own inputs", "proved"),
    (PROVEN | {"times": "inf"}, "proved: beyond the error bound of its own inputs", "proved"),
    (LUCKLESS | {"times": None, "chance": None}, "beyond chance: above its floor", "beyond chance"),
    ({"tier": SIBLING_OUTLIER},
     "outlier among sibling layers: more than what the same operator does in other layers",
     "outlier among sibling layers"),
    (LUCKLESS | {"times": 12345.6, "chance": None}, "beyond chance: 12,346 times its floor",
     "beyond chance, 12,346x"),
    ({"tier": "a new\x1bone"}, r"a new\x1bone", r"a new\x1bone"),
    ({}, None, None),
])  # fmt: skip
def test_sentences(says, sentence, short):
    assert facts.sentence(ORIGIN | says) == sentence
    assert facts.short(ORIGIN | says) == short


@pytest.mark.parametrize(("chance", "words"), [
    (None, None),
    (math.nan, None),
    (True, None),
    (0.0, "fewer than 1 of 1,000,000,000,000"),
    (3e-9, "1 of 330,000,000"),
    (1.05e-4, "1 of 9,500"),
    (1e-3, "1 of 1,000"),
    (0.09, "1 of 11"),
    (0.3, "30 of 100"),
    (7.0, "100 of 100"),
])  # fmt: skip
def test_a_probability_is_said_as_odds(chance, words):
    assert facts.odds(chance) == words


@pytest.mark.parametrize(("layers", "words"), [
    (None, None),
    ({"in": 4, "of": 4}, "in all 4 layers"),
    ({"in": 3, "of": 4}, "in 3 of 4 layers"),
    ({"in": 1, "of": 4}, None),
    ({"in": "<b>", "of": 4}, None),
    ("all", None),
])  # fmt: skip
def test_layers(layers, words):
    assert facts.layers({"layers": layers}) == words


def test_a_fault_of_every_layer_is_named_so_in_the_verdict():
    result = comparison(verdict="fail", origins=[ORIGIN | {"layers": {"in": 4, "of": 4}}])
    assert facts.headline(result) == (
        "FAIL: model.layers.3.mlp.down_proj (RowParallelLinear) introduces the error in all 4 layers, first here: "
        "output.0, request 'a', position 17 (decode), row relative L2 0.21, limit 0.016 (13x)"
    )


def test_what_an_origin_is_worth_by_chance():
    assert facts.alarms(comparison()) is None
    assert facts.alarms(comparison(by_chance=9e-4)) == (
        "the limits name an origin, of whatever size, in 1 of 1,100 comparisons with rounding alone"
    )
    assert facts.alarms(comparison(by_chance=0.0, false_alarm_rate=0.2)) == (
        "the limits name an origin, of whatever size, in fewer than 1 of 1,000,000,000,000 comparisons with "
        "rounding alone"
    )
