"""Constants of the same module that differ: those of formulas, beyond rounding, on modules that both sides know."""

from types import SimpleNamespace

from vllm_accprobe.comparison.verdict.constants_differ import differing
from vllm_accprobe.dump.schema import Module


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
