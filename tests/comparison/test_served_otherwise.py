"""The same requests served in another way: every row is found and nothing is called an error."""

import numpy as np
import pytest
from synthetic_model import PROMPTS, Tiny, capture

from vllm_accprobe.align.tokens import AFTER_FLIP, SUPERSEDED
from vllm_accprobe.comparison.engine import compare

ROWS = sum(len(p) + 3 for p in PROMPTS.values())  # the prompt, and all generated tokens but the last


def assert_all_equal(result, rows=ROWS):
    assert result.verdict == "pass", [p for p in result.pairs if p.status == "fail"][:3]
    assert (result.origins, result.first_divergence, result.notes) == ([], None, [])
    assert result.coverage["rows_compared"] == rows
    assert {p.max_abs_err for p in result.pairs if p.status == "pass"} == {0.0}


@pytest.mark.parametrize("how", [{}, {"chunk": 1}, {"chunk": 4}, {"chunk": 3, "together": False}])
def test_batches_and_chunks(golden, how):
    result = compare(golden, capture(**how))
    assert_all_equal(result)
    assert (result.coverage["rows_only_golden"], result.coverage["rows_only_mine"]) == (0, 0)
    assert result.tokens == {"compared": 12, "flipped": []}


def test_equal_tensors_are_not_read(golden):
    mine = capture(together=False)
    golden.reads = mine.reads = 0
    result = compare(golden, mine)
    assert all(p.identical for p in result.pairs)
    sampled = sum(r.tap == "sampler" and r.role == "output.token" for r in mine.records)
    of_model = sum(r.tap == "<root>" and r.role in ("input.input_ids", "input.positions") for r in mine.records)
    outputs = {(r.step, r.hash) for r in mine.records if (r.tap, r.role) == ("<root>", "output.0")}
    chosen = [r for r in mine.records if (r.tap, r.role) == ("logits_processor", "input.hidden_states")]
    of_logits = sum(1 + r.shape[0] for r in chosen if (r.step, r.hash) not in outputs)
    # what runner_inputs.py checks without a golden
    assert (golden.reads, mine.reads) == (sampled + of_model + of_logits,) * 2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("swap", [False, True])
def test_any_number_of_ranks(golden, ranks, swap):
    many = capture(tp=ranks, chunk=5)  # with 4 ranks the two KV heads are held twice
    result = compare(many, golden) if swap else compare(golden, many)
    assert_all_equal(result)
    assert result.coverage["skipped"] == {"ids of the best logits (used for flipped tokens only)": 12 if swap else 4}


def test_preempted_and_computed_again(golden):
    tiny = Tiny()
    for name, prompt in PROMPTS.items():
        tiny.request(name, prompt)
    tiny.finish(tokens=2)
    tiny.preempt("a")
    mine = tiny.finish(tokens=4)
    result = compare(golden, mine)
    assert_all_equal(result)
    assert result.coverage["skipped"][SUPERSEDED] == 11  # a's ten prompt rows and one decoded row, computed twice


def test_rejected_drafts_do_not_count():
    plain = capture(prompts={"a": PROMPTS["a"]}, tokens=6)
    ids = [int(plain.read(r)[0]) for r in plain.records if r.tap == "sampler" and r.role == "output.token"]
    tiny = Tiny()
    tiny.request("a", PROMPTS["a"])
    tiny.step([("a", 10, [])])
    # the first draft is right, the second is wrong, the third is what will come but stands in a wrong context
    tiny.step([("a", 1, [ids[1], (ids[2] + 1) % 64, ids[3]])])
    assert tiny.sequences["a"].ids[10:] == ids[:3]
    tiny.step([("a", 1, [])])
    tiny.step([("a", 1, [])])
    tiny.step([("a", 1, [])])
    result = compare(plain, tiny.dump)
    assert_all_equal(result, rows=15)
    assert result.coverage["skipped"][SUPERSEDED] == 2
    assert result.tokens == {"compared": 6, "flipped": []}


def test_a_prefix_from_the_cache_is_missing_not_wrong():
    shared = {"a": [4, 4, 2, 8, 1, 9], "b": [4, 4, 2, 8, 30, 31]}
    golden = capture(prompts=shared, together=False)
    tiny = Tiny()
    for name, prompt in shared.items():
        tiny.request(name, prompt)
    for _ in range(4):
        tiny.step([("a", len(tiny.sequences["a"].ids) - tiny.sequences["a"].computed, [])])
    tiny.share("b", "a", 4)
    mine = tiny.finish()
    result = compare(golden, mine)
    assert_all_equal(result, rows=9 + 5)
    assert (result.coverage["rows_only_golden"], result.coverage["rows_only_mine"]) == (4, 0)


def test_other_ids_and_another_order_pair_by_prompt(golden):
    mine = capture(prompts={"x": PROMPTS["c"], "y": PROMPTS["a"], "z": PROMPTS["b"]})
    result = compare(golden, mine)
    assert_all_equal(result)
    assert result.plan[0] == "requests: 3 paired by prompt, images and ordinal"


def test_different_prompts_under_one_id_are_said_first(golden):
    mine = capture(prompts=PROMPTS | {"b": [9, 9, 9]})
    result = compare(golden, mine)
    assert result.notes[0] == "request 'b' has different prompt tokens (6 and 3): not compared"
    assert result.coverage["rows_compared"] == ROWS - 9
    assert result.verdict == "pass"


def test_after_a_flip_rows_are_counted_not_compared(golden):
    mine = capture(sampler=lambda best, at: np.where(at == 10, (best + 1) % 64, best))
    result = compare(golden, mine)
    assert result.coverage["skipped"][AFTER_FLIP] == 2 * (13 - 11) + 2 * (11 - 11)
    assert result.coverage["rows_compared"] == ROWS - 2


def test_a_run_that_ended_early_says_so(golden) -> None:
    """The server died after some steps: what there is agrees, and the report says that more was due."""
    mine = capture(together=False)
    last = max(r.step for r in mine.records if r.step is not None)
    mine.records = [r for r in mine.records if r.step != last]
    mine.rows = {at: rows for at, rows in mine.rows.items() if at[1] != last}
    result = compare(golden, mine)
    assert result.verdict == "pass"
    assert any(n.endswith("mine's run ended early, or other steps were captured") for n in result.notes), result.notes
