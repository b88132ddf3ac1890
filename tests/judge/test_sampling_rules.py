"""What a request's parameters make of logits, on rows written by hand; the noise of vLLM's CPU sampler."""

from dataclasses import replace

import numpy as np
import pytest

from vllm_accprobe.dump.schema import GRAMMAR, GUMBEL, NAMED_TOKENS, SamplingParameters
from vllm_accprobe.judge import sampling_rules as rules
from vllm_accprobe.judge.sampling_rules import RIGHT, UNKNOWN, WRONG, LogitsRow, check

RAW = np.array([1.0, 4.0, 3.0, 2.0, -1.0, 0.5])
GREEDY = SamplingParameters(temperature=0.0)
DREW = "31,58,0,30,40,14,25,23"
"""Of vLLM 0.32 on a CPU, read from a dump: the noise of seeds 1 to 8."""


def row(asks, token, *, raw=RAW, left=None, prompt=(), output=(), draw=None, **more):
    best = None
    if left is not None:
        left = np.array(left, np.float64)
        ids = np.argsort(-left, kind="stable")[:3]
        best = left[ids], ids
    known = [None if t is None else np.array(t, np.int64) for t in (prompt, output)]
    return LogitsRow(asks, raw, best, token, *known, len(output or ()), draw=draw, **more)


def test_a_greedy_row_takes_the_largest_logit():
    assert check(row(GREEDY, 1)).token == RIGHT
    found = check(row(GREEDY, 2))
    assert (found.token, found.should, found.why_token) == (WRONG, 1, "greedy, and token 2 is 1 behind the best, 1")
    equal = np.array([1.0, 4.0, 4.0])
    assert {check(row(GREEDY, t, raw=equal)).token for t in (1, 2)} == {RIGHT}


def test_what_is_not_known_is_not_judged():
    assert check(row(None, 2)).why_token == rules.NO_PARAMETERS
    assert check(row(SamplingParameters(0.0, also=(NAMED_TOKENS,)), 2)).why_token == rules.FORCED
    grammar = check(row(SamplingParameters(0.0, also=(GRAMMAR,)), 2))
    assert (grammar.left, grammar.token) == (UNKNOWN, UNKNOWN)
    grammar = check(row(SamplingParameters(0.0, also=(GRAMMAR,)), 2, left=[-9, -9, 3, 2, -9, -9]))
    assert grammar.token == RIGHT  # the best of what was left, whoever left it
    no_past = check(row(SamplingParameters(0.0, repetition=2.0), 2, output=None))
    assert (no_past.token, no_past.why_token) == (
        UNKNOWN, "not all tokens that its request had generated are in the dump"
    )  # fmt: skip
    known = np.array([np.nan, 4.0, 3.0, np.nan, np.nan, np.nan])
    assert check(row(SamplingParameters(1.0, top_k=2), 2, raw=known)).why_token == rules.NO_LOGITS


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("asks", [GREEDY, SamplingParameters(1.0, top_k=2)])
def test_what_is_taken_of_a_models_nan_is_not_the_samplers_fault(asks, bad):
    one = np.where(np.arange(6) == 3, bad, RAW)
    assert rules.broken(one, None)
    assert not rules.broken(None, np.array([1.0, -np.inf]))
    for raw in (one, np.full(6, bad)):
        found = check(row(asks, 0, raw=raw, broken=rules.broken(raw)))
        assert (found.left, found.token, found.why_token) == (UNKNOWN, UNKNOWN, rules.NAN_LOGITS)


PENALISED = SamplingParameters(0.0, repetition=2.0, presence=0.25, frequency=0.5)


def test_penalties_by_hand():
    z, _ = rules.processed(row(PENALISED, None, prompt=[1, 4], output=[2, 2, 0]))
    assert z.tolist() == [1 / 2 - 0.75, 4 / 2, 3 / 2 - 1.25, 2.0, -2.0, 0.5]


