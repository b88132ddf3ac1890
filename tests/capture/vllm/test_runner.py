"""One adapter around a runner and those who listen to it: what they are told, in which order, and what they may break.

The runners are ../test_runner_steps.py's; what a capture makes of the calls is tested there."""

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace as Plain
from typing import Any

import pytest
import torch
from fake_runners import PARALLEL, Output, new, without_vllm
from test_runner_steps import Drafting, PoolingV2, Runner

from vllm_accprobe.capture.errcheck import observer as errcheck
from vllm_accprobe.capture.errcheck.observer import ErrcheckExit, ErrcheckObserver
from vllm_accprobe.capture.vllm.capturing import CaptureObserver
from vllm_accprobe.capture.vllm.runner import RunnerAdapter, allow_tiles
from vllm_accprobe.capture.vllm.step_observer import EngineStep, StepObserver
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import open_dump


class Listener(StepObserver):
    """Writes down what it hears, with its name; raises where it is told to."""

    awake = True  # type: ignore[assignment]
    without = "nobody listens"

    def __init__(self, name: str, heard: list[str], breaks: str = ""):
        self.name, self.heard, self.breaks = name, heard, breaks

    def say(self, what: str) -> None:
        self.heard.append(f"{self.name} {what}")
        if what.partition(" ")[0] == self.breaks:
            raise ValueError(what)

    def loaded(self) -> None:
        self.say("loaded")

    def begin_step(self, step: EngineStep) -> None:
        self.say(f"begin {step.number} {dict(step.counts)} {[(n.name, n.length) for n in step.new]}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.heard.append(f"{self.name} in")
        yield
        self.heard.append(f"{self.name} out")

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        self.heard.append(f"{self.name} drafts")
        yield

    def computed(self) -> None:
        self.say("computed")

    def end_step(self) -> None:
        self.say("end")

    def failed(self, where: str, error: BaseException) -> None:
        self.heard.append(f"{self.name} failed at {where}: {error}")

    def close(self, reason: str) -> None:
        self.say(f"close {reason}")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch, errcheck)


def observed(runner: Any, *observers: StepObserver) -> tuple[RunnerAdapter, Any]:
    worker = Plain(model_runner=runner, execute_dummy_batch=lambda: runner._dummy_run())
    adapter = RunnerAdapter(worker, runner, PARALLEL)
    for observer in observers:
        adapter.add(observer)
    runner.load_model()
    return adapter, worker


def test_the_last_one_added_stands_outermost() -> None:
    heard: list[str] = []
    runner = Runner(pools=False)
    adapter, _ = observed(runner, Listener("a", heard), Listener("b", heard))
    runner.execute_model(new(r=3))
    runner.sample_tokens()
    adapter.close("test")
    begin = "begin 0 {'r': 3} [('r', 3)]"
    assert heard == [
        "a loaded", "b loaded",
        "a end", "b end", f"b {begin}", f"a {begin}", "b in", "a in", "a out", "b out", "a computed", "b computed",
        "b in", "a in", "a out", "b out", "a end", "b end",
        "b close test", "a close test",
    ]  # fmt: skip
    assert not hasattr(runner.execute_model.__accprobe__, "__accprobe__")  # wrapped once


def test_what_is_no_step_has_no_number() -> None:
    heard: list[str] = []
    runner = PoolingV2()
    observed(runner, Listener("a", heard))
    del heard[:]
    runner.execute_model(new(dummy=3), dummy_run=True)
    assert heard == ["a end"]
    old = Runner(pools=True)
    _, worker = observed(old, Listener("a", heard))
    worker.execute_dummy_batch()
    del heard[:]
    for out in (new(_warmup_0=2), new(r=2), Output([], Plain(req_ids=[], num_computed_tokens=[]), {})):
        with contextlib.suppress(RuntimeError):  # the toy cannot compute an empty batch
            old.execute_model(out)
    assert [line for line in heard if "begin" in line] == [
        "a begin None {'_warmup_0': 2} [('_warmup_0', 2)]", "a begin 0 {'r': 2} [('r', 2)]", "a begin None {} []",
    ]  # fmt: skip


@pytest.mark.parametrize("newer", [False, True])
def test_drafts_are_told_once(newer: bool) -> None:
    heard: list[str] = []
    runner = Drafting(newer)
    observed(runner, Listener("a", heard))
    runner.load_model()  # weights loaded anew: the speculator is not wrapped again
    runner.execute_model(new(r=3))
    assert runner.sample_tokens() == "drafts"
    assert heard.count("a drafts") == 1


