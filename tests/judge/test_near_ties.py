"""Near ties of a router and of tokens: rows sent elsewhere, margins of experts, flips."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_accprobe.align.data_flow import is_choice, is_logits, is_weight
from vllm_accprobe.align.tokens import Flip, RowSet, make_key
from vllm_accprobe.comparison.notes import choices
from vllm_accprobe.judge.near_ties import (
    MASKED,
    NEAR_TIE,
    PROCESSED,
    RANDOM,
    ROWS_AFTER,
    SAMPLED,
    UNKNOWN,
    UPSTREAM,
    Best,
    Choices,
    Chooser,
    Masking,
    RequestedRow,
    Routing,
    behind,
    choices_first,
    golden_leaves,
    in_front_of,
    judge_flip,
    margins,
    taken,
    undecided,
    unknown_routers,
)
from vllm_accprobe.judge.tensor_errors import TensorErrors
from vllm_accprobe.standards.limits import Standard

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
    tie = undecided(np.array([[1.0, 2.0, 0.5]]), np.array([[1.0, 2.0, 1.0]]), 2)
    np.testing.assert_array_equal(tie, [[0.5, 0.0, 1.0]])  # exact on one side: it leaves the choice open


def test_only_rows_whose_logits_are_near_are_left_out() -> None:
    keys, found = np.arange(6), undecided(GOLDEN, MINE, 2)
    near = np.array([False, True, True, False, False, True])
    left = Routing().undecided(keys, found, 2.0**-8, near)
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


def best(logits, ids):
    return Best(np.array(logits, np.float64), np.array(ids))


@pytest.mark.parametrize(
    ("golden", "mine", "tokens", "agree", "why"),
    [
        (best([2.0, 1.9], [5, 6]), best([2.0, 1.9], [6, 5]), (5, 6), True, NEAR_TIE),
        (best([2.0, 1.9], [5, 6]), best([9.0, 1.9], [6, 5]), (5, 6), False, UPSTREAM),
        (best([2.0, 1.0], [5, 6]), best([2.0, 1.0], [5, 6]), (5, 6), True, SAMPLED),
        (best([2.0, 2.0], [5, 6]), best([2.0, 2.0], [5, 6]), (5, 6), True, NEAR_TIE),  # an exact tie, either may win
        (best([2.0, 1.0], [5, 6]), best([2.0, 1.0], [5, 6]), (6, 5), True, RANDOM),
        (best([3.0, 1.0], [7, 4]), best([np.nan, np.nan], [0, 1]), (7, 0), None, UPSTREAM),  # in front of the sampler
        (best([np.nan, np.nan], [0, 1]), best([3.0, 1.0], [7, 4]), (0, 7), None, UPSTREAM),
        (None, best([2.0, 1.0], [5, 6]), (5, 6), None, UNKNOWN),
        (None, None, (5, 6), False, UPSTREAM),
    ],
)
def test_whose_fault_a_flip_is(golden, mine, tokens, agree, why):
    assert (best([2.5, 1.0], [1, 2]).margin, best([2.5], [1]).margin) == (1.5, None)
    assert judge_flip(golden, mine, Flip(0, 1, 3, 2, *tokens), agree) == why


GRAMMAR = ("a grammar",)
NONE_LEFT = best([1.5, 0.5], [7, 8])
"""A row whose best logits, tokens 5 and 6, are forbidden."""


@pytest.mark.parametrize(
    ("masks", "tokens", "why"),
    [
        # 2.0 and 1.0 for the tokens 5 and 6 on both sides; what was left where something masked
        ((Masking(()), Masking(GRAMMAR, None, NONE_LEFT)), (5, 7), MASKED),
        ((Masking(GRAMMAR, None, NONE_LEFT), Masking(())), (7, 5), MASKED),
        ((Masking(None), Masking(GRAMMAR, None, NONE_LEFT)), (5, 7), MASKED),  # an older golden says nothing
        ((Masking(()), Masking(GRAMMAR, None, NONE_LEFT)), (5, 8), SAMPLED),  # not the best of what was left
        ((Masking(()), Masking(GRAMMAR, None, NONE_LEFT)), (6, 7), RANDOM),
        ((Masking(()), Masking(GRAMMAR)), (5, 7), MASKED),  # drafts: what was left is not recorded
        ((Masking(GRAMMAR), Masking(GRAMMAR)), (7, 8), UNKNOWN),
        ((Masking(GRAMMAR, "a", NONE_LEFT), Masking(GRAMMAR, "a", NONE_LEFT)), (7, 8), SAMPLED),
        ((Masking(GRAMMAR, "a", NONE_LEFT), Masking(GRAMMAR, "a", best([0.5, 0.1], [8, 9]))), (7, 8), SAMPLED),
        ((Masking(GRAMMAR, "a", NONE_LEFT), Masking(GRAMMAR, "b", best([0.5, 0.1], [8, 9]))), (7, 8), MASKED),
        ((Masking(GRAMMAR, "a", best([1.5, 1.497], [7, 8])), Masking(GRAMMAR, "a", best([1.5, 1.498], [8, 7]))),
         (7, 8), NEAR_TIE),
        ((Masking(("penalties",), None, best([1.5, 0.2], [7, 8])),
          Masking(("penalties",), None, best([1.5, 0.2], [8, 7]))), (7, 8), MASKED),  # penalties of another size
        ((Masking(()), Masking(())), (5, 6), SAMPLED),
    ],
)  # fmt: skip
def test_whose_fault_a_flip_of_masked_logits_is(masks, tokens, why):
    plain = best([2.0, 1.0], [5, 6])
    assert judge_flip(plain, plain, Flip(0, 1, 3, 2, *tokens), True, masks) == why
    assert judge_flip(plain, plain, Flip(0, 1, 3, 2, *tokens), False, masks) == UPSTREAM


@pytest.mark.parametrize(
    ("untouched", "words"),
    [((False, True), "mine's are as the model gave them"), ((False, False), "golden's processors left others"),
     ((True, True), "golden's processors left others"), ((None, True), "golden's processors left others")],
)  # fmt: skip
def test_a_mask_that_was_left_out_is_said(untouched: tuple[bool | None, bool | None], words: str) -> None:
    row = RequestedRow(same_parameters=True, same_best=True, same_left=False, untouched=untouched)
    assert row.verdict() == PROCESSED
    assert words in row.sentence(PROCESSED)[1]


def test_a_choice_is_a_near_tie_only_if_what_the_router_read_differs_within_its_limit():
    rows = np.array([make_key(0, p) for p in range(4)])
    err = np.array([0.01, 0.5, 0.0, 0.02])  # within the limit, beyond it, equal to the bit, within
    router = TensorErrors("m.l.0.mlp.gate", "output.0", 0, "output", 1, 0.0156, RowSet(rows), rows, err, allowed=0.03)
    unit = SimpleNamespace(key=("m.l.0.mlp.experts.quant_method", "input.topk_ids", 0), order=5)
    rerouted = Routing()
    ties = rerouted.near_ties(rows, unit, [router])
    assert ties.tolist() == [True, False, False, True]
    rerouted.add(rows[[3]])
    later = np.array([make_key(0, 2), make_key(0, 3), make_key(0, 9), make_key(1, 9)])
    assert rerouted.after(later).tolist() == [False, True, True, False]
    assert len(rerouted.left[ROWS_AFTER]) == 2


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
    assert np.isnan(margins(*TOOK, LOGITS[:, :0], MOVED[:, :0])).all()
    for shared in (4, -1):  # one that both took for all rows
        both = [np.pad(t, ((0, 0), (0, 1)), constant_values=shared) for t in TOOK]
        np.testing.assert_array_equal(margins(*both, LOGITS, MOVED), found)


def test_only_a_near_tie_that_margins_show_is_excused():
    rows = np.array([make_key(i, 3) for i in range(6)])
    near = np.full(6, 0.01)
    near[4] = 0.5  # these logits are beyond their limit: an operator before is wrong
    router = TensorErrors("m.l.0.mlp.gate", "output.0", 0, "output", 1, 0.0156, RowSet(rows), rows, near, allowed=0.03)
    unit = SimpleNamespace(key=("m.l.0.mlp.experts.quant_method", "input.topk_ids", 0), order=5)
    rerouted = Routing()
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
    excused, wrong = Routing().judge(rows, None, 2.0**-8, unit, [router])
    assert not excused.any()
    assert not wrong.any()


@pytest.mark.parametrize(("golden", "mine", "ruled"), [(0, 3, True), (3, 4, False), (4, 3, False), (1, 20, True)])
def test_a_rule_that_golden_breaks_as_often_is_not_mines_to_keep(golden, mine, ruled):
    """Experts are chosen by a bias that no dump has: either side leaves a better expert in as many rows. Mine leaves
    none that is better by far more than any that golden leaves."""
    rows = np.array([[-2.0, 2.0, 2.0]] * golden + [[2.0, -2.0, 2.0]] * (mine - 1) + [[9.0, -9.0, 9.0], [np.nan] * 3])
    leaves = golden_leaves([rows[:2], rows[2:]], 2.0**-8)
    assert leaves == (0.0 if ruled else 6.0)
    found = Choices.of(rows, len(rows), 2.0**-8, leaves)
    assert (int(found.wrong.sum()), int(found.unruled.sum())) == ((mine, golden) if ruled else (1, golden + mine - 1))
    keys = np.array([make_key(i, 3) for i in range(len(rows))])
    unit = SimpleNamespace(key=("m.l.0.mlp.experts.quant_method", "input.topk_ids", 0), order=5)
    _, wrong = Routing().judge(keys, rows, 2.0**-8, unit, [], leaves)
    assert int(wrong.sum()) == (mine if ruled else 1)


def test_equal_logits_may_be_taken_in_any_order():
    logits = np.array([[1.0, 2.0, 1.0]])
    found = margins(np.array([[1, 0]]), np.array([[1, 2]]), logits, logits)
    said = Choices.of(found, 1, 2.0**-8)
    assert (said.tie.tolist(), said.wrong.tolist(), said.unruled.tolist()) == ([True], [False], [False])


@pytest.mark.parametrize(
    ("routed", "after"),
    [
        # requests 0, of which 0 to 5 were computed, and 1, of which 3 to 5 were: 0 to 2 lay in the cache
        ([(0, p) for p in range(6)] + [(1, p) for p in (3, 4, 5)], {}),
        ([(0, 0), (0, 1), (0, 2), (0, 5), (1, 3), (1, 4), (1, 5)], {0: 3}),
        ([(0, p) for p in (0, 1, 3, 4, 5)] + [(1, p) for p in (3, 5)], {0: 2, 1: 2}),
        ([], {0: 0, 1: 0}),
    ],
)  # fmt: skip
def test_rows_that_read_earlier_ones_whose_experts_nobody_saw(routed, after):
    keys = np.array([make_key(0, p) for p in range(6)] + [make_key(1, p) for p in (3, 4, 5)])
    unseen = Routing(computed=keys)
    unseen.compared(np.array([make_key(*at) for at in routed], np.int64))
    assert unseen.lost == after
    assert not unseen.behind(keys).any()  # nothing has read them yet
    unseen.mixed()
    others = np.append(keys, make_key(7, 9))
    expected = [p > after.get(who, 99) for who, p in [*((0, p) for p in range(6)), (1, 3), (1, 4), (1, 5), (7, 9)]]
    assert unseen.behind(others).tolist() == expected
    unseen.compared(keys)
    assert unseen.lost == after


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
    router = "DeepseekV3TopkRouter", "Qwen3MoeTopKRouter", "Linear"  # of transformers: logits, weights, experts
    for found in ([is_weight("output.1", c) for c in router], [is_choice("output.2", c) for c in router]):
        assert found == [True, True, False]
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