@pytest.mark.parametrize(
    ("change", "how"),
    [
        ({}, ""),
        ({"output": []}, "as if nothing had been generated yet"),
        ({"output": [2, 2]}, "as without the last token that was generated"),
        ({"prompt": []}, "as if the prompt did not count"),
        ({"asks": GREEDY}, "as without penalties"),
        ({"asks": SamplingParameters(0.0, repetition=2.0, presence=0.25)}, "as without the frequency penalty"),
    ],
)
def test_wrong_penalties_are_named(change, how):
    past = {"prompt": [1, 4], "output": [2, 2, 0]}
    engine = row(change.get("asks", PENALISED), None, **(past | {k: v for k, v in change.items() if k != "asks"}))
    left = rules.processed(engine)[0].astype(np.float32)
    found = check(row(PENALISED, int(left.argmax()), left=left, **past))
    assert found.left == (WRONG if how else RIGHT)
    assert how in [said for _, said in found.ways] or not how
    assert found.processors == (("penalties",) if how else ())


def test_lists_by_hand():
    asks = SamplingParameters(
        0.0, bias=((5, 3.0),), allowed=(1, 2, 3, 5), min_tokens=3, stop=(1,), bad_words=((2,), (0, 4, 3), (4, 3, 5))
    )
    z, _ = rules.processed(row(asks, None, output=[0, 4]))
    assert np.isneginf(z).tolist() == [True, True, True, True, True, False]
    assert z[5] == 3.5
    z, _ = rules.processed(row(asks, None, output=[0, 4, 3]))  # enough tokens; and other words are forbidden
    assert np.isneginf(z).tolist() == [True, False, True, False, True, True]


def test_what_another_request_asks_for_is_told_from_an_unknown_cause():
    mine = row(PENALISED, None, prompt=[1, 4], output=[2, 2, 0])
    other = SamplingParameters(0.0, bias=((3, 4.0),), digest="o")
    both = replace(PENALISED, bias=other.bias)
    for engine, word, how in (
        (replace(mine, asks=both), "a logit bias", "with the logit bias of another request"),
        (replace(mine, prompt=np.array([1, 3])), "penalties", "as if another request's prompt were its own"),
        (replace(mine, output=np.array([1, 1])), "penalties", "as if other tokens had been seen"),
    ):
        left = rules.processed(engine)[0].astype(np.float32).astype(np.float64)
        ids = np.argsort(-left, kind="stable")[:4]
        # the words of the runner's own lists do not hide it
        masked = ("penalties",)
        seen = replace(mine, left=(left[ids], ids), masked=masked, others=((other, np.array([1, 3])),))
        found = check(seen)
        assert (found.left, found.processors) == (WRONG, (word,))
        assert how in [said for _, said in found.ways]
    odd = replace(mine, left=(np.array([9.0, 8.0]), np.array([0, 5])))
    assert check(odd).processors == ()
    assert check(odd).why_left.startswith("what reached it does not follow from the model's logits")


@pytest.mark.parametrize(
    ("asks", "word"),
    [
        (SamplingParameters(0.0, bias=((5, 9.0),)), "a logit bias"),
        (SamplingParameters(0.0, allowed=(2, 3)), "allowed token ids"),
        (SamplingParameters(0.0, bad_words=((1,),)), "bad words"),
        (SamplingParameters(0.0, min_tokens=2, stop=(1,)), "a minimum of tokens"),
    ],
)
def test_a_list_that_is_ignored_is_named_where_nobody_saw_what_was_left(asks, word):
    found = check(row(asks, 1))
    assert (found.left, found.processors) == (WRONG, (word,))
    assert ((word,), f"as without {word}") in found.ways
    assert check(row(asks, int(rules.processed(row(asks, None))[0].argmax()))).token == RIGHT


