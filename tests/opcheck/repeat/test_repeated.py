"""Races, unwritten outputs, orders of sums, rows that depend on their batch, and operators named by hand: each is said
as what it is, clean kernels are equal, and no operator is cut where its rows are not independent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.layer_dumps import build
from opcheck.operator_dumps import OpMaker, tensor
from opcheck.repeat import planted_kernels

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.repeat.by_rows import ROWS, BatchOptions, axes_of, batches, cut
from vllm_accprobe.opcheck.repeat.machine_kernels import FRESH, MachineKernels
from vllm_accprobe.opcheck.repeat.named_operator import NamedCalls, NamedOperator, call_of
from vllm_accprobe.opcheck.repeat.repeated import RepeatOptions, gap_words, largest_gap, repeat
from vllm_accprobe.opcheck.run.result_row import CheckResult

FILE = str(Path(planted_kernels.__file__))
RUNS = 20


@pytest.fixture(scope="module")
def kernels() -> MachineKernels:
    return MachineKernels(default_references(), "cpu")


def calls(op: str, shapes: tuple[str, ...], dtypes: tuple[str, ...], more: dict[str, Any]) -> list[Captured]:
    """Of an operator named by hand."""
    named = NamedCalls(NamedOperator(op, shapes, dtypes, more), 0)
    return [c for _, tap, _ in named.taps() for c in named.of(0, tap)]


def said(
    kernels: MachineKernels, op: str, *shapes: str, dtype: str = "float32", runs: int = RUNS, **options: Any
) -> list[CheckResult]:
    """The rows of an operator named by hand, run that many times."""
    return [row for c in calls(op, shapes, (dtype,), {}) for row in repeat(c, kernels, RepeatOptions(runs, **options))]


def of_batches(
    kernels: MachineKernels, op: str, shape: str, sizes: tuple[str, ...] = ("1", "2", "8", "N"),
    dtypes: tuple[str, ...] = ("bfloat16",), strict: bool = False, **more: Any,
) -> list[CheckResult]:  # fmt: skip
    return [row for c in calls(op, (shape,), dtypes, more) for row in batches(c, kernels, BatchOptions(sizes, strict))]


def test_a_race_between_compiled_threads(kernels: MachineKernels) -> None:
    (row,) = said(kernels, f"{FILE}:column_sum_racy", "8192x256")
    assert row.status == "fail"
    told = json.loads(row.evidence)
    assert told["kind"] == "timing"
    assert 0 < told["differing"] < RUNS
    assert "beyond rounding: a race" in row.message
    (honest,) = said(kernels, f"{FILE}:column_sum", "8192x256")
    assert (honest.status, honest.message) == ("pass", "")


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


TABLE = default_references()


def test_equal_infinities_are_no_difference() -> None:
    """rsqrt of 0 is infinite on both sides, and inf - inf is no number: it was told as a difference of infinity."""
    one, inf, nan = 1.0, float("inf"), float("nan")
    a, b = torch.tensor([one, inf, nan, 2.0]), torch.tensor([one, inf, nan, 2.5])
    assert largest_gap(a, b) == 0.5
    assert gap_words(0.5) == "largest difference 0.5"
    for other in ([one, -inf, nan, 2.0], [one, 3.0, nan, 2.0], [nan, inf, nan, 2.0]):
        assert largest_gap(a, torch.tensor(other)) == inf
    assert gap_words(inf) == "NaN or infinity on one side alone"


def test_another_blocking_for_few_rows_is_told_with_its_sizes(kernels: MachineKernels) -> None:
    (row,) = of_batches(kernels, f"{FILE}:matmul_by_rows", "*24x256,256x64")
    assert row.status == "warning"
    told = json.loads(row.evidence)
    assert {n: s["differing"] > 0 for n, s in told["sizes"].items()} == {"1": True, "2": True, "8": False}
    assert told["first"] == 0
    assert "not batch-invariant" in row.message
    assert of_batches(kernels, f"{FILE}:matmul_by_rows", "*24x256,256x64", strict=True)[0].status == "fail"


def test_a_coarser_sum_for_few_rows_fails(kernels: MachineKernels) -> None:
    (row,) = of_batches(kernels, f"{FILE}:matmul_by_rows_coarse", "*24x1024,1024x64")
    assert row.status == "fail"
    assert "beyond rounding" in row.message


def test_rows_computed_one_by_one_are_equal(kernels: MachineKernels) -> None:
    (row,) = of_batches(kernels, f"{FILE}:matmul_row_by_row", "*24x256,256x64", ("all",))
    assert (row.status, row.checked) == ("pass", 24)


@pytest.mark.parametrize(
    ("op", "shape", "more"),
    [
        ("aten.silu", "24x64", {}), ("aten.mul", "24x64,64", {}), ("aten.add", "24x64,24x1", {}),
        ("aten.embedding", "50x16,24", {}), ("aten.topk", "24x64", {"k": 4}),
        ("aten.argmax", "24x64", {"dim": -1}), ("aten.native_layer_norm", "24x64,64,64", {"normalized_shape": [64],
                                                                                        "eps": 1e-6}),
    ],
)  # fmt: skip
def test_operators_without_sums_over_rows_are_equal(kernels, op, shape, more):
    dtypes = ("float32", "int64:50") if op == "aten.embedding" else ("float32",)
    rows = of_batches(kernels, op, shape, ("1", "7", "N"), dtypes, **more)
    assert rows
    assert {(r.status, r.message) for r in rows} == {("pass", "")}
    assert all(r.checked == 24 for r in rows)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("aten.sum.default", (torch.ones(4, 3),), {}),
        ("aten.sum.dim_IntList", (torch.ones(4, 3), [0]), {}),
        ("aten._softmax.default", (torch.ones(4, 3), 0, False), {}),
        ("aten.argmax.default", (torch.ones(4, 3), 0), {}),
        ("aten.topk.default", (torch.ones(4, 3), 2, 0), {}),
        ("aten.cumsum.default", (torch.ones(4, 3), -2), {}),
        ("aten.native_layer_norm.default", (torch.ones(4, 3), [4, 3], None, None, 1e-6), {}),
        ("aten.transpose.int", (torch.ones(4, 3), 0, 1), {}),
        ("aten.matmul.default", (torch.ones(4, 3), torch.ones(3)), {}),
        ("torch.ops.vendor.mystery", (torch.ones(4, 3),), {}),
    ],
)  # fmt: skip
def test_rows_that_are_not_declared_independent_are_never_cut(op, args, kwargs):
    with pytest.raises(Declined):
        axes_of(Call(op, op, args=args, kwargs=kwargs), TABLE)


def test_a_cut_call_has_the_rows_of_all_that_has_rows() -> None:
    x, bias, w = torch.arange(12.0).reshape(6, 2), torch.arange(18.0).reshape(6, 3), torch.ones(2, 3)
    call = Call("m", "aten.addmm.default", args=(bias, x, w))
    piece = cut(call, axes_of(call, TABLE), slice(2, 4))
    assert [t.shape[0] for t in piece.args] == [2, 2, 2]
    assert torch.equal(torch.addmm(*piece.args), torch.addmm(bias, x, w)[2:4])
    assert piece.args[2] is w


def test_the_modules_of_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Modules that are equal pass; the attention, which runs by request, is left out by name."""
    out = tmp_path / "o"
    code = main(["opcheck", str(build(tmp_path / "d")), "--rows", "1,N", "-j", "0", "--out", str(out)])
    told = json.loads((out / "rows.json").read_text())
    assert code == (0 if told["verdict"] == "pass" else 1)
    assert told["run"] > 0
    assert told["outputs"]["fail"] == 0, told["found"]
    text = capsys.readouterr().out
    assert "rows in batches of 1, N" in text
    assert "request by request" in text


