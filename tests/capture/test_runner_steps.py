"""When a step ends, and what may be recorded into it: runners by hand, around which the probe is put as in a worker.

What real engines do is shown in tests/e2e; here is the order of calls that needs other models, releases or machines.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

import pytest
import torch
from fake_runners import EarlyV2, Output, captured, new, without_vllm

from vllm_accprobe.capture.vllm import runner as capture_runner
from vllm_accprobe.capture.vllm.capturing import CaptureObserver
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import Dump, open_dump


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 4)
        self.pooler = torch.nn.Linear(4, 2)

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids)


class Runner:
    """A V1 runner: its answer comes from ``execute_model`` where the model pools (0.32: core.py 675), and
    from ``sample_tokens`` where it samples. ``trims``: 0.13 (gpu_model_runner.py 2931, 1004) and later with drafts
    from the device take drafts out of a COPY of the scheduler's output."""

    def __init__(self, pools: bool, trims: int = 0) -> None:
        self.device = "cpu"
        self.vllm_config = config()
        self.pools, self.trims = pools, trims
        self.input_batch = Plain(req_ids=[])
        self.requests: dict[str, Any] = {}
        self.positions = torch.arange(32)
        self.model = Model()

    def load_model(self) -> None: ...

    def get_model(self) -> torch.nn.Module:
        return self.model

    def _update_states(self, out: Output) -> None:
        for request in out.scheduled_new_reqs:
            self.requests[request.req_id] = Plain(num_tokens=len(request.prompt_token_ids))
        self.input_batch.req_ids = list(out.num_scheduled_tokens)
        for name, ids in out.scheduled_spec_decode_tokens.items():
            out.scheduled_spec_decode_tokens[name] = ids[: len(ids) - self.trims]
            out.num_scheduled_tokens[name] -= self.trims

    def execute_model(self, out: Output, intermediate_tensors: Any = None) -> Any:
        out = dataclasses.replace(
            out,
            num_scheduled_tokens=dict(out.num_scheduled_tokens),
            scheduled_spec_decode_tokens=dict(out.scheduled_spec_decode_tokens),
        )
        self._update_states(out)
        hidden = self.model(torch.arange(out.total_num_scheduled_tokens))
        return self.model.pooler(hidden) if self.pools else None

    def sample_tokens(self, grammar: Any = None) -> str:
        return "tokens"

    def _dummy_run(self) -> None:
        self.model(torch.zeros(3, dtype=torch.int64))


class PoolingV2(EarlyV2):
    """V2 of 0.18 to 0.32: the worker calls ``pool`` after ``execute_model`` (gpu_worker.py), and dummy batches go
    through ``execute_model`` itself."""

    def __init__(self) -> None:
        super().__init__({"a": 0}, {"a": 5})
        self.device = "cpu"
        self.vllm_config = config()
        self.model = Model()

    def load_model(self) -> None: ...

    def get_model(self) -> torch.nn.Module:
        return self.model

    def execute_model(self, out: Output, dummy_run: bool = False) -> None:
        if not dummy_run:
            self.prepare_inputs(out)
        self.hidden = self.model(torch.zeros(out.total_num_scheduled_tokens, dtype=torch.int64))

    def sample_tokens(self, grammar: Any = None) -> str:
        return "tokens"

    def pool(self) -> torch.Tensor:
        return self.model.pooler(self.hidden)


class Drafting(Runner):
    """EAGLE and MTP call the model's own embedding (0.32: llm_base_proposer.py, _maybe_share_embeddings), in V1 from a
    method of the runner, in V2 from its speculator."""

    def __init__(self, newer: bool) -> None:
        super().__init__(pools=False)
        self.newer = newer
        self.speculator = Plain(propose=self.draft)

    def draft(self) -> str:
        self.model.embed(torch.arange(5))
        return "drafts"

    def propose_draft_token_ids(self) -> str:
        return self.draft()

    def sample_tokens(self, grammar: Any = None) -> str:
        drafts = self.speculator.propose() if self.newer else self.propose_draft_token_ids()
        self.model.pooler(torch.zeros(5, 4))
        return drafts


def config(**parallel: Any) -> Plain:
    return Plain(
        model_config=Plain(enforce_eager=True, get_hidden_size=lambda: 4),
        compilation_config=Plain(mode=0, cudagraph_mode=Plain(value=0)),
        parallel_config=Plain(**parallel),
        speculative_config=Plain(method="ngram"),
    )


