"""Other things to check against: a golden dump, this machine's own code, drawn inputs, gradients."""

import importlib.util
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.layer_dumps import build
from support.csv_rows import csv_rows
from support.opchecked import opcheck

from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.cli import main
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.random_inputs import WEAKER, DrawnMoments, draw
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.reference import Call, Declined, device_kernel
from vllm_accprobe.opcheck.references import activations, linear
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run import check_calls, rerun, synthetic_inputs
from vllm_accprobe.opcheck.run.check_calls import Options
from vllm_accprobe.opcheck.run.rerun import forward_native
from vllm_accprobe.opcheck.run.result_row import CheckResult


def run(dump: Path, out: Path, *arguments: str) -> tuple[int, dict[str, set[str]]]:
    """Exit code, and the statuses of each operator."""
    code, rows = opcheck(dump, out, *arguments)
    found: dict[str, set[str]] = {}
    for r in rows:
        found.setdefault(r["op"], set()).add(r["status"])
    return code, found


def test_against_a_golden_only_equal_inputs_decide(tmp_path: Path) -> None:
    """mine's o_proj is scaled: its inputs are golden's. Other inputs: tests/freeze, opcheck-options."""
    golden = build(tmp_path / "g")
    code, found = run(build(tmp_path / "m", "layers.0.self_attn.o_proj"), tmp_path / "o", "--against", str(golden))
    assert code == 1
    assert {op for op, s in found.items() if s == {"fail"}} == {"RowParallelLinear"}
    assert found["Attention"] == {"pass"}
    assert found["NobodyKnows"] == {"pass"}  # golden needs no reference


@pytest.mark.parametrize("fault", ["", "layers.0.norm", "layers.0.self_attn.attn"])
def test_rerun_finds_what_this_machine_would_not_have_given(tmp_path: Path, fault: str) -> None:
    code, found = run(build(tmp_path / "d", fault), tmp_path / "o", "--rerun")
    assert code == (1 if fault else 0)
    wrong = {"layers.0.norm": "RMSNorm", "layers.0.self_attn.attn": "Attention"}
    assert {op for op, s in found.items() if "fail" in s} == ({wrong[fault]} if fault else set())
    assert found["NobodyKnows"] == {"skip"}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_vllms_native_code_is_its_own_and_torchs_agrees() -> None:
    g = torch.Generator().manual_seed(0)
    x, r, w = (torch.randn(*s, generator=g).bfloat16() for s in ((6, 32), (6, 32), (32,)))
    norm = Call("n", "RMSNorm", inputs={"x": x, "residual": r}, params={"weight": w},
                attrs={"variance_epsilon": 1e-5, "hidden_size": 32},
                outputs={"output.0": x, "output.1": r})  # fmt: skip
    calls = [norm, Call("a", "SiluAndMul", inputs={"x": x}, outputs={"output.0": x})]
    references = default_references()
    for call in calls:
        theirs, ours = forward_native(call), references.run(call)
        assert theirs is not None
        assert not isinstance(ours, Declined)
        for role, value in theirs.items():
            assert torch.allclose(value.double(), ours[role].double(), rtol=2**-7, atol=2**-7)
    assert forward_native(replace(norm, cls="Nobody")) is None
    assert forward_native(replace(norm, attrs={}, inputs={})) is None


# --- drawn inputs ------------------------------------------------------------------------------------------------


def statistics_only(root: Path) -> Calls:
    """The calls of a dump as VLLM_ACCPROBE_TASK=stats leaves it: no payload but parameters'."""
    calls = Calls(open_dump(build(root)), None)
    for steps in calls.by_tap.values():
        for records in steps.values():
            for role, r in records.items():
                records[role] = replace(r, payload=None)
    return calls


def drawn_rows(calls: Calls, seed: int = 0) -> dict[str, list[CheckResult]]:
    found: dict[str, list[CheckResult]] = {}
    for rank, tap, cls in calls.taps():
        for captured in calls.of(rank, tap):
            assert synthetic_inputs.possible(captured)
            drawn = synthetic_inputs.drawn(calls, captured, seed)
            found.setdefault(cls, []).extend(
                synthetic_inputs.check(calls, drawn, default_references(), "cpu", Options(), True)
            )
    return found


