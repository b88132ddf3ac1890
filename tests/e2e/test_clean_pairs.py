"""Honest differences must not be called errors: the same prompts, served in another way, pass.

Each pair is two captures of real engines. Besides the verdict, each test shows that what it is about did happen
(requests were chunked, preempted, speculated ...) and that every row was found in both dumps. By default: batches and
chunks, hits, ranks, the runner, the dtype, latent attention; the others with ``--all``. And a fault that shows among
such differences.
"""

from typing import Any

import pytest
from support.captures import FIVE, VISION, Engines, explain
from support.engine import Ask, Run
from support.prompts import prompt, repetitive

from lab.cases import CASES

pytestmark = pytest.mark.engine

LONG = [Ask(a.ids, 16) for a in FIVE]
"""Twelve blocks of 32, of which the engine that preempts has eight."""
GUESSABLE = [Ask(repetitive(60, 9, i), 24) for i in range(3)]
SHARED_START = [Ask([*prompt(64, 9), *prompt(10, i)], 8) for i in range(3)]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
FLOAT32: dict[str, Any] = {"how": "serial", "dtype": "float32"}


def assert_clean(result: Any, *, rows_missing: bool = False) -> None:
    assert result.verdict == "pass", explain(result)
    coverage = result.coverage
    assert coverage["taps_only_golden"] == [], explain(result)
    assert coverage["taps_only_mine"] == [], explain(result)
    assert coverage["rows_compared"] > 0
    if not rows_missing:
        assert (coverage["rows_only_golden"], coverage["rows_only_mine"]) == (0, 0), explain(result)


def positions(run: Run, tap: str) -> dict[str, set[int]]:
    """prompt hash → positions whose row is stored for the first input-less output of ``tap``, read from the dump."""
    from vllm_accprobe.dump.reader import open_dump

    dump = open_dump(run.dump)
    found: dict[str, set[int]] = {}
    for record in dump.records:
        if record.tap != tap or not record.role.startswith("output") or record.rows is None:
            continue
        for segment in dump.rows[record.rank, record.step, record.rows].segments:
            request = dump.requests[record.rank, segment.req]
            found.setdefault(request.prompt, set()).update(range(segment.pos, segment.pos + segment.n))
    return found


def everything(asks: list[Ask]) -> dict[str, set[int]]:
    """What a complete capture holds: the prompt's rows, and one for each generated token but the last."""
    from vllm_accprobe.dump.schema import hash_tokens

    return {hash_tokens(a.ids): set(range(len(a.ids) + a.max_tokens - 1)) for a in asks}


def test_chunked_and_batched_against_one_at_a_time(each_engines: Engines, compared: Any) -> None:
    golden = each_engines.serial()
    mine = each_engines.run("chunk16", how="together", max_num_batched_tokens=16)
    assert golden.metrics["widest"] == 1
    assert mine.metrics["widest"] == 5
    assert mine.metrics["steps"] > 221 / 16  # 221 prompt tokens, at most 16 a step
    assert mine.tokens == golden.tokens
    for run in (golden, mine):
        assert positions(run, "model.layers.1.mlp.down_proj") == everything(FIVE)
    result = compared(golden, mine)
    assert_clean(result)
    assert result.tokens["compared"] == 5 * 8
    assert result.tokens["flipped"] == []


@pytest.mark.extra("batches: test_chunked_and_batched_against_one_at_a_time")
def test_requests_that_join_while_others_decode(each_engines: Engines, compared: Any) -> None:
    mine = each_engines.run("staggered", how="staggered", max_num_batched_tokens=32)
    assert_clean(compared(each_engines.serial(), mine))


def test_prefix_cache_hits(each_engines: Engines, compared: Any) -> None:
    golden = each_engines.run("shared-start", asks=SHARED_START, how="serial")
    mine = each_engines.run("prefix", asks=SHARED_START, how="serial", enable_prefix_caching=True, block_size=32)
    assert mine.metrics["prefix_hits"] == 128  # two blocks of 32, for the second and for the third request
    result = compared(golden, mine)
    assert_clean(result, rows_missing=True)
    assert result.coverage["rows_only_golden"] > 0  # what came from the cache was not computed
    assert result.coverage["rows_only_mine"] == 0


@pytest.mark.extra("drafts: test_modes_engine.py")
def test_ngram_speculation(each_engines: Engines, compared: Any) -> None:
    golden = each_engines.run("guessable", asks=GUESSABLE)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    mine = each_engines.run("ngram", asks=GUESSABLE, speculative_config=config)
    assert mine.metrics["accepted"] > 0
    assert mine.metrics["drafted"] > mine.metrics["accepted"]  # some guesses were wrong: their rows must not count
    assert_clean(compared(golden, mine), rows_missing=True)


