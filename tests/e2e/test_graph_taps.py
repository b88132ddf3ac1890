"""Taps inside a compiled engine: looking changes nothing, what they show is what eager shows, and a fault is found.

Engines: inductor without taps (shared with test_compiled.py), with them, and with some of them chosen; two that only
trace (dynamo, torch's eager backend): with a fault, whose compiled code no other may find in a cache, and a mixture of
experts, whose rows go to other experts at near ties.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.captures import TWO_LAYERS, Engines, explain
from support.engine import Ask, EngineError, Run
from support.prompts import prompt

from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.repair import repair
from vllm_accprobe.judge.near_ties import ROWS_AFTER

pytestmark = pytest.mark.engine
KERNELS = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in ("self_attn.qkv_proj", "self_attn.attn", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


@pytest.fixture(scope="module")
def untapped(engines: Engines) -> Run:
    return engines.compiled("compiled-untapped", VLLM_ACCPROBE_GRAPH_MB="0")


@pytest.fixture(scope="module")
def tapped(engines: Engines) -> Run:
    return engines.compiled("compiled-tapped")


@pytest.fixture(scope="module")
def masked(engines: Engines) -> Run:
    some = {"VLLM_ACCPROBE_MODULES": "*.1.*_proj,logits,<root>", "VLLM_ACCPROBE_STEPS": "1-3"}
    return engines.compiled("compiled-masked", **some)


def hashes(run: Run) -> dict[tuple[int | None, str, str, int], str]:
    assert run.dump is not None
    return {(r.step, r.tap, r.role, r.call): r.hash for r in open_dump(run.dump).records if r.step is not None}


def test_looking_changes_no_bit(untapped: Run, tapped: Run, masked: Run) -> None:
    """Of the root's inputs and outputs, the logits, the top logits and the sampled tokens, in every step."""
    assert untapped.tokens == tapped.tokens == masked.tokens
    without, all_, some = hashes(untapped), hashes(tapped), hashes(masked)
    assert {(tap, role) for _, tap, role, _ in without} >= {("sampler", "output.top_logits"), ("<root>", "output.0")}
    assert without.items() <= all_.items()
    assert some.items() <= all_.items()
    inside = {(step, tap) for step, tap, _, _ in some if tap.startswith("model")}
    chosen = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert inside == {(step, f"model.layers.1.{name}") for step in (1, 2, 3) for name in chosen}


def test_the_dump_says_what_was_compiled(tapped: Run, masked: Run) -> None:
    assert tapped.dump is not None
    assert masked.dump is not None
    all_, some = (open_dump(dump).run["engine"]["graphs"] for dump in (tapped.dump, masked.dump))
    assert (all_["mode"], all_["backend"], all_["set"]) == ("DYNAMO_TRACE_ONCE", "inductor", "default")
    assert (all_["taps"], all_["chosen"], all_["rows"]) == (len(KERNELS), len(KERNELS), 512)
    assert (some["taps"], some["chosen"]) == (len(KERNELS), 4)
    assert all_["key"] == some["key"], "choosing modules would compile again"


def test_compiled_against_eager(engines: Engines, tapped: Run, compared: Any) -> None:
    result = compared(engines.serial(TWO_LAYERS), tapped)
    assert result.verdict == "pass", explain(result)
    outputs = {p.tap for p in result.pairs if p.role == "output.0"}
    assert outputs >= set(KERNELS)
    assert not result.coverage["rows_only_golden"]
    assert not result.coverage["rows_only_mine"]


def traced(engines: Engines, name: str, **env: str) -> Run:
    """An engine that only traces, with a fault in it."""
    fault = [{"kind": "attn", "module": "model.layers.1.self_attn.attn", "factor": 1.5}]
    env = {"VLLM_ACCPROBE_GRAPHS": "1"} | env
    return engines.run(name, TWO_LAYERS, host="dynamo", fault=fault, env=env, enforce_eager=False)


