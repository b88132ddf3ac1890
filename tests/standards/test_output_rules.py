"""The rules for one machine, at their limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from standards.named_rules import judge, judge_two

from vllm_accprobe.opcheck.measures import measure
from vllm_accprobe.standards import MACHINES, OUTPUT, PAIRS, UnknownStandard, find, msprobe as apis, names
from vllm_accprobe.standards.finding import Judged, RuleFinding, of, worst
from vllm_accprobe.standards.measures import DECADES
from vllm_accprobe.standards.two_machines import both

BASE = measure(np.linspace(1, 2, 1000), np.linspace(1, 2, 1000), "float64")


BOTH = "msprobe", "msprobe-1.0"
MSPROBE = [
    # Cosine: <= 0.99 is an error whatever the rest.
    ("float32", {"cosine": 0.99, "max_abs_err": 1e-9}, ("error", "cosine 0.99 is not above 0.99")),
    ("float32", {"cosine": 0.9901, "max_abs_err": 1e-9}, ("pass", "")),
    # Largest error: < 0.001 passes whatever the dual metrics.
    ("bfloat16", {"max_abs_err": 0.000999, "dual_100": 0.0}, ("pass", "")),
    ("bfloat16", {"max_abs_err": 0.001, "dual_100": 0.99}, ("error", "dual-100: 0.99 is not above 0.99")),
    ("float16", {"max_abs_err": 1.0, "dual_100": 0.9901, "dual_1000": 0.999},
     ("warning", "dual-1000: 0.999 is not above 0.999")),
    ("float16", {"max_abs_err": 1.0, "dual_100": 0.9901, "dual_1000": 0.9991}, ("pass", "")),
    ("float8_e4m3fn", {"max_abs_err": 1.0, "dual_100": 0.5}, ("error", "dual-100: 0.5 is not above 0.99")),
    ("float32", {"max_abs_err": 1.0, "dual_100": 0.0, "dual_1000": 0.999},
     ("error", "dual-1000: 0.999 is not above 0.999")),
    ("float32", {"max_abs_err": 1.0, "dual_1000": 0.9995, "dual_10000": 0.9999},
     ("warning", "dual-10000: 0.9999 is not above 0.9999")),
    ("float64", {"max_abs_err": 1.0, "dual_1000": 0.9995, "dual_10000": 0.99995}, ("pass", "")),
    # What no rule looks at but must not pass.
    ("float32", {"max_abs_err": 1e-9, "inf_nan_err_ratio": 0.001, "nonfinite_mismatch": 1},
     ("error", "1 of 1000 elements are NaN or infinite on one side only")),
    ("float32", {"elements": 0}, ("skip", "empty tensor")),
    ("float32", {"max_abs_err": None}, ("skip", "no finite values")),
    # A single element has no direction, nor have two zero tensors.
    ("float32", {"elements": 1, "cosine": -1.0, "max_abs_err": 1e-4}, ("pass", "")),
    ("float32", {"cosine": None, "max_abs_reference": 0.0, "max_abs_mine": 0.0, "max_abs_err": 0.0}, ("pass", "")),
    ("float32", {"cosine": None, "max_abs_mine": 0.0, "max_abs_err": 1e-4}, ("error", "mine is all zero")),
    ("float32", {"cosine": None, "max_abs_reference": 0.0, "max_abs_err": 1e-4},
     ("error", "the reference is all zero")),
    ("int64", {"binary_err_ratio": 0.002}, ("error", "2 of 1000 values differ and must be equal")),
    ("bool", {"binary_err_ratio": 0.0, "cosine": 0.0, "max_abs_err": 5.0}, ("pass", "")),
]  # fmt: skip
OTHERS = [
    # Of booleans all must agree, and then they do; ait itself requires more than all.
    *(("ait", dtype, {"ait_share": share}, status) for dtype, share, status in (
        ("float32", 0.9999, "error"), ("float32", 0.99991, "pass"), ("bfloat16", 0.999, "error"),
        ("bfloat16", 0.9991, "pass"), ("int8", 0.9991, "pass"), ("uint8", 0.991, "pass"), ("bool", 0.9999, "error"),
        ("bool", 1.0, "pass"))),
    ("ait", "float32", {"ait_share": 0.5},
     ("error", "0.5 of the elements are within the tolerance, more than 0.9999 must be")),
    ("ait", "float32", {"ait_share": 1.0, "inf_nan_err_ratio": 0.001}, "error"),
    ("ait", "float32", {"elements": 0}, ("skip", "empty tensor")),
    ("ait", "float32", {"ait_share": None}, ("skip", "ait_share was not measured")),
    ("xray", "float32", {"max_abs_err": 0.0078}, ("pass", "")),
    ("xray", "float32", {"max_abs_err": 0.0156, "above_1e_2": 7}, ("error", "7 elements are off by more than 0.01")),
    ("xray", "float32", {"inf_nan_err_ratio": 0.1}, "error"),
    ("xray", "float32", {"max_abs_err": None}, ("skip", "no finite values")),
    # MindSpore's document: two statuses, cosine above 0.99 and the largest error below 0.0001; integers are equal.
    ("mindspore", "float32", {"cosine": 0.991, "max_abs_err": 0.99e-4}, ("pass", "")),
    ("mindspore", "float32", {"cosine": 0.99, "max_abs_err": 0.0}, "error"),
    ("mindspore", "float16", {"cosine": 1.0, "max_abs_err": 1e-4}, "error"),
    ("mindspore", "float32", {"cosine": None, "max_abs_err": 1e-5}, ("error", "one side is all zero")),
    ("mindspore", "int64", {"binary_err_ratio": 0.1}, "error"),
    ("mindspore", "int64", {"binary_err_ratio": 0.0, "max_abs_err": 0.0}, ("pass", "")),
    ("mindspore", "float32", {"inf_nan_err_ratio": 0.1}, "error"),
    ("mindspore", "float32", {"max_abs_err": None}, ("skip", "no finite values")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("standard", "dtype", "changes", "expected"), [*((name, *row) for name in BOTH for row in MSPROBE), *OTHERS]
)
def test_one_machine(standard, dtype, changes, expected):
    """expected: status, or status and message."""
    found = judge(standard, replace(BASE, **changes), "exp", dtype)
    assert (found.status if isinstance(expected, str) else (found.status, found.message)) == expected


def test_dropout_is_random():
    found = judge("msprobe", BASE, "aten.native_dropout.default", "float32")
    assert (found.status, found.message) == ("skip", "dropout is random")


def test_unknown_names_are_listed():
    first = {PAIRS: "accprobe, strict, ait, ", OUTPUT: "operator, strict, ait, ", MACHINES: "operator, ait, msprobe, "}
    said = {what: ", ".join(names(what)) for what in first}
    for what, listed in said.items():
        assert listed.startswith(first[what])  # ours, then others by name
        with pytest.raises(UnknownStandard) as why:
            find("npu", what)
        assert str(why.value) == f"unknown standard 'npu': known are {listed}"
    with pytest.raises(UnknownStandard) as why:
        find("mindspore", MACHINES)
    assert str(why.value) == (
        f"unknown standard 'mindspore': known are {said[MACHINES]}; mindspore is known to compare and opcheck only"
    )


@pytest.mark.parametrize(
    ("op", "cls", "api"),
    [
        ("aten.mm.default", "", "mm"), ("aten::add_", "", "add_"), ("torch.ops.aten.add_.Tensor", "", "add_"),
        ("torch.ops.npu.npu_rms_norm.default", "", "npu_rms_norm"),
        ("_C.fused_add_rms_norm.default", "", "npu_rms_norm"),
        ("aten.__and__.Tensor", "", "__and__"), ("aten.native_layer_norm.default", "", "layer_norm"),
        ("QKVParallelLinear", "QKVParallelLinear", "linear"), ("", "RMSNorm", "npu_rms_norm"), ("matmul", "", "matmul"),
        ("", "Attention", "npu_fusion_attention"), ("", "Qwen2MLP", "Qwen2MLP"), ("aten.gt.Scalar", "", "greater"),
        ("vllm.unified_attention_with_output.default", "", "npu_fusion_attention"), ("GELU", "GELU", "gelu"),
    ],
)  # fmt: skip
def test_names_of_apis(op, cls, api):
    assert apis.api_of(op, cls) == api


@pytest.mark.parametrize(
    ("api", "dtype", "algorithm", "level"),
    [
        ("add_", "bfloat16", apis.ABSOLUTE, "L0"), ("rsqrt", "float32", apis.ABSOLUTE, "L0"),
        ("sort", "float16", apis.BINARY, "L0"), ("mm", "float32", apis.ULP, "L2"),
        ("linear", "bfloat16", apis.ULP, "L0"),
        ("conv1d", "bfloat16", apis.DUAL_1000, "L0"), ("exp", "bfloat16", apis.BENCHMARK, "L0"),
        ("npu_fusion_attention", "bfloat16", apis.BENCHMARK, "L1"), ("gelu", "float32", apis.BENCHMARK, "L2"),
        ("GELU", "float32", apis.BENCHMARK, "L2"), ("scatter_", "float32", apis.BENCHMARK, "L1"),
        ("scatter", "float32", apis.BENCHMARK, "L0"), ("mm", "int64", apis.BINARY, "L2"),
        ("exp", "bool", apis.BINARY, "L0"),
        ("mm", "float64", None, "L2"), ("exp", "complex64", None, "L0"), ("exp", "float8_e5m2", apis.ULP, "L0"),
    ],
)  # fmt: skip
def test_algorithms_and_levels(api, dtype, algorithm, level):
    assert (apis.algorithm_of(api, dtype), apis.level_of(api)) == (algorithm, level)


def test_a_finding_is_its_worst_and_says_why():
    bad, odd = Judged("a", 6.0, 2.0, "error", "a is 6"), Judged("b", 2.0, 1.0, "warning", "b is 2")
    good, none = Judged("c", 0.0, 1.0, "pass"), Judged("d", None, 1.0, "skip", "no d")
    found = of("x", [odd, good, bad], advisory=[Judged("e", 100.0, 1.0, "pass")], note="noted")
    assert (found.status, found.message, found.severity, len(found.judged)) == ("error", "a is 6; noted", 3.0, 4)
    assert of("x", [odd, good]).message == "b is 2"
    assert (of("x", [good, none]).status, of("x", [good, none]).message) == ("pass", "no d")
    assert of("x", [none]).status == worst([]) == "skip"
    assert RuleFinding("pass", "x").severity == 0.0


def test_severity_of_shares_is_that_of_what_is_wrong():
    assert Judged("dual_100", 0.96, 0.99, "error").severity == pytest.approx(4.0)
    assert Judged("binary_err_ratio", 0.1, 0.0, "error").severity == float("inf")
    assert Judged("rmse", float("nan"), 2.0, "error").severity == float("inf")


# --- the rules for two machines, algorithm by algorithm, at their limits, in both releases ---


FINE = {
    "small_value_err_ratio": 0.1, "normal_rmse": 0.1, "normal_max_rel_err": 0.1, "normal_mean_rel_err": 0.1,
    "error_balance": 0.1, "inf_nan_err_ratio": 0.0,
}  # fmt: skip


def benchmark(mine, golden=None, standard="msprobe", op="exp", dtype="float32"):
    two = [{**FINE, **(golden or {})}, {**FINE, **mine}]
    return judge_two(standard, *({**v, **{f"v1_{k}": x for k, x in v.items()}} for v in two), op, dtype)


@pytest.mark.parametrize(
    "measure", ["normal_max_rel_err", "normal_mean_rel_err", "normal_rmse", "small_value_err_ratio"]
)
@pytest.mark.parametrize("op", ["exp", "layer_norm"])
def test_release_1_warns_above_1_and_has_one_level(measure, op):
    top = 10 if measure == "normal_max_rel_err" else 2
    expected = {0.1: "pass", 0.101: "warning", 0.1 * top * 0.999: "warning", 0.1 * top * 1.001: "error"}
    assert {v: benchmark({measure: v}, standard="msprobe-1.0", op=op).status for v in expected} == expected


def test_the_error_balance_is_shown_and_has_no_say():
    found = benchmark({"error_balance": 1.0})
    assert found.status == "pass"
    assert {j.name: j.status for j in found.judged}["error_balance_ratio"] == "error"


def test_measures_that_are_no_numbers_are_no_agreement():
    """msprobe passes what is NaN on both sides; here the others decide, and it is said."""
    found = benchmark({"normal_max_rel_err": math.nan}, {"normal_max_rel_err": math.nan})
    assert (found.status, found.message) == ("pass", "max relative error is nan on golden's side and nan on mine's")
    names = ("small_value_err_ratio", "normal_rmse", "normal_max_rel_err", "normal_mean_rel_err")
    nothing = dict.fromkeys(names, math.inf)
    assert benchmark(nothing, nothing).status == "skip"
    for mine, golden in ((math.inf, 0.1), (0.1, math.nan), (math.inf, -math.inf), (math.nan, math.inf)):
        assert benchmark({"normal_rmse": mine}, {"normal_rmse": golden}).status == "error", (mine, golden)


@pytest.mark.parametrize("op", ["exp", "mm", "conv2d"])
def test_wrong_nan_is_an_error_in_algorithms_that_leave_it_out(op):
    values = {**FINE, "ulp_share": 0.0, "ulp_mean": 0.1, "dual_1000": 1.0}
    assert judge_two("msprobe", values, values, op, "float32").status == "pass"
    wrong = judge_two("msprobe", values, {**values, "inf_nan_err_ratio": 0.01}, op, "float32")
    assert (wrong.status, wrong.message) == ("error", "0.01 of the values are wrongly NaN or infinite")
    values["inf_nan_err_ratio"] = 0.01
    assert judge_two("msprobe", values, values, op, "float32").status == "warning"


NAN = math.nan
TWO_MACHINES = [
    # float16 and bfloat16: share < 0.001, or below golden's.
    ("mm", "float16", {"ulp_share": 0.0}, {"ulp_share": 0.0009, "ulp_mean": 500.0}, "pass"),
    ("mm", "float16", {"ulp_share": 0.0011}, {"ulp_share": 0.001, "ulp_mean": 0.1}, "pass"),
    ("mm", "bfloat16", {"ulp_share": 0.003}, {"ulp_share": 0.003, "ulp_mean": 0.1}, "error"),
    ("mm", "bfloat16", {"ulp_share": 0.002}, {"ulp_share": 0.003, "ulp_mean": 0.1}, "error"),
    # float32: mean < 64, or share < 0.05, or below golden's.
    ("mm", "float32", {"ulp_share": 0.0}, {"ulp_share": 0.9, "ulp_mean": 63.9}, "pass"),
    ("mm", "float32", {"ulp_share": 0.0}, {"ulp_share": 0.049, "ulp_mean": 1e6}, "pass"),
    ("mm", "float32", {"ulp_share": 0.51}, {"ulp_share": 0.5, "ulp_mean": 64.0}, "pass"),
    ("mm", "float32", {"ulp_share": 0.05}, {"ulp_share": 0.05, "ulp_mean": 64.0}, "error"),
    # float8: mine's share alone.
    ("mm", "float8_e4m3fn", {"ulp_share": 0.0}, {"ulp_share": 0.0009}, "pass"),
    ("mm", "float8_e4m3fn", {"ulp_share": 0.5}, {"ulp_share": 0.002}, "error"),
    ("mm", "float32", {"ulp_share": 0.1}, {"ulp_share": NAN, "ulp_mean": 1.0}, "error"),
    *(("sort", dtype, {"binary_err_ratio": 0.0}, {"binary_err_ratio": rate}, status)
      for dtype in ("int64", "bool", "bfloat16") for rate, status in ((0.0, "pass"), (1e-9, "error"), (NAN, "error"))),
    ("conv2d", "bfloat16", {"dual_1000": 0.5}, {"dual_1000": 0.999}, "error"),
    ("conv2d", "bfloat16", {"dual_1000": 0.5}, {"dual_1000": 0.99901}, "pass"),
]  # fmt: skip
ALGORITHMS = {"mm": "ULP", "sort": "binary consistency", "conv2d": "dual-1000"}


@pytest.mark.parametrize(("op", "dtype", "golden", "mine", "status"), TWO_MACHINES)
@pytest.mark.parametrize("standard", BOTH)
def test_two_machines(standard, op, dtype, golden, mine, status):
    found = judge_two(standard, golden, mine, op, dtype)
    assert (found.status, found.algorithm) == (status, ALGORITHMS[op])


def test_ulp_says_the_numbers():
    found = judge_two("msprobe", {"ulp_share": 0.25}, {"ulp_share": 0.5, "ulp_mean": 100.0}, "mm", "float32")
    assert found.message == (
        "50 % of the values are off by more than 32 ULP (limit 5 %, golden's 25 %), 100 ULP on average (limit 64)"
    )


def test_dtypes_that_the_standard_does_not_judge():
    found = judge_two("msprobe", FINE, FINE, "exp", "float64")
    assert (found.status, found.message) == ("skip", "float64 is not judged by this standard")


def test_a_csv_without_an_algorithms_measures():
    """26.2's csv files have none but the benchmark's for floats."""
    found = judge_two("msprobe", FINE, FINE, "mm", "bfloat16")
    assert (found.status, found.algorithm, found.message) == (
        "pass", "benchmark ratio", "no measures for ULP: judged by benchmark ratio"
    )  # fmt: skip
    found = judge_two("msprobe", {}, {"ulp_share": 0.1}, "mm", "bfloat16")
    assert (found.status, found.message) == ("skip", "not measured: golden has no ulp_share")
    # Equality of floats is never what takes another algorithm's place.
    assert judge_two("msprobe", {}, {"binary_err_ratio": 1.0}, "exp", "bfloat16").status == "skip"


def decades(*counts):
    return dict(zip(DECADES, map(float, counts), strict=True))


@pytest.mark.parametrize(
    ("golden", "mine", "status"),
    [
        ((0, 0, 0, 2, 50, 400), (0, 0, 0, 2, 50, 400), "pass"),
        ((0, 0, 0, 2, 50, 400), (0, 0, 0, 4, 99, 400), "pass"),
        ((0, 0, 0, 2, 50, 400), (0, 0, 0, 5, 99, 400), "warning"),
        ((0, 0, 0, 2, 50, 400), (0, 0, 3, 5, 99, 400), "error"),  # more beyond 1e-3 than golden beyond 1e-4
        ((0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), "warning"),
        ((0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), "error"),
        ((9, 9, 9, 9, 9, 9), (0, 0, 0, 0, 0, 0), "pass"),
        ((0, 0, 90, 99, 99, 99), (0, 0, 91, 100, 100, 100), "pass"),  # nearly all elements, on both sides
    ],
)
def test_xrays_decades(golden, mine, status):
    found = judge_two("xray", decades(*golden), decades(*mine), "exp", "float32")
    assert found.status == status


def test_xray_says_the_coarsest_decade():
    found = judge_two("xray", decades(0, 0, 0, 2, 50, 400), decades(0, 8, 60, 600, 600, 600), "exp", "float32")
    assert found.message == "8 elements are off by more than 1e-2, golden has 0 beyond 1e-3"
    assert (
        judge_two("xray", {}, decades(0, 0, 0, 0, 0, 0), "exp", "float32").message == "golden has no counts above 1e-n"
    )


def test_ait_on_two_machines():
    def sides(golden, mine):
        values = ({"elements": 10.0, "max_abs_err": 1.0, "ait_share": s} for s in (golden, mine))
        return judge_two("ait", *values, "exp", "float32").status

    assert (sides(1.0, 1.0), sides(1.0, 0.5), sides(0.5, 0.5), sides(0.5, 1.0)) == ("pass", "error", "warning", "pass")


def test_both_verdicts():
    good, odd, bad = (RuleFinding(s, "x", s, (Judged("v", 2.0, 1.0, s, s),)) for s in ("pass", "warning", "error"))
    none = RuleFinding("skip", "x", "why")
    assert both(good, bad) is bad
    assert both(odd, bad).status == "error"
    assert both(bad, good).status == "pass"
    assert both(bad, bad).message == "golden does not pass either (error); mine: error"
    assert (both(bad, bad).status, both(bad, odd).status) == ("warning", "warning")
    assert (both(none, bad).message, both(bad, none).message) == ("golden: why", "mine: why")
