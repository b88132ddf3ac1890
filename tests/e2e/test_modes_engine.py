"""vLLM's modes: whose row is whose, what names a request, which rows are drafts. More, with figures: docs/capture.md.

scripts/modes.py runs all of them, each twice and with a planted fault; here is what must not break."""

from dataclasses import replace
from typing import Any

import mode_models
import pytest
import tiny_model
from mode_rows import wrong_rows
from support.captures import Engines, explain
from support.engine import Ask, Run
from support.prompts import prompts, repetitive

from vllm_accprobe.align.tokens import REJECTED
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap

pytestmark = pytest.mark.engine
ONE, TWO, THREE = prompts(24, 17, 33)


def right(run: Run, asks: list[Ask]) -> Dump:
    """The dump, in which every row is the one that it is called."""
    assert run.dump is not None
    dump = open_dump(run.dump)
    assert (dump.problems, dump.errors) == ([], [])
    count, wrong = wrong_rows(dump, asks, run.tokens)
    assert count > sum(len(a.ids) for a in asks)
    assert wrong == []
    return dump


def with_adapters(engines: Engines, name: str, seed: int) -> tuple[Run, list[Ask]]:
    base = tiny_model.MODELS["qwen2"].config
    paths = [mode_models.adapter(engines.root / "models" / f"adapter-{i}", base, seed=i) for i in (seed, 2)]
    sql, chat = ("sql", 1, str(paths[0])), ("chat", 2, str(paths[1]))
    asks = [Ask(ONE, 3, adapter=sql), Ask(ONE, 3, adapter=chat), Ask(TWO, 3, adapter=sql)]
    return engines.run(name, asks=asks, enable_lora=True, max_loras=2, max_lora_rank=8), asks


def test_an_adapter_is_part_of_a_request_and_its_weights_are_compared(engines: Engines, compared: Any) -> None:
    run, asks = with_adapters(engines, "modes-lora", 1)
    dump = right(run, asks)
    assert [(r.adapter, r.ordinal) for r in dump.requests.values()] == [("sql", 0), ("chat", 0), ("sql", 0)]
    kept = {r.role.rpartition(".")[0] for r in dump.records if r.role.startswith("param.lora")}
    assert kept == {"param.lora.sql", "param.lora.chat"}
    assert not [r for r in dump.records if r.tap.endswith("base_layer")]  # its weights are the layer's own
    calls, table = Calls(dump, None), default_references()
    outputs = [
        row for rank, tap, _ in calls.taps(["*WithLoRA"])
        for row in check_tap(calls, rank, tap, lambda c: table.evaluate(c.what), Options()) if row.role == "output.0"
    ]  # fmt: skip
    assert len(outputs) >= 16
    assert {row.status for row in outputs} == {"pass"}
    other, _ = with_adapters(engines, "modes-lora-other", 3)
    result = compared(run, other)
    assert result.verdict == "fail"
    assert "the weights, not the kernel: " in result.notes[0]
    assert ".lora_a" in result.notes[0] or ".lora_b" in result.notes[0]
    assert any("different weights" in note for note in result.notes)
    assert {p.role.split(".")[2] for p in result.pairs if p.role.startswith("param.") and p.status == "fail"} == {"sql"}
    chat = [p for p in result.pairs if p.status == "fail" and p.worst_request == "ask-1"]
    assert chat == []
    assert compared(run, run).verdict == "pass"


def test_one_prompt_with_and_without_an_adapter_is_no_pair(engines: Engines) -> None:
    from vllm_accprobe.align.tokens import distinct, pair_requests

    run, _ = with_adapters(engines, "modes-lora", 1)
    plain = engines.run("modes-plain", asks=[Ask(ONE, 3)])
    sides = [distinct(open_dump(r.dump).requests) for r in (plain, run) if r.dump is not None]
    assert pair_requests(*sides).pairs == []


