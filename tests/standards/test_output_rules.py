"""The rules for one machine, at their limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from standards.named_rules import judge

from vllm_accprobe.opcheck.measures import measure
from vllm_accprobe.standards import MACHINES, OUTPUT, PAIRS, UnknownStandard, find
from vllm_accprobe.standards import msprobe as apis
from vllm_accprobe.standards.finding import Judged, RuleFinding, of, worst

BASE = measure(np.linspace(1, 2, 1000), np.linspace(1, 2, 1000), "float64")


def said(dtype, standard="msprobe", op="exp", **changes):
    found = judge(standard, replace(BASE, **changes), op, dtype)
    return found.status, found.message


@pytest.mark.parametrize("release", ["msprobe", "msprobe-1.0"])
@pytest.mark.parametrize(
    ("dtype", "changes", "expected"),
    [
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
    ],
)  # fmt: skip
def test_msprobe(release, dtype, changes, expected):
    assert said(dtype, release, **changes) == expected


def test_dropout_is_random():
    assert said("float32", op="aten.native_dropout.default") == ("skip", "dropout is random")


@pytest.mark.parametrize(
    ("dtype", "share", "status"),
    [("float32", 0.9999, "error"), ("float32", 0.99991, "pass"), ("bfloat16", 0.999, "error"), ("int8", 0.9991, "pass"),
     ("bfloat16", 0.9991, "pass"), ("uint8", 0.991, "pass"), ("bool", 0.9999, "error"), ("bool", 1.0, "pass")],
)  # fmt: skip
def test_ait(dtype, share, status):
    """Of booleans all must agree, and then they do; ait itself asks for more than all."""
    assert said(dtype, "ait", ait_share=share)[0] == status


def test_ait_says_how_many():
    assert said("float32", "ait", ait_share=0.5)[1] == (
        "0.5 of the elements are within the tolerance, more than 0.9999 must be"
    )
    assert said("float32", "ait", ait_share=1.0, inf_nan_err_ratio=0.001)[0] == "error"
    assert said("float32", "ait", elements=0) == ("skip", "empty tensor")
    assert said("float32", "ait", ait_share=None) == ("skip", "ait_share was not measured")


def test_xray():
    assert said("float32", "xray", max_abs_err=0.0078) == ("pass", "")
    assert said("float32", "xray", max_abs_err=0.0156, above_1e_2=7) == (
        "error", "7 elements are off by more than 0.01"
    )  # fmt: skip
    assert said("float32", "xray", inf_nan_err_ratio=0.1)[0] == "error"
    assert said("float32", "xray", max_abs_err=None) == ("skip", "no finite values")


def test_mindspore():
    """Its document's limits, two statuses: cosine above 0.99 and the largest error below 0.0001; integers are equal."""
    assert said("float32", "mindspore", cosine=0.991, max_abs_err=0.99e-4) == ("pass", "")
    assert said("float32", "mindspore", cosine=0.99, max_abs_err=0.0)[0] == "error"
    assert said("float16", "mindspore", cosine=1.0, max_abs_err=1e-4)[0] == "error"
    assert said("float32", "mindspore", cosine=None, max_abs_err=1e-5) == ("error", "one side is all zero")
    assert said("int64", "mindspore", binary_err_ratio=0.1)[0] == "error"
    assert said("int64", "mindspore", binary_err_ratio=0.0, max_abs_err=0.0) == ("pass", "")
    assert said("float32", "mindspore", inf_nan_err_ratio=0.1)[0] == "error"
    assert said("float32", "mindspore", max_abs_err=None) == ("skip", "no finite values")


def test_unknown_names_are_listed():
    said = {
        PAIRS: "accprobe, strict, ait, mindspore, msprobe, msprobe-1.0, xray",
        OUTPUT: "operator, strict, ait, mindspore, msprobe, msprobe-1.0, xray",
        MACHINES: "operator, ait, msprobe, msprobe-1.0, xray",
    }
    for what, names in said.items():
        with pytest.raises(UnknownStandard) as why:
            find("npu", what)
        assert str(why.value) == f"unknown standard 'npu': known are {names}"
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