def test_tensors_fill_the_schema_in_order_and_numbers_come_by_name() -> None:
    more = {"eps": 1e-5, "normalized_shape": [64]}
    more = {"eps": 1e-5, "normalized_shape": [64]}
    named = NamedOperator("aten.native_layer_norm", ("7x64,64,64",), ("bfloat16",), more)
    call = call_of(named, named.shapes[0], 0)
    assert call.cls == "aten.native_layer_norm.default"
    x, shape, weight, bias, eps = call.args
    assert (list(x.shape), shape, list(weight.shape), list(bias.shape), eps) == ([7, 64], [64], [64], [64], 1e-5)
    assert x.dtype == torch.bfloat16
    again = call_of(named, named.shapes[0], 0)
    assert torch.equal(again.args[0], x)
    assert not torch.equal(call_of(named, named.shapes[0], 1).args[0], x)


def test_marks_of_rows_and_outputs() -> None:
    call = call_of(NamedOperator(f"{FILE}:double", ("out:4x3,*4x3",)), "out:4x3,*4x3", 0)
    assert call.extra[FRESH] == [0]
    assert call.extra[ROWS] == {"1": 0}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--op", "aten.mm"], "--op needs --shape"),
        (["--op", "aten.mm", "--shape", "7by64"], "--shape '7by64'"),
        (["--op", "aten.mm", "--shape", "7x64"], "argument mat2 is a tensor: --shape has too few"),
        (["--op", "aten.mm", "--shape", "7x64,64x3,2"], "tensors more than aten::mm takes"),
        (["--op", "aten.nothing_such", "--shape", "7"], "this torch has no operator aten.nothing_such"),
        (["--op", "aten.silu", "--shape", "7", "--dtype", "bfloat61"], "torch has no such dtype"),
        (["--op", "nowhere.at_all:f", "--shape", "7"], "--op nowhere.at_all: ModuleNotFoundError"),
        (["--op", f"{FILE}:nothing", "--shape", "7"], "has no function nothing"),
        (["--op", "aten.silu", "--shape", "7", "--with", "axis=1"], "--with axis"),
        (["--op", "aten.silu", "--shape", "7", "--repeat", "1"], "--repeat 1: from 2"),
        (["--op", "aten.silu", "--shape", "7", "--rows", "0"], "'0' is no batch size"),
        (["--op", "aten.silu", "--shape", "7", "--rows", "N"], "name a smaller size"),
        (["--op", "aten.silu", "--shape", "7", "--rows", "1,N", "--repeat", "3"], "choose one"),
        (["--op", "aten.silu", "--shape", "7", "--repeat", "3", "--kl"], "--kl does not go with"),
        (["--shape", "7"], "--shape and --with go with --op"),
        ([], "DUMP is missing"),
    ],
)
def test_bad_usage_is_one_line(arguments, line, tmp_path, capsys):
    code = main(["opcheck", *arguments, "-j", "0", "--out", str(tmp_path / "o")])
    said = capsys.readouterr().err.strip().splitlines()
    assert code == 2, said
    assert line in said[-1]


def test_without_a_mode_the_operator_is_held_against_float64(tmp_path, capsys):
    arguments = ["--op", "aten.mm", "--shape", "7x64,64x32", "--shape", "33x96,96x5", "--dtype", "bfloat16", "-j", "0"]
    assert main(["opcheck", *arguments, "--out", str(tmp_path / "o")]) == 0
    assert "2 of 2 calls checked" in capsys.readouterr().out


def test_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--op", f"{FILE}:double_partly", "--shape", "33x65", "--repeat", "4"]
    assert main(["opcheck", *arguments, "--out", str(tmp_path / "o")]) == 1
    assert "uninitialised: 65 of 2,145 elements, row 32, columns 0 to 64" in capsys.readouterr().out
