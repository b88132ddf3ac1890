"""The order of the data flow and the tree of modules, on small dumps written by hand."""

import pytest

from vllm_accprobe.align.data_flow import Tree, add_parameters, flow_order, mixes
from vllm_accprobe.dump.schema import ROOT_TAP, Module


def keys(*names):
    return [(n.partition("/")[0], n.partition("/")[2], 0) for n in names]


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
