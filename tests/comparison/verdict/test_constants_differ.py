"""Constants of the same module that differ: those of formulas, beyond rounding, on modules that both sides know."""

from types import SimpleNamespace

import pytest
from synthetic_model import capture, scaled

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.notes import differing
from vllm_accprobe.dump.schema import Module
from vllm_accprobe.report import facts, terminal
from vllm_accprobe.report.html import page

ATTN = "model.layers.1.self_attn.attn"


def dump(**taps):
    return SimpleNamespace(modules={0: [Module(tap, "", i, attrs) for i, (tap, attrs) in enumerate(taps.items())]})


def test_only_what_goes_into_a_formula():
    golden = dump(norm={"eps": 1e-6, "size": 4, "scale": 0.1, "is_neox_style": True, "top_k": 2}, other={"eps": 1.0})
    mine = dump(norm={"eps": 1e-5, "size": 8, "scale": 0.1 * (1 + 1e-8), "is_neox_style": False, "top_k": 2},
                alone={"eps": 2.0})  # fmt: skip
    assert differing(golden, mine) == {
        "norm": "eps is 1e-05, golden has 1e-06; is_neox_style is False, golden has True"
    }


def test_what_is_not_finite():
    nan, inf = float("nan"), float("inf")
    golden = dump(a={"limit": nan}, b={"limit": inf}, c={"limit": 1.0}, d={"limit": 1})
    mine = dump(a={"limit": nan}, b={"limit": inf}, c={"limit": inf}, d={"limit": "1"})
    assert differing(golden, mine) == {"c": "limit is inf, golden has 1.0"}


def test_scales_of_a_cache_count_beside_a_cache_of_that_format_only():
    golden = dump(
        a={"kv_cache_dtype": "auto", "_k_scale_float": 1.0}, b={"kv_cache_dtype": "fp8", "_k_scale_float": 1.0}
    )
    mine = dump(a={"kv_cache_dtype": "fp8", "_k_scale_float": 0.02}, b={"kv_cache_dtype": "fp8", "_k_scale_float": 2.0})
    assert differing(golden, mine) == {"b": "_k_scale_float is 2.0, golden has 1.0"}


def test_one_number_at_several_places_is_told_at_the_innermost():
    golden = dump(a={"scaling": 0.125}, **{"a.attn": {"scale": 0.125, "impl.scale": 0.125, "cap": 0}})
    mine = dump(a={"scaling": 0.25}, **{"a.attn": {"scale": 0.25, "impl.scale": 0.25, "cap": 0}})
    assert differing(golden, mine) == {"a.attn": "scale is 0.25, golden has 0.125"}


def built(scale, tap=ATTN, **how):
    made = capture(**how)
    made.modules[0] = [Module(m.tap, m.cls, m.index, {"impl.scale": scale}) if m.tap == tap else m
                       for m in made.modules[0]]  # fmt: skip
    return made


@pytest.fixture(scope="module")
def golden():
    return built(0.125)


def test_another_constant_fails_though_its_effect_is_within_every_limit(golden):
    result = compare(golden, built(0.1275, noise=2e-4))
    assert (result.counts.failed, result.verdict) == (0, "fail")
    (origin,) = result.origins
    assert (origin["module"], origin["role"], origin["created"], origin["times"]) == (ATTN, "setting", None, None)
    assert origin["cause"] == {"kind": "setting", "sentence": "impl.scale is 0.1275, golden has 0.125"}
    said = f"FAIL: {ATTN} (Attention) has another constant: impl.scale is 0.1275, golden has 0.125"
    assert facts.headline(result) == said
    assert "evidence: both dumps recorded the constants of this module" in terminal.lines(result)
    assert "has another constant" in page(result)


def test_a_constant_that_changes_no_bit_is_a_note(golden):
    result = compare(golden, built(0.1275))
    assert (result.verdict, result.origins) == ("pass", [])
    assert "and what it computes is equal or was not compared" in result.notes[0]
    assert compare(golden, built(0.1275, noise=2e-4), taps="*.mlp.*").verdict == "pass"  # nor what was not asked for


def test_of_an_origin_it_is_the_cause(golden):
    result = compare(golden, built(0.2, faults={ATTN: scaled(1.2)}))
    (origin,) = result.origins
    assert (origin["module"], origin["role"], origin["cause"]["kind"]) == (ATTN, "output.0", "setting")
    assert facts.headline(result).startswith(
        f"FAIL: {ATTN} (Attention) has another constant: impl.scale is 0.2, golden has 0.125, output.0, request '"
    )
