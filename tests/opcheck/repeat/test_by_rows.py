"""Which operator's rows depend on their batch; and that no operator is cut where its rows are not independent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.layer_dumps import build
from opcheck.repeat import planted_kernels

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.repeat.by_rows import BatchOptions, axes_of, batches, cut
from vllm_accprobe.opcheck.repeat.here import MachineKernels
from vllm_accprobe.opcheck.repeat.named import NamedCalls, NamedOperator
from vllm_accprobe.opcheck.repeat.repeated import gap_words, largest_gap
from vllm_accprobe.opcheck.run.result_row import CheckResult

FILE = str(Path(planted_kernels.__file__))
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


@pytest.fixture(scope="module")
def kernels() -> MachineKernels:
    return MachineKernels(TABLE, "cpu")


def said(
    kernels: MachineKernels, op: str, shape: str, sizes: tuple[str, ...] = ("1", "2", "8", "N"),
    dtypes: tuple[str, ...] = ("bfloat16",), strict: bool = False, **more: Any,
) -> list[CheckResult]:  # fmt: skip
    calls = NamedCalls(NamedOperator(op, (shape,), dtypes, more), 0)
    found = [c for _, tap, _ in calls.taps() for c in calls.of(0, tap)]
    return [row for c in found for row in batches(c, kernels, BatchOptions(sizes, strict))]


def test_another_blocking_for_few_rows_is_told_with_its_sizes(kernels: MachineKernels) -> None:
    (row,) = said(kernels, f"{FILE}:matmul_by_rows", "*24x256,256x64")
    assert row.status == "warning"
    told = json.loads(row.evidence)
    assert {n: s["differing"] > 0 for n, s in told["sizes"].items()} == {"1": True, "2": True, "8": False}
    assert told["first"] == 0
    assert "not batch-invariant" in row.message
    assert said(kernels, f"{FILE}:matmul_by_rows", "*24x256,256x64", strict=True)[0].status == "fail"


def test_a_coarser_sum_for_few_rows_fails(kernels: MachineKernels) -> None:
    (row,) = said(kernels, f"{FILE}:matmul_by_rows_coarse", "*24x1024,1024x64")
    assert row.status == "fail"
    assert "beyond rounding" in row.message


def test_rows_computed_one_by_one_are_equal(kernels: MachineKernels) -> None:
    (row,) = said(kernels, f"{FILE}:matmul_row_by_row", "*24x256,256x64", ("all",))
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
    rows = said(kernels, op, shape, ("1", "7", "N"), dtypes, **more)
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
