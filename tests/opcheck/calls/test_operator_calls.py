"""Captured operator calls: arguments come back, and calls replay. What is said of them: tests/freeze, ops-faulty."""

from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.operator_dumps import SKIPPED, G, OpMaker, W, X, Y, tensor
from support.opchecked import check, rows_of

from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.operator_calls import NotKept, _as_passed
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.result_row import CheckResult
from vllm_accprobe.opcheck.run.table import totals


def rows(root: Path, *calls: tuple[Any, ...], **how: Any) -> list[CheckResult]:
    m = OpMaker(root)
    m.module("layers.0.norm", "RMSNorm")
    m.step(0, [(0, 0, 9)])
    for k, (op, args, outputs) in enumerate(calls):
        m.op(op, args, outputs, call=k, **how)
    return rows_of(m.close())


def test_scalars_lists_dtypes_and_devices_reach_the_operator(tmp_path: Path) -> None:
    wide = X.double()
    pair = {"list": [tensor("input.0.0", X), tensor("input.0.1", Y)]}
    m = OpMaker(tmp_path / "d")
    m.step(0, [(0, 0, 9)])
    m.op("aten.sum.dim_IntList", [X, {"list": [1]}, True], {"output.0": wide.sum(1, keepdim=True).float()},
         kwargs={"dtype": {"dtype": "float32"}})  # fmt: skip
    m.op("aten.clamp.default", [X, {"float": "-inf"}, 0.5], {"output.0": wide.clamp(max=0.5).bfloat16()})
    m.op("aten.full.default", [{"list": [2, 3]}, 1.5], {"output.0": torch.full((2, 3), 1.5)},
         kwargs={"device": {"device": "npu:0"}, "layout": {"layout": "strided"}, "pin_memory": False})  # fmt: skip
    m.op("aten.cat.default", [pair, 1], {"input.0.0": X, "input.0.1": Y, "output.0": torch.cat((X, Y), 1)})
    m.op("aten.topk.default", [X, 3], dict(zip(("output.0", "output.1"), X.topk(3), strict=True)))
    found = rows_of(m.close())
    assert [(r.cls, r.role, r.status) for r in found] == [
        ("aten.sum.dim_IntList", "output.0", "pass"),
        ("aten.clamp.default", "output.0", "pass"),
        ("aten.full.default", "output.0", "pass"),
        ("aten.cat.default", "output.0", "pass"),
        ("aten.topk.default", "output.0", "pass"),
        ("aten.topk.default", "output.1", "pass"),
    ]


def test_what_is_changed_in_place_is_an_output(tmp_path: Path) -> None:
    total = (X.double() + Y.double()).bfloat16()
    call = "aten.add_.Tensor", [X, Y], {"output.0": total, "inplace.input.0": X}
    found = rows(tmp_path / "d", call, mutates=("input.0",))
    assert [(r.role, r.status) for r in found] == [("output.0", "pass"), ("inplace.input.0", "fail")]


@pytest.mark.parametrize(("how", "status"), [("nearest", "pass"), ("towards zero", "fail")])
def test_a_cast_must_round_to_nearest_to_the_bit(tmp_path: Path, how: str, status: str) -> None:
    x = torch.randn(8, 64, generator=G)
    cut = (x.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()
    out = x.bfloat16() if how == "nearest" else cut
    (row,) = rows(tmp_path / "d", ("aten.to.dtype", [x, {"dtype": "bfloat16"}], {"output.0": out}))
    assert (row.status, row.measure) == (status, "exact")


def test_a_float32_sum_that_cancels_has_the_noise_of_its_terms(tmp_path: Path) -> None:
    """The sum of large numbers that cancel: float32 is off by far more than the result's own rounding."""
    x = torch.randn(64, 512, generator=G)
    x = torch.cat((x * 1000, -x * 1000 + torch.randn(64, 512, generator=G) * 1e-3), 1)
    (row,) = rows(tmp_path / "d", ("aten.sum.dim_IntList", [x, {"list": [1]}], {"output.0": x.sum(1)}))
    assert row.status == "pass"
    (row,) = rows(tmp_path / "e", ("aten.sum.dim_IntList", [x, {"list": [1]}], {"output.0": x.sum(1) + 1.0}))
    assert row.status == "fail"


@pytest.mark.parametrize(
    ("op", "args", "why"),
    [
        ("aten.mm.default", [SKIPPED, W], "argument input.0 was not kept: the KV cache"),
        ("aten.add.Tensor", [X, {"skipped": "a LayerName"}], "an argument was not kept: a LayerName"),
        ("aten.bernoulli.default", [X], "an operator that draws random numbers"),
        ("aten.nobody.default", [X], "this torch has no operator aten.nobody.default"),
        ("vendor.fused.default", [X], "no reference for vendor.fused.default"),
        ("aten.mm.default", [X, X], "its own CPU kernel refuses"),
        ("_C.get_scheduler_metadata.default", [2], "it plans the work of a kernel and computes nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_skipped_by_name(tmp_path: Path, op: str, args: list[Any], why: str) -> None:
    (row,) = rows(tmp_path / "d", (op, args, {"output.0": X}))
    assert row.status == "skip"
    assert row.message.startswith(why)
    assert list(totals([row]).skipped.values()) == [1]


@pytest.mark.parametrize("spelling", ["torch.ops.vendor.fused", "vendor.fused", "vendor.fused.default"])
def test_a_vendors_operator_finds_the_users_reference(tmp_path: Path, spelling: str) -> None:
    @reference(spelling)
    def fused(call: Call) -> Expected:
        return Expected(call.args[0].double() * call.args[1])

    m = OpMaker(tmp_path / "d")
    m.step(0, [(0, 0, 9)])
    m.op("vendor.fused.default", [X, 2.5], {"output.0": (X.double() * 2.5).bfloat16()})
    (row,) = check(Calls(open_dump(m.close()), None), References([fused]))
    assert row.status == "pass"


def test_a_parameter_is_found_under_its_module(tmp_path: Path) -> None:
    m = OpMaker(tmp_path / "d")
    m.module("lin", "Linear")
    m.param("lin", "Linear", weight=W)
    m.step(0, [(0, 0, 9)])
    m.op("aten.mm.default", [X, tensor("input.1", W, param="lin/param.weight")],
         {"output.0": (X.double() @ W.double()).bfloat16()}, module="lin")  # fmt: skip
    (row,) = rows_of(m.close())
    assert (row.tap, row.status) == ("lin::aten.mm.default", "pass")


def test_a_handle_is_never_given_to_a_kernel_again() -> None:
    call = Call("t", "_C.onednn_mm.default", args=(X, Y, None, torch.tensor(0xDEAD)), outputs={"output.0": X})
    found = default_references().run(call)
    assert isinstance(found, Declined)
    assert found.reason == "takes a handle of the process that was captured"


@pytest.mark.parametrize(("shape", "kept"), [((4, 16), True), ((1 << 28, 16), False), ((1 << 33, 1 << 31), False)])
def test_a_stride_of_zero_takes_no_unbounded_memory(shape: tuple[int, ...], kept: bool) -> None:
    bias = torch.arange(16.0)
    if kept:
        assert _as_passed(bias, {"role": "input.0"}, shape, (0, 1)).tolist() == [bias.tolist()] * 4
    else:
        with pytest.raises(NotKept, match="unknown part"):
            _as_passed(bias, {"role": "input.0"}, shape, (0, 0))