def test_statistics_are_checked_with_drawn_inputs_and_say_so(tmp_path: Path) -> None:
    calls = statistics_only(tmp_path / "d")
    first, again, other = (drawn_rows(calls, seed) for seed in (0, 0, 1))
    for cls in ("RMSNorm", "QKVParallelLinear", "RowParallelLinear"):
        assert [r.status for r in first[cls]] == ["pass"] * 3
        assert all(WEAKER in r.message for r in first[cls])
        assert [r.measured for r in first[cls]] == [r.measured for r in again[cls]]
        assert [r.measured for r in first[cls]] != [r.measured for r in other[cls]]
    assert {r.status for r in first["Attention"] + first["NobodyKnows"]} == {"skip"}
    assert first["Attention"][0].message.endswith("drawn: the keys and values that it looked back at were not captured")


def test_lost_values_are_not_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged file is no stats dump: nothing is drawn in its place, and nothing checked is no PASS."""
    root = build(tmp_path / "d")
    (segment,) = root.rglob("seg-*.safetensors")
    segment.write_bytes(b"\xff" * 8 + segment.read_bytes()[8:])
    calls = Calls(open_dump(root), None)
    found = [captured for rank, tap, _ in calls.taps() for captured in calls.of(rank, tap)]
    assert found
    assert not any(map(synthetic_inputs.possible, found))
    assert main(["opcheck", str(root), "--out", str(tmp_path / "out")]) == 3
    assert "nothing could be checked: its values are lost: their file is" in capsys.readouterr().err


def test_a_wrong_kernel_of_this_machine_shows_on_drawn_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = statistics_only(tmp_path / "d")
    right = linear.linear_kernel

    @device_kernel("RowParallelLinear")
    def wrong(call: Call) -> dict[str, Any]:
        return {k: v * 1.02 for k, v in right(call).items()}

    monkeypatch.setattr(linear, "linear_kernel", wrong)
    assert [r.status for r in drawn_rows(calls)["RowParallelLinear"]] == ["fail"] * 3


def test_what_is_drawn_keeps_to_the_moments() -> None:
    g = torch.Generator().manual_seed(0)
    x = draw((400, 50), "bfloat16", DrawnMoments(-1.0, 4.0, 1.0, 0.5), g)
    assert x.dtype == torch.bfloat16
    assert float(x.min()) >= -1
    assert float(x.max()) <= 4
    assert abs(float(x.double().mean()) - 1.0) < 0.02
    assert abs(float(x.double().std()) - 0.5) < 0.02
    ids = draw((1000,), "int64", DrawnMoments(3, 6, None, None), g)
    assert sorted(set(ids.tolist())) == [3, 4, 5, 6]
    for shape, dtype in (((1 << 20, 1 << 20), "float32"), ((2,), "no_dtype")):
        with pytest.raises(Declined, match="can be drawn"):
            draw(shape, dtype, DrawnMoments(None, None, None, None), g)


# --- gradients ---------------------------------------------------------------------------------------------------


def captured(call: Call) -> Captured:
    """A Captured of which only the call counts."""
    records: Mapping[str, Record] = {}
    return Captured(call.name, 0, 0, 0, call, records)


def gradients(call: Call) -> dict[str, CheckResult]:
    return {r.role: r for r in check_calls.check_backward(captured(call), default_references())}


def test_gradients_agree_with_autograd_in_float64() -> None:
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(16, 64, generator=g).bfloat16(), torch.randn(64, generator=g).bfloat16()
    m = torch.randn(32, 64, generator=g).bfloat16()
    out = {"output.0": x}
    norm = Call("n", "RMSNorm", inputs={"x": x}, params={"weight": w}, attrs={"eps": 1e-5}, outputs=out)
    linear = Call("l", "Linear", inputs={"x": x}, params={"weight": m}, outputs={"output.0": (x.float() @ m.float().T)
                  .bfloat16()})  # fmt: skip
    gate = Call("a", "SiluAndMul", inputs={"x": x}, outputs={"output.0": x[:, :32]})
    product = Call("p", "aten.mm.default", args=(x, m.T), outputs=linear.outputs)
    for call, roles in (
        (norm, {"grad.input.x", "grad.param.weight"}), (linear, {"grad.input.x", "grad.param.weight"}),
        (gate, {"grad.input.x"}), (product, {"grad.input.0", "grad.input.1"}),
    ):  # fmt: skip
        found = gradients(call)
        assert set(found) == roles
        assert {r.status for r in found.values()} == {"pass"}, found
        assert all(r.severity > 0.01 for r in found.values())


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return torch.relu(x)

        @staticmethod
        def backward(ctx: Any, up: Any) -> Any:  # type: ignore[override]
            return up * 0.97  # also where x < 0

    @device_kernel("ReLU")
    def relu(call: Call) -> Any:
        return Wrong.apply(call.tensor("x"))

    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    call = Call("r", "ReLU", inputs={"x": x}, outputs={"output.0": torch.relu(x)})
    assert {r.status for r in gradients(call).values()} == {"pass"}
    monkeypatch.setattr(activations, "at_once_kernel", relu)
    assert {r.status for r in gradients(call).values()} == {"fail"}


def test_what_has_no_gradient_says_so() -> None:
    x = torch.randn(4, 8)
    ids = Call("e", "aten.argmax.default", args=(x, 1), outputs={"output.0": x.argmax(1)})
    (row,) = check_calls.check_backward(captured(ids), default_references())
    assert (row.status, row.message) == ("skip", "no gradient: its output is no floating-point tensor")
    block = Call("b", "LlamaMLP", inputs={"x": x}, outputs={"output.0": x})
    (row,) = check_calls.check_backward(captured(block), default_references())
    assert row.status == "skip"


def test_statistics_of_a_plain_model_are_nearly_all_checked(tmp_path: Path) -> None:
    """Modules and operators whose parameters left fingerprints only: all but what has no reference."""
    block = [torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)]
    model = torch.nn.Sequential(torch.nn.Embedding(20, 16), *block).bfloat16()
    probe = Probe(model, ProbeConfig.from_kwargs(dir=tmp_path / "d", task="stats", ops=True))
    with torch.no_grad():
        model(torch.arange(12).reshape(2, 6))
    probe.close()
    code, rows = opcheck(tmp_path / "d", tmp_path / "out")
    assert code == 0
    passed = {r["op"] for r in rows if r["status"] == "pass"}
    assert passed >= {"Embedding", "Linear", "GELU", "LayerNorm", "aten.embedding.default", "aten.addmm.default",
                      "aten.gelu.default", "aten.native_layer_norm.default"}  # fmt: skip
    assert {r["op"] for r in rows if r["status"] != "pass"} <= {"Sequential"}
    assert all(WEAKER in r["message"] for r in rows if r["status"] == "pass")


def test_a_call_without_tensors_takes_a_parameter_as_it_was_passed(tmp_path: Path) -> None:
    """Expanded, as rotary frequencies are: [16] in the dump, [2, 16, 1] in the call, whose inputs are drawn."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.rand(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(self.inv_freq[None, :, None].expand(2, -1, 1), x)

    model = Model()
    with Probe(model, dir=tmp_path / "d", ops=True, ops_mode="sample", ops_calls=1):
        for _ in range(3):
            model(torch.randn(2, 1, 7))
    code, found = run(tmp_path / "d", tmp_path / "o", "--ops", "aten.bmm*")
    assert code == 0
    assert found["aten.bmm.default"] == {"pass"}
    assert any(WEAKER in r["message"] for r in csv_rows(tmp_path / "o/opcheck.csv"))


def test_a_layer_norm_whose_parameters_are_float32_runs_here() -> None:
    """As vLLM's LayerNorm of an indexer's keys has them."""
    x, weight, bias = torch.randn(4, 16).bfloat16(), torch.rand(16), torch.randn(16)
    call = Call("k_norm", "LayerNorm", inputs={"x": x}, params={"weight": weight, "bias": bias}, attrs={"eps": 1e-6},
                outputs={"output.0": x})  # fmt: skip
    found = default_references().run(call)
    assert torch.equal(found["output.0"], torch.nn.functional.layer_norm(x, [16], weight, bias, 1e-6))


def test_its_warnings_are_not_repeated(tmp_path, monkeypatch, capfd):
    (tmp_path / "talkative_vllm.py").write_text(
        "import logging\nlogging.getLogger('vllm.x').warning('Triton has no CPU backend')\nclass ThereInQuiet: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rerun.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(rerun, "_MODULES", {"talkative_vllm": ("ThereInQuiet",)})
    found = rerun._native_class("ThereInQuiet")
    assert found is sys.modules["talkative_vllm"].ThereInQuiet
    assert capfd.readouterr().err == ""
    assert not logging.root.manager.disable
