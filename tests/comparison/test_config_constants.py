"""Modules that were built otherwise than config.json asks are found by key; right ones are silent."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_accprobe.comparison.config_constants import (
    BuiltCheck,
    built_notes,
    built_otherwise,
    check_built,
    check_structure,
    config_of,
    other_code,
    recoded,
    with_built,
)
from vllm_accprobe.dump.schema import ROOT_TAP, Module

GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64, "sliding_window": 128, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 2, "intermediate_size": 256,
    "vocab_size": 512,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
    "num_key_value_heads": 2, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_act": "silu", "rope_theta": 1e6, "rms_norm_eps": 1e-6,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 128, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "rope_theta": 10000,
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "num_experts_per_tok": 4, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
QWEN_VL = {
    "model_type": "qwen2_5_vl", "hidden_size": 128, "num_attention_heads": 4, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "vision_config": {"hidden_act": "quick_gelu"},
}  # fmt: skip


def gemma2() -> dict[str, Module]:
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "model.embed_tokens": ("VocabParallelEmbedding", {"org_vocab_size": 512, "embedding_dim": 128})
    }
    for i in range(2):
        p = f"model.layers.{i}"
        found[p] = "Gemma2DecoderLayer", {}
        found[f"{p}.self_attn.qkv_proj"] = (
            "QKVParallelLinear",
            {"total_num_heads": 4, "total_num_kv_heads": 2, "head_size": 32},
        )
        found[f"{p}.self_attn.rotary_emb"] = (
            "RotaryEmbedding",
            {"base": 10000.0, "rotary_dim": 32, "is_neox_style": True, "head_size": 32},
        )
        window = 128 if i == 0 else -1
        found[f"{p}.self_attn.attn"] = (
            "Attention",
            {"impl.scale": 0.125, "impl.logits_soft_cap": 50.0, "impl.sliding_window": window},
        )
        found[f"{p}.mlp.act_fn"] = "GeluAndMul", {"approximate": "tanh"}
        found[f"{p}.mlp.down_proj"] = "RowParallelLinear", {"input_size": 256}
        for n in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            found[f"{p}.{n}"] = "GemmaRMSNorm", {"variance_epsilon": 1e-6}
    found["model.norm"] = "GemmaRMSNorm", {"variance_epsilon": 1e-6}
    found["logits_processor"] = "LogitsProcessor", {"scale": 1.0, "soft_cap": 30.0}
    return {t: Module(t, cls, i, attrs) for i, (t, (cls, attrs)) in enumerate(found.items())}


def built(config: Mapping[str, Any], *modules: tuple[str, str, dict[str, Any]]) -> BuiltCheck:
    return check_built([Module(t, c, i, a) for i, (t, c, a) in enumerate(modules)], config)


def spoilt(tap: str, cls: str = "", **attrs: Any) -> BuiltCheck:
    modules = gemma2()
    old = modules[tap]
    modules[tap] = Module(
        tap, cls or old.cls, old.index, {**old.attrs, **{k.replace("__", "."): v for k, v in attrs.items()}}
    )
    return check_built(modules.values(), GEMMA2)


def test_a_model_as_config_json_asks_is_silent() -> None:
    modules = list(gemma2().values())
    found = check_built(modules, GEMMA2)
    params = {("model.embed_tokens", "weight"): "1", **{(m.tap, "weight"): m.tap for m in modules if "proj" in m.tap}}
    check_structure(modules, GEMMA2, params, True, found)
    assert not found.mismatches
    assert not found.unchecked
    assert len(found.checked) >= 16
    assert found.corrections() == {}


ATTN, NORM, ROPE = (
    "model.layers.0.self_attn.attn",
    "model.layers.1.input_layernorm",
    "model.layers.0.self_attn.rotary_emb",
)
PLANTED = [
    (NORM, {"variance_epsilon": 1e-5}, "rms_norm_eps", "variance_epsilon is 1e-05, config.json asks for 1e-06"),
    (ROPE, {"base": 1e6}, "rope_theta", "base is 1000000, config.json asks for 10000"),
    (ROPE, {"rotary_dim": 16}, "no partial_rotary_factor", "rotary_dim is 16, config.json asks for 32"),
    (ROPE, {"is_neox_style": False}, "model_type", "is_neox_style is False, config.json asks for True"),
    (ATTN, {"impl__sliding_window": -1}, "sliding_window", "impl.sliding_window is none, config.json asks for 128"),
    (ATTN, {"impl__sliding_window": [128, 0]}, "sliding_window", "is 129, config.json asks for 128"),
    (ATTN, {"impl__logits_soft_cap": 0}, "attn_logit_softcapping", "is 0, config.json asks for 50"),
    (ATTN, {"impl__scale": 32**-0.5}, "query_pre_attn_scalar", "is 0.176776695, config.json asks for 0.125"),
    ("logits_processor", {"soft_cap": 0.0}, "final_logit_softcapping", "soft_cap is 0, config.json asks for 30"),
    ("model.layers.0.mlp.act_fn", {"approximate": "none"}, "hidden_activation", "config.json asks for gelu_tanh"),
    ("model.layers.0.self_attn.qkv_proj", {"total_num_kv_heads": 4}, "num_key_value_heads", "config.json asks for 2"),
]  # fmt: skip


@pytest.mark.parametrize(("tap", "attrs", "key", "says"), PLANTED)
def test_a_constant_that_config_json_does_not_ask_for(tap: str, attrs: dict[str, Any], key: str, says: str) -> None:
    (one,) = spoilt(tap, **attrs).mismatches
    assert (one.taps, one.key) == ((tap,), key)
    assert says in one.says
    assert one.cause["family"] == "setting"


def test_classes() -> None:
    (norm,) = spoilt(NORM, "RMSNorm").mismatches
    assert "class is RMSNorm, config.json asks for GemmaRMSNorm" in norm.says
    rope = built(
        LLAMA,
        (
            "model.layers.0.self_attn.rotary_emb",
            "RotaryEmbedding",
            {"base": 500000.0, "head_size": 32, "rotary_dim": 32},
        ),
    )
    assert [m.says for m in rope.mismatches] == [
        "model.layers.0.self_attn.rotary_emb (RotaryEmbedding): class is RotaryEmbedding, config.json asks for "
        "Llama3RotaryEmbedding (rope_parameters)"
    ]


LLAMA3 = {"base": 500000.0, "rotary_dim": 32, "head_size": 32, "is_neox_style": True, "scaling_factor": 8.0,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0, "orig_max_position": 8192}  # fmt: skip
YARN = {"base": 10000, "rotary_dim": 16, "is_neox_style": False, "scaling_factor": 40, "max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1}  # fmt: skip
SECTIONS = {"base": 1e6, "rotary_dim": 32, "mrope_section": [4, 6, 6], "is_neox_style": True, "head_size": 32}
PROPORTIONAL = {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
TOP_2 = {"top_k": 2, "global_num_experts": 8, "renormalize": True, "activation": "silu"}
GROUPS = {"top_k": 4, "global_num_experts": 8, "scoring_func": "sigmoid", "num_expert_group": 4, "topk_group": 2,
          "routed_scaling_factor": 2.5}  # fmt: skip


@pytest.mark.parametrize(("config", "cls", "right", "wrong"), [
    (LLAMA, "Llama3RotaryEmbedding", LLAMA3,
     {"scaling_factor": 1.0, "low_freq_factor": 2.0, "high_freq_factor": 1.0, "orig_max_position": 131072}),
    (DEEPSEEK, "DeepseekScalingRotaryEmbedding", YARN, {"scaling_factor": 4}),
    (QWEN_VL, "MRotaryEmbedding", SECTIONS, {"mrope_section": [6, 4, 6]}),
    (PROPORTIONAL, "Gemma4RotaryEmbedding", {"rotary_dim": 32, "head_size": 32}, {"rotary_dim": 8}),
    (MOE, "RoutedExperts", TOP_2, {"top_k": 4, "renormalize": False, "activation": "gelu", "global_num_experts": 16}),
    (DEEPSEEK, "RoutedExperts", GROUPS,
     {"scoring_func": "softmax", "num_expert_group": 8, "topk_group": 4, "routed_scaling_factor": 16.0}),
])  # fmt: skip
def test_factors_of_rotary_scalings_and_of_routing(config, cls, right, wrong):
    tap = "model.layers.0.self_attn.rotary_emb" if "Rotary" in cls else "model.layers.0.mlp.experts.routed_experts"
    assert not built(config, (tap, cls, right)).mismatches
    for name, value in wrong.items():
        (one,) = built(config, (tap, cls, right | {name: value})).mismatches
        assert one.name == name
        assert one.due == (1.0 if name == "routed_scaling_factor" else right[name])  # of two that will do, the smaller


QKV = "model.layers.0.self_attn.qkv_proj"
WINDOWED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}


@pytest.mark.parametrize(("config", "module", "name", "right"), [
    ({"model_type": "gemma3_text"} | WINDOWED, (ATTN, "Attention"), "impl.sliding_window", 64),
    ({"model_type": "cohere2"} | WINDOWED, (ATTN, "Attention"), "impl.sliding_window", 65),  # and the query's own
    ({"model_type": "gemma3n", "intermediate_size": [64, 96]}, ("model.layers.1.mlp.down_proj", "RowParallelLinear"),
     "input_size", 96),
    ({"model_type": "granite", "logits_scaling": 0.5}, ("logits_processor", "LogitsProcessor"), "scale", 2),
    ({"model_type": "hyperclovax", "logits_scaling": 4}, ("logits_processor", "LogitsProcessor"), "scale", 4),
    ({"model_type": "qwen3", "num_attention_heads": 4}, (QKV, "QKVParallelLinear"), "total_num_heads", 4),
    ({"model_type": "qwen3_next", "num_attention_heads": 4}, (QKV, "QKVParallelLinear"), "total_num_heads", 8),
    ({"model_type": "qwen3_next", "num_attention_heads": 4, "attn_output_gate": False}, (QKV, "QKVParallelLinear"),
     "total_num_heads", 4),
])  # fmt: skip
def test_what_a_family_makes_of_its_config(config, module, name, right):
    def of(value: int) -> list[Any]:
        attrs = {name: [value - 1, 0] if "window" in name else value}
        return [m.due for m in built(config, (*module, attrs)).mismatches if m.name == name]

    wrong = of(right + 1)
    assert of(right) == []
    assert wrong == [64 if config["model_type"] == "cohere2" else right]  # of two that will do, the smaller one


def test_ties_layers_biases_and_norms() -> None:
    def structure(params: dict[tuple[str, str], str], drop: str = "", config: Mapping[str, Any] = GEMMA2) -> list[str]:
        modules = [m for m in gemma2().values() if not drop or drop not in m.tap]
        out = BuiltCheck()
        check_structure(modules, config, params, True, out)
        return [m.says for m in out.mismatches]

    embed = {("model.embed_tokens", "weight"): "1"}
    assert structure(embed) == []
    assert (
        "the same weight as embed_tokens is False, config.json asks for True"
        in structure(embed | {("lm_head", "weight"): "2"})[0]
    )
    untied = structure(embed | {("lm_head", "weight"): "1"}, config=GEMMA2 | {"tie_word_embeddings": False})
    assert "is True, config.json asks for False (tie_word_embeddings)" in untied[0]
    bias = {("model.layers.0.self_attn.qkv_proj", n): "3" for n in ("weight", "bias")}
    assert "bias is True, config.json asks for False (attention_bias)" in structure(embed | bias)[0]
    assert "layers is 1, config.json asks for 2" in structure(embed, "layers.1")[0]
    tied = embed | {("lm_head", "weight"): "1"}  # of the whole and of its language part, vLLM's releases take either
    assert structure(tied, config={"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}) == []
    assert structure(tied, config={"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}) != []
    assert structure(tied, config={"tie_word_embeddings": [0], "text_config": {"tie_word_embeddings": False}}) == []
    assert "norms is ['input_layernorm'" in structure(embed, "pre_feedforward_layernorm")[0]


@pytest.mark.parametrize(("taps", "says"), [
    (("model.layers.0", "model.layers.1"), ["layers is 2, config.json asks for 24 (num_hidden_layers)"]),
    (("model.H_module.layers.0", "model.L_module.layers.0"), []), (("a.layers.0", "b.layers.23"), []),
])  # fmt: skip
def test_how_many_layers_each_of_several_stacks_has_is_not_said(taps: Sequence[str], says: list[str]) -> None:
    out = BuiltCheck()
    check_structure([Module(t, "Layer", k, {}) for k, t in enumerate(taps)], {"num_hidden_layers": 24}, {}, True, out)
    assert [m.says.partition("): ")[2] for m in out.mismatches] == says


def test_a_key_that_no_rule_knows_is_unchecked() -> None:
    found = check_built(gemma2().values(), GEMMA2 | {"residual_multiplier": 0.22, "use_cache": True, "alibi": False})
    assert set(found.unchecked) == {"residual_multiplier", "num_hidden_layers", "tie_word_embeddings"}
    assert "3 unchecked: num_hidden_layers, residual_multiplier, tie_word_embeddings" in found.summary()


def test_what_the_user_changed_is_not_checked() -> None:
    modules = gemma2()
    modules[NORM] = Module(NORM, "GemmaRMSNorm", 0, {"variance_epsilon": 1e-5})
    assert not check_built(modules.values(), GEMMA2, ["rms_norm_eps"]).mismatches


def test_a_rotary_class_that_no_table_names_is_unchecked() -> None:
    """Models that vLLM serves with transformers' own code have transformers' classes."""
    rotary = ("model.rotary_emb", "Starcoder2RotaryEmbedding", {})
    assert not built({"model_type": "starcoder2", "rope_theta": 1e4}, rotary).mismatches
    assert not built(LLAMA, rotary).mismatches
    assert built(LLAMA, ("model.rotary_emb", "RotaryEmbedding", {})).mismatches


def test_other_towers_are_left_alone() -> None:
    assert not built(GEMMA2, ("visual.blocks.0.norm", "RMSNorm", {"variance_epsilon": 0.1})).mismatches


def test_config_of_the_dump_goes_first(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert config_of({"model": {"config": {"a": 2}}}, tmp_path) == {"a": 2}
    assert config_of({"model": {}}, tmp_path) == {"a": 1}
    (tmp_path / "config.json").write_text("[]")
    assert config_of({}, tmp_path) == {}
    assert config_of({}, None) == {}


@pytest.mark.parametrize(("spoils", "side"), [("", ""), ("m", "mine"), ("g", "golden"), ("gm", "")])
def test_of_two_dumps_the_one_that_is_not_as_config_json_asks_is_the_cause(spoils: str, side: str) -> None:
    """A finding of both dumps explains no difference."""
    tap = "model.layers.0.self_attn.rotary_emb"

    def dump(wrong: bool) -> Any:
        modules = gemma2()
        if wrong:
            modules[tap] = Module(tap, "RotaryEmbedding", modules[tap].index, {**modules[tap].attrs, "base": 1e6})
        return SimpleNamespace(run={"model": {"config": GEMMA2}}, modules={0: list(modules.values())})

    causes = built_otherwise((dump("g" in spoils), dump("m" in spoils)))
    assert list(causes) == ([tap] if side else [])
    origin, known = with_built([{"module": tap}, {"module": tap, "cause": {"text": "x"}}], causes)
    assert known["cause"] == {"text": "x"}
    assert built_notes([origin], causes) == []
    assert len(built_notes([{"module": "another"}], causes)) == len(causes)
    if side:
        assert origin["cause"]["text"].startswith(f"{side} is built otherwise than config.json asks: {tap}")
    else:
        assert "cause" not in origin


@pytest.mark.parametrize(("mine", "golden", "says"), [
    ("((x + attn[0]) + mlp[0])", "((attn[0] + mlp[0]) + x)", ""),  # another order of the sum
    ("(attn[0] + mlp[0])", "((attn[0] + mlp[0]) + x)",
     "its own code computes output.0 = (attn[0] + mlp[0]), golden's ((attn[0] + mlp[0]) + x)"),
    ("(x + (mlp[0] * 0.5))", "(x + (mlp[0] * 0.25))",
     "its own code computes output.0 = (x + (mlp[0] * 0.5)), golden's (x + (mlp[0] * 0.25))"),
    ("((", "((", ""),
    (3, "x", ""),
])  # fmt: skip
def test_code_that_computes_another_formula(mine: Any, golden: str, says: str) -> None:
    assert other_code({"output.0": mine}, {"output.0": golden, "output.1": "x"}) == says


def test_code_that_hands_something_else_to_a_part() -> None:
    """Which comes first: an output may follow from it."""
    golden = {"output.0": "mlp[0]", "inside.mlp/x": "norm[0]", "inside.attn/x": "(x + y)"}
    mine = {"output.0": "(mlp[0] + x)", "inside.mlp/x": "x", "inside.attn/x": "(y + x)", "own_code": "attn"}
    assert other_code(mine, golden) == "its own code computes input x of mlp = x, golden's norm[0]"


@pytest.mark.parametrize(("mine", "golden", "children", "found"), [
    (("v/a.py:1", {"output.0": "(x + attn[0])"}), ("v/a.py:1", {"output.0": "x"}), ("attn",), True),
    (("v/a.py:1", {"output.0": "x"}), ("v/b.py:9", {"output.0": "(x + attn[0])"}), ("attn",), True),
    (("v/a.py:1", {"output.0": "(x + mlp[0])"}), ("v/a.py:1", {"output.0": "(x + ffn[0])"}), ("mlp",), False),
    (("v/a.py:1", {"output.0": "mlp[0]", "output.1": "norm[1]"}),
     ("transformers/a.py:1", {"output.0": "((x + attn[0]) + mlp[0])"}), ("attn", "mlp", "norm"), False),
    (("v/a.py:1", {"output.0": "mlp[0]"}), ("t/a.py:1", {"output.0": "(x + mlp[0])"}), ("mlp",), False),
    (("v/a.py:1", {}), ("v/a.py:1", {"output.0": "x"}), (), False),
    (("v/a.py:1", 3), ("v/a.py:1", [3]), (), False),
])  # fmt: skip
@pytest.mark.parametrize("tap", ["layers.0", ROOT_TAP])
def test_formulas_of_one_package_and_of_the_same_children_are_compared(mine, golden, children, found, tap):
    def dump(source: str, code: Any, inside: tuple[str, ...]) -> Any:
        parts = [Module(name if tap == ROOT_TAP else f"{tap}.{name}", "Odd", 1) for name in inside]
        return SimpleNamespace(modules={0: [Module(tap, "OddLayer", 0, {"forward": code}, source), *parts]})

    assert list(recoded((dump(*golden, ()), dump(*mine, children)))) == [tap] * found
