"""Scripts written for torch_xray and msprobe go on working, and write our dump."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.toy import Toy

from vllm_accprobe import PrecisionDebugger
from vllm_accprobe.config import ConfigError
from vllm_accprobe.debugger import read_settings
from vllm_accprobe.dump.reader import Dump, open_dump

IDS = torch.tensor([[3, 1, 4, 1]])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    from vllm_accprobe import debugger

    yield
    for one in list(debugger._open.values()):
        one.close()


def once(**how: Any) -> PrecisionDebugger:
    """One forward of a new model, captured and closed."""
    model = Toy()
    debugger = PrecisionDebugger(model=model, **how)
    debugger.start()
    model(IDS)
    debugger.close()
    return debugger


def steps(dump: Dump) -> list[int]:
    return sorted({step for _, step in dump.steps})


def test_torch_xray_made_in_every_step(tmp_path: Path) -> None:
    """The guide's example: made and started inside execute_model; step=[1] is the first forward."""
    model = Toy()
    bare = model(IDS)["logits"]
    before = dict(model.__dict__)
    for _ in range(4):
        debugger = PrecisionDebugger(
            dump_path=str(tmp_path / "d"), hook_name="dump", rank=[0], step=[1], model=model, dump_torch_api=False
        )
        debugger.start()
        assert torch.equal(model(IDS)["logits"], bare)
    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    assert 0 in dump.ends  # complete after its only step, in a process that goes on
    assert steps(dump) == [1]
    assert {"embed", "layers.0", "norm", "<root>"} <= {r.tap for r in dump.records}
    assert model.__dict__ == before  # all taps are off again
    assert not (tmp_path / "d.2").exists()


@pytest.mark.parametrize("stops", [False, True])
def test_torch_xray_counts_forwards_from_one(tmp_path: Path, stops: bool) -> None:
    """Started once, or with stop and step around each forward."""
    model = Toy()
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "d"), hook_name="dump", step=[2, 4], model=model)
    debugger.start()
    for _ in range(6):
        model(IDS)
        if stops:
            debugger.stop()
            debugger.step()
            debugger.start()
    assert steps(open_dump(tmp_path / "d")) == [2, 4]


def test_msprobe_counts_its_own_steps(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "task": "statistics", "dump_path": str(tmp_path / "d"), "rank": [], "step": ["1-2"], "level": "L0",
        "extra_info": False, "statistics": {"scope": [], "list": ["Module.layers.1.Block.forward.0", "norm"],
                                            "data_mode": ["output"], "summary_mode": "statistics"},
    }))  # fmt: skip
    model = Toy()
    debugger = PrecisionDebugger(str(config))
    for _ in range(4):
        debugger.start(model=model)
        model(IDS)
        debugger.stop()
        model(IDS)  # not captured
        debugger.step()
    dump = open_dump(tmp_path / "d")
    assert steps(dump) == [1, 2]
    assert {r.name for r in dump.records if r.step == 1} == {"layers.1/output.0", "norm/output.0"}
    assert all(r.payload is None for r in dump.records)


def test_without_chosen_steps_it_goes_on_until_it_is_closed(tmp_path: Path) -> None:
    model = Toy()
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path / "d")
    for _ in range(3):
        debugger.start(model)
        model(IDS)
        debugger.stop()
        debugger.step()
    assert debugger.dump == tmp_path / "d"
    debugger.close()
    assert steps(open_dump(tmp_path / "d")) == [0, 1, 2]


def test_a_second_run_never_writes_over_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        once(dump_path=tmp_path / "d")
    assert "already holds rank 0; this dump goes to" in caplog.text
    assert steps(open_dump(tmp_path / "d")) == steps(open_dump(tmp_path / "d.2")) == [1]


def test_operator_calls_too(tmp_path: Path) -> None:
    once(dump_path=tmp_path / "d", hook_name="dump", dump_torch_api=True)
    assert any(op.op.startswith("aten") for op in open_dump(tmp_path / "d").ops)


def test_what_is_left_open_is_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("", "1"), ("_DIR", str(tmp_path / "env")), ("_TASK", "stats"), ("_MODULES", "norm")):
        monkeypatch.setenv(f"VLLM_ACCPROBE{name}", value)
    for path, where in ((None, "env"), (tmp_path / "own", "own")):
        once(dump_path=path, hook_name="dump")
        records = [r for r in open_dump(tmp_path / where).records if r.step is not None]
        assert {r.tap for r in records} == {"norm"}
        assert all(r.payload is None for r in records)


