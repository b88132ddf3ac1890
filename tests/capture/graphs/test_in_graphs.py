"""A compiled region between a runner and its root, captured as in a worker: what comes into the dump, and what when
something is wrong. The engine is by hand and compiled with dynamo alone; vLLM's own is in e2e/test_graph_taps.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from vllm_accprobe.capture.graphs import drain, placement
from vllm_accprobe.capture.vllm import capturing
from vllm_accprobe.capture.vllm import compiled as in_graphs
from vllm_accprobe.capture.vllm import runner as capture_runner
from vllm_accprobe.capture.vllm.capturing import CaptureObserver
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.config import TAP_SET, ProbeConfig
from vllm_accprobe.dump.reader import Dump, open_dump

PARALLEL = {"rank": 0, "world_size": 1, "tp": [0, 1], "pp": [0, 1], "dp": [0, 1], "ep": [0, 1]}
WIDE = 9000
"""Features of ``model.up``: a row of it has 36,000 bytes."""


class RowParallelLinear(torch.nn.Linear):
    pass


class Layer(torch.nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up = RowParallelLinear(8, wide)
        self.norm = torch.nn.LayerNorm(wide)
        self.down = RowParallelLinear(wide, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Compiled(torch.nn.Module):
    """As vLLM's support_torch_compile makes a class: ``__call__`` goes past the hooks to what is compiled."""

    def __init__(self, wide: int, compiles: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.do_not_compile = not compiles
        self.layers = torch.nn.ModuleList([Layer(wide), Layer(16)])
        guards = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # as vLLM does
        self.compiled = torch.compile(self.forward, backend="eager", fullgraph=True, dynamic=True, options=guards)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) if self.do_not_compile else self.compiled(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(torch.nn.Module):
    def __init__(self, wide: int, compiles: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = torch.nn.Embedding(64, 8)
        self.model = Compiled(wide, compiles)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(self.embed(input_ids))


@dataclasses.dataclass
class Output:
    """SchedulerOutput, as far as capture reads it."""

    scheduled_new_reqs: list[Any]
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: Any = dataclasses.field(default_factory=lambda: Plain(req_ids=[], num_computed_tokens=[]))
    scheduled_spec_decode_tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    finished_req_ids: tuple[str, ...] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def new(**requests: int) -> Output:
    named = [Plain(req_id=k, num_computed_tokens=0, prompt_token_ids=list(range(n)), mm_features=[])
             for k, n in requests.items()]  # fmt: skip
    return Output(named, requests)


def more(**computed: int) -> Output:
    cached = Plain(req_ids=list(computed), num_computed_tokens=list(computed.values()))
    return Output([], dict.fromkeys(computed, 1), cached)


class Runner:
    def __init__(self, compiles: bool, wide: int = 32, fault: float = 1.0) -> None:
        self.device = "cpu"
        self.vllm_config = Plain(
            model_config=Plain(enforce_eager=not compiles, get_hidden_size=lambda: 8),
            compilation_config=Plain(mode=2 if compiles else 0, cudagraph_mode=Plain(value=0, name="NONE")),
            parallel_config=Plain(),
            speculative_config=None,
            scheduler_config=Plain(max_num_batched_tokens=64),
        )
        self.input_batch = Plain(req_ids=[])
        self.requests: dict[str, Any] = {}
        self.positions = torch.arange(64)
        self.input_ids = torch.arange(64)
        self.model = Model(wide, compiles)
        if fault != 1:
            with torch.no_grad():
                self.model.model.layers[1].down.weight.mul_(fault)

    def load_model(self) -> None: ...

    def get_model(self) -> torch.nn.Module:
        return self.model

    @torch.inference_mode()
    def execute_model(self, out: Output) -> torch.Tensor:
        for request in out.scheduled_new_reqs:
            self.requests[request.req_id] = Plain(num_tokens=len(request.prompt_token_ids))
        self.input_batch.req_ids = list(out.num_scheduled_tokens)
        n = out.total_num_scheduled_tokens
        return self.model(self.input_ids[:n], self.positions[:n])

    @torch.inference_mode()
    def _dummy_run(self, num_tokens: int, is_profile: bool = False) -> None:
        self.model(self.input_ids[:num_tokens], self.positions[:num_tokens])


Start = Callable[..., CaptureObserver]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(capturing, "run_info", lambda *_: {"tool": "accprobe", "engine": {"eager": False}})
    monkeypatch.setattr(capture_runner, "before_packing", lambda look: contextlib.nullcontext())
    monkeypatch.setenv(TAP_SET, "")
    torch._dynamo.reset()
    counters.clear()

    def started(runner: Runner, name: str = "mine", **settings: Any) -> CaptureObserver:
        worker = Plain(model_runner=runner, execute_dummy_batch=lambda: runner._dummy_run(3))
        adapter = RunnerAdapter(worker, runner, PARALLEL)
        config = ProbeConfig.from_kwargs(dir=str(tmp_path / name), graphs=True, **settings)
        probe = CaptureObserver(config, adapter)
        adapter.add(probe)
        runner.load_model()
        runner.worker = worker  # type: ignore[attr-defined]
        return probe

    return started


STEPS = (new(a=20, b=9), more(a=20, b=9), more(b=10))


def served(start: Start, name: str, runner: Runner, **settings: Any) -> tuple[Dump, list[torch.Tensor]]:
    probe = start(runner, name, **settings)
    answers = [runner.execute_model(step) for step in STEPS]
    probe.close("test")
    return open_dump(probe.root), answers


def outputs(dump: Dump) -> dict[tuple[int, str], str]:
    return {(r.step, r.tap): r.hash for r in dump.records if r.role == "output.0" and r.step is not None}


def test_the_compiled_engine_leaves_what_the_eager_one_does(start: Start) -> None:
    eager, answers = served(start, "eager", Runner(compiles=False))
    default, same = served(start, "default", Runner(compiles=True))
    assert all(map(torch.equal, answers, same))
    assert counters["stats"]["unique_graphs"] == 1
    kernels = {f"model.layers.{i}.{name}" for i in (0, 1) for name in ("up", "down")}
    assert {tap for _, tap in outputs(default)} == {"<root>", "embed", *kernels}
    want = outputs(eager)
    assert all(want[key] == hash for key, hash in outputs(default).items())
    order = [r.tap for r in default.records if r.step == 0 and r.role == "output.0"]
    assert order == [r.tap for r in eager.records if r.step == 0 and r.role == "output.0" and r.tap in order]
    reasons = {s.tap: s.reason for s in default.skips}
    assert reasons["model.layers.0"] == reasons["model.layers.1.norm"] == placement.NOT_DEFAULT
    facts = default.run["engine"]["graphs"]
    assert (facts["set"], facts["taps"], facts["chosen"], facts["rows"]) == ("default", 4, 4, 64)
    assert facts["cudagraph_mode"] == "NONE"
    assert facts["key"] == os.environ[TAP_SET]
    assert compare(eager.path, default.path).verdict == "pass"


def test_all_modules_where_somebody_names_them(start: Start) -> None:
    eager, answers = served(start, "eager", Runner(compiles=False))
    full, same = served(start, "full", Runner(compiles=True), modules="all")
    assert all(map(torch.equal, answers, same))
    missing = set(outputs(eager)) - set(outputs(full))
    assert {tap for _, tap in missing} == {"model"}
    assert outputs(full).items() <= outputs(eager).items()
    assert full.run["engine"]["graphs"]["set"] == "full"


def test_choosing_makes_no_other_graph(start: Start) -> None:
    served(start, "default", Runner(compiles=True))
    key = os.environ[TAP_SET]
    some, _ = served(start, "some", Runner(compiles=True), modules="*.up", requests="b", steps="0-1", tokens="0-1")
    assert os.environ[TAP_SET] == key != ""
    shapes = {(r.step, r.tap): (r.rows, r.shape) for r in some.records if r.step is not None}
    assert shapes == {
        (step, f"model.layers.{i}.up"): ("tokens", (rows, width))
        for step, rows in ((0, 9), (1, 1)) for i, width in ((0, 32), (1, 16))
    }  # fmt: skip
    everything = outputs(served(start, "eager", Runner(compiles=False), requests="b")[0])
    assert all(everything[key] == hash for key, hash in outputs(some).items())


def test_rows_beyond_the_memory_are_left_out_and_counted(start: Start) -> None:
    eager, _ = served(start, "eager", Runner(compiles=False, wide=WIDE))
    small, _ = served(start, "small", Runner(compiles=True, wide=WIDE), graph_mb=1)
    rows = small.run["engine"]["graphs"]["rows"]
    assert rows == 10**6 // (4 * (WIDE + 8 + 16 + 8))
    assert 20 < rows < 29
    spaces = {r.step: (r.rows, r.shape[0]) for r in small.records
              if (r.tap, r.role) == ("model.layers.0.up", "output.0")}  # fmt: skip
    assert spaces == {0: (drain.HELD, rows), 1: ("tokens", 2), 2: ("tokens", 1)}
    root = next(r for r in small.records if r.tap == "<root>" and r.role == "output.0" and r.step == 0)
    assert (root.rows, root.shape[0]) == ("tokens", 29)
    assert {(s.tap, s.count) for s in small.skips if s.reason == drain.MORE_ROWS} == {
        (f"model.layers.{i}.{name}", 29 - rows) for i in (0, 1) for name in ("up", "down")
    }
    result = compare(eager.path, small.path)
    assert result.verdict == "pass"
    assert result.coverage["pairs_failed"] == 0
    golden = next(r for r in eager.records if (r.tap, r.role, r.step) == ("model.layers.0.up", "output.0", 0))
    mine = next(r for r in small.records if (r.tap, r.role, r.step) == ("model.layers.0.up", "output.0", 0))
    assert np.array_equal(eager.read(golden)[:rows], small.read(mine))


def test_a_fault_inside_the_compiled_engine_is_found_first_where_it_is(start: Start) -> None:
    eager, _ = served(start, "eager", Runner(compiles=False))
    faulty, _ = served(start, "faulty", Runner(compiles=True, fault=1.2), parts="input,output")
    result = compare(eager.path, faulty.path)
    assert result.verdict == "fail"
    assert result.origins[0]["module"] == "model.layers.1.down"


def test_dummy_batches_and_the_next_steps_leave_nothing_in_a_step(start: Start) -> None:
    runner = Runner(compiles=True)
    probe = start(runner)
    runner.execute_model(STEPS[0])
    runner.worker.execute_dummy_batch()  # type: ignore[attr-defined]
    runner.execute_model(STEPS[1])
    probe.close("test")
    dump = open_dump(probe.root)
    assert dump.skips
    assert {r.step for r in dump.records if (r.tap, r.role) == ("model.layers.0.up", "output.0")} == {
        0, 1,
    }  # fmt: skip
    assert all(int(s[0]) == 0 for s in (m.accprobe_select_0 for m in runner.model.modules()
                                        if hasattr(m, "accprobe_select_0")))  # fmt: skip


def test_a_tap_that_the_graph_does_not_have_is_a_skip(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a cached graph without taps had been used."""
    monkeypatch.setattr(placement, "_tap_outputs", lambda module, args, output: None)
    dump, _ = served(start, "mine", Runner(compiles=True))
    assert {s.reason for s in dump.skips if s.tap == "model.layers.0.up"} == {drain.NOT_RUN}
    assert {tap for _, tap in outputs(dump)} == {"<root>", "embed"}


def test_a_step_that_is_not_compiled_is_taken_once(start: Start) -> None:
    """vLLM runs some batches of a compiled model as Python (skip_compiled)."""
    runner = Runner(compiles=True)
    probe = start(runner)
    runner.execute_model(STEPS[0])
    runner.model.model.do_not_compile = True
    runner.execute_model(STEPS[1])
    probe.close("test")
    taken = [(r.step, r.tap) for r in open_dump(probe.root).records if r.role == "output.0" and r.step is not None]
    assert len(taken) == len({*taken})
    assert {tap for step, tap in taken if step == 1} > {tap for step, tap in taken if step == 0}
    assert "forward" not in runner.model.__dict__


@pytest.mark.parametrize("where", ["aim", "take"])
def test_a_failure_ends_the_capture_and_not_the_serving(
    start: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted in the probe")

    _, answers = served(start, "eager", Runner(compiles=False))
    monkeypatch.setattr(drain.GraphDrain, where, broken)
    dump, same = served(start, "mine", Runner(compiles=True))
    assert all(map(torch.equal, answers, same))
    assert [(e["where"], e["message"].partition(" (")[0]) for e in dump.errors] == [
        ("taps in compiled graphs", "ZeroDivisionError: planted in the probe")
    ]


def test_where_taps_cannot_be_placed_the_engine_stays_as_it_is(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted in the probe")

    monkeypatch.setattr(in_graphs, "plan", broken)
    dump, _ = served(start, "mine", Runner(compiles=True))
    assert {tap for _, tap in outputs(dump)} == {"<root>", "embed"}
    assert [e["message"] for e in dump.errors] == ["ZeroDivisionError: planted in the probe"]
    assert os.environ[TAP_SET] == ""


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"graph_mb": 0}, "VLLM_ACCPROBE_GRAPH_MB=0"), ({"parts": "input"}, "VLLM_ACCPROBE_PARTS does not")],
)
def test_taps_that_nobody_wants(start: Start, settings: dict[str, Any], why: str) -> None:
    runner = Runner(compiles=True)
    dump, _ = served(start, "mine", runner, **settings)
    assert any(s.reason.endswith(why) for s in dump.skips)
    assert not any(hasattr(module, "accprobe_tap_0") for module in runner.model.modules())