def test_a_fault_of_the_compiled_engine_is_named(engines: Engines, compared: Any) -> None:
    faulty = traced(engines, "fault-in-graph")
    result = compared(engines.serial(TWO_LAYERS), faulty)
    assert result.verdict == "fail", explain(result)
    assert result.origins[0]["module"] == "model.layers.1.self_attn.attn", explain(result)


def test_a_clean_mixture_of_experts_passes(engines: Engines, compared: Any) -> None:
    """Rows that a near tie sends to other experts are left out, not condemned, and others are judged to the end."""
    mine = engines.run(
        "moe-in-graph", "qwen2-moe", host="dynamo", env={"VLLM_ACCPROBE_GRAPHS": "1"}, enforce_eager=False
    )
    result = compared(engines.serial("qwen2-moe"), mine)
    assert result.verdict == "pass", explain(result)
    judged = {p.tap for p in result.pairs if p.status == "pass"}
    assert judged >= {f"model.layers.{i}.mlp.gate" for i in range(3)}
    assert result.coverage["skipped"].get(ROWS_AFTER, 0) < result.coverage["rows_compared"], explain(result)


def test_statistics_in_the_graph_are_those_of_the_same_engine_s_tensors(engines: Engines, compared: Any) -> None:
    tensors, stats = traced(engines, "fault-in-graph"), traced(engines, "stats-in-graph", VLLM_ACCPROBE_TASK="stats")
    assert tensors.tokens == stats.tokens
    assert tensors.dump is not None
    assert stats.dump is not None
    golden, mine = (
        {
            (r.step, r.tap, r.role, r.call): r
            for r in open_dump(run.dump).records
            if r.tap in KERNELS and r.step is not None
        }
        for run in (tensors, stats)
    )
    assert len(mine) == len(golden) > len(KERNELS)
    for place, want in golden.items():
        got = mine[place]
        assert (got.payload, got.hash) == (None, want.hash), place
        assert (got.shape, got.rows, got.dtype, got.cls) == (want.shape, want.rows, want.dtype, want.cls)
        for name in ("count", "min", "max", "nan", "inf"):
            assert getattr(got.stats, name) == getattr(want.stats, name), (place, name)
        assert got.stats.l2 == pytest.approx(want.stats.l2, rel=1e-12)  # a payload is summed in other pieces
    facts = open_dump(stats.dump).run["engine"]["graphs"]
    assert (facts["tensors"], facts["statistics"]) == (0, facts["taps"])
    result = compared(tensors, stats)
    assert result.verdict == "pass", explain(result)


def test_an_engine_that_is_killed_in_mid_step_leaves_a_readable_dump(engines: Engines, tmp_path: Path) -> None:
    host, out = engines.host("dynamo"), tmp_path / "killed"
    failed: list[BaseException] = []

    def serve() -> None:
        long = [Ask(prompt(40, seed), 400) for seed in range(4)]
        try:
            host.capture(
                engines.model(TWO_LAYERS), long, out=out, env={"VLLM_ACCPROBE_GRAPHS": "1"}, enforce_eager=False
            )
        except EngineError as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    journal, end = out / "rank0000" / "journal.jsonl", time.monotonic() + 300
    while not (journal.exists() and journal.read_bytes().count(b'{"event":"step"') > 20):
        assert thread.is_alive(), failed
        assert time.monotonic() < end
        time.sleep(0.02)
    assert host._process is not None
    os.killpg(host._process.pid, signal.SIGKILL)
    thread.join(60)
    assert failed, "it was to be killed while it served"
    dump = open_dump(out)
    assert not dump.bad_lines
    assert not dump.unread
    assert any("was not closed" in problem for problem in dump.problems)
    steps = sorted(step for _, step in dump.steps)
    assert steps == list(range(len(steps)))
    for step in steps[:-1]:
        assert {r.tap for r in dump.records if r.step == step and r.role == "output.0"} >= set(KERNELS), step
    for record in dump.records:
        assert record.payload is not None
        assert dump.read(record).shape == record.shape
    repair(out)
    assert open_dump(out).ends[0].reason == "repaired"
