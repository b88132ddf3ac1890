"""Limits, data flow, flips and routing: small cases worked out by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.align.tokens import Flip, make_key
from vllm_accprobe.comparison.verdict.remarks import remarks
from vllm_accprobe.dump.schema import ROOT_TAP, Module, Skip
from vllm_accprobe.judge.flips import MASKED, NEAR_TIE, RANDOM, SAMPLED, UNKNOWN, UPSTREAM, Best, Masking, judge_flip
from vllm_accprobe.judge.floor import flow_unit, is_exact, is_mask, unit
from vllm_accprobe.judge.flow import Tree, add_parameters, flow_order, mixes
from vllm_accprobe.judge.origins.row_errors import Trace
from vllm_accprobe.judge.origins.unseen import Layers, gaps, unseen_taps
from vllm_accprobe.judge.routing import (
    Choices,
    Rerouted,
    choices_first,
    in_front_of,
    is_choice,
    is_logits,
    is_weight,
    margins,
)
from vllm_accprobe.judge.verdict import ELEMENT, NONFINITE, RATIO, ROW, row_errors
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards import PAIRS, find
from vllm_accprobe.standards.limits import Standard


def keys(*names):
    return [(n.partition("/")[0], n.partition("/")[2], 0) for n in names]


def test_units_are_half_a_step_of_the_dtype():
    assert (unit("bfloat16"), unit("float16"), unit("int64")) == (2.0**-8, 2.0**-11, 0.0)
    assert flow_unit(["float32", "bfloat16", "float8_e4m3fn", "int64"]) == 2.0**-8
    assert is_exact("int64", "int64")
    assert not is_exact("float32", "bfloat16")


def test_limits_grow_with_the_root_of_the_depth():
    s = Standard()
    assert s.created_limits(2.0**-8, 4096).row == 4 / 256
    assert s.total_limits(2.0**-8, 4096, 3).row == 8 / 256 * 2
    assert s.created_limits(2.0**-8, 256).ratio == 4 / 256 * (0.25 + 4 / 16)
    assert find("strict", PAIRS).limits.created_limits(2.0**-8, 4096).ratio == 1 / 256 * (0.25 + 4 / 64)
    assert s.created_limits(2.0**-8, 4).ratio == 4 / 256


def test_a_wide_row_may_be_truncated_twice_but_not_by_the_strict_standard():
    """As vLLM's AVX2 attention does it: its probabilities, and what it gives out."""
    random = np.random.default_rng(0)
    unit, width = 2.0**-8, 8192
    g = random.standard_normal((50, width)).astype(np.float32)
    mine = g
    for _ in range(2):
        other = random.uniform(1.0, 2.0, g.shape).astype(np.float32)  # so that what is truncated twice changes twice
        mine = ((mine * other).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) / other
    table = definition.row_table(g, mine)
    for name, allowed in (("accprobe", True), ("strict", False)):
        rules = find(name, PAIRS).limits
        errors = row_errors(table, 0.0, width, rules)
        assert (errors.ratio < 1.0).all()
        assert (errors.err <= rules.created_limits(unit, width).row).all() == allowed, name


def test_a_row_fails_by_the_measure_that_shows_the_fault():
    g = np.random.default_rng(0).standard_normal((4, 512))
    m = g * 1.02
    m[1] = g[1] + 0.02 * np.random.default_rng(1).standard_normal(512)
    m[2] = g[2]
    m[2, 5] += 1.0
    m[3, 0] = np.nan
    errors = row_errors(definition.row_table(g, m), 0.0, 512, Standard())
    assert errors.measure.tolist() == [RATIO, ROW, ELEMENT, NONFINITE]
    assert errors.err[0] == pytest.approx(0.02 / (0.25 + 4 / 512**0.5))
    assert np.isinf(errors.err[3])


def test_a_tiny_row_is_measured_against_its_neighbours():
    g = np.ones((2, 64)) * [[1.0], [1e-6]]
    errors = row_errors(definition.row_table(g, g + 1e-6), 0.8, 64, Standard())
    # |d| = 8e-6 against the floor 0.8 is 1e-5; the norm ratio's limit is 0.75 of the row's at this width
    assert errors.err[1] == pytest.approx(1e-5 / 0.75)
    assert row_errors(definition.row_table(g, g + 1e-6), 0.0, 64, Standard()).err[1] >= 1.0