@pytest.mark.extra("a schedule: the first; preempted and resumed: test_states_engine.py")
def test_forced_preemption(each_engines: Engines, compared: Any) -> None:
    golden = each_engines.run("long", asks=LONG, how="serial")
    mine = each_engines.run("preempted", asks=LONG, num_gpu_blocks_override=9, block_size=32, max_model_len=256)
    assert mine.metrics["preemptions"] > 0
    assert positions(mine, "model.layers.1.mlp.down_proj") == everything(LONG)
    assert_clean(compared(golden, mine))


def test_two_ranks_against_one(each_engines: Engines, compared: Any) -> None:
    mine = each_engines.run("tp2", host="tp2", **TWO_RANKS)
    result = compared(each_engines.serial(), mine)
    assert result.verdict == "pass", explain(result)
    assert result.coverage["rows_compared"] > 0
    # And with the sides changed: shards are merged on either.
    back = compared(mine, each_engines.serial())
    assert back.verdict == "pass", explain(back)


@pytest.mark.extra("ranks: test_two_ranks_against_one; the model: test_operator_capture.py")
def test_latent_attention_on_two_ranks(each_engines: Engines, compared: Any) -> None:
    """A rotary head is as wide as a slice of o_proj's input: layouts that go by size alone are wrong there."""
    mine = each_engines.run("mla-tp2", "deepseek-v2", host="tp2", **TWO_RANKS)
    result = compared(each_engines.serial("deepseek-v2"), mine)
    assert result.verdict == "pass", explain(result)
    assert any(p.tap.endswith("mla_attn.rotary_emb") and p.status == "pass" for p in result.pairs)


def test_v1_against_v2_runner(each_engines: Engines, compared: Any) -> None:
    mine = each_engines.run("v2", host="v2")
    assert_clean(compared(each_engines.serial(), mine))


def test_float32_golden_against_bfloat16(each_engines: Engines, compared: Any) -> None:
    golden = each_engines.run("float32", **FLOAT32)
    result = compared(golden, each_engines.serial())
    assert result.verdict == "pass", explain(result)
    assert {p.dtype_golden for p in result.pairs if p.status == "pass" and p.role.startswith("output")} >= {"float32"}


@pytest.mark.parametrize("model", [
    pytest.param("llama", marks=pytest.mark.extra("test_transformers_golden.py")),
    pytest.param("qwen2-moe", marks=pytest.mark.extra("test_graph_taps.py")), "deepseek-v2",
])  # fmt: skip
def test_other_architectures_chunked(each_engines: Engines, compared: Any, model: str) -> None:
    mine = each_engines.run(f"{model}-chunk", model, how="together", max_num_batched_tokens=24)
    result = compared(each_engines.serial(model), mine)
    assert_clean(result)
    taps = {p.tap for p in result.pairs}
    wanted = {"llama": "self_attn.attn", "qwen2-moe": "mlp.experts", "deepseek-v2": "self_attn.mla_attn"}[model]
    assert any(wanted in tap for tap in taps), sorted(taps)


def test_a_fault_shows_against_two_ranks_and_another_dtype(each_engines: Engines, compared: Any) -> None:
    """One of the laboratory's, whose golden served as in two of the pairs above."""
    (case,) = [c for c in CASES if c.name == "down-weight-row"]
    mine = each_engines.run(f"fault-{case.name}", fault=case.faults, max_num_batched_tokens=48)
    for golden in (each_engines.run("tp2", host="tp2", **TWO_RANKS), each_engines.run("float32", **FLOAT32)):
        result = compared(golden, mine)
        assert result.verdict == "fail", explain(result)
        assert result.origins[0]["module"] == case.expected[0], explain(result)


@pytest.mark.extra("pictures: test_golden_engine.py")
def test_vision_language(each_engines: Engines, compared: Any) -> None:
    golden = each_engines.serial("qwen2.5-vl", VISION)
    mine = each_engines.run("vl-together", "qwen2.5-vl", VISION)
    result = compared(golden, mine)
    assert_clean(result)
    patches = [p for p in result.pairs if p.tap == "visual.blocks.1" and p.role.startswith("output")]
    assert sum(p.rows or 0 for p in patches) == 64 + 60  # 8 x 8 and 6 x 10 patches
    merged = [p for p in result.pairs if p.tap == "visual.merger" and p.role.startswith("output")]
    assert sum(p.rows or 0 for p in merged) == 16 + 15
