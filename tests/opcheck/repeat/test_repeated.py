"""Races, unwritten outputs and orders of sums are told as what they are; clean kernels are not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.operator_dumps import OpMaker, tensor
from opcheck.repeat import planted_kernels

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.repeat.here import MachineKernels
from vllm_accprobe.opcheck.repeat.named import NamedCalls, NamedOperator
from vllm_accprobe.opcheck.repeat.repeated import RepeatOptions, repeat
from vllm_accprobe.opcheck.run.result_row import CheckResult

FILE = str(Path(planted_kernels.__file__))
RUNS = 20


@pytest.fixture(scope="module")
def kernels() -> MachineKernels:
    return MachineKernels(default_references(), "cpu")


def said(
    kernels: MachineKernels, op: str, *shapes: str, dtype: str = "float32", runs: int = RUNS, **options: Any
) -> list[CheckResult]:
    """The rows of an operator named by hand, run that many times."""
    calls = NamedCalls(NamedOperator(op, shapes, (dtype,), options.pop("more", {})), 0)
    found = [c for _, tap, _ in calls.taps() for c in calls.of(0, tap)]
    return [row for c in found for row in repeat(c, kernels, RepeatOptions(runs, **options))]


def test_a_race_between_compiled_threads(kernels: MachineKernels) -> None:
    (row,) = said(kernels, f"{FILE}:column_sum_racy", "8192x256")
    assert row.status == "fail"
    told = json.loads(row.evidence)
    assert told["kind"] == "timing"
    assert 0 < told["differing"] < RUNS
    assert "beyond rounding: a race" in row.message
    (honest,) = said(kernels, f"{FILE}:column_sum", "8192x256")
    assert (honest.status, honest.message) == ("pass", "")


def test_a_race_between_python_threads(kernels: MachineKernels) -> None:
    (row,) = said(kernels, f"{FILE}:python_race", "512x128")
    assert row.status == "fail"
    assert "beyond rounding: a race" in row.message


def test_an_output_written_in_part_names_the_elements(kernels: MachineKernels) -> None:
    for shape, rows in (("7x64", 7), ("1024x512", 1024)):  # below and above what an allocator keeps at hand
        (row,) = said(kernels, f"{FILE}:double_partly", shape, dtype="bfloat16", runs=6)
        assert row.status == "fail"
        told = json.loads(row.evidence)
        assert (told["kind"], told["first_rows"], told["rows"]) == ("not written", [rows - 1], 1)
        assert row.position == rows - 1
    clean = said(kernels, f"{FILE}:double", "7x64", "1024x512", dtype="bfloat16", runs=6)
    assert [r.status for r in clean] == ["pass"] * 2


def test_memory_that_nobody_wrote_and_that_looks_like_numbers(kernels: MachineKernels) -> None:
    (row,) = said(kernels, f"{FILE}:accumulate_into_empty", "16x4096")
    assert row.status == "fail"
    assert json.loads(row.evidence)["kind"] == "memory"
    assert "reads memory that was never written" in row.message


def test_sums_in_another_order_are_a_remark_and_fail_where_one_is_strict(kernels: MachineKernels) -> None:
    (row,) = said(kernels, f"{FILE}:unordered_sum", "4096x512")
    assert row.status == "warning", row.message
    assert "within rounding, as sums in another order are" in row.message
    (strict,) = said(kernels, f"{FILE}:unordered_sum", "4096x512", strict=True)
    assert strict.status == "fail"


CLEAN = {
    "aten.mm": ("1x64,64x48", "7x64,64x32", "160x896,896x512"), "aten.addmm": ("48,7x64,64x48",),
    "aten.silu": ("7x64", "300x1024"), "aten.sum": ("512x512",), "aten.gelu": ("33x65",),
    "aten.bmm": ("4x7x16,4x16x8",),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clean_operators_are_equal(kernels: MachineKernels, dtype: str) -> None:
    rows = [r for op, shapes in CLEAN.items() for r in said(kernels, op, *shapes, dtype=dtype, runs=6)]
    assert len(rows) == 9
    assert {(r.cls, r.status, r.message) for r in rows if r.status != "pass"} == set()


def test_what_has_no_defined_result_is_left_out_with_the_reason(kernels: MachineKernels) -> None:
    for op, why in (("aten.bernoulli", "draws random numbers"), ("aten.empty_like", "no defined values")):
        (row,) = said(kernels, op, "7x64")
        assert row.status == "skip"
        assert why in row.message


@torch.library.custom_op("accprobe_test::half_written", mutates_args=("out",))
def half_written(out: torch.Tensor, x: torch.Tensor) -> None:
    """Writes all of its output but the last column."""
    out[:, :-1] = x[:, :-1] * 2


def test_a_captured_operator_that_leaves_its_buffer_unwritten(tmp_path: Path) -> None:
    """As vLLM's kernels are called: the output is an argument that nobody had written to."""
    x = torch.randn(9, 24).bfloat16()
    made = 2 * x
    m = OpMaker(tmp_path / "d")
    m.request(0, 9)
    m.step(0, [(0, 0, 9)])
    empty = tensor("input.0", x, fresh=True)
    name = "torch.ops.accprobe_test.half_written"
    m.op(name, [empty, x], {"inplace.input.0": made}, mutates=("input.0",))
    m.op("aten.mm.default", [x, torch.randn(24, 16).bfloat16()], {"output.0": torch.zeros(9, 16).bfloat16()})
    out = tmp_path / "o"
    assert main(["opcheck", str(m.close()), "--repeat", "6", "-j", "0", "--out", str(out)]) == 1
    told = json.loads((out / "repeat.json").read_text())
    assert told["verdict"] == "fail"
    assert told["outputs"] == {"equal": 1, "remark": 0, "fail": 1}
    (found,) = told["found"]
    assert found["class"] == name
    assert (found["kind"], found["first_column"], found["columns"], found["rows"]) == ("not written", 23, 1, 9)
    page = (out / "repeat.html").read_text()
    assert "uninitialised" in page
    assert "<script" not in page