def test_rejected_drafts_are_told_from_the_targets_rows(engines: Engines, compared: Any) -> None:
    asks = [Ask(repetitive(40, 7, i), 10) for i in range(2)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    run = engines.run("modes-ngram", asks=asks, speculative_config=ngram)
    dump = right(run, asks)
    drafted = int(run.metrics["drafted"])
    spaces = [rows for (_, _, space), rows in dump.rows.items() if space == "tokens"]
    assert drafted > 0
    assert sum(s.drafts or 0 for rows in spaces for s in rows.segments) == drafted
    result = compared(engines.run("modes-guessable", asks=asks, how="serial"), run)
    assert result.verdict == "pass"
    assert result.coverage["skipped"].get(REJECTED, 0) == drafted - int(run.metrics["accepted"])


def test_a_draft_model_is_told_from_the_target(engines: Engines) -> None:
    asks = [Ask(ONE, 6)]
    small = mode_models.shorter(engines.root / "models" / "qwen2-draft", "qwen2", 3)
    draft = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 2}
    run = engines.run("modes-draft", asks=asks, speculative_config=draft)
    dump = right(run, asks)
    assert run.metrics["drafted"] > 0
    assert [s.count for s in dump.skips if s.tap == "draft:Qwen2ForCausalLM"]
    drafts = {r.tap for r in dump.records if r.tap.startswith("draft:")}
    assert "draft:model.layers.0.mlp.down_proj" in drafts
    assert not [r for r in dump.records if r.tap in drafts and r.step is not None]
    calls = [r for r in dump.records if r.tap == "model.layers.3.mlp" and r.role == "output.0"]
    assert len(calls) == len({r.step for r in calls})


def test_several_answers_and_a_prompts_own_log_probabilities(engines: Engines, compared: Any) -> None:
    several: dict[str, Any] = {"n": 2, "temperature": 0.9, "seed": 3}
    asks = [Ask(ONE, 4, sampling=several), Ask(TWO, 4, sampling={"prompt_logprobs": 2}), Ask(THREE, 4)]
    run = engines.run("modes-answers", asks=asks)
    dump = right(run, asks)
    assert len(dump.requests) == 4
    plain = engines.run("modes-answers-plain", asks=[asks[0], replace(asks[1], sampling={}), asks[2]])
    assert compared(plain, run).verdict == "pass"


def test_a_prompt_of_embeddings_is_named_by_them(engines: Engines, compared: Any) -> None:
    asks = [Ask([], 3, embeds=(20, 128, 1)), Ask(ONE, 3), Ask([], 3, embeds=(20, 128, 2))]
    run = engines.run("modes-embeds", asks=asks, enable_prompt_embeds=True)
    dump = right(run, asks)
    assert len({r.prompt for r in dump.requests.values()} - {""}) == 3
    turned = engines.run("modes-embeds-turned", asks=asks[::-1], enable_prompt_embeds=True, how="serial")
    result = compared(run, turned)
    assert result.verdict == "pass"
    assert result.coverage["rows_compared"] == 20 + 24 + 20 + 3 * 2


def test_two_stages_of_a_pipeline_are_one_model(engines: Engines, compared: Any) -> None:
    asks = [Ask(ONE, 3), Ask(TWO, 3)]
    two = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    run = engines.run("modes-pipeline", asks=asks, host="tp2", **two)
    dump = right(run, asks)
    assert dump.ranks == (0, 1)
    layers = [{r.tap.split(".")[2] for r in dump.records if r.rank == rank and ".layers." in r.tap} for rank in (0, 1)]
    assert layers[0]
    assert layers[1]
    assert not layers[0] & layers[1]
    result = compared(engines.run("modes-one-stage", asks=asks), run)
    assert result.verdict == "pass", explain(result)
    assert result.coverage["rows_only_golden"] == result.coverage["rows_only_mine"] == 0
    assert {p.tap.split(".")[2] for p in result.pairs if ".layers." in p.tap} == layers[0] | layers[1]
    assert result.tokens["flipped"] == []
