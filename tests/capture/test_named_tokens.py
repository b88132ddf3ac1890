"""What a request asks for is read as it is meant, or not at all."""

from __future__ import annotations

import pytest

from vllm_accprobe.capture.vllm.sampling import KEY, NamedTokens, named_tokens
from vllm_accprobe.gate.sending import client


def test_the_token_after_so_many_computed_ones() -> None:
    named = named_tokens({KEY: "7 90000 3"}, prompt=10)
    assert named == NamedTokens(10, (7, 90000, 3), 90000)
    assert [named.at(n) for n in (0, 4, 9, 10, 11, 12, 13, 99)] == [-1, -1, -1, 7, 90000, 3, -1, -1]


def test_who_asks_for_nothing() -> None:
    assert named_tokens(None, 3) is named_tokens({}, 3) is named_tokens({"other": "1 2"}, 3) is None


@pytest.mark.parametrize("bad", ["", "1,2", " 1", "1 ", "1  2", "-1", "x", [1, 2], 7, "9" * 10, "1 2\n"])
def test_what_is_no_list_of_ids_is_not_quoted(bad: object) -> None:
    with pytest.raises(ValueError) as e:
        named_tokens({KEY: bad}, 3)
    assert str(e.value) == "accprobe_along is not a text of token ids with a blank between two"


def test_eight_thousand_of_them() -> None:
    ids = tuple(range(100_000, 108_000))
    named = named_tokens({KEY: " ".join(map(str, ids))}, 1)
    assert named is not None
    assert named.ids == ids


def test_the_client_says_the_same_word() -> None:
    assert client.KEY == KEY
