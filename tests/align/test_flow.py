"""The order of the data flow, the tree of modules and the layers passed unseen, on small dumps written by hand."""

from types import SimpleNamespace

import pytest

from vllm_accprobe.align.data_flow import Layers, Tree, add_parameters, flow_order, gaps, mixes, unseen_taps
from vllm_accprobe.dump.schema import ROOT_TAP, Module, Skip
from vllm_accprobe.standards.limits import Standard


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
        ("l.self_attn", "MiniMaxText01LinearAttention", True),  # the last word decides
        ("l.linear_attn", "", True),
        ("l.self_attn", "SolarOpenAttention", True),
        ("l.mixer.norm", "MambaRMSNormGated", False),
        ("l", "Qwen2MoeDecoderLayer", True),  # experts are a part of it
        ("model", "Qwen3MoeModel", True),
        ("l.mlp", "Qwen2MoeSparseMoeBlock", False),
        ("l.mlp", "FusedMoEBlock", False),
        ("l.ln", "MeanVarianceNormLayer", False),
        ("l", "BailingMoeBlock", True),  # vLLM's classes of here on have an attention
        ("l", "MolmoDecoderNormAfterLayer", True),
        ("l", "MiMoMultiTokenPredictorLayer", True),
        ("l", "BertWithRopeBlock", True),
        ("tower", "Qwen3OmniMoeAudioEncoder", True),
        ("model", "PhiMoEForCausalLM", True),
        ("model", "BailingMoeV2ForCausalLM", True),
        ("resampler", "Resampler2_5", True),
        ("encoder", "Wav2Vec2EncoderStableLayerNorm", True),  # transformers'
        ("l.norm_attn_norm", "DbrxNormAttentionNorm", True),
        ("l", "RobertaPreLayerNormLayer", True),
        ("sampler", "Sampler", False),
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
    assert [tree.mixes_itself(t) for t in ("m.l.0.attn", "m.l.0", "m.l.0.mlp", ROOT_TAP, "x")] == [True, *[False] * 4]
    alone = {"l": "Qwen2MoeDecoderLayer", "l.mlp": "Qwen2MoeSparseMoeBlock", "l.attn": "KimiLinearAttention"}
    assert Tree.of(["l", "l.mlp"], alone).mixes_itself("l")  # its attention was not captured
    assert [Tree.of([*alone], alone).mixes_itself(t) for t in alone] == [False, False, True]
    assert list(tree.mixing) == inside_first  # in no set's order, so that measured.npz is the same at each run


def depths(layers, flow):
    return [len(layers.passed(key)) for key in flow]


def test_depth_counts_numbered_blocks():
    flow = keys("embed/output.0", "m.layers.0/input.x", "m.layers.0.mlp/output.0", "m.layers.1.mlp/output.0", "norm/o")
    assert depths(Layers(flow, []), flow) == [0, 1, 1, 2, 2]


def test_layers_that_nobody_saw_are_passed_by_what_comes_behind_them():
    taps = [ROOT_TAP, "m", "m.embed", *(f"m.layers.{i}" for i in range(4)), "m.norm", "logits_processor"]
    modules = [Module(tap, "X", i) for i, tap in enumerate(taps)]
    skips = [Skip("m", "compiled by torch.compile, which calls past its own tap")]
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