@pytest.mark.parametrize("breaks", ["loaded", "begin", "computed", "end"])
def test_what_one_breaks_reaches_neither_the_model_nor_the_other(breaks: str) -> None:
    heard: list[str] = []
    runner = Runner(pools=False)
    observed(runner, Listener("good", heard), Listener("bad", heard, breaks))
    runner.execute_model(new(r=3))
    assert runner.sample_tokens() == "tokens"
    assert any(line.startswith("bad failed at") for line in heard)
    told = [line.partition(" ")[2] for line in heard if line.startswith("good")]
    assert [line.split()[0] for line in told] == ["loaded", "end", "begin", "in", "out", "computed", "in", "out", "end"]


def test_a_scheduler_that_cannot_be_read_is_told_to_all() -> None:
    heard: list[str] = []
    runner = Runner(pools=False)
    observed(runner, Listener("a", heard), Listener("b", heard))
    out = new(r=3)
    del out.scheduled_new_reqs[0].mm_features, out.scheduled_new_reqs[0].num_computed_tokens
    out.finished_req_ids = None  # type: ignore[assignment]
    runner.execute_model(out)
    assert [line.partition(":")[0] for line in heard if "failed" in line] == [
        "a failed at reading the scheduler's output", "b failed at reading the scheduler's output",
    ]  # fmt: skip


def test_what_an_observer_wants_raised_is_raised_when_the_step_is_over() -> None:
    heard: list[str] = []
    listener = Listener("a", heard)
    runner = Runner(pools=False)
    observed(runner, listener)
    listener.stopping = KeyError("asked for")
    with pytest.raises(KeyError, match="asked for"):
        runner.execute_model(new(r=3))
    assert heard[-1] == "a computed"
    assert runner.sample_tokens() == "tokens"  # once


class Poisoned(Runner):
    """From its second step on the pooler gives NaN."""

    steps = 0

    def execute_model(self, out: Output, intermediate_tensors: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            with torch.no_grad():
                self.model.pooler.weight.fill_(torch.nan)
        return super().execute_model(out)


@pytest.mark.parametrize("exits", [False, True])
def test_a_capture_and_errcheck_listen_to_one_runner(tmp_path, exits, monkeypatch):
    register = tmp_path / "register"
    register.touch()
    monkeypatch.setenv("ACCPROBE_RUN_REGISTER", str(register))
    runner = Poisoned(pools=True)
    worker = Plain(model_runner=runner)
    adapter = RunnerAdapter(worker, runner, PARALLEL)
    kinds = ("nan", "exit") if exits else ("nan",)
    config = ProbeConfig(enabled=True, dir=str(tmp_path / "dump"), errcheck=kinds)
    adapter.add(CaptureObserver(config, adapter))
    adapter.add(ErrcheckObserver(config, adapter))
    runner.load_model()
    runner.execute_model(new(a=5))
    if exits:
        with pytest.raises(ErrcheckExit, match=r"accprobe errcheck stops this engine: .*pooler"):
            runner.execute_model(new(b=4))
    else:
        runner.execute_model(new(b=4))
    adapter.close("test")
    dump = open_dump(tmp_path / "dump")
    assert dump.problems == []
    assert [(r.step, r.tap) for r in dump.records if r.role == "output.0"] == [
        (step, tap) for step in (0, 1) for tap in ("embed", "<root>", "pooler")
    ]  # fmt: skip
    report = json.loads((tmp_path / "dump" / "errcheck" / "errcheck-rank0000.json").read_text())
    assert report["state"] == "closed"
    assert report["steps"] == 2
    assert (report["first"]["step"], report["first"]["tap"]) == (1, "pooler")
    kept = open_dump(tmp_path / "dump" / "errcheck")
    assert [(r.step, r.tap, r.role) for r in kept.records if r.role == "output.0"] == [(1, "pooler", "output.0")]
    for module in runner.model.modules():
        assert "forward" not in vars(module)  # both have taken off what they put on
    assert register.read_text() == f"{tmp_path / 'dump'}\n"  # the finding's small dump is a part of it


@pytest.mark.parametrize(("device", "amx", "requested"), [("cpu", True, 1), ("cpu", False, 0), ("meta", True, 0)])
def test_a_cpu_with_tiles_may_use_them(device: str, amx: bool, requested: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: calls.append(1))
    allow_tiles(torch.device(device))
    assert len(calls) == requested
