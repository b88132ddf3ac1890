"""Whose fault a flipped token is, on logits written by hand."""

import numpy as np
import pytest

from vllm_accprobe.align.tokens import Flip
from vllm_accprobe.judge.near_ties import (
    MASKED,
    NEAR_TIE,
    PROCESSED,
    RANDOM,
    SAMPLED,
    UNKNOWN,
    UPSTREAM,
    Best,
    Masking,
    RequestedRow,
    judge_flip,
)


def best(logits, ids):
    return Best(np.array(logits, np.float64), np.array(ids))


@pytest.mark.parametrize(
    ("golden", "mine", "tokens", "agree", "why"),
    [
        (best([2.0, 1.9], [5, 6]), best([2.0, 1.9], [6, 5]), (5, 6), True, NEAR_TIE),
        (best([2.0, 1.9], [5, 6]), best([9.0, 1.9], [6, 5]), (5, 6), False, UPSTREAM),
        (best([2.0, 1.0], [5, 6]), best([2.0, 1.0], [5, 6]), (5, 6), True, SAMPLED),
        (best([2.0, 2.0], [5, 6]), best([2.0, 2.0], [5, 6]), (5, 6), True, NEAR_TIE),  # an exact tie, either may win
        (best([2.0, 1.0], [5, 6]), best([2.0, 1.0], [5, 6]), (6, 5), True, RANDOM),
        (None, best([2.0, 1.0], [5, 6]), (5, 6), None, UNKNOWN),
        (None, None, (5, 6), False, UPSTREAM),
    ],
)
def test_whose_fault_a_flip_is(golden, mine, tokens, agree, why):
    assert judge_flip(golden, mine, Flip(0, 1, 3, 2, *tokens), agree) == why


GRAMMAR = ("a grammar",)
NONE_LEFT = best([1.5, 0.5], [7, 8])
"""A row whose best logits, tokens 5 and 6, are forbidden."""


@pytest.mark.parametrize(
    ("masks", "tokens", "why"),
    [
        # 2.0 and 1.0 for the tokens 5 and 6 on both sides; what was left where something masked
        ((Masking(()), Masking(GRAMMAR, None, NONE_LEFT)), (5, 7), MASKED),
        ((Masking(GRAMMAR, None, NONE_LEFT), Masking(())), (7, 5), MASKED),
        ((Masking(None), Masking(GRAMMAR, None, NONE_LEFT)), (5, 7), MASKED),  # an older golden says nothing
        ((Masking(()), Masking(GRAMMAR, None, NONE_LEFT)), (5, 8), SAMPLED),  # not the best of what was left
        ((Masking(()), Masking(GRAMMAR, None, NONE_LEFT)), (6, 7), RANDOM),
        ((Masking(()), Masking(GRAMMAR)), (5, 7), MASKED),  # drafts: what was left is not recorded
        ((Masking(GRAMMAR), Masking(GRAMMAR)), (7, 8), UNKNOWN),
        ((Masking(GRAMMAR, "a", NONE_LEFT), Masking(GRAMMAR, "a", NONE_LEFT)), (7, 8), SAMPLED),
        ((Masking(GRAMMAR, "a", NONE_LEFT), Masking(GRAMMAR, "a", best([0.5, 0.1], [8, 9]))), (7, 8), SAMPLED),
        ((Masking(GRAMMAR, "a", NONE_LEFT), Masking(GRAMMAR, "b", best([0.5, 0.1], [8, 9]))), (7, 8), MASKED),
        ((Masking(GRAMMAR, "a", best([1.5, 1.497], [7, 8])), Masking(GRAMMAR, "a", best([1.5, 1.498], [8, 7]))),
         (7, 8), NEAR_TIE),
        ((Masking(("penalties",), None, best([1.5, 0.2], [7, 8])),
          Masking(("penalties",), None, best([1.5, 0.2], [8, 7]))), (7, 8), MASKED),  # penalties of another size
        ((Masking(()), Masking(())), (5, 6), SAMPLED),
    ],
)  # fmt: skip
def test_whose_fault_a_flip_of_masked_logits_is(masks, tokens, why):
    plain = best([2.0, 1.0], [5, 6])
    assert judge_flip(plain, plain, Flip(0, 1, 3, 2, *tokens), True, masks) == why
    assert judge_flip(plain, plain, Flip(0, 1, 3, 2, *tokens), False, masks) == UPSTREAM


def test_margin():
    assert best([2.5, 1.0], [1, 2]).margin == 1.5
    assert best([2.5], [1]).margin is None


def test_one_sides_nan_is_an_error_in_front_of_the_sampler():
    nan = best([np.nan, np.nan], [0, 1])
    right = best([3.0, 1.0], [7, 4])
    assert judge_flip(right, nan, Flip(0, 1, 3, 2, 7, 0), None) == UPSTREAM
    assert judge_flip(nan, right, Flip(0, 1, 3, 2, 0, 7), None) == UPSTREAM


@pytest.mark.parametrize(
    ("untouched", "words"),
    [((False, True), "mine's are as the model gave them"), ((False, False), "golden's processors left others"),
     ((True, True), "golden's processors left others"), ((None, True), "golden's processors left others")],
)  # fmt: skip
def test_a_mask_that_was_left_out_is_said(untouched: tuple[bool | None, bool | None], words: str) -> None:
    row = RequestedRow(same_parameters=True, same_best=True, same_left=False, untouched=untouched)
    assert row.verdict() == PROCESSED
    assert words in row.sentence(PROCESSED)[1]
