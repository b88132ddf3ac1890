"""Rows that a near tie of the router's logits may have sent elsewhere, where nobody saw the choice."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_accprobe.judge.near_ties import Rerouted, behind, taken, undecided, unknown_routers

GOLDEN = np.array([
    [3.0, 2.0, 1.99, 0.0],  # second and third nearly equal, and
    [3.0, 2.0, 2.0, 0.0],  # equal, of which
    [3.0, 2.0, 1.0, 0.0],
    [3.0, 2.0, 1.99, 0.0],
    [3.0, 2.0, 1.0, 0.0],
    [3.0, 2.0, 1.0, 0.0],
])  # fmt: skip
MINE = np.array([
    [3.0, 1.99, 2.0, 0.0],  # the other one is taken here
    [3.0, 1.99, 2.01, 0.0],  # the third is the higher one here
    [3.01, 1.99, 1.01, 0.0],  # other numbers, the same experts
    [3.0, 2.0, 1.99, 0.0],  # the same numbers
    [0.0, 1.0, 2.0, 3.0],  # another router's
    [3.0, np.nan, 1.0, 0.0],
])  # fmt: skip


def test_two_highest_by_hand() -> None:
    none = [np.nan] * 3
    expected = [[0.01, 0.01, 2.0], [0.0, 0.02, 2.01], none, none, [1.0, 1.0, 3.0], none]
    np.testing.assert_allclose(undecided(GOLDEN, MINE, 2), expected, atol=1e-12)
    assert np.isnan(undecided(GOLDEN, MINE, 4)).all()
    assert np.isnan(undecided(GOLDEN, MINE[:, :3], 2)).all()


def test_an_exact_tie_on_one_side_leaves_the_choice_open() -> None:
    found = undecided(np.array([[1.0, 2.0, 0.5]]), np.array([[1.0, 2.0, 1.0]]), 2)
    np.testing.assert_array_equal(found, [[0.5, 0.0, 1.0]])


def test_only_rows_whose_logits_are_near_are_left_out() -> None:
    keys, found = np.arange(6), undecided(GOLDEN, MINE, 2)
    near = np.array([False, True, True, False, False, True])
    left = Rerouted().undecided(keys, found, 2.0**-8, near)
    assert left.tolist() == [True, True, False, False, False, False]  # the first lies within rounding itself


@pytest.mark.parametrize(
    ("more", "k"),
    [({}, 2), ({"scoring_func": "sigmoid"}, 2), ({"num_expert_group": 1}, 2), ({"num_expert_group": 4}, 0),
     ({"scoring_func": "sqrtsoftplus"}, 0), ({"top_k": 8}, 0), ({"top_k": None}, 0)],
)  # fmt: skip
def test_how_many_are_taken(more: dict[str, object], k: int) -> None:
    assert taken({"top_k": 2, "global_num_experts": 8, "scoring_func": "softmax"} | more) == k


def test_what_lies_behind_a_router_that_nobody_saw() -> None:
    experts = {"top_k": 2, "global_num_experts": 8}
    attrs = {f"m.layers.{i}.mlp.experts.routed_experts": experts for i in (0, 1)} | {"m.layers.0.norm": {}}
    assert unknown_routers(attrs, []) == [tap for tap in attrs if "experts" in tap]
    unknown = unknown_routers(attrs, ["m.layers.0.mlp.gate"])
    assert unknown == ["m.layers.1.mlp.experts.routed_experts"]
    assert unknown_routers(attrs, [f"{tap}.quant_method" for tap in attrs]) == []
    taps = ["m.layers.1.mlp.gate", "m.layers.1.mlp", "m.layers.2.attn", "m.norm", "<root>", "m.embed_tokens"]
    assert [behind(tap, unknown) for tap in taps] == [False, True, True, True, True, False]
    assert not behind("<root>", [])
