"""Notes beside the verdict: constants that differ, image hashes, no tensors at all, taps that changed the result."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from picture_runs import PIXELS, seen
from synthetic_model import capture, scaled

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.notes import differing, taps_effect, with_constants, without_tensors
from vllm_accprobe.comparison.pair import NONE_JUDGED, Pair
from vllm_accprobe.comparison.verdict.judging import calibration_of
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


@pytest.mark.parametrize(("same", "origins"), [(True, []), (False, [ATTN])])
def test_a_constant_counts_where_no_row_behind_it_is_judged_but_none_where_all_are_equal(same, origins):
    how = {"worst_row_rel_l2": 0.0, "identical": same, "status": "pass" if same else "skip",
           "message": "" if same else NONE_JUDGED}  # fmt: skip
    pairs = [Pair("a", "a", 0, 0, "float32", "float32", (1, 8), tap=ATTN, role="output.0", **how)]
    found = with_constants([], {ATTN: "impl.scale is 0.2, golden has 0.125"}, {}, pairs)
    assert [o["module"] for _, o in found] == origins


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
    assert calibration_of(result, "another run").origins == {}  # it has no size that a floor could have


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


WATCHED = {"watched": {"0": {"steps": 24}}, "count": 0, "findings": []}
WRONG = WATCHED | {"count": 1, "findings": [{"sentence": "a stale slot"}]}
NONE: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("mine", "weights", "captured", "told"),
    [
        (WATCHED, NONE, False, "this is about mine's ledger of states (24 steps)"),
        (NONE, {"compared": 12, "findings": []}, False, "this is about 12 weights"),
        (WATCHED, {"told": 3, "findings": []}, False, "mine's ledger of states (24 steps) and 3 weights"),
        (WATCHED, NONE, True, ""),  # whoever captured tensors wants them compared
        (WRONG, NONE, True, "this is about mine's ledger of states (24 steps)"),
        (NONE, {"compared": 12, "findings": [{"side": "mine"}]}, True, "this is about 12 weights"),
        (NONE, {"compared": 12, "findings": [{"side": "both"}]}, True, ""),
        (NONE, NONE, False, ""),
    ],
)
def test_what_is_said_instead(mine: dict[str, Any], weights: dict[str, Any], captured: bool, told: str) -> None:
    coverage = {"taps_only_golden": ["model"] if captured else [], "taps_only_mine": []}
    setting: Any = SimpleNamespace(coverage=coverage, states={"golden": {}, "mine": mine}, weights=weights)
    said = without_tensors(setting, "nothing could be compared: g holds no tensors", units=False)
    assert told in said
    assert bool(said) == bool(told)
    assert not said or said.startswith("no tensors were compared (g holds no tensors)")


def test_a_changed_way_of_hashing_is_called_so_where_the_images_agree() -> None:
    golden, mine = seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new")
    golden.run["versions"], mine.run["versions"] = {"vllm": "0.20.2"}, {"vllm": "0.32.0"}
    result = compare(golden, mine)
    assert result.notes == [
        "image hashes differ in all requests that have images (1), and all that was computed of the images agrees: "
        "another way of hashing (vLLM 0.20.2 and 0.32.0)"
    ]


def test_another_image_is_called_so() -> None:
    result = compare(seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new", off=0.5))
    assert "request 'a' has different images" in result.notes
    assert not any("hashing" in note for note in result.notes)
    # nothing of the picture was captured: nobody knows
    bare = [seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new")]
    for side in bare:
        side.records = [r for r in side.records if r.tap != "visual"]
    assert compare(*bare).notes == ["request 'a' has different images"]


NOTHING = {
    "tokens": False, "top_logits": False, "logits": False, "root": False, "root_rel_l2": 0.0, "against": "off",
    "repeats": True,
}  # fmt: skip


def said(changed: Any) -> str:
    return "; ".join(taps_effect({"engine": {"graphs": {"changed": changed}}}))


def test_taps_that_changed_nothing() -> None:
    assert said(NOTHING) == "its taps changed no bit of the result (accprobe doctor --graphs)"


def test_taps_that_changed_the_result() -> None:
    changed = NOTHING | {"root": True, "logits": True, "root_rel_l2": 0.00934, "module": "model.norm\n"}
    assert said(changed) == (
        "ITS TAPS CHANGED THE RESULT by 0.0093 (relative L2): logits, root, first where a tap stands at model.norm?; "
        "compare without that tap (docs/doctor.md)"
    )
    assert said(NOTHING | {"tokens": True}).startswith("ITS TAPS CHANGED THE RESULT: tokens; ")
    assert "not known" in said(changed | {"repeats": False})


@pytest.mark.parametrize(
    "run", [{}, {"engine": 3}, {"engine": {"graphs": {}}}, {"engine": {"graphs": {"changed": "x"}}}]
)
def test_without_a_proof_nothing_is_said(run: dict[str, Any]) -> None:
    assert taps_effect(run) == []


def test_a_strangers_figures_are_no_matter() -> None:
    assert said({"repeats": 1}) == said(NOTHING | {"repeats": None})
    assert "not known" in said({})
    assert said(NOTHING | {"root": True, "root_rel_l2": math.inf}).startswith("ITS TAPS CHANGED THE RESULT by inf")