def test_taps_that_come_later_are_put_where_they_belong():
    text = keys("m/input.ids", "m.l.0/input.x", "m.l.0/output.0", "m/output.0")
    steps = [(0, 0, i, k) for i, k in enumerate(text)]
    later = keys("v/input.x", "v/output.0") + text + keys("head/output.0")
    steps += [(3, 0, i, k) for i, k in enumerate(later)]
    assert flow_order(steps) == later


def test_pipeline_stages_follow_each_other():
    first = keys("m/input.ids", "m.l.0/output.0", "m/output.0")
    second = keys("m/input.ids", "m.l.1/output.0", "m/output.0")
    steps = [(0, 0, i, k) for i, k in enumerate(first)] + [(0, 1, i, k) for i, k in enumerate(second)]
    assert [k[0] for k in flow_order(steps)] == ["m", "m.l.0", "m.l.1", "m"]


def test_parameters_stand_before_their_module_or_behind_its_neighbour():
    ran = keys("m.norm/input.x", "m.norm/output.0", "sampler/output.token")
    modules = [Module("m.norm", "RMSNorm", 0), Module("lm_head", "ParallelLMHead", 1)]
    got = add_parameters(ran, [("lm_head", "param.weight"), ("m.norm", "param.weight")], modules)
    assert got == keys(
        "m.norm/param.weight", "m.norm/input.x", "m.norm/output.0", "lm_head/param.weight", "sampler/output.token"
    )  # fmt: skip


def depths(layers, flow):
    return [len(layers.passed(key)) for key in flow]


def test_depth_counts_numbered_blocks():
    flow = keys("embed/output.0", "m.layers.0/input.x", "m.layers.0.mlp/output.0", "m.layers.1.mlp/output.0", "norm/o")
    assert depths(Layers(flow, []), flow) == [0, 1, 1, 2, 2]


def test_layers_that_nobody_saw_are_passed_by_what_comes_behind_them():
    taps = [ROOT_TAP, "m", "m.embed", *(f"m.layers.{i}" for i in range(4)), "m.norm", "logits_processor"]
    modules = [Module(tap, "X", i) for i, tap in enumerate(taps)]
    skips = [Skip("m", "compiled by torch.compile: what is inside cannot be seen")]
    skips += [Skip(f"m.layers.{i}", "never called in a captured step") for i in range(4)]
    skips += [Skip("visual.blocks.0", "never called in a captured step")]  # and not inside of what is compiled
    dump = SimpleNamespace(skips=skips, modules={0: modules})
    unseen = unseen_taps(dump)
    assert unseen == ["m", "m.embed", *(f"m.layers.{i}" for i in range(4)), "m.norm"]

    compiled = keys(f"{ROOT_TAP}/input.ids", f"{ROOT_TAP}/output.0", "logits_processor/input.x", "sampler/output.token")
    layers = Layers(compiled, modules, unseen)
    assert depths(layers, compiled) == [0, 4, 4, 4]
    passed = [layers.passed(key) for key in compiled]
    assert gaps(passed, [key[0] for key in compiled], [True] * 4) == [0, 4, 0, 0]

    some = keys(
        "m.embed/output.0", "m.layers.2/input.x", "m.layers.2/output.0", "m.norm/param.weight", "m.norm/input.x"
    )
    layers = Layers(some, modules, [t for t in unseen if t not in {key[0] for key in some}])
    assert depths(layers, some) == [0, 3, 3, 3, 4]
    passed = [layers.passed(key) for key in some]
    assert gaps(passed, [key[0] for key in some], [True, True, True, False, True]) == [0, 2, 0, 0, 1]


