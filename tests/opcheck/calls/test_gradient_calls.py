"""Gradients that msprobe recorded, of operators, functions and modules: right ones pass, wrong ones fail."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.backward_dump import BackwardDump
from support.opchecked import opcheck

G = torch.Generator().manual_seed(3)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G).bfloat16()


def checked(dump: BackwardDump, out: Path) -> tuple[int, dict[tuple[str, str], str]]:
    """Exit code of opcheck; by (tap, number of the call:role) each status, or why there is none."""
    code, rows = opcheck(dump.close(), out)
    what = {True: "message", False: "status"}
    return code, {(r["tap"], f"{r['call']}:{r['role']}"): r[what[r["status"] == "skip"]] for r in rows}


def rms(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def grads(y: torch.Tensor, up: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [g.bfloat16() for g in torch.autograd.grad(y, leaves, up.float())]


def test_operators_and_functions(tmp_path: Path) -> None:
    x, w, up = draw(9, 64), draw(64), draw(9, 64)
    wide = [t.float().requires_grad_() for t in (x, w)]
    y = rms(*wide)
    right = grads(y, up, *wide)
    d = BackwardDump(tmp_path / "d")
    norm = (x, w), {"epsilon": 1e-6}, (y.bfloat16(), torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6))
    for n in (0, 1):
        d.forward(f"NPU.npu_rms_norm.{n}.forward", *norm)
    d.forward("Functional.silu.0.forward", (x,), {}, (torch.nn.functional.silu(x),))
    d.forward("Torch.matmul.0.forward", (x, x.T), {}, (x @ x.T,))
    s = x.float().requires_grad_()
    d.backward("Functional.silu.0.backward", (up,), (grads(torch.nn.functional.silu(s), up, s)[0],))
    d.backward("NPU.npu_rms_norm.1.backward", (up, None), (right[0], right[1], None))
    # the mean over the row is left out; as some versions write it, without the arguments that have none
    d.backward("NPU.npu_rms_norm.0.backward", (up,), (wide[1].detach() * up.float() * norm[2][1], right[1]))
    d.backward("NPU.npu_swiglu.0.backward", (up,), (up,))
    code, found = checked(d, tmp_path / "o")
    assert code == 1
    assert found["backward.Functional:silu", "0:grad.output.0"] == "pass"  # opcheck/compat/msprobe.py
    assert found["backward.NPU:npu_rms_norm", "1:output.0"] == "pass"
    assert found["backward.NPU:npu_rms_norm", "1:output.1"] == "pass"
    assert found["backward.NPU:npu_rms_norm", "0:output.0"] == "fail"
    assert found["backward.NPU:npu_rms_norm", "0:output.1"] == "pass"
    assert found["backward.NPU:npu_swiglu", "0:"] == "a gradient whose forward call was not captured"
    assert {v for (tap, _), v in found.items() if not tap.startswith("backward.")} == {"pass"}


def test_the_number_in_the_name_pairs_calls_inside_a_module(tmp_path: Path) -> None:
    """Backward runs come in the other order, and are numbered anew where they were called."""
    module = "Module.model.mlp.MLP.forward.0"
    d = BackwardDump(tmp_path / "d")
    ups = []
    for n in (4, 5):
        x, up = draw(8, 24), draw(8, 12)
        s = x.float().requires_grad_()
        a, b = s.chunk(2, -1)
        y = torch.nn.functional.silu(a) * b
        d.forward(f"NPU.npu_swiglu.{n}.forward", (x,), {"dim": -1}, (y.bfloat16(),), module)
        ups.append((n, up, grads(y, up, s)))
    for n, up, g in reversed(ups):
        d.backward(f"NPU.npu_swiglu.{n}.backward", (up,), tuple(g), module.replace("forward", "backward"))
    code, found = checked(d, tmp_path / "o")
    assert code == 0
    assert {v for (tap, _), v in found.items() if tap.startswith("backward.")} == {"pass"}
    assert len(found) == 4


def test_modules(tmp_path: Path) -> None:
    x, w, up = draw(6, 40), draw(16, 40), draw(6, 16)
    d = BackwardDump(tmp_path / "d")
    d.forward("Module.fc.Linear.forward.0", (x,), {}, (torch.nn.functional.linear(x, w),), weight=w)
    d.backward("Module.fc.Linear.backward.0", (up,), ((up.float() @ w.float()).bfloat16(),))
    d.forward("Module.act.SiLUActivation.forward.0", (x,), {}, (torch.nn.functional.silu(x),))
    d.backward("Module.act.SiLUActivation.backward.0", (x,), (torch.nn.functional.silu(x),))  # the forward once more
    code, found = checked(d, tmp_path / "o")
    assert code == 1
    assert found["backward.fc", "0:output.0"] == "pass"
    assert found["backward.act", "0:output.0"] == "fail"


@pytest.mark.parametrize("missing", ["input.0", "input.1"])
def test_a_forward_call_that_is_incomplete_is_told(missing: str, tmp_path: Path) -> None:
    x, w = draw(4, 8), draw(8)
    d = BackwardDump(tmp_path / "d")
    d.forward("NPU.npu_rms_norm.0.forward", (x, w), {}, (x,))
    d.backward("NPU.npu_rms_norm.0.backward", (x,), (x, w))
    (d.place / "dump_tensor_data" / f"NPU.npu_rms_norm.0.forward.{missing}.pt").unlink()
    code, found = checked(d, tmp_path / "o")
    assert code == 3
    assert found["backward.NPU:npu_rms_norm", "0:"] == f"of its forward call: argument {missing} was not kept"


Recorded = Callable[[str], Path]


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_every_recorded_gradient_is_checked(recorded: Recorded, tmp_path: Path, task: str) -> None:
    code, found = opcheck(recorded(task), tmp_path / "out")
    assert code == 0
    gradients = [r for r in found if r["tap"].startswith("backward.")]
    assert {r["status"] for r in found} == {"pass"}
    # of the products bias, input and weight, as autograd has them; of the others what went into them
    assert len([r for r in gradients if r["op"] == "Functional.linear"]) == 6
    assert {r["op"] for r in gradients} >= {"Functional.gelu", "Functional.layer_norm", "Torch.rsqrt", "Tensor.pow"}
    assert all(r["role"].startswith("grad.output.") for r in gradients)
    assert all(("weaker evidence" in r["message"]) is (task == "statistics") for r in gradients)


@pytest.mark.parametrize("name", ["Functional.linear.1.backward.output.2", "Functional.gelu.0.backward.output.0"])
def test_a_wrong_gradient_is_found(recorded: Recorded, tmp_path: Path, name: str) -> None:
    home = tmp_path / "dump"
    shutil.copytree(recorded("tensor").parent, home)
    file = home / "dump_tensor_data" / f"{name}.pt"
    values = torch.load(file, weights_only=True)
    torch.save(values * 1.01, file)
    code, found = opcheck(home / "dump.json", tmp_path / "out")
    assert code == 1
    assert [r["role"] for r in found if r["status"] == "fail"] == [f"grad.{name.partition('backward.')[2]}"]
