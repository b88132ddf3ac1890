"""How units relate: whose output an input is, source files, inputs of another kind, chosen experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from picture_runs import NORMALISED, PIXELS, seen
from synthetic_model import capture, scaled

from vllm_accprobe.comparison import engine, store
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.plan.make_plan import make_plan
from vllm_accprobe.comparison.plan.relations import BOTH, GOLDEN, MINE, links_of, scaled_elsewhere, with_routers
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.schema import Module
from vllm_accprobe.judge.near_ties import Chooser
from vllm_accprobe.report import terminal, verdict_parts

LAYER = "model.layers.1"


def of(golden, mine):
    return links_of(make_plan(golden, mine).units)


def changed(dump, tap, role):
    """``dump`` with other bytes of one tensor, in all steps."""
    for i, r in enumerate(dump.records):
        if (r.tap, r.role) == (tap, role):
            bits = dump.data[r.payload.off] ^ np.uint16(1 << 7)
            dump.data[r.payload.off] = bits
            dump.records[i] = replace(r, hash=xxhash.xxh3_128_hexdigest(bits.tobytes()))
    return dump


def test_an_input_is_the_output_of_the_tap_that_made_it():
    links = of(capture(), capture(chunk=4))
    for to, maker in (
        ((f"{LAYER}.mlp.down_proj", "input.input_", 0), f"{LAYER}.mlp.act_fn"),
        ((f"{LAYER}.mlp", "input.x", 0), f"{LAYER}.post_attention_layernorm"),
        ((f"{LAYER}.mlp.gate_up_proj", "input.input_", 0), f"{LAYER}.post_attention_layernorm"),
        ((LAYER, "input.hidden_states", 0), "model.layers.0"),
        (("model.norm", "input.x", 0), "model.layers.2"),
    ):
        assert links[to] == ((maker, "output.0", 0), BOTH)
    # q, k and v are parts of one product, a residual sum is nobody's output: no bytes say where they are from.
    assert not any(tap.endswith((".attn", ".post_attention_layernorm")) for tap, _, _ in links)
    assert all(maker[1].startswith("output") and to[1].startswith("input") for to, (maker, _) in links.items())


def test_the_innermost_of_those_that_pass_a_tensor_on_made_it():
    """The block's output is its last product's: whoever adds it up gets what the product made."""
    golden, mine = capture(), capture()
    for dump in (golden, mine):  # the next layer is given the block's output itself
        made = {r.step: r for r in dump.records if (r.tap, r.role) == (f"{LAYER}.mlp", "output.0")}
        for i, r in enumerate(dump.records):
            if (r.tap, r.role) == ("model.layers.2", "input.hidden_states"):
                dump.records[i] = replace(r, hash=made[r.step].hash)
    links = of(golden, mine)
    assert links["model.layers.2", "input.hidden_states", 0][0] == (f"{LAYER}.mlp.down_proj", "output.0", 0)


def test_what_one_side_changes_on_the_way_is_told_by_the_other():
    key = (f"{LAYER}.mlp.down_proj", "input.input_", 0)
    maker = (f"{LAYER}.mlp.act_fn", "output.0", 0)
    assert of(capture(), changed(capture(), *key[:2]))[key] == (maker, GOLDEN)
    assert of(changed(capture(), *key[:2]), capture())[key] == (maker, MINE)
    both = changed(capture(), *key[:2]), changed(capture(), *key[:2])
    assert key not in of(*both)


def test_a_side_without_hashes_or_with_the_tensor_in_parts_denies_nothing():
    key, maker = (f"{LAYER}.mlp.down_proj", "input.input_", 0), f"{LAYER}.mlp.act_fn"
    mine = capture()
    mine.records = [replace(r, hash=None) for r in mine.records]
    assert of(capture(), mine)[key] == ((maker, "output.0", 0), BOTH)
    mine = changed(capture(), *key[:2])
    mine.records = [replace(r, shape=(*r.shape, 1)) if (r.tap, r.role) == key[:2] else r for r in mine.records]
    assert of(capture(), mine)[key] == ((maker, "output.0", 0), BOTH)


def test_equal_by_chance_in_one_step_is_no_link():
    golden, mine = capture(), capture()
    key = (f"{LAYER}.self_attn.attn", "input.key", 0)
    for dump, steps in ((golden, {0}), (mine, {0, 1})):
        made = {r.step: r for r in dump.records if (r.tap, r.role) == ("model.embed_tokens", "output.0")}
        for i, r in enumerate(dump.records):
            if (r.tap, r.role) == key[:2] and r.step in steps:
                dump.records[i] = replace(r, hash=made[r.step].hash)
    assert key not in of(golden, mine)


TAP = "model.layers.1.mlp.act_fn"


def with_sources(dump, **of_class):
    dump.modules = {r: [replace(m, source=of_class.get(m.cls)) for m in ms] for r, ms in dump.modules.items()}
    return dump


def compared():
    golden = with_sources(capture(), SiluAndMul="vllm/activation.py:60", RMSNorm="vllm/layernorm.py:9")
    mine = capture(faults={TAP: scaled(1.1)})
    return engine.compare(golden, with_sources(mine, SiluAndMul="vllm_ascend/activation.py:27", TinyMLP="tiny.py:3"))


def test_both_sides_are_told_where_they_differ_and_one_where_it_alone_is_known(tmp_path):
    result = compared()
    assert result.sources[TAP] == ("vllm/activation.py:60", "vllm_ascend/activation.py:27")
    assert result.sources["model.norm"] == ("vllm/layernorm.py:9", None)
    assert "model.embed_tokens" not in result.sources
    assert verdict_parts.code(result.sources, TAP) == "vllm_ascend/activation.py:27 (golden: vllm/activation.py:60)"
    assert verdict_parts.code(result.sources, "model.norm") == "vllm/layernorm.py:9 (golden)"
    assert verdict_parts.code(result.sources, "model.layers.1.mlp") == "tiny.py:3"
    assert verdict_parts.code(result.sources, "model.embed_tokens") is None
    same = {"a": ("x.py:1", "x.py:1"), "b\n": ("\x1b.py:1", None)}
    assert [verdict_parts.code(same, tap) for tap in same] == ["x.py:1", "\\x1b.py:1 (golden)"]

    (origin,) = result.to_json()["origins"]
    assert origin["source"] == {"golden": "vllm/activation.py:60", "mine": "vllm_ascend/activation.py:27"}
    assert "code: vllm_ascend/activation.py:27 (golden: vllm/activation.py:60)" in terminal.lines(result)
    store.save(result.measured, tmp_path)
    assert engine.rejudge(store.load(tmp_path)).sources == result.sources


KIND = "inputs of another kind of number (integers against fractions)"


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("other_way", [False, True])
def test_pixels_of_eight_bits_against_normalised_ones_are_left_out(rows: bool, other_way: bool) -> None:
    sides = [seen(PIXELS, "uint8", rows=rows), seen(NORMALISED, "bfloat16", rows=rows)]
    result = compare(*reversed(sides)) if other_way else compare(*sides)
    assert result.verdict == "pass"
    assert result.coverage["skipped"][KIND] == 1
    (pair,) = [p for p in result.pairs if p.status == "skip"]
    assert (pair.tap, pair.role, pair.message) == ("visual", "input.pixels", KIND)


def test_ids_that_are_written_as_floating_point_are_compared() -> None:
    assert compare(seen(PIXELS, "uint8"), seen(PIXELS, "float32")).verdict == "pass"
    wrong = PIXELS.copy()
    wrong[3, 3] += 1
    result = compare(seen(PIXELS, "uint8"), seen(wrong, "float32"))
    assert result.verdict == "fail"
    assert KIND not in result.coverage["skipped"]


@pytest.mark.parametrize("forbidden", [-np.inf, np.finfo(np.float32).min])
def test_a_mask_of_booleans_against_one_that_is_added(forbidden: float) -> None:
    allowed = PIXELS > 99
    added = np.where(allowed, 0.0, forbidden).astype(np.float32)
    result = compare(seen(allowed, "bool"), seen(added, "float32"))
    assert result.verdict == "pass"
    assert result.coverage["skipped"][KIND] == 1
    assert compare(seen(allowed, "bool"), seen(allowed, "float32")).verdict == "pass"


def test_an_output_of_another_kind_is_still_wrong() -> None:
    role = "output.1"
    assert compare(seen(PIXELS, "uint8", role=role), seen(NORMALISED, "bfloat16", role=role)).verdict == "fail"


def test_statistics_alone_tell_the_kind_too() -> None:
    sides = [seen(PIXELS, "uint8"), seen(NORMALISED, "bfloat16")]
    for side in sides:
        side.records = [replace(r, payload=None) if r.role == "input.pixels" else r for r in side.records]
    assert compare(*sides).coverage["skipped"][KIND] == 1


BLOCK = "model.layers.1.mlp"
METHOD = f"{BLOCK}.experts.routed_experts.quant_method"


def unit(tap: str, role: str, golden: str = "", groups: list[Any] | None = None) -> Unit:
    return Unit((tap, role, 0), (golden or tap, role, 0), "", "", 0, 0, groups or [], groups or [])


def modules(within: float, behind: float, **more: Any) -> list[Module]:
    routed = {"top_k": 2, "scoring_func": "sigmoid", "routed_scaling_factor": within, **more}
    return [
        Module(BLOCK, "Glm4MoE", 0, {"routed_scaling_factor": 2.5}),
        Module(f"{BLOCK}.experts", "MoERunner", 1, {"router.class": "CPURouter", "routed_scaling_factor": behind}),
        Module(f"{BLOCK}.experts.routed_experts", "RoutedExperts", 2, routed),
    ]


def test_a_choice_is_by_what_the_captured_objects_say() -> None:
    bias = [object()]
    units = [unit(f"{BLOCK}.gate", "param.e_score_correction_bias", groups=bias), unit(f"{BLOCK}.gate", "output.0"),
             unit(METHOD, "input.topk_ids")]  # fmt: skip
    found = with_routers(units, modules(1.0, 2.5, num_expert_group=4, topk_group=2, use_grouped_topk=True))[-1]
    assert (found.chooser, found.bias) == (Chooser("sigmoid", 4, 2), (bias[0], bias[0]))
    plain = with_routers(units[1:], modules(1.0, 2.5))[-1]
    assert (plain.router, plain.chooser) == (([], []), None)  # its logits alone decide
    unsaid = with_routers(units[1:], modules(1.0, 2.5, has_correction_bias=True))[-1]
    assert unsaid.chooser is None  # a bias that nobody captured


def test_a_factor_in_the_weights_of_one_side_alone_is_no_error() -> None:
    units = [unit(METHOD, "input.topk_weights"), unit(METHOD, "output.0"), unit(METHOD, "input.x"),
             unit(f"{BLOCK}.experts", "output.0")]  # fmt: skip
    assert scaled_elsewhere(units, modules(2.5, 1.0), modules(1.0, 2.5)) == {0, 1}
    assert not scaled_elsewhere(units, modules(1.0, 2.5), modules(1.0, 2.5))
    assert not scaled_elsewhere(units, modules(2.5, 1.0), modules(1.0, 1.0))  # one side has lost it


def test_logits_say_how_many_experts_are_taken_whatever_else_has_a_top_k() -> None:
    """transformers' router and block know ``top_k``, and no experts: mine's module of experts knows both."""
    others = [Module(tap, "Llama4Router", 0, {"top_k": 2}) for tap in (BLOCK, f"{BLOCK}.router")]
    units = [unit(f"{BLOCK}.router", "output.0")]
    assert with_routers(units, others + modules(1.0, 1.0, global_num_experts=8))[0].takes == 2
    assert with_routers(units, others)[0].takes == 0
    grouped = modules(1.0, 1.0, global_num_experts=8, num_expert_group=4)
    assert with_routers(units, others + grouped)[0].takes == 0
