"""A compiled region between a runner and its root, captured as in a worker: what comes into the dump, and what when
something is wrong. The engine is by hand and compiled with dynamo alone; vLLM's own is in e2e/test_graph_taps.py."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

import numpy as np
import pytest
import torch
from captured_calls import CallGraph, capture
from fake_runners import PARALLEL, Output, captured, more, new, without_vllm

from vllm_accprobe.capture.core import recording
from vllm_accprobe.capture.core.session import Sink
from vllm_accprobe.capture.graphs import placement, readout
from vllm_accprobe.capture.graphs.graph_ops import _stats_device
from vllm_accprobe.capture.graphs.readout import NOT_MEASURED
from vllm_accprobe.capture.vllm import compiled as in_graphs
from vllm_accprobe.capture.vllm.capturing import CaptureObserver
from vllm_accprobe.capture.vllm.compiled import DummyRunOnly
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.comparison.coverage import NOBODYS
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.config import TAP_SET, ProbeConfig
from vllm_accprobe.dump.reader import Dump, Selection, open_dump

WIDE = 9000
"""Features of ``model.up``: a row of it has 36,000 bytes."""


class RowParallelLinear(torch.nn.Linear):
    pass


FAILS: list[int] = []
LIBRARY = torch.library.Library("in_graphs", "DEF")
LIBRARY.define("may_fail(Tensor x) -> Tensor")


def may_fail(x: torch.Tensor) -> torch.Tensor:
    if FAILS:
        raise RuntimeError("planted in a kernel")
    return x.clone()


LIBRARY.impl("may_fail", may_fail, "CPU")
torch.library.register_fake("in_graphs::may_fail", torch.empty_like, lib=LIBRARY)


class Turn(torch.nn.Module):
    """As vLLM's rotary embedding: one instance, which every layer has a name for."""

    def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, x.flip(-1)


