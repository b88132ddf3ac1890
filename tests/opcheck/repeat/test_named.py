"""Operators named by hand: what is drawn, and one line for what cannot be."""

from pathlib import Path

import pytest
import torch
from opcheck.repeat import planted_kernels

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.repeat.by_rows import ROWS
from vllm_accprobe.opcheck.repeat.here import FRESH
from vllm_accprobe.opcheck.repeat.named import NamedOperator, call_of

FILE = str(Path(planted_kernels.__file__))


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


def test_integers_below_a_number() -> None:
    named = NamedOperator("aten.embedding", (), ("float32", "int64:50"))
    ids = call_of(named, "50x4,2000", 0).args[1]
    assert ids.dtype == torch.int64
    assert 40 < int(ids.max()) < 50
    assert int(ids.min()) >= 0


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