def test_inside_vllm_the_environments_settings_are_the_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("", "1"), ("_RUN_ID", "1-a"), ("_MODULES", "lm_head")):
        monkeypatch.setenv(f"VLLM_ACCPROBE{name}", value)
    once(dump_path=tmp_path / "d", hook_name="dump")
    assert {"norm", "<root>"} <= {r.tap for r in open_dump(tmp_path / "d").records}


def test_it_is_announced_to_accprobe_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register = tmp_path / "register"
    register.touch()
    monkeypatch.setenv("ACCPROBE_RUN_REGISTER", str(register))
    PrecisionDebugger(dump_path=tmp_path / "d", model=Toy()).start()
    assert register.read_text() == f"{tmp_path / 'd'}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"task": "acc_check"}, r"task=acc_check: capture a dump and run `accprobe opcheck DUMP`"),
        ({"task": "nan_check"}, r"task=nan_check: run `accprobe errcheck -- CMD`"),
        ({"task": "nonsense"}, r"task=nonsense: known are tensor and statistics"),
        ({"level": "L2"}, r"level=L2: known are L0, L1 and mix"),
        ({"hook_name": "grad"}, r"hook_name=grad: only 'dump' exists here"),
        ({"step": ["x"]}, r"step=\['x'\]: 'x' is not a number or a range"),
        ({"dump_dir": "x"}, r"PrecisionDebugger has no argument 'dump_dir'; known are config_path"),
        ({"config_path": "no/such.json"}, r"config_path=no/such.json: No such file"),
    ],
)
def test_what_does_not_map_is_refused_in_one_line(arguments: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        PrecisionDebugger(**arguments)
    assert "\n" not in str(caught.value)


def test_what_has_no_effect_is_noted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"task": "tensor", "dump_path": str(tmp_path / "d"), "async_dump": True, "odd": 1,
                                  "tensor": {"scope": ["a"], "data_mode": ["all", "backward"]}}))  # fmt: skip
    for _ in range(2):
        debugger = PrecisionDebugger(config_path=str(config))
        debugger.start(Toy(), token_range=[0, 1])
    lines = [r.getMessage() for r in caplog.records if "PrecisionDebugger: " in r.getMessage()]
    assert [line.partition("PrecisionDebugger: ")[2].partition(":")[0] for line in lines] == [
        "backward is not captured",
        "scope of the config file's tensor block is ignored",
        "async_dump of the config file",
        "odd of the config file is not known here",
        "start() ignores token_range",
        f"the dump goes to {tmp_path / 'd'}",
    ]


def _read(config: Path, **file: object) -> Any:
    config.write_text(json.dumps({"dump_path": "d", **file}))
    return read_settings(config)


def test_what_means_something_here_is_taken(tmp_path: Path) -> None:
    block = {"list": ["mlp"], "data_mode": "input", "summary_mode": "md5", "request_id": "chat-7"}
    found = _read(tmp_path / "config.json", task="statistics", statistics=block)
    assert (found.probe.modules, found.probe.parts, found.probe.requests) == (("*mlp*",), ("input",), ("chat-7",))
    assert found.probe.task == "stats"
    assert found.notes == ()
    (note,) = _read(tmp_path / "config.json", task="statistics", statistics={"summary_mode": ["max"]}).notes
    assert "summary_mode of the config file's statistics block is ignored" in note


@pytest.mark.parametrize(
    ("block", "line"),
    [
        (5, r"tensor of the config file is '5', not a JSON object with list and data_mode"),
        ({"list": 5}, r"tensor.list=5: a list of names is expected"),
        ({"list": [5]}, r"tensor.list=\[5\]: a list of names is expected"),
        ({"list": ["name-regex(.*mlp)"]}, r"list: name-regex\(\.\*mlp\): no regular expressions here"),
        ({"data_mode": ["inputs"]}, r"tensor.data_mode=inputs: known are all, .*; did you mean input\?"),
        ({"request_id": {}}, r"tensor.request_id=\{\}: a list of names is expected"),
    ],
)
def test_a_value_of_a_task_that_cannot_be(block: object, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line):
        _read(tmp_path / "config.json", task="tensor", tensor=block)


def test_a_rank_that_is_not_asked_for_writes_nothing(tmp_path: Path) -> None:
    once(dump_path=tmp_path / "d", rank=[1])
    assert not (tmp_path / "d").exists()


def test_trouble_never_reaches_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    model = Toy()
    debugger = PrecisionDebugger(dump_path=tmp_path / "file" / "d", model=model)
    debugger.start()
    model(IDS)
    assert "Not a directory" in caplog.text
    assert "NOTHING is captured" in caplog.text
    PrecisionDebugger(dump_path=tmp_path / "e").start()
    assert "start() without a model" in caplog.text