def test_what_may_be_added_in_a_gap_is_what_may_pile_up_in_its_layers():
    s, unit = Standard(), 2.0**-8
    assert s.gap_limits(unit, 256, 0) == s.created_limits(unit, 256)
    assert s.gap_limits(unit, 256, 3).row == s.total_limits(unit, 256, 3).row == 16 * unit
    assert s.gap_limits(unit, 256, 3).ratio == pytest.approx(4 * s.created_limits(unit, 256).ratio)


@pytest.mark.parametrize(
    ("tap", "cls", "expected"),
    [
        ("l.attn", "Attention", True),
        ("l.self_attn", "Qwen2Attention", True),
        ("l.post_attention_layernorm", "RMSNorm", False),
        ("l.self_attn.qkv_proj", "QKVParallelLinear", False),
        ("l.mixer", "MambaMixer2", True),
        ("l.mlp.experts", "FusedMoE", False),
        ("l.act_fn", "SiluAndMul", False),
        ("l.thing", "Something", True),  # the unknown is taken to mix
        ("l.self_attn", "", True),
    ],
)
def test_which_operators_mix_rows(tap, cls, expected):
    assert mixes(tap, cls) is expected


def test_a_parent_mixes_if_a_child_does_and_what_runs_inside_is_inside():
    taps = [ROOT_TAP, "m", "m.l.0", "m.l.0.attn", "m.l.0.mlp", "logits_processor", "lm_head"]
    classes = {"m.l.0.attn": "Attention", "m.l.0.mlp": "MLP", "logits_processor": "LogitsProcessor", "m.l.0": "MLP"}
    tree = Tree.of(taps, classes | {"lm_head": "Linear"}, {"logits_processor": (5, 9), "lm_head": (6, 8)})
    assert tree.parent["lm_head"] == "logits_processor"
    assert (tree.parent["m.l.0"], tree.parent["m"], tree.parent[ROOT_TAP]) == ("m", ROOT_TAP, None)
    assert tree.above("m.l.0.attn") == ["m.l.0", "m", ROOT_TAP]
    assert [tree.mixing[t] for t in ("m.l.0", "m.l.0.mlp", "logits_processor", ROOT_TAP)] == [True, False, False, True]
    inside_first = ["m.l.0.attn", "m.l.0.mlp", "m.l.0", "lm_head", "m", "logits_processor", ROOT_TAP]
    assert list(tree.mixing) == inside_first  # in no set's order, so that measured.npz is the same at each run


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
        (None, best([2.0, 1.0], [5, 6]), (5, 6), None, UNKNOWN),
        (None, None, (5, 6), False, UPSTREAM),
    ],
)
def test_whose_fault_a_flip_is(golden, mine, tokens, agree, why):
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


def test_margin():
    assert best([2.5, 1.0], [1, 2]).margin == 1.5
    assert best([2.5], [1]).margin is None


def test_a_choice_is_a_near_tie_only_if_what_the_router_read_differs_within_its_limit():
    rows = np.array([make_key(0, p) for p in range(4)])
    err = np.array([0.01, 0.5, 0.0, 0.02])  # within the limit, beyond it, equal to the bit, within
    router = Trace("m.l.0.mlp.gate", "output.0", 0, "output", 1, 0.0156, RowSet(rows), rows, err, allowed=0.03)
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
    router = Trace("m.l.0.mlp.gate", "output.0", 0, "output", 1, 0.0156, RowSet(rows), rows, near, allowed=0.03)
    unit = SimpleNamespace(key=("m.l.0.mlp.experts.quant_method", "input.topk_ids", 0), order=5)
    rerouted = Rerouted()
    excused, wrong = rerouted.judge(rows, margins(*TOOK, LOGITS, MOVED), 2.0**-8, unit, [router])
    assert excused.tolist() == [True, False, False, True, False, False]
    assert wrong.tolist() == [False, False, True, False, False, False]
    assert (rerouted.wrong, rerouted.unruled, rerouted.unknown) == (1, 1, 2)
    assert remarks([], rerouted) == [
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


def test_masks_hold_the_lowest_number_of_their_dtype():
    roles = ("input.attention_mask", "input.causal_mask", "input.hidden_states", "param.mask_token")
    assert [is_mask(r) for r in roles] == [True, True, False, False]