Start = Callable[..., tuple[CaptureObserver, Any]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    without_vllm(monkeypatch)
    return lambda runner: captured(runner, ProbeConfig(enabled=True, dir=str(tmp_path / "dump")))


def closed(probe: CaptureObserver) -> Dump:
    probe.close("test")
    return open_dump(probe.root)


def outputs(dump: Dump) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(r.step, r.tap, tuple(r.shape)) for r in dump.records if r.role == "output.0"]


FIRST = [(0, "embed", (5, 4)), (0, "<root>", (5, 4)), (0, "pooler", (5, 2))]


def test_a_pooling_model_ends_its_step_with_its_answer(start: Start) -> None:
    runner = Runner(pools=True)
    probe, worker = start(runner)
    runner.execute_model(new(a=5))
    worker.execute_dummy_batch()  # data parallel: this replica has nothing to do
    runner._dummy_run()  # whoever else calls the model
    assert outputs(closed(probe)) == FIRST


def test_a_pooling_model_of_the_newer_runner_is_captured_until_it_has_pooled(start: Start) -> None:
    runner = PoolingV2()
    probe, _ = start(runner)
    runner.execute_model(new(a=5))
    runner.pool()
    runner.model(torch.zeros(3, dtype=torch.int64))
    assert outputs(closed(probe)) == FIRST


def test_a_step_that_was_never_sampled_takes_no_dummy_batch(start: Start) -> None:
    """A pipeline's first ranks, a step whose sampling failed: the next batch ends it, whatever that batch is."""
    runner = PoolingV2()
    probe, _ = start(runner)
    runner.execute_model(new(a=5))
    runner.execute_model(new(dummy=3), dummy_run=True)
    assert outputs(closed(probe)) == FIRST[:2]
    old = Runner(pools=False)
    probe, worker = start(old)
    old.execute_model(new(a=5))
    worker.execute_dummy_batch()
    assert outputs(closed(probe)) == FIRST[:2]


@pytest.mark.parametrize("newer", [False, True])
def test_what_a_draft_model_calls_of_the_models_own_is_not_the_models(start: Start, newer: bool) -> None:
    runner = Drafting(newer)
    probe, _ = start(runner)
    runner.execute_model(new(a=5))
    assert runner.sample_tokens() == "drafts"
    assert outputs(closed(probe)) == FIRST  # and what comes after the drafts is of the step again


def test_drafts_that_the_runner_takes_out_are_no_rows(start: Start) -> None:
    runner = Runner(pools=False, trims=2)
    probe, _ = start(runner)
    runner.execute_model(new(a=5))
    runner.sample_tokens()
    again = Output([], Plain(req_ids=["a"], num_computed_tokens=[5]), {"a": 4}, {"a": [7, 8, 9]})
    runner.positions = torch.arange(5, 37)
    runner.execute_model(again)
    dump = closed(probe)
    assert dump.errors == []
    assert [(r.tap, r.shape, r.rows) for r in dump.records if r.step == 1 and r.role == "output.0"] == [
        ("embed", (2, 4), "tokens"),
        ("<root>", (2, 4), "tokens"),
    ]
    assert [(s.pos, s.n) for s in dump.rows[0, 1, "tokens"].segments] == [(5, 2)]


@pytest.mark.parametrize("missing", ["req_states", "input_batch"])
def test_a_runner_without_what_tells_its_rows_is_refused_as_it_loads(start, monkeypatch, missing):
    lines: list[str] = []
    monkeypatch.setattr(capture_runner, "say", lines.append)
    runner: Any = PoolingV2() if missing == "req_states" else Runner(pools=True)
    delattr(runner, missing)
    probe, _ = start(runner)
    (line,) = lines
    assert line.startswith(f"{type(runner).__name__} has no {missing}")
    assert "NOTHING will be captured" in line
    probe.close("test")
    assert not (probe.root / "run.json").exists()


def test_a_grammar_that_cannot_be_read_ends_the_capture_and_not_the_step(start: Start) -> None:
    runner = Runner(pools=False)
    runner._sample = lambda: "sampled"  # type: ignore[attr-defined]
    probe, _ = start(runner)
    runner.execute_model(new(a=5))
    odd = Plain(structured_output_request_ids=["a"], grammar_bitmask=[object()])
    assert runner.sample_tokens(odd) == "tokens"
    assert "AttributeError" in closed(probe).errors[0]["message"]


def test_a_runner_that_cannot_be_looked_at_is_refused_and_loads_its_model(start, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(capture_runner, "say", said.append)
    runner = Runner(pools=False)
    runner.vllm_config.parallel_config = Plain(prefill_context_parallel_size="many")
    start(runner)
    (line,) = said
    assert "NOTHING will be captured" in line
    assert "ValueError" in line
