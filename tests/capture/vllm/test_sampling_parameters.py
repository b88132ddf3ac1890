"""What is copied of a request's sampling parameters."""

from types import SimpleNamespace as Plain

import pytest

from vllm_accprobe.capture.vllm.sampling import KEY, LISTED, NamedTokens, named_tokens, sampling_of
from vllm_accprobe.dump.schema import SamplingParameters
from vllm_accprobe.gate.sending import client


def asked(prompt=(3, 4, 3), **values):
    params = pytest.importorskip("vllm.sampling_params")  # not while tests are collected: it takes seconds
    found = sampling_of(Plain(sampling_params=params.SamplingParams(**values)), prompt)
    assert found is not None
    return found


ALL = {
    "temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.5,
    "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {9: 1.5, 2: -1}, "allowed_token_ids": [5, 4],
    "min_tokens": 2, "stop_token_ids": [8],
}  # fmt: skip


def test_all_that_decides_is_copied():
    found = asked(**ALL)
    digest = found.digest
    assert found == SamplingParameters(
        0.7, 0.8, 5, 0.1, 3, 1.5, 0.2, 0.3, ((2, -1.0), (9, 1.5)), (4, 5), 2, (8,), (), (3, 4), (), digest
    )
    assert found.processors == ("a logit bias", "a minimum of tokens", "allowed token ids", "penalties")
    assert asked(**ALL).digest == digest
    for name in ("temperature", "seed", "top_k"):
        assert asked(**(ALL | {name: ALL[name] * 2})).digest != digest


def test_what_is_not_needed_is_not_copied():
    found = asked(temperature=0.0, max_tokens=4, stop_token_ids=[8])
    assert found == SamplingParameters(0.0, digest=found.digest)
    assert found.greedy
    assert found.processors == ()


def test_what_is_too_long_or_not_written_down_is_named():
    found = asked(allowed_token_ids=list(range(LISTED + 1)), extra_args={"accprobe_along": "1 2"})
    assert (found.allowed, found.also) == (None, ("allowed token ids", "tokens that the client names"))
    assert found.processors == ("allowed token ids",)
    other = asked(allowed_token_ids=list(range(1, LISTED + 2)), extra_args={"accprobe_along": "1"})
    assert found.digest != other.digest


def test_a_request_without_them_has_none():
    assert sampling_of(Plain(sampling_params=None), [1]) is None
    assert sampling_of(Plain(), [1]) is None
    assert sampling_of(Plain(sampling_params=Plain(temperature="hot")), [1]) is None


def test_the_token_after_so_many_computed_ones() -> None:
    named = named_tokens({KEY: "7 90000 3"}, prompt=10)
    assert named == NamedTokens(10, (7, 90000, 3), 90000)
    assert [named.at(n) for n in (0, 4, 9, 10, 11, 12, 13, 99)] == [-1, -1, -1, 7, 90000, 3, -1, -1]
    assert client.KEY == KEY  # the client says the same word


def test_who_asks_for_nothing() -> None:
    assert named_tokens(None, 3) is named_tokens({}, 3) is named_tokens({"other": "1 2"}, 3) is None


@pytest.mark.parametrize("bad", ["", "1,2", " 1", "1 ", "1  2", "-1", "x", [1, 2], 7, "9" * 10, "1 2\n"])
def test_what_is_no_list_of_ids_is_not_quoted(bad: object) -> None:
    with pytest.raises(ValueError) as e:
        named_tokens({KEY: bad}, 3)
    assert str(e.value) == "accprobe_along is not a text of token ids with a blank between two"