class Layer(torch.nn.Module):
    def __init__(self, wide: int, turn: Turn) -> None:
        super().__init__()
        self.turn = turn
        self.up = RowParallelLinear(8, wide)
        self.norm = torch.nn.LayerNorm(wide)
        self.down = RowParallelLinear(wide, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned, flipped = self.turn(x, 0.5)
        return x + self.down(torch.relu(self.norm(self.up(turned + flipped))))


class Compiled(torch.nn.Module):
    """As vLLM's support_torch_compile makes a class: ``__call__`` goes past the hooks to what is compiled."""

    def __init__(self, wide: int, compiles: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.do_not_compile = not compiles
        turn = Turn()
        self.layers = torch.nn.ModuleList([Layer(wide, turn), Layer(16, turn)])
        self.again = torch.nn.Tanh()
        guards = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # as vLLM does
        self.compiled = torch.compile(self.forward, backend="eager", fullgraph=True, dynamic=True, options=guards)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) if self.do_not_compile else self.compiled(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.again(torch.ops.in_graphs.may_fail(layer(x)))
        return x


class Model(torch.nn.Module):
    def __init__(self, wide: int, compiles: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = torch.nn.Embedding(64, 8)
        self.model = Compiled(wide, compiles)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(self.embed(input_ids))


class Runner:
    def __init__(self, compiles: bool, wide: int = 32, pad: int = 1) -> None:
        self.device = "cpu"
        self.pad = pad
        self.graphs: dict[int, tuple[CallGraph, torch.Tensor]] = {}
        self.vllm_config = Plain(
            model_config=Plain(enforce_eager=not compiles, get_hidden_size=lambda: 8),
            compilation_config=Plain(mode=2 if compiles else 0, cudagraph_mode=Plain(value=0, name="NONE")),
            parallel_config=Plain(), speculative_config=None, scheduler_config=Plain(max_num_batched_tokens=64),
        )  # fmt: skip
        self.input_batch = Plain(req_ids=[])
        self.requests: dict[str, Any] = {}
        self.positions = torch.arange(64)
        self.input_ids = torch.arange(64)
        self.model = Model(wide, compiles)

    def load_model(self) -> None: ...

    def get_model(self) -> torch.nn.Module:
        return self.model

    @torch.inference_mode()
    def execute_model(self, out: Output) -> torch.Tensor:
        for request in out.scheduled_new_reqs:
            self.requests[request.req_id] = Plain(num_tokens=len(request.prompt_token_ids))
        self.input_batch.req_ids = list(out.num_scheduled_tokens)
        n = -(-out.total_num_scheduled_tokens // self.pad) * self.pad
        return self._model_forward(input_ids=self.input_ids[:n], positions=self.positions[:n])

    def _model_forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        graph, output = self.graphs.get(len(input_ids), (None, None))
        if graph is None:
            return self.model(input_ids=input_ids, positions=positions)
        graph.replay()
        return output

    @torch.inference_mode()
    def capture_model(self, *sizes: int) -> None:
        """As vLLM with cudagraph mode FULL: the whole forward, whose inputs are the runner's buffers."""
        for n in sizes:
            graph = CallGraph()
            with torch.compiler.set_stance("force_eager"), capture(graph):  # dynamo compiles nothing under a mode
                output = self.model(self.input_ids[:n], self.positions[:n])
            self.graphs[n] = graph, output

    @torch.inference_mode()
    def _dummy_run(self, num_tokens: int = 3, is_profile: bool = False) -> None:
        self.model(self.input_ids[:num_tokens], self.positions[:num_tokens])


Start = Callable[..., CaptureObserver]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    without_vllm(monkeypatch)
    monkeypatch.setenv(TAP_SET, "")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def started(runner: Runner, name: str = "mine", **settings: Any) -> CaptureObserver:
        config = ProbeConfig.from_kwargs(dir=str(tmp_path / name), graphs=True, **settings)
        probe, runner.worker = captured(runner, config)  # type: ignore[attr-defined]
        return probe

    return started


STEPS = (new(a=20, b=9), more(a=20, b=9), more(b=10))


def served(start: Start, name: str, runner: Runner, **settings: Any) -> tuple[Dump, list[torch.Tensor]]:
    probe = start(runner, name, **settings)
    answers = [runner.execute_model(step) for step in STEPS]
    probe.close("test")
    return open_dump(probe.root), answers


def outputs(dump: Dump) -> dict[tuple[int, str], str]:
    """By step and name; ``#1`` is a module's second call."""
    return {
        (r.step, r.tap + (f"#{r.call}" if r.call else "")): r.hash
        for r in dump.records
        if r.role == "output.0" and r.step is not None
    }


def test_the_compiled_engine_leaves_what_the_eager_one_does(start: Start) -> None:
    eager, answers = served(start, "eager", Runner(compiles=False))
    default, same = served(start, "default", Runner(compiles=True))
    assert all(map(torch.equal, answers, same))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    kernels = {f"model.layers.{i}.{name}" for i in (0, 1) for name in ("up", "down")}
    assert {tap for _, tap in outputs(default)} == {"<root>", "embed", *kernels}
    want = outputs(eager)
    assert all(want[key] == hash for key, hash in outputs(default).items())
    order = [r.tap for r in default.records if r.step == 0 and r.role == "output.0"]
    assert order == [r.tap for r in eager.records if r.step == 0 and r.role == "output.0" and r.tap in order]
    reasons = {s.tap: s.reason for s in default.skips}
    assert reasons["model.layers.0.turn"] == reasons["model.layers.1.turn"] == placement.NOT_DEFAULT
    assert reasons["model.layers.0"] == reasons["model.layers.1.norm"] == placement.NOT_DEFAULT
    facts = default.run["engine"]["graphs"]
    assert (facts["set"], facts["taps"], facts["chosen"], facts["rows"]) == ("default", 4, 4, 64)
    assert facts["cudagraph_mode"] == "NONE"
    assert facts["key"] == os.environ[TAP_SET]
    assert compare(eager.path, default.path).verdict == "pass"


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
    assert spaces == {0: (readout.FIRST_ROWS, rows), 1: ("tokens", 2), 2: ("tokens", 1)}
    root = next(r for r in small.records if r.tap == "<root>" and r.role == "output.0" and r.step == 0)
    assert (root.rows, root.shape[0]) == ("tokens", 29)
    assert {(s.tap, s.count) for s in small.skips if s.reason == readout.MORE_ROWS} == {
        (f"model.layers.{i}.{name}", 29 - rows) for i in (0, 1) for name in ("up", "down")
    }
    result = compare(eager.path, small.path)
    assert result.verdict == "pass"
    assert result.coverage["pairs_failed"] == 0
    golden = next(r for r in eager.records if (r.tap, r.role, r.step) == ("model.layers.0.up", "output.0", 0))
    mine = next(r for r in small.records if (r.tap, r.role, r.step) == ("model.layers.0.up", "output.0", 0))
    assert np.array_equal(eager.read(golden)[:rows], small.read(mine))


def test_rows_of_padding_are_kept_apart(start: Start) -> None:
    """29, 2 and 1 rows, padded to 32, 8 and 8."""
    eager, _ = served(start, "eager", Runner(compiles=False, pad=8))
    runner = Runner(compiles=True, pad=8)
    padded, _ = served(start, "padded", runner)
    assert eager.padding == []
    tap = "model.layers.0.up"
    found = {r.step: r for r in padded.padding if r.tap == tap}
    assert {step: (r.name, r.rows, r.shape) for step, r in found.items()} == {
        step: (f"{tap}/output.0@padding", "tokens/padding", (rows, 32)) for step, rows in ((0, 3), (1, 6), (2, 7))
    }
    with torch.no_grad():
        x = runner.model.embed(runner.input_ids[:32])
        want = runner.model.model.layers[0].up(x / 2 + x.flip(-1))
    for step, rows in ((0, slice(29, 32)), (1, slice(2, 8)), (2, slice(1, 8))):
        assert np.allclose(padded.read(found[step]).view(np.float32), want[rows].numpy(), atol=1e-6)
    assert {(r.tap, r.step) for r in padded.padding} == {
        (r.tap, r.step) for r in padded.records if r.tap.endswith(("up", "down")) and r.step is not None
    }
    result = compare(eager.path, padded.path)
    assert result.verdict == "pass"
    assert result.coverage["skipped"][f"mine: {NOBODYS}"] == len(padded.padding) == 12
    chosen = Selection(names=(f"{tap}/*",), steps=((1, 1),)).apply(padded, padding=True)
    assert [r.rows for _, r in chosen] == ["tokens", "tokens/padding"]
    assert not served(start, "some", Runner(compiles=True, pad=8), requests="b")[0].padding
    assert not served(start, "few", Runner(compiles=True, pad=8), tokens="0-1")[0].padding


def lines(dump: Dump) -> dict[tuple[int, str], tuple[Any, ...]]:
    return {
        (r.step, r.tap): (r.seq >= 0, r.cls, r.dtype, r.shape, r.rows, r.row_dim, r.stats, r.hash, r.payload is None)
        for r in dump.records if r.role == "output.0" and r.step is not None
    }  # fmt: skip


@pytest.mark.parametrize("some", [{}, {"requests": "b", "tokens": "0-1"}], ids=["all", "some rows"])
def test_statistics_are_those_of_an_eager_engine_s_statistics(start: Start, some: dict[str, str]) -> None:
    eager, answers = served(start, "eager", Runner(compiles=False), task="stats", **some)
    stats, same = served(start, "stats", Runner(compiles=True), task="stats", **some)
    assert all(map(torch.equal, answers, same))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    taps = {tap for _, tap in lines(stats)}
    assert len(taps) == 6
    assert lines(stats) == {key: line for key, line in lines(eager).items() if key[1] in taps}
    order = [r.tap for r in stats.records if r.step == 0 and r.role == "output.0"]
    assert order == [r.tap for r in eager.records if r.step == 0 and r.role == "output.0" and r.tap in order]
    facts = stats.run["engine"]["graphs"]
    assert (facts["taps"], facts["tensors"], facts["statistics"], facts["rows"]) == (4, 0, 4, 0)
    result = compare(eager.path, stats.path)
    assert result.verdict == "pass"
    assert {p.tap for p in result.pairs if p.status == "pass"} >= taps


def test_an_old_line_of_numbers_is_not_taken_for_this_step_s(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the graph that ran second had no taps."""
    runner = Runner(compiles=True)
    probe = start(runner, task="stats")
    runner.execute_model(STEPS[0])
    monkeypatch.setattr(readout.StatsReadout, "aim", aims_nothing)
    runner.execute_model(STEPS[1])
    probe.close("test")
    dump = open_dump(probe.root)
    assert {step for step, tap in lines(dump) if tap == "model.layers.0.up"} == {0}
    assert [s.count for s in dump.skips if (s.tap, s.reason) == ("model.layers.0.up", NOT_MEASURED)] == [1]


def aims_nothing(self: readout.StatsReadout, space: Any) -> None:
    self._space = space
    self._serial += 1


def test_numbers_of_a_device_arrive_over_the_staging(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a device: its operator, and one copy of all lines; here on CPU tensors."""
    eager, _ = served(start, "eager", Runner(compiles=False), task="stats")
    library = torch.library.Library("accprobe_test", "FRAGMENT")
    library.define("device_stats(Tensor x, Tensor(a!) buffer, Tensor select) -> ()")
    library.impl("device_stats", _stats_device, "CPU")
    torch.library.register_fake("accprobe_test::device_stats", lambda x, buffer, select: None, lib=library)
    monkeypatch.setattr(placement, "tap_stats", torch.ops.accprobe_test.device_stats.default)
    monkeypatch.setattr(recording, "Sink", functools.partial(Sink, staged=True))
    got = lines(served(start, "staged", Runner(compiles=True), task="stats")[0])
    kernels = {key for key in got if key[1].startswith("model.layers")}
    assert len(kernels) == 12
    for key in kernels:
        want = lines(eager)[key]
        assert got[key][:6] == want[:6]
        assert got[key][7:] == (None, True)
        mine, golden = got[key][6], want[6]
        assert (mine.count, mine.min, mine.max, mine.nan) == (golden.count, golden.min, golden.max, golden.nan)
        assert mine.l2 == pytest.approx(golden.l2, rel=1e-6)


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


def test_a_step_that_is_not_compiled_is_taken_once(start: Start) -> None:
    """vLLM runs some batches of a compiled model as Python (skip_compiled)."""
    runner = Runner(compiles=True)
    probe = start(runner)
    runner.execute_model(STEPS[0])
    runner.model.model.do_not_compile = True
    runner.execute_model(STEPS[1])
    probe.close("test")
    taken = [
        (r.step, f"{r.tap}#{r.call}")
        for r in open_dump(probe.root).records
        if r.role == "output.0" and r.step is not None
    ]
    assert len(taken) == len({*taken})
    assert {tap for step, tap in taken if step == 1} > {tap for step, tap in taken if step == 0}
    assert "forward" not in runner.model.__dict__


@pytest.mark.parametrize("where", ["aim", "take"])
def test_a_failure_ends_the_capture_and_not_the_serving(start, monkeypatch, where):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted in the probe")

    _, answers = served(start, "eager", Runner(compiles=False))
    monkeypatch.setattr(readout.GraphReadout, where, broken)
    dump, same = served(start, "mine", Runner(compiles=True))
    assert all(map(torch.equal, answers, same))
    assert [(e["where"], e["message"].partition(" (")[0]) for e in dump.errors] == [
        ("taps in compiled graphs", "ZeroDivisionError: planted in the probe")
    ]


def test_where_taps_cannot_be_placed_the_engine_stays_as_it_is(start, monkeypatch, capsys):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted in the probe")

    monkeypatch.setattr(in_graphs, "plan", broken)
    dump, _ = served(start, "mine", Runner(compiles=True))
    assert {tap for _, tap in outputs(dump)} == {"<root>", "embed"}
    assert [e["message"] for e in dump.errors] == ["ZeroDivisionError: planted in the probe"]
    assert os.environ[TAP_SET] == ""


def test_a_forward_that_is_replayed_as_a_whole(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 and 32 rows; the root's Python does not run, and what it would have been given and has given is seen."""
    eager, answers = served(start, "eager", Runner(compiles=False, pad=8))
    context = Plain(cudagraph_runtime_mode=Plain(name="FULL"), batch_descriptor=Plain(num_tokens=8))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", Plain(get_forward_context=lambda: context))
    runner = Runner(compiles=True, pad=8)
    runner.vllm_config.compilation_config.cudagraph_mode = Plain(value=2, name="FULL")
    probe = start(runner, "full", modules="all")
    runner.capture_model(8)
    ran = []
    runner.model.embed.register_forward_hook(lambda *_: ran.append(1))
    same = [runner.execute_model(step).clone() for step in STEPS]
    probe.close("test")
    assert len(ran) == 1, "the first step alone, of 32 rows"
    full = open_dump(probe.root)
    assert all(map(torch.equal, answers, same))
    assert {step: one.graph and one.graph.mode for (_, step), one in full.steps.items()} == dict.fromkeys(
        range(3), "FULL"
    )
    missing = set(outputs(eager)) - set(outputs(full))
    assert {tap for step, tap in missing} == {"model"}
    assert outputs(full).items() <= outputs(eager).items()
    roots = {(r.step, r.role) for r in full.records if r.tap == "<root>"}
    assert roots == {(r.step, r.role) for r in eager.records if r.tap == "<root>"}
    assert {r.step for r in full.padding if r.tap == "embed"} == {1, 2}
    assert compare(eager.path, full.path).verdict == "pass"


def test_a_rank_that_is_not_captured_takes_part_in_the_dummy_batch(start: Start) -> None:
    ran: list[int] = []
    runner = Runner(compiles=True)
    dummy = runner._dummy_run

    def counted(num_tokens: int, is_profile: bool = False) -> None:
        ran.append(num_tokens)
        dummy(num_tokens)

    runner._dummy_run = counted  # type: ignore[method-assign]
    config = ProbeConfig.from_kwargs(graphs=True, ranks="0")
    adapter = RunnerAdapter(Plain(model_runner=runner), runner, PARALLEL | {"rank": 1, "world_size": 2})
    other = CaptureObserver.left_out(config, adapter)
    assert isinstance(other, DummyRunOnly)
    adapter.add(other)
    runner.load_model()
    runner.load_model()
    runner.execute_model(STEPS[0])
    assert ran == [11]
    assert not any(hasattr(module, "accprobe_tap_0") for module in runner.model.modules())
    assert CaptureObserver.left_out(ProbeConfig.from_kwargs(ranks="0"), adapter) is None


def test_a_forward_that_fails_in_the_graph(start: Start) -> None:
    """The engine hears of it, the step keeps what was taken before, and the next steps are as ever."""
    runner = Runner(compiles=True)
    probe = start(runner, "failing")
    runner.execute_model(STEPS[0])
    FAILS.append(1)
    with pytest.raises(RuntimeError, match="planted in a kernel"):
        runner.execute_model(STEPS[1])
    FAILS.clear()
    unclosed = open_dump(probe.root)
    assert not unclosed.errors
    assert not unclosed.bad_lines
    runner.execute_model(STEPS[2])
    probe.close("test")
    dump = open_dump(probe.root)
    taps = {step: {r.tap for r in dump.records if r.step == step and r.role.startswith("output")} for step in range(3)}
    assert taps[0] == taps[2]
    assert taps[1] == {"embed"}, "what stood before the graph"
    plain = outputs(served(start, "plain", Runner(compiles=True))[0])
    assert all(plain[key] == hash for key, hash in outputs(dump).items())
    assert all(dump.read(r).size for r in dump.records if r.payload is not None)


def test_rows_of_padding_that_do_not_fit_are_counted(start: Start) -> None:
    small, _ = served(start, "small", Runner(compiles=True, wide=WIDE, pad=32), graph_mb=1)
    rows = small.run["engine"]["graphs"]["rows"]
    tap = "model.layers.0.up"
    assert {r.step: r.shape[0] for r in small.padding if r.tap == tap} == {1: rows - 2, 2: rows - 1}
    left = 3 + (30 - (rows - 2)) + (31 - (rows - 1))
    assert [s.count for s in small.skips if (s.tap, s.reason) == (tap, readout.MORE_PADDING)] == [left]


def test_a_tap_that_the_graph_does_not_have_is_a_skip(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a cached graph without taps had been used."""
    monkeypatch.setattr(placement, "_tap_outputs", lambda module, args, output: None)
    dump, _ = served(start, "mine", Runner(compiles=True))
    assert {s.reason for s in dump.skips if s.tap == "model.layers.0.up"} == {readout.NOT_RUN}
    assert {tap for _, tap in outputs(dump)} == {"<root>", "embed"}