@pytest.mark.parametrize(
    ("asks", "kept"),
    [
        (SamplingParameters(1.0, top_k=2), [1, 2]),
        (SamplingParameters(1.0, top_p=0.6), [1]),
        (SamplingParameters(1.0, top_p=0.7), [1, 2]),
        (SamplingParameters(2.0, top_p=0.6), [1, 2]),
        (SamplingParameters(1.0, min_p=0.3), [1, 2]),
        (SamplingParameters(1.0, top_k=4, min_p=0.1), [1, 2, 3]),
    ],
)
def test_filters(asks, kept):
    for slack in (rules.SAMPLER_BORDER, -rules.SAMPLER_BORDER):
        assert np.flatnonzero(rules.kept(RAW, asks, slack)).tolist() == kept
    for token in range(len(RAW)):
        assert check(row(asks, token)).token == (RIGHT if token in kept else WRONG)


def test_what_a_runner_left_behind_temperature_and_filters():
    """V2's: random rows are divided by the temperature, and what is missing may have been filtered."""
    asks = SamplingParameters(2.0, top_k=2, bias=((5, 3.0),), digest="v2")
    left = np.array([2.0, 1.75, -np.inf]), np.array([1, 5, 0])
    found = check(replace(row(asks, 1), left=left, scaled=True))
    assert (found.left, found.token) == (RIGHT, RIGHT)
    left = np.array([2.0, 0.25, -np.inf]), np.array([1, 5, 0])
    found = check(replace(row(asks, 1), left=left, scaled=True))
    assert (found.left, found.processors) == (WRONG, ("a logit bias",))
    assert check(replace(row(asks, 1), left=left)).left == WRONG


def test_somebody_elses_filter_leaves_random_rows_open():
    asks = SamplingParameters(1.0, top_k=2)
    assert check(replace(row(asks, 4), filtered="MyFilter")).why_token == "what MyFilter filters is not in the dump"
    assert check(replace(row(GREEDY, 4), filtered="MyFilter")).token == WRONG


def test_logits_that_a_model_changes_behind_its_logits_processor():
    best = np.array([4.0, 3.0]), np.array([1, 2])
    assert rules.is_of(RAW, best)
    assert not rules.is_of(RAW, (np.array([4.0, 2.5]), np.array([1, 2])))
    assert not rules.is_of(RAW, (np.array([3.0, 2.0]), np.array([2, 3])))  # token 1 was forbidden
    assert rules.is_of(RAW, None)
    known = rules.of_best(best, None, 1)
    assert check(row(GREEDY, 1, raw=known)).token == RIGHT
    assert check(row(GREEDY, 2, raw=known)).token == WRONG
    assert check(row(GREEDY, 0, raw=known)).token == WRONG  # not even among the best
    assert check(row(replace(GREEDY, bias=((0, 5.0),)), 0, raw=known)).token == UNKNOWN


def test_equals_may_stand_in_any_order():
    equal = np.array([1.0, 3.0, 3.0, 3.0])
    asks = SamplingParameters(1.0, top_k=2)
    assert np.flatnonzero(rules.kept(equal, asks)).tolist() == [1, 2, 3]


def test_a_seed_names_the_token():
    draw = rules.draw_of(GUMBEL, DREW)
    assert draw is not None
    assert rules.draw_of(GUMBEL, "1" + DREW) is None  # another noise
    flat = np.zeros(64)
    asks = SamplingParameters(1.0, seed=3)
    first = [draw(flat, 3, n) for n in range(2)]
    assert first[1] == 0
    assert check(row(asks, first[0], raw=flat, draw=draw)).drawn
    found = check(row(asks, first[1], raw=flat, draw=draw))
    assert found.token == WRONG
    assert found.why_token == f"draw 1 of seed 3 by temperature 1 is token {first[0]}, not 0"
    assert check(row(asks, first[1], raw=flat, output=[7], draw=draw)).drawn
    assert check(row(asks, first[1], raw=flat)).token == RIGHT  # no noise known: it may be taken


def test_a_draw_that_rounding_decides_is_left_open():
    draw = rules.draw_of(GUMBEL, DREW)
    x = -rules._gumbel(rules._number(5, 0, 2), 64)  # all sums are equal
    assert draw(x, 5, 0) is None
    assert check(row(SamplingParameters(1.0, seed=5), 9, raw=x, draw=draw)).token == RIGHT
