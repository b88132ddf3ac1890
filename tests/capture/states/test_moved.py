"""Whether a step must have changed a state, by its token ids."""

from __future__ import annotations

import numpy as np

from vllm_accprobe.capture.states.checks import must_change, token_tails
from vllm_accprobe.capture.states.schedule import ScheduledRequest


def held(prompt: list[int]) -> ScheduledRequest:
    return ScheduledRequest("a", 0, prompt, [], [])


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_other_tokens_must_change_a_state() -> None:
    one = held([1, 2, 3, 4, 5, 6, 7])
    token_tails([(one, 0, 5)], ids(1, 2, 3, 4, 5))
    assert must_change(token_tails([(one, 5, 2)], ids(6, 7)), 0, 3)
    assert must_change(token_tails([(one, 7, 1)], ids(8)), 0, 3)  # a generated one


def test_text_that_repeats_itself_proves_nothing() -> None:
    one = held([5] * 8)
    token_tails([(one, 0, 6)], ids(*[5] * 6))
    assert not must_change(token_tails([(one, 6, 2)], ids(5, 5)), 0, 3)
    period = held([1, 2] * 6)
    token_tails([(period, 0, 8)], ids(*[1, 2] * 4))
    assert not must_change(token_tails([(period, 8, 2)], ids(1, 2)), 0, 3)
    assert must_change(token_tails([(period, 10, 1)], ids(1)), 0, 3)


def test_what_is_not_known_proves_nothing() -> None:
    one = held([1, 2, 3])
    assert not must_change(token_tails([(one, 0, 3)], ids(1, 2, 3)), 0, 3)  # its first rows
    assert must_change(token_tails([(held([1, 2, 3, 4, 5]), 3, 2)], ids(4, 5)), 0, 3)  # resumed within its prompt
    assert token_tails([(held([1, 2, 3]), 9, 1)], ids(4)) == {}  # resumed behind it
    assert not must_change({}, 0, 3)
    assert not must_change(token_tails([(one, 3, 1)], ids(9)), 0, 0)
