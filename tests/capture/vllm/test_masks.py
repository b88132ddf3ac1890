"""What changes logits before sampling, read from runners of both generations. Real ones: tests/e2e."""

from types import SimpleNamespace as Plain
from typing import Any, ClassVar

import numpy as np
import pytest
import xxhash

pytest.importorskip("torch")

from vllm_accprobe.capture.vllm import batch
from vllm_accprobe.capture.vllm.batch import BAD_WORDS, BIAS, BUDGET, GRAMMAR, PENALTIES, TRACE, grammar_of, masks_of

NAMES = ["a", "b", "c"]
ROWS = np.arange(6, dtype=np.int32).reshape(2, 3)


def test_a_grammars_rows_are_known_again_by_their_hash() -> None:
    one_row_each = Plain(structured_output_request_ids=["b", "a"], grammar_bitmask=ROWS)
    digests = [xxhash.xxh3_128_hexdigest(row.tobytes()) for row in ROWS]
    assert grammar_of(["hidden states", None, one_row_each]) == {"b": digests[0], "a": digests[1]}
    # a dict by request (0.11), and more rows than requests (drafts): who has which row is not told
    assert grammar_of([Plain(structured_output_request_ids={"b": 1}, grammar_bitmask=ROWS)]) == {"b": None}
    assert grammar_of([Plain(structured_output_request_ids=["b"], grammar_bitmask=ROWS)]) == {"b": None}
    assert grammar_of([None, Plain(structured_output_request_ids=[], grammar_bitmask=None)]) == {}


class Own:
    """Somebody's logits processor."""


class LogitBiasLogitsProcessor:
    biases: ClassVar[Any] = {2: {5: 1.0}}


def older(**other: Any) -> Plain:
    metadata = Plain(bad_words_token_ids={1: [[3]]}, logitsprocs=Plain(non_argmax_invariant=()))
    metadata.__dict__.update(other)
    return Plain(input_batch=Plain(sampling_metadata=metadata, frequency_penalties_reqs={"c", "gone"}))


def test_the_older_runner_has_sets_of_ids_and_dicts_of_rows() -> None:
    assert masks_of(older(), None, NAMES, {"a": None}) == {"a": (GRAMMAR,), "b": (BAD_WORDS,), "c": (PENALTIES,)}
    nothing = Plain(input_batch=Plain(sampling_metadata=Plain()))
    assert masks_of(nothing, None, NAMES, {}) == {}
    assert masks_of(Plain(), None, NAMES, {}) == {}


def test_somebody_elses_processor_may_touch_any_row() -> None:
    runner = older(logitsprocs=Plain(non_argmax_invariant=(Own(), LogitBiasLogitsProcessor())))
    found = masks_of(runner, None, NAMES, {})
    assert found["a"] == ("logits processor Own",)
    assert found["c"] == (BIAS, "logits processor Own", PENALTIES)
    holder = Plain(has_tracked_requests=lambda: True)
    assert masks_of(older(thinking_budget_state_holder=holder), None, NAMES, {})["a"] == (BUDGET,)


def test_the_newer_runner_has_arrays_by_place() -> None:
    """Row 0 is the request of state 2, and so on; in later releases the same objects stand in a list."""
    penalties = Plain(use_penalty=np.array([False, True, False]))
    bias = Plain(
        num_allowed_token_ids=Plain(np=np.zeros(3)), num_logit_bias=Plain(np=np.array([0, 0, 4])),
        num_stop_token_ids=Plain(np=np.zeros(3)),
    )  # fmt: skip
    prepared = Plain(idx_mapping_np=np.array([2, 1, 0]))
    runner = Plain(sampler=Plain(penalties_state=penalties, logits_processors=[bias, penalties]))
    assert masks_of(runner, prepared, NAMES, {"c": None}) == {"a": (BIAS,), "b": (PENALTIES,), "c": (GRAMMAR,)}
    runner.sampler.trace_replay_state = object()
    assert masks_of(runner, prepared, NAMES, {})["c"] == (TRACE,)


def test_a_runner_that_keeps_no_states_tells_nothing() -> None:
    """V2 of 0.13 and 0.14: sample/sampler.py has no states; 0.15 has two of the later three, and no bad words."""

    def newer(**states: Any) -> Plain:
        return Plain(prepare_inputs=lambda: None, sampler=Plain(logprobs_mode="raw_logprobs", **states))

    assert not batch.reports_masks(newer())
    assert not batch.reports_masks(newer(logit_bias_state=1))  # half of them is not all
    assert batch.reports_masks(newer(penalties_state=1, logit_bias_state=1))
    assert batch.reports_masks(newer(penalties_state=1, logits_processors=[]))
    assert batch.reports_masks(older())
    assert not batch.reports_masks(Plain(input_batch=Plain(req_ids=[])))
    assert not batch.reports_masks(Plain())
