"""Two machines run one generated folder, and opdiff finds what one of them has wrong, by five algorithms."""

import shutil
from pathlib import Path

import pytest
import torch
from opcheck import torch_only
from support.csv_rows import csv_rows

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.kit.testgen import write_case, write_folder
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import families

KERNELS = """
import torch

library = torch.library.Library("aten", "IMPL")


def wrong(value):
    return (value.double() / 0.98).to(value.dtype) if value.dtype == torch.float32 else value


def sort(x, dim=-1, descending=False):
    values, indices = torch.topk(x, x.shape[dim], dim, largest=descending, sorted=True)
    return wrong(values), indices


def convolution(x, w, b, stride, padding, dilation, transposed, outside, groups):
    columns = torch.nn.functional.unfold(x, w.shape[2:])
    out = w.flatten(1) @ columns
    return wrong(out.unflatten(-1, [s - k + 1 for s, k in zip(x.shape[2:], w.shape[2:])]))


library.impl("rsqrt", lambda x: wrong(torch.reciprocal(torch.sqrt(x))), "CPU")
library.impl("mm", lambda a, b: wrong(torch.bmm(a[None], b[None])[0]), "CPU")
library.impl("exp", lambda x: wrong(torch.exp2(x / 0.6931471805599453)), "CPU")
library.impl("sort", sort, "CPU")
library.impl("convolution", convolution, "CPU")
"""
ALGORITHMS = {
    "aten.rsqrt.default": "absolute threshold", "aten.exp.default": "benchmark ratio",
    "aten.sort.default": "binary consistency", "aten.mm.default": "ULP", "aten.convolution.default": "dual-1000",
}  # fmt: skip


def calls():
    g = torch.Generator().manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    x, w, image = rand(32, 48), rand(48, 16), rand(2, 3, 12, 12)
    yield "aten.rsqrt.default", (x.abs(),), (x.abs().rsqrt(),)
    yield "aten.exp.default", (x,), (x.exp(),)
    yield "aten.sort.default", (x,), tuple(x.sort())
    yield "aten.mm.default", (x, w), (x @ w,)
    kernel = rand(8, 3, 3, 3)
    more = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    yield "aten.convolution.default", (image, kernel, *more), (torch.conv2d(image, kernel),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("machines")
    (root / "t/cases").mkdir(parents=True)
    written = []
    for number, (op, args, outputs) in enumerate(calls()):
        roles = {f"output.{i}": t for i, t in enumerate(outputs)}
        captured = Captured("layers.0", 0, 0, number, Call(op, op, args=args, outputs=roles), {})
        written.append(write_case(captured, References(families()), root / "t/cases", number))
    write_folder(written, root / "t", "a test")
    (root / "t/faulty.py").write_text(KERNELS)
    site = torch_only.site(root / "site")
    for name, load in (("gpu", ()), ("npu", ("--load", "faulty"))):
        done = torch_only.run(site, root / "t", "--detail-csv", str(root / f"{name}.csv"), *load)
        assert done.returncode == bool(load), done.stdout + done.stderr
    return root


def diff(folder, golden, mine, *options):
    code = main(["opdiff", str(folder / golden), str(folder / mine), "--out", str(folder / "o"), *options])
    return code, csv_rows(folder / "o/details.csv")


def test_the_right_kernels_pass_by_all_five_algorithms(folder):
    shutil.copy(folder / "gpu.csv", folder / "gpu2.csv")
    code, rows = diff(folder, "gpu.csv", "gpu2.csv")
    assert code == 0
    assert {r["op"]: r["algorithm"] for r in rows if r["role"] == "output.0"} == ALGORITHMS
    assert {r["status"] for r in rows} == {"pass"}


@pytest.mark.parametrize("standard", ["msprobe", "msprobe-1.0"])
def test_the_wrong_kernels_are_errors_by_all_five(folder, standard):
    code, rows = diff(folder, "gpu.csv", "npu.csv", "--standard", standard)
    assert code == 1
    found = {(r["op"], r["role"]): (r["algorithm"], r["status"]) for r in rows}
    indices = found.pop(("aten.sort.default", "output.1"))
    assert indices == ("binary consistency", "pass")  # the order is right, the values are not
    assert {op: f for (op, _), f in found.items()} == {op: (a, "error") for op, a in ALGORITHMS.items()}
