"""begin_dump and end_dump around any code: a step each, one dump for all of them, torch_xray's spellings."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from vllm_accprobe import begin_dump, end_dump
from vllm_accprobe.capture.ops import begin_end
from vllm_accprobe.config import ConfigError
from vllm_accprobe.dump.journal import inputs
from vllm_accprobe.dump.reader import open_dump


def test_each_stretch_is_a_step_of_one_dump(tmp_path: Path) -> None:
    x = torch.tensor([1.0, 2.0])
    for k in range(3):
        x + 100  # outside
        begin_dump(tmp_path / "d", mode="full")
        x * k
        assert end_dump() == tmp_path / "d"
    x + 100
    with begin_dump(tmp_path / "d"):
        x - 1
    begin_dump(tmp_path / "d")
    end_dump(close=True)
    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    assert [(c.step, c.op, c.module) for c in dump.ops] == [
        (0, "aten.mul.Tensor", None), (1, "aten.mul.Tensor", None), (2, "aten.mul.Tensor", None),
        (3, "aten.sub.Tensor", None),
    ]  # fmt: skip
    last = next(r for r in dump.records if r.step == 2 and r.role == "output.0")
    assert dump.read(last).tolist() == [2.0, 4.0]
    assert len(dump.steps) == 5


def test_an_old_dumps_path_gets_a_number_and_both_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = tmp_path / "register"
    register.touch()
    monkeypatch.setenv("ACCPROBE_RUN_REGISTER", str(register))
    for _ in range(2):
        begin_dump(tmp_path / "d")
        end_dump(close=True)
    assert register.read_text() == f"{tmp_path / 'd'}\n{tmp_path / 'd.2'}\n"


def test_modules_and_parameters_are_named_by_the_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU()))
    with torch.no_grad():
        begin_dump(tmp_path / "d", model=model)
        model(torch.ones(1, 2))
        torch.ones(3)
        end_dump(close=True)
        model(torch.ones(1, 2))
    dump = open_dump(tmp_path / "d")
    places = {c.op: (c.module, c.module_call) for c in dump.ops}
    linear = next(op for op in places if op in ("aten.addmm.default", "aten.linear.default"))
    assert places[linear] == ("0", 0)
    assert places["aten.relu.default"] == ("1.0", 0)
    assert places["aten.ones.default"] == (None, 0)
    assert {t.get("param") for c in dump.ops if c.op == linear for t in inputs(c)} == {
        None, "0/param.weight", "0/param.bias",
    }  # fmt: skip
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_torch_xrays_spellings(tmp_path: Path) -> None:
    begin_dump(tmp_path / "trace", X_DEBUG=0x102)
    begin_dump(tmp_path / "both", X_DEBUG=0x102, X_DEDUP=True, X_DUMP_NUM=1)
    for k in range(4):
        torch.ones(2 + k // 2).mul(3)
    end_dump(clear_context=True, close=True)
    end_dump(close=True)
    trace = open_dump(tmp_path / "trace")
    assert [c.op for c in trace.ops].count("aten.mul.Tensor") == 4
    assert trace.records == []
    both = open_dump(tmp_path / "both")
    assert [next(inputs(c))["shape"] for c in both.ops if c.op == "aten.mul.Tensor"] == [[2], [3]]
    assert len({(r.tap, r.call) for r in both.records if "mul" in r.tap}) == 1


def test_clear_context_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        begin_dump(tmp_path / "d", mode="dedup")
        torch.ones(2).mul(3)
        end_dump(clear_context=True)
    begin_dump(tmp_path / "d")
    torch.ones(2).mul(3)
    end_dump()
    begin_dump(tmp_path / "d")
    torch.ones(2).mul(3)
    end_dump(close=True)
    assert [c.step for c in open_dump(tmp_path / "d").ops if "mul" in c.op] == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"modes": "full"}, "'modes' is not one of its settings: mode, calls, ops, max_mb, seed, max_gb"),
        ({"mode": "all"}, "'all' is not one of trace, dedup, sample, full"),
        ({"X_DEBUG": 0x101}, "X_DEBUG=0x101 is not known here"),
        ({"X_DUMP_NUM": -1}, "X_DUMP_NUM=-1 is not a number of calls"),
        ({"X_DEDUP": True, "mode": "full"}, "name only one kind"),
        ({"calls": 3}, "the mode is full"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, settings: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        begin_dump(tmp_path / "d", **settings)  # type: ignore[arg-type]
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "d").exists()


def test_ends_without_a_begin_are_said_and_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert end_dump() is None
    begin_dump(tmp_path / "d")
    other: list[object] = []
    thread = threading.Thread(target=lambda: other.append(end_dump()))
    thread.start()
    thread.join()
    assert other == [None]
    torch.ones(2)
    assert end_dump(close=True) == tmp_path / "d"
    assert [c.op for c in open_dump(tmp_path / "d").ops] == ["aten.ones.default"]


def test_the_process_end_closes_the_dump(tmp_path: Path) -> None:
    code = (
        "import torch; from vllm_accprobe import begin_dump, end_dump\n"
        f"begin_dump({str(tmp_path / 'd')!r}); torch.ones(3) * 2; end_dump(); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    assert [c.op for c in dump.ops] == ["aten.ones.default", "aten.mul.Tensor"]


@pytest.mark.parametrize(("name", "value"), [("X_DEBUG", "yes"), ("X_DEDUP", "perhaps"), ("X_DUMP_NUM", "5.5")])
def test_what_is_no_value_is_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is n"):
        begin_end.torch_xray_settings({name: value})
    assert begin_end.advice({name: value}).endswith("it is torch_xray's, and has no effect here")
