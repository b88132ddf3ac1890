"""Rows that a router sent elsewhere: near ties, and choices that are wrong."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_accprobe.align.data_flow import is_choice, is_logits, is_weight
from vllm_accprobe.align.tokens import RowSet, make_key
from vllm_accprobe.comparison.notes import choices
from vllm_accprobe.judge.near_ties import Choices, Chooser, Rerouted, choices_first, in_front_of, margins
from vllm_accprobe.judge.tensor_errors import TensorErrors
from vllm_accprobe.standards.limits import Standard


def test_a_choice_is_a_near_tie_only_if_what_the_router_read_differs_within_its_limit():
    rows = np.array([make_key(0, p) for p in range(4)])
    err = np.array([0.01, 0.5, 0.0, 0.02])  # within the limit, beyond it, equal to the bit, within
    router = TensorErrors("m.l.0.mlp.gate", "output.0", 0, "output", 1, 0.0156, RowSet(rows), rows, err, allowed=0.03)
    unit = SimpleNamespace(key=("m.l.0.mlp.experts.quant_method", "input.topk_ids", 0), order=5)
    rerouted = Rerouted()
    ties = rerouted.near_ties(rows, unit, [router])
    assert ties.tolist() == [True, False, False, True]
    rerouted.add(rows[[3]])
    later = np.array([make_key(0, 2), make_key(0, 3), make_key(0, 9), make_key(1, 9)])
    assert rerouted.after(later).tolist() == [False, True, True, False]
    assert rerouted.rows == 2


LOGITS = np.array([[3.0, 2.0, 1.99, 0.0]] * 6)
"""Of golden; experts 1 and 2 are nearly equal."""
MOVED = np.array([
    [3.0, 1.99, 2.0, 0.0],  # the near tie went the other way
    [3.0, 2.0, 1.99, 0.0],
    [3.0, 2.0, 1.99, 0.0],
    [3.0, 2.0, 1.99, 0.0],
    [0.0, 3.0, 1.0, 2.0],  # far from golden's, and chosen by
    [3.0, np.nan, 1.99, 0.0],
])  # fmt: skip
TOOK = np.array([[0, 1]] * 3 + [[0, 3]] + [[0, 1]] * 2), np.array([[0, 2], [1, 0], [0, 3], [0, 1], [3, 1], [0, 2]])
"""What both took: a near tie; the same; mine a clearly lower one; golden; by other logits; by one that is NaN."""


def test_margins_by_hand():
    found = margins(TOOK[0], TOOK[1], LOGITS, MOVED)
    same = [np.nan] * 3
    expected = [[0.01, 0.01, 2.0], same, [2.0, -2.0, 2.0], [-2.0, 2.0, 2.0], [3.0, 2.0, 3.0], same]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert np.isnan(margins(TOOK[0], TOOK[1] + 4, LOGITS, MOVED)).all()  # experts without a logit
    for shared in (4, -1):  # one that both took for all rows
        both = [np.pad(t, ((0, 0), (0, 1)), constant_values=shared) for t in TOOK]
        np.testing.assert_array_equal(margins(*both, LOGITS, MOVED), found)


def test_only_a_near_tie_that_margins_show_is_excused():
    rows = np.array([make_key(i, 3) for i in range(6)])
    near = np.full(6, 0.01)
    near[4] = 0.5  # these logits are beyond their limit: an operator before is wrong
    router = TensorErrors("m.l.0.mlp.gate", "output.0", 0, "output", 1, 0.0156, RowSet(rows), rows, near, allowed=0.03)
    unit = SimpleNamespace(key=("m.l.0.mlp.experts.quant_method", "input.topk_ids", 0), order=5)
    rerouted = Rerouted()
    excused, wrong = rerouted.judge(rows, margins(*TOOK, LOGITS, MOVED), 2.0**-8, unit, [router])
    assert excused.tolist() == [True, False, False, True, False, False]
    assert wrong.tolist() == [False, False, True, False, False, False]
    assert (rerouted.wrong, rerouted.unruled, rerouted.unknown) == (1, 1, 2)
    assert choices(rerouted) == [
        "wrong experts are chosen in 1 row: mine leaves an expert to which its own router gives a clearly higher logit",
        "1 row went to other experts and are not judged from there on: golden itself does not take its highest logits "
        "(groups, a bias), so no margin shows a near tie",
        "2 rows went to other experts, which counts as an error: without the router's logits in both dumps nothing "
        "shows a near tie; capture the router (gate), too",
    ]
    excused, wrong = Rerouted().judge(rows, None, 2.0**-8, unit, [router])
    assert not excused.any()
    assert not wrong.any()


def test_equal_logits_may_be_taken_in_any_order():
    logits = np.array([[1.0, 2.0, 1.0]])
    found = margins(np.array([[1, 0]]), np.array([[1, 2]]), logits, logits)
    said = Choices.of(found, 1, 2.0**-8)
    assert (said.tie.tolist(), said.wrong.tolist(), said.unruled.tolist()) == ([True], [False], [False])


def test_which_logits_belong_to_which_choice():
    vllm, mixtral = "m.l.1.mlp.experts.routed_experts.quant_method", "m.l.1.moe.experts.routed_experts.quant_method"
    logits = [("m.l.1.mlp.gate", "output.0", "GateLinear"), ("m.l.1.mlp.experts", "input.router_logits", "MoERunner")]
    assert all(is_logits(*one) and in_front_of(one[0], vllm) for one in logits)
    assert not any(in_front_of(one[0], mixtral) for one in logits)
    assert is_logits("l.router", "output.0", "Qwen3MoeTopKRouter")
    assert in_front_of("l.router", "l.router")
    others = [
        ("m.l.1.mlp.shared_expert_gate", "output.0"),
        ("m.l.1.mlp.gate", "input.x"),
        ("m.l.1.gate_up", "output.0"),
    ]
    assert not any(is_logits(*one, "Linear") for one in others)


def test_roles_of_routing():
    names = ("topk_ids", "top_k_indices", "top_k_index", "expert_ids", "input_ids")
    assert [is_choice(f"input.{r}", "Experts") for r in names] == [True, True, True, True, False]
    assert is_weight("input.topk_weights", "Experts")
    assert not is_weight("param.weight", "Linear")


def test_outputs_of_a_router_of_transformers_are_logits_weights_and_experts():
    router = "DeepseekV3TopkRouter", "Qwen3MoeTopKRouter", "Linear"
    assert [is_weight("output.1", c) for c in router] == [True, True, False]
    assert [is_choice("output.2", c) for c in router] == [True, True, False]
    assert not any(is_weight("output.0", c) or is_choice("output.0", c) for c in router)


def test_chosen_experts_are_judged_before_their_weights():
    names = ("l.gate/output.0", "l.gate/output.1", "l.gate/output.2", "l.experts/input.topk_weights", "norm/input.x")
    units = [SimpleNamespace(key=(*n.split("/"), 0), cls="TopkRouter" if "gate" in n else "Experts") for n in names]
    order = [u.key[0] + "/" + u.key[1] for u in choices_first(units)]
    assert order == [names[i] for i in (0, 2, 1, 3, 4)]
    assert math.isclose(Standard().floor_share(1), 1.0)


def test_margins_of_corrected_scores_and_groups() -> None:
    """Experts 2 and 3 have the higher logits, experts 0 and 1 the better corrected scores."""
    logits = np.array([[0.0, 0.1, 1.0, 2.0]])
    bias = np.array([3.0, 3.0, 0.0, 0.0])
    took = np.array([[0, 1]]), np.array([[2, 3]])
    assert margins(took[0], took[1], logits, logits)[0, 0] < 0  # by logits golden was wrong
    by = Chooser("sigmoid")
    assert by.fits(4, bias)
    assert not by.fits(8, bias)
    found = margins(*took, logits, logits, by, (bias, bias))
    sigmoid = 1 / (1 + np.exp(-logits[0]))
    assert found[0, 0] == pytest.approx(3 + sigmoid[0] - sigmoid[3])
    assert found[0, 1] == pytest.approx(sigmoid[2] - 3 - sigmoid[1])
    wrong = Choices.of(found, 1, 2.0**-8)
    assert (wrong.wrong.tolist(), wrong.unruled.tolist(), wrong.tie.tolist()) == ([True], [False], [False])
    # two groups of two, the one with the larger score stays: how far mine's is behind it decides
    groups = Chooser("softmax", 2, 1)
    found = margins(np.array([[3]]), np.array([[0]]), logits, logits, groups)
    softmax = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert found[0, :2].tolist() == pytest.approx([softmax[3] - softmax[1], -(softmax[3] - softmax[1])])
