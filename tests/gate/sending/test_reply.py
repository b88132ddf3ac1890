"""Answers of vLLM's three shapes become the same numbers; what is none is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_accprobe.gate.sending.client import Reply, completion, generated, scored

EMPTY = Reply("p", 0.0, 0.0)


def test_a_forced_token_outside_of_the_best_stands_last() -> None:
    place = {"token_id": 9, "logprob": -7.5, "rank": 80}
    best = [{"token_id": 9, "logprob": -7.5}, {"token_id": 4, "logprob": -0.5}, {"token_id": 3, "logprob": -1.5}]
    reply = generated(EMPTY, {
        "choices": [
            {"token_ids": [9], "finish_reason": "length", "logprobs": {"content": [place | {"top_logprobs": best}]}}
        ],
        "prompt_token_ids": [1, 2], "usage": {"prompt_tokens_details": {"cached_tokens": 16}},
    })  # fmt: skip
    assert (reply.prompt_token_ids, reply.token_ids, reply.logprobs, reply.cached) == ([1, 2], [9], [-7.5], 16)
    assert (reply.top, reply.margins) == ([([4, 3, 9], [-0.5, -1.5, -7.5])], [1.0])
    same = completion(EMPTY, {"choices": [{
        "token_ids": [9], "prompt_token_ids": [1, 2], "finish_reason": "length", "logprobs": {"token_logprobs": [-7.5],
        "top_logprobs": [{"token_id:9": -7.5, "token_id:4": -0.5, "token_id:3": -1.5}]},
    }], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}})  # fmt: skip
    assert same == reply


def test_a_prompt_that_was_scored() -> None:
    places = [None, {"5": {"logprob": -2.0, "rank": 3}, "8": {"logprob": -0.25}}, {"6": {"logprob": -0.125}}]
    answer = {"choices": [{"prompt_logprobs": places, "prompt_token_ids": [4, 5, 6]}]}
    reply = scored(EMPTY, answer, 1)
    assert (reply.prompt_token_ids, reply.token_ids, reply.logprobs) == ([4], [5, 6], [-2.0, -0.125])
    assert (reply.top, reply.margins) == ([([8, 5], [-0.25, -2.0]), ([6], [-0.125])], [1.75, None])
    assert scored(EMPTY, answer, 2).token_ids == [6]


@pytest.mark.parametrize("answer", [None, [], {}, {"choices": []}, {"choices": [{}]}, {"choices": [{"logprobs": None}]},
                                    {"choices": [{"prompt_logprobs": None}]}, math.nan])  # fmt: skip
def test_what_is_no_answer_is_refused(answer: Any) -> None:
    for read in (completion(EMPTY, answer), generated(EMPTY, answer), scored(EMPTY, answer, 1)):
        assert read.refused is not None
        assert read.token_ids is None
