"""API calls that msprobe recorded, run again: PyTorch's, and MindSpore's from a dump that msprobe made of it."""

import math
from pathlib import Path

import pytest
import torch
from support.backward_dump import BackwardDump
from support.opchecked import opcheck
from support.peer_dumps import unpack

from vllm_accprobe.formats import msprobe, open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import api, aten
from vllm_accprobe.opcheck.references.api import torch_function
from vllm_accprobe.opcheck.registry import default_references

G = torch.Generator().manual_seed(5)
here = pytest.mark.skipif(not api.installed(), reason="MindSpore is not installed")
absent = pytest.mark.skipif(api.installed(), reason="MindSpore is installed")


def found(dump: Path, out: Path, *more: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and by operator the message or status of each role."""
    code, rows = opcheck(dump, out, *more)
    by: dict[str, dict[str, str]] = {}
    for row in rows:
        by.setdefault(row["op"], {})[row["role"]] = row["status"] if row["status"] != "skip" else row["message"]
    return code, by


def test_pytorchs_functions_replay_and_a_wrong_one_is_found(tmp_path: Path) -> None:
    x, y, w = (torch.randn(*s, generator=G).bfloat16() for s in ((9, 24), (9, 24), (16, 24)))
    r = BackwardDump(tmp_path / "d")
    r.call("Functional.linear", (x, w, None), {}, (torch.nn.functional.linear(x, w),))
    r.call("Tensor.__mul__", (x, 2.0), {}, (x * 2.0,))
    r.call("Tensor.__getitem__", (x, [slice(1, 5, None), ...]), {}, (x[1:5],))
    r.call("Torch.cat", ([x, y],), {"dim": 1}, (torch.cat([x, y], dim=1),))
    r.call("Functional.softmax", (x,), {"dim": -1, "dtype": torch.float32}, (x.softmax(-1, dtype=torch.float32),))
    r.call("Torch.max", (x,), {"dim": 1}, tuple(x.max(dim=1)))
    r.call("Functional.silu", (x,), {}, (torch.nn.functional.silu(x) * 1.02,))
    r.call("Functional.dropout", (x,), {"p": 0.5, "training": True}, (x,))
    r.call("Tensor.to", (x, torch.float16), {}, (x.half(),))
    code, by = found(r.close(), tmp_path / "o")
    assert code == 1
    assert by.pop("Functional.silu") == {"output.0": "fail"}
    assert by.pop("Functional.dropout") == {"": "an operator that draws random numbers"}
    assert set(by) == {
        "Functional.linear", "Tensor.__mul__", "Tensor.__getitem__", "Torch.cat", "Functional.softmax", "Torch.max",
        "Tensor.to",
    }  # fmt: skip
    assert {status for roles in by.values() for status in roles.values()} == {"pass"}
    assert set(by["Torch.max"]) == {"output.0", "output.1"}


def test_vf_is_torch_s_own_function(tmp_path: Path) -> None:
    """``torch._VF.lstm``, which torch.nn.LSTM calls."""
    lstm = torch.nn.LSTM(6, 5, batch_first=True)
    weights = [w.detach() for w in lstm.parameters()]
    x, h = torch.randn(3, 4, 6, generator=G), [torch.zeros(1, 3, 5), torch.zeros(1, 3, 5)]
    made = torch._VF.lstm(x, h, weights, True, 1, 0.0, False, False, True)
    r = BackwardDump(tmp_path / "d")
    for wrong in (False, True):
        outputs = tuple(t.detach() * (1.01 if wrong else 1.0) for t in made)
        r.call("VF.lstm", (x, h, weights, True, 1, 0.0, False, False, True), {}, outputs)
    code, by = found(r.close(), tmp_path / "o", "--ids", "0.0.0")
    assert (code, set(by["VF.lstm"].values())) == (0, {"pass"})
    code, by = found(r.root, tmp_path / "p")
    assert (code, set(by["VF.lstm"].values())) == (1, {"fail"})


def test_a_tensor_that_is_missing_is_a_call_that_was_not_checked(tmp_path: Path) -> None:
    x = torch.randn(4, 8, generator=G)
    r = BackwardDump(tmp_path / "d")
    r.call("Torch.rsqrt", (x.abs(),), {}, (x.abs().rsqrt(),))
    r.call("Torch.neg", (x,), {}, (-x,))
    (r.place / "dump_tensor_data" / "Torch.rsqrt.0.forward.input.0.pt").unlink()
    code, by = found(r.close(), tmp_path / "o")
    assert code == 0
    assert by == {"Torch.rsqrt": {"": "argument input.0 was not kept"}, "Torch.neg": {"output.0": "pass"}}


@pytest.mark.parametrize(
    "name",
    ["Torch.load", "Torch.save", "Torch.compile", "Torch.hub", "Torch.from_file", "Tensor.__reduce_ex__",
     "Tensor.__class__", "Tensor.__setstate__", "Functional.os", "Functional.__builtins__", "Distributed.all_reduce",
     "mindspore.Tensor.to"],
)  # fmt: skip
def test_a_name_from_a_dump_means_a_function_on_tensors_or_nothing(name: str) -> None:
    with pytest.raises(Declined):
        torch_function(name)


@pytest.mark.parametrize(
    "name",
    ["aten.from_file", "aten.save", "aten.__class__", "debugprims.load_tensor", "prim.RaiseException", "c10d.send"],
)
def test_an_operator_that_reaches_outside_is_not_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(Declined):
        aten.of(name)
    target = tmp_path / "written"
    call = Call("a", name, args=(torch.ones(2), str(target)), outputs={"output.0": torch.ones(2)})
    assert isinstance(default_references().evaluate(call), Declined)
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("aten.repeat", (torch.ones(2), [1 << 20, 1 << 20]), {}),
        ("aten.full", ([1 << 40], 1.0), {"device": torch.device("cpu")}),
        ("aten.arange", (1 << 50,), {"device": torch.device("cpu")}),
        ("Tensor.repeat", (torch.ones(2), 1 << 40), {}),
        ("Functional.pad", (torch.ones(2), [0, 1 << 45]), {}),
    ],
)
def test_a_number_from_a_dump_does_not_decide_how_much_memory_is_taken(name, args, kwargs):
    call = Call("a", name, args=args, kwargs=kwargs, outputs={"output.0": torch.ones(2)})
    found = default_references().evaluate(call)
    assert isinstance(found, Declined)
    assert found.reason == "it would make far more than was captured"


def test_large_numbers_that_make_nothing_large_are_no_obstacle() -> None:
    x = torch.randn(6, 3)
    for name, args in (("aten.slice.Tensor", (x, 0, 2, (1 << 63) - 1)), ("Tensor.clamp", (x, -(1 << 40), 1 << 40))):
        call = Call("a", name, args=args, outputs={"output.0": x})
        assert not isinstance(default_references().evaluate(call), Declined)


def test_arguments_become_values() -> None:
    args, kwargs = msprobe.arguments({
        "input_args": [
            {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": [2, 3], "Max": 1.5, "Min": -1,
             "Mean": math.nan},
            [{"type": "int", "value": 3}, {"type": "ellipsis", "value": "..."}],
            {"type": "float", "value": math.inf}, {"type": "torch.Size", "value": [2, 3]}, None,
            {"type": "slice", "value": [None, 4, "x"]}, {"type": "float", "value": "1; import os"},
        ],
        "input_kwargs": {"dtype": {"type": "mindspore.dtype", "value": "BFloat16"}},
    })  # fmt: skip
    assert args == (
        {"tensor": {"role": "input.0", "dtype": "bfloat16", "shape": [2, 3], "count": 6, "min": -1, "max": 1.5}},
        {"list": [3, {"ellipsis": True}]}, {"float": "inf"}, {"list": [2, 3]}, None,
        {"skipped": "a slice", "role": "input.5"}, {"skipped": "a float", "role": "input.6"},
    )  # fmt: skip
    assert kwargs == {"dtype": {"dtype": "bfloat16"}}


# --- MindSpore ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mindspore(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tensor/ and statistics/: made by msprobe in a real MindSpore, see formats/make_mindspore_dump.py."""
    return unpack("mindspore", tmp_path_factory.mktemp("mindspore"))


NAMES = {
    "MintFunctional.linear", "Mint.add", "MintFunctional.silu", "Mint.transpose", "Mint.matmul", "Mint.softmax",
    "Mint.tanh", "mindspore.Tensor.__mul__", "Mint.cat", "Mint.max", "Mint.mul",
}  # fmt: skip


def test_what_mindspore_gave_is_checked_against_torch(mindspore: Path, tmp_path: Path) -> None:
    """Its own tanh on a CPU is 23 float32 roundings off, its other functions are right; mul has crashed."""
    code, by = found(mindspore / "tensor", tmp_path)
    assert code == 1
    assert set(by) == NAMES
    assert by.pop("Mint.mul") == {"": "nothing came out of it that was captured"}
    captured = {op: {s for role, s in roles.items() if not role.startswith("mindspore.")} for op, roles in by.items()}
    assert captured.pop("Mint.tanh") == {"fail"}
    assert set().union(*captured.values()) == {"pass"}


@absent
def test_without_mindspore_it_is_said(mindspore: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found(mindspore / "tensor", tmp_path / "t")
    torchs = "torch's functions of the same names stand in where a call is run here"
    said = f"11 APIs of MindSpore: MindSpore is not installed; {torchs}"
    assert capsys.readouterr().err.splitlines() == [f"note: {said}"]
    code, by = found(mindspore / "statistics", tmp_path / "s", "--backward")
    assert code == 0
    assert set(by) == NAMES
    assert {roles["output.0"] for roles in by.values()} == {"pass"}
    gradients = {op for op, roles in by.items() if any(r.startswith("grad.input") for r in roles)}
    assert gradients == NAMES - {"Mint.mul"}  # of integers
    assert {s for roles in by.values() for r, s in roles.items() if r.startswith("grad.input")} == {"pass"}


@here
def test_mindspore_runs_here(mindspore: Path, tmp_path: Path) -> None:
    _, by = found(mindspore / "tensor", tmp_path / "t")
    right = {op for op, roles in by.items() if roles.get("mindspore.output.0") == "pass"}
    assert right == NAMES - {"Mint.tanh", "Mint.mul"}
    _, drawn = found(mindspore / "statistics", tmp_path / "s")
    right = {op for op, roles in drawn.items() if roles.get("output.0") == "pass"}
    assert right >= {"Mint.matmul", "MintFunctional.linear"}
    code, again = found(mindspore / "tensor", tmp_path / "r", "--rerun")
    assert code == 0
    assert again["Mint.tanh"] == {"output.0": "pass"}


def test_its_calls_have_their_modules_and_places(mindspore: Path) -> None:
    dump = open_dump(mindspore / "tensor")
    assert {op.op for op in dump.ops} == NAMES
    calls = Calls(dump, None)
    assert len(calls.taps()) == len(NAMES)
    (add,) = (c for rank, tap, cls in calls.taps() if cls == "Mint.add" for c in calls.of(rank, tap))
    assert add.what.args[1] == 1.5
    assert add.what.kwargs == {"alpha": 2}
